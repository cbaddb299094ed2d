"""The ways in which people break kernels, each put into one place of a wrong step's part.

A mutant knows operations, shapes and numbers, and no program. Those of a value change what an operation gives or takes:
its elements' places (:func:`places`) or its numbers (:func:`amounts`). Those of an operation (:func:`_of_operation`)
leave it out, exchange what it takes, or run another in its place.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from labkit.causes.part import Edit, Part
from labkit.numerics.precision import stored
from labkit.trace.operations import ARITHMETIC, CHOICES, FUNCTIONS, MOVES, PRODUCTS
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
LEFT_OUT = {"mul": "factor", "div": "factor", "add": "drop_term", "sub": "drop_term", "where": "mask"}
LEFT_OUT |= {"masked_fill": "mask", "neg": "sign", "t": "transpose", "transpose": "transpose", "permute": "layout"}
LEFT_OUT |= {"clone": "", "view": "", "_unsafe_view": "", "expand": "", "unsqueeze": "", "squeeze": ""}
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
        for by in (1, -1):
            where = f"one place {'later' if by > 0 else 'earlier'} in dimension {d}"
            yield "shift", f"{where}, around the end", lambda x, d=d, by=by: x.roll(by, d)
            if n > 2:
                yield "shift", f"{where}, with zeros", lambda x, d=d, by=by: _moved(x, d, by, 0.0)
                yield "shift", f"{where}, the edge repeated", lambda x, d=d, by=by: _moved(x, d, by, None)
        yield "flip", f"reversed in dimension {d}", lambda x, d=d: x.flip(d)
        for k in dict.fromkeys((0, n - 1)):
            words = f"entry {k} of dimension {d} in place of all"
            yield "stale", words, lambda x, d=d, k=k: x.narrow(d, k, 1).expand(x.shape).clone()
        if n % 2 == 0 and n > 2:
            yield "swap", f"halves of dimension {d} exchanged", lambda x, d=d, n=n: x.roll(n // 2, d)
            yield "swap", f"neighbours of dimension {d} exchanged", lambda x, d=d: _chunked(x, d, 2, (1, 0), inner=True)
        for a in (a for a in range(2, n // 2 + 1) if n % a == 0):
            words = f"dimension {d} of {n} taken as {n // a} x {a} in place of {a} x {n // a}"
            yield "permute", words, lambda x, d=d, a=a: x.unflatten(d, (a, -1)).transpose(d, d + 1).flatten(d, d + 1)
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


def amounts(shape: tuple[int, ...], sizes: Iterable[int]) -> Iterator[tuple[str, str, Change]]:
    """Other numbers in the same places."""
    yield "zero", "zero", torch.zeros_like
    yield "sign", "of the other sign", torch.neg
    yield "function", "its absolute value", torch.abs
    factors = {"2": 2.0, "1/2": 0.5, "ln 2": math.log(2.0), "log2 e": math.log2(math.e)}
    for n in sorted({*sizes} - {0, 1}):
        factors |= {f"{n}": n, f"1/{n}": 1 / n, f"sqrt({n})": n**0.5, f"1/sqrt({n})": n**-0.5}
    for words, c in factors.items():
        yield "scale", f"{words} times as large", lambda x, c=c: x * c
    for name in FEWER_DIGITS:
        yield "precision", f"rounded to {name}", lambda x, name=name: _rounded(x, name)
    for d, n in enumerate(shape):
        for a, b in ranges(n):
            kind, words = ("truncate", f"zero in {a} to {b - 1} of dimension {d}, of {n}")
            yield kind, words, lambda x, d=d, a=a, b=b: _zeroed(x, d, a, b)


def _rounded(x: Tensor, name: str) -> Tensor:
    if name != "tf32":
        return stored(x, name)
    return ((x.float().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32).double()


def _zeroed(x: Tensor, d: int, a: int, b: int) -> Tensor:
    keep = torch.ones(x.shape[d], dtype=x.dtype, device=x.device)
    keep[a:b] = 0
    return x * keep.view([-1 if k == d else 1 for k in range(x.ndim)])


def ranges(n: int) -> list[tuple[int, int]]:
    """Parts of a dimension that a loop over tiles may leave out: tails, the first tile, one in the middle."""
    found = {(k, n) for q in range(2, n.bit_length()) for k in (n // 2**q * 2**q, 2**q) if 0 < k < n}
    found |= {(n - 1, n), (0, 1), (n - n // 4, n)} if n > 1 else set()
    for tile in (2**q for q in range(2, n.bit_length())):
        found |= {(0, tile), (tile, min(n, 2 * tile))} if tile < n else set()
    return sorted((a, b) for a, b in found if 0 <= a < b <= n and (a, b) != (0, n))


def whole(x: Tensor) -> Iterator[tuple[str, str, Change]]:
    """Other whole numbers, and truth values."""
    if x.dtype == torch.bool:
        yield "mask", "true everywhere", torch.ones_like
        yield "mask", "false everywhere", torch.zeros_like
        yield "mask", "inverted", torch.logical_not
        for d in (d for d, n in enumerate(x.shape) if n > 1):
            for by, fill in itertools.product((1, -1), (False, True)):
                words = f"one place {'later' if by > 0 else 'earlier'} in dimension {d}, {fill} at the edge"
                yield "mask", words, lambda x, d=d, by=by, fill=fill: _moved(x, d, by, fill)
        return
    low, high = (int(x.min()), int(x.max())) if x.numel() else (0, 0)
    for by in (1, -1):
        yield "shift", f"{'one more' if by > 0 else 'one less'}", lambda x, by=by: x + by
        yield "shift", f"{by:+d}, within bounds", lambda x, by=by: (x + by).clamp(low, high)
    yield "shift", "counted from 0", lambda x: x - low
    yield "stale", "its first in place of all", lambda x: x.flatten()[0].expand(x.shape).clone()


def mutants(part: Part, others: Mapping[str, Tensor], composites: Mapping[int, str]) -> Iterator[Mutant]:
    """Every mutant of a part, those of its target and of what is given first.

    `others` are observed steps and inputs by name, which may stand in each other's place; `composites` say of which
    operation of torch's a number is the result.
    """
    sizes = {n for i in (*part.given(), part.target) if isinstance(part.values[i], Tensor) for n in part.values[i].shape}
    groups: dict[Any, list[int]] = {}
    for node in part.nodes:
        if isinstance(part.values[node.id], Tensor):
            alone = node.func in (INPUT, CONSTANT)
            groups.setdefault(node.id if alone else (node.op, node.site, node.shape), []).append(node.id)
    ordered = sorted(groups.values(), key=lambda ids: (part.target not in ids, ids[0] not in part.names, ids[0]))
    for together in ordered:
        times = [("", together)]
        if len(together) > 1:
            times += [(" (the first time)", together[:1]), (" (the last time)", together[-1:])]
        for words, ids in times:
            yield from _of_result(part, ids, words, sizes, others)
            if part.nodes[ids[0]].func not in (INPUT, CONSTANT):
                yield from _of_operation(part, ids, words, sizes)
    yield from _along(part)
    yield from _exchanged(part)
    yield from _reordered(part)
    for i, name in composites.items():
        yield from _of_composite(part, i, name)


def called(part: Part, i: int) -> str:
    """What an operation's result is called in a sentence: a step's name, or the operation."""
    node = part.nodes[i]
    if i in part.names:
        return part.names[i]
    return "a constant" if node.func in (INPUT, CONSTANT) else f"the result of {node.op.strip('_')}"


def _result(part: Part, ids: list[int], change: Change) -> dict[int, Edit]:
    """`change` of what operations give."""

    def edit(args: list[Any], kwargs: dict[str, Any], node: Node) -> Any:
        return change(args[0] if node.func in (INPUT, CONSTANT) else call(node, args, kwargs))

    return {i: Edit(partial(edit, node=part.nodes[i])) for i in ids}


def _argument(part: Part, ids: list[int], j: int, change: Callable[[Any], Any]) -> dict[int, Edit]:
    """`change` of the argument `j` of operations."""

    def edit(args: list[Any], kwargs: dict[str, Any], node: Node) -> Any:
        return call(node, [*args[:j], change(args[j]), *args[j + 1 :]], kwargs)

    return {i: Edit(partial(edit, node=part.nodes[i])) for i in ids}


def _instead(ids: list[int], run: Callable[[list[Any]], Any]) -> dict[int, Edit]:
    return {i: Edit(lambda args, kwargs: run(args)) for i in ids}


def _changes(x: Tensor, sizes: Iterable[int]) -> Iterator[tuple[str, str, Change]]:
    if x.dtype == torch.bool or not x.is_floating_point():
        yield from whole(x)
    else:
        yield from amounts(tuple(x.shape), sizes)
    yield from places(tuple(x.shape))


def _of_result(
    part: Part, ids: list[int], words: str, sizes: set[int], others: Mapping[str, Tensor]
) -> Iterator[Mutant]:
    i = ids[-1]
    x, node, name = part.values[i], part.nodes[i], called(part, i)
    moved = node.op in MOVES and i != part.target
    for kind, what, change in _changes(x, () if moved else sizes):
        if moved and kind in ("scale", "sign", "precision", "function", "zero", "truncate"):
            continue  # the same as of what was moved
        if kind == "zero" and node.func in (INPUT, CONSTANT):
            continue  # it is left out
        yield Mutant(kind, f"{name}{words} is {what}", _result(part, ids, change))
    if node.func in (INPUT, CONSTANT) and x.is_floating_point():
        yield Mutant("factor", f"{name} is left out: 1 in its place", _result(part, ids, torch.ones_like))
        yield Mutant("drop_term", f"{name} is left out: 0 in its place", _result(part, ids, torch.zeros_like))
    if node.func in (INPUT, CONSTANT) or i == part.target:
        for other, value in others.items():
            if value.shape == x.shape and other != name and value.dtype == x.dtype:
                yield Mutant("stale", f"{other} stands in place of {name}", _result(part, ids, lambda _, v=value: v), 2)


def _of_operation(part: Part, ids: list[int], words: str, sizes: set[int]) -> Iterator[Mutant]:
    i = ids[0]
    node, x = part.nodes[i], part.values[i]
    what = f"{node.op.strip('_')}{words}"
    tensors = [(j, part.values[a.id]) for j, a in enumerate(node.args) if isinstance(a, Ref)]
    tensors = [(j, a) for j, a in tensors if isinstance(a, Tensor)]
    names = {j: called(part, node.args[j].id) for j, _ in tensors}
    for j, a in tensors:
        shared = len(part.users.get(node.args[j].id, ())) > len(ids)
        if shared or node.op in PRODUCTS or node.op in INDEXED:
            for kind, change_words, change in _changes(a, sizes if shared else ()):
                says = f"{what} takes {names[j]} {change_words}"
                yield Mutant(kind, says, _argument(part, ids, j, change), 2)
        kind = LEFT_OUT.get(node.op, "function")
        if kind and a.is_floating_point() and x.is_floating_point() and node.op not in PRODUCTS:
            negative = node.op == "sub" and j == 1
            says = f"{what} is left out: {names[j]} passes {'with the other sign' if negative else 'as it is'}"
            run = lambda args, j=j, negative=negative: _fit(-args[j] if negative else args[j], x.shape)  # noqa: E731
            yield Mutant(kind, says, _instead(ids, run))
        if node.op in ("mul", "add", "sub"):
            again = "factor" if node.op == "mul" else "scale"
            twice = lambda args, kwargs, j=j: call(node, [call(node, args, kwargs), args[j]], {})  # noqa: E731
            yield Mutant(again, f"{what}: {names[j]} is taken twice", {k: Edit(twice) for k in ids})
        if node.op in ARITHMETIC and a.ndim and a.shape != x.shape:
            yield from _broadcast(part, ids, j, a, x, f"{what}: {names[j]}")
    if len(tensors) == 2 and node.op not in ("mul", "add"):
        (j, _), (k, _) = tensors
        says = f"{what}: {names[j]} and {names[k]} are exchanged"
        swap = lambda args, j=j, k=k: [args[k] if n == j else args[j] if n == k else a for n, a in enumerate(args)]  # noqa: E731
        yield Mutant("swap", says, {n: Edit(lambda args, kwargs: call(node, swap(args), kwargs)) for n in ids})
    if node.op in OPPOSITE:
        other = getattr(torch, OPPOSITE[node.op])
        kind = KIND_OF.get(node.op, "mask" if x.dtype == torch.bool else "function")
        yield Mutant(kind, f"{OPPOSITE[node.op]} in place of {what}", _instead(ids, lambda args: other(*args[:2])))
    if len(tensors) == 1 and (node.op in FUNCTIONS or node.op in CHOICES) and tensors[0][1].shape == x.shape:
        for name, f in INSTEAD.items():
            yield Mutant("function", f"{name} in place of {what}", _instead(ids, lambda args, f=f: f(args[0])))
    if node.op in REDUCTIONS:
        yield from _of_reduction(part, ids, what)
    if node.op in ("permute", "transpose", "t"):
        says = f"{what} is left out: memory is read as it lies"
        yield Mutant("layout", says, _instead(ids, lambda args: args[0].reshape(x.shape)))
    if node.op in ("where", "masked_fill"):
        yield Mutant("mask", f"{what} fills in 0", _argument(part, ids, 2, lambda a: a * 0))
        for by in (1, -1):
            j = 0 if node.op == "where" else 1
            flipped = lambda c, by=by: torch.tril(torch.ones_like(c), by).logical_and(c)  # noqa: E731
            yield Mutant("mask", f"{what}: only below diagonal {by}", _argument(part, ids, j, flipped), 2)
    if node.op in ("convolution", "constant_pad_nd"):
        yield from _padded(part, ids, what)
    for j, c in enumerate(node.args):
        if isinstance(c, (int, float)) and not isinstance(c, bool) and node.op not in MOVES:
            yield from _numbers(part, ids, j, float(c), what, sizes)


def _fit(x: Tensor, shape: Any) -> Tensor:
    return x.clone() if x.shape == shape else x.expand(shape).clone()


def _broadcast(part: Part, ids: list[int], j: int, a: Tensor, x: Tensor, says: str) -> Iterator[Mutant]:
    """An operand with one long dimension, applied along another."""
    wide = a.reshape((1,) * (x.ndim - a.ndim) + tuple(a.shape))
    long = [d for d, n in enumerate(wide.shape) if n > 1]
    for d in (d for d in range(x.ndim) if len(long) == 1 and d != long[0] and x.shape[d] > 1):
        index = torch.arange(x.shape[d], device=a.device) % a.numel()
        view = [-1 if k == d else 1 for k in range(x.ndim)]
        change = lambda v, index=index, view=view: v.flatten()[index].view(view)  # noqa: E731
        yield Mutant("axis", f"{says} is applied along dimension {d}, not {long[0]}", _argument(part, ids, j, change))


def _numbers(part: Part, ids: list[int], j: int, c: float, what: str, sizes: set[int]) -> Iterator[Mutant]:
    """Other numbers in the place of one of the program's."""
    small = part.nodes[ids[0]].op in ("add", "sub", "clamp_min", "maximum") and abs(c) <= 1e-2
    others = set(EPSILONS) if small else {0.0, 1.0, -c, 2 * c, c / 2, 10 * c, c / 10, 1 - c, c + 1, c - 1, c * c}
    if not small:
        others |= {1 / c, abs(c) ** 0.5, abs(c) ** -0.5} if c else set()
        others |= {f(n) for n in sizes if n > 1 for f in (float, lambda n: n**0.5, lambda n: n**-0.5, lambda n: 1 / n)}
    for new in sorted(others - {c}):
        kind = kind_of_number(part.nodes[ids[0]].op, c, new)
        number = int(new) if isinstance(part.nodes[ids[0]].args[j], int) and new == int(new) else new
        says = f"{what} has {new:.6g} where the reference has {c:.6g}"
        yield Mutant(kind, says, _argument(part, ids, j, lambda _, new=number: new))


def kind_of_number(op: str, c: float, new: float) -> str:
    """What it is called to have `new` in place of a number of the program's."""
    if op in ("add", "sub", "clamp_min", "maximum") and abs(c) <= 1e-2:
        return "eps"
    if c == int(c) and c > 2 and abs(new - c) == 1.0:
        return "ddof"
    if new == -c:
        return "sign"
    return "scale" if op in ("mul", "div") else "constant"


def _of_reduction(part: Part, ids: list[int], what: str) -> Iterator[Mutant]:
    node = part.nodes[ids[0]]
    x = part.values[node.parents[0]]
    over = node.args[1] if len(node.args) > 1 and node.args[1] is not None else list(range(x.ndim))
    dims = [d % max(1, x.ndim) for d in ([over] if isinstance(over, int) else over)]
    for d in dims:
        for a, b in ranges(x.shape[d]):
            change = lambda v, d=d, a=a, b=b: torch.cat([v.narrow(d, 0, a), v.narrow(d, b, v.shape[d] - b)], d)  # noqa: E731
            says = f"{what} leaves out {a} to {b - 1} of {x.shape[d]}"
            yield Mutant("truncate", says, _argument(part, ids, 0, change))
    count = math.prod(x.shape[d] for d in dims)
    if node.op == "mean" and count > 1:
        yield Mutant("scale", f"{what}: the sum, not the mean", _result(part, ids, lambda y: y * count))
        yield Mutant("ddof", f"{what}: over {count - 1}, not {count}", _result(part, ids, lambda y: y * count / (count - 1)))
    if node.op == "sum" and count > 1:
        yield Mutant("scale", f"{what}: the mean, not the sum", _result(part, ids, lambda y: y / count))
    if node.op == "var_mean" and count > 1:
        unbiased = node.kwargs.get("correction", node.args[2] if len(node.args) > 2 else 1)
        factor = (count - 1) / count if unbiased else count / (count - 1)
        firsts = [u for i in ids for u in part.users.get(i, ()) if part.nodes[u].args[1] == 0]
        says = f"the variance is over {count if unbiased else count - 1}"
        if firsts:
            yield Mutant("ddof", says, _result(part, firsts, lambda v: v * factor))
    if node.op == "cumsum":
        yield Mutant("shift", f"{what} leaves out the element itself", {i: _exclusive(part.nodes[i]) for i in ids})
        back = lambda args, d=dims[0]: args[0].flip(d).cumsum(d).flip(d)  # noqa: E731
        yield Mutant("flip", f"{what} runs backwards", _instead(ids, back))


def _exclusive(node: Node) -> Edit:
    return Edit(lambda args, kwargs: call(node, args, kwargs) - args[0])


def _padded(part: Part, ids: list[int], what: str) -> Iterator[Mutant]:
    """Padding that is moved by one, or filled with something else than zeros."""
    node = part.nodes[ids[0]]
    own = node.op == "constant_pad_nd"
    pads = list(node.args[1]) if own else [p for p in reversed(node.args[4]) for _ in (0, 1)]
    if not own and (node.args[6] or not any(pads)):
        return

    def padded(args: list[Any], kwargs: dict[str, Any], pads: list[int], mode: str) -> Any:
        x = F.pad(args[0], pads, mode) if mode != "constant" else F.pad(args[0], pads)
        return x if own else call(node, [x, *args[1:4], [0] * len(args[4]), *args[5:]], kwargs)

    for k, by in itertools.product(range(0, len(pads), 2), (1, -1)):
        moved = [p + (by if n == k else -by if n == k + 1 else 0) for n, p in enumerate(pads)]
        says = f"{what} is padded {tuple(moved)}, not {tuple(pads)}"
        edits = {i: Edit(partial(padded, pads=moved, mode="constant")) for i in ids}
        yield Mutant("shift", says, edits)
    for mode in ("replicate", "reflect", "circular"):
        edits = {i: Edit(partial(padded, pads=pads, mode=mode)) for i in ids}
        yield Mutant("other", f"{what} is padded by {mode}, not by zeros", edits)


def _along(part: Part) -> Iterator[Mutant]:
    """All reductions of a line that run along one dimension, along another, or over all."""
    lines: dict[Any, list[int]] = {}
    for node in part.nodes:
        if node.op in REDUCTIONS and len(node.args) > 1:
            lines.setdefault((node.site, str(node.args[1])), []).append(node.id)
            lines.setdefault(("", str(node.args[1])), []).append(node.id)
    for ids in {tuple(ids) for ids in lines.values()}:
        node = part.nodes[ids[0]]
        ndim, old = part.values[node.parents[0]].ndim, node.args[1]
        ways = [[d] for d in range(ndim)] + ([list(range(ndim))] if ndim > 1 else [])
        for dims in ways:
            if dims in (old, [old], [d % ndim for d in old] if isinstance(old, list) else [old % ndim]):
                continue
            edits: dict[int, Edit] = {}
            for i in ids:
                edits |= _along_dims(part, i, dims if isinstance(old, (list, tuple)) else dims[0])
            words = f"over dimension{'s' if len(dims) > 1 else ''} {', '.join(map(str, dims))}, not {old}"
            yield Mutant("axis", f"{node.op.strip('_')} runs {words}", edits, 1)


def _along_dims(part: Part, i: int, dims: Any) -> dict[int, Edit]:
    """A reduction along other dimensions; a division by how many they were is by how many they are."""
    node = part.nodes[i]
    x, shape = part.values[node.parents[0]], node.shape

    def edit(args: list[Any], kwargs: dict[str, Any]) -> Any:
        y = call(node, [args[0], dims, *args[2:]], kwargs)
        return _fit(y, shape) if isinstance(y, Tensor) else y

    def moment(args: list[Any], kwargs: dict[str, Any], getitem: Node) -> Any:
        return _fit(call(node, [args[0], dims, *node.args[2:]], node.kwargs)[getitem.args[1]], getitem.shape)

    if node.op == "var_mean":
        users = [part.nodes[u] for u in part.users.get(i, ())]
        return {u.id: Edit(partial(moment, getitem=u), (node.args[0],)) for u in users}
    edits = {i: Edit(edit)}
    before = math.prod(x.shape[d] for d in (node.args[1] if isinstance(node.args[1], (list, tuple)) else [node.args[1]]))
    after = math.prod(x.shape[d] for d in (dims if isinstance(dims, list) else [dims]))
    for u in part.users.get(i, ()) if node.op == "sum" else ():
        if part.nodes[u].op == "div" and part.nodes[u].args[1] == before:
            edits |= _argument(part, [u], 1, lambda _: after)
    return edits


def _exchanged(part: Part) -> Iterator[Mutant]:
    """Two given tensors of one shape, each in the other's place."""
    given = [i for i in part.given() if isinstance(part.values[i], Tensor) and part.values[i].numel() > 1]
    for i, j in itertools.combinations(given, 2):
        a, b = part.values[i], part.values[j]
        if a.shape == b.shape and a.dtype == b.dtype:
            says = f"{called(part, i)} and {called(part, j)} are exchanged"
            copy = lambda args, kwargs: args[0].clone()  # noqa: E731
            yield Mutant("swap", says, {i: Edit(copy, (Ref(j),)), j: Edit(copy, (Ref(i),))})


def _reordered(part: Part) -> Iterator[Mutant]:
    """Two operations that follow each other, in the other order: what an eps inside and outside of a root is."""
    for node in part.nodes:
        for j in (j for j, a in enumerate(node.args) if isinstance(a, Ref)):
            inner = part.nodes[node.args[j].id]
            if inner.func in (INPUT, CONSTANT) or not isinstance(part.values[inner.id], Tensor):
                continue
            if inner.op not in ARITHMETIC | FUNCTIONS | CHOICES or node.op not in ARITHMETIC | FUNCTIONS | CHOICES:
                continue
            if node.op in ("add", "sub") and inner.op in ("add", "sub"):
                continue
            for k in (k for k, a in enumerate(inner.args) if isinstance(a, Ref)):
                small = [c for c in inner.args if isinstance(c, float) and abs(c) <= 1e-2]
                kind = "eps" if small and inner.op == "add" else "other"
                says = f"{inner.op.strip('_')} comes after {node.op.strip('_')}, not before"
                edit = _other_order(node, j, inner, k)
                yield Mutant(kind, says, {node.id: edit}, 2)


def _other_order(node: Node, j: int, inner: Node, k: int) -> Edit:
    """inner(node(x)) in place of node(inner(x))."""
    own = len(node.args)

    def edit(args: list[Any], kwargs: dict[str, Any]) -> Any:
        outer, rest = args[:own], args[own:]
        first = call(node, [*outer[:j], rest[k], *outer[j + 1 :]], kwargs)
        return _fit(call(inner, [*rest[:k], first, *rest[k + 1 :]], inner.kwargs), node.shape)

    return Edit(edit, (*node.args, *inner.args))


def _of_composite(part: Part, i: int, name: str) -> Iterator[Mutant]:
    """Another function in place of one that torch has as a whole, of one tensor."""
    inside, frontier, waiting = {i}, set[int](), [i]
    while waiting:
        for p in part.nodes[waiting.pop()].parents:
            if p in part.program.inside and p not in inside:
                inside.add(p)
                waiting.append(p)
            elif p not in inside:
                frontier.add(p)
    if len(frontier) != 1 or len(inside) == 1 or part.values[min(frontier)].shape != part.values[i].shape:
        return
    (source,) = frontier
    for words, f in INSTEAD.items():
        edit = Edit(lambda args, kwargs, f=f: f(args[0]), (Ref(source),))
        yield Mutant("function", f"{words} in place of {name}", {i: edit})
