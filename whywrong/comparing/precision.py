"""The precision that an implementation was declared to have, in typed fields; and the one table of unit round-offs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from whywrong.errors import UsageError

FLOATS = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
_INFO = {name: torch.finfo(getattr(torch, name)) for name in FLOATS}

UNIT_ROUNDOFF = {name: info.eps / 2.0 for name, info in _INFO.items()} | {
    "tf32x3": 2.0**-21,  # three products of TF32 parts; what is dropped is the product of both low parts
    "bfloat16x2": 2.0**-16,  # a factor as the sum of two bfloat16
    "tf32": 2.0**-11,
}
"""Half the distance from 1 to the next number: the relative error of one rounding to nearest."""

SMALLEST = {name: info.tiny * info.eps for name, info in _INFO.items()}
"""The smallest subnormal: what one operation may lose to underflow."""

INTEGERS = ("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
FIELD_CHOICES = {
    "storage": (*FLOATS, *INTEGERS),
    "products": ("ieee", "tf32x3", "bfloat16x2", "tf32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
    "accumulate": FLOATS[:4],
}

ALIASES = {"bf16": "bfloat16", "half": "float16", "fp16": "float16", "f16": "float16", "float": "float32"}
ALIASES |= {"fp32": "float32", "f32": "float32", "single": "float32", "double": "float64", "fp64": "float64"}
ALIASES |= {"f64": "float64", "fp8_e4m3": "float8_e4m3fn", "e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
"""Other names for the same."""


@dataclass(frozen=True)
class Precision:
    """How an implementation was declared to compute and to store its steps.

    `storage` is the dtype in which a step is kept, any float or integer dtype of torch; None, the default, means that
    of the tensor at hand. `products` is the format to which the factors of matrix products and convolutions are cut
    before they are multiplied: ``ieee`` leaves them as they are; ``tf32x3`` and ``bfloat16x2`` are factors in two
    parts; None, the default, is that of `storage` where it is narrower than float32, as tensor cores take it, and else
    ``ieee``. `accumulate` (``float32``) is the format of sums, and of what stands between the operations
    inside a step. `eager` (False): each operation inside a step is stored, as in an unfused program, also those that
    torch has as one and a program may have written out, and each addition to a place in memory, as of an `index_put`
    that accumulates. Where it is not declared a kernel may go on with what it has in registers. `flush` (False):
    results below the smallest normal number may be zero. `normwise` (False): errors are small beside the largest value
    of a tensor, not beside each of its elements, as those of Fourier transforms, of |x|^2 + |y|^2 - 2xy for a distance
    of points about 0, or of Strassen's products. `steps` gives other values for some steps, by name.

    A format may be a torch dtype or another name of one, as ``bf16`` or ``half``. Raises UsageError for a field or a
    value that is none of these.
    """

    storage: str | None = None
    products: str | None = None
    accumulate: str = "float32"
    eager: bool = False
    flush: bool = False
    normwise: bool = False
    steps: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, choices in FIELD_CHOICES.items():
            value = getattr(self, name)
            value = name_of(value) if isinstance(value, torch.dtype) else value
            value = ALIASES.get(value.lower(), value.lower()) if isinstance(value, str) else value
            object.__setattr__(self, name, value)
            if value not in choices and (value is not None or name == "accumulate"):
                raise UsageError(f"precision: expected one of {', '.join(choices)}, got {name}={value!r}")
        for name in ("eager", "flush", "normwise"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"precision: expected true or false, got {name}={getattr(self, name)!r}")
        if not isinstance(self.steps, Mapping):
            raise UsageError(f"precision: expected fields by the name of a step, got steps={self.steps!r}")
        for step, other in self.steps.items():
            if not isinstance(other, Mapping) or "steps" in other:
                raise UsageError(
                    f"precision: expected {', '.join(PRECISION_FIELDS[:-1])}, got steps[{step!r}]={other!r}"
                )
            from_fields(other)

    def of(self, step: str) -> Precision:
        """What holds for one step, and for each time that it is passed (`step#2`) unless that is named."""
        return replace(self, steps={}, **self.steps.get(step, self.steps.get(step.split("#")[0], {})))

    @property
    def unit(self) -> float:
        """The unit round-off between the operations of a step; twice that of float64, in which the golden errs too."""
        return UNIT_ROUNDOFF[self.accumulate] * (2.0 if self.accumulate == "float64" else 1.0)

    @property
    def cut(self) -> float:
        """The unit round-off to which factors are cut; 0 where they are taken as they are, or as stored."""
        return UNIT_ROUNDOFF.get(self.products or "ieee", 0.0)

    def __str__(self) -> str:
        storage = f"stored as {self.storage}" if self.storage else "stored in each tensor's own dtype"
        words = [storage, f"{self.products} products" if self.products else "products of such numbers"]
        words.append(f"sums in {self.accumulate}")
        words += ["every operation stored"] * self.eager + ["denormals may be flushed"] * self.flush
        words += ["errors small beside the largest value"] * self.normwise
        if self.steps:
            words.append(f"other fields for {', '.join(self.steps)}")
        return ", ".join(words)


PRECISION_FIELDS = tuple(item.name for item in fields(Precision))


def from_fields(declared: Mapping[str, Any]) -> Precision:
    """The precision that a file's metadata declare, a field each. Raises UsageError for what is no field."""
    if unknown := [str(key) for key in declared if key not in PRECISION_FIELDS]:
        raise UsageError(f"precision: expected the fields {', '.join(PRECISION_FIELDS)}, got {unknown[0]!r}")
    return Precision(**declared)


def from_words(text: str) -> Precision:
    """The precision of a command line, ``storage=bfloat16,products=tf32``, or ``bf16,products=tf32`` as in Python.

    Raises UsageError for anything else."""
    declared: dict[str, Any] = {}
    for k, item in enumerate(text.split(",")):
        name, sign, value = item.partition("=") if k or "=" in item else ("storage", "=", item)
        if not sign or name.strip() == "steps":
            raise UsageError(f"--precision: expected name=value of {', '.join(PRECISION_FIELDS[:-1])}, got {item!r}")
        if name.strip() in declared:
            raise UsageError(f"--precision: expected each field once, got {name.strip()} twice")
        declared[name.strip()] = {"true": True, "false": False}.get(value.strip().lower(), value.strip())
    return from_fields(declared)


def name_of(dtype: torch.dtype) -> str:
    """A dtype's name as torch has it, without its prefix."""
    return str(dtype).removeprefix("torch.")


dtype_of = partial(getattr, torch)
"""The torch dtype of a name."""


def half_ulp(x: Tensor, name: str, *, flush: bool = False) -> Tensor:
    """Half the distance between neighbouring numbers of a dtype at |x|, float64; one half for whole numbers.

    Below the smallest normal number the distance no longer shrinks; with `flush` it is that number.
    """
    if name in INTEGERS:
        return torch.full_like(x, 0.5)
    info = torch.finfo(dtype_of(name))
    size = x.double().abs().nan_to_num_(0.0, info.max, info.max).clamp_(min=info.tiny, max=info.max)
    half = size.view(torch.int64).bitwise_and_(0x7FF << 52).view(torch.float64).mul_(0.5 * info.eps)  # 2^exponent
    return half.clamp_(min=info.tiny) if flush else half


def stored(x: Tensor, name: str) -> Tensor:
    """x, float64, rounded to a dtype and back."""
    return x if name in INTEGERS or not x.is_floating_point() else x.to(dtype_of(name)).double()


def representable(x: Tensor, name: str) -> bool:
    """Whether every finite number of x, float64, is one of a format's, so that cutting to it changes nothing."""
    if name in ("ieee", "float64"):
        return True
    if name in ("bfloat16x2", "tf32x3"):
        first = x.to(torch.bfloat16).double() if name == "bfloat16x2" else _tf32(x)
        return representable(x - first, name.removesuffix("x2").removesuffix("x3"))
    cut = _tf32(x) if name == "tf32" else stored(x, name)
    return bool((cut == x).logical_or_(~x.isfinite()).all())


def _tf32(x: Tensor) -> Tensor:
    mantissa, exponent = torch.frexp(x)
    return (mantissa * 2048.0).round() / 2048.0 * torch.exp2(exponent.double())


def guess(dtypes: list[torch.dtype]) -> Precision:
    """What the dtypes of a trace show where nothing is declared: each step its own, sums no wider than float32.

    A step need not be one kernel, so where some are narrower than float32, each operation may be stored.
    """
    real = [dtype for dtype in dtypes if dtype.is_floating_point]
    double = dtypes and all(dtype == torch.float64 for dtype in real)
    eager = any(torch.finfo(dtype).bits < 32 for dtype in real)
    return Precision(accumulate="float64" if double else "float32", eager=eager)
