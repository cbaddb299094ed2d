"""What a tensor is of another: the same, rounded, its numbers in another order, scaled, quantised, or equal in part.

What moves numbers keeps the fingerprints of slices: a fingerprint is a sum of hashes of a slice's elements, which does
not depend on their order. Slices of equal fingerprints are partners, along whichever dimensions, and the order of the
partners is said by its structure. What is said holds for every element, to half a unit in the last place of the
narrower of the two types.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import permutations
from typing import NamedTuple

import torch
from torch import Tensor

from whywrong.comparing.bits import same_bits
from whywrong.comparing.comparison import compare
from whywrong.comparing.factors import Fit, fit, quantised
from whywrong.comparing.precision import FLOATS, UNIT_ROUNDOFF, dtype_of, name_of, representable
from whywrong.tables import digits, ranges

SAME, DIFFERS = "same", "differs"
HASHED = 1 << 22
"""Elements that are hashed at a time, and that are looked at to see what type they fit."""
FEW = 8
"""Runs of slices, blocks and numbers that are listed."""


class Relation(NamedTuple):
    """What an observed tensor is of a golden one: the `kind` in a word, and in words.

    Kinds: same, rounded, reshaped, transposed, regrouped, flipped, permuted, scaled, offset, quantised, partly, and
    differs where no relation is known. `dtype` is the type to which the same is the same; `scale` has the bounds of
    each block's scale of what is quantised, `blocks` how many factors, offsets or scales there are.
    """

    kind: str
    words: str
    dtype: str = ""
    scale: tuple[Tensor, Tensor] | None = None
    blocks: int = 0


def relation(observed: Tensor, golden: Tensor) -> Relation:
    """What `observed` is of `golden`, tensors of any shapes and of real or whole numbers, on one device.

    Copies of both in the narrower type are made where they are not the same.
    """
    o, g = (x if x.ndim else x.view(1) for x in (observed, golden))
    if dtype := agreed(o, g):
        plain = dtype in (name_of(o.dtype), name_of(g.dtype))
        words = "the same" if o.dtype == g.dtype and plain else f"the same, rounded to {dtype}"
        return Relation(SAME if plain else "rounded", words, dtype)
    if o.numel() > 3 and bool((o == o.flatten()[0]).all()):
        return Relation(DIFFERS, f"every element is {o.flatten()[0].item() + 0:.6g}")
    a, b = _in_one_type(o, g)
    fingers, goldens = fingerprints(a), fingerprints(b)
    if o.numel() == g.numel() and int(fingers[0].sum()) == int(goldens[0].sum()):
        return _rearranged(a, b, fingers, goldens)
    scaled = _scaled(o, g)
    return (
        (scaled if scaled is not None and scaled.blocks == 1 else None)
        or _partly(a, b, fingers, goldens)
        or scaled
        or _described(o, g)
    )


def agreed(o: Tensor, g: Tensor) -> str:
    """The name of the type to which two tensors of one shape are equal, nothing where they are not.

    That is the narrower of their types, or one in which all numbers of `o` are, though they are stored in a wider one.
    """
    if o.shape != g.shape:
        return ""
    narrow, wide = _narrower_first(o, g)
    if same_bits(o, g) or compare(narrow, wide).ok:
        return name_of(narrow.dtype)
    for name in (name for name in FLOATS if g.is_floating_point() and UNIT_ROUNDOFF[name] > _unit(narrow)):
        if representable(o.flatten()[:HASHED].double(), name):
            rounded = o.to(dtype_of(name))
            if compare(rounded, g).ok and bool((rounded.to(o.dtype) == o).all()):
                return name
    return ""


def _unit(x: Tensor) -> float:
    return UNIT_ROUNDOFF.get(name_of(x.dtype), 0.0)


def _narrower_first(o: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    return (o, g) if _unit(o) >= _unit(g) else (g, o)


def _in_one_type(o: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Both rounded to the narrower type."""
    if not (o.is_floating_point() and g.is_floating_point()):
        return o, g
    dtype = _narrower_first(o, g)[0].dtype
    return o.to(dtype), g.to(dtype)


def fingerprints(x: Tensor) -> list[Tensor]:
    """For each dimension the fingerprints of its slices, int64; equal numbers of two types have equal ones."""
    if x.ndim > 1 and x.numel() > HASHED:
        rows = HASHED * len(x) // x.numel()
        if rows:
            parts = [fingerprints(some) for some in x.split(rows)]
        else:
            parts = [[one[0].sum().view(1), *one] for one in map(fingerprints, x)]
        first, *others = zip(*parts, strict=True)
        return [torch.cat(first), *(torch.stack(each).sum(0) for each in others)]
    h = _hash(x)
    return [h.sum([k for k in range(x.ndim) if k != d]) if x.ndim > 1 else h for d in range(x.ndim)]


def _hash(x: Tensor) -> Tensor:
    """A hash of each number by the bits that it has as float64, mixed as in Steele et al., SplitMix (OOPSLA 2014)."""
    h = (x.double() + 0.0).view(torch.int64)  # which makes -0 a 0
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        h = (h ^ (h >> shift)) * (factor - (1 << 64))
    return h ^ (h >> 31)


class Order(NamedTuple):
    """How the slices of a dimension of the observed are those of the golden: the places there, and that in words."""

    kind: str
    words: str
    places: Tensor


def _rearranged(o: Tensor, g: Tensor, fingers: list[Tensor], goldens: list[Tensor]) -> Relation:
    """The same numbers at other places: dimensions exchanged, another shape, slices in another order."""
    for dims in permutations(range(g.ndim)):
        x = g.permute(dims)
        moved = [goldens[d] for d in dims] if x.shape == o.shape else fingerprints(x := x.reshape(o.shape))
        orders = [_order(a, b) for a, b in zip(moved, fingers, strict=True)]
        if any(order is None for order in orders):
            continue
        for d, order in enumerate(orders):
            x = x.index_select(d, order.places) if order is not None and order.kind else x
        if agreed(o, x):
            steps = list(_moved(dims, tuple(g.shape), tuple(o.shape)))
            steps += [
                (y.kind, f"dimension {d}: " * (o.ndim > 1) + y.words) for d, y in enumerate(orders) if y and y.kind
            ]
            return Relation(steps[0][0], "; ".join(words for _, words in steps), name_of(o.dtype))
    return Relation("permuted", "the same numbers, in an order that has no simple description", name_of(o.dtype))


def _moved(dims: Sequence[int], golden: tuple[int, ...], observed: tuple[int, ...]) -> Iterator[tuple[str, str]]:
    plain, transposed = tuple(range(len(golden))), tuple(golden[d] for d in dims)
    if tuple(dims) != plain and transposed == observed:
        yield (
            "transposed",
            "transposed" + f", its dimensions are the golden's {', '.join(map(str, dims))}" * (len(dims) > 2),
        )
    elif tuple(dims) != plain:
        yield "regrouped", f"the golden's numbers in the order of shape {transposed}, read as {observed}"
    elif golden != observed:
        yield "reshaped", f"the golden's numbers in their order, {golden} read as {observed}"


def _order(golden: Tensor, observed: Tensor) -> Order | None:
    """The order in which slices of these fingerprints stand; of no kind where it is the golden's, None where others."""
    n = len(golden)
    if torch.equal(golden, observed):
        return Order("", "", torch.arange(n, device=golden.device))
    if n != len(observed) or not torch.equal(golden.sort().values, observed.sort().values):
        return None
    for order in _simple_orders(n, golden.device):
        if torch.equal(golden[order.places[:FEW]], observed[:FEW]) and torch.equal(golden[order.places], observed):
            return order
    moved = (golden != observed).nonzero().flatten()
    first, last = int(moved[0]), int(moved[-1])
    size = next(size for size in _divisors(n) if first // size == last // size)
    if size == n or len(moved) <= FEW:
        return _of_blocks(golden, observed)
    start = first // size * size
    inner = _order(golden[start : start + size], observed[start : start + size])
    assert inner is not None  # the slices outside of this block are the same
    index = torch.arange(n, device=golden.device)
    index[start : start + size] = start + inner.places
    return Order(inner.kind, f"slices {start} to {start + size - 1}: {inner.words}", index)


def _divisors(n: int) -> list[int]:
    small = [k for k in range(1, math.isqrt(n) + 1) if n % k == 0]
    return sorted({*small, *(n // k for k in small)})


def _simple_orders(n: int, device: torch.device) -> Iterator[Order]:
    """Blocks in reverse, and a x b blocks taken as b x a, in one group or in each of several."""
    at = torch.arange(n, device=device)
    for outer in _divisors(n):
        each = f"in each of {outer} groups: " * (outer > 1)
        for count in _divisors(n // outer)[1:]:
            inner = n // outer // count
            blocks = f"{count} blocks of {inner}" if inner > 1 else f"{count} slices"
            words = "the two halves exchanged" if count == 2 else f"{blocks} in reverse"
            yield Order("flipped", each + words, at.view(outer, count, inner).flip(1).flatten())
            for a in _divisors(count)[1:-1]:
                b, words = count // a, f"{blocks} = {a} x {count // a} taken as {count // a} x {a}"
                if inner == 1 and 2 in (a, b):
                    words += f" (rotary: the golden's {'halves interleaved' if a == 2 else 'pairs brought to halves'})"
                if count <= FEW:
                    words += f", in the order {', '.join(map(str, at[:count].view(a, b).T.flatten().tolist()))}"
                index = at.view(outer, a, b, inner).transpose(1, 2).flatten()
                yield Order("regrouped", each + words, index)


def _of_blocks(golden: Tensor, observed: Tensor) -> Order:
    """The largest blocks that were moved as they are, and their order, in each group where that repeats."""
    n = len(golden)
    weights = _hash(torch.arange(n, device=golden.device)) | 1
    for size in _divisors(n)[-2::-1]:
        a, b = ((x.view(-1, size) * weights[:size]).sum(1).sort(stable=True) for x in (golden, observed))
        if torch.equal(a.values, b.values):
            break
    order = torch.empty_like(a.indices)
    order[b.indices] = a.indices
    period = next(p for p in _divisors(len(order)) if _repeats(order, p))
    index = (order[:, None] * size + torch.arange(size, device=order.device)).flatten()
    each = f"in each of {n // size // period} groups: " * (period * size < n)
    what = f"{period} blocks of {size}" if size > 1 else f"{period} slices"
    words = f"{each}{what} in the order {_some(order[:period])}"
    moved = (order[:period] != torch.arange(period, device=order.device)).nonzero().flatten()
    if len(moved) <= FEW < period:
        words = f"{each}of {what}, {_some(moved)} are the golden's {_some(order[moved])}"
    return Order("permuted", words, index)


def _some(places: Tensor) -> str:
    return ", ".join(map(str, places[: 2 * FEW].tolist())) + ", ..." * (len(places) > 2 * FEW)


def _repeats(order: Tensor, period: int) -> bool:
    groups = order.view(-1, period) - torch.arange(0, len(order), period, device=order.device)[:, None]
    return bool((groups == groups[0]).all())


def _scaled(o: Tensor, g: Tensor) -> Relation | None:
    """A factor, an offset or a scale, of the golden as it is or transposed."""
    for words, x in (("", g), *([("transposed, and ", g.transpose(-1, -2))] if g.ndim > 1 else [])):
        if x.shape == o.shape and (known := fit(o, x)) is not None:
            return _of_fit(known, o, words)
    return None


def _of_fit(known: Fit, o: Tensor, before: str) -> Relation:
    dtype, blocks = name_of(o.dtype), len(known.low)
    if quantised(o):
        scale = Fit(1.0 / known.high, 1.0 / known.low, known.blocks)
        zero = f" and zero point {known.zero}" * bool(known.zero)
        words = f"{before}quantised to {dtype} with scale {scale.numbers}{known.blocks}{zero}"
        return Relation("quantised", words, dtype, (scale.low, scale.high), blocks)
    if known.nothing:
        return Relation("rounded", f"{before}the same to a unit in the last place of {dtype}", dtype, None, blocks)
    if known.offset:
        return Relation("offset", f"{before}the golden's plus {known.numbers}{known.blocks}", dtype, None, blocks)
    return Relation("scaled", f"{before}{known.numbers} times the golden's{known.blocks}", dtype, None, blocks)


def _partly(o: Tensor, g: Tensor, fingers: list[Tensor], goldens: list[Tensor]) -> Relation | None:
    """Slices that are the golden's, at their places or at others; and what the others are."""
    if o.shape == g.shape:
        wrong = [a != b for a, b in zip(fingers, goldens, strict=True)]
        if not all(bool(each.all()) or _by_chance(~each, o) for each in wrong):
            sides = [o, g]
            for d, each in enumerate(wrong):
                sides = [x.index_select(d, each.nonzero().flatten()) for x in sides]
            inner = relation(*sides)
            places = (f"{_slices(each)} of dimension {d}" for d, each in enumerate(wrong) if not bool(each.all()))
            return Relation("partly", f"the same but {' and '.join(places)}: {inner.words}", inner.dtype)
    if o.ndim != g.ndim:
        return None
    alike = [d for d in range(o.ndim) if o.movedim(d, 0)[0].shape == g.movedim(d, 0)[0].shape]
    found = [one for d in alike if (one := _known_slices(o, g, fingers[d], goldens[d], d)) is not None]
    return max(found, key=lambda one: one[0])[1] if found else None


def _known_slices(o: Tensor, g: Tensor, finger: Tensor, golden: Tensor, d: int) -> tuple[int, Relation] | None:
    """How many slices of dimension d are the golden's, and which."""
    known, at = _places(finger, golden)
    here = known.nonzero().flatten()
    if not len(here) or _by_chance(known, o) or not agreed(o.index_select(d, here), g.index_select(d, at[here])):
        return None
    places = "" if torch.equal(here, at[here]) else f" {ranges(at[here].tolist())}"
    parts = [f"{_slices(known)} of dimension {d} {_are(known)} the golden's{places}"]
    if not bool(known.all()):
        rest = o.index_select(d, (~known).nonzero().flatten())
        parts.append(f"{_slices(~known)} {_are(~known)} {'not' if bool((rest.double() != 0.0).any()) else 'zero'}")
    gone = torch.ones_like(golden, dtype=torch.bool).index_fill(0, at[here], False)
    parts += [f"the golden's {_slices(gone)} {_are(gone)} not there"] * bool(gone.any())
    return len(here), Relation("partly", "; ".join(parts), name_of(o.dtype))


def _places(finger: Tensor, golden: Tensor) -> tuple[Tensor, Tensor]:
    """For each fingerprint whether it is one of the golden's, and at which place; its own, where several would do."""
    order = golden.sort()
    place = torch.searchsorted(order.values, finger).clamp(max=len(golden) - 1)
    known, at = order.values[place] == finger, order.indices[place]
    both = min(len(finger), len(golden))
    stays = finger[:both] == golden[:both]
    at[:both][stays] = torch.arange(both, device=at.device)[stays]
    return known, at


def placed(part: Tensor, whole: Tensor) -> Tensor | None:
    """The places at which the slices of dimension 0 of `part` are in `whole`, None where one is not there."""
    a, b = _in_one_type(part, whole)
    known, at = _places(fingerprints(a)[0], fingerprints(b)[0])
    return at if bool(known.all()) and agreed(a, b[at]) else None


def _by_chance(known: Tensor, o: Tensor) -> bool:
    """Whether slices of single numbers may be known because numbers of few digits are often equal."""
    runs = int(known[:1].sum()) + int((known.int().diff() > 0).sum())
    return o.numel() < FEW * len(known) and int(known.sum()) < 4 * runs


def _are(mask: Tensor) -> str:
    return "are" if int(mask.sum()) > 1 else "is"


def _slices(mask: Tensor) -> str:
    at = mask.nonzero().flatten().tolist()
    return f"slice{'s' * (len(at) > 1)} {ranges(at)}"


def _described(o: Tensor, g: Tensor) -> Relation:
    """How far off, where no relation is known."""
    if o.shape != g.shape:
        return Relation(DIFFERS, f"of shape {tuple(o.shape)}, the golden's is {tuple(g.shape)}, in no known relation")
    if o.numel() <= 3:
        pairs = zip(o.flatten().tolist(), g.flatten().tolist(), strict=True)
        return Relation(DIFFERS, "; ".join(f"{x:.6g} where the golden has {y:.6g}" for x, y in pairs))
    c = compare(*_narrower_first(o, g))
    nan = f", {int(o.isnan().sum())} of them NaN" if o.is_floating_point() and bool(o.isnan().any()) else ""
    size = f"by {digits(c.rms_ratio, 3)} of the golden's size (rms), cosine {digits(c.cosine, 3)}"
    ulp = f", at most {digits(c.max_ulp)} units in the last place of {c.observed_dtype}" * (c.max_ulp <= 2 * FEW)
    return Relation(DIFFERS, f"{c.mismatches} of {c.count} elements differ{nan}, {size}{ulp}")
