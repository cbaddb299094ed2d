"""Which elements of a tensor are meant, in few words: slices of a dimension, a triangle, what an input says of a row.

A region is as long as its description, in bits: what has to be said of which of how many. Of two that hold, the
shorter is the better guess (Rissanen, "Modeling by shortest data description", 1978).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from whywrong.tables import ranges, runs

Tensor = torch.Tensor

TILES = (2, 4, 8, 16, 32, 64, 128)
"""Sizes in which kernels count."""
MOST_VALUES = 64
"""Values of an input that are asked for one by one."""


class Region(NamedTuple):
    """Elements of a tensor, in words; `bits` is the length of the description, 0 with no words for all elements."""

    bits: float
    words: str
    mask: Tensor
    scattered: bool = False
    """Whether nothing simple describes it: the elements are counted out."""


def bits_of_subset(n: int, k: int) -> float:
    """What it takes to say which k of n elements."""
    return (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2.0)


def _log2(n: float) -> float:
    return math.log2(max(2.0, n))


def listed(mask: Tensor) -> str:
    """Places along a dimension, as "0, 3 to 5"."""
    return ranges(mask.nonzero().flatten().tolist())


def slices(n: int, inputs: Sequence[tuple[str, Tensor]] = ()) -> Iterator[Region]:
    """Simple sets of the slices of a dimension of length n; `inputs` have a whole number for each slice."""
    at = torch.arange(n)
    for a in range(n):
        usual = a in (1, n - 1) or any(a % tile == 0 for tile in TILES[2:])
        yield Region(4.0 + (2.0 if usual else _log2(n)), f"from {a} on", at >= a)
        yield Region(4.0 + (2.0 if usual else _log2(n)), f"before {a}", at < a)
        yield Region(4.0 + (1.0 if a in (0, n - 1) else _log2(n)), f"at {a}", at == a)
    for tile in (tile for tile in TILES if tile < n):
        for c in range(tile):
            yield Region(5.0 + 2.0 * _log2(tile), f"at every {tile}th from {c}", at % tile == c)
            yield Region(5.0 + 2.0 * _log2(tile), f"at {c} and more in each tile of {tile}", at % tile >= c)
    for name, z in inputs:
        same = torch.cat([torch.zeros(1, dtype=torch.bool), z[1:] == z[:-1]])
        yield Region(6.0, f"where {name} equals the one before", same)
        yield Region(7.0, f"after one where {name} equals the one before", same.roll(1) & (at > 1))
        for k in TILES:  # of those that hold the tightest
            yield from (Region(8.0 + 0.1 / k, f"where {name} is {c} modulo {k}", z % k == c) for c in {0, 1, k - 1})
        values = z.unique()
        for c in values[:MOST_VALUES].tolist():
            yield Region(5.0 + _log2(len(values)), f"where {name} is {c}", z == c)
            yield Region(6.0 + _log2(len(values)), f"where {name} is over {c}", z > c)
            yield Region(6.0 + _log2(len(values)), f"where {name} is at most {c}", z <= c)


def tightest(must: Tensor, never: Tensor, inputs: Mapping[int, Sequence[tuple[str, Tensor]]]) -> Region:
    """The region of the shortest description that has all of `must` and nothing of `never`.

    `inputs` are those of :func:`slices`, by the dimension. Where nothing simple fits, the elements are counted out.
    """
    if not bool(never.any()):
        return Region(0.0, "", torch.ones_like(must))
    count = int(must.sum())
    words = f"in {count} scattered elements of {must.numel()}"
    found = [Region(6.0 + bits_of_subset(must.numel(), count), words, must, True)]
    found += filter(None, (_in_slices(must, never, dims, inputs) for dims in _dimensions(must)))
    found += _rows(must, never)
    found += _triangles(must, never)
    if (outside := _in_slices(never, must, (*range(must.ndim),), {})) is not None:  # of several dimensions, a block
        words = f"outside of what is {outside.words}"
        found.append(Region(outside.bits + 1.0, words, ~outside.mask, outside.scattered))
    return min(found, key=lambda region: region.bits)


def along(mask: Tensor, d: int) -> Tensor:
    """Which slices of dimension d have anything of a mask."""
    return mask.movedim(d, 0).flatten(1).any(1) if mask.ndim > 1 else mask


def _dimensions(must: Tensor) -> list[tuple[int, ...]]:
    narrow = tuple(d for d in range(must.ndim) if not bool(along(must, d).all()))
    return [*((d,) for d in narrow), *([narrow] if len(narrow) > 1 else [])]


def _in_slices(
    must: Tensor, never: Tensor, dims: tuple[int, ...], inputs: Mapping[int, Sequence[tuple[str, Tensor]]]
) -> Region | None:
    """The shortest description by slices of these dimensions alone, or nothing."""

    def box(some: Sequence[int]) -> Tensor:
        inside = torch.ones_like(must)
        for d in some:
            inside = inside & _placed(along(must, d), d, must.ndim)
        return inside

    if bool((box(dims) & never).any()):
        return None
    bits, words, mask, scattered = 2.0 * len(dims), list[str](), torch.ones_like(must), False
    for d in (d for d in dims if not bool(along(must, d).all())):
        wanted = along(must, d)
        out = along(never & box([k for k in dims if k != d]), d)
        n, k = len(wanted), int(wanted.sum())
        single = n == must.numel() and len(runs(wanted.nonzero().flatten().tolist())) > 1
        fits = [Region(6.0 + bits_of_subset(n, k), f"in {listed(wanted)}", wanted, single)]
        fits += (
            one
            for one in slices(n, inputs.get(d, ()))
            if bool(one.mask[wanted].all()) and not bool((one.mask & out).any())
        )
        best = min(fits, key=lambda one: one.bits)
        bits += best.bits
        words.append(best.words + ("" if best.words.startswith(("where", "after")) else f" of dimension {d}"))
        mask, scattered = mask & _placed(best.mask, d, must.ndim), scattered or best.scattered
    return Region(bits, " and ".join(words), mask, scattered)


def _rows(must: Tensor, never: Tensor) -> Iterator[Region]:
    """Whole rows along a dimension, counted out."""
    for d in (d for d, n in enumerate(must.shape) if n > 1 and must.ndim > 2):
        rows = must.any(d, keepdim=True)
        if not bool((rows & never).any()):
            k, n = int(rows.sum()), rows.numel()
            yield Region(6.0 + bits_of_subset(n, k), f"in {k} of {n} rows along dimension {d}", rows.expand(must.shape))


def _placed(x: Tensor, d: int, ndim: int) -> Tensor:
    return x.view([-1 if k == d else 1 for k in range(ndim)])


def _triangles(must: Tensor, never: Tensor) -> Iterator[Region]:
    """What is on one side of a diagonal of two dimensions."""
    long = [d for d, n in enumerate(must.shape) if n > 1]
    for a, b in itertools.combinations(long, 2):
        rows, columns = (_placed(torch.arange(must.shape[d]), d, must.ndim) for d in (a, b))
        for words, beyond in (("below", rows - columns), ("above", columns - rows)):
            x = beyond.expand(must.shape)
            low = int(x[must].min())
            if not bool((never & (x >= low)).any()):
                bits = 7.0 + (2.0 if abs(low) <= 1 else _log2(must.shape[a] + must.shape[b]))
                where = f"{low:+d} from " * (low != 0)
                yield Region(bits, f"{words} {where}the diagonal of dimensions {a} and {b}", x >= low)
