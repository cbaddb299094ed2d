"""What a trace's metadata promises of a step's precision, read from free text; the honest fallback where it says
nothing."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch

from labkit.dumps import Dump

_NAMES = (
    (r"\b(tf32|tensorfloat-?32)\b", "tf32"),
    (r"\b(bf16|bfloat16)\b", "bfloat16"),
    (r"\b(fp16|float16|f16|half)\b", "float16"),
    (r"e4m3", "float8_e4m3fn"),
    (r"e5m2", "float8_e5m2"),
    (r"\b(fp64|float64|f64|double)\b", "float64"),
    (r"\b(fp32|float32|f32|single)\b", "float32"),
    (r"\b(u?int(4|8|16|32|64)|bool)\b", "integer"),
)
UNIT = {
    "float64": 2.0**-53,
    "float32": 2.0**-24,
    "tf32": 2.0**-11,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
    "float8_e4m3fn": 2.0**-4,
    "float8_e5m2": 2.0**-3,
    "integer": 0.0,
}
"""Unit round-off by name."""

_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}
_DENIED = re.compile(
    r"\(?\b(no|not|never|without|non)[ -]*tf32\b|\btf32[ :=]*(is )?(off|disabled|not allowed|false)\b\)?"
)
"""A text that names TF32 to exclude it."""

_NO_PRODUCT = re.compile(
    r"norm|\bln\d*\b|softmax|prob|relu|gelu|silu|tanh|sigmoid|exp|rope|rotate|cos|sin|mask|scale|add|residual|bias|sum|mean|ema"
    r"|theta|angle|freq|nll|gather|transpose|merge|split|write|cache|quant|input|weight|lse|log(?!it)|select|embed|\bm\b|\bv\b|upd|decay|var\b|std\b|denom",
    re.IGNORECASE,
)
_FLOAT8 = re.compile(r"(cast|round|quant|convert)\w*( to)? (fp8|float8)|(fp8|float8) (cast|round|quant)", re.IGNORECASE)
_SINGLE = re.compile(r"fp32|float32|f32|\bsingle\b")
_ACCUMULATED = re.compile(r"(fp32|float32|f32|single)[ -]acc\w*")
"""That sums are kept in float32 says nothing of what is between a step's other operations."""
_FUNCTION = re.compile(r"(?<![a-z])(cos|sin|tanh|exp|erf|log|sqrt|sigmoid|gelu|silu|co|si)(?![a-z])", re.IGNORECASE)
_ABSOLUTE = re.compile(r"abs(?:olute)? ?err(?:or)?s?[^.;,]*?(?:2\^-(\d+)|(\d+(?:\.\d+)?e-\d+))", re.IGNORECASE)
_SCORES = re.compile(r"scores?\b", re.IGNORECASE)
"""Scores are products of queries and keys, unless the step only masks or scales some that are there."""

_OUTPUT = re.compile(r"output|context|\bctx\b", re.IGNORECASE)
"""With a length, what is weighted and added up, whatever else is done to it."""
_OF_SCORES = re.compile(r"lse|softmax|prob", re.IGNORECASE)
_SCORED = re.compile(r"scores?|qk|logits?|(?<![a-z])s\d*$", re.IGNORECASE)
"""What is made of scores holds their product too, where no scores are recorded."""

_NARROW = r"(bf16|bfloat16|fp16|float16|f16|half)"
_NARROW_FACTORS = (
    rf"\b{_NARROW}[ -](inputs|operands|matmul|factors|tensor cores?|gemm|mma|in\b)",
    rf"\b{_NARROW} ?[x*×·] ?{_NARROW}",
    rf"(?:operands|inputs|factors)(?: are)?(?: (?:in|cast to|rounded to|converted to))? {_NARROW}",
    r"(?:operands|inputs|factors)(?: are)?(?: (?:in|cast to|rounded to|converted to))? (?:fp8 |float8 )?\(?(e4m3|e5m2)",
    rf"(?:rounded|goes|cast|converted) to {_NARROW} before",
    rf"\b(?:[hq]|wg)?(?:mma|gemm|dot) (?:in )?{_NARROW}",
    r"(e4m3|e5m2)[ -](?:inputs|operands|factors|matmul|gemm)",
)
"""Texts that cut a product's factors to 16 bits."""

_BITS = r"(?:u?int([48])\b|\b([48])[- ]?bit\b)"
_LEVELS = re.compile(
    rf"{_BITS}[^;.]*(?:stor|round.?trip|through|fake|quanti[sz]ed)|(?:through|via) {_BITS}", re.IGNORECASE
)
"""Real numbers that were kept as integers in between."""

_DOTTED = re.compile(r"(?<![\w.])[A-Za-z]\w*\.[A-Za-z]\w*(?![\w.(])")
"""`q.K` is a product where no step is called so."""
_SYMBOL = re.compile(r"[_0-9A-Z]")
_JUXTAPOSED = re.compile(r"[)\]]\s+([A-Za-z]\w*)")
"""`softmax(scores) v`: what is in brackets times what follows, if that is an input."""

_PRODUCT = re.compile(
    r"matmul|linear|gemm|@|conv|einsum|\bmm\b|dot|proj|attention|\battn\b|q ?k|⋆|correlation|[·⋅∙]\s*(?-i:[A-Z])",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Precision:
    """How one step was promised to be computed and stored."""

    stored: str
    """The narrower of the tensor's dtype and the promised one."""
    compute: float
    """Unit round-off of the arithmetic inside the step."""
    factor: float
    """Unit round-off to which the factors of products are cut first; 0 where they are taken as they are."""
    flush: bool
    """Whether denormal results may become zero."""
    extra: float
    """Further relative error that the text grants, as for fast functions."""
    eager: bool = False
    """Whether each operation inside the step rounds to the stored dtype."""
    golden: torch.dtype | None = None
    """The golden's own dtype where it is not float64, so that it is off too."""
    stochastic: bool = False
    """Whether storage may round to either neighbour."""
    levels: int = 0
    """How many steps of a whole tensor's range the numbers were kept in, 0 where they were not kept as integers."""

    between: float = 0.0
    """Unit round-off of what is between a step's operations, where nobody promises float32 for that."""
    absolute: float = 0.0
    """What a function may be off whatever its value, where a note grants that."""
    scaled: bool = False
    """Whether what is stored is a float8 number times a scale."""

    @property
    def unit(self) -> float:
        """Unit round-off of the stored dtype."""
        return UNIT[self.stored]

    @property
    def dtype(self) -> torch.dtype | None:
        """The stored dtype, None for integers."""
        return _DTYPES.get(self.stored)


def name_of(text: Any) -> str | None:
    """The precision that a piece of text names first, by our names; None where it names none."""
    if not isinstance(text, str):
        return None
    hits = [(match.start(), name) for pattern, name in _NAMES if (match := re.search(pattern, text.lower()))]
    return min(hits)[1] if hits else None


def dtype_name(dtype: torch.dtype) -> str:
    """Our name of a torch dtype."""
    return str(dtype).removeprefix("torch.") if dtype.is_floating_point else "integer"


def of_step(
    name: str, tensor: torch.Tensor, observed: Dump, golden: Dump, against: torch.dtype, is_product: bool = False
) -> Precision:
    """What both traces' metadata promise of the observed step; of a golden only what is narrower than its float64.

    `against` is the dtype of the golden's step; `is_product`: that it is one is known whatever its text says.
    """
    own = dtype_name(tensor.dtype)
    words = [observed.step(name).get("dtype"), observed.about.get("storage_dtype"), golden.step(name).get("dtype")]
    words.append(golden.about.get("storage_dtype"))
    promised = next((p for p in map(name_of, words) if p not in (None, "float64", "tf32")), None)
    stored = own
    if not any(words) and own in _DTYPES and (found := observed.narrow) and UNIT[dtype_name(found)] > UNIT[own]:
        promised = dtype_name(found)  # nobody says how it is stored, but all of it is
    if promised in _DTYPES and own in _DTYPES and UNIT[promised] > UNIT[own]:
        stored = promised
    if own in _DTYPES and _FLOAT8.search(_text(name, observed, golden)):
        stored = _float8(name, observed, golden) or stored
    elif own in _DTYPES and (short := _float8(name, observed, golden)) and UNIT[short] > UNIT[own]:
        stored = short if _only_of(short, tensor, golden.read(name)) else stored
    compute_text = " ".join(
        str(text).lower()
        for text in (observed.about.get("compute"), observed.about.get("dtype_note"), golden.about.get("compute"))
        if text and not _says_float64(str(text))
    )
    compute_text = _DENIED.sub(" ", compute_text)
    op = _text(name, observed, golden)
    told = bool(golden.step(name).get("op") or observed.step(name).get("op"))
    factors, alike = _factors(name, tensor, golden)
    product = is_product or bool(_PRODUCT.search(op)) or not _NO_PRODUCT.search(op)
    fused = not told and bool(_OF_SCORES.search(name)) and not any(_SCORED.search(one) for one in golden.names)
    given = golden.step(name).get("inputs") or observed.step(name).get("inputs")
    product = product or (told and juxtaposed(op, given or golden.names))
    product = product or fused or (factors > 1 and (not told or (not alike and bool(_SCORES.search(op)))))
    length = str(golden.step(name).get("K") or observed.step(name).get("K") or "")
    product = product or (length.isdigit() and int(length) > 1 and (not told or bool(_OUTPUT.search(op))))
    accumulate = UNIT["float32"] if UNIT.get(stored, 0.0) >= UNIT["float32"] or stored == "integer" else UNIT["float64"]
    narrow = UNIT[stored] > UNIT["float32"]
    unpromised = narrow and not _SINGLE.search(compute_text)
    between = narrow and not _SINGLE.search(_ACCUMULATED.sub(" ", compute_text))
    if match := re.search(r"(bf16|bfloat16|fp16|float16)[ -]accum", compute_text):
        accumulate = max(accumulate, UNIT[name_of(match.group(1)) or "float32"])
    eager = "eager" in compute_text or "every op" in compute_text
    if eager and not (op and product):
        accumulate = max(accumulate, UNIT[stored])
    factor = 0.0
    silent = (
        promised in (None, "float32") and not compute_text and stored == "float32"
    )  # then TF32 cannot be excluded, which is how many products of float32 are taken
    if ("tf32" in compute_text or silent) and product:
        factor = 2.0 * UNIT["tf32"]
    elif product and (match := next(filter(None, (re.search(one, compute_text) for one in _NARROW_FACTORS)), None)):
        factor = UNIT[name_of(match.group(1)) or "float32"]
    if unpromised and product:
        factor = max(factor, UNIT[stored])  # sums are kept in float32 by all hardware, factors as narrow as storage
    extra = 0.0
    if match := re.search(r"(?:within )?(\d+) ?ulp", compute_text):
        extra = 2.0 * float(match.group(1)) * UNIT["float32"]
    flush = bool(re.search(r"flush|ftz|denormal", compute_text))
    notes = " ".join(str(d.about.get("dtype_note", "")) for d in (observed, golden))
    stochastic = bool(re.search(r"stoch\w*[ -]round", f"{notes} {compute_text} {op}".lower()))
    return Precision(
        stored,
        accumulate,
        factor,
        flush,
        extra,
        eager,
        None if _exact(against) else against,
        stochastic,
        _levels(op) if own in _DTYPES else 0,
        UNIT[stored] if between else 0.0,
        _absolute(f"{notes} {compute_text}") if _FUNCTION.search(f"{name} {op}") else 0.0,
        stored.startswith("float8") and own != stored,
    )


def _absolute(notes: str) -> float:
    """The absolute error that a note names, such as 2^-21 or 1e-6; 0 where it names none."""
    found = _ABSOLUTE.search(notes)
    if not found:
        return 0.0
    return 2.0 ** -int(found.group(1)) if found.group(1) else float(found.group(2))


def _levels(op: str) -> int:
    match = _LEVELS.search(op)
    bits = next((int(group) for group in match.groups() if group and group.isdigit()), 0) if match else 0
    return 2**bits - 2 if bits else 0  # as many up as down


def juxtaposed(op: str, inputs: object) -> bool:
    """Whether a text multiplies what is in brackets by an input that follows, or two inputs side by side.

    Of two, one may not be recorded, if it is spelled like no word.
    """
    names = [str(x) for x in inputs] if isinstance(inputs, list) else []
    side_by_side = re.findall(r"(?=\b([A-Za-z]\w*)\s+([A-Za-z]\w*))", op)
    if any(one not in names and not one.islower() for one in _DOTTED.findall(op)):
        return True
    return any(name.startswith(word) for word in _JUXTAPOSED.findall(op) for name in names) or any(
        {one, other} & {*names} and all(x in names or _SYMBOL.search(x) for x in (one, other))
        for one, other in side_by_side
    )


def _text(name: str, observed: Dump, golden: Dump) -> str:
    return str(golden.step(name).get("op") or observed.step(name).get("op") or name)


def _float8(name: str, observed: Dump, golden: Dump) -> str | None:
    """The 8-bit format that the texts name for this step, else the coarsest that they name at all."""
    keys = ("compute", "dtype_note")
    texts = " ".join(str(d.about.get(key, "")) for d in (observed, golden) for key in keys).lower()
    short = re.escape(re.split(r"[./:]", name.lower())[-1])
    own = re.search(rf"{short}\W+(?:is |in |as )?(?:float8|fp8)?\W*(e\dm\d)", texts)
    known = {"e5m2": "float8_e5m2", "e4m3": "float8_e4m3fn"}
    if own and own.group(1) in known:
        return known[own.group(1)]
    return next((known[one] for one in known if one in texts), None)


def of_8_bits(x: torch.Tensor) -> bool:
    """Whether a tensor is of an 8-bit type, or has the numbers of one in a wider type."""
    if x.element_size() == 1 or not x.is_floating_point():
        return x.element_size() == 1
    return any(bool((x.to(one).to(x.dtype) == x).all()) for one in (torch.float8_e4m3fn, torch.float8_e5m2))


def _only_of(kept: str, observed: torch.Tensor, golden: torch.Tensor) -> bool:
    """Whether all of many observed numbers are some of a narrow type's, as the golden's are not."""
    narrow = _DTYPES[kept]

    def on_grid(x: torch.Tensor) -> bool:
        return bool((x.to(narrow).to(x.dtype) == x).all())

    return observed.numel() >= 64 and on_grid(observed) and not on_grid(golden) and len(observed.unique()) >= 16


def _factors(name: str, tensor: torch.Tensor, golden: Dump) -> tuple[int, bool]:
    """How many of a step's recorded inputs are matrices of another shape than its own, as a product's factors are; and
    whether one is of its own shape."""
    given = golden.step(name).get("inputs") or []
    shapes = [tuple(golden.read(str(x)).shape) for x in given if str(x) in golden] if isinstance(given, list) else []
    other = [shape for shape in shapes if shape != tuple(tensor.shape)]
    return sum(len(shape) >= 2 for shape in other), len(other) < len(shapes)


def _says_float64(text: str) -> bool:
    return bool(re.fullmatch(r"\s*(float64|fp64|double)\s*", text.lower()))


def _exact(dtype: torch.dtype) -> bool:
    return dtype == torch.float64 or not dtype.is_floating_point
