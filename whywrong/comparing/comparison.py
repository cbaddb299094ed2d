"""One tensor against its golden: every statistic that tells whether, where and how it is wrong."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing
import torch

from whywrong.comparing.bounds import Bound
from whywrong.comparing.precision import FIELD_CHOICES, name_of
from whywrong.comparing.statistics import Statistics, combine, pieces
from whywrong.errors import UsageError
from whywrong.tables import number

ArrayLike = torch.Tensor | numpy.typing.ArrayLike
"""A tensor, or what NumPy makes an array of: an array, a number, nested lists of numbers."""

WIDE_INTEGERS = {torch.uint16, torch.uint32, torch.uint64, torch.int64}
"""Integers of which float64 does not hold all, or that torch cannot compute with."""
NARROW = ("bfloat16", "float8_e4m3fn", "float8_e5m2")
"""Dtypes that NumPy has from ml_dtypes, as the arrays of JAX have, and torch has too."""
MANY_ELEMENTS = 1 << 20
"""Elements from which a GPU compares: below, a copy to the CPU takes less than to compile a kernel for such tensors."""

INTEGERS_ARE_EQUAL = "dtypes only: integers are equal"
COUNTS = ("mismatches", "observed_nan", "golden_nan", "observed_inf", "golden_inf", "observed_zero", "golden_zero")
_TINY, _HUGE = float(np.finfo(np.float64).tiny), 1e150  # products of two sums are finite too


@dataclass(frozen=True, repr=False)
class Comparison:
    """What :func:`compare` found. Differences are taken in float64, over elements that are finite on both sides.

    `max_abs` and `mean_abs` are in the unit of the tensors, `max_ulp` in units in the last place; `max_rel`,
    `rms_ratio`, `cosine` and `bound_used` have none. `ok` says that no element is beyond the bound. Where shapes differ
    `count` is -1, `shape` the observed's, and `bound` has both shapes in words.
    """

    shape: tuple[int, ...]
    observed_dtype: str
    golden_dtype: str
    count: int
    mismatches: int
    """Elements beyond the bound, NaN or Inf on one side only included."""
    first_index: tuple[int, ...] | None = None
    """The first mismatch in row-major order."""
    worst_index: tuple[int, ...] | None = None
    """Where |observed - golden| is largest; a NaN or Inf on one side only comes before any number."""
    worst_observed: float | None = None
    worst_golden: float | None = None
    max_abs: float = math.nan
    mean_abs: float = math.nan
    max_rel: float = math.nan
    """Largest |observed - golden| / |golden| where the golden is not zero."""
    max_ulp: float = math.nan
    """Largest |observed - golden| in units of the observed dtype's spacing at the golden."""
    rms_ratio: float = math.nan
    """Root mean square of the difference over that of the golden."""
    cosine: float = math.nan
    observed_nan: int = 0
    golden_nan: int = 0
    observed_inf: int = 0
    golden_inf: int = 0
    observed_zero: int = 0
    golden_zero: int = 0
    bound: str = ""
    """The bound that was used, in words."""
    bound_used: float = math.inf
    """Largest |observed - golden| / bound: above 1 an element is impossible."""
    ok: bool = False

    def __repr__(self) -> str:
        if self.count < 0:
            return f"shapes differ: {self.bound}"
        size = "x".join(map(str, self.shape)) or "scalar"
        if self.ok:
            most = f"largest difference {number(self.max_abs)} ({number(self.bound_used)} of the bound: {self.bound})"
            return f"ok: {size} {self.observed_dtype}, {most}"
        nans = f", {self.observed_nan} NaN" if self.observed_nan != self.golden_nan else ""
        many = f"{self.mismatches} of {self.count} elements of {size} {self.observed_dtype} beyond the bound{nans}"
        worst = f"worst at {self.worst_index}: {number(self.worst_observed)} for {number(self.worst_golden)}"
        overall = f"rms {number(self.rms_ratio)}, cosine {number(self.cosine)} (bound: {self.bound})"
        return f"WRONG: {many}; {worst}; first at {self.first_index}; {overall}"


def compare(observed: ArrayLike, golden: ArrayLike, *, bound: Bound | ArrayLike | None = None) -> Comparison:
    """Compare `observed` with `golden`, torch tensors or NumPy arrays of any shape, strided or not, in one pass.

    `bound` is a :class:`~whywrong.comparing.bounds.Bound`, a number or an array of allowed absolute differences.
    None knows the dtypes only and allows half a unit in the last place of the observed dtype, and Inf or the largest
    number where the golden is beyond that dtype's range. An infinite bound allows anything, a NaN too. Equal NaNs and
    Infs at equal places are equal. Complex numbers are compared by their two parts. Different shapes are a divergence,
    not an error. The golden may be on another device (it is copied); a NumPy array with negative strides is copied
    first. Whole numbers are compared exactly, whatever their types; with real numbers on either side, as float64.
    Raises UsageError for a golden narrower than the observed, for what holds no dense numbers (quantised, sparse,
    nested, meta, objects), and for a bound that is negative or NaN.
    """
    o, g = as_tensor("observed", observed), as_tensor("golden", golden)
    names = name_of(o.dtype), name_of(g.dtype)
    if o.shape != g.shape:
        shapes, count = f"observed {tuple(o.shape)}, golden {tuple(g.shape)}", max(o.numel(), g.numel())
        return Comparison(tuple(o.shape), *names, count=-1, mismatches=count, bound=shapes)
    if o.is_floating_point() and not g.is_floating_point():
        g = g.double()
    if o.is_floating_point() and torch.finfo(g.dtype).eps > torch.finfo(o.dtype).eps:
        raise UsageError(f"golden: expected {names[0]}, as the observed, or wider, got {names[1]}")
    allowed, why = _allowed(o, bound)
    return described(measure(o, g, allowed), o, names, why)


def as_tensor(name: str, values: ArrayLike) -> torch.Tensor:
    """A tensor of real or whole numbers, sharing memory where it can; complex ones as their parts, in a last dimension.

    Raises UsageError for anything else.
    """
    if not isinstance(values, torch.Tensor):
        array = np.asarray(values)
        if array.dtype.name in NARROW or array.dtype == np.dtype("V2"):  # NumPy stores bfloat16 without its type
            narrow = getattr(torch, array.dtype.name if array.dtype.name in NARROW else "bfloat16")
            return as_tensor(name, array.view(f"u{array.dtype.itemsize}")).view(narrow)
        if array.dtype.kind not in "fiubc" or array.dtype.itemsize > (16 if array.dtype.kind == "c" else 8):
            got = array.dtype if isinstance(values, np.ndarray) else f"a {type(values).__name__}"
            raise UsageError(f"{name}: expected a tensor or an array of 64 bits at most, got {got}")
        shareable = array.flags.writeable and min(array.strides, default=0) >= 0 and array.dtype.isnative
        values = torch.from_numpy(array if shareable else array.astype(array.dtype.newbyteorder("=")))
    known = values.is_complex() or name_of(values.dtype) in FIELD_CHOICES["storage"]
    if not known or values.is_meta or values.is_nested or values.layout != torch.strided:
        kind = f"{name_of(values.dtype)}, {values.layout}, {values.device.type}"
        raise UsageError(f"{name}: expected dense numbers, got {kind}")
    return real(values.detach()).resolve_neg()


def real(x: torch.Tensor) -> torch.Tensor:
    """Of complex numbers the two parts, in a last dimension."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def _allowed(o: torch.Tensor, bound: Bound | ArrayLike | None) -> tuple[float | torch.Tensor | None, str]:
    if bound is None:
        return None, f"dtypes only: half an ULP of {name_of(o.dtype)}" if o.is_floating_point() else INTEGERS_ARE_EQUAL
    absolute, why = (bound.absolute, bound.why) if isinstance(bound, Bound) else (bound, "given")
    allowed = as_tensor("bound", absolute).double()
    if not bool((allowed >= 0.0).all()):
        raise UsageError("bound: expected numbers from 0, got some below 0, or NaN")
    if allowed.numel() == 1 and o.ndim >= allowed.ndim:
        return float(allowed), why
    try:
        return allowed.to(o.device).expand(o.shape), why
    except RuntimeError:
        wanted = f"expected a number or shape {tuple(o.shape)}"
        raise UsageError(f"bound: {wanted}, got shape {tuple(allowed.shape)}") from None


def measure(o: torch.Tensor, g: torch.Tensor, allowed: float | torch.Tensor | None) -> Statistics:
    """Every statistic of two tensors of one shape, `allowed` being a number, a tensor of that shape or None."""
    g = g.to(o.device)
    if {o.dtype, g.dtype} & WIDE_INTEGERS and not (o.is_floating_point() or g.is_floating_point()):
        o, g = distinct_floats(o, g)
        allowed = 0.0 if allowed is None else allowed
    if o.is_cuda and o.numel() >= MANY_ELEMENTS:
        from whywrong.comparing.gpu import measure as one_pass
    else:
        from whywrong.comparing.cpu import measure as one_pass

        o, g, allowed = o.cpu(), g.cpu(), allowed.cpu() if isinstance(allowed, torch.Tensor) else allowed
    statistics = one_pass(o, g, allowed)
    return statistics if in_range(statistics) else _rescaled(statistics, o, g, one_pass)


def in_range(statistics: Statistics) -> bool:
    """Whether no sum of squares has overflowed or vanished."""
    sums, largest = (statistics.sum_dd, statistics.sum_gg), statistics.max_abs
    return all(_TINY < total < _HUGE or total == largest == 0.0 for total in sums)


def distinct_floats(o: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole numbers as float64 that differ where they do. NumPy compares signed with unsigned ones exactly."""
    a, b = o.cpu().numpy(), g.cpu().numpy()
    x, y = a.astype(np.float64), b.astype(np.float64)
    x = np.where((a != b) & (x == y), np.nextafter(y, np.where(a > b, np.inf, -np.inf)), x)
    return torch.from_numpy(x).to(o.device), torch.from_numpy(y).to(o.device)


def _rescaled(statistics: Statistics, o: torch.Tensor, g: torch.Tensor, one_pass: Any) -> Statistics:
    """Squares overflow, or vanish: the sums of what both are in units of their largest number, a piece at a time."""
    parts = [piece for _, piece in pieces((0, [o, g]), MANY_ELEMENTS)]
    finite = ((x.isfinite() & y.isfinite(), z) for x, y in parts for z in (x, y))
    unit = max(float(torch.where(both, z.double().abs(), 0.0).max()) for both, z in finite) or 1.0
    again = combine([one_pass(x.double() / unit, y.double() / unit, math.inf) for x, y in parts])
    return statistics._replace(sum_dd=again.sum_dd, sum_gg=again.sum_gg, sum_dg=again.sum_dg)


def described(s: Statistics, o: torch.Tensor, names: tuple[str, str], why: str) -> Comparison:
    """The fields of a Comparison of `o`, from what one pass gathered, the names of both dtypes, and the bound in words.

    The cosine's angle comes from sin^2 = (|g|^2 |d|^2 - (d, g)^2) / (|g|^2 |o|^2), which keeps its digits near 1.
    """

    def index(place: float) -> tuple[int, ...] | None:
        return None if place < 0 else tuple(map(int, np.unravel_index(int(place), o.shape)))

    oo = s.sum_gg + 2.0 * s.sum_dg + s.sum_dd
    if s.sum_gg == 0.0 or oo <= 0.0:
        cosine = float(s.sum_gg == s.sum_dd == 0.0)
    else:
        sine2 = (s.sum_dd - s.sum_dg / s.sum_gg * s.sum_dg) / oo  # no product of two sums, which may underflow
        cosine = math.copysign(math.sqrt(max(0.0, 1.0 - max(0.0, sine2))), s.sum_gg + s.sum_dg)
    counts: dict[str, Any] = {name: int(getattr(s, name)) for name in COUNTS}
    infinite = s.one_sided >= 0
    at, observed, golden = s.worst, s.worst_observed, s.worst_golden
    if infinite:
        at, observed, golden = s.one_sided, s.one_sided_observed, s.one_sided_golden
    return Comparison(
        tuple(o.shape),
        *names,
        o.numel(),
        first_index=index(s.first),
        worst_index=index(at),
        worst_observed=None if at < 0 else observed,
        worst_golden=None if at < 0 else golden,
        max_abs=s.max_abs,
        mean_abs=s.sum_abs / max(1, o.numel()),
        max_rel=s.max_rel,
        max_ulp=s.max_ulp if o.is_floating_point() else s.max_abs,
        rms_ratio=math.sqrt(s.sum_dd) / math.sqrt(s.sum_gg) if s.sum_gg else math.inf if s.sum_dd else 0.0,
        cosine=cosine,
        bound=why,
        bound_used=math.inf if infinite else s.used,
        ok=s.mismatches == 0,
        **counts,
    )
