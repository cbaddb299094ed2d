"""A step of integers: codes of a quantisation, which a tie may move by one, or indices, a choice among equals."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import torch

from labkit import precision
from labkit.blocks import cuts, spread_over
from labkit.handed_on import Input
from labkit.judgement import UNKNOWN_ORIGIN, Judgement, State, first_reason
from labkit.numerics.compare import compare
from labkit.replay import replay

Tensor = torch.Tensor
WIDEST_CODE = 255
"""The largest number that is taken for a code, which a tie may move by one; larger ones are sums or indices."""

TIE = 1e-5
"""How near to half a step, relatively, a number in float32 counts as a tie."""
FEWEST_TIES = 16
"""Exact ties on the odd side from which they are held to be a rule's."""
_EVEN = re.compile(r"half[ -](to[ -])?even|nearest[ -]even|ties?[ -]to[ -]even|\brne\b|\brint|banker", re.IGNORECASE)
OTHER_SIDE = 0.25
"""Of codes rounded by chance, the share that is not the nearest: the mean distance to it."""
UNLIKELY = 5.0
"""Standard deviations beyond which a share is not taken for chance."""
FEWEST_BY_CHANCE = 256
"""Codes from which a quarter on the other side is told from another share, where no text says that chance decides."""


def codes(x: Tensor) -> bool:
    """Whether real numbers are codes, as zero points often are kept: whole, small, and of more than a mask's values."""
    whole = bool((x == x.round()).all()) and float(x.abs().max()) <= WIDEST_CODE
    return whole and x.numel() >= 16 and len(x.unique()) > 3


def integers(
    name: str, o: Tensor, g: Tensor, op: str, inputs: Sequence[Input], state: State, *, stochastic: bool = False
) -> Judgement:
    """Judge one step of whole numbers, whatever type they are kept in; as :func:`labkit.judge.step`.

    `stochastic`: it is said that they were rounded to either neighbour by chance.
    """
    total = compare(o, g)
    found = Judgement(name, total)
    if total.ok:
        return found
    d = (o.to(torch.int64) - g.to(torch.int64)).double()
    if inputs and len(inputs) == len(state.inputs(name)) and state.complete(name):
        way = replay(op, [x.golden for x in inputs], g.double(), 0.0)
        if way is not None:
            value = way.run(*[x.observed for x in inputs])
            found.own, found.inherited = compare(o.double(), value, 0.0), compare(value, g.double(), math.inf).rms_ratio
            found.listed, found.wrong = True, not found.own.ok
            found.reasons = [] if found.own.ok else [first_reason(found.own)]
            return found
    if (packed_from := _repacked(name, o, g, inputs, state)) is not None:
        found.own, found.inherited = compare(o.double(), packed_from, 0.0), 0.0
        found.wrong = not found.own.ok
        found.reasons = [first_reason(found.own)] if found.wrong else []
        return found
    made = _made_here(g, inputs)
    share = float((d[made] != 0).double().mean())
    if any(x.wrong for x in inputs):
        found.reasons = [UNKNOWN_ORIGIN]
        return found
    if _chosen_alike(o.to(torch.int64), g.to(torch.int64), inputs or state.before(name)):
        found.tied = True
        return found
    given = inputs or [x for x in state.before(name) if x.observed.shape == x.golden.shape]
    ties = _ties(o, g, given, even=bool(_EVEN.search(f"{name} {op}")))
    packed = bool(re.search(r"pack|int4|nibble", f"{name} {op}", re.IGNORECASE)) and float(g.max() - g.min()) > 15.0
    level = torch.isin(d.abs(), torch.tensor([0.0, 1.0, 15.0, 16.0, 17.0] if packed else [0.0, 1.0], dtype=d.dtype))
    size = float(g.double().pow(2).mean().sqrt())
    noise = max((one[0] for one in state.background[-4:]), default=0.0)
    few = ties is None and bool(level.all()) and share <= max(1e-2, 4.0 * noise * size)
    if ties or few or _by_chance(d[made], g[made], said=stochastic):
        state.background.append((total.rms_ratio, 0.5 * total.max_abs, size, 1.0, float(g.numel())))
        return found
    found.wrong, found.reasons = True, [first_reason(total)]
    return found


def _repacked(name: str, o: Tensor, g: Tensor, inputs: Sequence[Input], state: State) -> Tensor | None:
    """Two codes of 4 bits in a byte, as they are by the observed's own codes; None where g is no such thing.

    The golden tells which step they were made of, which of two is low, and whether neighbours or halves share a byte.
    """
    for x in inputs or state.before(name):
        halved = g.ndim > 0 and x.golden.shape == torch.Size((*g.shape[:-1], 2 * g.shape[-1]))
        if halved and bool((x.golden == x.golden.round()).all()):
            for pack in _PACKINGS:
                if torch.equal(pack(x.golden) % 256, g.double() % 256):
                    seen = pack(x.observed) % 256
                    return torch.where(seen == o.double() % 256, o.double(), seen)
    return None


def _pairs(x: Tensor, halves: bool) -> tuple[Tensor, Tensor]:
    return x.chunk(2, -1) if halves else (x[..., ::2], x[..., 1::2])  # type: ignore[return-value]


def _packing(halves: bool, low_first: bool) -> Callable[[Tensor], Tensor]:
    def pack(x: Tensor) -> Tensor:
        first, second = (one % 16 for one in _pairs(x, halves))
        return first + 16 * second if low_first else 16 * first + second

    return pack


_PACKINGS = [_packing(halves, low_first) for halves in (False, True) for low_first in (True, False)]


def _made_here(g: Tensor, inputs: Iterable[Input]) -> Tensor:
    """Where the step's codes are its own; not those that it took over from an input, as of a pool it writes into."""
    for x in inputs:
        if x.golden.shape == g.shape and codes(x.golden):
            changed = x.golden != g.double()
            if bool(changed.any()):
                return changed
    return torch.ones_like(g, dtype=torch.bool)


def _by_chance(d: Tensor, g: Tensor, *, said: bool) -> bool:
    """Whether codes that are `d` off may have been rounded up or down by chance, with the real number for a mean.

    A quarter of them then falls to the other side of the nearest code, and neither that nor its sign has a bias.
    Where nobody says so, just a quarter is wanted, of many.
    """
    count = d.numel()
    if not bool((d.abs() <= 1.0).all()) or count < (1 if said else FEWEST_BY_CHANCE):
        return False
    share = float((d != 0).double().mean())
    off = share - OTHER_SIDE
    limit = UNLIKELY * math.sqrt(OTHER_SIDE * (1.0 - OTHER_SIDE) / count)
    bias = max(abs(float(d.mean())), abs(float((d * g.double().sign()).mean())))
    return (off <= limit if said else abs(off) <= limit) and bias <= UNLIKELY * math.sqrt(OTHER_SIDE / count)


def _chosen_alike(o: Tensor, g: Tensor, inputs: Iterable[Input]) -> bool:
    """Whether both sides are indices of an input's largest elements, in its rows: equal ones in any order.

    That they are is read off the golden; an observed choice counts by the observed's own numbers.
    """
    for x in (y for given in inputs for y in (given, *_windows(given, g))):
        one = g.ndim == x.golden.ndim - 1  # of each row
        at, other = (g.unsqueeze(-1), o.unsqueeze(-1)) if one else (g, o)
        columns = x.golden.shape[-1] if x.golden.ndim else 0
        if columns < 2 or x.golden.shape[:-1] != at.shape[:-1] or at.shape[-1] > columns:
            continue
        if x.observed.shape == x.golden.shape and _within(at, columns) and _largest(at, x.golden):
            row = other.sort(-1).values
            different = bool((row[..., 1:] != row[..., :-1]).all())
            return different and _within(other, columns) and _largest(other, x.observed)
    return False


def _windows(x: Input, g: Tensor) -> Iterator[Input]:
    """An image as the rows of its square windows, one for each of g's indices."""
    shape = x.golden.shape
    if g.ndim < 2 or len(shape) != g.ndim or shape[:-2] != g.shape[:-2] or not g.numel():
        return
    size = shape[-1] // g.shape[-1]
    if size > 1 and shape[-2:] == torch.Size(size * n for n in g.shape[-2:]) == x.observed.shape[-2:]:

        def cut(image: Tensor) -> Tensor:
            return image.unflatten(-1, (-1, size)).unflatten(-3, (-1, size)).transpose(-2, -3).flatten(-2)

        yield replace(x, golden=cut(x.golden), observed=cut(x.observed))


def _largest(at: Tensor, x: Tensor) -> bool:
    """Whether `at` picks the largest of each row, to float32's precision."""
    best = x.topk(at.shape[-1], -1).values
    return bool(((x.gather(-1, at) - best).abs() <= 4.0 * precision.UNIT["float32"] * best.abs()).all())


def _within(at: Tensor, columns: int) -> bool:
    return bool((at >= 0).all()) and bool((at < columns).all())


def _by_a_rule(moved: Tensor) -> bool:
    """Whether codes from exact ties, `moved` from the even one, all went one way, as another rule sends them."""
    odd = moved[moved != 0.0]
    return len(odd) >= FEWEST_TIES and bool((odd == odd[0]).all()) and 4 * len(odd) >= len(moved)


def _ties(o: Tensor, g: Tensor, inputs: Sequence[Input], *, even: bool) -> bool | None:
    """Whether every integer that differs was rounded from a tie, to float32's precision; None where that is not
    known. `even`: it is said that ties go to the even one."""
    low, high = float(g.min()), float(g.max())
    for exact, seen, point, theirs in itertools.chain(_quotients(g, inputs), _zero_points(g, inputs)):
        nearest = ((exact + point).clamp(low, high) - g).abs() <= 0.5 + TIE * exact.abs().clamp(min=1.0)
        if float(nearest.double().mean()) < 0.98:
            continue
        moved = (o.double() - theirs) - (g.double() - point)
        off = ((exact + 0.5) - (exact + 0.5).round()).abs()
        near = off <= TIE * exact.abs().clamp(min=1.0) + (exact - seen).abs()
        tied = (off == 0.0) & (exact == seen)
        if even and any(_by_a_rule(one[tied]) for one in (moved, moved * exact.sign())):
            return False
        return bool(((o == g) | (moved == 0.0) | (near & (moved.abs() == 1.0))).all())
    return None


def _quotients(g: Tensor, inputs: Sequence[Input]) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Of the golden and the observed: an input over its scale, before it is rounded, and what is added to the codes."""
    for given in (x for x in inputs if x.golden.numel() == g.numel()):
        x = replace(given, golden=given.golden.reshape(g.shape), observed=given.observed.reshape(g.shape))
        for s in inputs:
            if s is given or s.golden.numel() > x.golden.numel() or bool((s.golden == 0.0).any()):
                continue
            scale, other = spread_over(s.golden, x.golden), spread_over(s.observed, x.observed)
            if scale is None or other is None:
                continue
            exact, seen = x.golden / scale, x.observed / other
            yield exact, seen, torch.zeros_like(exact), torch.zeros_like(exact)
            for z in (one for one in inputs if one is not given and one is not s):
                point, theirs = spread_over(z.golden, x.golden), spread_over(z.observed, x.observed)
                if point is not None and theirs is not None:
                    yield exact, seen, point, theirs


def _zero_points(g: Tensor, inputs: Sequence[Input]) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Likewise of zero points: what the least of a block, or 0, is over its scale, and where codes begin."""
    for x, s in itertools.permutations(inputs, 2):
        if s.golden.numel() != g.numel() or x.golden.numel() <= g.numel() or bool((s.golden == 0.0).any()):
            continue
        for blocks in cuts(x.golden.shape, g.shape):
            exact, seen = (
                blocks.largest(-t.clamp(max=0.0)).reshape(g.shape) / scale.reshape(g.shape)
                for t, scale in ((x.golden, s.golden), (x.observed, s.observed))
            )
            for first in (0.0, -8.0, -128.0):
                yield exact, seen, torch.full_like(exact, first), torch.full_like(exact, first)
