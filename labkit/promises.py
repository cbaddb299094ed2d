"""What free text promises of precision: which type it names, what it excludes, what it cuts, what it grants."""

from __future__ import annotations

import re
from collections.abc import Sequence

_TYPES = (
    (r"\b(tf32|tensorfloat-?32)\b", "tf32"),
    (r"\b(bf16|bfloat16)\b", "bfloat16"),
    (r"\b(fp16|float16|f16|half)\b", "float16"),
    (r"e4m3", "float8_e4m3fn"),
    (r"e5m2", "float8_e5m2"),
    (r"\b(fp64|float64|f64|double)\b", "float64"),
    (r"\b(fp32|float32|f32|single)\b", "float32"),
    (r"\b(u?int(4|8|16|32|64)|bool)\b", "integer"),
)
_NARROW = r"(bf16|bfloat16|fp16|float16|f16|half)"
_DENIED = re.compile(
    rf"\(?\b(no|not|never|without|non)[ -]*(tf32|{_NARROW})\b"
    r"|(?<![a-z0-9])tf32[ :=]*(is )?(off|disabled|not allowed|false)\b\)?"
)
"""A text that names a narrow type to exclude it."""
_FLOAT64 = re.compile(r"\s*(float64|fp64|double)\s*", re.IGNORECASE)

_SINGLE = re.compile(r"fp32|float32|f32|\bsingle\b")
_ACCUMULATED = re.compile(r"(fp32|float32|f32|single)[ -]acc\w*")
"""That sums are kept in float32 says nothing of what is between a step's other operations."""
_ELSEWHERE = re.compile(r"(fp32|float32|f32|single)[ -](stat|master|param|weight|optim|moment)\w*")
"""What is in float32 without being what is computed."""
_NARROW_SUMS = re.compile(r"(bf16|bfloat16|fp16|float16)[ -]accum")
_EAGER = re.compile(r"eager|\b(every|each) (\w+ )?op")
_ULPS = re.compile(r"(\d+) ?ulp")

_FLOAT8_FACTORS = re.compile(
    r"(?:operands|inputs|factors)(?: are)?(?: (?:in|cast to|rounded to|converted to))? (?:fp8 |float8 )?\(?(e4m3|e5m2)"
    r"|(e4m3|e5m2)[ -](?:inputs|operands|factors|matmul|gemm)"
)
"""Texts that cut a product's factors to 8 bits."""

_UNMULTIPLIED = re.compile(rf"{_NARROW}[ -](grad|moment|optim|state|comm|all.?reduce)\w*")
"""What is in 16 bits without being a factor of the products here."""

_QUANTISED = re.compile(r"(?:quanti[sz]|convert)\w*[^.;,]*? to (?:q|u?int)([48])(?![0-9])")
"""Texts that keep a product's factors as integers times scales."""

_FLOAT8 = re.compile(
    r"(cast|round|quant|convert)\w*( to)? (fp8|float8)|(fp8|float8) (cast|round|quant)|(fp8|float8)\w* ?\* ?\w*scale",
    re.IGNORECASE,
)
_BITS = r"(?:u?int([48])\b|\b([48])[- ]?bit\b)"
_LEVELS = re.compile(
    rf"{_BITS}[^;.]*(?:stor|round.?trip|through|fake|quanti[sz]ed|quanti[sz]e.{{1,3}}de)|(?:through|via) {_BITS}"
    rf"|dequant\w*\W{{1,2}}quant[^;]*?{_BITS}",
    re.IGNORECASE,
)
"""Real numbers that were kept as integers in between."""
_UNQUANTISED = re.compile(r"(golden|reference)\b[^.;]*?\b(un-?|not |never |no )quanti", re.IGNORECASE)
"""Notes that such numbers are not kept so in the golden."""
_DEQUANTISED = re.compile(r"(?<![a-z])(de?q|dequant|fake)", re.IGNORECASE)
_STOCHASTIC = re.compile(r"stoch\w*[ -]round", re.IGNORECASE)

_FUNCTION = re.compile(r"(?<![a-z])(cos|sin|tanh|exp|erf|log|sqrt|sigmoid|gelu|silu|co|si)(?![a-z])", re.IGNORECASE)
_ABSOLUTE = re.compile(
    r"(?:abs(?:olute)? ?err(?:or)?s?|approx\w*|accura\w+)[^.;,]*?(?:2\^-(\d+)|(\d+(?:\.\d+)?e-\d+))", re.IGNORECASE
)

_PRODUCT = re.compile(
    r"matmul|linear|gemm|@|conv|einsum|\b(?!comm)\w*mm\b|dot|proj|attention|\battn\b|q[ .]?k|⋆|correlation"
    r"|[·⋅∙]\s*(?-i:[A-Z])",
    re.IGNORECASE,
)
_NO_PRODUCT = re.compile(
    r"norm|\bln\d*\b|softmax|prob|relu|gelu|silu|tanh|sigmoid|exp|rope|rotate|cos|sin|mask|scale|add|residual|bias|sum|mean|ema"
    r"|theta|angle|freq|nll|gather|transpose|merge|split|write|cache|quant|input|weight|lse|log(?!it)|select|embed|\bm\b|\bv\b|upd|decay|var\b|std\b|denom",
    re.IGNORECASE,
)
_DOTTED = re.compile(r"(?<![\w.])[A-Za-z]\w*\.[A-Za-z]\w*(?![\w.(])")
"""`q.K` is a product where no step is called so."""
_SYMBOL = re.compile(r"[_0-9A-Z]")
_JUXTAPOSED = re.compile(r"[)\]]\s+([A-Za-z]\w*)")
"""`softmax(scores) v`: what is in brackets times what follows, if that is an input."""

_PAIR = re.compile(r"\s*([A-Za-z]) ([A-Za-z])(?:\^?[tT]|'|\.T)?(?![A-Za-z0-9_])")
"""`p v`, each the first letter of an input's name."""

SCORES = re.compile(r"scores?\b", re.IGNORECASE)
"""Scores are products of queries and keys, unless the step only masks or scales some that are there."""
OF_SCORES = re.compile(r"lse|softmax|prob", re.IGNORECASE)
SCORED = re.compile(r"scores?|qk|logits?|(?<![a-z])s\d*$", re.IGNORECASE)
"""What is made of scores holds their product too, where no scores are recorded."""
OUTPUT = re.compile(r"output|context|\bctx\b", re.IGNORECASE)
"""With a length, what is weighted and added up, whatever else is done to it."""


def type_named(text: object) -> str | None:
    """The precision that a piece of text names first, by our names; None where it names none."""
    if not isinstance(text, str):
        return None
    hits = [(match.start(), name) for pattern, name in _TYPES if (match := re.search(pattern, text.lower()))]
    return min(hits)[1] if hits else None


def arithmetic(texts: Sequence[object]) -> str:
    """What the texts say of arithmetic, in lower case, without those that only name float64 and what they exclude."""
    said = " ".join(str(one).lower() for one in texts if one and not _FLOAT64.fullmatch(str(one)))
    return _DENIED.sub(" ", said)


def float32_named(said: str, *, beyond_sums: bool = False) -> bool:
    """Whether a text names float32; for more than for sums, if it must."""
    said = _ELSEWHERE.sub(" ", said)
    return bool(_SINGLE.search(_ACCUMULATED.sub(" ", said) if beyond_sums else said))


def narrow_sums(said: str) -> str | None:
    """The 16-bit type that sums are promised in, if any."""
    match = _NARROW_SUMS.search(said)
    return type_named(match.group(1)) if match else None


def factors(said: str) -> str | None:
    """The type that factors of products may be cut to, or ``8 bits`` or ``4 bits`` of scaled integers; None if untold.

    A text that names a 16-bit type at all grants it: what else such a text may mean is as hard to tell as it is rare.
    """
    if match := _FLOAT8_FACTORS.search(said):
        return type_named(match.group(1) or match.group(2))
    if match := _QUANTISED.search(said):
        return f"{match.group(1)} bits"
    said = _UNMULTIPLIED.sub(" ", said)
    named = {name for pattern, name in _TYPES if re.search(pattern, said)}
    return next((one for one in ("bfloat16", "float16") if one in named), None)


def transformed(said: str) -> bool:
    """Whether factors of products are cut after they were transformed, as Winograd's are."""
    return bool(re.search(r"transforms", said))


def ulps(said: str) -> float:
    """The units in the last place that a text grants, 0 where it grants none."""
    match = _ULPS.search(said)
    return float(match.group(1)) if match else 0.0


def flushed(said: str) -> bool:
    """Whether denormal numbers may become zero."""
    return bool(re.search(r"flush|ftz|denormal", said))


def stochastic(said: str) -> bool:
    """Whether rounding may go to either neighbour."""
    return bool(_STOCHASTIC.search(said))


def eager(said: str) -> bool:
    """Whether each operation stores its result."""
    return bool(_EAGER.search(said))


def absolute(name: str, op: str, notes: str) -> float:
    """The absolute error, such as 2^-21 or 1e-6, that notes grant a step of functions; 0 where they grant none."""
    found = _ABSOLUTE.search(notes)
    if not found or not _FUNCTION.search(f"{name} {op}"):
        return 0.0
    return 2.0 ** -int(found.group(1)) if found.group(1) else float(found.group(2))


def levels(op: str, notes: str) -> int:
    """How many steps of a whole range a text, or notes, keep real numbers in, as many up as down; 0 if unsaid."""
    match = _LEVELS.search(op)
    if not match and _UNQUANTISED.search(notes) and _DEQUANTISED.search(op):
        match = re.search(_BITS, f"{op} {notes}", re.IGNORECASE)
    bits = next((int(group) for group in match.groups() if group and group.isdigit()), 0) if match else 0
    return 2**bits - 2 if bits else 0


def casts_to_float8(op: str) -> bool:
    """Whether a step's text makes 8-bit floats of its input, or scales such."""
    return bool(_FLOAT8.search(op))


def float8_format(name: str, notes: str) -> str | None:
    """The 8-bit format that notes name for this step, else the coarsest that they name at all."""
    short = re.escape(re.split(r"[./:]", name.lower())[-1])
    own = re.search(rf"{short}\W+(?:is |in |as )?(?:float8|fp8)?\W*(e\dm\d)", notes)
    known = {"e5m2": "float8_e5m2", "e4m3": "float8_e4m3fn"}
    if own and own.group(1) in known:
        return known[own.group(1)]
    return next((known[one] for one in known if one in notes), None)


def product(op: str) -> bool:
    """Whether a text, or a name, is that of a product, or of nothing that is known not to be one."""
    return bool(_PRODUCT.search(op)) or not _NO_PRODUCT.search(op)


def transform(op: str) -> bool:
    """Whether a text is that of a fixed transform, such as Winograd's, which is not taken on tensor cores."""
    return bool(re.search(r"transform\b", op, re.IGNORECASE))


def juxtaposed(op: str, inputs: object) -> bool:
    """Whether a text multiplies what is in brackets by an input that follows, or two inputs side by side.

    Of two, one may not be recorded, if it is spelled like no word.
    """
    names = [str(x) for x in inputs] if isinstance(inputs, list) else []
    tails = [re.split(r"[./:]", name)[-1].lstrip("0123456789_") for name in names]
    if (pair := _PAIR.match(op)) and len({*tails}) > 1:
        left, right = ({x for x in tails if x.startswith(letter)} for letter in pair.groups())
        if left and right and left != right:
            return True
    side_by_side = re.findall(r"(?=\b([A-Za-z]\w*)\s+([A-Za-z]\w*))", op)
    if any(one not in names and not one.islower() for one in _DOTTED.findall(op)):
        return True
    return any(name.startswith(word) for word in _JUXTAPOSED.findall(op) for name in (*names, *tails)) or any(
        {one, other} & {*names} and all(x in names or _SYMBOL.search(x) for x in (one, other))
        for one, other in side_by_side
    )
