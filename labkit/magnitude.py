"""How large the numbers of a tensor are: the scales that an allowance goes with."""

from __future__ import annotations

import math

import torch

Tensor = torch.Tensor

MASKED = -1e4
"""A score from here down is a mask: float32's exponential of it is zero beside any score that is not."""
ONE_MASK = 2.0**-9
"""How far apart, relatively, what stands for a mask may be: scores may have been added to it."""


def unmasked(o: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Both sides, float64, with -Inf on both where both hold a mask: -Inf, or a number that no softmax tells from it.

    Numbers from MASKED down are a mask if they are about one number on each side, and leave something in their row.
    """
    hidden = (o <= MASKED) & (g <= MASKED)
    if not bool(hidden.any()):
        return o, g
    if _about_one(o[hidden]) and _about_one(g[hidden]) and hidden.ndim:
        hidden = hidden & ~hidden.all(-1, keepdim=True)
    else:
        hidden = hidden & (o.isinf() != g.isinf())
    return o.masked_fill(hidden, -math.inf), g.masked_fill(hidden, -math.inf)


def _about_one(x: Tensor) -> bool:
    finite_ones = x[x.isfinite()]
    if not finite_ones.numel():
        return True
    largest = finite_ones.abs().max()
    return finite_ones.numel() == x.numel() and bool(finite_ones.max() - finite_ones.min() <= ONE_MASK * largest)


def finite(x: Tensor) -> Tensor:
    """Zeros in place of what is not finite."""
    return torch.where(x.isfinite(), x, 0.0)


def scale_of(g: Tensor) -> Tensor:
    """The size that errors of an element go with: its own, or the RMS of its row or its column."""
    g = finite(g)
    if g.ndim == 0:
        return g.abs()
    rows = g.pow(2).mean(-1, keepdim=True).sqrt()
    columns = g.reshape(-1, g.shape[-1]).pow(2).mean(0).sqrt()
    return torch.maximum(torch.maximum(rows, columns), g.abs())


def spread(g: Tensor) -> float:
    """RMS of what is left of each row without its mean; of the whole where rows are constant."""
    if g.ndim == 0 or g.shape[-1] < 2:
        return float(g.pow(2).mean().sqrt())
    left = float((g - g.mean(-1, keepdim=True)).pow(2).mean().sqrt())
    whole = float(g.pow(2).mean().sqrt())
    return left if left > 1e-7 * whole else whole
