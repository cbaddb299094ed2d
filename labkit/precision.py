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
    r"|transpose|merge|split|write|cache|quant|input|weight|lse|log(?!it)|select|embed|\bm\b|\bv\b|upd|decay|var\b|std\b|denom",
    re.IGNORECASE,
)
_PRODUCT = re.compile(r"matmul|linear|gemm|@|conv|einsum|\bmm\b|dot|proj|attention|q ?k", re.IGNORECASE)


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


def of_step(name: str, tensor: torch.Tensor, observed: Dump, golden: Dump, against: torch.dtype) -> Precision:
    """What both traces' metadata promise of the observed step; of a golden only what is narrower than its float64.

    `against` is the dtype of the golden's step.
    """
    own = dtype_name(tensor.dtype)
    words = [observed.step(name).get("dtype"), observed.about.get("storage_dtype"), golden.step(name).get("dtype")]
    words.append(golden.about.get("storage_dtype"))
    promised = next((p for p in map(name_of, words) if p not in (None, "float64", "tf32")), None)
    stored = own
    if promised in _DTYPES and own in _DTYPES and UNIT[promised] > UNIT[own]:
        stored = promised
    compute_text = " ".join(
        str(text).lower()
        for text in (observed.about.get("compute"), observed.about.get("dtype_note"), golden.about.get("compute"))
        if text and not _says_float64(str(text))
    )
    compute_text = _DENIED.sub(" ", compute_text)
    op = str(golden.step(name).get("op") or observed.step(name).get("op") or name)
    told = bool(golden.step(name).get("op") or observed.step(name).get("op"))
    product = (
        bool(_PRODUCT.search(op)) or not _NO_PRODUCT.search(op) or (not told and _factors(name, tensor, golden) > 1)
    )
    accumulate = UNIT["float32"] if UNIT.get(stored, 0.0) >= UNIT["float32"] or stored == "integer" else UNIT["float64"]
    if not re.search(r"fp32|float32|f32", compute_text) and UNIT[stored] > UNIT["float32"]:
        accumulate = UNIT[stored]  # nothing better was promised
    if match := re.search(r"(bf16|bfloat16|fp16|float16)[ -]accum", compute_text):
        accumulate = max(accumulate, UNIT[name_of(match.group(1)) or "float32"])
    eager = "eager" in compute_text or "every op" in compute_text
    if eager and not (op and product):
        accumulate = max(accumulate, UNIT[stored])
    factor = 0.0
    silent = (
        promised is None and not compute_text and stored == "float32"
    )  # then TF32, a GPU's default, cannot be excluded
    if ("tf32" in compute_text or silent) and product:
        factor = 2.0 * UNIT["tf32"]
    elif product and (
        match := re.search(r"(bf16|bfloat16|fp16|float16)[ -](inputs|operands|matmul|factors)", compute_text)
        or re.search(r"rounded to (bf16|bfloat16|fp16|float16) before", compute_text)
    ):
        factor = UNIT[name_of(match.group(1)) or "float32"]
    extra = 0.0
    if match := re.search(r"(?:within )?(\d+) ?ulp", compute_text):
        extra = 2.0 * float(match.group(1)) * UNIT["float32"]
    flush = bool(re.search(r"flush|ftz|denormal", compute_text))
    return Precision(stored, accumulate, factor, flush, extra, eager, None if _exact(against) else against)


def _factors(name: str, tensor: torch.Tensor, golden: Dump) -> int:
    """How many of a step's recorded inputs are matrices of another shape than its own, as a product's factors are."""
    given = golden.step(name).get("inputs") or []
    shapes = [tuple(golden.read(str(x)).shape) for x in given if str(x) in golden] if isinstance(given, list) else []
    return sum(len(shape) >= 2 and shape != tuple(tensor.shape) for shape in shapes)


def _says_float64(text: str) -> bool:
    return bool(re.fullmatch(r"\s*(float64|fp64|double)\s*", text.lower()))


def _exact(dtype: torch.dtype) -> bool:
    return dtype == torch.float64 or not dtype.is_floating_point
