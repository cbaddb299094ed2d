"""Slices of a large step, along a dimension that what comes before it keeps apart: a sample to try mutations on."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from whywrong.errors import collected
from whywrong.explaining.on_device import LOOKUPS, on
from whywrong.explaining.part import Edit, Part
from whywrong.process_state import float64_by_default
from whywrong.recording.golden import Golden
from whywrong.recording.operations import UNCHECKED
from whywrong.recording.program import CONSTANT, INPUT, ITEM, Node, Program, Ref, call, filled, references
from whywrong.torch_private import tree_leaves, tree_map, tree_map_only

Tensor = torch.Tensor

SLICES = 8
"""How many slices are looked at, most of them wrong ones."""
LARGE = 1 << 26
"""Multiplications, and elements of results, of which a run is worth a sample, and a GPU: some 10 ms on a core."""
TOGETHER = 16
"""Mutations of one operation that are run at once, on the slices of each."""
MOST_TOGETHER = 1 << 27
"""Elements that what these change, and what follows whole, may have in all: 1 GiB."""
LAUNCH = 1 << 22
"""Elements in whose time an operation is begun; chosen, not measured."""
MOST_WAYS = 64
"""Ways to take slices of its arguments that are tried of an operation."""


class Along(NamedTuple):
    """A dimension of a tensor in which the slices lie: by itself, or `outer` times, each `inner` elements long."""

    dim: int
    outer: int = 1
    inner: int = 1


Ways = tuple[dict[int, "Along | None"], Sequence[tuple[int, int]]]
"""From which slices of what it takes an operation is run, and which of its sizes are those of slices."""


class Slices:
    """The slices `places` of a step along its dimension `dim`, and how each operation before it is run for these alone.

    An operation keeps a dimension apart if its slices are those of its result on the same slices of its arguments,
    or of some of them: that is seen by running it, on other numbers of the same shapes. An edit is run on whole values,
    since it may exchange slices.
    """

    def __init__(self, part: Part, dim: int, places: Tensor) -> None:
        self._part, self._values = part, part.values
        self.places, self._length = places, part.nodes[part.target].shape[dim]
        self.dim = Along(dim)
        self._along: dict[int, Along | None] = {part.target: self.dim}
        self._takes: dict[int, Ways] = {}
        self._known: dict[tuple[int, Along], Any] = {}
        self._known_at: dict[Along, Tensor] = {}
        generator = torch.Generator(part.device).manual_seed(0)
        for i in reversed(part.program.cone([part.target], ())):
            node, along, ways = part.nodes[i], self._along[i], None
            if along is not None and i not in part.given:
                ways = self._apart(node, along, generator)
            if ways is None:
                self._along[i] = along if i in part.given else None
            self._takes[i] = ways or (dict.fromkeys(node.parents), ())
            for p, taken in self._takes[i][0].items():
                self._along[p] = taken if self._along.get(p, taken) == taken else None

    @property
    def work(self) -> float:
        """What is computed for the slices, as :func:`_work` counts."""
        share = len(self.places) / self._length
        return sum(_work(self._part, i) * (share if along else 1.0) for i, along in self._along.items())

    def time(self, edits: Iterable[int], n: int) -> float:
        """What `n` mutations of these operations take at once, in elements."""
        share, time = len(self.places) / self._length, 0.0
        for i in (i for i in self._part.downstream(*edits) if i in self._along):
            work = _work(self._part, i)
            time += n * work * share + LAUNCH if self._along[i] else n * (work + LAUNCH)
        return time

    def of(self, x: Tensor) -> Tensor:
        """The slices of a tensor of the step's shape."""
        return self.cut(x, self.dim)

    def value(self, edits: Mapping[int, Edit]) -> Any:
        """The step's slices with `edits` in place; None where an edit takes slices of what another has changed."""
        found = self.values([edits])
        return found[0] if found is not None else None

    def together(self, edits: Iterable[int]) -> int:
        """How many mutations of these operations run at once, with room for what is changed and follows whole."""
        edits = {*edits}
        whole = (i for i in self._part.downstream(*edits) if i in edits or self._along.get(i, self.dim) is None)
        return max(1, min(TOGETHER, MOST_TOGETHER // max(1, sum(math.prod(self._part.nodes[i].shape) for i in whole))))

    def alone(self) -> tuple[Golden, dict[str, tuple[str, Along | None]]]:
        """The slices as a program of their own, which takes as many times less to simulate; and of which of this part's
        steps each of its steps has which slices, or all. Raises RuntimeError where it gives another result."""
        part, program, number = self._part, Program(), dict[tuple[int, Along | None], int]()

        def add(node: Node, of: int, value: Any = None) -> int:
            program.nodes.append(replace(node, id=len(program.nodes), shape=()))
            program.values |= {program.nodes[-1].id: value} if node.func in (INPUT, CONSTANT) else {}
            program.inside |= {program.nodes[-1].id} if of in part.program.inside else set()
            return program.nodes[-1].id

        def taken(p: int, along: Along | None) -> Ref:
            if (p, along) not in number and p in part.given:
                number[p, along] = add(part.nodes[p], p, self.cut(self._values[p], along))
            elif (p, along) not in number and along is not None:  # of what is computed whole
                at = Ref(add(Node(0, CONSTANT), p, self._at(along)))
                cut = torch.ops.aten.index_select.default
                number[p, along] = add(
                    Node(0, cut, (Ref(number[p, None]), along.dim, at), dtype=part.nodes[p].dtype), p
                )
            return Ref(number[p, along])

        for i in (i for i in part.program.cone([part.target], ()) if i not in part.given):
            (ways, sizes), own = self._takes[i], self._along[i]
            if part.nodes[i].op == ITEM and self._along[part.nodes[i].parents[0]] is None:  # a tuple is not cut
                ways, own = dict.fromkeys(ways), None
            refs = {p: taken(p, along) for p, along in ways.items()}
            node = self._sized(part.nodes[i], sizes, 1)
            kwargs = {key: filled(item, refs) for key, item in node.kwargs.items()}
            number[i, own] = add(replace(node, args=(*filled(node.args, refs),), kwargs=kwargs), i)
        step = part.names[part.target]
        steps = {step: taken(part.target, self.dim).id}
        forms: dict[str, tuple[str, Along | None]] = {step: (step, self.dim)}
        for (p, along), k in number.items():
            if p in part.given and (name := part.names.get(p)):
                form = f"{name}, form {len(forms)}" if name in forms else name
                steps[form], forms[form] = k, (name, along)
        with on(part.device):
            found = program.run(range(len(program.nodes)), {}, {steps[step]}, seen=partial(_shaped, program))
        if not _equal(found[steps[step]], self.of(self._values[part.target])):
            raise RuntimeError("the slices as a program of their own give another result")
        return Golden(program, steps, {}), forms

    @float64_by_default()
    def values(self, group: Sequence[Mapping[int, Edit]]) -> list[Any] | None:
        """The same for several edits of the same operations: what follows these runs once, on the slices of all."""
        part, n = self._part, len(group)
        whole, some = dict[int, list[Any]](), dict[int, Any]()
        order = [i for i in part.downstream(*group[0]) if i in self._along]
        needed = dict[int, set[int]]()
        for i in order:
            edited = (_needs(part.nodes[i], edits[i]) for edits in group if i in edits)
            needed[i] = {*part.nodes[i].parents}.union(*edited) - {i}
        last = {p: i for i in order for p in needed[i]}
        for i in order:
            node, along = part.nodes[i], self._along[i]
            if i in group[0]:
                if not all(_needs(node, edits[i]).isdisjoint(some) for edits in group):
                    return None
                if along is None or len(group[0]) > 1:  # another edit may take it whole
                    whole[i] = [self._edited(node, edits[i], k, whole) for k, edits in enumerate(group)]
                else:
                    found = [self.cut(self._edited(node, edits[i], k, whole), along) for k, edits in enumerate(group)]
                    some[i] = self._joined(found, along)
            elif along is not None:
                some[i] = self._on_slices(i, whole, some, n)
            else:
                whole[i] = [_run(node, self._whole(node.parents, k, whole), self._part.device) for k in range(n)]
            for p in (p for p in needed[i] if last[p] == i):
                whole.pop(p, None)
                some.pop(p, None)
        if part.target not in some:
            found = whole.get(part.target) or [self._values[part.target]] * n
            return [self.cut(x, self.dim) for x in found]
        return self._split(some[part.target], self.dim, n)

    def _edited(self, node: Node, edit: Edit, k: int, whole: Mapping[int, list[Any]]) -> Any:
        """What an edit gives on whole values."""
        known = self._whole(_needs(node, edit), k, whole)
        if node.id in known and not whole.keys().isdisjoint(node.parents):
            known[node.id] = _run(node, known, self._part.device)
        with on(self._part.device):
            found = edit.run(*filled(node.args if edit.takes is None else edit.takes, known))
        return tree_map_only(Tensor, lambda x: x.to(self._part.device), found)

    def _whole(self, numbers: Iterable[int], k: int, whole: Mapping[int, list[Any]]) -> dict[int, Any]:
        return {p: whole[p][k] if p in whole else self._values[p] for p in numbers}

    def _on_slices(self, i: int, whole: Mapping[int, list[Any]], some: Mapping[int, Any], n: int) -> Any:
        """What an operation gives on the slices of `n` edits; one by one where it takes another whole value of each."""
        (ways, sizes), own = self._takes[i], self._along[i]
        if own is not None and n > 1 and any(along is None and p in whole for p, along in ways.items()):
            split = {p: self._split(some[p], along, n) for p, along in ways.items() if along is not None and p in some}
            each = [
                self._on_slices(i, {p: [x[k]] for p, x in whole.items()}, {p: x[k] for p, x in split.items()}, 1)
                for k in range(n)
            ]
            return self._joined(each, own)
        taken = {p: self._taken(p, along, whole, some, n) for p, along in ways.items()}
        return _run(self._sized(self._part.nodes[i], sizes, n), taken, self._part.device)

    def _taken(
        self, p: int, along: Along | None, whole: Mapping[int, list[Any]], some: Mapping[int, Any], n: int
    ) -> Any:
        """What an operation takes: slices of all edits, where it takes these alone."""
        if along is None or p in some:
            return some[p] if p in some else self._whole([p], 0, whole)[p]
        if p in whole:
            return self._joined([self.cut(x, along) for x in whole[p]], along)
        if (p, along) not in self._known:
            self._known[p, along] = self.cut(self._values[p], along)
        return self._joined([self._known[p, along]] * n, along)

    def _joined(self, values: Sequence[Any], along: Along) -> Any:
        """The slices of several, one after another within each of `outer`."""

        def joined(*xs: Any) -> Any:
            apart = [x.unflatten(along.dim, (along.outer, -1)) for x in xs]
            return torch.cat(apart, along.dim + 1).flatten(along.dim, along.dim + 1)

        return tree_map(joined, *values) if len(values) > 1 else values[0]

    def _split(self, x: Any, along: Along, n: int) -> list[Any]:
        """The slices of each of `n` that were joined."""

        def part(k: int, x: Tensor) -> Tensor:
            apart = x.unflatten(along.dim, (along.outer, n, -1))
            return apart.select(along.dim + 1, k).flatten(along.dim, along.dim + 1)

        return [tree_map_only(Tensor, partial(part, k), x) for k in range(n)] if n > 1 else [x]

    def _at(self, along: Along) -> Tensor:
        """The places of the slices."""
        if along not in self._known_at:
            at = torch.arange(along.outer)[:, None, None] * self._length + self.places[:, None]
            self._known_at[along] = (at * along.inner + torch.arange(along.inner)).flatten().to(self._part.device)
        return self._known_at[along]

    def cut(self, x: Any, along: Along | None) -> Any:
        """The slices of a value that lie in a dimension of it; all of it without one."""
        if along is None:
            return x
        at = self._at(along)

        def cut(x: Tensor) -> Tensor:
            if x.ndim <= along.dim or x.shape[along.dim] != along.outer * self._length * along.inner:
                raise IndexError("an edit that changes the shape has no slices")
            return x.index_select(along.dim, at.to(x.device))

        return tree_map_only(Tensor, cut, x)

    def _apart(self, node: Node, along: Along, generator: torch.Generator) -> Ways | None:
        """From which slices of its arguments an operation computes those of its result, and with which sizes."""
        full = {p: tree_map_only(Tensor, partial(_other, generator=generator), self._values[p]) for p in node.parents}
        with collected([], "an operation on other numbers", (RuntimeError, IndexError)):
            wanted = self.cut(_run(node, full, self._part.device), along)
            ways = itertools.product(*([*self._ways(self._values[p])] for p in node.parents))
            for way in itertools.islice(ways, MOST_WAYS):
                taken = dict(zip(node.parents, way, strict=True))
                for sizes in self._sizes(node):
                    with collected([], "an operation on slices", (RuntimeError, IndexError)):
                        cut = {p: self.cut(full[p], a) for p, a in taken.items()}
                        if _equal(_run(self._sized(node, sizes, 1), cut, self._part.device), wanted):
                            return taken, sizes
        return None

    def _ways(self, value: Any) -> Iterator[Along | None]:
        """In which dimensions of a value the slices may lie; by themselves first, or in none, or with others."""
        shape = next((leaf.shape for leaf in tree_leaves(value) if isinstance(leaf, Tensor)), ())
        yield from (Along(dim) for dim, n in enumerate(shape) if n == self._length)
        yield None
        for dim, n in enumerate(shape):
            if n > self._length and n % self._length == 0:
                yield from (Along(dim, n // self._length), Along(dim, 1, n // self._length))

    def _sizes(self, node: Node) -> Iterator[Sequence[tuple[int, int]]]:
        """Which of its sizes, by argument and place, may be those of slices: none, each, or all."""
        sizes = [(k, j) for k, arg in enumerate(node.args) if isinstance(arg, (list, tuple)) for j in range(len(arg))]
        multiple = [(k, j) for k, j in sizes if isinstance(n := node.args[k][j], int) and n and n % self._length == 0]
        return iter([[], *([each] for each in multiple), multiple])

    def _sized(self, node: Node, sizes: Sequence[tuple[int, int]], n: int) -> Node:
        """The operation with sizes for the slices of `n` edits."""
        if not sizes:
            return node
        args = [list(arg) if isinstance(arg, (list, tuple)) else arg for arg in node.args]
        for k, j in sizes:
            args[k][j] = args[k][j] // self._length * len(self.places) * n
        return Node(node.id, node.func, tuple(args), node.kwargs, node.shape, node.dtype, node.site)


def sampled(part: Part, wrong: Tensor) -> Slices | None:
    """The slices of a step by which least is left to compute; None of a small one, or where half is left at least."""
    if not large(part):
        return None
    found = list[Slices]()
    for dim, length in enumerate(wrong.shape):
        if length >= 4 * SLICES:
            at = wrong.movedim(dim, 0).reshape(length, -1).any(1)
            both = ((at.nonzero(), 3 * SLICES // 4), ((~at).nonzero(), SLICES // 4))
            some = [each[torch.linspace(0, len(each) - 1, n).long()] for each, n in both if len(each)]
            found.append(Slices(part, dim, torch.cat(some).flatten().unique()))
    best = min(found, key=lambda each: each.work, default=None)
    return best if best is not None and best.work < _whole(part) / 2.0 else None


def large(part: Part) -> bool:
    """Whether a run of a step takes long, so that it is sampled, and stays on a GPU."""
    return _whole(part) >= LARGE and UNCHECKED.keys().isdisjoint(node.op for node in part.nodes)


def _shaped(program: Program, i: int, value: Any) -> Any:
    """Note the shape of what an operation gave."""
    program.nodes[i].shape = tuple(value.shape) if isinstance(value, Tensor) else ()
    return value


def _needs(node: Node, edit: Edit) -> set[int]:
    """Of which operations an edit takes the results; its own number is for what it takes the place of."""
    args = node.args if edit.takes is None else edit.takes
    needs = {*references(args)}
    return needs | ({*node.parents} if node.id in needs else set())


def _whole(part: Part) -> float:
    return sum(_work(part, i) for i in part.program.cone([part.target], ()))


def _work(part: Part, i: int) -> float:
    """Multiplications of a product of matrices, else elements of a result."""
    node, size = part.nodes[i], float(math.prod(part.nodes[i].shape))
    if i in part.given:
        return 0.0
    return size * (part.nodes[node.parents[-2:][0]].shape[-1] if node.op in ("mm", "bmm", "addmm", "baddbmm") else 1.0)


def _run(node: Node, values: Mapping[int, Any], device: torch.device) -> Any:
    args, kwargs = filled(node.args, values), {key: filled(item, values) for key, item in node.kwargs.items()}
    with on(device) if node.op.startswith(LOOKUPS) else nullcontext():
        return call(node, args, kwargs, device)


def _other(x: Tensor, generator: torch.Generator) -> Tensor:
    """Other numbers of the same shape: positive real ones, truth values, or the same whole ones in other places."""
    if x.is_floating_point() or x.dtype == torch.bool:
        random = torch.rand(x.shape, generator=generator, dtype=torch.float64, device=generator.device)
        return random > 0.5 if x.dtype == torch.bool else (random + 0.5).to(x.dtype)
    return x.flatten()[torch.randperm(x.numel(), generator=generator, device=x.device)].view(x.shape)


def _equal(a: Any, b: Any) -> bool:
    """Whether results are equal but for the order of additions."""
    pairs = list(zip(tree_leaves(a), tree_leaves(b), strict=True))
    return all(
        x.shape == y.shape and torch.allclose(x.double(), y.double(), 1e-9, 1e-9, equal_nan=True)
        for x, y in pairs
        if isinstance(x, Tensor)
    )
