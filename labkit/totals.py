"""A number, or a few, that is made of whole steps: a sum of everything, or the largest magnitude of each block."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from labkit.polynomial import simple
from labkit.replayed import Replay
from labkit.samples import Sources

Tensor = torch.Tensor
Given = tuple[list[str], Replay]
ROUNDINGS = 8.0
"""How many of the golden's round-offs a sum may be off: one that is another step's would be off by all of itself."""
MOST = 1 << 18
"""Elements of a step of which a single number is made."""
TELLING = 8
"""Blocks from which a scale may be any multiple of their largest magnitudes; of fewer it is a usual one."""


def sums(sources: Sources, g: Tensor, unit: float) -> Iterator[Given]:
    """g, a single number, as the sum over all rows of one step, or of two of which one has more columns.

    Of one step, perhaps divided by a whole number: how many rows count.
    """
    if g.numel() != 1 or not bool(g.isfinite().all()) or float(g.abs()) == 0.0:
        return
    y, shape = float(g), g.shape
    few = {name: x for name, x in sources.items() if 1 < x.numel() <= MOST and x.ndim and bool(x.isfinite().all())}
    for name, x in few.items():
        total, size = float(x.sum()), float(x.square().sum().sqrt())
        count = round(total / y)
        if 1 <= count <= x.numel() and abs(total - count * y) <= ROUNDINGS * unit * (abs(total) + size):
            yield [name], _sum(slice(None), 1.0 / count, x.numel(), shape, one=True)
    rows = {name: x.flatten(1) for name, x in few.items() if x.ndim > 1}
    for (a, x), (b, z) in itertools.permutations(rows.items(), 2):
        if x.shape[0] != z.shape[0] or x.shape[1] > z.shape[1]:
            continue
        width = x.shape[1]
        for start in sorted({*range(0, z.shape[1] - width + 1, width), z.shape[1] - width}):
            terms = x * z[:, start : start + width]
            total, size = float(terms.sum()), float(terms.square().sum().sqrt())
            for share in (1.0, 1.0 / len(x)):
                if abs(share * total - y) <= ROUNDINGS * unit * (abs(y) + share * size):
                    yield [a, b], _sum(slice(start, start + width), share, x.numel(), shape, one=False)


def _sum(columns: slice, share: float, length: int, shape: torch.Size, *, one: bool) -> Replay:
    def terms(*xs: Tensor) -> Tensor:
        return xs[0] if one else xs[0].flatten(1) * xs[1].flatten(1)[:, columns]

    def run(*xs: Tensor) -> Tensor:
        return (terms(*xs).sum() * share).reshape(shape)

    def magnitude(*xs: Tensor) -> Tensor:
        return (terms(*xs).abs().sum() * share).reshape(shape)

    def squares(*xs: Tensor) -> Tensor:
        return (terms(*xs).square().sum() * share * share).reshape(shape)

    return Replay(run, magnitude, squares, length, False, False)


@dataclass(frozen=True)
class Blocks:
    """How a step is cut: `counts` blocks along each axis, of `sizes`, the last of them perhaps not full."""

    shape: torch.Size
    counts: tuple[int, ...]
    sizes: tuple[int, ...]

    def spread(self, s: Tensor) -> Tensor:
        """A number of each block [counts] at every place of it."""
        for axis, (size, n) in enumerate(zip(self.sizes, self.shape, strict=True)):
            s = s.repeat_interleave(size, axis).narrow(axis, 0, n)
        return s

    def largest(self, x: Tensor) -> Tensor:
        """The largest magnitude of each block, [counts]."""
        padding = [
            p for count, size, n in zip(self.counts, self.sizes, x.shape, strict=True) for p in (count * size - n, 0)
        ]
        whole = torch.nn.functional.pad(x.abs(), padding[::-1])
        cut = whole.reshape([part for pair in zip(self.counts, self.sizes, strict=True) for part in pair])
        return cut.amax(tuple(range(1, 2 * x.ndim, 2)))


def scales(sources: Sources, g: Tensor, unit: float) -> Iterator[Given]:
    """g as a multiple of the largest magnitudes of a step's blocks: its rows, its columns, groups, tiles, or all."""
    if not bool((g > 0.0).all()) or not bool(g.isfinite().all()):
        return
    for name, x in sources.items():
        if x.numel() <= g.numel() or not x.ndim or not bool(x.isfinite().all()):
            continue
        for blocks in cuts(x.shape, g.shape):
            largest = blocks.largest(x).reshape(g.shape)
            if _in_one_place(blocks, x, largest):
                continue
            factor = float((g / largest.clamp(min=1e-300)).flatten()[0])
            if not bool(((factor * largest - g).abs() <= ROUNDINGS * unit * g).all()):
                continue
            if g.numel() < TELLING and simple(factor, 4.0 * unit) is None and simple(1.0 / factor, 4.0 * unit) is None:
                continue
            yield [name], _scale(blocks, factor, g.shape)


def _in_one_place(blocks: Blocks, x: Tensor, largest: Tensor) -> bool:
    """Whether every one of several blocks has its largest magnitude in the same place, as a product of two vectors."""
    if largest.numel() < 2:
        return False
    at = torch.nonzero(x.abs() == blocks.spread(largest.reshape(blocks.counts)))
    return bool((at % torch.tensor(blocks.sizes) == at[0] % torch.tensor(blocks.sizes)).all())


def _scale(blocks: Blocks, factor: float, shape: torch.Size) -> Replay:
    return Replay(lambda *xs: factor * blocks.largest(xs[0]).reshape(shape), None, None, 0, False, False)


def cuts(shape: torch.Size, after: torch.Size) -> Iterator[Blocks]:
    """Ways to cut `shape` into `after` blocks; where sizes do not divide, by powers of two with a tail."""
    counts = [after] if len(after) == len(shape) else []
    missing = len(shape) - len(after)
    if missing > 0:
        counts += [torch.Size((*after, *(1,) * missing)), torch.Size((*(1,) * missing, *after))]
    seen = set()
    for count in counts:
        for whole in (True, False):
            sizes = tuple(_size(n, k, whole) for n, k in zip(shape, count, strict=True))
            fits = all(size and math.ceil(n / size) == k for n, k, size in zip(shape, count, sizes, strict=True))
            if fits and (count, sizes) not in seen:
                seen.add((count, sizes))
                yield Blocks(shape, tuple(count), sizes)


def _size(n: int, count: int, whole: bool) -> int:
    """Of `count` blocks of n: equal ones, or powers of two; 0 where there are none such."""
    if whole or count == 1:
        return n // count if n % count == 0 else 0
    return 1 << (math.ceil(n / count) - 1).bit_length()
