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
from labkit.formula import Formula
from labkit.handed_on import Input, cancelled, inherited_error, locally, rescaled, sum_size
from labkit.magnitude import MASKED, finite, scale_of, spread
from labkit.precision import UNIT, Precision
from labkit.replayed import Replay, Weighed
from labkit.tolerance import gamma, ulp

Tensor = torch.Tensor

MARGIN = 1.2
"""By how much an estimate of what a step may be off, where it cannot be replayed, is taken to be short."""

UNLIKELY = 8.0
"""Standard deviations beyond which a sum of independent roundings is not taken to be off."""

AMPLIFICATION = 3.0
"""How many times a step that cannot be replayed may magnify the relative error of its inputs."""


SCALED = 16
"""How many times as many elements as a scale its matrix has, at least."""

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
        return torch.full_like(g, 0.0 if whole else 1.0 if precision.stochastic else 0.5)
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


def replayed(
    found: Replay, inputs: Sequence[Tensor], precision: Precision, parts: int = 1, narrow: Sequence[float] = ()
) -> tuple[Tensor, Allowed]:
    """The step in float64 from `inputs`, and what the implementation may differ from that.

    A product: Higham and Mary's bound of its sum, each factor cut first where the promise says so; its noise goes
    with the partial sums, about u sqrt(K) (|sum| + sqrt(sum (ab)^2)); accumulators that truncate drift with K. A
    softmax: to first order, three roundings of the exponent, eight others, and a sum's worth of them. A text of several
    `parts` is several operations, and where storage is narrower than float32 each may have been stored in between.
    `narrow` is the round-off with which each input was stored where a fused kernel may have gone on without it, else 0.
    """
    value = found.run(*inputs)
    unstored = math.prod(1.0 + unit for unit in narrow) - 1.0
    u = (0.0 if precision.stored == "integer" else precision.compute) + precision.extra
    half = storage(value, precision)
    if precision.eager:
        half = half * max(1, len(inputs) - 1 + found.product)
    size, k = finite(value).abs(), max(1, found.length)
    if found.softmax:
        relative = u * (-3.0 * torch.log(value.clamp(min=1e-45)) + 8.0 + 2.0 * math.sqrt(k))
        if parts > 1 and precision.unit > UNIT["float32"]:
            relative = relative + (parts - 1) * precision.unit * float(finite(inputs[0]).abs().max())
        if not found.product:
            relative = relative + unstored * float(torch.where(inputs[0] > MASKED, finite(inputs[0]), 0.0).abs().max())
        bound = noise = shared = size * (relative + _logit_error(found, inputs, precision, u))
        bound = bound + torch.finfo(torch.float32).tiny
    elif found.magnitude:
        magnitude = finite(found.magnitude(*inputs))
        squares = finite(found.squares(*inputs)) if found.squares else magnitude**2
        exact = not precision.transformed and _cut_already(inputs, precision.factor)
        cut = max((1.0 + (0.0 if exact else precision.factor)) ** 2 - 1.0, unstored)
        cut = cut * found.transformed if precision.transformed else cut
        cuts = torch.minimum(magnitude, UNLIKELY * squares.sqrt() + size)  # of many factors cut not all fall one way
        bound = magnitude * found.transformed * gamma(k, u, value.numel()) * (1.0 + cut) + cut * cuts
        noise = found.transformed * u * math.sqrt(k) * (size + squares.sqrt()) + cut * squares.sqrt()
        drifts = precision.factor > 0.0 or precision.unit > UNIT["float32"]
        shared = u * (4.0 + (0.25 * k if drifts else 0.0)) * size
        shared = shared + 2.0 * _shared_cut(inputs, precision.factor) * size
        if precision.factor == 2.0 * UNIT["tf32"]:  # hardware that truncates shrinks every factor a little
            shared = shared + 0.5 * cut * size
        if found.weighed is not None:
            off, spread_off = _weights_error(found.weighed(*inputs), precision, u, cut)
            bound, noise, shared = bound + off, (noise**2 + spread_off**2).sqrt(), shared + 8.0 * u * size
    else:
        bound, noise, shared = (4.0 * u + unstored) * size, (2.0 * u + unstored) * size, 4.0 * u * size
    noise = (noise**2 + half**2).sqrt()
    bound = bound + 1.001 * half + 2.0**-149
    return value, Allowed(bound, noise, shared, shared, "replayed in float64 from the observed inputs")


def _shared_cut(inputs: Sequence[Tensor], factor: float) -> float:
    """By what share all of a product moves when its factors are rounded to 16 bits, as where many are one number."""
    kind = {UNIT["bfloat16"]: torch.bfloat16, UNIT["float16"]: torch.float16}.get(factor)
    if kind is None:
        return 0.0
    moved = 0.0
    for x in map(finite, inputs):
        off = finite(x.to(kind).double()) - x
        moved += abs(float((off * x).sum())) / max(float(x.square().sum()), 1e-300)
    return moved


def _cut_already(inputs: Sequence[Tensor], factor: float) -> bool:
    """Whether the factors of a product, not their scales, have no more digits than it would cut them to."""
    if not factor:
        return True
    most = max(x.numel() for x in inputs)
    factors = [x for x in inputs if len(inputs) == 2 or SCALED * x.numel() > most]
    shifted = [torch.frexp(finite(x)).mantissa / factor for x in factors]
    return all(bool((one == one.round()).all()) for one in shifted)


def by_formula(
    found: Formula,
    inputs: Sequence[Tensor],
    narrow: Sequence[float],
    precision: Precision,
    guessed: bool = False,
    together: Sequence[bool] = (),
) -> tuple[Tensor, Allowed]:
    """A formula in float64 from `inputs`, and what the implementation may differ from that: its running error bound.

    `narrow` is the round-off of each input's own type where that is narrower than float32, else 0: a fused kernel may
    have gone on with what it had before it was stored. Where the formula is `guessed`, what is between its operations
    may have been stored too. `together`: what such an input is off all elements of a row share, as of a softmax.
    """
    u = (0.0 if precision.stored == "integer" else precision.compute) + precision.extra
    each = max(u, precision.between) if guessed and found.steps > 1 else u
    cut = [unit * finite(x).abs() for unit, x in zip(narrow, inputs, strict=True)]
    value, error = found.value(inputs, cut, each, u)
    # What is stored in between is rounded to nearest, and so has no drift.
    shared = [x if both else torch.zeros_like(x) for x, both in zip(cut, together or [False] * len(cut), strict=True)]
    rounded = found.value(inputs, shared, u, u)[1]
    last = (each - u) * value.abs()  # the last rounding is that of storage
    error = (error - last).clamp(min=0.0)
    if precision.dtype is not None and precision.stored.startswith("float8"):
        largest = torch.finfo(precision.dtype).max
        value = value.clamp(-largest, largest)
    half = storage(value, precision)
    if found.stored and precision.between > UNIT["float32"]:
        error = error + 0.5 * found.stored * precision.between * (value.abs() + value.abs().mean())
        rounded = error
    bound = 2.0 * error + 1.001 * half + 2.0**-149
    few = value.numel() > 1 and 4 * len(value.unique()) < value.numel()  # equal values are all rounded one way
    drift = bound if few else 2.0 * rounded  # else rounding to nearest has none
    noise = error + half + 2.0**-149
    return value, Allowed(bound, noise, drift, drift, "its formula in float64 from the observed inputs")


def _logit_error(found: Replay, inputs: Sequence[Tensor], precision: Precision, u: float) -> float:
    """Absolute error of the exponents where the product before the softmax is part of the step."""
    if not found.product or not found.magnitude:
        return 0.0
    largest = float(finite(found.magnitude(*inputs)).max())
    cut = (1.0 + precision.factor) ** 2 - 1.0
    return 2.0 * largest * (u * math.sqrt(found.length) * 4.0 + cut)


def _weights_error(found: Weighed, precision: Precision, u: float, cut: float) -> tuple[Tensor, Tensor]:
    """Of sums by softmax weights, what the weights' errors bring at most, and as noise.

    A weight's relative error is its score's absolute one, three roundings of the exponent, eight others, and what the
    weight itself is cut to as the factor of a product. `cut` is what the scores' factors were.
    """
    weights = found.weights
    size, spread_of = found.score_sizes, found.score_squares.sqrt()
    rounded = u * (8.0 + 2.0 * math.sqrt(weights.shape[-1]) - 3.0 * torch.log(weights.clamp(min=1e-45)))
    rounded = rounded + precision.factor + precision.between * (1.0 + finite(found.scores).abs())
    sums = u * math.sqrt(found.score_length)
    most = rounded + 4.0 * sums * size + cut * torch.minimum(size, UNLIKELY * spread_of)
    typical = rounded + 2.0 * sums * spread_of + cut * spread_of
    of_many = UNLIKELY * found.squares(most).sqrt()
    return torch.minimum(found.magnitude(most), of_many), found.squares(typical).sqrt()


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
