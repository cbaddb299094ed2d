"""What a step may be off from its replay: what its arithmetic, its cut factors and its storage cost."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from labkit.allowance import Allowed, storage
from labkit.formula import Formula
from labkit.magnitude import MASKED, finite
from labkit.numerics.bounds import gamma
from labkit.precision import UNIT, Precision
from labkit.replayed import Replay, Weighed

Tensor = torch.Tensor

UNLIKELY = 8.0
"""Standard deviations beyond which a sum of independent roundings is not taken to be off."""

SCALED = 16
"""How many times as many elements as a scale its matrix has, at least."""


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
