"""What a tensor is of another: the same, rounded, its numbers in another order, scaled, quantised, or equal in part.

What moves numbers keeps the fingerprints of slices: a fingerprint is a sum of hashes of a slice's elements, which does
not depend on their order. Slices of equal fingerprints are partners, along whichever dimensions, and the order of the
partners is said by its structure. What is said holds for every element, to half a unit in the last place of the
narrower of the two types.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import permutations
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from whywrong.comparing.bits import same_bits
from whywrong.comparing.comparison import compare
from whywrong.comparing.factors import Fit, fit
from whywrong.comparing.precision import FLOATS, INTEGERS, UNIT_ROUNDOFF, dtype_of, name_of, representable
from whywrong.tables import ranges

SAME, PART, PARTLY, DIFFERS = "same", "part", "partly", "differs"
HASHED = 1 << 22
"""Elements that are hashed at a time, and that are looked at to see what type they fit."""
FEW = 8
"""Blocks whose order is listed; elements of a slice that are not equal by chance."""


class Relation(NamedTuple):
    """What an observed tensor is of a golden one: the `kind` in a word, and in words.

    Kinds: same, rounded, transposed, regrouped, flipped, permuted, scaled, offset, quantised, part of the golden,
    partly the golden, and differs where no relation is known. `dtype` is the type in which all this holds, and
    `numbers` are the factors, offsets or scales.
    """

    kind: str
    words: str
    dtype: str = ""
    numbers: Fit | None = None


def relation(observed: Tensor, golden: Tensor) -> Relation:
    """What `observed` is of `golden`, tensors of any shapes and of real or whole numbers.

    Copies of both in the narrower type are made where they are not the same.
    """
    o, g = (x if x.ndim else x.view(1) for x in (observed, golden.to(observed.device)))
    same = agreed(o, g)
    dtype = _narrower(o, g)[0].dtype if same else _common_type(o, g)
    x, y = (o.to(dtype), g.to(dtype)) if o.is_floating_point() and g.is_floating_point() else (o, g)
    if same or agreed(x, g):
        kind = SAME if dtype in (o.dtype, g.dtype) else "rounded"
        rounded = f", rounded to {name_of(dtype)}" * (o.dtype != g.dtype or kind != SAME)
        return Relation(kind, f"the same{rounded}", name_of(dtype))
    described = str(compare(x, y)).removeprefix("WRONG: ").partition(" (bound")[0]
    differs = Relation(DIFFERS, described.replace("beyond the bound", "differ"), name_of(dtype))
    if not x.numel() or not y.numel():
        return differs
    fingers, goldens = fingerprints(x), fingerprints(y)
    if x.numel() == y.numel() and int(fingers[0].sum()) == int(goldens[0].sum()):
        return _rearranged(x, y, fingers, goldens)
    scaled = _scaled(o, g) if _needs_scale(o) else None
    return scaled or _partly(x, y, fingers, goldens) or _scaled(o, g) or differs


def agreed(o: Tensor, g: Tensor) -> bool:
    """Whether two tensors of one shape are equal to half a unit in the last place of the narrower type."""
    return o.shape == g.shape and (same_bits(o, g) or compare(*_narrower(o, g)).ok)


def holders(x: Tensor, others: Iterable[tuple[str, Tensor]]) -> Iterator[str]:
    """Of tensors by name those that hold the numbers of x, unless all of these are one number."""
    if not bool((x == x.flatten()[:1]).all()):
        yield from (name for name, other in others if agreed(x, other))


def _narrower(o: Tensor, g: Tensor) -> list[Tensor]:
    """Both, that of the narrower type first."""
    return sorted((o, g), key=lambda x: -UNIT_ROUNDOFF.get(name_of(x.dtype), 0.0))


def _common_type(o: Tensor, g: Tensor) -> torch.dtype:
    """The narrowest type that is the golden's or has all numbers of `o`, which may be stored in a wider one."""
    for dtype in map(dtype_of, reversed(FLOATS)):
        fits = o.is_floating_point() and representable(o.flatten()[:HASHED].double(), name_of(dtype))
        if dtype == g.dtype or (fits and bool((o.to(dtype).to(o.dtype) == o).all())):
            return dtype
    return o.dtype


def fingerprints(x: Tensor) -> list[Tensor]:
    """For each dimension the fingerprints of its slices, int64; equal numbers of two types have equal ones.

    The hash of a number takes the bits that it has as float64, mixed as in Steele et al., SplitMix (OOPSLA 2014).
    """
    parts = []
    for some in x.split(max(1, HASHED * len(x) // x.numel())):
        h = (some.double() + 0.0).view(torch.int64)  # which makes -0 a 0
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            h = (h ^ (h >> shift)) * (factor - (1 << 64))
        parts.append([h.movedim(d, 0).reshape(n, -1).sum(1) for d, n in enumerate(h.shape)])
    first, *others = zip(*parts, strict=True)
    return [torch.cat(first), *(torch.stack(each).sum(0) for each in others)]


_Order = tuple[str, str, Tensor]
"""A kind of order, the order in words, and at which places of the golden the slices of a dimension are."""


def _rearranged(o: Tensor, g: Tensor, fingers: list[Tensor], goldens: list[Tensor]) -> Relation:
    """The same numbers at other places: dimensions exchanged, another shape, slices in another order."""
    for dims in permutations(range(g.ndim)):
        x = g.permute(dims)
        turned = f"transposed{f' to dimensions {dims}' * (len(dims) > 2)}"
        steps = [("transposed", turned)] * (list(dims) != sorted(dims))
        steps += [("regrouped", f"{tuple(x.shape)} read as {tuple(o.shape)}")] * (x.shape != o.shape)
        moved = [goldens[d] for d in dims] if x.shape == o.shape else fingerprints(x := x.reshape(o.shape))
        if not all(torch.equal(a.sort().values, b.sort().values) for a, b in zip(moved, fingers, strict=True)):
            continue
        for d, (a, b) in enumerate(zip(moved, fingers, strict=True)):
            if not torch.equal(a, b):
                kind, words, places = _order(a, b)
                steps, x = [*steps, (kind, f"dimension {d}: {words}")], x.index_select(d, places)
        if steps and agreed(o, x):
            return Relation(steps[0][0], "; ".join(words for _, words in steps), name_of(o.dtype))
    return Relation("permuted", "the same numbers, in an order that has no simple description", name_of(o.dtype))


def _order(golden: Tensor, observed: Tensor) -> _Order:
    """The order in which slices of these fingerprints stand, the same in both but for the order."""
    for order in _simple_orders(torch.arange(len(golden), device=golden.device)):
        places = order[-1]
        if torch.equal(golden[places[:FEW]], observed[:FEW]) and torch.equal(golden[places], observed):
            return order
    places, moved = _places(observed, golden)[1], (golden != observed).nonzero().flatten()
    return "permuted", f"{ranges(moved.tolist())} are the golden's {ranges(places[moved].tolist())}", places


def _divisors(n: int) -> list[int]:
    small = [k for k in range(1, math.isqrt(n) + 1) if n % k == 0]
    return sorted({*small, *(n // k for k in small)})


def _simple_orders(at: Tensor) -> Iterator[_Order]:
    """Up to 4 blocks in any order, more in reverse, or a x b transposed; in one group or in each of several."""
    for outer in _divisors(len(at)):
        for count in _divisors(len(at) // outer)[1:]:
            x = at.view(outer, count, -1)
            each, size = f"in each of {outer} groups, " * (outer > 1), x.shape[2]
            blocks = f"{each}{count} {f'blocks of {size}' if size > 1 else 'slices'}"
            for few in permutations(range(count)) if count <= 4 else ():
                yield "permuted", f"{blocks} in the order {', '.join(map(str, few))}", x[:, few].flatten()
            yield "flipped", f"{blocks} in reverse", x.flip(1).flatten()
            for a in _divisors(count)[1:-1]:
                b = count // a
                rotary = {a: "halves interleaved", b: "pairs brought to halves"}.get(2, "") if size == 1 else ""
                words = f"{blocks} = {a} x {b}, transposed{f' ({rotary})' * bool(rotary)}"
                yield "regrouped", words, x.unflatten(1, (a, b)).transpose(1, 2).flatten()


def _needs_scale(x: Tensor) -> bool:
    return name_of(x.dtype) in INTEGERS or torch.finfo(x.dtype).bits < 16


def _scaled(o: Tensor, g: Tensor) -> Relation | None:
    """A factor, an offset or a scale, of the golden as it is or transposed."""
    dtype, turned = name_of(o.dtype), [(g.transpose(-1, -2), "transposed, and ")] if g.ndim > 1 else []
    for x, before in [(g, ""), *turned] if g.is_floating_point() and o.dtype != torch.bool else ():
        if x.shape == o.shape and (factor := fit(o, x, False)):
            if _needs_scale(o):
                scale = Fit(1.0 / factor.high, 1.0 / factor.low, factor.blocks)
                return Relation("quantised", f"{before}quantised to {dtype} with scale {scale}", dtype, scale)
            return Relation("scaled", f"{before}times {factor}", dtype, factor)
        if x.shape == o.shape and not _needs_scale(o) and (shift := fit(o, x, True)):
            return Relation("offset", f"{before}plus {shift}", dtype, shift)
    return None


def _partly(o: Tensor, g: Tensor, fingers: list[Tensor], goldens: list[Tensor]) -> Relation | None:
    """Slices of one dimension that are the golden's, at their places or at others; and what the rest is."""
    found = []
    for d in (d for d in range(o.ndim) if o.ndim == g.ndim and o.movedim(d, 0)[0].shape == g.movedim(d, 0)[0].shape):
        known, at = _places(fingers[d], goldens[d])
        here = known.nonzero().flatten()
        jumps = int(((here.diff() != 1) | (at[here].diff() != 1)).sum())
        by_chance = o.numel() < FEW * len(known) and len(here) < 4 * (1 + jumps)  # numbers of few digits recur
        if len(here) and not by_chance and agreed(o.index_select(d, here), g.index_select(d, at[here])):
            found.append((len(here) / len(known), d, here, at[here]))
    if not found:
        return None
    _, d, here, at = max(found, key=itemgetter(0))
    rest = torch.ones(o.shape[d], dtype=torch.bool, device=o.device).index_fill(0, here, False).nonzero().flatten()
    moved = o.shape != g.shape or not torch.equal(here, at)
    places = f" {ranges(at.tolist())} of {g.shape[d]}" * moved
    words = f"slices {ranges(here.tolist())} of dimension {d} are the golden's{places}"
    if len(rest):
        x = o.index_select(d, rest)
        inner = relation(x, g.index_select(d, rest)).words if o.shape == g.shape else "not the golden's"
        words += f"; the others, {ranges(rest.tolist())}: {inner if bool((x.double() != 0.0).any()) else 'zero'}"
    return Relation(PARTLY if len(rest) else PART, words, name_of(o.dtype))


def _places(finger: Tensor, golden: Tensor) -> tuple[Tensor, Tensor]:
    """For each fingerprint whether it is one of the golden's, and at which place; its own, where several would do."""
    order = golden.sort()
    place = torch.searchsorted(order.values, finger).clamp(max=len(golden) - 1)
    known, at = order.values[place] == finger, order.indices[place]
    both = min(len(finger), len(golden))
    stays = finger[:both] == golden[:both]
    at[:both][stays] = torch.arange(both, device=at.device)[stays]
    return known, at
