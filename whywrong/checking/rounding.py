"""The effect of rounding on a part of a recorded program, simulated by Monte Carlo arithmetic.

In a simulated run every operation has a random error that the declared precision allows: a result of up to a unit
round-off; a library function of two units in the last place, in part equal for similar values and for all; a sum that
of additions in a random order; a factor of a product that of cutting it to fewer digits. Products on tensor cores may
also drift, since these may truncate as they add (Fasi, Higham, Mikaitis, Pranesh 2021). The inputs of a nonlinear part
are off by a round-off too, which is the backward error of a stable way to compute it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any

import numpy as np
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
from whywrong.torch_private import in_vmap, tree_leaves, tree_map_only, without_vmap_warning

Run = Callable[[], dict[int, Tensor]]

FUNCTION_ULPS = 2.0
"""What a library function may be off, in units in the last place: CUDA's tables give 1 to 2 for the common ones, and
ex2.approx, rcp and div.full of PTX, which Triton's exp and / become, stay within 2."""

_ARGUMENT = frozenset(
    ["exp", "exp2", "expm1", "sigmoid", "tanh", "erf", "erfc", "sinh", "cosh", "sin", "cos", "lgamma", "digamma"]
)
"""Functions that are computed from a scaled and rounded argument: exp(x) as 2^(x log2 e)."""

_COMPUTED_FROM = {"erf": 1.0, "sigmoid": 0.5, "tanh": 1.0}
"""Functions that may be computed as this number plus another of similar size: erf in torch's vector code (Abramowitz
and Stegun 7.1.26), sigmoid(x) as 1/2 + tanh(x/2) / 2, tanh(x) as 1 - 2 sigmoid(-2 x)."""

HASH_BINS = 64
"""Values that differ by less than 1 / HASH_BINS have similar errors: tables and polynomials of libraries have about as
many pieces."""

_NUMBERED = ARITHMETIC | frozenset(["pow", "fmod", "remainder", "eq", "ne", "lt", "le", "gt", "ge"])
"""Operations whose literal numbers are rounded."""

_BY_A_NUMBER = MOMENTS | {"mul", "div", "mean"}
_ROUNDED = ARITHMETIC | PRODUCTS | SUMS
_LINEAR = (MOVES | FACTORIES | _ROUNDED | {"neg"}) - {"view_as_real"}


def linear(program: Program, part: Iterable[int]) -> bool:
    """Whether a part only adds, multiplies, and divides by its inputs, with at most one sum of many terms."""
    nodes = [program.nodes[i] for i in part if not isinstance(program.nodes[i].func, str)]
    divisors = [node.args[1].id for node in nodes if node.op == "div" and isinstance(node.args[1], Ref)]
    divided = any(i in part and program.nodes[i].op in _ROUNDED for i in divisors)
    if divided or any(node.op not in _LINEAR or _takes_extreme(node) for node in nodes):
        return False
    return sum(node.op in PRODUCTS | SUMS for node in nodes) <= 1


def _only_moves(node: Node) -> bool:
    """Whether an operation moves or chooses values, also into places, and adds none."""
    puts = node.op in ("put", "index_put") and True not in node.args[3:4]
    return puts or node.op in _MOVING or _takes_extreme(node)


def _takes_extreme(node: Node) -> bool:
    """Whether a reduction over places takes the largest or smallest value instead of the sum."""
    return "amax" in node.args or "amin" in node.args


def kernel_results(program: Program, part: Iterable[int]) -> set[int]:
    """The operations that give a kernel's result, of those that the kernel is made of."""
    return {i for i in part if i not in program.inside and not program.inside.isdisjoint(program.nodes[i].parents)}


def summed_products(program: Program, part: Iterable[int]) -> set[int]:
    """Products that are written out and then summed: a kernel may compute them as a matrix product."""
    users = [program.nodes[i] for i in part if program.nodes[i].op in ("sum", "add")]
    return {p for node in users for p in node.parents if program.nodes[p].op == "mul"}


def _length(node: Node, args: Any, out: Tensor) -> int:
    """How many terms an element of a sum has, at most, by the shapes alone."""
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


def _map_real(change: Callable[..., Tensor], value: Any, *others: Any) -> Any:
    """Apply `change` to the floating-point tensors among arguments or results, and to both parts of complex ones.

    `others` have the same structure; `change` takes their values in that place too.
    """
    if isinstance(value, (tuple, list)):
        return [_map_real(change, *parts) for parts in zip(value, *others, strict=True)]
    if isinstance(value, Tensor) and value.is_complex():
        return torch.view_as_complex(change(torch.view_as_real(value.resolve_conj())).contiguous())
    return change(value, *others) if isinstance(value, Tensor) and value.is_floating_point() else value


@dataclass
class _Sum:
    """The sum of the squares of a sum's terms, their number, and the variance of its error.

    `terms` are the `written` ones that are written out, each of the sum's shape; of more than two the sum of what is
    positive and that of what is negative. Of one it is the sum itself, and None here: a tensor that its own
    :class:`_Sum` refers to is never let go.
    """

    squares: Tensor
    length: int
    variance: Tensor
    terms: tuple[Tensor, ...] | None = None
    written: int = 1

    @staticmethod
    def of(x: Any) -> _Sum:
        """A sum of one term, a tensor or a number."""
        x = torch.as_tensor(x)
        return _Sum(x * x, 1, x.new_zeros(()))

    def moved(self, change: Callable[[Tensor], Tensor]) -> _Sum:
        """The same in other places."""
        terms = self.terms and tuple(map(change, self.terms))
        return _Sum(change(self.squares), self.length, change(self.variance), terms, self.written)

    def times(self, factor: Any) -> _Sum:
        """Each term times a number or a tensor."""
        squared, terms = factor * factor, self.terms and tuple(term * factor for term in self.terms)
        return _Sum(self.squares * squared, self.length, self.variance * squared, terms, self.written)

    def plus(self, other: _Sum, a: Any, b: Any, out: Tensor, u: float) -> _Sum:
        """This, `a`, and another, `b`, which are `out`, added in any order.

        More than two terms that are written out may be added by sign: half of the K additions go up to the sum of the
        positive terms, or of the negative ones, and half come back. The squares of these partial sums add up to K/3 of
        the square of the largest.
        """
        length, written = self.length + other.length, self.written + other.written
        squares = self.squares + other.squares
        variance = _in_blocks(partial(variance_of_sum, length=length, u=u), out, squares)
        terms = tuple(term.expand(out.shape) for term in (*(self.terms or (a,)), *(other.terms or (b,))))
        if written > 2:
            above, below = (reduce(torch.add, [x.clamp(**end) for x in terms]) for end in ({"min": 0.0}, {"max": 0.0}))
            variance = torch.maximum(variance, u * u / 9.0 * written * torch.maximum(above, -below).square())
            terms = above, below
        return _Sum(squares, length, variance, terms, written)


class Exact:
    """Runs operations exactly, and keeps what the simulated runs need to know of each, by its number.

    `summed`: products that are written out and then summed (:func:`summed_products`).
    `kernel_results`: the operations that give a kernel's result.
    `cut`: which factors of a product are not exact in the declared format; none is where the inputs are `moved`.
    `spread`: the standard deviation of a sum's error.
    `lost`: its error in torch's own float32. A part of that is common to every order: terms that vanish beside a few
    large ones.
    `flushed`: the sum of its terms below the smallest normal number, all of which may be zero.
    `tiny`, `huge`: operations with results so small that a subnormal unit counts, and with some that overflow.
    `counted`: operations that compute whole numbers from whole numbers, without error.
    `perturbed`: operations whose error is simulated by an error of their arguments (:meth:`Rounding._perturbed`):
    algorithms, and whatever computes with complex numbers.
    `_sums`: the :class:`_Sum` of a tensor, also after it was moved. `_scaled`: pairs of a factor of a product and the
    other one; of a number, by which the product can be divided, the factor is None. `_most`: the most terms that are
    added to one place.
    """

    def __init__(
        self, rules: Mapping[int, Precision], program: Program, device: torch.device, moved: bool = False
    ) -> None:
        self.rules, self.device, self._moved = rules, device, moved
        self.summed, self.kernel_results = summed_products(program, rules), kernel_results(program, rules)
        self.cut: dict[int, list[bool]] = {}
        self.spread: dict[int, Any] = {}
        self.lost: dict[int, Any] = {}
        self.flushed: dict[int, Any] = {}
        self.tiny: set[int] = set()
        self.huge: set[int] = set()
        self.perturbed: set[int] = set()
        self.counted: set[int] = set()
        self._most: dict[int, int] = {}
        self._sums: Any = WeakTensorKeyDictionary()
        self._scaled: Any = WeakTensorKeyDictionary()

    def __call__(self, node: Node, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run one operation."""
        op, precision = node.op, self.rules[node.id]
        out = call(node, args, kwargs, self.device)
        if not precision.eager:
            self._record_sum(node, args, kwargs, out)
        if op in _COUNTING and all(_fits(x, 1.0 / max(precision.unit, _storage_unit(precision))) for x in (out, *args)):
            self.counted.add(node.id)
        if op in ALGORITHMS or (op not in MOVES and any(isinstance(a, Tensor) and a.is_complex() for a in args)):
            self.perturbed.add(node.id)
        if _only_moves(node) or node.id in self.perturbed:
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
            squares, u = call(node, _map_real(torch.square, args), kwargs, self.device), self.unit(node)
            if op in _PLACED and True not in args[4:] and out.numel() and out.is_floating_point():
                self._most[node.id] = int(call(node, _map_real(torch.ones_like, args), {}, self.device).amax())
            if isinstance(out, Tensor) and (op in PRODUCTS or op == "sum"):
                length = self.length(node, args, out)
                variance = variance_of_sum(out, squares, length, u)
                self._sums[out] = _Sum(squares, length, variance)
            least = _least(precision) if op in PRODUCTS else 0.0

            def spread(x: Tensor, q: Tensor) -> Tensor:
                return _in_blocks(partial(_spread, node, self.length(node, args, x), u=u, least=least), x, q)

            by_chance = _map_real(spread, out, squares)
            if precision.flush:
                self.flushed[node.id] = _map_real(
                    lambda x, q: _flushed(self.length(node, args, x), q, precision), out, squares
                )
            if self.narrow_factors(node):
                by_chance = _map_real(lambda x, q: torch.maximum(x, self._cut_short(node, args, q)), by_chance, squares)
            self.spread[node.id] = self._in_order(node, args, kwargs, by_chance)
            if precision.accumulate == "float32":  # errors of similar terms are similar
                self.lost[node.id] = lost = self._in_float32(node, args, kwargs)
                self.spread[node.id] = _map_real(_at_least, self.spread[node.id], lost)
        if node.id in self.spread:
            self.spread[node.id] = _map_real(_narrowed, self.spread[node.id])
        parts = [x for x in tree_leaves(out) if isinstance(x, Tensor) and x.is_floating_point()]
        if any(bool(((x != 0.0) & (x.abs() < _least(precision) / precision.unit)).any()) for x in parts):
            self.tiny.add(node.id)
        if any(bool((x.abs() > _largest(precision)).any()) for x in parts):
            self.huge.add(node.id)
        return out

    def _record_sum(self, node: Node, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        """Successive additions are one sum, in any order: a kernel may begin a product with its bias.

        A factor times a sum is one too, of terms that may have been multiplied one by one, and so is a sum whose
        elements are in other places. The errors of its parts are not counted again. An average, c a + (1 - c) b, may be
        computed as a + (1 - c) (b - a), as the last line of a GRU often is.
        """
        if kwargs or not isinstance(out, Tensor) or not out.is_floating_point():
            return
        a, b = (*args, None)[:2]
        u, by_number = self.unit(node), node.op in ("mul", "div") and not isinstance(b, Tensor) and b != 0
        if node.op == "mul" and self._sum(a) is None:
            a, b = b, a
        known = self._sum(a)
        if node.op in ("add", "sub"):
            first, second = self._sum(a) or _Sum.of(a), self._sum(b) or _Sum.of(b)
            if node.op == "sub":
                second, b = second.times(-1.0), b * -1.0  # -b of unsigned numbers is another
            total = first.plus(second, torch.as_tensor(a), torch.as_tensor(b), out, u)
            scaled = [self._scaled.get(x, []) if isinstance(x, Tensor) and node.op == "add" else [] for x in args]
            averaged = [(x, c, y, d) for x, c in scaled[0] for y, d in scaled[1] if _is_average(c, d)]
            for x, c, y, d in averaged[:1]:  # a difference, and a share of it: of 0 or 1 it is none
                off = torch.as_tensor((a / c if x is None else x) - (b / d if y is None else y))
                none = torch.as_tensor(c * d) == 0.0
                total.variance = total.variance + torch.where(none, 0.0, 2.0 / 3.0 * (u * off).square())
            self._sums[out] = total
            if total.length > 2 or averaged:
                added = (total.variance - first.variance).sub_(second.variance).clamp_(min=0.0)
                self.spread[node.id] = added.sqrt_().nan_to_num_(0.0, 0.0, 0.0)
        elif known and (by_number or (node.op == "mul" and isinstance(b, Tensor))):
            self._sums[out] = scaled_sum = known.times(b if node.op == "mul" else 1.0 / b)
            off = (scaled_sum.squares / 3.0).sqrt_().mul_(u).nan_to_num_(0.0, 0.0, 0.0)
            self.spread[node.id] = off.masked_fill_(out == 0.0, 0.0)  # exact, as a c - a c
        elif known and node.op in MOVES | {"neg"}:

            def move(x: Tensor) -> Any:  # laid out as what was moved, which as_strided reads and a view depends on
                x = x if x.stride() == a.stride() else torch.empty_like(a, dtype=x.dtype).copy_(x)
                return call(node, [x, *args[1:]], {}, self.device)

            self._sums[out] = known.times(-1.0) if node.op == "neg" else known.moved(move)
        if by_number:
            self._scaled[out] = [(None, args[1] if node.op == "mul" else 1.0 / args[1])]
        elif node.op == "mul" and isinstance(b, Tensor):
            self._scaled[out] = [(a, b), (b, a)]

    def _sum(self, x: Any) -> _Sum | None:
        return self._sums.get(x) if isinstance(x, Tensor) else None

    def _in_order(self, node: Node, args: Any, kwargs: dict[str, Any], by_chance: Any) -> Any:
        """The spread of sums with terms added in memory order, where it is larger than `by_chance`, in random order.

        Similar neighbours, as the gradients of one image, have larger partial sums than terms in random order. Each of
        K additions errs by at most u of its partial sum, which is taken from the ends of PIECES pieces.
        """
        spreads = tree_leaves(by_chance)
        pieces = [tree_leaves(call(node, piece, kwargs, self.device)) for piece in _pieces(node, args)]
        for i, several in enumerate(zip(*pieces, strict=True)):
            if isinstance(several[0], Tensor) and several[0].shape == spreads[i].shape:
                squares = torch.stack(several).cumsum(0).square().sum(0).nan_to_num(0.0)
                length = self.length(node, args, spreads[i]) / len(several)
                spreads[i] = torch.maximum(spreads[i], self.unit(node) * (length / 3.0 * squares).sqrt())
        return spreads if isinstance(by_chance, (tuple, list)) else spreads[0]

    def _in_float32(self, node: Node, args: Any, kwargs: dict[str, Any]) -> Any:
        """The difference of torch's float32 from float64, for the same numbers, rounded to float32."""
        narrow = _map_real(torch.Tensor.float, args)
        matmul, conv = torch.backends.cuda.matmul, torch.backends.cudnn.conv  # type: ignore[attr-defined]
        with process_wide(*(attribute(of, "fp32_precision", "ieee") for of in (matmul, conv))):  # not TF32
            rounded = call(node, narrow, kwargs, self.device)
        exact = call(node, _map_real(torch.Tensor.double, narrow), kwargs, self.device)
        return _map_real(lambda x, y: torch.nan_to_num(y.double() - x, 0.0, 0.0, 0.0).float(), exact, rounded)

    def length(self, node: Node, args: Any, out: Tensor) -> int:
        """How many terms an element of a sum has, at most."""
        return self._most.get(node.id) or _length(node, args, out)

    def truncates(self, node: Node) -> bool:
        """Whether an operation sums products, on tensor cores that may truncate as they add."""
        return self.rules[node.id].cut > 0.0 and (node.op in PRODUCTS or not self.summed.isdisjoint(node.parents))

    def _cut_short(self, node: Node, args: Any, squares: Tensor) -> Tensor:
        """The spread of what a product loses on tensor cores, which add several products at a time and truncate.

        What partial sums lose has the sign of these, so it adds up: of n partial sums in random order, whose terms have
        this sum of `squares`, the sum has a variance of n^2 / 3 times that.
        """
        count = self.length(node, args, squares) / self.at_a_time(node)
        lost = self.rules[node.id].unit * count * (squares / 3.0).sqrt()
        return torch.where(squares.isfinite(), lost, 0.0)

    def at_a_time(self, node: Node) -> int:
        """How many products a tensor core adds at a time: 8 of 16-bit factors, 4 of TF32, as an A100."""
        return AT_A_TIME // 2 if str(self.rules[node.id].products).startswith("tf32") else AT_A_TIME

    def narrow_factors(self, node: Node) -> bool:
        """Whether an operation is a product of numbers that tensor cores take, declared as cut or stored as such."""
        rule = self.rules[node.id]
        return node.op in PRODUCTS and (rule.cut > 0.0 or _storage_unit(rule) > UNIT_ROUNDOFF["float32"])

    def unit(self, node: Node) -> float:
        """The round-off of an addition; to truncate is twice as far off as to round."""
        return self.rules[node.id].unit * (2.0 if self.truncates(node) else 1.0)


_MOVING = MOVES | FACTORIES | SELECTIONS


def _at_least(spread: Tensor, lost: Tensor) -> Tensor:
    """A spread as large as what float32 lost: in each element, and in all, since one may have lost little by luck."""
    times = (lost / spread).nan_to_num_(0.0, 0.0, 0.0).square_().mean().sqrt() if lost.numel() else 1.0
    return torch.maximum(spread * max(1.0, float(times)), lost.abs())


def _narrowed(spread: Tensor) -> Tensor:
    """A large spread in float32, which stays in memory through all simulated runs, where float32 has its numbers."""
    normal = torch.finfo(torch.float32)
    if spread.numel() < BATCH or bool((((spread > 0.0) & (spread < normal.tiny)) | (spread > normal.max)).any()):
        return spread
    return spread.float()


_COUNTING = frozenset(["_to_copy", "add", "sub", "rsub", "mul", "sum", "cumsum"])

_PLACED = frozenset(["index_add", "index_put", "scatter_add", "put", "embedding_dense_backward"])
"""Sums to places, with a term for each time that a place is named."""


def _fits(x: Any, most: float) -> bool:
    """Whether x has only whole numbers, below `most`."""
    if not isinstance(x, Tensor):
        return not isinstance(x, float) or x.is_integer()
    if not x.is_floating_point() or not x.numel():
        return not x.is_complex()
    return float(x.flatten()[0]).is_integer() and bool(((x == x.round()) & (x.abs() < most)).all())


def _storage_unit(precision: Precision) -> float:
    """The unit round-off of the dtype in which every operation's result is stored, or 0 where it is not stored."""
    return UNIT_ROUNDOFF.get(precision.storage or "", 0.0) if precision.eager else 0.0


def _formats(precision: Precision) -> list[str]:
    """The formats to which each operation's result is rounded, in this order."""
    return [precision.accumulate, precision.storage or ""][: 1 + (_storage_unit(precision) > 0.0)]


AT_A_TIME = 8
"""Products of 16-bit factors that a tensor core adds at a time (Fasi et al. 2021); what an H200 gives fits 16."""
PIECES = 16
"""Pieces into which a sum is cut to estimate its partial sums, to a sixteenth of it."""


def _pieces(node: Node, args: Any) -> list[Any]:
    """The arguments of an operation for each piece of its sums in turn, where it has one sum of many terms."""
    if node.op == "convolution_backward":  # the gradients of weights and biases, image by image
        images = zip(args[0].chunk(PIECES), args[1].chunk(PIECES), strict=True)
        return [(gradient, x, *args[2:]) for gradient, x in images]
    if node.op == "sum" and args[0].ndim:
        over = args[1] if len(args) > 1 and args[1] else range(args[0].ndim)
        return [(piece, *args[1:]) for piece in args[0].chunk(PIECES, min(d % args[0].ndim for d in over))]
    return []


def _in_blocks(compute: Callable[..., Tensor], x: Tensor, y: Tensor) -> Tensor:
    """What `compute` gives for each element of two tensors of one shape, in float64. Of large ones BATCH elements are
    taken at a time, since intermediate results would be as large."""
    if x.numel() <= BATCH:
        return compute(x, y)
    found = torch.empty(x.shape, dtype=torch.float64, device=x.device)
    for place, *some in zip(*(each.reshape(-1).split(BATCH) for each in (found, x, y)), strict=True):
        place.copy_(compute(*some))
    return found


def _spread(node: Node, length: int, x: Tensor, squares: Tensor, u: float, least: float) -> Tensor:
    """The standard deviation of a sum's error; each of its products errs by half of `least` at most by underflow.

    `least` is the smallest number. The errors of equal terms are not independent: each partial sum may be off in the
    same direction, unless all of them are exact.
    """
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
    """A bound of the sum of those terms that are below the smallest normal number."""
    return (length * squares).sqrt().clamp(max=length * _least(precision))


def _moments(x: Tensor, variance: Tensor, mean: Tensor, u: float) -> list[Tensor]:
    """The errors of a variance and a mean. By updates a variance is off by u for each term, times its condition,
    sqrt(1 + mean^2 / variance); a mean as a sum.

    Chan, Golub and LeVeque, "Algorithms for computing the sample variance", The American Statistician 37.
    """
    count = max(1, x.numel() // max(1, variance.numel()))
    squares = count * (variance + mean.square())
    condition = (1.0 + mean.square() / variance.clamp(min=1e-300)).sqrt()
    off = torch.where(variance > 0.0, variance * u * math.sqrt(count) * condition, 0.0)
    return [off, variance_of_sum(mean * count, squares, count, u).clamp(min=0.0).sqrt() / count]


BATCH = 1 << 20
"""Elements of an operation's results that are simulated at once on a CPU: 8 MiB stay in its cache."""
GPU_BATCH = 1 << 24
"""The same on a GPU: from 2^22 to 2^26 a block of width 4096 takes 1.5 to 1.6 s and 19 GiB; with all, 51."""

LIVE = 32
"""Results of operations that may be in memory at once: a GPU's free memory is shared among as many."""


def simulate(run: Run, runs: int, seed: int, elements: int, device: torch.device) -> Iterator[tuple[int, Tensor]]:
    """Call `run()` `runs` times, each with its own random numbers; yields (operation, results [some runs, *shape]).

    `elements` is the size of its largest operation. A program that is large, or cannot be run in a batch, is run one by
    one. The seed of torch's generator and vmap's warning are process-wide and restored at the end.
    """
    with process_wide(without_vmap_warning()), torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(
            seed
        )  # torch.manual_seed keeps a traceback for each kind of device without one
        if device.type == "cuda":
            torch.cuda.manual_seed_all(seed)
        batch = min(GPU_BATCH, torch.cuda.mem_get_info(device)[0] // (8 * LIVE)) if device.type == "cuda" else BATCH
        at_once = max(1, min(runs, batch // max(1, elements)))
        for start in range(0, runs, at_once):
            if at_once == 1:
                yield from ((i, value[None]) for i, value in run().items())
                continue
            each = torch.empty(min(at_once, runs - start), device=device)
            try:
                results = torch.vmap(lambda _: run(), randomness="different")(each)
            except RuntimeError:  # a shape that depends on values has no batches
                singles = [run() for _ in each]
                results = {i: torch.stack([single[i] for single in singles]) for i in singles[0]}
            yield from results.items()


def _uniform(x: Tensor, low: float, high: float) -> Tensor:
    """Random numbers from `low` to `high` of the shape of x, in float64; 24 bits are enough for errors.

    What is large is run alone (:func:`simulate`), and on a CPU takes a third of the time by numpy's generator.
    """
    if in_vmap():
        return torch.rand_like(x, dtype=torch.float32).double().mul_(high - low).add_(low)
    if x.is_cuda:
        return torch.empty_like(x, dtype=torch.float64).uniform_(low, high)
    raw = np.random.SFC64(int(torch.randint(2**62, ()))).random_raw(x.numel() // 2 + 1)
    found = torch.empty_like(x, dtype=torch.float64)  # in the order of x in memory, which as_strided sees
    found.as_strided((x.numel(),), (1,)).copy_(torch.from_numpy(raw.view(np.int32)[: x.numel()]))
    return found.mul_((high - low) * 2.0**-32).add_((low + high) / 2.0)


def _sample_by_value(x: Tensor) -> Tensor:
    """As :meth:`Rounding._sample`, but elements equal in float32 get equal numbers: a hash of their bits and a seed."""
    mixed = x.float().view(torch.int32).long() ^ torch.randint(2**62, (), device=x.device)
    mixed *= -0x61C8864680B583EB
    mixed ^= mixed >> 29
    mixed *= -0x40A7B892E31B1A47
    mixed ^= mixed >> 32
    mixed &= 0xFFFFFF
    return mixed.double().add_(0.5).div_(2.0**24)


@dataclass(eq=False)
class Rounding:
    """Runs operations with random rounding errors; inside :func:`simulate`, which seeds them.

    `observed` are the numbers of operations with observed values: each value is perturbed once a run where one of the
    `nonlinear` operations takes it. `scale` multiplies every error, for whole numbers, which change only at a tie.

    Errors of elements are independent. With `nearest` they are correlated: operations round to the nearest, and equal
    values have equal errors, as in x + c with one c, or in repeated rows. `recomputed` has a function for each value
    that several operations take: it computes the value again for each of them, as kernels do that do not share it.
    """

    exact: Exact
    nonlinear: Collection[int] = ()
    observed: Collection[int] = ()
    scale: float = 1.0
    nearest: bool = False
    recomputed: Mapping[int, Callable[[Rounding, Any], Any]] = field(default_factory=dict)
    _moved: dict[int, Tensor] = field(default_factory=dict, init=False)

    def _sample(self, x: Tensor, low: float, high: float) -> Tensor:
        """Random numbers from `low` to `high` of the shape of x."""
        return _sample_by_value(x).mul_(high - low).add_(low) if self.nearest else _uniform(x, low, high)

    def jitter(self, x: Tensor, u: float, least: Any = 0.0) -> Tensor:
        """Every element off by up to u of itself, and by up to `least`, a number or a tensor of one."""
        u, least = self.scale * u, self.scale * least
        moved = self._sample(x, 1.0 - u, 1.0 + u).mul_(x)
        return moved.add_(self._sample(x, -1.0, 1.0).mul_(least)) if isinstance(least, Tensor) or least else moved

    def moved(self, x: Tensor, half: Tensor) -> Tensor:
        """Every element off by up to `half`."""
        return self._sample(x, -self.scale, self.scale).mul_(half).add_(x)

    def _into_nonlinear(self, ref: Any, x: Any, precision: Precision) -> Any:
        """An observed value that enters a nonlinear part: off by a round-off, each element and all of them together."""
        if not isinstance(ref, Ref) or ref.id not in self.observed or not x.is_floating_point():
            return x
        if ref.id not in self._moved:
            u, least = precision.unit, precision.unit * magnitude(x).amax() if precision.normwise else 0.0
            self._moved[ref.id] = self.jitter(x, u, least).mul_(1.0 + self._common_error(u))
        return self._moved[ref.id]

    def _recomputed_argument(self, op: str, ref: Any, x: Any) -> Any:
        """An argument that several operations take, computed again for this one, with errors of its own.

        Arguments of comparisons and choices are shared: else one comparison would not be the opposite of another.
        """
        if op in SELECTIONS or not isinstance(ref, Ref) or ref.id not in self.recomputed:
            return x
        again, self.recomputed = self.recomputed, {}
        value = again[ref.id](self, x)
        self.recomputed = again
        return value

    def _common_error(self, u: float) -> Tensor:
        """One number between -u and u, common to a tensor; on the host where that saves a launch."""
        device = self.exact.device if in_vmap() else torch.device("cpu")
        return (torch.rand((), dtype=torch.float64, device=device) - 0.5) * (2.0 * u * self.scale)

    def __call__(self, node: Node, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run one operation, its result off at random."""
        op, precision = node.op, self.exact.rules[node.id]
        if node.id in self.exact.counted:
            return call(node, args, kwargs, self.exact.device)
        if self.recomputed:
            args = [self._recomputed_argument(op, ref, a) for ref, a in zip(node.args, args, strict=True)]
        if node.id in self.nonlinear:
            args = [self._into_nonlinear(ref, a, precision) for ref, a in zip(node.args, args, strict=True)]
        u, storage_unit = precision.unit, _storage_unit(precision)
        if cut := self.exact.cut.get(node.id):
            args = [self._cut(a, precision) if inexact else a for a, inexact in zip(args, cut, strict=True)]
        if op in _ARGUMENT:
            args = [_map_real(lambda x: self.jitter(x, u), args[0]) * (1.0 + self._common_error(u)), *args[1:]]
        if node.id in self.exact.perturbed:
            args = tree_map_only(Tensor, lambda x: self._perturbed(node, args, x, max(u, storage_unit)), args)
        out = self._with_literals(node, args, kwargs)
        if op in NOT_UNIQUE:
            out = self._with_random_signs(out)
        if op in RESAMPLERS | TRANSFORMS:  # polynomials in positions, and sums of waves, which may cancel
            out = tree_map_only(Tensor, lambda x: self._perturbed(node, args, x, max(u, storage_unit)), out)
        if node.id in self.exact.huge:
            out = _map_real(lambda x: torch.where(x.abs() > _largest(precision), x * math.inf, x), out)
        rounds = storage_unit and (op == "_to_copy" or node.id in self.exact.kernel_results) and isinstance(out, Tensor)
        if _only_moves(node) and not (rounds and out.is_floating_point()):
            return out
        if node.id in self.exact.spread:
            length = self.exact.length(node, args, next(x for x in tree_leaves(out) if isinstance(x, Tensor)))
            added = self.exact.unit(node)
            drift = lost_terms(length, added)
            if self.exact.truncates(node):
                drift = worst_case(length, added)
            elif self.exact.narrow_factors(node):
                drift = worst_case(length / self.exact.at_a_time(node), 2.0 * added)
            if op == "cumsum" and out.is_floating_point():  # what an addition errs stays in all sums after it
                out = out + torch.cumsum(self.jitter(out, added) - out, args[1])
            else:
                out = _map_real(lambda x, spread: self._sum_error(x, spread, drift), out, self.exact.spread[node.id])
        if node.id in self.exact.flushed:
            share = self._common_error(1.0)
            out = _map_real(lambda x, lost: x + torch.sign(x) * lost * share, out, self.exact.flushed[node.id])
        if self.nearest and node.id in self.exact.lost:
            share = torch.rand((), dtype=torch.float64, device=self.exact.device) * self.scale
            out = _map_real(lambda x, lost: x + lost * share, out, self.exact.lost[node.id])
        if op in _BY_A_NUMBER and len(node.parents) == 1:  # or by its reciprocal
            out = _map_real(lambda x: x * (1.0 + self._common_error(u)), out)
        if op in FUNCTIONS or op == "div":
            out = _map_real(lambda x: self._function_error(x, 2.0 * FUNCTION_ULPS * u), out)
        if op in _COMPUTED_FROM:
            ones = torch.ones_like(out)
            off = self._function_error(ones, 2.0 * FUNCTION_ULPS * u) - ones
            out = out + _COMPUTED_FROM[op] * torch.sign(out) * off
        if self.nearest:
            rounded = _map_real(lambda x: reduce(stored, _formats(precision), x), out)
            if op == "mul" and not storage_unit and out.is_floating_point():  # exact in a fused addition
                return torch.where(self.either() > 0.0, out, rounded)
            return rounded
        least = 0.0
        if node.id in self.exact.tiny:  # few libraries compute functions below the normal numbers
            least = torch.finfo(dtype_of(precision.accumulate)).tiny if op in FUNCTIONS else _least(precision)
        if precision.normwise:
            return _map_real(lambda x: self.jitter(x, 0.0, max(u, storage_unit) * magnitude(x).amax()), out)
        return _map_real(lambda x: self.jitter(x, max(u, storage_unit), least), out)

    def _with_literals(self, node: Node, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operation with the literal numbers of the program's text exact, or rounded to the working format.

        These are arguments, `alpha` and the result of a factory; each is rounded in half of the runs. The format is the
        storage dtype, since many of torch's kernels take numbers in their tensors' type.
        """
        op, kind = node.op, _formats(self.exact.rules[node.id])[-1]
        lost = [_literal_error(a, kind) for a in args] if op in _NUMBERED else []
        alpha = _literal_error(kwargs.get("alpha", 1), kind)
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

    def _perturbed(self, node: Node, args: Any, x: Tensor, u: float) -> Tensor:
        """An argument with the backward error of a stable algorithm: each element off, and all by one factor.

        The result of the algorithm is exact for arguments that are off by p(n) u of their norm (Higham, chapters 9, 10,
        19 and 24): of a column by elimination, of an element in kernels that only sum, else of the whole argument. p is
        at worst n by elimination and n^2 by n reflections, and by chance the root of that (Higham and Mary 2019,
        Connolly and Higham 2023), twice where both sides are reflected. It is log2(n) for a Fourier transform, and 2 n
        where positions are computed, which are off by u of the size of an image. Complex arithmetic is off by a
        round-off of the absolute value. An eager algorithm may store its intermediate results, too.
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
        moved = _map_real(lambda part: part + self._sample(part, -u * self.scale, u * self.scale) * size, x)
        return moved * (1.0 + self._common_error(factor * u))

    def _with_random_signs(self, out: Any) -> Any:
        """Singular vectors, or eigenvectors, with random signs; the same sign for both of one singular value."""
        signs = torch.randint(2, (sum(x.shape[-1] for x in out),), device=self.exact.device) * 2.0 - 1.0
        if len(out) == 2:
            return out[0], out[1] * signs[: out[1].shape[-1]]
        return out[0] * signs[: out[0].shape[-1]], out[1], (out[2].mT * signs[: out[2].shape[-2]]).mT

    def either(self) -> Tensor:
        """0 or 1 with equal probability, times `scale`."""
        return torch.randint(2, (), device=self.exact.device) * self.scale

    def _function_error(self, x: Tensor, u: float) -> Tensor:
        """The result of a library function: off by up to u, in equal parts by chance, by its value, and in common.

        Equal arguments have equal errors, and so may neighbours, or all: an approximation has a bias.
        """
        share = u / 3.0**0.5
        by_value = (2.0 * torch.rand(HASH_BINS, dtype=torch.float64, device=x.device) - 1.0) * (share * self.scale)
        by_value += self._common_error(share) + 1.0
        error = by_value[(x * HASH_BINS).floor_().long().bitwise_and_(HASH_BINS - 1)]  # NaN has any, and stays NaN
        return error.add_(self._sample(x, -share * self.scale, share * self.scale)).mul_(x)

    def _cut(self, a: Tensor, precision: Precision) -> Tensor:
        """Factors cut to TF32, rounded or truncated, which is unspecified: up to two units, of one sign if truncated.

        To a storage type factors are rounded: half of the error is independent, and half common, as for equal ones.
        """
        u = precision.cut if str(precision.products).startswith("tf32") else precision.cut / 2.0
        return self.jitter(a, u).mul_(1.0 + self._common_error(u))

    def _sum_error(self, x: Tensor, spread: Tensor, drift: float) -> Tensor:
        """A sum with its error, which with `nearest` is a function of its residual in float32: equal sums err equally.

        The residual is rounded to 2^-16 of half a unit, which float64 still resolves.
        """
        if self.nearest:
            by = ((x - x.float()) / half_ulp(x, "float32") * 2.0**16).round()
            normal = self._sample(by, 2.0**-24 - 1.0, 1.0 - 2.0**-24).erfinv_().mul_(2.0**0.5)
        else:
            normal = torch.randn_like(x, dtype=torch.float32).double()
        moved = torch.addcmul(x, normal, spread, value=self.scale)
        return moved.mul_(1.0 + self._common_error(min(1.0, drift)))


def _is_average(c: Any, d: Any) -> bool:
    """Whether two weights, numbers or tensors, are from 0 to 1 and add up to 1, to 1e-12."""
    c, d = torch.as_tensor(c), torch.as_tensor(d)
    return c.shape == d.shape and bool(((c + d - 1.0).abs() < 1e-12).all() & (c >= 0.0).all() & (d >= 0.0).all())


def _literal_error(number: Any, name: str) -> float:
    """The error of rounding a number of the program to a format; 0 for anything else, or where it is not finite."""
    if not isinstance(number, float) or not math.isfinite(number):
        return 0.0
    exact = torch.tensor(number, dtype=torch.float64)
    return float(stored(exact, name) - exact)


def _least(precision: Precision) -> float:
    """The most that one operation loses by underflow: the smallest number, or the smallest normal one where flushed."""
    return max(SMALLEST[name] * (0.5 / UNIT_ROUNDOFF[name] if precision.flush else 1.0) for name in _formats(precision))


def _largest(precision: Precision) -> float:
    """The largest finite number between operations."""
    return min(torch.finfo(dtype_of(name)).max for name in _formats(precision))


def magnitude(x: Tensor) -> Tensor:
    """|x|, and 0 where x is not finite."""
    return torch.where(x.isfinite(), x.abs(), 0.0)
