"""One tensor against its golden: every statistic that tells whether, where and how it is wrong."""

from __future__ import annotations

import html
import math
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from labkit.errors import UsageError
from labkit.numerics.bounds import Bound
from labkit.numerics.layout import MOST_DIMENSIONS, walk
from labkit.numerics.statistics import DTYPES, ELEMENTWISE, EMPTY, NUMBER, Rule, Statistics, format_of
from labkit.tables import number

_TINY = float(np.finfo(np.float64).tiny)
INTEGERS = "dtypes only: integers are equal"


@dataclass(frozen=True, repr=False)
class Comparison:
    """What :func:`compare` found. Differences are taken in float64, over elements that are finite on both sides."""

    shape: tuple[int, ...]
    observed_dtype: str
    golden_dtype: str
    count: int
    mismatches: int
    """Elements beyond the bound, NaN or Inf on one side only included."""
    first_index: tuple[int, ...] | None
    """The first mismatch in row-major order."""
    worst_index: tuple[int, ...] | None
    """Where |observed - golden| is largest; a NaN or Inf on one side only comes before any number."""
    worst_observed: float | None
    worst_golden: float | None
    max_abs: float
    mean_abs: float
    max_rel: float
    """Largest |observed - golden| / |golden| where the golden is not zero."""
    max_ulp: float
    """Largest |observed - golden| in units of the observed dtype's spacing at the golden."""
    rms_ratio: float
    """Root mean square of the difference over that of the golden."""
    cosine: float
    observed_nan: int
    golden_nan: int
    observed_inf: int
    golden_inf: int
    observed_zero: int
    golden_zero: int
    bound: str
    """The bound that was used, in words."""
    bound_used: float
    """Largest |observed - golden| / bound: above 1 an element is impossible."""
    ok: bool

    def __str__(self) -> str:
        if self.count < 0:
            return f"shapes differ: {self.bound}"
        size = "x".join(map(str, self.shape)) or "scalar"
        if self.ok:
            return (
                f"ok: {size} {self.observed_dtype}, largest difference {number(self.max_abs)} "
                f"({number(self.bound_used)} of the bound: {self.bound})"
            )
        nans = f", {self.observed_nan} NaN" if self.observed_nan != self.golden_nan else ""
        return (
            f"WRONG: {self.mismatches} of {self.count} elements of {size} {self.observed_dtype} beyond the bound{nans}"
            f"; worst at {self.worst_index}: {number(self.worst_observed)} for {number(self.worst_golden)}; first at "
            f"{self.first_index}; rms {number(self.rms_ratio)}, cosine {number(self.cosine)} (bound: {self.bound})"
        )

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{item.name}</td><td>{html.escape(number(getattr(self, item.name)))}</td></tr>"
            for item in fields(self)
        )
        return f"<table>{rows}</table>"


def compare(observed: Any, golden: Any, bound: Bound | float | Any | None = None) -> Comparison:
    """Compare `observed` with `golden`, torch tensors or NumPy arrays of any shape, strided or not, in one pass.

    `bound` is a :class:`~labkit.numerics.bounds.Bound`, a number or an array of allowed absolute differences.
    None knows the dtypes only and allows half a unit in the last place of the observed dtype, and Inf or the largest
    number where the golden is beyond that dtype's range. An infinite bound allows anything, a NaN too. Equal NaNs and
    Infs at equal places are equal. Different shapes are a divergence, not an error. The golden may be on another device
    (it is copied); a NumPy array with negative strides is copied first. Whole numbers are compared exactly, whatever
    their types. Raises UsageError for a golden narrower than the observed, for what holds no real numbers (complex,
    quantised, sparse, meta, objects), and for a bound that is negative or NaN.
    """
    o, g = _pair(observed, golden)
    names = (_name(o.dtype), _name(g.dtype))
    if o.shape != g.shape:
        return _shapes_differ(o, g, names)
    allowed, why = _allowed(o, bound)
    whole, exact = _whole(o, g, allowed)
    return described(measure(*whole, exact), o, names, why)


def within(observed: Any, golden: Any, bound: Bound | float | Any | None = None) -> bool:
    """Whether :func:`compare` says ok. Raises as it does."""
    o, g = _pair(observed, golden)
    if o.shape != g.shape:
        return False
    whole, allowed = _whole(o, g, _allowed(o, bound)[0])
    return measure(*whole, allowed).mismatches == 0


def _rescaled(found: Statistics, o: torch.Tensor, g: torch.Tensor) -> Statistics:
    """Squares overflow, or vanish: the sums of what both are in units of the golden's largest number, or theirs."""
    a, b = (torch.where(x.isfinite(), x.double(), 0.0) for x in (o, g))
    unit = max(float(a.abs().max()), float(b.abs().max())) or 1.0
    a, b = a / unit, b / unit
    d = a - b
    sums = {"sum_dd": d.square().sum(), "sum_gg": b.square().sum(), "sum_dg": (d * b).sum()}
    return found._replace(**{key: float(value) for key, value in sums.items()})


def _whole(
    o: torch.Tensor, g: torch.Tensor, allowed: float | torch.Tensor | None
) -> tuple[tuple[torch.Tensor, torch.Tensor], float | torch.Tensor | None]:
    """Whole numbers of 64 bits, or without a sign, as float64 that differ where they do; all others as they are."""
    wide = (torch.uint16, torch.uint32, torch.uint64, torch.int64)
    if o.is_floating_point() or g.is_floating_point() or not {o.dtype, g.dtype} & {*wide}:
        return (o, g), allowed
    a, b = (x.cpu().numpy() for x in (o, g))
    x, y = a.astype(np.float64), b.astype(np.float64)
    apart = (a != b) & (x == y)  # NumPy compares signed with unsigned exactly
    x = np.where(apart, np.nextafter(y, np.where(a > b, np.inf, -np.inf)), x)
    return (torch.from_numpy(x), torch.from_numpy(y)), 0.0 if allowed is None else allowed


def measure(o: torch.Tensor, g: torch.Tensor, allowed: float | torch.Tensor | None) -> Statistics:
    """Every statistic of two tensors of one shape, `allowed` being a number, a tensor of that shape or None."""
    if o.numel() == 0:
        return EMPTY
    g = g.to(o.device)
    if isinstance(allowed, torch.Tensor):
        rule = Rule(ELEMENTWISE, 0.0, format_of(o.dtype))
    elif allowed is not None:
        rule = Rule(NUMBER, allowed, format_of(o.dtype))
    else:
        rule = Rule(DTYPES, 0.0, format_of(o.dtype))
    tensors = [o, g, *([allowed] if isinstance(allowed, torch.Tensor) else [])]
    way = walk(o.shape, *tensors)
    if len(way.sizes) > MOST_DIMENSIONS:
        tensors = [t.contiguous() for t in tensors]
        way = walk(o.shape, *tensors)
    if o.is_cuda:
        from labkit.numerics.gpu import measure as one_pass
    else:
        from labkit.numerics.cpu import measure as one_pass
    found = one_pass(tensors[0], tensors[1], tensors[2] if len(tensors) > 2 else None, way, rule)
    fine = all(_TINY < total < math.inf or total == found.max_abs == 0.0 for total in (found.sum_dd, found.sum_gg))
    return found if fine else _rescaled(found, o, g)


def _pair(observed: Any, golden: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Both as tensors, once they are known to be comparable."""
    o, g = as_tensor("observed", observed), as_tensor("golden", golden)
    if o.dtype != g.dtype and _narrower(g.dtype, o.dtype):
        raise UsageError(
            f"golden: {_name(g.dtype)} is narrower than the observed {_name(o.dtype)}; wanted at least as wide"
        )
    return o, g


def _narrower(golden: torch.dtype, observed: torch.dtype) -> bool:
    return observed.is_floating_point and (
        not golden.is_floating_point or torch.finfo(golden).eps > torch.finfo(observed).eps
    )


def as_tensor(name: str, values: Any) -> torch.Tensor:
    """A tensor of real or whole numbers, sharing memory where it can. Raises UsageError for anything else."""
    if not isinstance(values, torch.Tensor):
        array = np.asarray(values)
        if array.dtype.kind not in "fiub":
            raise UsageError(f"{name}: {array.dtype} is not right; wanted a tensor, an array or a number")
        whole = array.flags.writeable and min(array.strides, default=0) >= 0 and array.dtype.isnative
        return torch.from_numpy(array if whole else array.astype(array.dtype.newbyteorder("=")))
    if values.is_complex() or values.is_quantized or values.layout != torch.strided or values.is_meta:
        kind = f"{_name(values.dtype)}, {values.layout}, {values.device.type}"
        raise UsageError(f"{name}: {kind} is not right; wanted dense real numbers (of complex ones the two parts)")
    return values.detach().resolve_neg()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _allowed(o: torch.Tensor, bound: Any) -> tuple[float | torch.Tensor | None, str]:
    if bound is None:
        return None, f"dtypes only: half an ULP of {_name(o.dtype)}" if o.is_floating_point() else INTEGERS
    given, why = (bound.absolute, bound.why) if isinstance(bound, Bound) else (bound, "given")
    if isinstance(given, (int, float)):
        if not given >= 0.0:
            raise UsageError(f"bound: {given} is not right; wanted a number from 0")
        return float(given), why
    allowed = as_tensor("bound", given).to(o.device, torch.float64)
    if not bool((allowed >= 0.0).all()):
        raise UsageError("bound: has numbers below 0, or NaN; wanted numbers from 0")
    if allowed.numel() == 1 and o.ndim >= allowed.ndim:
        return float(allowed), why
    try:
        return allowed.expand(o.shape), why
    except RuntimeError:
        raise UsageError(
            f"bound: shape {tuple(allowed.shape)} is not right; wanted a number or shape {tuple(o.shape)}"
        ) from None


def described(s: Statistics, o: torch.Tensor, names: tuple[str, str], why: str) -> Comparison:
    """The fields of a Comparison, from sums over d = observed - golden.

    The cosine's angle comes from sin^2 = (|g|^2 |d|^2 - (d, g)^2) / (|g|^2 |o|^2), which keeps its digits near 1.
    """
    at, observed, golden = s.one_sided, s.one_sided_observed, s.one_sided_golden
    if at < 0:
        at, observed, golden = s.worst, s.worst_observed, s.worst_golden
    count = o.numel()
    return Comparison(
        shape=tuple(o.shape),
        observed_dtype=names[0],
        golden_dtype=names[1],
        count=count,
        mismatches=int(s.mismatches),
        first_index=_index(s.first, o.shape),
        worst_index=_index(at, o.shape),
        worst_observed=None if at < 0 else observed,
        worst_golden=None if at < 0 else golden,
        max_abs=s.max_abs,
        mean_abs=s.sum_abs / count if count else 0.0,
        max_rel=s.max_rel,
        max_ulp=s.max_ulp if o.is_floating_point() else s.max_abs,
        rms_ratio=_ratio(math.sqrt(s.sum_dd), math.sqrt(s.sum_gg)),
        cosine=_cosine(s),
        observed_nan=int(s.observed_nan),
        golden_nan=int(s.golden_nan),
        observed_inf=int(s.observed_inf),
        golden_inf=int(s.golden_inf),
        observed_zero=int(s.observed_zero),
        golden_zero=int(s.golden_zero),
        bound=why,
        bound_used=math.inf if s.one_sided >= 0 else s.used,
        ok=s.mismatches == 0,
    )


def _cosine(s: Statistics) -> float:
    oo = s.sum_gg + 2.0 * s.sum_dg + s.sum_dd
    if s.sum_gg == 0.0 or oo <= 0.0:
        return 1.0 if s.sum_gg == s.sum_dd == 0.0 else 0.0
    sine2 = (s.sum_gg * s.sum_dd - s.sum_dg**2) / (s.sum_gg * oo)
    return math.copysign(math.sqrt(max(0.0, 1.0 - max(0.0, sine2))), s.sum_gg + s.sum_dg)


def _ratio(part: float, whole: float) -> float:
    if whole == 0.0:
        return 0.0 if part == 0.0 else math.inf
    return part / whole


def _index(flat: float, shape: torch.Size) -> tuple[int, ...] | None:
    if flat < 0:
        return None
    index, rest = [], int(flat)
    for size in reversed(shape):
        rest, at = divmod(rest, size)
        index.append(at)
    return tuple(reversed(index))


def _shapes_differ(o: torch.Tensor, g: torch.Tensor, names: tuple[str, str]) -> Comparison:
    nan = math.nan
    text = f"observed {tuple(o.shape)}, golden {tuple(g.shape)}"
    return Comparison(
        tuple(o.shape), *names, -1, max(o.numel(), g.numel()), None, None, None, None,
        nan, nan, nan, nan, nan, nan, 0, 0, 0, 0, 0, 0, text, math.inf, False,
    )  # fmt: skip
