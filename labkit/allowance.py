"""What a step of a trace may be off, from what its metadata offers.

A step that can be replayed is recomputed in float64 from the observed inputs, and may differ from that by what its
arithmetic and its storage cost. Any other step is held to the golden: it may differ by its own rounding and by what its
inputs were off, magnified at most `AMPLIFICATION` times; where the words of its operation say that it cancels, divides,
exponentiates or sums, that is reckoned with what such an operation does to an error.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from labkit import words
from labkit.handed_on import Input, cancelled, inherited_error, locally, rescaled, sum_size
from labkit.magnitude import finite, scale_of, spread
from labkit.numerics.bounds import ulp
from labkit.precision import UNIT, Precision

Tensor = torch.Tensor

MARGIN = 1.2
"""By how much an estimate of what a step may be off, where it cannot be replayed, is taken to be short."""

AMPLIFICATION = 3.0
"""How many times a step that cannot be replayed may magnify the relative error of its inputs."""


CONCENTRATED = 12.0
"""An input's largest error over its RMS from which it lies in a few elements: that of rounding stays below 6."""


@dataclass(frozen=True)
class Allowed:
    """What one step may be off: `bound` element by element, `noise`, `shared`, `overall` as structure() has them."""

    bound: Tensor
    noise: Tensor
    shared: Tensor
    overall: Tensor
    why: str


def storage(g: Tensor, precision: Precision) -> Tensor:
    """Half a unit in the last place of the stored dtype at g; the smallest normal where denormals may be flushed."""
    if precision.dtype is None:  # codes, which a golden may have left unrounded
        whole = bool((finite(g) == finite(g).round()).all())
        exact = whole and not precision.fixed  # a real number near a tie may have fallen the other way
        return torch.full_like(g, 0.0 if exact else 1.0 if whole or precision.stochastic else 0.5)
    half = (1.0 if precision.stochastic else 0.5) * ulp(finite(g), precision.dtype)
    if precision.scaled and g.numel():  # its grid is not this one, and its least numbers follow from the largest
        limits = torch.finfo(precision.dtype)
        least = float(finite(g).abs().max()) * limits.smallest_normal * limits.eps / limits.max
        half = torch.maximum(half, precision.unit * finite(g).abs()).clamp(min=0.5 * least)
    if precision.golden is not None:
        half = half + 0.5 * ulp(finite(g), precision.golden)
    if precision.levels and g.numel():
        half = half + float(finite(g).abs().max()) / precision.levels  # half a step of a scale with no zero point
    half = half + precision.absolute
    if precision.flush or torch.finfo(precision.dtype).tiny < 1e-30:  # GPU code flushes those of float32 unasked
        half = half.clamp(min=torch.finfo(precision.dtype).tiny)
    return half


def roundings(g: Tensor, precision: Precision) -> tuple[float, Tensor]:
    """The golden's own round-off, and what rounding to the promised type may move its elements."""
    unit = 2.0**-53 if precision.golden is None else max(torch.finfo(precision.golden).eps, UNIT["float32"])
    return unit, storage(g, precision) if precision.unit > UNIT["float16"] else torch.zeros_like(g)


def unreplayed(
    g: Tensor, op: str, k: int | None, inputs: Sequence[Input], background: tuple[float, ...], precision: Precision,
    *, complete: bool = True,
) -> Allowed:  # fmt: skip
    """What a step that cannot be replayed may differ from the golden.

    `background` is the relative error, the absolute one, the size, and the size over the spread of the steps before,
    for a step whose inputs are not recorded, or not `complete`.
    """
    size = scale_of(g)
    half = storage(g, precision)
    step = 2.0 * half if precision.unit > UNIT["float32"] and _on_grid(g, precision) else half
    # (on the grid the golden was rounded too: a near tie may fall either way, by a whole unit, but not everywhere)
    u = precision.compute + precision.extra
    if precision.golden is not None:
        u = max(u, UNIT["float32"])
    elementwise = bool(inputs) and not words.WHOLE.search(op) and all(_fits(x.golden, g) for x in inputs)
    length = k or max([1, *(x.golden.shape[-1] for x in inputs if x.golden.ndim), *([] if inputs else g.shape[-1:])])
    length = 1 if elementwise and not k else length
    summed = sum_size(g, inputs, op) if inputs and words.SUMMED.search(op) else (0.0, 1.0)
    if not inputs and words.SUMMED.search(op):
        summed = (background[2], 1.0)
    if words.AVERAGED.search(op):  # weights that add up to one
        summed = (
            max((float(finite(x.golden).abs().mean()) for x in inputs if x.golden.numel() >= g.numel()), default=0.0),
            1.0,
        )
    magnitude = torch.maximum(size, torch.full_like(size, summed[0]))
    condition = 1.0
    if words.SHIFTED.search(op):
        condition = 1.0 if inputs else max(1.0, background[3])
        for one in inputs:
            if one.golden.numel() >= g.numel() and one.golden.ndim:
                whole = float(finite(one.golden).pow(2).mean().sqrt())
                condition = max(condition, whole / max(spread(finite(one.golden)), 1e-300))
    if (
        "two-pass" in op and condition > 1.0
    ):  # a mean that is taken away first costs a rounding of what it is taken from
        condition = 1.0 + condition / (8.0 + 2.0 * math.sqrt(length))
    handed = condition if not inputs and condition > 4.0 else 1.0  # below, `a` covers what a mean leaves
    turned = 0.0
    if words.TURNED.search(op) and (inputs or g.ndim > 1):  # the angle is rounded, and its error is absolute
        angle = math.prod(float(finite(x.golden).abs().max()) for x in inputs) if inputs else g.shape[-2]
        turned = (2.0 if precision.golden is None else 4.0) * UNIT["float32"] * angle
    own = turned + (u * (8.0 + 2.0 * math.sqrt(length)) * condition + 2.0 * precision.factor) * magnitude
    if precision.eager:  # several operations, each stored
        own = own + 2.0 * precision.unit * condition * magnitude
    if inputs:
        rms, peak, average = inherited_error(
            inputs,
            op,
            None if elementwise and not words.SUMMED.search(op) and not words.PICKED.search(op) else g.numel(),
        )
    else:
        rms = peak = average = 0.0
    if not inputs or not complete:
        around = max(handed * background[0], background[1] if words.EXPONENTIAL.search(op) else 0.0)
        if words.DIFFERENCE.search(op):  # of two steps before, each off by so much
            around = max(around, 2.0 * background[1] / max(float(finite(g).pow(2).mean().sqrt()), 1e-300))
        if not background[0] and not inputs and precision.unit > UNIT["float32"]:
            around = precision.unit  # what went in, and is not recorded, was rounded like what came out
        rms, peak, average = max(rms, around), max(peak, 10.0 * around), max(average, around)
    a = AMPLIFICATION * (2.0 if words.CANCELS.search(op) or words.PICKED.search(op) else 1.0)
    reach = torch.maximum(size, torch.full_like(size, 2.0 * summed[0] / math.sqrt(summed[1])))
    local = (
        locally(g, op, inputs)
        if elementwise and not words.ONE_HOT.search(op)
        else torch.full_like(size, cancelled(g, op, inputs))
    )
    scaled = rescaled(g, op, inputs)
    together = rms
    if inputs and peak > CONCENTRATED * rms:  # a few elements are far off, as where a comparison fell the other way
        together = max(rms, peak / math.sqrt(max(1, g.shape[-1] if g.ndim else 1)))
    drift = precision.factor * size if precision.factor == 2.0 * UNIT["tf32"] else torch.zeros_like(size)
    shared = a * together * reach + local + scaled + 8.0 * u * condition * size + drift
    bound = own * 4.0 + max(a * peak, 6.0 * a * rms) * reach + local + a * scaled + 1.001 * step
    drifting = coefficient(op, u) * size
    bound, shared = bound + 2.0 * drifting, shared + drifting
    noise = (half**2 + own**2).sqrt()
    overall = drifting + (a * average + 4.0 * u * condition) * reach + (local if words.MINUS.search(op) else 0.0)
    overall = overall + drift  # factors that hardware truncates shrink every product a little
    bound = torch.where(bound.isnan(), math.inf, bound)
    why = "rounding, and what the inputs were off"
    return Allowed(MARGIN * bound, MARGIN * noise, MARGIN * shared, MARGIN * overall, why)


def coefficient(op: str, u: float) -> float:
    """Relative error that 1 - beta brings when it is computed in the step's precision: u beta / (1 - beta)."""
    if not words.MOMENT.search(op):
        return 0.0
    given = re.search(r"beta\w* ?= ?(0\.\d+)", op)
    squares = re.search(r"squar|second|\bv|[/._]v", op, re.IGNORECASE)
    beta = float(given.group(1)) if given else 0.999 if squares else 0.9
    return 2.0 * u * beta / (1.0 - beta)


def _fits(x: Tensor, g: Tensor) -> bool:
    try:
        return torch.broadcast_shapes(x.shape, g.shape) == g.shape
    except RuntimeError:
        return False


def _on_grid(g: Tensor, precision: Precision) -> bool:
    if precision.dtype is None:
        return False
    kept = finite(g)
    return bool((kept.to(precision.dtype).double() == kept).all())
