"""Mutations that hold in part: through one operand only, in a part of a dimension, in two operands alike.

Of a faulty program most wrong lines are edits that a list of mutations has, but they reach the result by one of several
ways, or run in some iterations of a loop only. Here a mutation is restricted so, and run again: nothing is linear.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from whywrong.comparing.regions import bits_of_subset, listed
from whywrong.explaining.mutations import Context, Mutation, argument, summed_over
from whywrong.explaining.on_device import on
from whywrong.explaining.part import Edit, Part
from whywrong.recording.program import Ref, call, filled
from whywrong.tables import runs

Tensor = torch.Tensor

PARTS, MOST_TERMS = 64, 512
"""Parts of a dimension that are switched on one by one: all of a short one, tiles of a long one; and terms of sums by
index, of which those that are lost are no neighbours."""


def through(part: Part, edits: Mapping[int, Edit], user: int, j: int) -> dict[int, Edit]:
    """The same edits as they reach operation `user` through its argument j alone; all else is as in the reference."""
    node, nodes = part.nodes[user], part.nodes
    source = node.args[j].id
    inside = [i for i in part.downstream(*edits) if i == source or source in part.downstream(i)]
    takes = {i: e.takes if (e := edits.get(i)) and e.takes is not None else nodes[i].args for i in inside}
    refs = {p for i in inside for p in _taken(takes[i]) if p == i or p not in inside}
    refs |= {p for k, a in enumerate(node.args) if k != j for p in _taken((a,))}
    order = sorted(refs)

    def run(*given: Any) -> Any:
        outside = dict(zip(order, given, strict=True))
        results = dict(outside)
        for i in inside:
            args = filled(takes[i], results)
            results[i] = edits[i].run(*args) if i in edits else call(nodes[i], args, nodes[i].kwargs)
        args = [results[source] if k == j else filled(a, outside) for k, a in enumerate(node.args)]
        return call(node, args, node.kwargs)

    return {user: Edit(run, tuple(map(Ref, order)))}


def _taken(args: Iterable[Any]) -> Iterator[int]:
    for a in args:
        if isinstance(a, Ref):
            yield a.id
        elif isinstance(a, (tuple, list)):
            yield from _taken(a)


def ways(part: Part, edits: Mapping[int, Edit]) -> Iterator[tuple[int, int]]:
    """Operations, and the place of an argument, by which edits reach the result among other ways."""
    if part.target in edits:
        return
    reached = set(part.downstream(*edits))
    for i in sorted(reached):
        refs = [(j, a.id) for j, a in enumerate(part.nodes[i].args) if isinstance(a, Ref) and a.id in reached]
        for j, p in refs if i not in edits else ():
            if len(refs) > 1 or len(reached.intersection(part.users.get(p, ()))) > 1:
                yield i, j


def one_way(c: Context, mutation: Mutation) -> Iterator[Mutation]:
    """A mutation that reaches the result by one of its ways only."""
    for i, j in ways(c.part, mutation.edits):
        edits = through(c.part, mutation.edits, i, j)
        says = f"{mutation.says}, but only for {c.operation(i)} of {c.called(c.part.nodes[i].args[j].id)}"
        yield replace(mutation, says=says, edits=edits, rank=mutation.rank + 1)


def unnamed(c: Context, mutation: Mutation) -> tuple[str, str]:
    """What a mutation has in common with the same one of another value: its kind, and its words without names."""
    ids, says = [*mutation.edits], mutation.says
    taken = zip(*(c.part.nodes[i].parents for i in ids), strict=False)
    for name in (c.called(*ids), *(c.called(*several) for several in taken)):
        says = re.sub(rf"\b{re.escape(name)}(?!\w)", "it", says)
    return mutation.kind, says


def twins(c: Context, mutations: Iterable[Mutation]) -> Iterator[Mutation]:
    """The same change of two values, each of which has been tried alone."""
    groups: dict[Any, list[Mutation]] = {}
    for mutation in mutations:
        groups.setdefault(unnamed(c, mutation), []).append(mutation)
    for group in groups.values():
        for a, b in itertools.combinations(group, 2):
            if {*a.edits}.isdisjoint(b.edits):
                yield Mutation(a.kind, f"{a.says}; and {b.says}", {**a.edits, **b.edits}, max(a.rank, b.rank) + 1)


class Partial(NamedTuple):
    """What may hold in a part of some dimensions of a tensor: `edits` for a mask that broadcasts to its shape."""

    mutation: Mutation
    name: str
    shape: tuple[int, ...]
    dims: Sequence[int]
    edits: Callable[[Tensor], dict[int, Edit]]
    parts: int = PARTS

    def scattered(self, mask: Tensor) -> bool:
        """Whether a mask counts out single elements: what they hold, and not why. A race loses single terms."""
        single = mask.numel() == math.prod(self.shape) and len(runs(mask.flatten().nonzero().flatten().tolist())) > 1
        return bool(self.mutation.edits) and single

    def within(self, d: int, mask: Tensor) -> tuple[Mutation, float]:
        """The mutation in a part of dimension d, and what it takes to say which part, in bits."""
        flat = mask.flatten()
        n, k = len(flat), int(flat.sum())
        edges = int((flat[1:] != flat[:-1]).sum())
        bits = min(bits_of_subset(n, k), edges * math.log2(n)) + 4.0
        kind = self.mutation.kind
        bound = kind in ("drop_term", "zero", "factor") or (kind == "race" and edges <= 2)  # one run: that of a loop
        where = f"{listed(flat)} of dimension {d} of {n} of {self.name}"
        says = (
            f"{self.mutation.says} {where}" if not self.mutation.edits else f"{self.mutation.says}, but only in {where}"
        )
        return replace(self.mutation, kind="truncate" if bound else kind, says=says, edits=self.edits(mask)), bits


def summed(c: Context) -> Iterator[Partial]:
    """Sums, products and extrema that leave out some of what they are made of."""
    for node in c.part.nodes:
        j, dims = summed_over(node, c.part.values)
        if dims:
            fill = {"amax": -math.inf, "amin": math.inf}.get(node.op, 0.0)
            shape = tuple(c.part.values[node.args[j].id].shape)
            kind, parts = ("race", MOST_TERMS) if node.op in ("index_add", "scatter_add") else ("truncate", PARTS)
            mutation = Mutation(kind, f"{c.operation(node.id)} leaves out", {}, 0, lost=True)
            edits = partial(_without, c.part, node.id, j, fill)
            yield Partial(mutation, c.called(node.args[j].id), shape, dims, edits, parts)


def _without(part: Part, i: int, j: int, fill: float, mask: Tensor) -> dict[int, Edit]:
    return argument(part, [i], j, partial(torch.masked_fill, mask=mask, value=fill))


def changed(c: Context, mutation: Mutation) -> Iterator[Partial]:
    """A mutation of one value, in a part of that; nothing where it changes the shape."""
    if len(mutation.edits) != 1:
        return
    ((i, edit),) = mutation.edits.items()
    old, takes = c.part.values[i], edit.takes if edit.takes is not None else c.part.nodes[i].args
    with on(c.part.device):
        new = edit.run(*filled(takes, c.part.values))
    if isinstance(old, Tensor) and isinstance(new, Tensor) and old.shape == new.shape and not torch.equal(old, new):

        def edits(mask: Tensor) -> dict[int, Edit]:
            return {i: Edit(partial(_where, mask, edit.run), (Ref(i), *takes))}

        yield Partial(mutation, c.called(i), tuple(old.shape), range(old.ndim), edits)


def _where(mask: Tensor, run: Any, own: Tensor, *args: Any) -> Tensor:
    return torch.where(mask, run(*args), own)


def from_one_on(mutation: Mutation, k: int) -> Mutation:
    """The same change of one line in a loop, but from its k-th time on, counted from 0."""
    ids = sorted(mutation.edits)
    says = f"{mutation.says}, but only from time {k + 1} of {len(ids)} on"
    return replace(mutation, says=says, edits={i: mutation.edits[i] for i in ids[k:]})


def in_a_loop(part: Part, mutation: Mutation) -> int:
    """How often the one line runs that a mutation changes; 0 where it changes several, or one that runs once."""
    lines = {(part.nodes[i].site, part.nodes[i].op) for i in mutation.edits}
    return len(mutation.edits) * (len(lines) == 1 and len(mutation.edits) > 2)


def subsets(shape: tuple[int, ...], d: int, parts: int) -> list[Tensor]:
    """The parts of a dimension that are switched on one by one, as masks that broadcast."""
    tile = -(-shape[d] // parts)
    return [_between(shape, d, a, a + tile) for a in range(0, shape[d], tile)]


def refined(shape: tuple[int, ...], d: int, count: int, parts: Sequence[int]) -> list[Tensor]:
    """Of tiles that were chosen, what is within as one part, and what is next to an end one by one."""
    tile, within = -(-shape[d] // count), set(parts)
    ends = {k for c in within for by in (-1, 1) for k in (c, c + by) if c + by not in within}
    inner = [(a * tile, b * tile + tile) for a, b in runs(sorted(within - ends))]
    singles = [a for k in sorted(ends)[:8] for a in range(max(0, k * tile), min(shape[d], k * tile + tile))]
    return [_between(shape, d, a, b) for a, b in sorted([*inner, *((a, a + 1) for a in singles)])]


def behind(shape: tuple[int, ...], d: int, first: int) -> Tensor:
    """All of a dimension from a place on."""
    return _between(shape, d, first, shape[d])


def _between(shape: tuple[int, ...], d: int, a: int, b: int) -> Tensor:
    place = torch.arange(shape[d]).view([-1 if k == d else 1 for k in range(len(shape))])
    return (place >= a) & (place < b)


def chosen(columns: Tensor, wanted: Tensor) -> Iterator[list[int]]:
    """Which of the columns add up to what is wanted: any of them, and the best run of neighbours.

    Any are those of least squares, from which one at a time is added or taken away as long as that comes nearer: of
    equal columns, least squares has a share of each.
    """
    picked = torch.linalg.lstsq(columns, wanted[:, None], driver="gelsd").solution[:, 0] > 0.5
    for _ in range(len(picked)):
        left, signs = wanted - columns[:, picked].sum(1), 1.0 - 2.0 * picked.double()
        gains = 2.0 * signs * (left @ columns) - columns.square().sum(0)
        best = int(gains.argmax())
        if not float(gains[best]) > 1e-6 * float(left.square().sum()):
            break
        picked[best] = ~picked[best]
    yield picked.nonzero().flatten().tolist()
    sums = torch.nn.functional.pad(columns.cumsum(1), (1, 0))  # of the columns before each place
    alone, along = sums.square().sum(0), wanted @ sums
    left = alone[:, None] + alone - 2.0 * (sums.T @ sums) + 2.0 * (along[:, None] - along)
    first, end = divmod(int(left.argmin()), len(left))
    yield [*range(first, end)]
