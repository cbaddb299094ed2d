"""One tensor against its golden: every statistic that tells whether, where and how it is wrong."""

from __future__ import annotations

import html
import math
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from labkit.errors import UsageError
from labkit.tables import number
from labkit.tolerance import Bound, ulp


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
    """Compare `observed` with `golden`, torch tensors or NumPy arrays of any shape, strided or not.

    `bound` is a :class:`~labkit.tolerance.Bound`, a number or an array of allowed absolute differences. None knows
    the dtypes only and allows half a unit in the last place of the observed dtype. An infinite bound allows anything,
    a NaN too. Equal NaNs and Infs at equal places are equal. Different shapes are a divergence, not an error.
    Raises UsageError for a golden narrower than the observed.
    """
    o, g = _pair(observed, golden)
    names = (_name(o.dtype), _name(g.dtype))
    if o.shape != g.shape:
        return _shapes_differ(o, g, names)
    allowed, why = _allowed(o, g, bound)
    return _measure(o, g, allowed, why, names)


def within(observed: Any, golden: Any, bound: Bound | float | Any | None = None) -> bool:
    """Whether :func:`compare` would say ok, at a fraction of its cost. Raises as it does."""
    o, g = _pair(observed, golden)
    return o.shape == g.shape and not bool(_wrong(o, g, _allowed(o, g, bound)[0])[0].any())


def _pair(observed: Any, golden: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Both as tensors, once they are known to be comparable."""
    o, g = _tensor(observed), _tensor(golden)
    for name, side in (("observed", o), ("golden", g)):
        if side.is_complex():
            raise UsageError(f"{name}: {_name(side.dtype)} is not right; wanted real numbers (compare the two parts)")
    if o.is_floating_point() and (not g.is_floating_point() or torch.finfo(g.dtype).eps > torch.finfo(o.dtype).eps):
        raise UsageError(
            f"golden: {_name(g.dtype)} is narrower than the observed {_name(o.dtype)}; wanted at least as wide"
        )
    return o, g


def _tensor(values: Any) -> torch.Tensor:
    if isinstance(values, torch.Tensor):
        return values.detach()
    array = np.asarray(values)
    return torch.from_numpy(array if array.flags.writeable and min(array.strides, default=0) >= 0 else array.copy())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _allowed(o: torch.Tensor, g: torch.Tensor, bound: Any) -> tuple[torch.Tensor, str]:
    if bound is None:
        if not o.is_floating_point():
            return torch.zeros((), dtype=torch.float64, device=o.device), "dtypes only: integers are equal"
        # What the golden becomes when it is stored is always allowed, an overflow to Inf included.
        stored = g.to(o.device, o.dtype).double()
        rounding = (stored - g.to(o.device, torch.float64)).abs().nan_to_num(0.0, posinf=0.0)
        half = (0.5 * ulp(g.to(o.device), o.dtype)).nan_to_num(0.0)
        overflow = stored.isinf() & (o.double() == stored)
        return torch.where(
            overflow, math.inf, torch.maximum(half, rounding)
        ), f"dtypes only: half an ULP of {_name(o.dtype)}"
    given, why = (bound.absolute, bound.why) if isinstance(bound, Bound) else (bound, "given")
    allowed = _tensor(given).to(o.device, torch.float64)
    try:
        return allowed.expand(o.shape), why
    except RuntimeError:
        raise UsageError(
            f"bound: shape {tuple(allowed.shape)} is not right; wanted a number or shape {tuple(o.shape)}"
        ) from None


def _wrong(
    o: torch.Tensor, g: torch.Tensor, allowed: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return which elements mismatch, |o - g| (NaN where one is not finite), and both sides in float64."""
    o64, g64 = o.double(), g.to(o.device, torch.float64)
    integers = not (o.is_floating_point() or g.is_floating_point())
    equal = o == g.to(o.device) if integers else o64 == g64  # float64 cannot tell large integers apart
    same = equal | (o64.isnan() & g64.isnan())
    difference = (o64 - g64).abs()
    near = (difference <= allowed) & (allowed > 0.0) if integers else difference <= allowed
    return ~(same | near | (allowed == math.inf)), difference, o64, g64


def _measure(o: torch.Tensor, g: torch.Tensor, allowed: torch.Tensor, why: str, names: tuple[str, str]) -> Comparison:
    wrong, difference, o64, g64 = _wrong(o, g, allowed)
    finite = o64.isfinite() & g64.isfinite()
    d = torch.where(finite, difference, 0.0)
    gf, of = torch.where(finite, g64, 0.0), torch.where(finite, o64, 0.0)
    one_sided = ~finite & wrong
    rank = torch.where(one_sided, math.inf, d).flatten()
    count = o.numel()
    worst = int(rank.argmax()) if count else None
    mismatches = int(wrong.sum())
    norm_g, norm_o = float((gf * gf).sum().sqrt()), float((of * of).sum().sqrt())
    spacing = ulp(gf, o.dtype) if o.is_floating_point() else torch.ones_like(gf)
    used = torch.where(d > 0.0, d / allowed, 0.0)
    return Comparison(
        shape=tuple(o.shape),
        observed_dtype=names[0],
        golden_dtype=names[1],
        count=count,
        mismatches=mismatches,
        first_index=_index(int(wrong.flatten().to(torch.uint8).argmax()), o.shape) if mismatches else None,
        worst_index=_index(worst, o.shape),
        worst_observed=None if worst is None else float(o64.flatten()[worst]),
        worst_golden=None if worst is None else float(g64.flatten()[worst]),
        max_abs=_largest(d),
        mean_abs=float(d.mean()) if count else 0.0,
        max_rel=_largest(torch.where(gf != 0.0, d / gf.abs(), 0.0)),
        max_ulp=_largest(d / spacing),
        rms_ratio=_ratio(float((d * d).sum().sqrt()), norm_g),
        cosine=_ratio(float((of * gf).sum()), norm_o * norm_g) if norm_o or norm_g else 1.0,
        observed_nan=int(o64.isnan().sum()),
        golden_nan=int(g64.isnan().sum()),
        observed_inf=int(o64.isinf().sum()),
        golden_inf=int(g64.isinf().sum()),
        observed_zero=int((o64 == 0.0).sum()),
        golden_zero=int((g64 == 0.0).sum()),
        bound=why,
        bound_used=math.inf if bool(one_sided.any()) else _largest(used),
        ok=mismatches == 0,
    )


def _largest(values: torch.Tensor) -> float:
    return float(values.max()) if values.numel() else 0.0


def _ratio(part: float, whole: float) -> float:
    if whole == 0.0:
        return 0.0 if part == 0.0 else math.inf
    return part / whole


def _index(flat: int | None, shape: torch.Size) -> tuple[int, ...] | None:
    if flat is None:
        return None
    return tuple(int(i) for i in np.unravel_index(flat, tuple(shape)))


def _shapes_differ(o: torch.Tensor, g: torch.Tensor, names: tuple[str, str]) -> Comparison:
    nan = math.nan
    text = f"observed {tuple(o.shape)}, golden {tuple(g.shape)}"
    return Comparison(
        tuple(o.shape), *names, -1, max(o.numel(), g.numel()), None, None, None, None,
        nan, nan, nan, nan, nan, nan, 0, 0, 0, 0, 0, 0, text, math.inf, False,
    )  # fmt: skip
