"""Whether a tensor is another one times a factor, plus an offset, or quantised: one number for all, or one a block.

An element o that was rounded, of a golden g that was rounded too, allows the factors from (|o| - h) / (|g| + h') to
(|o| + h) / (|g| - h'), h and h' being half a unit in the last place of either. A block has a factor where the intervals
of all its elements share a number: no factor is fitted, and no tolerance is chosen. Offsets likewise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from whywrong.comparing.precision import INTEGERS, UNIT_ROUNDOFF, half_ulp, name_of

BLOCK = 32
"""Columns of the smallest block with a factor of its own, that of the MX formats (OCP, 2023)."""
FEWEST = 4
"""Elements that a block has at least: two may have a factor in common by chance."""
PIECE = 1 << 21
"""Elements whose intervals are in memory at a time."""


@dataclass(frozen=True)
class Fit:
    """A number for each block, between `low` and `high`, float64 vectors: a factor, an `offset`, or one over a scale.

    `blocks` are the blocks in words, nothing for one number; `zero` is what was added after a factor.
    """

    low: Tensor
    high: Tensor
    blocks: str
    offset: bool = False
    zero: int = 0

    @property
    def numbers(self) -> str:
        """The first four numbers, each with no more digits than tell it from those that do not fit."""
        few = ", ".join(map(_shortest, self.low[:4].tolist(), self.high[:4].tolist()))
        return few + ", ..." * (len(self.low) > 4)

    @property
    def nothing(self) -> bool:
        """Whether the factor may be 1, or the offset 0."""
        neutral = 0.0 if self.offset else 1.0
        return bool(((self.low <= neutral) & (self.high >= neutral)).all()) and not self.zero


def quantised(x: Tensor) -> bool:
    """Whether a tensor's type is one that needs a scale."""
    return name_of(x.dtype) in INTEGERS or UNIT_ROUNDOFF.get(name_of(x.dtype), 0.0) > UNIT_ROUNDOFF["bfloat16"]


def fit(o: Tensor, g: Tensor) -> Fit | None:
    """The fewest factors or offsets, by blocks, that make `o` of `g`, both of one shape; None where there are none.

    `g` holds real numbers. Blocks are slices of the first or last dimension, rows, and those of block scaling.
    """
    if o.numel() < FEWEST or not g.is_floating_point() or o.dtype == torch.bool:
        return None
    whole = name_of(o.dtype) in INTEGERS
    zeros = [0, _zero_point(o, g)] if whole else [0]
    ways = [(False, zero) for zero in dict.fromkeys(zeros)] + [(True, 0)] * (not quantised(o))
    fits = [one for way in ways if (one := _fit(o, g, *way)) is not None]
    return min(fits, key=lambda one: len(one.low), default=None)


def _zero_point(o: Tensor, g: Tensor) -> int:
    x, y = g.flatten()[:PIECE].double(), o.flatten()[:PIECE].double()
    slope = ((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum().clamp(min=1e-300)
    zero = float(y.mean() - slope * x.mean())
    return round(zero) if math.isfinite(zero) else 0


def _fit(o: Tensor, g: Tensor, offset: bool, zero: int) -> Fit | None:
    columns = o.shape[-1]
    a, b = o.reshape(-1, columns), g.reshape(-1, columns)
    width, rows = min(BLOCK, columns), list[Tensor]()
    total = torch.tensor([[-torch.inf], [torch.inf]], dtype=torch.float64, device=o.device).repeat(1, columns)
    step = max(1, PIECE // columns)
    for some, others in zip(a.split(step), b.split(step), strict=True):
        interval = _interval(some, others, offset, zero)
        total = _narrowed(torch.cat([total[:, None], interval], 1), len(some) + 1, 1)[:, 0]
        rows.append(_narrowed(interval, 1, width))
        if bool((rows[-1][0] > rows[-1][1]).any() and (total[0] > total[1]).any()):
            return None
    table = torch.cat(rows, 1)
    fits = (Fit(x[0].flatten(), x[1].flatten(), words, offset, zero) for words, x in _blocks(o, table, total, width))
    known = (one for one in fits if bool((one.low <= one.high).all()) and len(one.low) * FEWEST <= o.numel())
    return min(known, key=lambda one: len(one.low), default=None)


def _blocks(o: Tensor, table: Tensor, total: Tensor, width: int) -> Iterator[tuple[str, Tensor]]:
    """The intervals of all blocks of a kind, and the kind in words; `table` has those of `width` columns of a row."""
    _, rows, across = table.shape
    last = o.ndim - 1
    yield "", _narrowed(table, rows, across)
    if o.ndim > 1:
        yield f" for each slice of dimension {last}", total
        yield " for each slice of dimension 0", _narrowed(table, rows // len(o), across)
        yield f" for each row along dimension {last}", _narrowed(table, 1, across)
    for tall, wide in ((128, 128), (1, 128), (1, 64), (1, 32)) if width == BLOCK else ():
        yield f" for each block of {tall} x {wide}", _narrowed(table, tall, wide // BLOCK)


def _narrowed(interval: Tensor, tall: int, wide: int) -> Tensor:
    """What the intervals of a block share: [2, rows, columns], the lower ends and the upper ones."""
    _, rows, columns = interval.shape
    sides = (0, -columns % wide, 0, -rows % tall)
    low, high = pad(interval[0], sides, value=-torch.inf), pad(interval[1], sides, value=torch.inf)
    low, high = (x.unflatten(1, (-1, wide)).unflatten(0, (-1, tall)) for x in (low, high))
    return torch.stack([low.amax((1, 3)), high.amin((1, 3))])


def _interval(o: Tensor, g: Tensor, offset: bool, zero: int) -> Tensor:
    """For each element the lowest and the highest number that fits: infinite ones where all do, in turn where none."""
    names, info = (name_of(o.dtype), name_of(g.dtype)), torch.iinfo if name_of(o.dtype) in INTEGERS else torch.finfo
    limits = info(o.dtype)
    o, g = o.double(), g.double()
    half, off = (half_ulp(x, name) for x, name in zip((o, g), names, strict=True))
    low = torch.where(o <= max(limits.min, -limits.max), -torch.inf, o - half) - zero  # a type's last number: or more
    high = torch.where(o >= limits.max, torch.inf, o + half) - zero
    if offset:
        ends = torch.stack([low - g - off, high - g + off])
        free = none = torch.zeros_like(g, dtype=torch.bool)
    else:
        quotients = torch.stack([low / g, high / g]).sort(0).values
        relative = (off / g.abs()) * torch.tensor([-1.0, 1.0], dtype=g.dtype, device=g.device).view(2, 1, 1)
        ends = quotients + torch.where(quotients.isinf(), 0.0, quotients.abs() * relative)
        free, none = (g == 0.0) & (low <= 0.0) & (high >= 0.0), (g == 0.0) & ((low > 0.0) | (high < 0.0))
    strange = ~(o.isfinite() & g.isfinite())
    same = (o == g) | (o.isnan() & g.isnan())
    everything = torch.tensor([-torch.inf, torch.inf], dtype=g.dtype, device=g.device).view(2, 1, 1)
    ends = torch.where(free | (strange & same), everything, ends)
    return torch.where(none | (strange & ~same), -everything, ends)


def _shortest(low: float, high: float) -> str:
    """The number of the fewest digits between two others."""
    middle = (low + high) / 2.0 if math.isfinite(low) and math.isfinite(high) else max(low, min(high, 0.0))
    words = (f"{middle:.{digits}g}" for digits in range(1, 17))
    return next((word for word in words if low <= float(word) <= high), repr(middle))
