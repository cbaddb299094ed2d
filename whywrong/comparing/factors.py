"""Whether a tensor is another one times a factor, or plus an offset: one number for all elements, or one for a block.

An element o that was rounded, of a golden g that was rounded too, allows the factors from (|o| - h) / (|g| + h') to
(|o| + h) / (|g| - h'), h and h' being half a unit in the last place of either. A block has a factor where the intervals
of all its elements share a number: no factor is fitted, and no tolerance is chosen. Offsets likewise.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from whywrong.comparing.precision import INTEGERS, half_ulp, name_of

BLOCK = 32
"""Columns of the smallest block with a factor of its own, that of the MX formats (OCP, 2023)."""
FEWEST = 4
"""Elements that a block has at least: two may have a factor in common by chance."""
PIECE = 1 << 21
"""Elements whose intervals are in memory at a time."""


class Fit(NamedTuple):
    """The numbers that fit each block lie between `low` and `high`, float64 vectors; `blocks` says which these are."""

    low: Tensor
    high: Tensor
    blocks: str

    def __str__(self) -> str:
        few = ", ".join(map(_shortest, self.low[:4].tolist(), self.high[:4].tolist()))
        return f"{few}{', ...' * (len(self.low) > 4)}{self.blocks}"


def fit(o: Tensor, g: Tensor, offset: bool) -> Fit | None:
    """The fewest factors, or offsets, that make `o` of `g`, both of one shape; None where there are none.

    Blocks are the whole, slices of the first or last dimension, rows along the last, and those of block scaling.
    """
    columns, last = o.shape[-1], o.ndim - 1
    width, table = min(BLOCK, columns), list[Tensor]()
    step = max(1, PIECE // columns)
    down = (
        torch.tensor([-torch.inf, torch.inf], dtype=torch.float64, device=o.device).view(2, 1, 1).repeat(1, 1, columns)
    )
    for some, others in zip(o.reshape(-1, columns).split(step), g.reshape(-1, columns).split(step), strict=True):
        interval = _interval(some, others, offset)
        table.append(_shared(interval, 1, width))
        down = _shared(torch.cat([down, interval], 1), len(some) + 1, 1)
        if bool((table[-1][0] > table[-1][1]).any() and (down[0] > down[1]).any()):
            return None
    rows = torch.cat(table, 1)
    tall, wide = rows.shape[1:]
    blocks = [("", tall, wide), (" for each slice of dimension 0", max(1, tall // len(o)), wide)]
    blocks += [(f" for each row along dimension {last}", 1, wide)]
    blocks += [(f" for each block of {r} x {c}", r, c // BLOCK) for r, c in ((128, 128), (1, 128), (1, 64), (1, 32))]
    known = [(words, _shared(rows, r, c)) for words, r, c in blocks if c <= wide]
    known.append((f" for each slice of dimension {last}", down))
    every = (Fit(x[0].flatten(), x[1].flatten(), words) for words, x in known)
    fits = (one for one in every if bool((one.low <= one.high).all()) and len(one.low) * FEWEST <= o.numel())
    return min(fits, key=lambda one: len(one.low), default=None)


def _shared(interval: Tensor, tall: int, wide: int) -> Tensor:
    """What the intervals of each block share: [2, rows, columns], the lower ends and the upper ones."""
    _, rows, columns = interval.shape
    signed = torch.stack([interval[0], -interval[1]])
    padded = pad(signed, (0, -columns % wide, 0, -rows % tall), value=-torch.inf)
    low, high = padded.unflatten(2, (-1, wide)).unflatten(1, (-1, tall)).amax((2, 4))
    return torch.stack([low, -high])


def _interval(o: Tensor, g: Tensor, offset: bool) -> Tensor:
    """For each element the lowest and the highest number that fits: infinite ones where all do, NaN where none does."""
    names, limits = (
        (name_of(o.dtype), name_of(g.dtype)),
        (torch.iinfo if name_of(o.dtype) in INTEGERS else torch.finfo)(o.dtype),
    )
    o, g = o.double(), g.double()
    half, off = (half_ulp(x, name) for x, name in zip((o, g), names, strict=True))
    low = torch.where(o <= max(limits.min, -limits.max), -torch.inf, o - half)  # the last number of a type, or beyond
    high = torch.where(o >= limits.max, torch.inf, o + half)
    ends = torch.stack([low - g - off, high - g + off])
    none, free = ~(o.isfinite() & g.isfinite()), (o == g) & ~g.isfinite() | (o.isnan() & g.isnan())
    if not offset:
        ends = torch.stack([low / g, high / g]).sort(0).values
        ends += torch.stack([-ends[0].abs(), ends[1].abs()]).nan_to_num(0.0, 0.0, 0.0) * off / g.abs()
        none, free = none | (g == 0.0), free | ((g == 0.0) & (low <= 0.0) & (high >= 0.0))
    ends[:, none] = torch.tensor([[torch.inf], [-torch.inf]], dtype=torch.float64, device=g.device)
    ends[:, free] = torch.tensor([[-torch.inf], [torch.inf]], dtype=torch.float64, device=g.device)
    return ends


def _shortest(low: float, high: float) -> str:
    """The number of the fewest digits between two others."""
    words = (f"{max(low, min(high, (low + high) / 2.0)):.{digits}g}" for digits in range(1, 18))
    return next((word for word in words if low <= float(word) <= high), "any")
