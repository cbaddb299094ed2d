"""Masks: -Inf, or a number so low that no softmax tells it from that."""

from __future__ import annotations

import math

import torch
from torch import Tensor

LOWEST = -1e4
"""The highest mask in use, that of float16 models. An exponential so far below others is zero, in float64 too."""

ONE_MASK = 2.0**-7
"""How far apart, relatively, masks may be: scores were added to one number."""


def unmasked(o: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Both sides, float64, with -Inf where both have a mask: -Inf, or a number that a softmax cannot tell from it.

    Finite masks that differ are about one number on a side, more than once; other low numbers stay as they are.
    """
    if not o.ndim or not o.numel():
        return o, g
    top = torch.where(g.isfinite(), g, -math.inf).amax(-1, keepdim=True)
    half = 0.5 * LOWEST  # scores may have been added to a mask; a whole row may be hidden
    limit = half + torch.where(top > half, top.clamp(max=0.0), 0.0)
    hidden = (g < limit) & (o < limit)
    differ = hidden & (o != g)
    if int(differ.sum()) == 1 or not (_one_number(o[differ]) and _one_number(g[differ])):
        hidden = hidden & (o.isinf() != g.isinf())
    return o.masked_fill(hidden, -math.inf), g.masked_fill(hidden, -math.inf)


def _one_number(x: Tensor) -> bool:
    x = x[x.isfinite()]
    return not x.numel() or float(x.max() - x.min()) <= ONE_MASK * float(x.abs().max())
