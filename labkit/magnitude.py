"""How large the numbers of a tensor are: the scales that an allowance goes with."""

from __future__ import annotations

import torch

Tensor = torch.Tensor

MASKED = -1e4
"""A score from here down is a mask: float32's exponential of it is zero beside any score that is not."""


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
