"""The mistakes that people make in kernels, each as a mutation of one place of a wrong step's part.

A mutation knows operations, shapes and numbers, and no program. Those of a value change what an operation gives or
takes: its elements' places (:func:`places`) or its numbers (:func:`amounts`). Those of an operation leave it out,
exchange what it takes, or run another in its place. Each generator of these gives the kind, a sentence, the edits by
the number of the operation, and a rank where that is not 1; :func:`mutations` puts them into their order. To add one:
OTHER_FUNCTIONS, :func:`places`, :func:`amounts`, :func:`change_operation`, or a generator in :func:`mutations`.
"""

from __future__ import annotations

import ast
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial, wraps
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from whywrong.comparing.precision import stored
from whywrong.comparing.regions import INTEGER_DTYPES
from whywrong.errors import collected
from whywrong.explaining.part import Edit, Part
from whywrong.recording.operations import (
    ALGORITHMS,
    ARITHMETIC,
    FUNCTIONS,
    MOVES,
    POOLS,
    PRODUCTS,
    SELECTIONS,
    TRANSFORMS,
)
from whywrong.recording.program import CONSTANT, INPUT, Node, Ref, call, filled
from whywrong.torch_private import tree_map_only

Tensor = torch.Tensor
Change = Callable[[Tensor], Tensor]
Way = tuple[Any, ...]

_FUNCTIONS = """sigmoid tanh exp exp2 log log2 log10 log1p expm1 sqrt rsqrt abs reciprocal square sin cos erf sign round
    floor ceil trunc"""
OTHER_FUNCTIONS: dict[str, Change] = {
    "GELU by erf": F.gelu,
    "GELU by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "x sigmoid(1.702 x)": lambda x: x * torch.sigmoid(1.702 * x),
    **{name: getattr(F, name.lower().replace(" ", "_")) for name in ("SiLU", "ReLU", "leaky ReLU", "ELU", "softplus")},
    "hard sigmoid (x / 6 + 1/2)": F.hardsigmoid,
    "hard sigmoid (0.2 x + 1/2)": lambda x: (0.2 * x + 0.5).clamp(0.0, 1.0),
    "hard swish": F.hardswish,
    "the identity": lambda x: x.clone(),
    **{name: getattr(torch, name) for name in _FUNCTIONS.split()},
}
"""Functions of one number that stand in each other's place."""

_PAIRS = """le lt, ge gt, eq ne, maximum minimum, amax amin, add sub, mul div, logical_and logical_or, argmax argmin,
    bitwise_and bitwise_or, sin cos"""
OPPOSITE = {a: b for pair in _PAIRS.split(",") for a, b in (pair.split(), pair.split()[::-1])}
REDUCTIONS = ("sum", "mean", "amax", "amin", "argmax", "argmin", "cumsum", "cumprod", "logcumsumexp", "var_mean")
NUMBERED = ARITHMETIC | {"pow", "clamp", "clamp_min", "clamp_max", "full", "fill", "remainder", "arange"}
NUMBERED |= {"eq", "lt", "le", "gt", "ge"}
SHORT = 32
"""Length of a tile up to which each is tried."""
TILED = ("sum", "mean", "amax", "amin")
"""Reductions whose parts are tried by themselves."""
ON_TOP = ("sqrt", "square", "exp", "log", "reciprocal", "sigmoid", "tanh", "ReLU", "round", "abs")
SPLITS = ("split", "split_with_sizes", "unbind")
FEW_PARTS = 9
"""Ends of the parts of a dimension up to which these are tried in pairs: of more there are too many."""
THRESHOLDS = ("lt", "le", "gt", "ge")
"""Those that compare with a number, of which one between two of what is compared is looked for."""
RUNNING, SPLIT, MEAN = (
    "is not scaled down when a larger number comes",
    "is not scaled down to the largest number of all",
    "is averaged over these, each with the same weight",
)
"""Softmaxes in tiles that are not put together rightly."""
LEFT_OUT = {"mul": "factor", "div": "factor", "add": "drop_term", "sub": "drop_term", "where": "mask"}
LEFT_OUT |= {"masked_fill": "mask", "neg": "sign", "t": "transpose", "transpose": "transpose", "permute": "layout"}
LEFT_OUT |= dict.fromkeys(("gather", "index", "index_select", "scatter"), "permute")
LEFT_OUT |= dict.fromkeys(("clone", "view", "_unsafe_view", "expand", "unsqueeze", "squeeze"), "")
PADDINGS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "replication": lambda at, n: at.clamp(0, n - 1),
    "reflection": lambda at, n: _folded(at, 2 * n - 2, 2 * n - 2),
    "reflection that repeats the edge": lambda at, n: _folded(at, 2 * n, 2 * n - 1),
    "the other end": lambda at, n: at.remainder(n),
}
"""What stands at places outside of 0 to n - 1."""
GIVEN = (INPUT, CONSTANT)
ORDINALS = ["first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth"]
RARE_KINDS = ("stale", "axis")
"""What people do less often, by which equally good fits are ordered: without, two causes of 67 are not identified."""


@dataclass(frozen=True, eq=False)
class Mutation:
    """A change of a part: `edits` by the number of the operation. The simplest have the lowest `rank`."""

    kind: str
    says: str
    edits: Mapping[int, Edit]
    rank: int = 1
    fitted: bool = False
    """Whether a number in it was looked for."""
    lost: bool = False
    """Whether it leaves out terms of a sum, which in scattered elements is what lost updates leave."""


def places(shape: tuple[int, ...]) -> Iterator[tuple[str, str, Change]]:
    """Elements in other places: kind, what happens, and how."""
    large = [d for d, n in enumerate(shape) if n > 1]
    for i, j in itertools.combinations(large, 2):
        if shape[i] == shape[j]:
            yield "transpose", f"transposed in dimensions {i} and {j}", partial(torch.transpose, dim0=i, dim1=j)
        elif shape[i] % shape[j] == 0 and j == i + 1:
            words = f"transposed in each of {shape[i] // shape[j]} square blocks"
            yield "transpose", words, partial(_transposed_blocks, i=i, j=j)
        words = f"read as if dimensions {i} and {j} were stored in the other order"
        yield "layout", words, partial(_read_transposed, i=i, j=j)
        if shape[i] != shape[j]:
            words = f"stored as if dimensions {i} and {j} were in the other order"
            yield "layout", words, partial(_stored_transposed, i=i, j=j)
    for d in large:
        yield from orders(shape[d], d)
    if large[-2:] == [len(shape) - 2, len(shape) - 1] and shape[-1] == shape[-2]:
        for words, half in (("above", torch.tril), ("below", torch.triu)):  # BLAS writes one of a symmetric matrix
            yield "zero", f"zero {words} the diagonal", half
    if len(large) > 1:
        yield "flip", f"reversed in dimensions {large[-2:]}", partial(torch.flip, dims=large[-2:])


def _transposed_blocks(x: Tensor, i: int, j: int) -> Tensor:
    return torch.cat([block.transpose(i, j) for block in x.split(x.shape[j], i)], i)


def _read_transposed(x: Tensor, i: int, j: int) -> Tensor:
    return x.transpose(i, j).reshape(x.shape)


def _stored_transposed(x: Tensor, i: int, j: int) -> Tensor:
    return x.reshape(x.transpose(i, j).shape).transpose(i, j)


def orders(n: int, d: int) -> Iterator[tuple[str, str, Change]]:
    """Other entries of dimension `d`, of `n`, in the places of its own."""
    entry = partial(entries, d)
    for by, where in ((1, "later"), (-1, "earlier")) if n > 2 else ():
        yield "shift", f"one place {where} in dimension {d}, around the end", entry(lambda own, by: (own - by) % n, by)
        yield "shift", f"one place {where} in dimension {d}, with zeros", partial(_moved, d=d, by=by)
        words = f"one place {where} in dimension {d}, the edge repeated"
        yield "shift", words, entry(lambda own, by: (own - by).clamp(0, n - 1), by)
    yield "flip" if n > 2 else "swap", f"reversed in dimension {d}", entry(lambda own: own.flip(0))
    yield "stale", f"entry 0 of dimension {d} in place of all", entry(lambda own: own * 0)
    yield "stale", f"entry {n - 1} of dimension {d} in place of all", entry(lambda own: own * 0 + n - 1)
    for tile in (2**q for q in range(2, (n - 1).bit_length())):
        words = f"made of every other tile of {tile} of dimension {d}, each twice"
        yield "stale", words, entry(lambda own, t: own - t * (own // t % 2), tile)  # of two buffers, one is not filled
        words = f"in the last tile of {tile} of dimension {d} what the tile before has"
        yield "stale", words, entry(lambda own, t: own - t * (own // t == (n - 1) // t), tile)
    if n % 2 == 0 and n > 2:
        yield "swap", f"turned: the halves of dimension {d} are exchanged", entry(lambda own: own.roll(n // 2))
    for a in (a for a in range(2, n // 2 + 1) if n % a == 0):
        words = f"read with dimension {d}, {n} = {a} x {n // a}, transposed"
        yield "permute", words, entry(lambda own, a: own.view(a, -1).T.flatten(), a)
    for parts in (p for p in (3, 4) if n % p == 0):
        for order in [*itertools.permutations(range(parts))][1:]:  # the first is as it was
            words = f"put together of {parts} parts of dimension {d} in the order {order}"
            yield "permute", words, entry(lambda own, order: own.view(len(order), -1)[[*order]].flatten(), order)


def entries(d: int, places: Callable[..., Tensor], *given: Any) -> Change:
    """Takes the entries of dimension `d` at `places` of its own, which are computed when it is run: few are."""
    return lambda x: x.index_select(d, places(torch.arange(x.shape[d], device=x.device), *given))


def _moved(x: Tensor, d: int, by: int) -> Tensor:
    ends = (1, -1) if by > 0 else (-1, 1)  # one zero more before, and one entry less behind, or the other way round
    return F.pad(x, (0, 0) * (x.ndim - d - 1) + ends)


def amounts(shape: tuple[int, ...], sizes: Iterable[int]) -> Iterator[tuple[str, str, Change]]:
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
        yield "scale", f"{words} times as large", partial(operator.mul, c)
    yield "precision", "rounded to tf32", partial(_cut, half=0x1000, off=0x1FFF)
    for name in ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"):
        yield "precision", f"rounded to {name}", partial(stored, name=name)
    yield "precision", "cut to bfloat16", partial(_cut, half=0, off=0xFFFF)


def statistics(shape: tuple[int, ...]) -> Iterator[tuple[str, str, Change]]:
    """Numbers of a dimension in place of each, or taken from it."""
    for d in (d for d, n in enumerate(shape) if n > 1):
        yield "function", f"less its mean along dimension {d}", partial(_less_mean, d=d)
        yield "axis", f"the largest of dimension {d} in place of all", partial(_largest, d=d)


def _less_mean(x: Tensor, d: int) -> Tensor:
    return x - x.mean(d, True)


def _largest(x: Tensor, d: int) -> Tensor:
    return x.amax(d, True).expand(x.shape)


def addressed(shape: tuple[int, ...], sizes: Iterable[int]) -> Iterator[tuple[str, str, Change]]:
    """A matrix, or each of several, read from other addresses; zeros are behind its end."""
    if len(shape) < 2 or 1 in shape[-2:]:
        return
    columns = shape[-1]
    for apart in sorted({*sizes, *shape[-2:], columns - 1, columns + 1, 2 * columns} - {columns}):
        yield "layout", f"read with a leading dimension of {apart}, not {columns}", partial(_read, apart=apart)


def _read(x: Tensor, apart: int) -> Tensor:
    rows, columns = (torch.arange(n, device=x.device) for n in x.shape[-2:])
    at = rows[:, None] * apart + columns
    return F.pad(x.flatten(-2), (0, max(0, int(at[-1, -1]) + 1 - x.shape[-2] * x.shape[-1])))[..., at]


def _cut(x: Tensor, half: int, off: int) -> Tensor:
    """float32 without its last bits, rounded where `half` of what they hold at most is added before."""
    return ((x.float().view(torch.int32) + half) & ~off).view(torch.float32).double()


def whole(x: Tensor) -> Iterator[tuple[str, str, Change]]:
    """Other whole numbers, and truth values."""
    if x.dtype == torch.bool:
        yield "mask", "true everywhere", torch.ones_like
        yield "mask", "false everywhere", torch.zeros_like
        yield "mask", "inverted", torch.logical_not
        for d in range(x.ndim):
            for tile, some in itertools.product((2**k for k in range(1, 8) if 2**k < x.shape[d]), (True, False)):
                words = f"{some} in each whole tile of {tile} of dimension {d} in which it is somewhere"
                yield "mask", words, partial(_by_tiles, d=d, tile=tile, some=some)
        return
    low, high = (int(x.min()), int(x.max())) if x.numel() else (0, 0)
    for d in range(x.ndim):
        yield "permute", f"in order along dimension {d}", partial(_sorted, d=d)
    for by in (1, -1):
        words = "one more" if by > 0 else "one less"
        yield "shift", words, partial(operator.add, by)
        yield (
            "shift",
            f"{words}, but not beyond its smallest and largest",
            partial(_moved_within, by=by, low=low, high=high),
        )
    yield "shift", "counted from 0", lambda x: x - low
    yield "precision", "rounded to bfloat16", lambda x: stored(x.double(), "bfloat16").to(x.dtype)


def in_bits(x: Tensor) -> Iterator[tuple[str, str, Change]]:
    """Whole numbers of few bits, of which the first is the sign, or is not."""
    low, high = (int(x.min()), int(x.max())) if x.numel() else (0, 0)
    for bits, half in ((b, 2 ** (b - 1)) for b in (4, 8, 16)):
        if high >= half or low < -half:
            yield "sign", f"kept in {bits} bits with a sign", partial(_signed, half=half)
        if -half <= low < 0:
            yield "sign", f"taken for {bits} bits without a sign", partial(torch.remainder, other=2 * half)


def _by(number: float) -> str:
    return f"{abs(number):g} {'more' if number > 0 else 'less'}"


def _sorted(x: Tensor, d: int) -> Tensor:
    return x.sort(d).values


def _moved_within(x: Tensor, by: int, low: int, high: int) -> Tensor:
    return (x + by).clamp(low, high)


def _signed(x: Tensor, half: int) -> Tensor:
    return (x + half).remainder(2 * half) - half


def _by_tiles(x: Tensor, d: int, tile: int, some: bool) -> Tensor:
    each = [(part == some).any(d, keepdim=True).expand(part.shape) for part in x.split(tile, d)]
    return torch.cat(each, d) == some


class Context:
    """A part to be mutated, and what there is around it: lengths of dimensions, numbers of the program, names.

    `names` are torch's operations by the number of their result; `composite_names` has them for each operation inside.
    """

    def __init__(self, part: Part) -> None:
        nodes, values, golden, program = part.nodes, part.values, part.golden, part.golden.program
        tensors = [values[i] for i in (*part.given, part.target)]
        shapes = [x.shape for x in tensors] + [program.nodes[golden.steps[name]].shape for name in golden.inputs]
        self.part = part
        self.errors: list[str] = []
        self.largest = max(x.numel() for x in tensors)
        self.sizes = sorted({n for shape in shapes for n in shape} - {0, 1})
        numbers = {abs(float(c)) for n in program.nodes if n.op in NUMBERED for c in n.args if is_number(c)}
        self.numbers = sorted(numbers - {0.0})[:16]
        self.computed = [n.id for n in nodes if n.func not in GIVEN and isinstance(values[n.id], Tensor)]
        self.inputs = {i for i in part.given if program.nodes[part.origin[i]].func == INPUT}
        self.places = _places(program.nodes)
        names = {number: name.split("/")[-1].split("#")[0].strip("_") for name, number in golden.operations.items()}
        self.names = {i: names[number] for i, number in part.origin.items() if number in names}
        inside = part.program.inside
        self.composite_names = {k: name for i, name in self.names.items() for k in self.composite(i)[0] if k in inside}
        self.steps = {number: name for name, number in reversed(golden.steps.items())}
        lines = [node.site for node in program.nodes] + [""]
        ends = (k for k in part.origin.values() if lines[k] != lines[k + 1] and k not in golden.steps.values())
        self.variables = {k: name for k in ends if (name := _assigned(lines[k]))}
        self.divisors = {a.id for node in nodes if node.op == "div" for a in node.args[1:] if isinstance(a, Ref)}
        for node in reversed(nodes):
            self.divisors.update(node.parents if node.id in self.divisors and node.op in MOVES else ())
        self.only_masks: set[int] = set()
        for i in (*reversed(self.computed), *part.given):
            made = i in self.computed and values[i].dtype == torch.bool
            if i in part.users and (made or self.only_masks.issuperset(part.users[i])):
                self.only_masks.add(i)

    def called(self, *ids: int) -> str:
        """What an operation's result is called in a sentence: a step's name, or the operation. Each of several is
        called by what they have in common, which is not one's name."""
        i, *others = dict.fromkeys(ids)
        node = self.part.nodes[i]
        if others:
            computed = [k for k in ids if self.part.nodes[k].func not in GIVEN]
            known = {**self.variables, **self.steps}
            names = {known.get(self.part.origin[k], "").partition("#")[0] for k in ids}
            name = names.pop() if len(names) == 1 else ""
            return f"each {name or f'result of {self.operation(*(computed or ids))}'}"
        if i not in self.part.names and self.part.origin[i] in self.steps:
            return self.steps[self.part.origin[i]]
        if i not in self.part.names and node.op == "select" and node.args[1] == 0:
            return f"{self.called(node.parents[0])}[{node.args[2]}]"
        if node.func in GIVEN:
            few = self.part.values[i].flatten().tolist() if math.prod(node.shape) <= 4 else []
            text = f"[{', '.join(f'{x:g}' for x in few)}]" if few and isinstance(few[0], float) else ""
            unnamed = f"the constant {text}" if text else f"a constant of shape {list(node.shape)}"
            return self.part.names.get(i, self.variables.get(self.part.origin[i], unnamed))
        run = f" ({self.runs[i]})" if i in self.runs else ""
        made = self.variables.get(self.part.origin[i], "")
        return self.part.names.get(i, f"{made}{run}" if made else f"the result of {self.operation(i)}")

    def operation(self, *ids: int) -> str:
        """What operations of one kind are called: by themselves, or where all are a part of the same one of torch's;
        and which it is of several on a line."""
        op, inside = self.part.nodes[ids[0]].op.strip("_"), {self.composite_names.get(i) for i in ids}
        several = self._written_alike.get(self._looks(ids[0]), [])
        same, ordinals = {self._place(i) for i in ids}, zip(ORDINALS, several if len(several) > 1 else (), strict=False)
        notes = [f"the {word} of the line" for word, place in ordinals if {place} == same]
        notes += [self.runs[ids[0]]] if len({*ids}) == 1 and ids[0] in self.runs else []
        which = f" ({', '.join(notes)})" * bool(notes)
        return (f"the {op} of {inside.pop()}" if len(inside) == 1 and None not in inside else op) + which

    @cached_property
    def _written_alike(self) -> dict[Any, list[Any]]:
        """The places on its line of the operations that are written alike."""
        found = dict[Any, dict[Any, None]]()
        for i in self.computed:
            found.setdefault(self._looks(i), {})[self._place(i)] = None
        return {looks: [*places] for looks, places in found.items()}

    def _place(self, i: int) -> Any:
        """Which operation of its line's run it is."""
        return self.places[self.part.origin[i]]

    def _looks(self, i: int) -> Any:
        """What an operation has in common with others that are written as it is."""
        node = self.part.nodes[i]
        return node.op, node.site, node.shape, str([a for a in node.args if not isinstance(a, Ref)])

    def real(self, i: int) -> bool:
        """Whether an operation gives one tensor of real numbers."""
        x = self.part.values[i]
        return isinstance(x, Tensor) and x.is_floating_point()

    def composite(self, i: int) -> tuple[set[int], set[int]]:
        """The operations that torch's operation with that result is made of, and what these take from outside."""
        nodes, found = self.part.nodes, [i]
        for k in found:  # which grows meanwhile
            found += [p for p in nodes[k].parents if p in self.part.program.inside and p not in found]
        return set(found), {p for k in found for p in nodes[k].parents} - set(found)

    def later(self, i: int, near: int) -> list[int]:
        """Operations whose result is made from that of `i` and has its shape, the nearest first."""
        nodes, inside = self.part.nodes, self.part.program.inside
        below = (k for k in self.part.downstream(i) if k != i and k not in inside and nodes[k].shape == nodes[i].shape)
        return [k for k in below if isinstance(self.part.values[k], Tensor)][:near]

    def alike(self, i: int) -> list[int]:
        """What is given and has the shape and type of what operation `i` gives."""
        x, values = self.part.values[i], self.part.values
        return [k for k in self.part.given if k != i and (values[k].shape, values[k].dtype) == (x.shape, x.dtype)]

    def mistaken(self, i: int, other: int) -> str:
        """The kind of fault that it is to take another tensor: one that is the same but for its last digits, or not."""
        x, y = self.part.values[i], self.part.values[other]
        if self.real(i) and everywhere(lambda x, y: (y - x).abs() <= 2.0**-7 * x.abs(), x, y):
            return "precision"
        return "swap" if {i, other} <= self.inputs else "stale"

    def groups(self) -> list[list[int]]:
        """Operations that are the same one of a line each time that it runs, as in a loop, and of one shape; the
        target's, then steps first."""
        part, found = self.part, dict[Any, list[int]]()
        for i in (*part.given, *self.computed):
            node, place = part.nodes[i], self._place(i)
            if isinstance(part.values[i], Tensor) and (i == part.target or i in part.users):
                found.setdefault(i if node.func in GIVEN else (node.op, node.site, node.shape, place), []).append(i)
        return sorted(found.values(), key=lambda ids: (part.target not in ids, ids[0] not in part.names, ids[0]))

    @cached_property
    def runs(self) -> dict[int, str]:
        """In which run of its line each operation is, in words; nothing of a line that runs once."""
        return {i: f"run {k} of {len(ids)}" for ids in self.loops() for k, i in enumerate(ids, 1)}

    def loops(self) -> Iterator[list[int]]:
        """Operations that are the same one of a line that runs several times."""
        return (ids for ids in self.groups() if len(ids) > 1)

    def numbered(self) -> dict[tuple[str, int, Any], list[int]]:
        """The operations that have a number of the program's as an argument, by their kind, its place and itself."""
        found: dict[tuple[str, int, Any], list[int]] = {}
        for node in (node for node in self.part.nodes if node.op in NUMBERED):
            for j, a in ((j, a) for j, a in enumerate(node.args) if is_number(a)):
                found.setdefault((node.op, j, a), []).append(node.id)
        return found

    def changes(self, x: Tensor, numbers: bool = True) -> Iterator[tuple[str, str, Change]]:
        """Changes of a value, those of its numbers only where these are wanted."""
        if x.dtype != torch.bool and masks(x):
            yield "mask", "1 everywhere: nothing is masked", torch.ones_like
        if x.is_complex():
            yield "sign", "conjugated", torch.conj_physical
        elif not x.is_floating_point():
            yield from _attempted(self, whole(x))
        elif numbers:
            yield from _attempted(self, amounts(tuple(x.shape), self.sizes))
        yield from _attempted(self, places(tuple(x.shape)))
        if x.is_floating_point():
            yield from _attempted(self, statistics(tuple(x.shape)))


def _places(nodes: Sequence[Node]) -> dict[int, Any]:
    """Which of the operations that a line runs at a time each is, by its number.

    A run of a line ends where another line's operations come. What repeats itself within one may be a loop of this line
    alone or a chain of products: there, and in the backward, which has no lines, operations of equal numbers are alike.
    """
    found = dict[int, Any]()
    for site, run in itertools.groupby(nodes, key=operator.attrgetter("site")):
        several = [*run]
        ops = [node.op for node in several]
        period = next(n for n in range(1, len(ops) + 1) if len(ops) % n == 0 and ops[n:] == ops[: len(ops) - n])
        for k, node in enumerate(several):
            numbers = str([a for a in node.args if not isinstance(a, Ref)])
            found[node.id] = k if site and period == len(ops) else (k % period if site else 0, numbers)
    return found


@cache
def _assigned(site: str) -> str:
    """The variable that a line of the reference sets, or nothing."""
    try:
        (statement,) = ast.parse(site.partition(": ")[2]).body
    except (SyntaxError, ValueError):  # a part of a statement
        return ""
    (target, *others) = statement.targets if isinstance(statement, ast.Assign) else [None]
    return target.id if isinstance(target, ast.Name) and not others else ""


def mutations(c: Context) -> Iterator[Mutation]:
    """Every mutation of a part of a recorded golden, the usual ones first."""
    part, groups = c.part, c.groups()
    made = [ids for ids in groups if part.nodes[ids[0]].func not in GIVEN]
    ends = [i for ids in groups if 1 < len(ids) <= 8 for i in _ends(ids)]
    usual = (
        exchanged,
        exchanged_numbers,
        parts,
        along,
        variances,
        composites,
        function_of_terms,
        moved_points,
        centres,
    )
    rare = (
        carried_over,
        unscaled,
        overflowing,
        beyond_the_row,
        between,
        regrouped,
        regrouped_inside,
        reflections,
        backwards,
    )
    ways: Iterator[Way] = itertools.chain(
        *(_attempted(c, generator(c)) for generator in usual),
        *(_attempted(c, change_result(c, ids)) for ids in groups),
        *(_attempted(c, change_operation(c, ids)) for ids in made),
        *(_attempted(c, generator(c)) for generator in rare),
        *(_attempted(c, change(c, [i])) for i in ends for change in (change_result, change_operation)),
        *(_attempted(c, generator(c)) for generator in (in_tiles, in_a_row)),
    )
    for kind, says, edits, *rank in (way for way in ways if way[2]):
        kind = "mask" if edits.keys() <= c.only_masks and kind != "precision" else kind
        yield Mutation(kind, says, edits, *rank)


def _ends(ids: list[int]) -> list[int]:
    """The first operations of a loop, and the last."""
    return [*ids[:-1][: 3 if len(ids) <= 4 else 1], ids[-1]]


def _attempted(c: Context, ways: Iterable[Way]) -> Iterator[Way]:
    """These, up to one that cannot be made for this part, which ends no search and is kept in the context's errors."""
    with collected(c.errors, "a mutation could not be made"):
        yield from ways


def for_each(
    items: Callable[[Context], Iterable[Any]],
) -> Callable[[Callable[[Context, Any], Iterator[Way]]], Callable[[Context], Iterator[Way]]]:
    """Makes a generator for one of `items` one for all of them, which goes on with the next where that raises."""

    def for_all(generator: Callable[[Context, Any], Iterator[Way]]) -> Callable[[Context], Iterator[Way]]:
        @wraps(generator)
        def ways(c: Context) -> Iterator[Way]:
            for item in items(c):
                yield from _attempted(c, generator(c, item))

        return ways

    return for_all


def operations(*names: str) -> Callable[[Context], Iterator[Node]]:
    """The operations of a part that are called so."""
    return lambda c: (node for node in c.part.nodes if node.op in names)


@for_each(lambda c: c.loops())
def carried_over(c: Context, ids: list[int]) -> Iterator[Way]:
    """What a line of a loop gives is that of the time before, or added to that, as in a buffer that is not cleared."""
    if c.real(ids[0]):
        nodes, pairs = c.part.nodes, list(itertools.pairwise(ids))
        takes = [c.called(p) for p in nodes[ids[0]].parents if p in c.part.given and p in c.part.names]
        name = c.called(*ids) + f" with {' and '.join(takes)}" * bool(takes)
        added = {i: Edit(operator.add, (Ref(i), Ref(j))) for j, i in pairs}
        yield "stale", f"{name} is added to that of the time before", added, 1
        before = {i: Edit(partial(again, nodes[j]), nodes[j].args) for j, i in pairs}
        yield "stale", f"{name} is that of the time before", before, 1


def change_result(c: Context, ids: list[int]) -> Iterator[Way]:
    """What operations give, or are given, changed."""
    part, i = c.part, ids[-1]
    x, node = part.values[i], part.nodes[i]
    name = c.called(*ids)
    given, last, real = node.func in GIVEN, i == part.target, x.is_floating_point()
    plain, name = name, name + ", as used here," * (given and not last and i in part.names)  # else it is as observed
    moved = node.op in MOVES - {"getitem", "slice", "select"} and not last
    for kind, what, change in c.changes(x, numbers=not (moved and real)):
        kind = "drop_term" if kind == "zero" and not last else kind
        by_one = kind == "constant" or what in ("one more", "one less")
        kind = "ddof" if by_one and ids[0] in c.divisors else kind
        yield (
            kind,
            f"{name} is {what}",
            edit_results(ids, change),
            1 + (kind in RARE_KINDS or what.endswith("with zeros")),
        )
    for by in (sign * 2**k for k in range(1, 8) for sign in (1, -1)) if x.dtype in INTEGER_DTYPES else ():
        yield "shift", f"{name} is {_by(by)}", edit_results(ids, partial(operator.add, by)), 2  # a page or a block more
    for kind, what, change in addressed(tuple(x.shape), c.sizes) if given and x.dtype != torch.bool else ():
        yield kind, f"{name} is {what}", edit_results(ids, change), 2
    for n in {c.largest // max(1, x.numel()), *c.sizes} - {1} if (given or last) and x.numel() < c.largest else ():
        for old, new in ((n, n - 1), (n - 1, n)) if real else ():
            yield "ddof", f"{name} is over {new}, not {old}", edit_results(ids, partial(operator.mul, old / new))
    if x.dtype != torch.bool and not x.is_complex() and everywhere(lambda x: (x == x.round()) & x.isfinite(), x):
        for kind, what, change in in_bits(x):
            yield "precision" if last else kind, f"{name} is {what}", edit_results(ids, change)
    for function in (ON_TOP if last else ON_TOP[:2]) if real and not moved else ():
        yield (
            "function",
            f"{function} is taken of {plain}",
            edit_results(ids, OTHER_FUNCTIONS[function]),
            1 if last else 2,
        )
    for other in c.alike(i) if given or last else ():
        kind = c.mistaken(i, other)
        yield kind, f"{c.called(other)} stands in place of {plain}", _copied(ids, other), 1 + (kind in RARE_KINDS)


def change_operation(c: Context, ids: list[int]) -> Iterator[Way]:
    """What operations take is changed, they are left out, or others run in their place."""
    what = "each " * (len(ids) > 1) + c.operation(*ids)
    for j in _operands(c, ids[0]):
        yield from _attempted(c, change_operand(c, ids, what, j))
    for ways in (other_operands, other_operations, change_reduction, lost_updates, padded):
        yield from _attempted(c, ways(c, ids, what))
    for j in range(len(c.part.nodes[ids[0]].args)):
        yield from _attempted(c, other_arguments(c, ids, what, j))


def _operands(c: Context, i: int) -> dict[int, Tensor]:
    """The tensors that an operation takes, by the places of its arguments."""
    values = {j: c.part.values[a.id] for j, a in enumerate(c.part.nodes[i].args) if isinstance(a, Ref)}
    return {j: x for j, x in values.items() if isinstance(x, Tensor)}


def _names(c: Context, ids: list[int]) -> dict[int, str]:
    """What these are called in a sentence."""
    nodes = c.part.nodes
    return {j: c.called(*(nodes[i].args[j].id for i in ids)) for j in _operands(c, ids[0])}


def change_operand(c: Context, ids: list[int], what: str, j: int) -> Iterator[Way]:
    """Operations are left out, or what they take at place `j` is taken twice, or along another dimension."""
    part, i = c.part, ids[0]
    node, x, a, name = part.nodes[i], part.values[i], _operands(c, i)[j], _names(c, ids)[j]
    kind = LEFT_OUT.get(node.op, "function")
    others = [k for k, ref in enumerate(node.args) if isinstance(ref, Ref) and k != j]
    if node.op == "mul" and any(masks(*(part.values[part.nodes[n].args[k].id] for n in ids)) for k in others):
        kind = "mask"
    elif node.op in ("add", "sub") and not a.is_floating_point():
        kind = "shift"
    moves = kind in ("permute", "shift")  # of whole numbers too
    if kind and a.dtype == x.dtype and (a.is_floating_point() or moves) and node.op not in PRODUCTS:
        sign = -1 if node.op == "sub" and j == 1 else 1
        says = f"{what} is left out: {name} passes {'as it is' if sign > 0 else 'with the other sign'}"
        yield kind, says, _instead(ids, partial(_passed, j=j, sign=sign, shape=x.shape))
    if node.op in ("mul", "add", "sub"):
        twice = _instead(ids, partial(_taken_twice, j=j, node=node))
        yield "factor" if node.op == "mul" else "scale", f"{what}: {name} is taken twice", twice
    long = [d + x.ndim - a.ndim for d, n in enumerate(a.shape) if n > 1]
    for d in (d for d, n in enumerate(x.shape) if len(long) == 1 < n and d != long[0] and node.op in ARITHMETIC):
        index = (torch.arange(x.shape[d]) % a.numel()).view([-1 if k == d else 1 for k in range(x.ndim)])
        along_it = argument(part, ids, j, partial(_elements, index=index))
        yield "axis", f"{what}: {name} is applied along dimension {d}, not {long[0]}", along_it


def other_operands(c: Context, ids: list[int], what: str) -> Iterator[Way]:
    """Operations take other results, or two that they take in each other's place."""
    part, node = c.part, c.part.nodes[ids[0]]
    for p in {p for p in node.parents if len(part.users.get(p, ())) > len(ids) and isinstance(part.values[p], Tensor)}:
        for other in c.alike(p):
            says = f"{what} takes {c.called(other)} in place of {c.called(p)}"
            yield c.mistaken(p, other), says, _taking(part, ids, {p: other}), 2
    names = _names(c, ids)
    if len(names) == 2 and node.op not in ("mul", "add"):
        j, k = names
        order = [k if n == j else j if n == k else n for n in range(len(node.args))]
        swapped = _instead(ids, lambda *args: again(node, *(args[n] for n in order)))
        yield "sign" if node.op == "sub" else "swap", f"{what}: {names[j]} and {names[k]} are exchanged", swapped


def other_operations(c: Context, ids: list[int], what: str) -> Iterator[Way]:
    """Other operations run in place of these, or take another of several parts."""
    part, i = c.part, ids[0]
    node, x, tensors = part.nodes[i], part.values[i], _operands(c, i)
    if node.op in OPPOSITE:
        opposite = OPPOSITE[node.op]
        kind = "sign" if node.op in ("add", "sub") else "mask" if x.dtype == torch.bool else "function"
        yield kind, f"{opposite} in place of {what}", _instead(ids, getattr(torch, opposite))
    real = x.is_floating_point() and node.op in FUNCTIONS | SELECTIONS
    if real and [*tensors] == [0] and tensors[0].shape == x.shape:
        for name, function in OTHER_FUNCTIONS.items():
            yield "function", f"{name} in place of {what}", _instead(ids, partial(_applied, function))
    if node.op == "getitem":
        for k in {*range(len(part.values[node.parents[0]]))} - {node.args[1]}:
            yield "swap", f"{what} takes part {k}, not {node.args[1]}", argument(part, ids, 1, constant(k))


def lost_updates(c: Context, ids: list[int], what: str) -> Iterator[Way]:
    """Sums by index that lose some of their terms."""
    node = c.part.nodes[ids[0]]
    by_count = node.op == "embedding_dense_backward" and node.args[4]
    added = node.op in ("index_add", "scatter_add", "embedding_dense_backward") and not by_count
    if added or (node.op == "index_put" and True in node.args[3:4]):
        for tile in (0, 32, 64, 128, 256):
            each = f" in each {tile}" if tile else ""  # of which a block adds up, while blocks come one after the other
            says = f"{what} loses updates: of those of one place{each} the last survives"
            yield "race", says, _instead(ids, partial(_lossy, op=node.op, tile=tile))
    if node.op == "index_add":
        for which in dict(_terms_of_segments(c.part.values[node.args[2].id])):

            def fewer(*args: Any, which: str = which) -> Any:
                left = dict(_terms_of_segments(args[2])).get(which, args[2][:0])
                return again(node, *args[:3], args[3].index_fill(args[1], left, 0.0))

            yield "truncate", f"{what} leaves out {which} of each place", _instead(ids, fewer)


def other_arguments(c: Context, ids: list[int], what: str, j: int) -> Iterator[Way]:
    """Another number of the program's, or another option, as the argument `j` of operations."""
    node = c.part.nodes[ids[0]]
    number = node.args[j]
    if node.op in NUMBERED and is_number(number):
        yield from other_numbers(c, ids, j, number, what)
    elif isinstance(number, (bool, int)) and node.op in ALGORITHMS | POOLS | {"convolution"}:
        others = {not number} if isinstance(number, bool) else {0, 1, number + 1, number - 1, 2 * number} - {number}
        for new in others:
            says = f"{what} has the option {new} where the reference has {number}"
            kind = "scale" if node.op in TRANSFORMS else "other"
            yield kind, says, argument(c.part, ids, j, constant(new))


def _passed(*args: Any, j: int, sign: int, shape: torch.Size) -> Tensor:
    return (-args[j] if sign < 0 else args[j]).expand(shape).clone()


def _taken_twice(*args: Any, j: int, node: Node) -> Any:
    return again(node, again(node, *args), args[j])


def _elements(x: Tensor, index: Tensor) -> Tensor:
    return x.flatten()[index]


def _applied(function: Change, x: Tensor, *_: Any) -> Tensor:
    """A function of the first argument alone."""
    return function(x)


def _terms_of_segments(index: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Terms of sums by index, that a loop over those of one place leaves out."""
    in_order = index.sort(stable=True)
    place, values = torch.arange(len(index)), in_order.values.contiguous()
    before, end = place - torch.searchsorted(values, values), torch.searchsorted(values, values, right=True)
    yield "the first", in_order.indices[before == 0]
    yield "the last", in_order.indices[place + 1 == end]
    for n in (2**k for k in range(2, 8) if bool((before >= 2**k).any())):
        yield f"all but the first {n}", in_order.indices[before >= n]


def other_numbers(c: Context, ids: list[int], j: int, old: Any, what: str) -> Iterator[Way]:
    """Other numbers in the place of one of the program's, and of its complement to 1 on the same line."""
    op, sizes = c.part.nodes[ids[0]].op, c.sizes
    further: set[float] = set()
    if op == "arange":  # whose numbers say how long it is
        usual = {old + 1, old - 1}
    elif is_epsilon(op, old):
        usual = {0.0, *(10.0**-k for k in range(2, 13)), 2.0**-23}
    else:
        usual = {0.0, 1.0, -old, 2 * old, old / 2, 10 * old, old / 10, 1 - old, 2 - old, old + 1, old - 1, old * old}
        usual |= {*c.numbers, *((1 / old, abs(old) ** 0.5, abs(old) ** -0.5) if old else ())}
        if op not in ("pow", *THRESHOLDS):  # exponents have nothing to do with sizes; others are looked for
            usual |= {f for n in sizes for f in (old * n, old / n)}
            further = {f for n in sizes for f in (n, n**0.5, n**-0.5, 1 / n, old * n / (n - 1), old * n / (n + 1))}
            further |= {f for n in c.numbers for f in (old * n, old / n)}
    if is_epsilon(op, old) and op in ("add", "clamp_min", "clamp"):
        other = torch.clamp_min if op == "add" else torch.add
        words = "the larger of both, not the sum" if op == "add" else "the sum of both, not the larger"
        yield "eps", f"{what} has {words}", _instead(ids, lambda *args: other(args[1 - j], old)), 0
    if is_epsilon(op, old) and op == "add":
        roots = {k: i for i in ids for k in c.part.users.get(i, ()) if c.part.nodes[k].op == "rsqrt"}
        edits = {k: Edit(lambda x: 1.0 / (x.sqrt() + old), (c.part.nodes[i].args[1 - j],)) for k, i in roots.items()}
        yield "eps", f"{what} comes after the root", edits, 0
    nearest = partial(sorted, key=lambda new: abs(new - old))
    for new in (*nearest(usual - {old}), *nearest(further - usual - {old})):
        number = int(new) if isinstance(old, int) and new == int(new) else new
        kind, says = kind_of_number(op, old, new, sizes), f"{what} has {new:.6g} where the reference has {old:.6g}"
        rank, (edits, too) = 0 if kind == "eps" else 1 if new in usual else 3, numbered(c.part, ids, j, number)
        kind = "drop_term" if new in (0.0, 1.0) and too else kind  # of an average only one
        yield kind, says + too, edits, rank


def change_reduction(c: Context, ids: list[int], what: str) -> Iterator[Way]:
    """Sums and their like that leave something out, or count otherwise."""
    part, node = c.part, c.part.nodes[ids[0]]
    if node.op not in REDUCTIONS:
        return
    x = part.values[node.parents[0]]
    dims = _dims(node, part.values)
    count = _summed(node, part.values)
    if len(dims) == 1 and node.op in ("sum", "mean", "amax", "amin"):
        yield from padding(c, ids, what, dims[0] - x.ndim)
    if node.op == "mean" and count > 1:
        for n in {1, count - 1, *tiled(count)}:
            kind = "ddof" if n == count - 1 else "scale"
            yield (
                kind,
                f"{what}: over {n}, not {count}",
                edit_results(ids, partial(_over_another_count, count=count, n=n)),
                1 + (n > count),
            )
    if node.op == "var_mean" and count > 1:
        unbiased = node.kwargs.get("correction", node.args[2] if len(node.args) > 2 else 1)
        firsts = [u for u in part.users.get(node.id, ()) if part.nodes[u].args[1] == 0]
        factor = (count - 1) / count if unbiased else count / (count - 1)
        says = f"the variance is over {count if unbiased else count - 1}"
        yield "ddof", says, edit_results(firsts, lambda v: v * factor)
        for up_to in tiled(count):
            says = f"the variance counts the padding up to {up_to}, which is zero less the mean"
            padded = partial(_variance_of_padded, share=(up_to - count) / count)
            yield "mask", says, dict.fromkeys(firsts, Edit(padded, (Ref(node.id),))), 2
    if node.op in ("cumsum", "cumprod"):
        for tile in (2**q for d in dims for q in range(1, (x.shape[d] - 1).bit_length())):
            anew = _instead(ids, partial(_by_tile, node=node, tile=tile))
            yield "stale", f"{what} begins anew in each tile of {tile}", anew


def _over_another_count(y: Tensor, count: int, n: int) -> Tensor:
    return y * count / n


def _variance_of_padded(moments: tuple[Tensor, Tensor], share: float) -> Tensor:
    """The variance of a row that `share` as many zeros less the mean are counted with, of its variance and mean."""
    return moments[0] + share * moments[1] ** 2


def _by_tile(x: Tensor, d: int, node: Node, tile: int) -> Tensor:
    return torch.cat([again(node, y, d) for y in x.split(tile, d)], d)


def tiled(n: int) -> list[int]:
    """To what a kernel may pad a dimension: the next power of two, and whole tiles."""
    return sorted({1 << (n - 1).bit_length(), *(-(-n // tile) * tile for tile in (8, 16, 32, 64, 128))} - {n})


def padding(c: Context, ids: list[int], what: str, d: int) -> Iterator[Way]:
    """Reductions over a padded dimension, in whose padding something is zero that is not the reduction's own."""
    for up_to in tiled(c.part.values[c.part.nodes[ids[0]].parents[0]].shape[d]):
        for ways in zip(*(_padded(c, i, d, up_to) for i in ids), strict=False):
            says = f"{what} counts the padding of dimension {d} up to {up_to}, where {c.called(ways[0][0])} is zero"
            yield "mask", says, {i: edit for i, (_, edit) in zip(ids, ways, strict=True)}, 2


def _padded(c: Context, reduction: int, d: int, up_to: int) -> Iterator[tuple[int, Edit]]:
    """What may be zero in the padding, and the reduction with what the operations behind it give there."""
    part, nodes, node = c.part, c.part.nodes, c.part.nodes[reduction]
    x, n = node.parents[0], part.values[node.parents[0]].shape[d]

    long = {i for i, v in part.values.items() if isinstance(v, Tensor) and v.ndim >= -d and v.shape[d] == n}
    computed = {i for i in long if nodes[i].op in (ARITHMETIC | FUNCTIONS | SELECTIONS)}
    found = [x] if x in computed else []
    for i in found:  # which grows meanwhile
        found += [p for p in nodes[i].parents if p in computed and p not in found]
    taken_in = {p for i in found for p in nodes[i].parents}
    sides, loaded = sorted(taken_in - long), sorted((taken_in & long) - {x})

    def run(elements: Tensor, *beside: Any, zero: int) -> Any:
        of = dict(zip(sides, beside, strict=True))
        of |= {i: torch.zeros_like(part.values[i].narrow(d, 0, 1)) for i in loaded if i not in found or i == zero}
        for i in (i for i in sorted(found) if i != zero):
            of[i] = again(nodes[i], *(of[a.id] if isinstance(a, Ref) else a for a in nodes[i].args))
        more = of[x].expand(*elements.shape[: elements.ndim + d], up_to - n, *elements.shape[elements.ndim + d + 1 :])
        y = again(node, torch.cat([elements, more], d), *node.args[1:])
        return y * up_to / n if node.op == "mean" else y

    for zero in reversed(loaded):  # the nearest first: of a loop, those of one place in every pass
        yield zero, Edit(partial(run, zero=zero), (Ref(x), *map(Ref, sides)))


@for_each(operations("var_mean"))
def variances(c: Context, node: Node) -> Iterator[Way]:
    """Variances, which come with a mean, and so are no tensor of their own."""
    yield from change_reduction(c, [node.id], "var_mean")
    nodes, dims = c.part.nodes, _dims(node, c.part.values)
    parts = [nodes[k] for k in c.part.users.get(node.id, ())]
    about_zero = {
        k.id: Edit(partial(_mean_square, dims=dims, shape=k.shape), node.args[:1]) for k in parts if not k.args[1]
    }
    means = [k.id for k in parts if k.args[1]]
    means += [n.id for n in nodes if n.op == "mean" and n.parents == node.parents and _dims(n, c.part.values) == dims]
    yield "function", "the variance is that about zero", about_zero
    nothing = about_zero | edit_results(means, torch.zeros_like)
    yield "function", "the variance is that about zero, and no mean is taken from what is normalised", nothing


def _mean_square(x: Tensor, dims: list[int], shape: Sequence[int]) -> Tensor:
    return x.square().mean(dims, True).view(shape)


def padded(c: Context, ids: list[int], what: str) -> Iterator[Way]:
    """Padding with something else than zeros, or with these elsewhere: on one side, as if causal, or on both."""
    node = c.part.nodes[ids[0]]
    if node.op not in ("convolution", "constant_pad_nd"):
        return
    own = node.op == "constant_pad_nd"
    pads = list(node.args[1]) if own else [p for p in reversed(node.args[4]) for _ in (0, 1)]

    def run(x: Tensor, *args: Any, mode: str = "", pads: list[int] = pads) -> Any:
        fill = args[1] if own and len(args) > 1 else None
        x = _beyond(x, pads, PADDINGS[mode]) if mode else F.pad(x, pads, value=fill)
        return x if own else again(node, x, *args[:3], [0] * len(args[3]), *args[4:])

    for mode in PADDINGS:
        yield "other", f"{what} is padded by {mode}, not by zeros", _instead(ids, partial(run, mode=mode))
    for at in range(0, len(pads), 2):
        before, both = pads[at], sum(pads[at : at + 2])
        for new in {*range(both + 1)} - {before}:
            says = f"{what} is padded by {new} before and {both - new} behind, not {before} and {both - before}"
            yield "shift", says, _instead(ids, partial(run, pads=[*pads[:at], new, both - new, *pads[at + 2 :]]))


def _beyond(x: Tensor, pads: list[int], mode: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Padding of the last dimensions, as torch counts them, with elements that `mode` takes for places outside."""
    for d, (before, behind) in enumerate(zip(pads[::2], pads[1::2], strict=True)):
        n = x.shape[-1 - d]
        x = x.index_select(x.ndim - 1 - d, mode(torch.arange(-before, n + behind), n))
    return x


@for_each(lambda c: c.names.items())
def reflections(c: Context, composite: tuple[int, str]) -> Iterator[Way]:
    """Other elements in the padding of what torch pads with its own."""
    i, name = composite
    inside, taken = c.composite(i)
    ends = [c.part.nodes[k].args for k in sorted(inside, reverse=True) if c.part.nodes[k].op == "arange"]
    if name.startswith(("reflection_pad", "replication_pad")) and len(taken) == 1 and ends:
        (x,) = taken
        shape = c.part.values[x].shape
        pads = [n for d, (first, end) in enumerate(ends) for n in (-first, end - shape[-1 - d])]
        for mode, places in PADDINGS.items():
            kind = "shift" if "reflect" in mode else "other"
            yield kind, f"{mode} in place of {name}", {i: Edit(partial(_beyond, pads=pads, mode=places), (Ref(x),))}


def _folded(at: Tensor, period: int, last: int) -> Tensor:
    """Places that are mirrored, again and again."""
    return torch.minimum(at.remainder(period), last - at.remainder(period))


def _lines(c: Context) -> Iterable[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Dimensions, and the reductions over them: those of a line, and all."""
    lines: dict[Any, list[int]] = {}
    for node in operations(*REDUCTIONS)(c):
        dims = tuple(_dims(node, c.part.values))
        for key in ((node.site, dims), ("", dims)):
            lines.setdefault(key, []).append(node.id)
    return dict.fromkeys((dims, tuple(ids)) for (_, dims), ids in lines.items())


@for_each(_lines)
def along(c: Context, line: tuple[tuple[int, ...], tuple[int, ...]]) -> Iterator[Way]:
    """Reductions that run over other dimensions, any of them: those of a line, and all alike.

    Normalisations differ in just that: batch, layer, instance and group (Wu and He, "Group Normalization", 2018).
    """
    part, (old, ids) = c.part, line
    ndim = part.values[part.nodes[ids[0]].parents[0]].ndim
    smaller = any(len(part.nodes[k].shape) < ndim for i in ids for k in (i, *part.users.get(i, ())))
    for over in (some for count in range(ndim) for some in itertools.combinations(range(ndim), count + 1)):
        for kept in (False, True)[: 1 + smaller] if over != old else ():
            edits = {k: edit for i in ids for k, edit in _along(part, i, list(over), kept).items()}
            words = f"runs over dimension {', '.join(map(str, over))}, not {', '.join(map(str, old))}"
            yield "axis", f"{c.composite_names.get(ids[0], c.operation(ids[0]))} {words}", edits


def _along(part: Part, i: int, dims: list[int], kept: bool) -> dict[int, Edit]:
    """A reduction along other dimensions; a division by how many they were is by how many they are.

    `kept`: what the reference makes smaller is of length 1 there, and goes to where it belongs.
    """
    node, x = part.nodes[i], part.values[part.nodes[i].parents[0]]
    over: Any = dims[0] if len(node.args) > 1 and isinstance(node.args[1], int) else dims
    old = _dims(node, part.values)

    def run(x: Tensor, *_: Any) -> Any:
        if len(node.args) == 1:  # over all, to a number
            return getattr(torch, node.op)(x, dim=over, keepdim=True)
        y = again(node, x, over, *node.args[2:])
        if kept and not node.shape:  # for each slice one, along the last dimensions
            return y
        whole = y.ndim == x.ndim or (y.ndim == len(node.shape) and not kept)
        return y if whole else dropped(again(node, x, over, True), node)

    def moments(x: Tensor, user: Node) -> Any:
        y = call(node, [x, over, *node.args[2:3]], node.kwargs | {"keepdim": True})[user.args[1]]
        return y if y.ndim == len(user.shape) else dropped(y, user)

    def dropped(y: Tensor, result: Node) -> Tensor:
        """What was kept, for each element of a result without the dimensions that it was to run over.

        One number is taken wherever it goes, and so is what is in its place.
        """
        if kept or not result.shape:
            return y
        return y.expand(x.shape)[tuple(0 if d in old else slice(None) for d in range(x.ndim))]

    users = [part.nodes[u] for u in part.users.get(i, ())]
    if node.op == "var_mean":
        return {u.id: Edit(partial(moments, user=u), (node.args[0],)) for u in users}
    divided = (u for u in users if node.op == "sum" and u.op == "div")
    counted = [u.id for u in divided if u.args[1] == _summed(node, part.values)]
    return {i: Edit(run)} | argument(part, counted, 1, lambda _: math.prod(x.shape[d] for d in dims))


@for_each(_lines)
def in_tiles(c: Context, line: tuple[tuple[int, ...], tuple[int, ...]]) -> Iterator[Way]:
    """Reductions of a line that run over each tile of a dimension by itself, or whose tiles' means are averaged."""
    part, (dims, ids) = c.part, line
    nodes = [part.nodes[i] for i in ids]
    shapes = {tuple(part.values[node.parents[0]].shape) for node in nodes}
    if len(dims) != 1 or len(shapes) != 1 or any(node.op not in TILED for node in nodes):
        return
    (d,), n = dims, shapes.pop()[dims[0]]
    name = c.composite_names.get(ids[0], c.operation(ids[0]))
    kept = all(part.values[i].ndim == part.values[node.parents[0]].ndim for i, node in zip(ids, nodes, strict=True))
    for tile in _tiles(n):
        if kept:
            edits = {i: Edit(partial(_each_tile, node=part.nodes[i], d=d, tile=tile)) for i in ids}
            yield "axis", f"{name} runs over each {tile} of dimension {d} by itself", edits, 2
        means = [node for node in nodes if node.op == "mean"] if n % tile else []
        edits = {node.id: Edit(partial(_mean_of_means, node=node, d=d, tile=tile)) for node in means}
        yield "factor", f"{name} is that of the means of each {tile} of dimension {d}", edits, 2


def _tiles(n: int) -> list[int]:
    """Lengths of tiles of a dimension of n: powers of two, and all up to half of a short one."""
    return sorted({2**q for q in range(1, n.bit_length()) if 2**q < n} | set(range(2, min(n // 2, SHORT) + 1)))


def _each_tile(x: Tensor, *args: Any, node: Node, d: int, tile: int) -> Tensor:
    return torch.cat([again(node, part, *args).expand(part.shape) for part in x.split(tile, d)], d)


def _mean_of_means(x: Tensor, *args: Any, node: Node, d: int, tile: int) -> Tensor:
    return torch.stack([again(node, part, *args) for part in x.split(tile, d)]).mean(0)


@for_each(lambda c: itertools.combinations(_exchangeable(c), 2))
def exchanged(c: Context, pair: tuple[int, int]) -> Iterator[Way]:
    """Two given tensors of one shape, or of indices, in each other's place."""
    part, values, (i, j) = c.part, c.part.values, pair
    first = min(part.users[i] + part.users[j])
    apart = all(k in part.given or k < first for k in (i, j))  # both are there when one is taken
    if apart and values[i].shape == values[j].shape and values[i].dtype == values[j].dtype:
        edits = _taking(part, {*part.users[i], *part.users[j]}, {i: j, j: i})
        yield "swap", f"{c.called(i)} and {c.called(j)} are exchanged", edits


def _exchangeable(c: Context) -> list[int]:
    """What is given, and computed indices."""
    part, values = c.part, c.part.values
    whole = (i for i in c.computed if not c.real(i) and not values[i].is_complex() and values[i].dtype != torch.bool)
    return [i for i in (*part.given, *whole) if i in part.users and values[i].numel() > 1]


@for_each(lambda c: itertools.combinations(c.numbered().items(), 2))
def exchanged_numbers(c: Context, pair: tuple[Any, Any]) -> Iterator[Way]:
    """Two numbers of one kind of operation in each other's place."""
    ((op, j, a), ids), ((other, k, b), others) = pair
    if (op, j) == (other, k):
        edits = argument(c.part, ids, j, constant(b)) | argument(c.part, others, j, constant(a))
        yield "swap", f"{a:.6g} and {b:.6g} of {op} are exchanged", edits


def _splits(c: Context) -> Iterable[tuple[int, dict[int, list[int]]]]:
    """Into how many parts something is split, and the operations that take each of these."""
    splits: dict[int, dict[int, list[int]]] = {}
    for node in (node for node in operations("getitem")(c) if c.part.nodes[node.parents[0]].op in SPLITS):
        count = len(c.part.values[node.parents[0]])
        splits.setdefault(count, {}).setdefault(node.args[1], []).append(node.id)
    return splits.items()


@for_each(_splits)
def parts(c: Context, split: tuple[int, dict[int, list[int]]]) -> Iterator[Way]:
    """Parts of what is split that are taken for each other, wherever something is split into so many."""
    count, ids = split
    for a, b in itertools.combinations(range(count), 2) if count < FEW_PARTS else ():
        edits = argument(c.part, ids.get(a, []), 1, constant(b))
        edits |= argument(c.part, ids.get(b, []), 1, constant(a))
        yield "swap", f"parts {a} and {b} of {count} are taken for each other", edits if len(edits) > 1 else {}


def _counts(c: Context) -> Iterable[tuple[int, ...]]:
    """Each operation that counts, and all."""
    counts = tuple(i for i in c.computed if c.part.nodes[i].op == "arange")
    return {(i,) for i in counts} | {counts}


@for_each(_counts)
def moved_points(c: Context, some: tuple[int, ...]) -> Iterator[Way]:
    """Indices that are coordinates of other points, or count from elsewhere."""
    for by in (0.5, -0.5, *(sign * n for n in c.sizes for sign in (-1, 1))):
        why = "for centres and corners of pixels" if isinstance(by, float) else "where it begins elsewhere"
        says = f"{'each' if len(some) > 1 else 'the'} result of arange is {_by(by)}, as {why}"
        yield "shift", says, edit_results(some, partial(operator.add, by)), 2


def centres(c: Context) -> Iterator[Way]:
    """Coordinates of the corners of pixels in place of their centres."""
    corners, asymmetric = dict[int, Edit](), dict[int, Edit]()
    for node in (node for node in operations("sub")(c) if node.args[1] == 0.5):
        scaled = c.part.nodes[node.parents[0]]
        centre = c.part.nodes[scaled.parents[0]] if scaled.op == "mul" and is_number(scaled.args[1]) else node
        if centre.op == "add" and centre.args[1] == 0.5 and centre.shape and centre.shape[0] > 1:
            share, n = scaled.args[1], centre.shape[0]
            for edits, by in ((asymmetric, share), (corners, (share * n - 1.0) / (n - 1.0))):
                edits[node.id] = Edit(partial(operator.mul, by), (centre.args[0],))
    yield "shift", "corners of images lie on each other, not the corners of their pixels (align_corners)", corners, 2
    yield "shift", "coordinates are those of corners of pixels, not of their centres", asymmetric, 2


@for_each(lambda c: enumerate(c.part.nodes[c.part.target].shape))
def backwards(c: Context, dimension: tuple[int, int]) -> Iterator[Way]:
    """What runs along a dimension, from its other end."""
    part, (d, n) = c.part, dimension
    taken = [(i, part.values[i].shape) for i in part.given if i in part.users]
    edits = {i: Edit(partial(torch.flip, dims=[x.index(n)]), (Ref(i),)) for i, x in taken if x.count(n) == 1}
    edits |= edit_results([part.target], partial(torch.flip, dims=[d])) if edits else {}
    yield "flip", f"{c.called(part.target)} is computed from the other end of dimension {d}", edits, 2


@for_each(lambda c: (c.part.nodes[p] for n in operations("exp")(c) for p in n.parents if c.part.nodes[p].op == "sub"))
def unscaled(c: Context, less: Node) -> Iterator[Way]:
    """A softmax in tiles, by the largest number so far, that does not correct what earlier tiles gave for a larger one.

    Or one whose tiles are split among programs, each by its own largest number, and added up without a correction.
    The correction is from Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
    """
    part, nodes = c.part, c.part.nodes
    x, top = (part.values[p] for p in (less.parents[0], less.parents[-1]))
    alone = [d for d, n in enumerate(x.shape) if n > 2 and top.ndim == x.ndim and top.shape[d] == 1]
    exponential = next(u for u in part.users[less.id] if nodes[u].op == "exp")
    sums = [u for u in part.users.get(exponential, ()) if nodes[u].op == "sum"][:1]

    def early(shifted: Tensor, x: Tensor, tile: int, d: int, how: str, normal: bool, node: Node) -> Tensor:
        largest = torch.stack([part.amax(d) for part in x.split(tile, d)], d)
        largest = largest.cummax(d).values if how == RUNNING else largest
        larger = x.amax(d, True) - largest.repeat_interleave(tile, d).narrow(d, 0, x.shape[d])
        terms = torch.exp(shifted + torch.where(larger.isfinite(), larger, 0.0))  # of a masked tile nothing is left
        if how == MEAN:
            terms = torch.cat([(part / part.sum(d, True)).nan_to_num(0.0) for part in terms.split(tile, d)], d)
        if node.op == "sum":
            return again(node, terms, *node.args[1:])
        return terms / terms.sum(d, True) if normal else terms

    def edits(ids: list[int], how: dict[str, Any]) -> dict[int, Edit]:
        return {i: Edit(partial(early, **how, node=nodes[i]), (Ref(less.id), less.args[0])) for i in ids}

    sizes = [(d, tile) for d in alone for tile in _tiles(x.shape[d])]
    for (d, tile), when in itertools.product(sizes, (RUNNING, SPLIT, MEAN)):
        at: dict[str, Any] = {"tile": tile, "d": d, "how": when, "normal": when == MEAN}
        ways = {"a softmax": edits([exponential], at)}
        if when != MEAN:
            ways["the sum of a softmax"] = edits(sums, at)
            ways["a softmax, divided by its sum"] = {} if sums else edits([exponential], at | {"normal": True})
            ways["what a softmax weighs"] = ways["a softmax"] | edits(sums, at | {"tile": x.shape[d]})
        for what, some in ways.items():
            yield "factor", f"{what}, in tiles of {tile}, {when}", some, 2


@for_each(operations("sum", "mean", "amax", "amin", "mm", "bmm"))
def beyond_the_row(c: Context, node: Node) -> Iterator[Way]:
    """Rows that are read on to a whole tile without a mask: behind their end is the next one, and zeros behind all."""
    part, values = c.part, c.part.values
    n = values[node.parents[0]].shape[-1] if values[node.parents[0]].ndim else 0
    product = node.op in PRODUCTS
    if product and part.nodes[node.parents[1]].op not in ("t", "transpose", "permute"):
        return  # what is behind the second factor's rows is not known
    if not product and _dims(node, values) != [values[node.parents[0]].ndim - 1]:
        return
    for up_to in tiled(n) if n > 1 else ():
        says = f"{c.operation(node.id)} reads {up_to} elements of each row of {n}: the first of the next one too"
        yield "mask", says, {node.id: Edit(partial(_read_on, node=node, n=n, up_to=up_to))}, 2


def _read_on(x: Tensor, *args: Any, node: Node, n: int, up_to: int) -> Any:
    def on(rows: Tensor) -> Tensor:
        memory = F.pad(rows.flatten(), (0, up_to))
        return memory.as_strided((rows.numel() // n, up_to), (n, 1)).reshape(*rows.shape[:-1], up_to)

    if node.op in PRODUCTS:
        return again(node, on(x), on(args[0].mT).mT)
    y = again(node, on(x), *args)
    return y * up_to / n if node.op == "mean" else y


@for_each(operations("amax"))
def overflowing(c: Context, top: Node) -> Iterator[Way]:
    """A softmax whose largest number is not subtracted: that shows only where exponents of the type end."""
    nodes, below = c.part.nodes, set(c.part.downstream(top.id))
    less = [k for k in below if nodes[k].op == "sub" and nodes[k].parents[-1] in below]
    exponentials = [u for k in less for u in c.part.users.get(k, ()) if nodes[u].op == "exp"]
    for name in ("float32", "float16") if exponentials else ():
        edits = edit_results([top.id], torch.zeros_like) | edit_results(exponentials, partial(_in_range, name=name))
        says = f"the largest is not subtracted before {c.operation(min(exponentials))}, whose result overflows {name}"
        yield "drop_term", says, edits


def _in_range(x: Tensor, name: str) -> Tensor:
    """Infinite beyond the largest number of a type, and zero below its smallest."""
    most, least = (getattr(torch.finfo(getattr(torch, name)), end) for end in ("max", "smallest_normal"))
    least *= torch.finfo(getattr(torch, name)).eps
    return torch.where(x > most, math.inf, torch.where(x < least, 0.0, x))


@for_each(lambda c: (i for i in c.part.given + c.computed if c.real(i)))
def between(c: Context, i: int) -> Iterator[Way]:
    """Several operations in a row that are left out."""
    for k in (k for k in c.later(i, 8) if Ref(i) not in c.part.nodes[k].args):
        says = f"{c.called(i)} stands in place of {c.called(k)}: what is between is left out"
        yield LEFT_OUT.get(c.part.nodes[k].op) or "function", says, _copied([k], i), 2


@for_each(lambda c: (i for i in c.part.given + c.computed if c.real(i)))
def in_a_row(c: Context, i: int) -> Iterator[Way]:
    """What is done between two values is done twice, or after what comes next.

    An eps outside of a root, a late bias, a norm of what was normalised, a mean that is taken off behind a window.
    """
    nodes = c.part.nodes
    for j in c.later(i, 3):
        single = Ref(i) in nodes[j].args
        what = c.operation(j) if single else f"what makes {c.called(j)} of {c.called(i)}"
        yield "other", f"what makes {c.called(j)} of {c.called(i)} is done twice", _in_a_row(c.part, j, j, (i, j)), 2
        for k in (k for k in c.later(j, 4) if nodes[k].op not in MOVES - {"where"}):
            added = [a for n in (nodes[j], nodes[k]) if n.op == "add" for a in n.args if is_number(a)]
            kind = "eps" if single and any(is_epsilon("add", a) for a in added) else "other"
            yield kind, f"{what} comes after {c.operation(k)}", _in_a_row(c.part, k, i, (j, k), (i, j)), 2


def _in_a_row(part: Part, end: int, start: int, *segments: tuple[int, int]) -> dict[int, Edit]:
    """In place of what `end` gives: these segments, each from a value to another, in a row on what `start` gives."""
    inside = [[n for n in part.downstream(i) if i < n <= k and k in part.downstream(n)] for i, k in segments]
    beside = sorted(
        {
            p
            for (i, _), some in zip(segments, inside, strict=True)
            for n in some
            for p in part.nodes[n].parents
            if p != i and p not in some
        }
    )

    def run(x: Any, *others: Any) -> Any:
        for (i, k), some in zip(segments, inside, strict=True):
            of = dict(zip(beside, others, strict=True)) | {i: x}
            for n in some:
                of[n] = call(part.nodes[n], filled(part.nodes[n].args, of), part.nodes[n].kwargs)
            x = of[k]
        return x

    return {end: Edit(run, (Ref(start), *map(Ref, beside)))}


@for_each(lambda c: (i for i in (*c.part.given, *c.computed) if c.real(i)))
def regrouped(c: Context, i: int) -> Iterator[Way]:
    """Groups and pairs taken otherwise: elements in another order between two operations."""
    part = c.part
    target, shape, users = part.nodes[part.target], part.nodes[i].shape, part.users.get(i, ())
    if len(users) < 2 and i not in part.given:
        return
    later = [k for k in c.later(i, 64) if part.nodes[k].op in ("add", "mul", "cat", "view") and k != target.id]
    slices = [part.nodes[k].args[1:] or (0,) for k in users if part.nodes[k].op == "slice"]
    for d, n, order, words in _otherwise(shape, slices):
        ends = later[-6:] + [target.id] * (target.shape[d : d + 1] == (n,))
        for k in (k for k in ends if k != i and k in part.downstream(i)):
            edits = edit_results([i], entries(d, order)) | edit_results([k], entries(d, _back, order))
            first, last = c.called(i), c.called(k)
            between = f"from {first} to {last}" if first != last else f"from one {first} to another"
            yield "permute", f"{between}, {words}", edits, 2


@for_each(lambda c: c.names.items())
def regrouped_inside(c: Context, composite: tuple[int, str]) -> Iterator[Way]:
    """The same, in one of torch's operations."""
    (i, name), part = composite, c.part
    inside, taken = c.composite(i)
    shapes = {p: part.nodes[p].shape for p in (i, *taken)}
    for d, n, order, words in _otherwise(shapes[i]) if len(inside) > 1 else ():
        dims = {p: d if shapes[p] == shapes[i] else shapes[p].index(n) for p in taken if n in (shapes[p] or ())}
        edits = _changed(part, inside, {p: entries(dim, order) for p, dim in dims.items()})
        last = edits.get(i, Edit(torch.clone, (Ref(i),)))
        back = Edit(partial(_reordered, last.run, entries(d, _back, order)), last.takes)
        yield "permute", f"in {name}, {words}", edits | {i: back}, 2


def _reordered(run: Callable[..., Any], back: Change, *args: Any) -> Tensor:
    return back(run(*args))


def _back(own: Tensor, order: Callable[[Tensor], Tensor]) -> Tensor:
    return order(own).argsort()


def _otherwise(
    shape: tuple[int, ...], slices: Iterable[Any] = ()
) -> Iterator[tuple[int, int, Callable[[Tensor], Tensor], str]]:
    """Dimensions, their lengths, or what is between two ends of slices in the order of other groups, in words too."""
    for d, n in enumerate(shape):
        taken = (slice(*[*both, None, None][:2]) for along, *both in slices if along % len(shape) == d)
        ends = {0, n}.union(*(each.indices(n)[:2] for each in taken))
        ends = ends if len(ends) <= FEW_PARTS else {0, n}
        for first, last in itertools.combinations(sorted(ends), 2):
            m = last - first
            of = f"dimension {d} of {n}" if m == n else f"{first} to {last - 1} of dimension {d}"
            for a in (a for a in range(2, m // 2 + 1) if m % a == 0):
                square, words = a * a == m, f"is taken as {a} x {m // a} in place of {m // a} x {a}"
                order = partial(_transposed_between, first=first, last=last, a=a)
                yield d, n, order, f"{of} {f'is transposed as {a} x {a}' if square else words}"


def _transposed_between(own: Tensor, first: int, last: int, a: int) -> Tensor:
    return torch.cat([own[:first], own[first:last].view(a, -1).T.flatten(), own[last:]])


@for_each(lambda c: c.names.items())
def composites(c: Context, composite: tuple[int, str]) -> Iterator[Way]:
    """Another function in place of one that torch has as a whole, of one tensor."""
    i, name = composite
    inside, frontier = c.composite(i)
    if len(frontier) == 1 < len(inside) and c.part.nodes[min(frontier)].shape == c.part.nodes[i].shape:
        others = {words: f for words, f in OTHER_FUNCTIONS.items() if words.lower().replace(" ", "_") != name}
        for words, f in others.items():  # and not the same with torch's own numbers
            yield "function", f"{words} in place of {name}", {i: Edit(f, (Ref(min(frontier)),))}, 0


@for_each(lambda c: (node for node in c.part.nodes if node.op in FUNCTIONS and len(node.parents) == 1))
def function_of_terms(c: Context, node: Node) -> Iterator[Way]:
    """A function of each term of a sum in place of the whole: norms are added, not their squares."""
    total = c.part.nodes[node.parents[0]]
    count = {"sum": 1, "mean": 1, "add": 2}.get(total.op, 0)
    if 0 < count <= len(total.parents):

        def run(*args: Any) -> Any:
            return again(total, *(again(node, x, *node.args[1:]) for x in args[:count]), *args[count:])

        says = f"{c.operation(node.id)} is taken of each term of {c.operation(total.id)}"
        yield "function", says, {node.id: Edit(run, total.args)}


def again(node: Node, *args: Any) -> Any:
    """What an operation gives for other arguments."""
    return call(node, args, node.kwargs)


def edit_results(ids: Iterable[int], change: Change) -> dict[int, Edit]:
    """`change` of what operations give."""
    return {i: Edit(change, (Ref(i),)) for i in ids}


def argument(part: Part, ids: Iterable[int], j: int, change: Callable[[Any], Any]) -> dict[int, Edit]:
    """`change` of the argument `j` of operations."""

    def run(*args: Any, node: Node) -> Any:
        return again(node, *args[:j], change(args[j]), *args[j + 1 :])

    return {i: Edit(partial(run, node=part.nodes[i])) for i in ids}


def constant(value: Any) -> Callable[[Any], Any]:
    """A change of anything to `value`."""
    return lambda _: value


def numbered(part: Part, ids: list[int], j: int, new: Any) -> tuple[dict[int, Edit], str]:
    """Another number as the argument `j`, and its complement to 1 where that stands on the same line, in words too."""
    node = part.nodes[ids[0]]
    c, edits, too = node.args[j], argument(part, ids, j, constant(new)), ""
    average = 0.0 < c < 1.0 and c != 0.5  # of 0 and 1 the complement means nothing: where an arange begins, for one
    for other in (n for n in part.nodes if n.site == node.site and n.op in NUMBERED and n.id not in ids and average):
        for k, a in enumerate(other.args):
            if is_number(a) and abs(a - (1.0 - c)) < 1e-12:
                edits |= argument(part, [other.id], k, constant(1.0 - new))
                too = f", and {1.0 - new:.6g} where it has {a:.6g}"
    return edits, too


def _instead(ids: Iterable[int], run: Callable[..., Any]) -> dict[int, Edit]:
    return dict.fromkeys(ids, Edit(run))


def _copied(ids: Iterable[int], other: int) -> dict[int, Edit]:
    """What another operation gives, in place of what these give."""
    return dict.fromkeys(ids, Edit(torch.clone, (Ref(other),)))


def _taking(part: Part, ids: Iterable[int], others: Mapping[int, int]) -> dict[int, Edit]:
    """Operations that take other results, by number, in place of some that they take."""
    args = tree_map_only(Ref, lambda r: Ref(others.get(r.id, r.id)), {k: part.nodes[k].args for k in ids})
    return {k: Edit(partial(again, part.nodes[k]), args[k]) for k in args}


def _changed(part: Part, ids: Iterable[int], changes: Mapping[int, Change]) -> dict[int, Edit]:
    """Operations for which some of what they take, by number, is changed."""

    def run(*args: Any, node: Node) -> Any:
        of = (changes.get(a.id) if isinstance(a, Ref) else None for a in node.args)
        return again(node, *(change(x) if change else x for change, x in zip(of, args, strict=True)))

    taking = {k for p in changes for k in part.users[p]}.intersection(ids)
    return {k: Edit(partial(run, node=part.nodes[k])) for k in taking}


def _lossy(*args: Any, op: str, tile: int) -> Tensor:
    """An addition that is not atomic: of the terms of one place, in each `tile`, the last survives."""
    if op == "embedding_dense_backward":  # the rows of a gradient, added up by their ids, but for the padding's
        rows, ids, count, padding = args[0].flatten(0, -2), args[1].flatten(), args[2], args[3]
        rows = rows * (ids != padding).unsqueeze(1)
        op, args = "index_add", (rows.new_zeros(count, rows.shape[1]), 0, ids, rows)
    x, *places, source = args[:3] if op == "index_put" else args[:4]
    index = list(places[0]) if op == "index_put" else [places[1]]
    d = next(k for k, i in enumerate(index) if i is not None) if op == "index_put" else int(places[0])  # of the source
    along = d if op == "scatter_add" else 0  # of the index
    lengths = {i.shape[along] for i in index if i is not None} | {source.shape[d]}
    tile = tile if tile and len(lengths) == 1 else max(lengths)
    split = [[i] * -(-max(lengths) // tile) if i is None else i.split(tile, along) for i in index]
    for *at, terms in zip(*split, source.split(tile, d), strict=True):
        empty = torch.zeros_like(x)
        if op == "index_put":
            x = x + torch.ops.aten.index_put.default(empty, at, terms)  # Tensor's own refuses None
        else:
            x = x + (empty.index_copy if op == "index_add" else empty.scatter)(d, at[0], terms)
    return x


def is_number(c: Any) -> bool:
    """Whether an argument is a finite number."""
    return isinstance(c, (int, float)) and not isinstance(c, bool) and math.isfinite(c)


def _dims(node: Node, values: Mapping[int, Any]) -> list[int]:
    """The dimensions of a reduction."""
    ndim = values[node.parents[0]].ndim
    over = node.args[1] if len(node.args) > 1 else None
    return sorted(d % ndim for d in ([over] if isinstance(over, int) else over or range(ndim)) if ndim)


def _summed(node: Node, values: Mapping[int, Any]) -> int:
    """How many elements a reduction makes one of."""
    return math.prod(values[node.parents[0]].shape[d] for d in _dims(node, values))


def summed_over(node: Node, values: Mapping[int, Any]) -> tuple[int, list[int]]:
    """Which argument holds what an operation adds up, or looks for the largest or smallest of, and its dimensions."""
    if node.op in ("sum", "mean", "amax", "amin"):
        return 0, _dims(node, values)
    if node.op in ("mm", "bmm", "mv"):
        return 0, [values[node.parents[0]].ndim - 1]
    if node.op in ("index_add", "scatter_add"):
        return 3, [int(node.args[1])]
    if node.op == "convolution" and not node.args[6]:
        return 1, [*range(1, values[node.parents[1]].ndim)]
    return 0, []


def masks(*tensors: Tensor) -> bool:
    """Whether numbers are 1, or true, in some places and 0 in all others."""
    are = all(everywhere(lambda x: (x == 0) | (x == 1), x) for x in tensors)
    return are and any(bool(x.any()) for x in tensors) and not all(bool(x.all()) for x in tensors)


def everywhere(holds: Callable[..., Tensor], *tensors: Tensor) -> bool:
    """Whether something holds for all elements of tensors; a corner of large ones is looked at first."""
    corners = (x[(slice(0, 16),) * x.ndim] for x in tensors)
    return bool(holds(*corners).all()) and bool(holds(*tensors).all())


def is_epsilon(op: str, c: float) -> bool:
    """Whether a number is there to keep another from zero."""
    return op in ("add", "sub", "clamp_min", "clamp", "maximum") and isinstance(c, float) and 0.0 < abs(c) <= 1e-2


def kind_of_number(op: str, c: float, new: float, sizes: Iterable[int] = ()) -> str:
    """What it is called to have `new` in place of a number of the program's."""
    if is_epsilon(op, c):
        return "eps"
    if abs(new - c) == 1.0 and c > 2 and c == int(c) and any(c % n == 0 for n in sizes):
        return "ddof"
    if new == -c or (op == "mul" and new == 2 - c):  # 1 + x for 1 - x
        return "sign"
    simple = {c * f for n in sizes for f in (n, 1 / n, n**0.5, n**-0.5)} | {2 * c, c / 2, 1.0}
    return "scale" if op in ("mul", "div") and new in simple else "constant"
