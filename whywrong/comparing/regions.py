"""Which elements of a tensor are meant, in few words: slices of a dimension, a triangle, what an input says of a row.

A region is as long as its description, in bits: what has to be said of which of how many. Of two that hold, the
shorter is the better guess (Rissanen, "Modeling by shortest data description", 1978).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from whywrong.tables import ranges, runs

Tensor = torch.Tensor

INTEGER_DTYPES = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)

CHANCE = 3.0
"""Bits that a limit of real numbers has to save beside a list: of several some part few slices as they are."""
TILES = (2, 4, 8, 16, 32, 64, 128)
"""Sizes in which kernels count."""


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


def conditions(name: str, z: Tensor, must: Tensor, never: Tensor, more: float = 0.0) -> Iterator[Region]:
    """What is true of a number z of each place of `must`, and of none of `never`; `more` bits say which number."""
    some, others = z[must], z[never]
    if not len(some) or not len(others):
        return
    low, high = some.aminmax()
    below, above, whole = others[others < low], others[others > high], z.dtype in INTEGER_DTYPES
    if len(below) + len(above) == len(others):
        mask, words = torch.ones_like(z, dtype=torch.bool), list[str]()
        if len(below):
            words.append(f"over {below.max()}" if whole else f"at least {_short(low, below.max())}")
            mask = z > below.max() if whole else z >= low
        if len(above):
            words.append(f"at most {_short(high, above.min())}")
            mask = mask & (z <= high)
        bits = 7.0 + more + len(words) * _log2(len(z.unique()) if whole else z.numel())  # one of them to say which ends
        bits += CHANCE * (not whole)
        yield Region(bits, f"where {name} is {' and '.join(words)}", mask)
        if low == high:
            yield Region(5.0 + more + _log2(len(z.unique())), f"where {name} is {_short(low, low)}", z == low)
    for k in TILES if whole else ():  # of those that hold the tightest
        c = int(some[0]) % k
        if c in (0, 1, k - 1) and bool((some % k == c).all()) and not bool((others % k == c).any()) and low < high:
            yield Region(8.0 + more + 0.1 / k, f"where {name} is {c} modulo {k}", z % k == c)


def _short(limit: Tensor, beyond: Tensor) -> str:
    """The number of fewest digits between a limit, which it may be, and what is beyond; of whole ones the limit."""
    a, b = limit.item(), beyond.item()
    few = (float(f"{a:.{k}g}") for k in range(1, 17))
    short = next((x for x in few if x == a or min(a, b) < x < max(a, b)), a)
    return str(a) if isinstance(a, int) else f"{short:.16g}"


def slices(wanted: Tensor, out: Tensor, inputs: Sequence[tuple[str, Tensor]] = ()) -> Iterator[Region]:
    """Simple sets of the slices of a dimension that may have all of `wanted` and nothing of `out`.

    `inputs` have a number for each slice.
    """
    n, places, others = len(wanted), wanted.nonzero().flatten().tolist(), out.nonzero().flatten().tolist()
    at, first, last = torch.arange(n), places[0], places[-1]

    def usual(a: int) -> bool:
        return a in (1, n - 1) or any(a % tile == 0 for tile in TILES[2:])

    for words, limits in (
        ("from {} on", range(max(others, default=-1) + 1, first + 1)),
        ("before {}", range(last + 1, min(others, default=n) + 1)),
    ):
        if limits:
            a = next(filter(usual, limits), limits[0])
            yield Region(4.0 + (2.0 if usual(a) else _log2(n)), words.format(a), (at >= a) == ("on" in words))
    if first == last:
        yield Region(4.0 + (1.0 if first in (0, n - 1) else _log2(n)), f"at {first}", at == first)
    for tile in (tile for tile in TILES if tile < n):
        c, least = first % tile, min(place % tile for place in places)
        yield Region(5.0 + 2.0 * _log2(tile), f"at every {tile}th from {c}", at % tile == c)
        yield Region(5.0 + 2.0 * _log2(tile), f"at {least} and more in each tile of {tile}", at % tile >= least)
    for name, z in inputs:
        if not z.is_floating_point():
            same = torch.cat([torch.zeros(1, dtype=torch.bool), z[1:] == z[:-1]])
            yield Region(6.0, f"where {name} equals the one before", same)
            yield Region(7.0, f"after one where {name} equals the one before", same.roll(1) & (at > 1))
        yield from conditions(name, z, wanted, out, z.is_floating_point() * _log2(len(inputs)))


def numbers_of_slices(shape: Sequence[int], given: Iterable[tuple[str, Tensor]]) -> dict[int, list[tuple[str, Tensor]]]:
    """For each dimension of a shape the whole numbers that a program was given for its slices, by what they are."""
    whole = [(name, x.cpu()) for name, x in given if x.ndim and x.dtype in INTEGER_DTYPES]
    found: dict[int, list[tuple[str, Tensor]]] = {}
    for d, n in enumerate(shape):
        some = [(name, x) for name, x in whole if len(x) == n > 1]
        found[d] = [(name, x) for name, x in some if x.ndim == 1]
        found[d] += [(f"the largest of {name}", x.flatten(1).amax(1)) for name, x in some if x.ndim > 1]
        for name, x in whole:
            if x.ndim == 1 and len(x) > 1 and int(x[-1]) == n and bool((x.diff() >= 0).all()):  # where rows begin
                segment = torch.searchsorted(x, torch.arange(n), right=True) - 1
                found[d].append((f"the length of the segment by {name}", x.diff()[segment]))
                found[d].append((f"the place in the segment by {name}", torch.arange(n) - x[segment]))
    return found


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
            inside = inside & placed(along(must, d), d, must.ndim)
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
            for one in slices(wanted, out, inputs.get(d, ()))
            if bool(one.mask[wanted].all()) and not bool((one.mask & out).any())
        )
        best = min(fits, key=lambda one: one.bits)
        bits += best.bits
        words.append(best.words + ("" if best.words.startswith(("where", "after")) else f" of dimension {d}"))
        mask, scattered = mask & placed(best.mask, d, must.ndim), scattered or best.scattered
    return Region(bits, " and ".join(words), mask, scattered)


def _rows(must: Tensor, never: Tensor) -> Iterator[Region]:
    """Whole rows along a dimension, counted out."""
    for d in (d for d, n in enumerate(must.shape) if n > 1 and must.ndim > 2):
        rows = must.any(d, keepdim=True)
        if not bool((rows & never).any()):
            k, n = int(rows.sum()), rows.numel()
            yield Region(6.0 + bits_of_subset(n, k), f"in {k} of {n} rows along dimension {d}", rows.expand(must.shape))


def placed(x: Tensor, d: int, ndim: int) -> Tensor:
    """A vector along dimension d of so many."""
    return x.view([-1 if k == d else 1 for k in range(ndim)])


def _triangles(must: Tensor, never: Tensor) -> Iterator[Region]:
    """What is on one side of a diagonal of two dimensions."""
    long = [d for d, n in enumerate(must.shape) if n > 1]
    for a, b in itertools.combinations(long, 2):
        rows, columns = (placed(torch.arange(must.shape[d]), d, must.ndim) for d in (a, b))
        for words, beyond in (("below", rows - columns), ("above", columns - rows)):
            x = beyond.expand(must.shape)
            low = int(x[must].min())
            if not bool((never & (x >= low)).any()):
                bits = 7.0 + (2.0 if abs(low) <= 1 else _log2(must.shape[a] + must.shape[b]))
                where = {0: f"on or {words}", 1: words}.get(low, f"{low} or more {words}")
                yield Region(bits, f"{where} the diagonal of dimensions {a} and {b}", x >= low)
