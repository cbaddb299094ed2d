"""The ways in which people break kernels, each put into one place of a wrong step's part.

A mutant knows operations, shapes and numbers, and no program. Those of a value change what an operation gives or takes:
its elements' places (:func:`places`) or its numbers (:func:`amounts`). Those of an operation leave it out, exchange
what it takes, or run another in its place.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from labkit.causes.part import Edit, Part
from labkit.numerics.precision import stored
from labkit.trace.golden import Golden
from labkit.trace.operations import ALGORITHMS, ARITHMETIC, CHOICES, FUNCTIONS, MOVES, PRODUCTS
from labkit.trace.program import CONSTANT, INPUT, Node, Ref, call

Tensor = torch.Tensor
Change = Callable[[Tensor], Tensor]

FEWER_DIGITS = ("tf32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
INSTEAD: dict[str, Change] = {
    "GELU by erf": F.gelu,
    "GELU by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "x sigmoid(1.702 x)": lambda x: x * torch.sigmoid(1.702 * x),
    "SiLU": F.silu,
    "ReLU": F.relu,
    "leaky ReLU": F.leaky_relu,
    "ELU": F.elu,
    "softplus": F.softplus,
    "hard sigmoid (x / 6 + 1/2)": F.hardsigmoid,
    "hard sigmoid (0.2 x + 1/2)": lambda x: (0.2 * x + 0.5).clamp(0.0, 1.0),
    "hard swish": F.hardswish,
    "the identity": lambda x: x.clone(),
    **{f"{f.__name__}": f for f in (torch.sigmoid, torch.tanh, torch.exp, torch.exp2, torch.log, torch.log2)},
    **{f"{f.__name__}": f for f in (torch.log10, torch.log1p, torch.expm1, torch.sqrt, torch.rsqrt, torch.abs)},
    **{f"{f.__name__}": f for f in (torch.reciprocal, torch.square, torch.sin, torch.cos, torch.erf, torch.sign)},
    **{f"{f.__name__}": f for f in (torch.round, torch.floor, torch.ceil, torch.trunc)},
}
"""Functions of one number that stand in each other's place."""

OPPOSITE = {"le": "lt", "lt": "le", "ge": "gt", "gt": "ge", "eq": "ne", "ne": "eq", "maximum": "minimum"}
OPPOSITE |= {"minimum": "maximum", "amax": "amin", "amin": "amax", "add": "sub", "sub": "add", "mul": "div"}
OPPOSITE |= {"div": "mul", "logical_and": "logical_or", "logical_or": "logical_and", "argmax": "argmin"}
OPPOSITE |= {"bitwise_and": "bitwise_or", "bitwise_or": "bitwise_and", "sin": "cos", "cos": "sin"}
KIND_OF = {"add": "sign", "sub": "sign", "mul": "function", "div": "function"}
REDUCTIONS = ("sum", "mean", "amax", "amin", "argmax", "argmin", "cumsum", "cumprod", "logcumsumexp", "var_mean")
INDEXED = ("index", "index_select", "embedding", "gather", "index_add", "index_put", "scatter_add", "scatter")
NUMBERED = ARITHMETIC | {"pow", "clamp", "clamp_min", "clamp_max", "full", "fill", "remainder", "arange"}
NUMBERED |= {"eq", "lt", "le", "gt", "ge"}
ON_TOP = ("sqrt", "square", "exp", "log", "reciprocal", "sigmoid", "tanh", "ReLU", "round", "abs")
LEFT_OUT = {"mul": "factor", "div": "factor", "add": "drop_term", "sub": "drop_term", "where": "mask"}
LEFT_OUT |= {"masked_fill": "mask", "neg": "sign", "t": "transpose", "transpose": "transpose", "permute": "layout"}
LEFT_OUT |= {"clone": "", "view": "", "_unsafe_view": "", "expand": "", "unsqueeze": "", "squeeze": ""}
# What people do less often than the rest, which has rank 1, and more often.
RANK = {"stale": 2, "axis": 2, "precision": 2, "eps": 0}
EPSILONS = (0.0, *(10.0**-k for k in range(2, 13)), 2.0**-23)


@dataclass(frozen=True)
class Mutant:
    """One way to break a part: `edits` by the number of the operation. The simplest have the lowest `rank`."""

    kind: str
    says: str
    edits: Mapping[int, Edit]
    rank: int = 1

    @property
    def at(self) -> int:
        """The operation that is broken, the first of several."""
        return min(self.edits)


def places(shape: tuple[int, ...]) -> Iterator[tuple[str, str, Change]]:
    """Elements in other places: kind, what happens, and how."""
    large = [d for d, n in enumerate(shape) if n > 1]
    for i, j in itertools.combinations(large, 2):
        if shape[i] == shape[j]:
            yield "transpose", f"transposed in dimensions {i} and {j}", lambda x, i=i, j=j: x.transpose(i, j)
        elif shape[i] % shape[j] == 0 and j == i + 1:
            words = f"transposed in each of {shape[i] // shape[j]} square blocks"
            yield "transpose", words, lambda x, i=i, j=j: x.unflatten(i, (-1, x.shape[j])).mT.flatten(i, i + 1)
        yield (
            "layout",
            f"read as if dimensions {i} and {j} were stored in the other order",
            lambda x, i=i, j=j: x.transpose(i, j).reshape(x.shape),
        )
        if shape[i] != shape[j]:
            turned = [*shape]
            turned[i], turned[j] = turned[j], turned[i]
            yield (
                "layout",
                f"stored as if dimensions {i} and {j} were in the other order",
                lambda x, i=i, j=j, turned=turned: x.reshape(turned).transpose(i, j),
            )
    for d in large:
        n = shape[d]
        for by in (1, -1) if n > 2 else ():
            where = f"one place {'later' if by > 0 else 'earlier'} in dimension {d}"
            yield "shift", f"{where}, around the end", lambda x, d=d, by=by: x.roll(by, d)
            yield "shift", f"{where}, with zeros", lambda x, d=d, by=by: _moved(x, d, by, 0.0)
            yield "shift", f"{where}, the edge repeated", lambda x, d=d, by=by: _moved(x, d, by, None)
        yield "flip" if n > 2 else "swap", f"reversed in dimension {d}", lambda x, d=d: x.flip(d)
        yield "axis", f"the largest of dimension {d} in place of all", lambda x, d=d: x.amax(d, True).expand(x.shape)
        for k in dict.fromkeys((0, n - 1)):
            words = f"entry {k} of dimension {d} in place of all"
            yield "stale", words, lambda x, d=d, k=k: x.narrow(d, k, 1).expand(x.shape).clone()
        if n % 2 == 0 and n > 2:
            yield "swap", f"halves of dimension {d} exchanged", lambda x, d=d, n=n: x.roll(n // 2, d)
            yield "swap", f"neighbours of dimension {d} exchanged", lambda x, d=d: _chunked(x, d, 2, (1, 0), inner=True)
        for a in (a for a in range(2, n // 2 + 1) if n % a == 0):
            words = f"dimension {d} of {n} taken as {n // a} x {a} in place of {a} x {n // a}"
            yield "permute", words, partial(_regrouped, d=d, a=a)
        for parts in (p for p in (3, 4) if n % p == 0):
            for order in itertools.permutations(range(parts)):
                if list(order) != list(range(parts)):
                    words = f"{parts} parts of dimension {d} in the order {order}"
                    yield "permute", words, lambda x, d=d, p=parts, o=order: _chunked(x, d, p, o)
    if len(large) > 1:
        yield "flip", f"reversed in dimensions {large[-2:]}", lambda x, two=large[-2:]: x.flip(two)


def _moved(x: Tensor, d: int, by: int, fill: float | None) -> Tensor:
    edge = x.narrow(d, 0 if by > 0 else x.shape[d] - 1, 1)
    edge = edge if fill is None else torch.full_like(edge, fill)
    rest = x.narrow(d, 0 if by > 0 else 1, x.shape[d] - 1)
    return torch.cat([edge, rest] if by > 0 else [rest, edge], d)


def _chunked(x: Tensor, d: int, parts: int, order: tuple[int, ...], inner: bool = False) -> Tensor:
    split = x.unflatten(d, (-1, parts) if inner else (parts, -1))
    return split.index_select(d + inner, torch.tensor(order, device=x.device)).flatten(d, d + 1)


def amounts(sizes: Iterable[int]) -> Iterator[tuple[str, str, Change]]:
    """Other numbers in the same places."""
    yield "zero", "zero, as if it were left out", torch.zeros_like
    yield "sign", "of the other sign", torch.neg
    yield "function", "its absolute value", torch.abs
    yield "constant", "1 too large", lambda x: x + 1.0
    yield "constant", "1 too small", lambda x: x - 1.0
    factors = {"2": 2.0, "1/2": 0.5, "ln 2": math.log(2.0), "log2 e": math.log2(math.e)}
    for n in sizes:
        factors |= {f"{n}": n, f"1/{n}": 1 / n, f"sqrt({n})": n**0.5, f"1/sqrt({n})": n**-0.5}
    for words, c in factors.items():
        yield "scale", f"{words} times as large", lambda x, c=c: x * c
    for name in FEWER_DIGITS:
        yield "precision", f"rounded to {name}", partial(_rounded, name=name)
    yield "precision", "cut to bfloat16", lambda x: (x.float().view(torch.int32) & ~0xFFFF).view(torch.float32).double()


def far(sizes: Iterable[int]) -> Iterator[tuple[str, str, Change]]:
    """Whole numbers that are counted from another place: from the end of what was there before, say."""
    for n in sizes:
        yield "shift", f"{n} less", lambda x, n=n: x - n
        yield "shift", f"{n} more", lambda x, n=n: x + n


def left_out(shape: tuple[int, ...], sizes: Iterable[int] = ()) -> Iterator[tuple[str, str, Change]]:
    """Parts of a dimension that are zero; with `sizes`, those of :func:`ranges` that these alone give."""
    for d, n in enumerate(shape):
        for a, b in sorted({*ranges(n, sizes)} - {*ranges(n)}) if sizes else ranges(n):
            words = f"zero in {a} to {b - 1} of dimension {d}, of {n}"
            yield "truncate", words, partial(_zeroed, d=d, a=a, b=b)


def _rounded(x: Tensor, name: str) -> Tensor:
    if name != "tf32":
        return stored(x, name)
    return ((x.float().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32).double()


def _zeroed(x: Tensor, d: int, a: int, b: int) -> Tensor:
    keep = torch.ones(x.shape[d], dtype=x.dtype, device=x.device)
    keep[a:b] = 0
    return x * keep.view([-1 if k == d else 1 for k in range(x.ndim)])


def ranges(n: int, sizes: Iterable[int] = ()) -> list[tuple[int, int]]:
    """Parts of a dimension that a loop over tiles may leave out: tails, the first tile, the second.

    A dimension that was put together of others, whose sizes these are, may lack one of them, or its tail.
    """
    found = {(n - 1, n), (0, 1), (n - n // 4, n)} if n > 1 else set()
    for end in {n, *(m for m in sizes if 4 < m < n)}:
        found |= {(end // 2**q * 2**q, end) for q in range(2, end.bit_length())}
    for m in (m for m in sizes if m < n):
        found |= {(m, n), (0, m), (n - m, n)}
    for tile in (2**q for q in range(2, n.bit_length())):
        found |= {(0, tile), (tile, n), (tile, min(n, 2 * tile))} if tile < n else set()
    return sorted((a, b) for a, b in found if 0 <= a < b <= n and (a, b) != (0, n))


def whole(x: Tensor) -> Iterator[tuple[str, str, Change]]:
    """Other whole numbers, and truth values."""
    if x.dtype == torch.bool:
        yield "mask", "true everywhere", torch.ones_like
        yield "mask", "false everywhere", torch.zeros_like
        yield "mask", "inverted", torch.logical_not
        for d in (d for d, n in enumerate(x.shape) if n > 1):
            for by in (1, -1):
                words = f"one place {'later' if by > 0 else 'earlier'} in dimension {d}, True at the edge"
                yield "shift", words, lambda x, d=d, by=by: _moved(x, d, by, True)
        return
    low, high = (int(x.min()), int(x.max())) if x.numel() else (0, 0)
    for by in (1, -1):
        yield "shift", f"{'one more' if by > 0 else 'one less'}", lambda x, by=by: x + by
        yield "shift", f"{by:+d}, within bounds", lambda x, by=by: (x + by).clamp(low, high)
    yield "shift", "counted from 0", lambda x: x - low
    yield "stale", "its first in place of all", lambda x: x.flatten()[0].expand(x.shape).clone()
    yield "precision", "rounded to bfloat16", lambda x: stored(x.double(), "bfloat16").to(x.dtype)
    yield "precision", "wrapped to 16 bits", lambda x: (x.long() + 2**15).remainder(2**16) - 2**15
    if -129 < low < 0 and high < 128:
        yield "sign", "read as bytes without a sign", lambda x: x.long().remainder(256)


class Mutants:
    """The mutants of one part of a recorded golden."""

    def __init__(self, part: Part, golden: Golden) -> None:
        self.part = part
        nodes, values = part.nodes, part.values
        whole_values = [values[i] for i in (*part.given(), part.target) if isinstance(values[i], Tensor)]
        shapes = [
            *(x.shape for x in whole_values),
            *(golden.program.nodes[golden.steps[name]].shape for name in golden.inputs),
        ]
        self.sizes = sorted({n for shape in shapes for n in shape} - {0, 1})
        self.largest = max((x.numel() for x in whole_values), default=1)
        numbers = {abs(float(c)) for n in golden.program.nodes if n.op in NUMBERED for c in n.args if _is_number(c)}
        self.numbers = sorted(c for c in numbers if 0.0 < c < math.inf)[:16]
        self.computed = [n.id for n in nodes if n.func not in (INPUT, CONSTANT) and isinstance(values[n.id], Tensor)]
        self.inputs = {i for i in part.given() if golden.program.nodes[part.origin[i]].func == INPUT}
        names = {number: name.split("/")[-1].split("#")[0].strip("_") for name, number in golden.operations.items()}
        self.names = {i: names[number] for i, number in part.origin.items() if number in names}
        self.wholes = {
            k: name for i, name in self.names.items() for k in self._composite(i)[0] if k in part.program.inside
        }
        self.only_masks: set[int] = set()
        for i in (*reversed(self.computed), *part.given()):
            users = part.users.get(i, ())
            made = i in part.users and part.nodes[i].func not in (INPUT, CONSTANT)
            if (made and values[i].dtype == torch.bool) or (users and all(u in self.only_masks for u in users)):
                self.only_masks.add(i)

    def all(self) -> Iterator[Mutant]:
        """Every mutant, the usual ones first."""
        for mutant in self._all():
            if mutant.edits.keys() <= self.only_masks and mutant.kind in ("shift", "stale", "constant", "function"):
                mutant = replace(mutant, kind="mask")
            inner = mutant.kind in LEFT_OUT.values() and all(i in self.part.program.inside for i in mutant.edits)
            yield replace(mutant, rank=mutant.rank + inner)

    def _all(self) -> Iterator[Mutant]:
        part = self.part
        groups: dict[Any, list[int]] = {}
        for i in (*part.given(), *self.computed):
            node = part.nodes[i]
            if isinstance(part.values[i], Tensor):
                numbers = str([a for a in node.args if not isinstance(a, Ref)])
                alone = node.func in (INPUT, CONSTANT)
                groups.setdefault(i if alone else (node.op, node.site, node.shape, numbers), []).append(i)
        ordered = sorted(groups.values(), key=lambda ids: (part.target not in ids, ids[0] not in part.names, ids[0]))
        yield from self._exchanged()
        yield from self._along()
        yield from self._counts()
        for node in part.nodes:
            if node.op == "var_mean":
                yield from self._of_reduction([node.id], "var_mean")
        for i, name in self.names.items():
            yield from self._of_composite(i, name)
        for ids in ordered:
            yield from self._of_result(ids, "")
        for ids in ordered:
            if part.nodes[ids[0]].func not in (INPUT, CONSTANT):
                yield from self._of_operation(ids, "")
        yield from self._moved_on()
        yield from self._left_out()
        yield from self._conjugated()
        for ids in ordered:
            for words, some in ((" (the first time)", ids[:1]), (" (the last time)", ids[-1:])):
                if 1 < len(ids) <= 8:
                    yield from self._of_result(some, words)
                    yield from self._of_operation(some, words)

    def called(self, i: int) -> str:
        """What an operation's result is called in a sentence: a step's name, or the operation."""
        node = self.part.nodes[i]
        if i in self.part.names:
            return self.part.names[i]
        return "a constant" if node.func in (INPUT, CONSTANT) else f"the result of {self.operation(i)}"

    def operation(self, i: int) -> str:
        """What an operation is called, by itself or as a part of one of torch's."""
        op = self.part.nodes[i].op.strip("_")
        return f"the {op} of {self.wholes[i]}" if i in self.wholes else op

    def _argument(self, ids: Iterable[int], j: int, change: Callable[[Any], Any]) -> dict[int, Edit]:
        """`change` of the argument `j` of operations."""

        def edit(args: list[Any], kwargs: dict[str, Any], node: Node) -> Any:
            return call(node, [*args[:j], change(args[j]), *args[j + 1 :]], kwargs)

        return {i: Edit(partial(edit, node=self.part.nodes[i])) for i in ids}

    def _changes(self, x: Tensor, numbers: bool = True) -> Iterator[tuple[str, str, Change]]:
        if not x.is_floating_point():
            yield from whole(x)
        elif numbers:
            yield from amounts(self.sizes)
        if numbers and x.dtype != torch.bool:
            yield from left_out(tuple(x.shape))
        yield from places(tuple(x.shape))

    def _of_result(self, ids: list[int], words: str) -> Iterator[Mutant]:
        part, i = self.part, ids[-1]
        x, node, name = part.values[i], part.nodes[i], self.called(i)
        given = node.func in (INPUT, CONSTANT)
        moved = node.op in MOVES - {"getitem", "slice", "select"} and i != part.target
        for kind, what, change in self._changes(x, numbers=not (moved and x.is_floating_point())):
            if kind == "zero" and i != part.target:
                kind = "drop_term"
            yield Mutant(kind, f"{name}{words} is {what}", _result(ids, change), RANK.get(kind, 1))
        further = [*(far(self.sizes) if not x.is_floating_point() else ()), *left_out(tuple(x.shape), self.sizes)]
        for kind, what, change in further if x.dtype != torch.bool and not moved else ():
            yield Mutant(kind, f"{name}{words} is {what}", _result(ids, change), 2)
        if given and x.is_floating_point():
            yield Mutant("factor", f"{name} is 1, as if it were left out", _result(ids, torch.ones_like))
        if (given or i == part.target) and x.is_floating_point() and x.numel() < self.largest:
            for n in {self.largest // max(1, x.numel()), *self.sizes}:
                for c, over in ((n / (n - 1), n - 1), ((n - 1) / n, n)) if n > 1 else ():
                    says = f"{name} is over {over}, not {2 * n - 1 - over}"
                    yield Mutant("ddof", says, _result(ids, lambda x, c=c: x * c))
        if i == part.target and x.is_floating_point() and x.numel() and bool((x == x.round()).all()):
            wrapped = lambda x: (x + 2.0**15).remainder(2.0**16) - 2.0**15  # noqa: E731
            yield Mutant("precision", f"{name} is wrapped to 16 bits", _result(ids, wrapped))
        if i == part.target and x.is_floating_point():
            for words in ON_TOP:
                yield Mutant("function", f"{words} is taken of {name}", _result(ids, INSTEAD[words]))
        for other in part.given() if given or i == part.target else ():
            value = part.values[other]
            if other != i and isinstance(value, Tensor) and value.shape == x.shape and value.dtype == x.dtype:
                kind = "swap" if {i, other} <= self.inputs else "stale"
                edit = Edit(lambda args, kwargs: args[0].clone(), (Ref(other),))
                says = f"{self.called(other)} stands in place of {name}"
                yield Mutant(kind, says, dict.fromkeys(ids, edit), RANK.get(kind, 1))

    def _of_operation(self, ids: list[int], words: str) -> Iterator[Mutant]:
        part, i = self.part, ids[0]
        node, x = part.nodes[i], part.values[i]
        what = f"{self.operation(i)}{words}"
        refs = {j: a.id for j, a in enumerate(node.args) if isinstance(a, Ref)}
        tensors = {j: part.values[k] for j, k in refs.items() if isinstance(part.values[k], Tensor)}
        names = {j: self.called(refs[j]) for j in tensors}
        for j, a in tensors.items():
            shared = len(part.users.get(refs[j], ())) > len(ids)
            if shared or node.op in PRODUCTS or node.op in INDEXED:
                for kind, how, change in self._changes(a, shared):
                    yield Mutant(kind, f"{what} takes {names[j]} {how}", self._argument(ids, j, change), 2)
            kind = LEFT_OUT.get(node.op, "function")
            if kind and a.is_floating_point() and x.is_floating_point() and node.op not in PRODUCTS:
                negative = node.op == "sub" and j == 1
                says = f"{what} is left out: {names[j]} passes {'with the other sign' if negative else 'as it is'}"
                run = lambda args, j=j, negative=negative: _fit(-args[j] if negative else args[j], x.shape)  # noqa: E731
                yield Mutant(kind, says, _instead(ids, run))
            if node.op in ("mul", "add", "sub"):
                twice = lambda args, kwargs, j=j: call(node, [call(node, args, kwargs), args[j]], {})  # noqa: E731
                again = "factor" if node.op == "mul" else "scale"
                yield Mutant(again, f"{what}: {names[j]} is taken twice", {k: Edit(twice) for k in ids})
            if node.op in ARITHMETIC and a.ndim and a.shape != x.shape:
                yield from self._broadcast(ids, j, a, x, f"{what}: {names[j]}")
        if len(tensors) == 2 and node.op not in ("mul", "add"):
            j, k = tensors
            says = f"{what}: {names[j]} and {names[k]} are exchanged"
            swap = lambda args: [args[k] if n == j else args[j] if n == k else a for n, a in enumerate(args)]  # noqa: E731
            edit = Edit(lambda args, kwargs: call(node, swap(args), kwargs))
            yield Mutant("sign" if node.op == "sub" else "swap", says, dict.fromkeys(ids, edit))
        if node.op in OPPOSITE:
            other = getattr(torch, OPPOSITE[node.op])
            kind = KIND_OF.get(node.op, "mask" if x.dtype == torch.bool else "function")
            yield Mutant(kind, f"{OPPOSITE[node.op]} in place of {what}", _instead(ids, lambda args: other(*args[:2])))
        if len(tensors) == 1 and node.op in FUNCTIONS | CHOICES and next(iter(tensors.values())).shape == x.shape:
            for name, f in INSTEAD.items():
                yield Mutant("function", f"{name} in place of {what}", _instead(ids, lambda args, f=f: f(args[0])))
        if node.op in REDUCTIONS:
            yield from self._of_reduction(ids, what)
        if node.op in ("permute", "transpose", "t"):
            says = f"{what} is left out: memory is read as it lies"
            yield Mutant("layout", says, _instead(ids, lambda args: args[0].reshape(x.shape)))
        if node.op in ("where", "masked_fill"):
            yield Mutant("mask", f"{what} fills in 0", self._argument(ids, 2, lambda a: a * 0))
        if node.op in ("index_add", "scatter_add") or (node.op == "index_put" and len(node.args) > 3 and node.args[3]):
            yield from self._lost(ids, what)
        if node.op in ("convolution", "constant_pad_nd"):
            yield from self._padded(ids, what)
        for j, c in enumerate(node.args):
            if node.op in NUMBERED and _is_number(c):
                yield from self._numbers(ids, j, c, what)
            elif isinstance(c, (bool, int)) and node.op in ALGORITHMS | {"convolution"}:
                for new in {not c} if isinstance(c, bool) else {0, 1, c + 1, c - 1, 2 * c} - {c}:
                    says = f"{what} has the option {new} where the reference has {c}"
                    yield Mutant("other", says, self._argument(ids, j, lambda _, new=new: new))

    def _broadcast(self, ids: list[int], j: int, a: Tensor, x: Tensor, says: str) -> Iterator[Mutant]:
        """An operand with one long dimension, applied along another."""
        wide = (1,) * (x.ndim - a.ndim) + tuple(a.shape)
        long = [d for d, n in enumerate(wide) if n > 1]
        for d in (d for d in range(x.ndim) if len(long) == 1 and d != long[0] and x.shape[d] > 1):
            index = torch.arange(x.shape[d], device=a.device) % a.numel()
            view = [-1 if k == d else 1 for k in range(x.ndim)]
            change = lambda v, index=index, view=view: v.flatten()[index].view(view)  # noqa: E731
            words = f"{says} is applied along dimension {d}, not {long[0]}"
            yield Mutant("axis", words, self._argument(ids, j, change))

    def _lost(self, ids: list[int], what: str) -> Iterator[Mutant]:
        """Of terms that are added to one place, one survives: an addition that is not atomic."""
        node = self.part.nodes[ids[0]]

        def kept(args: list[Any], kwargs: dict[str, Any], first: bool) -> Any:
            way = (lambda x, d: x.flip(d)) if first else (lambda x, d: x)
            if node.op == "index_add":
                x, d, index, source = args[:4]
                return x + torch.zeros_like(x).index_copy(d, way(index, 0), way(source, d))
            if node.op == "scatter_add":
                x, d, index, source = args[:4]
                return x + torch.zeros_like(x).scatter(d, way(index, d), way(source, d))
            x, index, source = args[:3]
            return x + torch.zeros_like(x).index_put([i if i is None else way(i, 0) for i in index], way(source, 0))

        for first in (False, True):
            says = f"{what} loses updates: of those of one place the {'first' if first else 'last'} survives"
            yield Mutant("race", says, {i: Edit(partial(kept, first=first)) for i in ids})

    def _numbers(self, ids: list[int], j: int, c: Any, what: str) -> Iterator[Mutant]:
        """Other numbers in the place of one of the program's, and of its complement to 1 on the same line."""
        op = self.part.nodes[ids[0]].op
        kind_of = partial(kind_of_number, op, float(c))
        usual: set[float]
        further: set[float] = set()
        if op == "arange":  # whose numbers say how long it is
            usual = {c + 1, c - 1}
        elif is_epsilon(op, c):
            usual = set(EPSILONS)
        else:
            usual = {0.0, 1.0, -c, 2 * c, c / 2, 10 * c, c / 10, 1 - c, c + 1, c - 1, c * c, *self.numbers}
            usual |= {1 / c, abs(c) ** 0.5, abs(c) ** -0.5} if c else set()
            if op != "pow":  # exponents have nothing to do with sizes
                usual |= {f for n in self.sizes for f in (c * n, c / n)}
                further = {f for n in self.sizes for f in (n, n**0.5, n**-0.5, 1 / n, c * n / (n - 1), c * n / (n + 1))}
                further |= {f for n in self.numbers for f in (c * n, c / n)}
        for new in (*sorted(usual - {c}), *sorted(further - usual - {c})):
            number = int(new) if isinstance(c, int) and new == int(new) else new
            kind, says = kind_of(new, self.sizes), f"{what} has {new:.6g} where the reference has {c:.6g}"
            yield Mutant(kind, says, self.numbered(ids, j, number), 0 if kind == "eps" else 1 + (new not in usual))

    def numbered(self, ids: Iterable[int], j: int, new: Any) -> dict[int, Edit]:
        """Another number as the argument `j`, and its complement to 1 where that stands on the same line."""
        node = self.part.nodes[next(iter(ids))]
        c = node.args[j]
        edits = self._argument(ids, j, lambda _: new)
        for other in self.part.nodes:
            alike = other.site == node.site and other.op in NUMBERED and other.id not in edits and c != 0.5
            for k, a in enumerate(other.args):
                if alike and _is_number(a) and abs(a - (1.0 - c)) < 1e-12:
                    edits |= self._argument([other.id], k, lambda _: 1.0 - new)
        return edits

    def _of_reduction(self, ids: list[int], what: str) -> Iterator[Mutant]:
        part, node = self.part, self.part.nodes[ids[0]]
        x = part.values[node.parents[0]]
        dims = _dims(node, x.ndim)
        for d in dims:
            for a, b in ranges(x.shape[d], self.sizes):
                rest = lambda v, d=d, a=a, b=b: torch.cat([v.narrow(d, 0, a), v.narrow(d, b, v.shape[d] - b)], d)  # noqa: E731
                says = f"{what} leaves out {a} to {b - 1} of {x.shape[d]}"
                yield Mutant("truncate", says, self._argument(ids, 0, rest))
        count = math.prod(x.shape[d] for d in dims)
        if node.op == "mean" and count > 1:
            yield Mutant("scale", f"{what}: the sum, not the mean", _result(ids, lambda y: y * count))
            says = f"{what}: over {count - 1}, not {count}"
            yield Mutant("ddof", says, _result(ids, lambda y: y * count / (count - 1)))
        if node.op == "sum" and count > 1:
            yield Mutant("scale", f"{what}: the mean, not the sum", _result(ids, lambda y: y / count))
        if node.op == "var_mean" and count > 1:
            unbiased = node.kwargs.get("correction", node.args[2] if len(node.args) > 2 else 1)
            factor = (count - 1) / count if unbiased else count / (count - 1)
            firsts = [u for i in ids for u in part.users.get(i, ()) if part.nodes[u].args[1] == 0]
            says = f"the variance is over {count if unbiased else count - 1}"
            if firsts:
                yield Mutant("ddof", says, _result(firsts, lambda v: v * factor))
        if node.op == "cumsum":
            less = {i: Edit(lambda args, kwargs: args[0] - args[1], (node.args[0],), after=True) for i in ids}
            yield Mutant("shift", f"{what} leaves out the element itself", less)
            back = lambda args, d=dims[0]: args[0].flip(d).cumsum(d).flip(d)  # noqa: E731
            yield Mutant("flip", f"{what} runs backwards", _instead(ids, back))

    def _padded(self, ids: list[int], what: str) -> Iterator[Mutant]:
        """Padding that is moved by one, or filled with something else than zeros."""
        node = self.part.nodes[ids[0]]
        own = node.op == "constant_pad_nd"
        pads = list(node.args[1]) if own else [p for p in reversed(node.args[4]) for _ in (0, 1)]
        if not own and (node.args[6] or not any(pads)):
            return

        def padded(args: list[Any], kwargs: dict[str, Any], pads: list[int], mode: str) -> Any:
            x = F.pad(args[0], pads, mode) if mode != "constant" else F.pad(args[0], pads)
            return x if own else call(node, [x, *args[1:4], [0] * len(args[4]), *args[5:]], kwargs)

        for k, by in itertools.product(range(0, len(pads), 2), (1, -1)):
            moved = [p + (by if n == k else -by if n == k + 1 else 0) for n, p in enumerate(pads)]
            edit = Edit(partial(padded, pads=moved, mode="constant"))
            yield Mutant("shift", f"{what} is padded {tuple(moved)}, not {tuple(pads)}", dict.fromkeys(ids, edit))
        for mode in ("replicate", "reflect", "circular"):
            edit = Edit(partial(padded, pads=pads, mode=mode))
            yield Mutant("other", f"{what} is padded by {mode}, not by zeros", dict.fromkeys(ids, edit))

    def _along(self) -> Iterator[Mutant]:
        """Reductions that run along one dimension, along another, or over all: those of a line, and all alike."""
        part = self.part
        lines: dict[Any, list[int]] = {}
        for node in part.nodes:
            if node.op in REDUCTIONS:
                dims = tuple(_dims(node, part.values[node.parents[0]].ndim))
                for key in ((node.site, dims), ("", dims)):
                    lines.setdefault(key, []).append(node.id)
        for (_, old), ids in {(key[1], tuple(ids)): (key, ids) for key, ids in lines.items()}.values():
            ndim = part.values[part.nodes[ids[0]].parents[0]].ndim
            for over in [*([d] for d in range(ndim)), *([list(range(ndim))] if ndim > 1 else [])]:
                if tuple(over) != old:
                    edits = {k: edit for i in ids for k, edit in self._along_dims(i, over).items()}
                    words = f"runs over dimension {', '.join(map(str, over))}, not {', '.join(map(str, old))}"
                    name = self.wholes.get(ids[0], self.operation(ids[0]))
                    yield Mutant("axis", f"{name} {words}", edits)

    def _counts(self) -> Iterator[Mutant]:
        """Another number of elements, wherever a sum over them is divided by it, as in the backward of a mean."""
        part = self.part
        reductions = [n for n in part.nodes if n.op in ("sum", "mean", "var_mean")]
        dims = {
            (part.nodes[n.parents[0]].shape, tuple(_dims(n, len(part.nodes[n.parents[0]].shape)))) for n in reductions
        }
        for count in {math.prod(shape[d] for d in over) for shape, over in dims} - {0, 1}:
            for new in {count - 1, *(n for n in self.sizes if count % n == 0)} - {0, count}:
                edits: dict[int, Edit] = {}
                for node, (j, c) in (
                    (n, one) for n in part.nodes if n.op in ("mul", "div") for one in enumerate(n.args)
                ):
                    for power in (1, -1):
                        if _is_number(c) and c and abs(c * count**power) in (1.0, 2.0, 0.5):
                            ratio = (count / new) ** power
                            edits |= self._argument([node.id], j, partial(_recounted, ratio=ratio))
                kind = "ddof" if new == count - 1 else "factor"
                if edits:
                    yield Mutant(kind, f"{new} elements are counted where there are {count}", edits)

    def _along_dims(self, i: int, dims: list[int]) -> dict[int, Edit]:
        """A reduction along other dimensions; a division by how many they were is by how many they are."""
        part, node = self.part, self.part.nodes[i]
        x = part.values[node.parents[0]]
        single = len(node.args) > 1 and isinstance(node.args[1], int)
        over: Any = dims[0] if single else dims

        def edit(args: list[Any], kwargs: dict[str, Any], shape: Any = node.shape, part: int | None = None) -> Any:
            if len(node.args) == 1 and part is None:  # over all, to a number
                return getattr(torch, node.op)(args[0], dim=over, keepdim=True)
            y = call(node, [args[0], over, *node.args[2:]], kwargs)
            y = y if part is None else y[part]
            return y if y.ndim == len(shape) or shape == () else y.expand(shape)  # what is kept broadcasts

        if node.op == "var_mean":
            users = [part.nodes[u] for u in part.users.get(i, ())]
            run = lambda args, kwargs, u: edit(args, node.kwargs | {"keepdim": True}, u.shape, u.args[1])  # noqa: E731
            return {u.id: Edit(partial(run, u=u), (node.args[0],)) for u in users}
        edits = {i: Edit(edit)}
        before = math.prod(x.shape[d] for d in _dims(node, x.ndim))
        for u in part.users.get(i, ()) if node.op == "sum" else ():
            if part.nodes[u].op == "div" and part.nodes[u].args[1] == before:
                edits |= self._argument([u], 1, lambda _: math.prod(x.shape[d] for d in dims))
        return edits

    def _exchanged(self) -> Iterator[Mutant]:
        """Two given tensors of one shape, each in the other's place."""
        part = self.part
        given = [i for i in part.users if part.nodes[i].func in (INPUT, CONSTANT) and part.values[i].numel() > 1]
        for i, j in itertools.combinations(given, 2):
            a, b = part.values[i], part.values[j]
            if a.shape == b.shape and a.dtype == b.dtype:
                says = f"{self.called(i)} and {self.called(j)} are exchanged"
                copy = lambda args, kwargs: args[0].clone()  # noqa: E731
                yield Mutant("swap", says, {i: Edit(copy, (Ref(j),)), j: Edit(copy, (Ref(i),))})

    def _later(self, i: int, near: int) -> list[int]:
        """Operations whose result is made from that of `i` and has its shape, the nearest first."""
        nodes = self.part.nodes
        below = (k for k in self.part.downstream(i) if k != i and nodes[k].shape == nodes[i].shape)
        return list(itertools.islice((k for k in below if isinstance(self.part.values[k], Tensor)), near))

    def _moved_on(self) -> Iterator[Mutant]:
        """An operation that comes later, or earlier, than in the reference: an eps outside of a root, a late bias."""
        nodes = self.part.nodes
        movable = {i: self._later(i, 4) for i in self.computed if nodes[i].op in ARITHMETIC | FUNCTIONS | CHOICES}
        for i, later in movable.items():
            node = nodes[i]
            for j, own in ((j, a.id) for j, a in enumerate(node.args) if isinstance(a, Ref)):
                if nodes[own].shape != node.shape:
                    continue
                others = [a.id for k, a in enumerate(node.args) if isinstance(a, Ref) and k != j]
                takes = tuple(0 if k == j else a for k, a in enumerate(node.args))
                passes = Edit(lambda args, kwargs, j=j: args[j].clone())
                moved = Edit(partial(_applied, node=node, j=j), takes, after=True)
                for k in later:
                    if nodes[k].op not in MOVES:
                        yield self._moved(i, k, {i: passes, k: moved}, "after")
                for k in (k for k in movable if i in movable[k]):
                    if all(nodes[r].func in (INPUT, CONSTANT) or r < k for r in others):
                        yield self._moved(i, k, {i: passes, k: moved}, "before")

    def _moved(self, i: int, k: int, edits: dict[int, Edit], where: str) -> Mutant:
        node, other = self.part.nodes[i], self.part.nodes[k]
        small = any(
            n.op == "add" and any(_is_number(a) and is_epsilon("add", a) for a in n.args) for n in (node, other)
        )
        says = f"{self.operation(i)} comes {where} {self.operation(k)}"
        return Mutant("eps" if small else "other", says, edits, 2)

    def _left_out(self) -> Iterator[Mutant]:
        """Several operations in a row that are left out."""
        for i in self.part.given() + self.computed:
            if isinstance(self.part.values[i], Tensor) and self.part.values[i].is_floating_point():
                for k in self._later(i, 8):
                    if Ref(i) not in self.part.nodes[k].args:
                        says = f"{self.called(i)} stands in place of {self.called(k)}: what is between is left out"
                        edit = Edit(lambda args, kwargs: args[0].clone(), (Ref(i),))
                        yield Mutant("function", says, {k: edit}, 2)

    def _conjugated(self) -> Iterator[Mutant]:
        """Elements in another order for what happens between two operations: groups and pairs taken otherwise."""
        part = self.part
        starts = [i for i in (*part.given(), *self.computed) if len(part.users.get(i, ())) > 1 or i in part.given()]
        for i in (i for i in starts if isinstance(part.values[i], Tensor) and part.values[i].is_floating_point()):
            later = self._later(i, 64)
            ends = [k for k in later if part.nodes[k].op in ("add", "mul", "cat", "view") or k == part.target]
            for k, (d, n) in itertools.product(ends[-6:], enumerate(part.nodes[i].shape)):
                for a in (a for a in range(2, n // 2 + 1) if n % a == 0):
                    edits = _result([i], partial(_regrouped, d=d, a=a))
                    edits |= _result([k], partial(_regrouped, d=d, a=n // a))
                    taken = f"dimension {d} of {n} is taken as {n // a} x {a} in place of {a} x {n // a}"
                    yield Mutant("permute", f"from {self.called(i)} to {self.called(k)}, {taken}", edits, 2)
        for d, n in enumerate(part.nodes[part.target].shape):
            turned = _result([part.target], lambda x, d=d: x.flip(d))
            for i in part.given():
                if n > 2 and n in part.nodes[i].shape and isinstance(part.values[i], Tensor):
                    turned |= _result([i], lambda x, n=n: x.flip(tuple(x.shape).index(n)))
            if len(turned) > 1:
                yield Mutant("flip", f"all runs backwards along dimension {d}", turned, 2)

    def _composite(self, i: int) -> tuple[set[int], set[int]]:
        """The operations that torch's operation with that result is made of, and what these take from outside."""
        inside, frontier, waiting = {i}, set[int](), [i]
        while waiting:
            for p in self.part.nodes[waiting.pop()].parents:
                if p in self.part.program.inside and p not in inside:
                    inside.add(p)
                    waiting.append(p)
                elif p not in inside:
                    frontier.add(p)
        return inside, frontier

    def _of_composite(self, i: int, name: str) -> Iterator[Mutant]:
        """Another function in place of one that torch has as a whole, of one tensor."""
        inside, frontier = self._composite(i)
        if len(frontier) != 1 or len(inside) == 1 or self.part.nodes[min(frontier)].shape != self.part.nodes[i].shape:
            return
        (source,) = frontier
        for words, f in INSTEAD.items():
            edit = Edit(lambda args, kwargs, f=f: f(args[0]), (Ref(source),))
            yield Mutant("function", f"{words} in place of {name}", {i: edit}, 0)


def _result(ids: Iterable[int], change: Change) -> dict[int, Edit]:
    """`change` of what operations give."""
    return {i: Edit(lambda args, kwargs: change(args[0]), after=True) for i in ids}


def _instead(ids: Iterable[int], run: Callable[[list[Any]], Any]) -> dict[int, Edit]:
    return {i: Edit(lambda args, kwargs: run(args)) for i in ids}


def _recounted(c: float, ratio: float) -> float:
    return c * ratio


def _applied(args: list[Any], kwargs: dict[str, Any], node: Node, j: int) -> Any:
    """An operation, of another's result as its argument `j`."""
    result, *rest = args
    return call(node, [result if k == j else a for k, a in enumerate(rest)], node.kwargs)


def _regrouped(x: Tensor, d: int, a: int) -> Tensor:
    """A dimension of a groups as that of its transpose."""
    return x.unflatten(d, (a, -1)).transpose(d, d + 1).flatten(d, d + 1)


def _fit(x: Tensor, shape: Any) -> Tensor:
    return x.clone() if x.shape == shape else x.expand(shape).clone()


def _is_number(c: Any) -> bool:
    return isinstance(c, (int, float)) and not isinstance(c, bool) and math.isfinite(c)


def _dims(node: Node, ndim: int) -> list[int]:
    """The dimensions of a reduction."""
    over = node.args[1] if len(node.args) > 1 and node.args[1] is not None else list(range(ndim))
    return sorted(d % max(1, ndim) for d in ([over] if isinstance(over, int) else over or range(ndim)))


def is_epsilon(op: str, c: float) -> bool:
    """Whether a number is there to keep another from zero."""
    return op in ("add", "sub", "clamp_min", "maximum") and isinstance(c, float) and 0.0 < abs(c) <= 1e-2


def kind_of_number(op: str, c: float, new: float, sizes: Iterable[int] = ()) -> str:
    """What it is called to have `new` in place of a number of the program's."""
    if is_epsilon(op, c):
        return "eps"
    if abs(new - c) == 1.0 and op.startswith("clamp"):
        return "shift"
    if abs(new - c) == 1.0 and c > 2 and c == int(c) and any(c % n == 0 for n in sizes):
        return "ddof"
    if new == -c:
        return "sign"
    simple = {c * f for n in sizes for f in (n, 1 / n, n**0.5, n**-0.5)} | {2 * c, c / 2, 1.0}
    return "scale" if op in ("mul", "div") and new in simple else "constant"
