"""A number, or a few, that is made of whole steps: a sum of everything, or the largest magnitude of each block."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import torch

from labkit.blocks import Blocks, cuts
from labkit.polynomial import simple
from labkit.replayed import Function, Replay
from labkit.samples import Sources

Tensor = torch.Tensor
Given = tuple[list[str], Replay]
ROUNDINGS = 8.0
"""How many of the golden's round-offs a sum may be off: one that is another step's would be off by all of itself."""
MOST = 1 << 18
"""Elements of a step of which a single number is made."""
MOST_PARTS = 4
"""Numbers of a step of which each is a sum of its own."""
TELLING = 8
"""Blocks from which a scale may be any multiple of their largest magnitudes; of fewer it is a usual one."""


def sums(sources: Sources, g: Tensor, unit: float) -> Iterator[Given]:
    """g, a single number, as the sum over all rows of one step, or of two of which one has more columns.

    Of one step, perhaps divided by a whole number: how many rows count.
    """
    if g.numel() != 1 or not bool(g.isfinite().all()) or float(g.abs()) == 0.0:
        return
    y, shape = float(g), g.shape
    few = _few(sources)
    for name, x in few.items():
        total, size = float(x.sum()), float(x.square().sum().sqrt())
        count = round(total / y)
        if 1 <= count <= x.numel() and abs(total - count * y) <= ROUNDINGS * unit * (abs(total) + size):
            yield [name], _sum(lambda *xs: [xs[0]], 1.0 / count, x.numel(), shape)
    for names, terms in _parts(few, y, unit):
        yield names, _sum(_one_product(terms), 1.0, few[names[0]].numel(), shape)


def sums_of_parts(sources: Sources, g: Tensor, unit: float) -> Iterator[Given]:
    """g, a few numbers, each of them the sum of a product of two steps' columns over all rows."""
    if not 1 < g.numel() <= MOST_PARTS or not bool(g.isfinite().all()):
        return
    few = _few(sources)
    found = [next(_parts(few, float(y), unit), None) for y in g.flatten()]
    given = [one for one in found if one is not None]
    if len(given) < g.numel():
        return
    names = list(dict.fromkeys(name for one, _ in given for name in one))

    def terms(*xs: Tensor) -> list[Tensor]:
        return [one(*(xs[names.index(name)] for name in of)) for of, one in given]

    yield names, _sum(terms, 1.0, max(few[of[0]].numel() for of, _ in given), g.shape)


def _few(sources: Sources) -> dict[str, Tensor]:
    return {name: x for name, x in sources.items() if 1 < x.numel() <= MOST and x.ndim and bool(x.isfinite().all())}


def _parts(few: Sources, y: float, unit: float) -> Iterator[tuple[list[str], Function]]:
    """Two steps, and the products of their columns whose sum, or mean over rows, is y."""
    rows = {name: x.flatten(1) for name, x in few.items() if x.ndim > 1}
    for (a, x), (b, z) in itertools.permutations(rows.items(), 2):
        if x.shape[0] != z.shape[0] or x.shape[1] > z.shape[1]:
            continue
        for at, start, width in _columns(x.shape[1], z.shape[1]):
            left, right = slice(at, at + width), slice(start, start + width)
            terms = x[:, left] * z[:, right]
            total, size = float(terms.sum()), float(terms.square().sum().sqrt())
            for share in (1.0, 1.0 / len(x)):
                if abs(share * total - y) <= ROUNDINGS * unit * (abs(y) + share * size):
                    yield [a, b], _product(left, right, share)


def _product(left: slice, right: slice, share: float) -> Function:
    return lambda x, z: share * x.flatten(1)[:, left] * z.flatten(1)[:, right]


def _one_product(terms: Function) -> Callable[..., list[Tensor]]:
    return lambda *xs: [terms(*xs)]


def _columns(few: int, many: int) -> Iterator[tuple[int, int, int]]:
    """Columns that may be multiplied: all of the narrower, with as many of the wider; of equal ones n, n or n^2."""
    for start in sorted({*range(0, many - few + 1, few), many - few}):
        yield 0, start, few
    n = math.isqrt(many + 1) - 1
    if few == many == n * n + 2 * n:
        yield from ((0, 0, n), (n, n, n), (2 * n, 2 * n, n * n))


def _sum(terms: Callable[..., list[Tensor]], share: float, length: int, shape: torch.Size) -> Replay:
    def total(parts: list[Tensor]) -> Tensor:
        return torch.stack([one.sum() for one in parts]).reshape(shape)

    def run(*xs: Tensor) -> Tensor:
        return total(terms(*xs)) * share

    def magnitude(*xs: Tensor) -> Tensor:
        return total([one.abs() for one in terms(*xs)]) * share

    def squares(*xs: Tensor) -> Tensor:
        return total([one.square() for one in terms(*xs)]) * share * share

    return Replay(run, magnitude, squares, length, False, False)


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
