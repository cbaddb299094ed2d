"""Which elements of a wrong step are wrong, in the words of its inputs, and what they hold: facts, before any cause.

A sentence on places holds of every wrong element and of no right one; one on what wrong elements hold, of all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, islice, permutations

import torch
from torch import Tensor

from whywrong.comparing.regions import (
    INTEGER_DTYPES,
    TILES,
    along,
    conditions,
    listed,
    numbers_of_slices,
    placed,
    slices,
    tightest,
)
from whywrong.tables import digits, runs

MOST = 1 << 18
"""Elements of a step up to which each of them is looked at to find a condition; of a larger one, slices are."""
MOST_HELD = 1 << 16
"""Wrong elements whose numbers are looked at: of more, as many, equally far apart."""
MOST_OF_MATRIX = 1 << 16
"""Elements up to which the rank of an error is computed."""
LEFT = 0.1
"""Share of the error, its norm, that may be left by what wrong elements are said to hold."""
MOST_DIMENSIONS = 5
"""Dimensions of a step up to which all their orders are tried."""
FEW_COLUMNS = 6
"""Columns of an input, such as the corners of boxes, up to which each is a number of its row."""

Given = Mapping[str, Tensor]


def touched(
    observed: Tensor, expected: Tensor, allowed: Tensor | float, given: Given, others: Given | None = None
) -> tuple[str, ...]:
    """Which elements of `observed` differ from `expected`, of its shape, by more than `allowed`; and what they hold.

    `given` are the tensors, by name, that the step is computed from, of any shapes: conditions are looked for on them.
    `others`, or these, are those whose numbers the wrong elements may hold. Nothing where no element is wrong.
    """
    o, e = observed.double(), expected.double()
    limit = torch.as_tensor(allowed, dtype=torch.float64, device=o.device).expand(o.shape)
    wrong = ~(((o - e).abs() <= limit) | (o.isnan() & e.isnan()) | (observed == expected))
    if not bool(wrong.any()):
        return ()
    return (*_places(wrong, e, given), *_Held(o, e, limit, wrong).sentences({**given, **(others or {})}))


def rearranged(observed: Tensor, expected: Tensor) -> tuple[str, ...]:
    """How `observed`, of another shape, holds the numbers of `expected`, if it does: in that order of dimensions in
    which they are nearest, where what is left is a small part of how they differ among themselves."""
    if observed.numel() != expected.numel() or not expected.numel() or expected.ndim > MOST_DIMENSIONS:
        return ()
    flat, e = observed.double().reshape(-1), expected.double().to(observed.device)
    far = {dims: float((flat - e.permute(dims).reshape(-1)).norm()) for dims in permutations(range(e.ndim))}
    dims = min(far, key=far.__getitem__)
    if not far[dims] < LEFT * float((e - e.mean()).norm()):
        return ()
    plain = dims == (*range(e.ndim),)
    order = "in the same order" if plain else f"with the dimensions in the order {', '.join(map(str, dims))}"
    return (f"it holds the golden's numbers {order}",)


def _places(wrong: Tensor, right: Tensor, given: Given) -> Iterator[str]:
    count, touches = int(wrong.sum()), [along(wrong, d).cpu() for d in range(wrong.ndim)]
    if count == wrong.numel():
        return
    plain = {name: x for name, x in given.items() if not x.is_complex() and (x.ndim == 1 or x.numel() <= MOST)}
    known = [(name, (x if x.dtype in INTEGER_DTYPES else x.double()).cpu()) for name, x in plain.items()]
    inputs = numbers_of_slices(wrong.shape, known)
    for d, n in enumerate(wrong.shape):
        inputs[d] += _real_numbers_of_slices(n, known)
    if wrong.numel() <= MOST:
        wrong = wrong.cpu()
        numbers = [*_numbers_of_elements(wrong.shape, right.cpu(), known)]
        bits = math.log2(len(numbers) + 1)
        found = [one for name, z in numbers for one in conditions(name, z, wrong, ~wrong, bits)]
        others = (one for name, z in numbers for one in conditions(name, z, ~wrong, wrong, bits + 1.0))
        found += (one._replace(words=f"except {one.words}") for one in others)
        region = min([tightest(wrong, ~wrong, inputs), *found], key=lambda one: one.bits)
        if not region.scattered:
            yield f"wrong are all elements {region.words}"
            return
    narrow = [d for d, some in enumerate(touches) if not bool(some.all())]
    if narrow:
        inside = math.prod(int(some.sum()) for some in touches)
        words = " and ".join(_slices_in_words(touches[d], d, inputs[d]) for d in narrow)
        yield f"wrong are {'all' if inside == count else f'{count} of the {inside}'} elements {words}"


def _slices_in_words(some: Tensor, d: int, inputs: Sequence[tuple[str, Tensor]]) -> str:
    """Which slices of dimension d have wrong elements."""
    found = [one for one in slices(some, ~some, inputs) if torch.equal(one.mask, some)]
    many = len(runs(some.nonzero().flatten().tolist())) > FEW_COLUMNS
    words = f"in {int(some.sum())} of {len(some)} slices" if many else f"in {listed(some)}"
    words = min(found, key=lambda one: one.bits).words if found else words
    return words if words.startswith(("where", "after")) else f"{words} of dimension {d}"


def _real_numbers_of_slices(n: int, given: Sequence[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Real numbers that the inputs have for each of n slices, by what they are."""
    for name, x in given:
        if not (x.is_floating_point() and x.ndim and len(x) == n > 1):
            continue
        if x.ndim == 1:
            yield name, x
        elif x.ndim == 2 and x.shape[1] <= FEW_COLUMNS:
            yield from ((f"{name}[:, {k}]", column) for k, column in enumerate(x.unbind(1)))
            pairs = combinations(range(x.shape[1]), 2)
            yield from ((f"{name}[:, {k}] - {name}[:, {j}]", x[:, k] - x[:, j]) for j, k in pairs)
        elif x.numel():
            yield f"the largest of {name}", x.flatten(1).amax(1)
            yield f"the smallest of {name}", x.flatten(1).amin(1)


def _numbers_of_elements(
    shape: Sequence[int], right: Tensor, given: Sequence[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """A number for each element of a step: what is right there, an input's, its place less a length."""
    for name, x in [("the right value", right), *given]:
        if x.ndim and x.numel() > 1 and _fits(x.shape, shape):
            yield name, x.expand(shape)
            if x.is_floating_point():
                yield f"|{name}|", x.abs().expand(shape)
    for d, n in enumerate(shape):
        for name, x in given:
            if x.ndim == 1 and x.dtype in INTEGER_DTYPES and n > 1:
                for k in (k for k, m in enumerate(shape) if m == len(x) and k != d):
                    less = placed(torch.arange(n), d, len(shape)) - placed(x, k, len(shape))
                    yield f"the place in dimension {d}, less {name},", less.expand(shape)
    for a, b in combinations([d for d, n in enumerate(shape) if n > 1], 2):
        rows, columns = (placed(torch.arange(shape[d]), d, len(shape)) for d in (a, b))
        yield f"the place in dimension {a}, less that in {b},", (rows - columns).expand(shape)


def _fits(shape: Sequence[int], whole: Sequence[int]) -> bool:
    """Whether a shape can be expanded to another."""
    return len(shape) <= len(whole) and all(a in (1, b) for a, b in zip(shape[::-1], whole[::-1], strict=False))


class _Held:
    """What wrong elements hold, `some`, where others are `right`; `at` are their places in memory, from 0."""

    def __init__(self, o: Tensor, e: Tensor, limit: Tensor, wrong: Tensor) -> None:
        at = wrong.flatten().nonzero().flatten()
        self._at = at[:: -(-len(at) // MOST_HELD)]
        self._e, self._shape, self._count = e.flatten(), e.shape, o.numel()
        self._some, self._right, self._limit = o.flatten()[self._at], self._e[self._at], limit.flatten()[self._at]

    def sentences(self, others: Given) -> Iterator[str]:
        """One number or none; or the first relation that holds to right numbers and to other tensors."""
        some, right = self._some, self._right
        if bool(some.isnan().all()):
            yield "wrong elements are NaN"
        elif bool(some.isinf().all()):
            yield "wrong elements are infinite"
        elif len(some) > 1 and bool((some == some[0]).all()):
            yield f"wrong elements are {'zero' if some[0] == 0.0 else f'all {float(some[0]):.6g}'}"
        elif nan := int(some.isnan().sum()):
            yield f"{nan} of the wrong elements are NaN"
        elif not bool(some.isfinite().all() and right.isfinite().all()):
            return
        elif len(some) > 3:
            yield from islice(self._relations(others), 1)
        elif len(some) < self._count:
            pairs = zip(some.tolist(), right.tolist(), strict=True)
            yield f"wrong elements are {'; '.join(f'{digits(a, 6)} where {digits(b, 6)} is right' for a, b in pairs)}"

    def _holds(self, guess: Tensor, here: Tensor | None = None) -> bool:
        """Whether a guess is right to twice the tolerance, since it comes from rounded numbers too, and explains."""
        each = self._some, self._right, self._limit
        some, right, limit = each if here is None else (x[here] for x in each)
        left = (some - guess).abs()
        return bool((left <= 2.0 * limit).all()) and float(left.norm()) <= LEFT * float((some - right).norm())

    def _relations(self, others: Given) -> Iterator[str]:
        some, right = self._some, self._right
        shift = float((some - right).median())
        if self._holds(right + shift):
            yield f"wrong elements are {digits(abs(shift), 6)} too {'large' if shift > 0 else 'small'}"
        factor = float((some * right).sum() / right.square().sum().clamp(min=1e-300))
        if self._holds(factor * right):
            yield f"wrong elements are {factor:.6g} times what is right"
        places = torch.unravel_index(self._at, self._shape)
        for name, x in ((name, x) for name, x in others.items() if not x.is_complex()):
            fits = x.ndim and x.numel() > 1 and _fits(x.shape, self._shape)
            if fits and self._holds(x.to(some.device).expand(self._shape)[places].double()):
                yield f"wrong elements hold {name}"
        yield from self._elsewhere(places)
        yield from self._by_slices(places)
        if len(self._shape) > 1 and min(self._shape[-2:]) > FEW_COLUMNS and self._count <= MOST_OF_MATRIX:
            error = torch.zeros_like(self._e).index_put((self._at,), some - right).view(-1, *self._shape[-2:])
            sizes = torch.linalg.svdvals(error)
            rank = int((sizes > 1e-3 * sizes.amax(1, keepdim=True)).sum(1).amax())
            if rank <= min(self._shape[-2:]) // 2:
                yield f"the error of {'each' if len(error) > 1 else 'the'} matrix has rank {rank} of {sizes.shape[1]}"

    def _elsewhere(self, places: Sequence[Tensor]) -> Iterator[str]:
        """Right numbers of other places: so many further along a dimension, or transposed."""
        whole, count = self._e.view(self._shape), len(self._at)
        for d, (n, place) in enumerate(zip(self._shape, places, strict=True)):
            apart = math.prod(self._shape[d + 1 :])
            for by in (k * sign for k in (1, *TILES) if k < n for sign in (1, -1)):
                here = (place + by >= 0) & (place + by < n)
                inside = int(here.sum())
                if inside > 3 and 2 * inside >= count and self._holds(self._e[self._at[here] + by * apart], here):
                    part, way = f"{inside} of {count} " * (inside < count), "later" if by > 0 else "earlier"
                    yield f"{part}wrong elements hold what belongs {abs(by)} {way} in dimension {d}"
        for i, j in combinations(range(len(places)), 2):
            if 1 < self._shape[i] == self._shape[j] and self._holds(whole.transpose(i, j)[places]):
                yield f"wrong elements are transposed in dimensions {i} and {j}"

    def _by_slices(self, places: Sequence[Tensor]) -> Iterator[str]:
        """A factor or an offset for each slice of a dimension."""
        error = self._some - self._right
        for d, place in enumerate(places):
            there = torch.bincount(place) > 0
            for words, x in (("a factor", self._right), ("an offset", torch.ones_like(error))):
                c = torch.bincount(place, error * x) / torch.bincount(place, x.square()).clamp(min=1e-300)
                if 1 < int(there.sum()) <= len(error) // 3 and self._holds(self._right + c[place] * x):
                    each = (c + (x is self._right))[there].tolist()
                    first = ", ".join(digits(v, 6) for v in each[:4])
                    yield f"the error is {words} for each slice of dimension {d}: {first}{', ...' * (len(each) > 4)}"
