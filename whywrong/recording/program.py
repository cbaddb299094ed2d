"""A recorded program: ATen operations in the order in which they ran, any part of which can be run again."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from whywrong.comparing import precision
from whywrong.process_state import float64_by_default
from whywrong.recording.operations import FACTORIES, name_of
from whywrong.torch_private import in_backward, tree_map_only

INPUT, CONSTANT, ITEM = "input", "constant", "getitem"

WIDENED_DTYPES = dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), torch.float64)
WIDENED_DTYPES[torch.complex64] = torch.complex128
"""What a narrower dtype becomes."""


def widened(x: Any) -> Any:
    """A tensor in float64 if it is of real numbers, complex128 if of complex ones."""
    return x.to(WIDENED_DTYPES.get(x.dtype, x.dtype)) if isinstance(x, Tensor) else x


def narrower(a: str, b: str) -> bool:
    """Whether a dtype of that name has fewer digits than another."""
    return precision.UNIT_ROUNDOFF.get(a, 0.0) > precision.UNIT_ROUNDOFF.get(b, math.inf)


@dataclass(frozen=True)
class Ref:
    """The result of the operation of that number."""

    id: int


@dataclass
class Node:
    """One operation: an ATen overload, or an input, a constant, one part of a tuple."""

    id: int
    func: Any
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    shape: tuple[int, ...] = ()
    dtype: str = ""
    """What the program computes it in, where that is known; it is re-run in float64 all the same."""
    site: str = ""
    """The line of the reference that called it: file, number and text; nothing where no line did, as in a backward."""
    parents: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.op = self.func if isinstance(self.func, str) else name_of(self.func)
        self.parents = tuple(dict.fromkeys(references((self.args, *self.kwargs.values()))))


def references(value: Any) -> Iterator[int]:
    """The numbers of the operations that arguments refer to."""
    if isinstance(value, Ref):
        yield value.id
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from references(item)


def filled(value: Any, results: Mapping[int, Any]) -> Any:
    """Arguments with results in place of references."""
    if isinstance(value, Ref):
        return results[value.id]
    if isinstance(value, (tuple, list)):
        return [filled(item, results) for item in value]
    return value


def call(node: Node, args: Any, kwargs: dict[str, Any], device: torch.device | None = None) -> Any:
    """Run one operation. A view is a copy where its argument's memory does not allow a view, or vmap does not."""
    if node.op == ITEM:
        return args[0][args[1]]
    if node.op in ("view", "_unsafe_view"):
        return args[0].reshape(args[1])
    if node.op == "as_strided_scatter":  # in a form that has batches
        row, new, *how = args
        places = torch.arange(row.numel(), device=row.device).as_strided(*how)
        return row.flatten().scatter(0, places.flatten(), new.to(row.dtype).flatten()).view(row.shape)
    if node.op in ("_conj", "_neg_view"):
        return (torch.conj_physical if node.op == "_conj" else torch.neg)(torch.as_tensor(args[0]))
    if node.op in FACTORIES and device is not None and not any(isinstance(a, Tensor) for a in args):
        kwargs = {**kwargs, "device": device}
    return node.func(*args, **kwargs)


@dataclass
class Program:
    """Nodes in order; `values` holds inputs and constants, by the numbers of their nodes."""

    nodes: list[Node] = field(default_factory=list)
    values: dict[int, Any] = field(default_factory=dict)
    inside: set[int] = field(default_factory=set)
    """Operations that one of torch's was made of, but for what it gives."""
    site: str = ""
    """The line that calls what is added."""
    backward: set[int] = field(default_factory=set)
    """Operations that autograd called, as it computed a gradient; not known of a program from a file."""

    def add(
        self, func: Any, args: Any = (), kwargs: dict[str, Any] | None = None, value: Any = None, shape: Any = ()
    ) -> int:
        """Append an operation, in float64, and return its number; values are kept of inputs and constants only."""
        shape = tuple(value.shape) if isinstance(value, Tensor) else tuple(shape)
        dtype = precision.name_of(value.dtype) if isinstance(value, Tensor) and value.is_floating_point() else ""
        args, kwargs = tree_map_only(torch.dtype, lambda x: WIDENED_DTYPES.get(x, x), (tuple(args), kwargs or {}))
        node = Node(len(self.nodes), func, args, kwargs, shape, dtype, self.site)
        self.nodes.append(node)
        self.backward |= {node.id} if in_backward() else set()
        if func in (INPUT, CONSTANT):
            self.values[node.id] = widened(value)
        return node.id

    def copy(self, node: Node, number: Mapping[int, int], values: Mapping[int, Any]) -> int:
        """Append a copy of an operation of another program, whose numbers here are in `number`, and of an input's or a
        constant's value; returns its number."""
        args, kwargs = tree_map_only(Ref, lambda r: Ref(number[r.id]), (node.args, node.kwargs))
        self.nodes.append(Node(len(self.nodes), node.func, args, kwargs, node.shape, node.dtype, node.site))
        if node.func in (INPUT, CONSTANT):
            self.values[len(self.nodes) - 1] = values[node.id]
        return len(self.nodes) - 1

    def narrows(self, number: int) -> bool:
        """Whether an operation is a cast to a narrower type."""
        node = self.nodes[number]
        return node.op == "_to_copy" and narrower(node.dtype, self.nodes[node.parents[0]].dtype)

    def cone(self, targets: Iterable[int], known: Collection[int]) -> list[int]:
        """What has to run for `targets`, in order. It does not go on behind `known`, but for a target itself."""
        cone = set(targets)
        waiting = list(cone)
        for i in waiting:  # which grows meanwhile
            fresh = [p for p in self.nodes[i].parents if p not in cone and p not in known]
            cone.update(fresh)
            waiting += fresh
        return sorted(cone)

    def varying(self) -> set[int]:
        """Operations whose results depend on an input."""
        found = set[int]()
        for node in self.nodes:  # each comes after what it takes
            found |= {node.id} if node.func == INPUT or not found.isdisjoint(node.parents) else set()
        return found

    def before(self, target: int, known: Collection[int]) -> list[int]:
        """Those of `known` from which a target is computed, in order."""
        return sorted({p for i in self.cone([target], known) for p in self.nodes[i].parents if p in known})

    def largest(self, order: Iterable[int]) -> int:
        """The elements of the largest result of an operation."""
        return max((math.prod(self.nodes[i].shape) for i in order), default=0)

    @float64_by_default()
    def run(
        self,
        order: Iterable[int],
        given: Mapping[int, Any],
        wanted: Collection[int],
        *,
        rule: Callable[[Node, Any, dict[str, Any]], Any] | None = None,
        seen: Callable[[int, Any], Any] | None = None,
    ) -> dict[int, Any]:
        """Run `order` and return the results that are `wanted`; others are let go after their last use.

        `given` are values that are used as they are, on one device. `rule` runs an operation in place of :func:`call`;
        `seen(number, result)` may return another value to go on with, as an observed step in place of its re-run.
        """
        order = list(order)
        tensors = chain(given.values(), self.values.values()) if rule is None else ()
        device = next((v.device for v in tensors if isinstance(v, Tensor)), None)
        last = {parent: i for i in order for parent in self.nodes[i].parents}
        results = dict(given)
        for i in order:
            node = self.nodes[i]
            if node.func in (INPUT, CONSTANT):
                value = results[i] if i in results else self.values[i]
            else:
                args = filled(node.args, results)
                kwargs = {key: filled(item, results) for key, item in node.kwargs.items()}
                value = call(node, args, kwargs, device) if rule is None else rule(node, args, kwargs)
            results[i] = value if seen is None else seen(i, value)
            for parent in node.parents:
                if last[parent] == i and parent not in wanted:
                    results.pop(parent, None)
        return {i: results[i] for i in wanted}
