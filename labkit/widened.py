"""What is added to an allowance for what a trace does not tell: a grid, a factor of the data, better inputs."""

from __future__ import annotations

import torch

from labkit.allowance import AMPLIFICATION, MARGIN, Allowed, coefficient
from labkit.magnitude import finite
from labkit.precision import Precision

Tensor = torch.Tensor


def quantised(allowed: Allowed, scale: Tensor) -> Allowed:
    """Of a step that is its input in a golden without rounding, and was kept as whole multiples of `scale`.

    A zero point was rounded too, so an element may be off by a whole step; of many, roundings are even over one.
    """
    size = finite(scale).abs()
    noise = (allowed.noise**2 + size**2 / 6.0).sqrt()
    return Allowed(allowed.bound + size, noise, allowed.shared, allowed.overall, allowed.why)


def scaled(allowed: Allowed, value: Tensor, relative: float) -> Allowed:
    """Of a step with a factor that may be a number of the data, off by what the steps before it are, `relative`."""
    size = finite(value).abs()
    off = AMPLIFICATION * relative * (size + size.pow(2).mean().sqrt())  # what is added to it may cancel
    return Allowed(allowed.bound + off, allowed.noise, allowed.shared + off, allowed.overall + off, allowed.why)


def misfitting(allowed: Allowed, off: Tensor) -> Allowed:
    """Of a formula that was found in a golden of few digits, and is `off` there."""
    return Allowed(
        allowed.bound + 2.0 * off, allowed.noise + off, allowed.shared + off, allowed.overall + off, allowed.why
    )


def unrecorded(allowed: Allowed, value: Tensor, g: Tensor, op: str, precision: Precision) -> Allowed:
    """Of a step whose inputs were guessed: it may have been made of better ones than those on record.

    `value` is what the observed ones give, `g` what the golden's give: it may be anything between, and about.
    """
    exact = finite(g)
    moved = finite(value - exact).abs()
    relative = (moved / finite(g).abs().clamp(min=1e-300)).median()
    typical = torch.maximum(moved.pow(2).mean().sqrt(), relative * finite(g).abs())
    drift = coefficient(op, precision.compute + precision.extra) * finite(g).abs()
    tiny = torch.finfo(precision.dtype).tiny if precision.dtype is not None else 0.0  # flushed to zero, unasked
    bound = allowed.bound + 2.0 * moved + 6.0 * typical + 2.0 * drift + tiny
    noise = (allowed.noise**2 + typical**2 + tiny**2).sqrt()
    shared = allowed.shared + 6.0 * typical + drift
    overall = allowed.overall + 2.0 * typical + drift
    return Allowed(MARGIN * bound, MARGIN * noise, MARGIN * shared, MARGIN * overall, allowed.why)
