"""What rounding may do to a part of a recorded program: simulated by Monte Carlo arithmetic.

In a simulated run every operation errs at random as one of the declared precision may: a result by up to a unit
round-off; a library function by two units in the last place, in part alike for alike values and for all; a sum by what
additions in a random order give; a factor of a product by what cutting it to fewer digits costs. Products on tensor
cores may also drift, since these may truncate as they add (Fasi, Higham, Mikaitis, Pranesh 2021). What goes into a part
that is not linear is off by a round-off too, since that is what a stable way to compute it may cost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from whywrong.comparing.bounds import lost_terms, variance_of_sum, worst_case
from whywrong.comparing.precision import SMALLEST, UNIT_ROUNDOFF, Precision, dtype_of, half_ulp, representable, stored
from whywrong.process_state import attribute, process_wide
from whywrong.recording.operations import (
    ALGORITHMS,
    ARITHMETIC,
    ELIMINATIONS,
    FACTORIES,
    FUNCTIONS,
    KERNELS,
    MOMENTS,
    MOVES,
    NOT_UNIQUE,
    POOLS,
    PRODUCTS,
    REFLECTIONS,
    RESAMPLERS,
    SELECTIONS,
    SUMS,
    TRANSFORMS,
)
from whywrong.recording.program import Node, Program, Ref, call
from whywrong.torch_private import tree_leaves, tree_map_only, without_vmap_warning

Run = Callable[[], dict[int, Tensor]]

FUNCTION_ULPS = 2.0
"""What a library function may be off, in units in the last place: CUDA's tables give 1 to 2 for the common ones, and
ex2.approx, rcp and div.full of PTX, which Triton's exp and / become, stay within 2."""

_ARGUMENT = frozenset(
    ["exp", "exp2", "expm1", "sigmoid", "tanh", "erf", "erfc", "sinh", "cosh", "sin", "cos", "lgamma", "digamma"]
)
"""Functions that are computed from a scaled argument, which is rounded first: exp(x) as 2^(x log2 e)."""

_LESS = {"erf": 1.0, "sigmoid": 0.5, "tanh": 1.0}
"""Functions that may be computed as this number and something of the same size: erf as torch's vector code has it
(Abramowitz and Stegun 7.1.26), sigmoid(x) as 1/2 + tanh(x/2) / 2, tanh(x) as 1 - 2 sigmoid(-2 x)."""

HASH_BINS = 64
"""Values that differ by less than 1 / HASH_BINS err alike: tables and polynomials of libraries have about as many
pieces."""

_NUMBERED = ARITHMETIC | frozenset(["pow", "fmod", "remainder", "eq", "ne", "lt", "le", "gt", "ge"])
"""Operations whose numbers, which the program gives, count as they are rounded."""

_BY_A_NUMBER = MOMENTS | {"mul", "div", "mean"}
_ROUNDED = ARITHMETIC | PRODUCTS | SUMS
_LINEAR = (MOVES | FACTORIES | _ROUNDED | {"neg"}) - {"view_as_real"}


def linear(program: Program, part: Iterable[int]) -> bool:
    """Whether a part only adds, multiplies, and divides by what is given, with one sum of many terms at most."""
    nodes = [program.nodes[i] for i in part if not isinstance(program.nodes[i].func, str)]
    divisors = [node.args[1].id for node in nodes if node.op == "div" and isinstance(node.args[1], Ref)]
    divided = any(i in part and program.nodes[i].op in _ROUNDED for i in divisors)
    if divided or any(node.op not in _LINEAR or _extreme(node) for node in nodes):
        return False
    return sum(node.op in PRODUCTS | SUMS for node in nodes) <= 1


def _takes(node: Node) -> bool:
    """Whether an operation gives values as they are: it moves or chooses them, into places too, and adds nothing up."""
    puts = node.op in ("put", "index_put") and True not in node.args[3:4]
    return puts or node.op in _MOVED or _extreme(node)


def _extreme(node: Node) -> bool:
    """Whether what looks like a sum over places is the largest or smallest value there."""
    return "amax" in node.args or "amin" in node.args


def ends(program: Program, part: Iterable[int]) -> set[int]:
    """What a kernel gives, of the operations that it is made of."""
    return {i for i in part if i not in program.inside and not program.inside.isdisjoint(program.nodes[i].parents)}


def terms(program: Program, part: Iterable[int]) -> set[int]:
    """Products that are written out and then summed: a kernel may make a product of matrices of them."""
    users = [program.nodes[i] for i in part if program.nodes[i].op in ("sum", "add")]
    return {p for node in users for p in node.parents if program.nodes[p].op == "mul"}


def _length(node: Node, args: Any, out: Tensor) -> int:
    """How many terms an element of a sum has, at most."""
    if node.op in ("convolution", "convolution_backward"):
        a, weight = args[0], args[1] if node.op == "convolution" else args[2]
        return max(1, weight[0].numel(), weight.numel() // weight.shape[1], a.numel() // a.shape[1])
    if node.op in PRODUCTS:
        return max(1, args[0].shape[-1])
    if node.op == "cumsum":
        return max(1, args[0].shape[args[1]] if args[0].ndim else 1)
    if node.op in ("sum", "mean"):
        return max(1, args[0].numel() // max(1, out.numel()))
    if node.op.startswith("avg_pool"):
        return math.prod(args[2 if node.op.endswith("_backward") else 1])
    if node.op in POOLS:  # twice the ratio of sizes in each dimension
        return 8 * max(1, args[0].numel() // max(1, out.numel()))
    places = args[1] if node.op == "index_put" else args
    return max(1, *(a.numel() for a in places if isinstance(a, Tensor) and not a.is_floating_point()), 1)


def _each(change: Callable[..., Tensor], value: Any, *others: Any) -> Any:
    """Floating-point tensors among arguments, or parts of a result, changed; of complex ones the two parts.

    `others` are of the same form; `change` takes what each has in that place too.
    """
    if isinstance(value, (tuple, list)):
        return [_each(change, *parts) for parts in zip(value, *others, strict=True)]
    if isinstance(value, Tensor) and value.is_complex():
        return torch.view_as_complex(change(torch.view_as_real(value.resolve_conj())).contiguous())
    return change(value, *others) if isinstance(value, Tensor) and value.is_floating_point() else value


@dataclass
class _Sum:
    """The squares of a sum's terms, how many they are, and the variance of its error.

    `ends` are what those of its `written` terms add up to that are positive, and negative; of one term, itself.
    """

    squares: Tensor
    length: int
    variance: Tensor
    ends: tuple[Tensor, Tensor]
    written: int = 1

    @staticmethod
    def of(x: Any) -> _Sum:
        """A sum of one term, a tensor or a number."""
        x = torch.as_tensor(x)
        return _Sum(x * x, 1, torch.zeros_like(x), (x, x))

    def moved(self, change: Callable[[Tensor], Tensor]) -> _Sum:
        """The same in other places."""
        ends = change(self.ends[0]), change(self.ends[1])
        return _Sum(change(self.squares), self.length, change(self.variance), ends, self.written)

    def times(self, factor: Any) -> _Sum:
        """Each term times a number or a tensor."""
        (a, b), squared = (end * factor for end in self.ends), factor * factor
        ends = torch.maximum(a, b), torch.minimum(a, b)
        return _Sum(self.squares * squared, self.length, self.variance * squared, ends, self.written)

    def plus(self, other: _Sum, out: Tensor, u: float) -> _Sum:
        """This and another, which are `out`, added in any order.

        More than two that are written out may be added by sign: half of the K additions go up to the sum of all that
        is positive, or of all that is negative, and half come back; K/3 of its square is what their squares add up to.
        """
        length, written = self.length + other.length, self.written + other.written
        squares = self.squares + other.squares
        above = self.ends[0].clamp(min=0.0) + other.ends[0].clamp(min=0.0)
        below = self.ends[1].clamp(max=0.0) + other.ends[1].clamp(max=0.0)
        variance = variance_of_sum(out, squares, length, u)
        if written > 2:
            variance = torch.maximum(variance, u * u / 9.0 * written * torch.maximum(above, -below).square())
        return _Sum(squares, length, variance, (above, below), written)


class Exact:
    """Runs operations as they are, and keeps what the simulated runs need to know of each.

    `summed` are products that are written out and then summed (:func:`terms`), `ends` what kernels give. `cut`:
    which factors of a product are not exact in the declared format; none is if what goes in is `moved`. `spread`:
    the standard deviation of what a sum errs. `lost`: what it errs in torch's own float32. A part of that is common
    to every order: terms that vanish beside a few large ones. `flushed`: its terms below the smallest normal
    number, all of which may be zero. `tiny`: the operations with results so small that a subnormal unit counts,
    `huge` with some that overflow. `counted`: those that make whole numbers that fit of whole numbers, without
    error. `whole`: those whose error is simulated by moving what they take, as :meth:`Rounding._as_taken` says:
    algorithms, and whatever computes with complex numbers. `_sums`: what is known of a sum, wherever it is moved
    to; `_scaled`: of a product, what it is of.
    """

    def __init__(
        self, rules: Mapping[int, Precision], program: Program, device: torch.device, moved: bool = False
    ) -> None:
        self.rules, self.device, self._moved = rules, device, moved
        self.summed, self.ends = terms(program, rules), ends(program, rules)
        self.cut: dict[int, list[bool]] = {}
        self.spread: dict[int, Any] = {}
        self.lost: dict[int, Any] = {}
        self.flushed: dict[int, Any] = {}
        self.tiny: set[int] = set()
        self.huge: set[int] = set()
        self.whole: set[int] = set()
        self.counted: set[int] = set()
        self._sums: Any = WeakTensorKeyDictionary()
        self._scaled: Any = WeakTensorKeyDictionary()

    def __call__(self, node: Node, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run one operation."""
        op, precision = node.op, self.rules[node.id]
        out = call(node, args, kwargs, self.device)
        if not precision.eager:
            self._one_sum(node, args, kwargs, out)
        if op in _COUNTING and all(_fits(x, 1.0 / max(precision.unit, _kept(precision))) for x in (out, *args)):
            self.counted.add(node.id)
        if op in ALGORITHMS or (op not in MOVES and any(isinstance(a, Tensor) and a.is_complex() for a in args)):
            self.whole.add(node.id)
        if _takes(node) or node.id in self.whole:
            return out
        if precision.cut and (op in PRODUCTS or node.id in self.summed):
            reals = (isinstance(a, Tensor) and a.is_floating_point() for a in args)
            self.cut[node.id] = [
                real and (self._moved or not representable(a, str(precision.products)))
                for a, real in zip(args, reals, strict=True)
            ]
        if op in MOMENTS:
            self.spread[node.id] = _moments(args[0], out[0], out[1], precision.unit)
        elif op == "logcumsumexp":  # each addition errs by a round-off of the logarithm, and of the 1 that it is of
            self.spread[node.id] = precision.unit * (1.0 + magnitude(out)) * max(args[0].shape, default=1) ** 0.5
        elif op in PRODUCTS or op in SUMS:
            squares = call(node, _each(torch.square, args), kwargs, self.device)
            if isinstance(out, Tensor) and (op in PRODUCTS or op == "sum"):
                length = _length(node, args, out)
                variance = variance_of_sum(out, squares, length, self.unit(node))
                self._sums[out] = _Sum(squares, length, variance, (out, out))
            least = _least(precision) if op in PRODUCTS else 0.0
            by_chance = _each(lambda x, q: _spread(node, args, x, q, self.unit(node), least), out, squares)
            if precision.flush:
                self.flushed[node.id] = _each(lambda x, q: _flushed(_length(node, args, x), q, precision), out, squares)
            self.spread[node.id] = self._in_order(node, args, kwargs, by_chance)
            if precision.accumulate == "float32":  # of terms that are mostly alike the errors are too
                self.lost[node.id] = lost = self._in_float32(node, args, kwargs)
                self.spread[node.id] = _each(lambda x, y: torch.maximum(x, y.abs()), self.spread[node.id], lost)
        parts = [x for x in tree_leaves(out) if isinstance(x, Tensor) and x.is_floating_point()]
        if any(bool(((x != 0.0) & (x.abs() < _least(precision) / precision.unit)).any()) for x in parts):
            self.tiny.add(node.id)
        if any(bool((x.abs() > _largest(precision)).any()) for x in parts):
            self.huge.add(node.id)
        return out

    def _one_sum(self, node: Node, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        """What is added one after the other is one sum, in any order: a kernel may begin a product with its bias.

        Something times a sum is one too, of terms that may have been multiplied one by one, and so is a sum whose
        elements are in other places. What its parts err by themselves is not counted again. An average,
        c a + (1 - c) b, may be a + (1 - c) (b - a), as the last line of a GRU is written by many.
        """
        if kwargs or not isinstance(out, Tensor) or not out.is_floating_point():
            return
        a, b = (*args, None)[:2]
        u, by_number = self.unit(node), node.op in ("mul", "div") and not isinstance(b, Tensor) and b != 0
        if node.op == "mul" and self._sum(a) is None:
            a, b = b, a
        known = self._sum(a)
        if node.op in ("add", "sub"):
            one, other = self._sum(a) or _Sum.of(a), self._sum(b) or _Sum.of(b)
            found = one.plus(other if node.op == "add" else other.times(-1.0), out, u)
            scaled = [self._scaled.get(x, []) if isinstance(x, Tensor) and node.op == "add" else [] for x in args]
            averaged = next(((x - y, c * d) for x, c in scaled[0] for y, d in scaled[1] if _shares(c, d)), ())
            if averaged:  # a difference, and a share of it: of 0 or 1 it is none
                off, product = (torch.as_tensor(each) for each in averaged)
                found.variance = found.variance + torch.where(product == 0.0, 0.0, 2.0 / 3.0 * (u * off).square())
            self._sums[out] = found
            if found.length > 2 or averaged:
                more = (found.variance - one.variance - other.variance).clamp(min=0.0)
                self.spread[node.id] = torch.where(more < math.inf, more.sqrt(), 0.0)
        elif known and (by_number or (node.op == "mul" and isinstance(b, Tensor))):
            self._sums[out] = found = known.times(b if node.op == "mul" else 1.0 / b)
            off = (u * (found.squares / 3.0).sqrt()).nan_to_num(0.0, 0.0, 0.0)
            self.spread[node.id] = torch.where(out == 0.0, 0.0, off)  # a c - a c is
        elif known and node.op in MOVES | {"neg"}:

            def move(x: Tensor) -> Any:
                return call(node, [x, *args[1:]], {}, self.device)

            self._sums[out] = known.times(-1.0) if node.op == "neg" else known.moved(move)
        if by_number:
            self._scaled[out] = [(args[0], args[1] if node.op == "mul" else 1.0 / args[1])]
        elif node.op == "mul" and isinstance(b, Tensor):
            self._scaled[out] = [(a, b), (b, a)]

    def _sum(self, x: Any) -> _Sum | None:
        return self._sums.get(x) if isinstance(x, Tensor) else None

    def _in_order(self, node: Node, args: Any, kwargs: dict[str, Any], by_chance: Any) -> Any:
        """The spread of sums whose terms are added as they lie, where that is more than `by_chance`, in any order.

        Neighbours that are alike, as the gradients of one image, make partial sums that chance would not. Each of K
        additions errs by at most u of its partial sum, which is taken from the ends of PIECES pieces.
        """
        found = tree_leaves(by_chance)
        pieces = [tree_leaves(call(node, piece, kwargs, self.device)) for piece in _pieces(node, args)]
        for i, several in enumerate(zip(*pieces, strict=True)):
            if isinstance(several[0], Tensor) and several[0].shape == found[i].shape:
                squares = torch.stack(several).cumsum(0).square().sum(0).nan_to_num(0.0)
                length = _length(node, args, found[i]) / len(several)
                found[i] = torch.maximum(found[i], self.unit(node) * (length / 3.0 * squares).sqrt())
        return found if isinstance(by_chance, (tuple, list)) else found[0]

    def _in_float32(self, node: Node, args: Any, kwargs: dict[str, Any]) -> Any:
        """How far torch's float32 is from float64 of the same numbers, which float32 holds."""
        narrow = _each(torch.Tensor.float, args)
        matmul, conv = torch.backends.cuda.matmul, torch.backends.cudnn.conv  # type: ignore[attr-defined]
        with process_wide(*(attribute(of, "fp32_precision", "ieee") for of in (matmul, conv))):  # no TF32 in its place
            found = call(node, narrow, kwargs, self.device)
        exact = call(node, _each(torch.Tensor.double, narrow), kwargs, self.device)
        return _each(lambda x, y: torch.nan_to_num(y.double() - x, 0.0, 0.0, 0.0), exact, found)

    def truncates(self, node: Node) -> bool:
        """Whether an operation sums products, on tensor cores that may truncate as they add."""
        return self.rules[node.id].cut > 0.0 and (node.op in PRODUCTS or not self.summed.isdisjoint(node.parents))

    def unit(self, node: Node) -> float:
        """The round-off of an addition; to truncate is twice as far off as to round."""
        return self.rules[node.id].unit * (2.0 if self.truncates(node) else 1.0)


_MOVED = MOVES | FACTORIES | SELECTIONS
_COUNTING = frozenset(["_to_copy", "add", "sub", "rsub", "mul", "sum", "cumsum"])


def _fits(x: Any, most: float) -> bool:
    """Whether x has whole numbers alone, below `most`."""
    if not isinstance(x, Tensor):
        return not isinstance(x, float) or x.is_integer()
    if not x.is_floating_point() or not x.numel():
        return not x.is_complex()
    return float(x.flatten()[0]).is_integer() and bool(((x == x.round()) & (x.abs() < most)).all())


def _kept(precision: Precision) -> float:
    """The unit round-off of what every operation stores, or 0 where they are not stored."""
    return UNIT_ROUNDOFF.get(precision.storage or "", 0.0) if precision.eager else 0.0


def _formats(precision: Precision) -> list[str]:
    """To what each operation's result is rounded, one after the other."""
    return [precision.accumulate, precision.storage or ""][: 1 + (_kept(precision) > 0.0)]


PIECES = 16
"""Pieces into which a sum is cut to see its partial sums: what they miss is a sixteenth of it."""


def _pieces(node: Node, args: Any) -> list[Any]:
    """The arguments of an operation for one piece of its sums after the other, where it has one sum of many terms."""
    if node.op == "convolution_backward":  # the gradients of weights and biases, image by image
        images = zip(args[0].chunk(PIECES), args[1].chunk(PIECES), strict=True)
        return [(gradient, x, *args[2:]) for gradient, x in images]
    if node.op == "sum" and args[0].ndim:
        over = args[1] if len(args) > 1 and args[1] else range(args[0].ndim)
        return [(piece, *args[1:]) for piece in args[0].chunk(PIECES, min(d % args[0].ndim for d in over))]
    return []


def _spread(node: Node, args: Any, x: Tensor, squares: Tensor, u: float, least: float) -> Tensor:
    """What a sum errs; each of its products, half of `least`, the smallest number, at most where it underflows.

    Equal terms are not rounded by chance: each partial sum may be off the same way, unless all of them are exact.
    """
    length = _length(node, args, x)
    count = length if node.op == "mean" else 1
    total, squares = x * count, squares * count
    variance = variance_of_sum(total, squares, length, u).clamp(min=0.0)
    variance = variance + (squares > 0.0) * (length * least**2 / 12.0)
    equal = length * squares - total.square() <= 1e-12 * length * squares
    last = torch.frexp(total / length)[0] / 2.0 ** math.ceil(math.log2(u * length))
    inexact = equal & (last != last.round()) & (length > 2)
    variance = variance + inexact * (length * u * total / 4.0).square()
    return torch.where(x.isfinite(), variance.sqrt() / count, 0.0)


def _flushed(length: int, squares: Tensor, precision: Precision) -> Tensor:
    """What the terms of a sum that are below the smallest normal number add up to, at most."""
    return (length * squares).sqrt().clamp(max=length * _least(precision))


def _moments(x: Tensor, variance: Tensor, mean: Tensor, u: float) -> list[Tensor]:
    """A variance by updates is off by u a term, times its condition, sqrt(1 + mean^2 / variance); a mean as a sum.

    Chan, Golub and LeVeque, "Algorithms for computing the sample variance", The American Statistician 37.
    """
    count = max(1, x.numel() // max(1, variance.numel()))
    squares = count * (variance + mean.square())
    condition = (1.0 + mean.square() / variance.clamp(min=1e-300)).sqrt()
    off = torch.where(variance > 0.0, variance * u * math.sqrt(count) * condition, 0.0)
    return [off, variance_of_sum(mean * count, squares, count, u).clamp(min=0.0).sqrt() / count]


BATCH = 1 << 20
"""Elements of an operation's results that are simulated at once on a CPU: 8 MiB stay in its cache."""

LIVE = 32
"""Results of operations that may be in memory at once: a GPU's free memory is shared among as many."""


def simulate(run: Run, runs: int, seed: int, elements: int, device: torch.device) -> Iterator[tuple[int, Tensor]]:
    """`run()` `runs` times with random numbers of its own: the numbers of results, and several of each, runs first.

    `elements` is the size of its largest operation. What cannot be run several at once is run one by one.
    """
    with process_wide(without_vmap_warning()), torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        batch = torch.cuda.mem_get_info(device)[0] // (8 * LIVE) if device.type == "cuda" else BATCH
        at_once = max(1, min(runs, batch // max(1, elements)))
        for start in range(0, runs, at_once):
            each = torch.empty(min(at_once, runs - start), device=device)
            try:
                found = torch.vmap(lambda _: run(), randomness="different")(each)
            except RuntimeError:  # a shape that depends on values has no batches
                singles = [run() for _ in each]
                found = {i: torch.stack([one[i] for one in singles]) for i in singles[0]}
            yield from found.items()


def _draw_by_value(x: Tensor) -> Tensor:
    """As :meth:`Rounding._draw`, but elements that are equal in float32 get equal numbers: a hash of bits and seed."""
    mixed = x.float().view(torch.int32).long() ^ torch.randint(2**62, (), device=x.device)
    mixed *= -0x61C8864680B583EB
    mixed ^= mixed >> 29
    mixed *= -0x40A7B892E31B1A47
    mixed ^= mixed >> 32
    mixed &= 0xFFFFFF
    return mixed.double().add_(0.5).div_(2.0**24)


@dataclass(eq=False)
class Rounding:
    """Runs operations with random rounding errors; inside :func:`simulate`, which draws them.

    `given` are the numbers of observed values: each is perturbed once a run where one of the `nonlinear` operations
    takes it. `scale` multiplies every error, for whole numbers, which move only where one falls the other way.

    Errors of elements are independent. With `nearest` they are correlated: operations round to the nearest, and equal
    values have equal errors, as in x + c with one c, or in rows that occur again. `anew` has a function for each value
    that several operations take: it computes the value again for each of them, as kernels do that do not share it.
    """

    exact: Exact
    nonlinear: Collection[int] = ()
    given: Collection[int] = ()
    scale: float = 1.0
    nearest: bool = False
    anew: Mapping[int, Callable[[Rounding, Any], Any]] = field(default_factory=dict)
    _moved: dict[int, Tensor] = field(default_factory=dict, init=False)

    def _draw(self, x: Tensor) -> Tensor:
        """Numbers from 0 to 1 of the shape of x: 24 bits of them, a fraction of a round-off and half the time."""
        return _draw_by_value(x) if self.nearest else torch.rand_like(x, dtype=torch.float32).double()

    def jitter(self, x: Tensor, u: float, least: Any = 0.0) -> Tensor:
        """Every element off by up to u of itself, and by up to `least`, a number or a tensor of one."""
        u, least = self.scale * u, self.scale * least
        moved = self._draw(x).mul_(2.0 * u).add_(1.0 - u).mul_(x)
        return moved + (self._draw(x) - 0.5) * (2.0 * least) if isinstance(least, Tensor) or least else moved

    def moved(self, x: Tensor, half: Tensor) -> Tensor:
        """Every element off by up to `half`."""
        return self._draw(x).sub_(0.5).mul_(2.0 * self.scale).mul_(half).add_(x)

    def _into_nonlinear(self, ref: Any, x: Any, precision: Precision) -> Any:
        """What goes into a part that is not linear: off by a round-off, each element and all of them together."""
        if not isinstance(ref, Ref) or ref.id not in self.given or not x.is_floating_point():
            return x
        if ref.id not in self._moved:
            u, least = precision.unit, precision.unit * magnitude(x).amax() if precision.normwise else 0.0
            self._moved[ref.id] = self.jitter(x, u, least) * (1.0 + self._one(u))
        return self._moved[ref.id]

    def _taken(self, op: str, ref: Any, x: Any) -> Any:
        """What several operations take, as each of them computes it, off by itself.

        What is compared or chosen is as it is: else one comparison would not be the opposite of another.
        """
        if op in SELECTIONS or not isinstance(ref, Ref) or ref.id not in self.anew:
            return x
        again, self.anew = self.anew, {}
        value = again[ref.id](self, x)
        self.anew = again
        return value

    def _one(self, u: float) -> Tensor:
        """One number up to u for a whole tensor."""
        return (torch.rand((), dtype=torch.float64, device=self.exact.device) - 0.5) * (2.0 * u * self.scale)

    def __call__(self, node: Node, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run one operation, its result off at random."""
        op, precision = node.op, self.exact.rules[node.id]
        if node.id in self.exact.counted:
            return call(node, args, kwargs, self.exact.device)
        args = [self._taken(op, ref, a) for ref, a in zip(node.args, args, strict=True)] if self.anew else args
        if node.id in self.nonlinear:
            args = [self._into_nonlinear(ref, a, precision) for ref, a in zip(node.args, args, strict=True)]
        u, kept = precision.unit, _kept(precision)
        if cut := self.exact.cut.get(node.id):
            args = [self._cut(a, precision) if inexact else a for a, inexact in zip(args, cut, strict=True)]
        if op in _ARGUMENT:
            args = [_each(lambda x: self.jitter(x, u), args[0]) * (1.0 + self._one(u)), *args[1:]]
        if node.id in self.exact.whole:
            args = tree_map_only(Tensor, lambda x: self._as_taken(node, args, x, max(u, kept)), args)
        out = self._with_literals(node, args, kwargs)
        if op in NOT_UNIQUE:
            out = self._turned(out)
        if op in RESAMPLERS | TRANSFORMS:  # polynomials in positions, and sums of waves, which may cancel
            out = tree_map_only(Tensor, lambda x: self._as_taken(node, args, x, max(u, kept)), out)
        if node.id in self.exact.huge:
            out = _each(lambda x: torch.where(x.abs() > _largest(precision), x * math.inf, x), out)
        rounds = kept and (op == "_to_copy" or node.id in self.exact.ends) and isinstance(out, Tensor)
        if _takes(node) and not (rounds and out.is_floating_point()):
            return out
        if node.id in self.exact.spread:
            length = _length(node, args, next(x for x in tree_leaves(out) if isinstance(x, Tensor)))
            added = self.exact.unit(node)
            drift = worst_case(length, added) if self.exact.truncates(node) else lost_terms(length, added)
            if op == "cumsum" and out.is_floating_point():  # what an addition errs stays in all sums after it
                out = out + torch.cumsum(self.jitter(out, added) - out, args[1])
            else:
                out = _each(lambda x, spread: self._summed_up(x, spread, drift), out, self.exact.spread[node.id])
        if node.id in self.exact.flushed:
            share = self._one(1.0)
            out = _each(lambda x, lost: x + torch.sign(x) * lost * share, out, self.exact.flushed[node.id])
        if self.nearest and node.id in self.exact.lost:
            share = torch.rand((), dtype=torch.float64, device=self.exact.device) * self.scale
            out = _each(lambda x, lost: x + lost * share, out, self.exact.lost[node.id])
        if op in _BY_A_NUMBER and len(node.parents) == 1:  # or by its reciprocal
            out = _each(lambda x: x * (1.0 + self._one(u)), out)
        if op in FUNCTIONS or op == "div":
            out = _each(lambda x: self._computed(x, 2.0 * FUNCTION_ULPS * u), out)
        if op in _LESS:
            one = torch.ones_like(out)
            out = out + _LESS[op] * torch.sign(out) * (self._computed(one, 2.0 * FUNCTION_ULPS * u) - one)
        if self.nearest:
            rounded = _each(lambda x: reduce(stored, _formats(precision), x), out)
            if op == "mul" and not kept and out.is_floating_point():  # which may be exact where it is added at once
                return torch.where(self.either() > 0.0, out, rounded)
            return rounded
        least = 0.0
        if node.id in self.exact.tiny:  # few libraries compute functions below the normal numbers
            least = torch.finfo(dtype_of(precision.accumulate)).tiny if op in FUNCTIONS else _least(precision)
        if precision.normwise:
            return _each(lambda x: self.jitter(x, 0.0, max(u, kept) * magnitude(x).amax()), out)
        return _each(lambda x: self.jitter(x, max(u, kept), least), out)

    def _with_literals(self, node: Node, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operation with the literal numbers of the program's text exact, or rounded to the working format.

        These are arguments, `alpha` and what a factory makes; each is rounded in half of the runs. The format is that
        of what is stored, since many of torch's kernels take numbers in their tensors' type.
        """
        op, kind = node.op, _formats(self.exact.rules[node.id])[-1]
        lost = [_lost(a, kind) for a in args] if op in _NUMBERED else []
        alpha = _lost(kwargs.get("alpha", 1), kind)
        if not any(lost) and not alpha:
            out = call(node, args, kwargs, self.exact.device)
            if op not in FACTORIES or not out.is_floating_point():
                return out
            return out + torch.nan_to_num(stored(out, kind) - out) * self.either()
        args = [a + off * self.either() if off else a for a, off in zip(args, lost, strict=True)]
        if alpha:
            scaled, number = 0 if op == "rsub" else 1, kwargs["alpha"]
            args[scaled], kwargs = args[scaled] * (number + alpha * self.either()), {}
        return getattr(torch, op)(*args, **kwargs)

    def _as_taken(self, node: Node, args: Any, x: Tensor, u: float) -> Tensor:
        """An argument as a stable algorithm may have taken it: each element off, and all by one factor.

        What the algorithm gives is exact for arguments that are off by p(n) u of their norm (Higham, chapters 9, 10, 19
        and 24): of a column by elimination, of an element in kernels that only sum, else of the whole. p is n by
        elimination and n^2 by n reflections at worst, and the root of that by chance (Higham and Mary 2019, Connolly
        and Higham 2023), twice where both sides are reflected. It is log2(n) of a Fourier transform, and 2 n where
        positions are computed, which are off by u of the size of an image. Complex arithmetic is off by a round-off of
        the absolute value. What is eager may store what it computes inside, too.
        """
        if not (x.is_floating_point() or x.is_complex()):
            return x
        op, size, factor = node.op, magnitude(x), 1.0
        if op in ALGORITHMS | PRODUCTS | SUMS:
            shapes = [node.shape, *(a.shape for a in args if isinstance(a, Tensor))]
            length = max((n for shape in shapes for n in shape[0 if op in KERNELS | SUMS else -2 :]), default=1)
            over = tuple(args[1] if op in TRANSFORMS else range(-min(2, x.ndim), -(op in ELIMINATIONS and x.ndim > 1)))
            factor = 2.0 * length if op in REFLECTIONS | RESAMPLERS else length**0.5
            factor = 1.0 + math.log2(max(1, x.numel())) if op in TRANSFORMS else factor
            size = size + factor * (size if op in KERNELS else size.square().mean(over, keepdim=True).sqrt())
        size = size.unsqueeze(-1) if x.is_complex() else size
        moved = _each(lambda part: part + (self._draw(part) - 0.5) * size * (2.0 * u * self.scale), x)
        return moved * (1.0 + self._one(factor * u))

    def _turned(self, out: Any) -> Any:
        """Singular vectors, or eigenvectors, each with either sign; the same sign for both of one singular value."""
        signs = torch.randint(2, (sum(x.shape[-1] for x in out),), device=self.exact.device) * 2.0 - 1.0
        if len(out) == 2:
            return out[0], out[1] * signs[: out[1].shape[-1]]
        return out[0] * signs[: out[0].shape[-1]], out[1], (out[2].mT * signs[: out[2].shape[-2]]).mT

    def either(self) -> Tensor:
        """0 or 1, by chance."""
        return torch.randint(2, (), device=self.exact.device) * self.scale

    def _computed(self, x: Tensor, u: float) -> Tensor:
        """What a library function gives: off by up to u, in equal parts by chance, by its value, and for all alike.

        The same argument always errs the same, and so may neighbours, or all: an approximation has a bias.
        """
        by_value = torch.rand(HASH_BINS, dtype=torch.float64, device=x.device) - 0.5
        values = (x * HASH_BINS).floor_().remainder_(HASH_BINS).nan_to_num_(0.0).long()
        error = self._draw(x).sub_(0.5).add_(by_value[values]).mul_(2.0 * u * self.scale / 3.0**0.5)
        return error.add_(1.0).mul_(x).mul_(1.0 + self._one(u / 3.0**0.5))

    def _cut(self, a: Tensor, precision: Precision) -> Tensor:
        """Cut to TF32, to nearest or truncated, nobody says which: up to two units, of one sign for all if truncated.

        To a type that is stored numbers are rounded: half a unit each by itself, and half all alike, as equal ones are.
        """
        u = precision.cut if str(precision.products).startswith("tf32") else precision.cut / 2.0
        return self.jitter(a, u) * (1.0 + self._one(u))

    def _summed_up(self, x: Tensor, spread: Tensor, drift: float) -> Tensor:
        """A sum with its error, which with `nearest` depends on what float32 loses of it: x + c of one c may err alike.

        What is lost is taken to 2^-16 of half a unit, of which float64 still knows as much.
        """
        by = (x - x.float()) / half_ulp(x, "float32") * 2.0**16 if self.nearest else x
        normal = self._draw(by.round()).mul_(2.0 - 2.0**-23).sub_(1.0 - 2.0**-24).erfinv_().mul_(2.0**0.5)
        return normal.mul_(spread).mul_(self.scale).add_(x).mul_(1.0 + self._one(min(1.0, drift)))


def _shares(c: Any, d: Any) -> bool:
    """Whether weights, numbers or tensors, are from 0 to 1 and add up to 1: to all digits of float64."""
    c, d = torch.as_tensor(c), torch.as_tensor(d)
    return c.shape == d.shape and bool(((c + d - 1.0).abs() < 1e-12).all() & (c >= 0.0).all() & (d >= 0.0).all())


def _lost(number: Any, name: str) -> float:
    """What rounding a number of the program to a format adds; 0 for what is no number, or not finite."""
    if not isinstance(number, float) or not math.isfinite(number):
        return 0.0
    exact = torch.tensor(number, dtype=torch.float64)
    return float(stored(exact, name) - exact)


def _least(precision: Precision) -> float:
    """What one operation may lose to underflow: the smallest number, or the smallest normal one where flushed."""
    return max(SMALLEST[name] * (0.5 / UNIT_ROUNDOFF[name] if precision.flush else 1.0) for name in _formats(precision))


def _largest(precision: Precision) -> float:
    """The largest finite number between operations."""
    return min(torch.finfo(dtype_of(name)).max for name in _formats(precision))


def magnitude(x: Tensor) -> Tensor:
    """|x|, and 0 where x is not finite."""
    return torch.where(x.isfinite(), x.abs(), 0.0)
