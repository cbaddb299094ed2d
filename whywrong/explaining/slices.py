"""Slices of a large step, along a dimension that what comes before it keeps apart: a sample to try mutations on."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from whywrong.errors import collected
from whywrong.explaining.part import Edit, Part
from whywrong.process_state import float64_by_default
from whywrong.recording.operations import UNCHECKED, name_of
from whywrong.recording.program import Node, Ref, call, filled
from whywrong.torch_private import TorchDispatchMode, tree_leaves, tree_map_only

Tensor = torch.Tensor

SLICES = 8
"""How many slices are looked at, most of them wrong ones."""
LARGE = 1 << 26
"""Multiplications, and elements of results, of which a run is worth a sample: some 10 ms on a core."""
LOOKUPS = ("index", "gather", "scatter", "embedding", "take", "put", "nll_loss", "max_unpool", "multinomial")
"""How the names of operations begin that take places in a tensor as whole numbers."""
MOST_WAYS = 64
"""Ways to take slices of its arguments that are tried of an operation."""


class Along(NamedTuple):
    """A dimension of a tensor in which the slices lie: by itself, or `outer` times, each `inner` elements long."""

    dim: int
    outer: int = 1
    inner: int = 1


Ways = tuple[dict[int, "Along | None"], Node]
"""From which slices of what it takes an operation is run, and the operation with their sizes."""


class Slices:
    """The slices `places` of a step along its dimension `dim`, and how each operation before it is run for these alone.

    An operation keeps a dimension apart if its slices are those of its result on the same slices of its arguments,
    or of some of them: that is seen by running it, on other numbers of the same shapes. An edit is run on whole values,
    since it may exchange slices. `values` are the part's, on the device where all of this is run.
    """

    def __init__(self, part: Part, dim: int, places: Tensor, values: Mapping[int, Any], device: torch.device) -> None:
        self._part, self._values, self._device = part, values, device
        self._places, self._length = places, part.nodes[part.target].shape[dim]
        self.dim = Along(dim)
        self._along: dict[int, Along | None] = {part.target: self.dim}
        self._takes: dict[int, dict[int, Along | None]] = {}
        self._nodes: dict[int, Node] = {}
        self._known: dict[tuple[int, Along], Any] = {}
        generator = torch.Generator(device).manual_seed(0)
        for i in reversed(part.program.cone([part.target], ())):
            node, along, ways = part.nodes[i], self._along[i], None
            if along is not None and i not in part.given:
                ways = self._apart(node, along, generator)
            if ways is None:
                self._along[i] = along if i in part.given else None
            self._takes[i], self._nodes[i] = ways or (dict.fromkeys(node.parents), node)
            for p, taken in self._takes[i].items():
                self._along[p] = taken if self._along.get(p, taken) == taken else None

    @property
    def work(self) -> float:
        """What is computed for the slices, as :func:`_work` counts."""
        share = len(self._places) / self._length
        return sum(_work(self._part, i) * (share if along else 1.0) for i, along in self._along.items())

    def of(self, x: Tensor) -> Tensor:
        """The slices of a tensor of the step's shape."""
        return self._cut(x, self.dim)

    @float64_by_default()
    def value(self, edits: Mapping[int, Edit], all_slices: bool = False) -> Any:
        """The step's slices with `edits` in place, or all of it; None where an edit takes slices of what another has
        changed."""
        part = self._part
        whole, some = dict[int, Any](), dict[int, Any]()
        for i in (i for i in part.downstream(*edits) if i in self._along):
            node = part.nodes[i]
            if i in edits:
                args = node.args if (given := edits[i].takes) is None else given
                needs = {leaf.id for leaf in tree_leaves(args) if isinstance(leaf, Ref)}
                needs |= {*node.parents} if i in needs else set()
                if not needs.isdisjoint(some):
                    return None
                known = {k: whole.get(k, self._values[k]) for k in needs}
                if i in needs and not whole.keys().isdisjoint(node.parents):
                    known[i] = _run(node, known, self._device)
                with _on(self._device):
                    whole[i] = edits[i].run(*filled(args, known))
            elif all_slices or self._along[i] is None:
                whole[i] = _run(node, {p: whole.get(p, self._values[p]) for p in node.parents}, self._device)
            else:
                taken = {p: self._taken(p, along, whole, some) for p, along in self._takes[i].items()}
                some[i] = _run(self._nodes[i], taken, self._device)
        value = some[part.target] if part.target in some else whole[part.target]
        value = value if all_slices or part.target in some else self._cut(value, self.dim)
        return value.cpu() if isinstance(value, Tensor) else value

    def _taken(self, p: int, along: Along | None, whole: Mapping[int, Any], some: Mapping[int, Any]) -> Any:
        """What an operation takes: slices, where it takes these alone."""
        if p in some:
            return some[p]
        if along is None:
            return whole.get(p, self._values[p])
        if p in whole:
            return self._cut(whole[p], along)
        if (p, along) not in self._known:
            self._known[p, along] = self._cut(self._values[p], along)
        return self._known[p, along]

    def _cut(self, x: Any, along: Along) -> Any:
        at = torch.arange(along.outer)[:, None, None] * self._length + self._places[:, None]
        at = (at * along.inner + torch.arange(along.inner)).flatten()

        def cut(x: Tensor) -> Tensor:
            if x.ndim <= along.dim or x.shape[along.dim] != along.outer * self._length * along.inner:
                raise IndexError("an edit that changes the shape has no slices")
            return x.index_select(along.dim, at.to(x.device))

        return tree_map_only(Tensor, cut, x)

    def _apart(self, node: Node, along: Along, generator: torch.Generator) -> Ways | None:
        """From which slices of its arguments an operation computes those of its result, and with which sizes."""
        full = {p: tree_map_only(Tensor, lambda x: _other(x, generator), self._values[p]) for p in node.parents}
        with collected([], "an operation on other numbers", (RuntimeError, IndexError)):
            wanted = self._cut(_run(node, full, self._device), along)
            ways = itertools.product(*([*self._ways(self._values[p])] for p in node.parents))
            for way in itertools.islice(ways, MOST_WAYS):
                taken = dict(zip(node.parents, way, strict=True))
                for resized in self._resized(node):
                    with collected([], "an operation on slices", (RuntimeError, IndexError)):
                        cut = {p: self._cut(full[p], a) if a is not None else full[p] for p, a in taken.items()}
                        if _equal(_run(resized, cut, self._device), wanted):
                            return taken, resized
        return None

    def _ways(self, value: Any) -> Iterator[Along | None]:
        """In which dimensions of a value the slices may lie; by themselves first, or in none, or with others."""
        shape = next((leaf.shape for leaf in tree_leaves(value) if isinstance(leaf, Tensor)), ())
        yield from (Along(dim) for dim, n in enumerate(shape) if n == self._length)
        yield None
        for dim, n in enumerate(shape):
            if n > self._length and n % self._length == 0:
                yield from (Along(dim, n // self._length), Along(dim, 1, n // self._length))

    def _resized(self, node: Node) -> Iterator[Node]:
        """The operation with its sizes as they are, and each of them, or all, for the slices in place of the whole."""
        sizes = [(k, j) for k, arg in enumerate(node.args) if isinstance(arg, (list, tuple)) for j in range(len(arg))]
        multiple = [(k, j) for k, j in sizes if isinstance(n := node.args[k][j], int) and n and n % self._length == 0]
        for some in ([], *([each] for each in multiple), multiple):
            args = [list(arg) if isinstance(arg, (list, tuple)) else arg for arg in node.args]
            for k, j in some:
                args[k][j] = args[k][j] // self._length * len(self._places)
            yield Node(node.id, node.func, tuple(args), node.kwargs, node.shape, node.dtype, node.site)


def sampled(part: Part, wrong: Tensor, device: torch.device) -> Slices | None:
    """The slices of a step by which least is left to compute; None of a small one, or where half is left at least."""
    if not large(part):
        return None
    values = tree_map_only(Tensor, lambda x: x.to(device), part.values)
    found = list[Slices]()
    for dim, length in enumerate(wrong.shape):
        if length >= 4 * SLICES:
            at = wrong.movedim(dim, 0).reshape(length, -1).any(1)
            both = ((at.nonzero(), 3 * SLICES // 4), ((~at).nonzero(), SLICES // 4))
            some = [each[torch.linspace(0, len(each) - 1, n).long()] for each, n in both if len(each)]
            found.append(Slices(part, dim, torch.cat(some).flatten().unique(), values, device))
    best = min(found, key=lambda each: each.work, default=None)
    return best if best is not None and best.work < _whole(part) / 2.0 else None


def large(part: Part) -> bool:
    """Whether a run of a step takes long, and may be had on a GPU."""
    return _whole(part) >= LARGE and UNCHECKED.keys().isdisjoint(node.op for node in part.nodes)


def _whole(part: Part) -> float:
    return sum(_work(part, i) for i in part.program.cone([part.target], ()))


class _OnHost(TorchDispatchMode):
    """Runs on the CPU what looks up places, which raises for those outside of a tensor; on a GPU it would end CUDA."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not name_of(func).startswith(LOOKUPS):
            return func(*args, **(kwargs or {}))
        device = next((x.device for x in tree_leaves(args) if isinstance(x, Tensor)), torch.device("cpu"))
        here = tree_map_only(Tensor, Tensor.cpu, (args, kwargs or {}))
        found = tree_map_only(Tensor, lambda x: x.to(device), func(*here[0], **here[1]))
        return args[0].copy_(found) if name_of(func).endswith("_") else found


@contextmanager
def _on(device: torch.device) -> Iterator[None]:
    """Tensors are made on a device, and nothing ends it."""
    with ExitStack() as stack:
        if device.type != "cpu":
            stack.enter_context(device)
            stack.enter_context(_OnHost())
        yield


def _work(part: Part, i: int) -> float:
    """Multiplications of a product of matrices, else elements of a result."""
    node, size = part.nodes[i], float(math.prod(part.nodes[i].shape))
    if i in part.given:
        return 0.0
    return size * (part.nodes[node.parents[-2:][0]].shape[-1] if node.op in ("mm", "bmm", "addmm", "baddbmm") else 1.0)


def _run(node: Node, values: Mapping[int, Any], device: torch.device) -> Any:
    args, kwargs = filled(node.args, values), {key: filled(item, values) for key, item in node.kwargs.items()}
    with _on(device) if node.op.startswith(LOOKUPS) else nullcontext():
        return call(node, args, kwargs, device)


def _other(x: Tensor, generator: torch.Generator) -> Tensor:
    """Other numbers of the same shape: positive real ones, truth values, or the same whole ones in other places."""
    if x.is_floating_point() or x.dtype == torch.bool:
        random = torch.rand(x.shape, generator=generator, dtype=torch.float64, device=x.device)
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
