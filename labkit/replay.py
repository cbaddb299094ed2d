"""The closed list of operations that a trace's step is replayed for.

They are matmul, transpose, scale, add, softmax, sums, means, variances and maxima along axes, and convolutions.

A step's text and its recorded inputs suggest candidates; a candidate counts only if, on the golden's inputs, it gives
the golden's step to the golden's own precision. So a text that says one thing of a tensor that is another is found
out, a factor such as 1/sqrt(d) is read off the golden, and heads may be split and merged on the way.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from labkit.attention import attentions
from labkit.convolution import convolutions
from labkit.replayed import Function, Replay

Tensor = torch.Tensor

_CLOSED = re.compile(
    r"matmul|linear|gemm|@|transpose|permute|scale|\badd\b|bias|residual|softmax|mask|^(sum|mean|max)\b|variance|conv|attention|\battn\b|sdpa|flash",
    re.IGNORECASE,
)

_ATTENTION = re.compile(r"attention|\battn\b|sdpa|flash|softmax", re.IGNORECASE)


def replay(op: Any, inputs: Sequence[Tensor], golden: Tensor, precision: float) -> Replay | None:
    """The operation that gives `golden` from the golden's `inputs`, all float64; None for any other.

    `precision` is the unit round-off in which the golden itself was computed.
    """
    text = str(op or "")
    if not inputs or not _CLOSED.search(text) or not golden.numel():
        return None
    for candidate in itertools.chain(
        _reductions(text.lower(), inputs, golden),
        convolutions(text.lower(), inputs, golden) if "conv" in text.lower() else (),
        attentions(text.lower(), inputs, golden) if _ATTENTION.search(text) else (),
        _candidates(text.lower(), inputs, golden),
    ):
        if _gives(candidate, inputs, golden, precision):
            return candidate
    return None


def _without(text: str) -> str:
    return re.sub(r"1/sqrt\(\w+\)|/ ?sqrt\(\w+\)", " scale ", text)


def _gives(candidate: Replay, inputs: Sequence[Tensor], golden: Tensor, precision: float) -> bool:
    try:
        value = candidate.run(*inputs)
    except (RuntimeError, ValueError, IndexError):
        return False
    if value.shape != golden.shape:
        return False
    same = (value == golden) | (value.isnan() & golden.isnan())
    size = candidate.magnitude(*inputs) if candidate.magnitude else value.abs()
    size = size + float(value[value.isfinite()].abs().mean()) if value.isfinite().any() else size
    close = value.isfinite() & golden.isfinite()
    close &= (value - golden).abs() <= 16.0 * max(1, candidate.length) * precision * size
    return bool((same | close).all())


def _candidates(text: str, inputs: Sequence[Tensor], golden: Tensor) -> Iterator[Replay]:
    softmax = "softmax" in text
    masked = [False, True] if "mask" in text or "causal" in text else [False]
    if re.search(r"matmul|linear|gemm|@|q k", text) and len(inputs) >= 2:
        for mask in masked:
            yield from _products(inputs, golden, softmax, mask, text)
    elif softmax:
        for axis in _axes(text, inputs[0]):
            for mask in masked:
                for factor in _softmax_factors(text):
                    yield Replay(_softmax_of(axis, mask, factor), None, None, inputs[0].shape[axis], True, False)
    elif len(inputs) >= 2 and re.search(r"add|bias|residual|mask", text):
        yield Replay(lambda *xs: _added(xs), lambda *xs: _added([x.abs() for x in xs]), None, len(inputs), False, False)
    elif len(inputs) == 1 and re.search(r"transpose|permute", text):
        for way in _moves(inputs[0].shape, golden.shape):
            yield Replay(way, None, None, 0, False, False)
    elif len(inputs) == 1 and "scale" in _without(text):
        x = inputs[0]
        if x.shape == golden.shape:
            factor = _fitted(x, golden)
            yield Replay(lambda v: v * factor, None, None, 1, False, False)
    if len(inputs) == 1 and masked[-1] and not softmax and inputs[0].shape == golden.shape:
        hidden = golden.isinf()
        yield Replay(lambda v: torch.where(hidden, golden, v), None, None, 0, False, False)


def _reductions(text: str, inputs: Sequence[Tensor], golden: Tensor) -> Iterator[Replay]:
    """Along the axis that the text names, the last, the first, or all but the channel's. A variance may have a mean."""
    kind = re.match(r"(sum|mean|max)\b|.*\b(variance)\b", text)
    x = inputs[0]
    if not kind or not x.ndim or len(inputs) > (2 if kind.group(2) else 1) or "exp(" in text or "*" in text:
        return
    given = re.search(r"(?:axis|dim) ?= ?(-?\d+)", text)
    axes = [(int(given.group(1)),)] if given else [(-1,), (0,), (0, *range(2, x.ndim)), tuple(range(x.ndim))]
    for along in axes:
        if any(not -x.ndim <= a < x.ndim for a in along):
            continue
        count = math.prod(x.shape[a] for a in along)
        yield _reduction(kind.group(1) or "variance", along, count, golden.shape)


def _reduction(kind: str, along: tuple[int, ...], count: int, shape: torch.Size) -> Replay:
    share = 1.0 if kind == "sum" else 1.0 / count

    def total(x: Tensor) -> Tensor:
        return (x.sum(along) * share).reshape(shape)

    if kind == "max":
        return Replay(lambda *xs: xs[0].amax(along).reshape(shape), None, None, 0, False, False)
    if kind == "variance":

        def run(*xs: Tensor) -> Tensor:
            return total((xs[0] - xs[0].mean(along, keepdim=True)).square())

        def fourth(*xs: Tensor) -> Tensor:
            return total((xs[0] - xs[0].mean(along, keepdim=True)) ** 4) * share

        return Replay(run, run, fourth, count, False, False)  # in two passes; one pass cancels, and that shows

    def squares(*xs: Tensor) -> Tensor:
        return total(xs[0].square()) * share

    return Replay(lambda *xs: total(xs[0]), lambda *xs: total(xs[0].abs()), squares, count, False, False)


def _added(xs: Sequence[Tensor]) -> Tensor:
    total = xs[0]
    for x in xs[1:]:
        total = total + x
    return total


def _fitted(x: Tensor, golden: Tensor) -> float:
    keep = x.isfinite() & golden.isfinite()
    a, b = x[keep], golden[keep]
    scale = float(a.abs().max()) if a.numel() else 0.0
    if scale == 0.0:
        return 0.0
    return float(((a / scale) * b).sum() / ((a / scale) ** 2).sum() / scale)


def _axes(text: str, x: Tensor) -> list[int]:
    given = re.search(r"axis ?= ?(-?\d+)|dim ?= ?(-?\d+)", text)
    if given:
        axis = int(given.group(1) or given.group(2))
        return [axis] if -x.ndim <= axis < x.ndim else []
    return [-1]


def _softmax_factors(text: str) -> list[float]:
    widths = (8, 16, 24, 32, 40, 48, 64, 80, 96, 112, 128, 160, 192, 256) if "sqrt" in text or "scale" in text else ()
    return [1.0, *(1.0 / math.sqrt(d) for d in widths)]


def _softmax_of(axis: int, mask: bool, factor: float) -> Function:
    def run(x: Tensor, *others: Tensor) -> Tensor:
        x = _added((x * factor, *others))
        return _softmax(_causal(x) if mask else x, axis)

    return run


def _softmax(x: Tensor, axis: int = -1) -> Tensor:
    return torch.softmax(x, axis)


def _causal(x: Tensor) -> Tensor:
    n, m = x.shape[-2:]
    return x.masked_fill(torch.ones(n, m, dtype=torch.bool).triu(1 + m - n), -math.inf)


def _moves(before: torch.Size, after: torch.Size) -> Iterator[Function]:
    for order in itertools.permutations(range(len(before))):
        if len(before) <= 5:
            yield lambda x, order=order: x.permute(order).reshape(after)


_SIDES: dict[str, Function] = {
    "a b": lambda a, b: a @ b,
    "a b^T": lambda a, b: a @ b.mT,
    "a^T b": lambda a, b: a.mT @ b,
}


def _products(inputs: Sequence[Tensor], golden: Tensor, softmax: bool, mask: bool, text: str) -> Iterator[Replay]:
    """Two of the inputs multiplied, the others added; heads split before, split or merged after; scaled; softmax."""
    for i, j in itertools.permutations(range(len(inputs)), 2):
        others = [k for k in range(len(inputs)) if k not in (i, j)]
        if inputs[i].ndim < 1 or inputs[j].ndim < 2:
            continue
        for pre_a, pre_b in _head_splits(inputs[i].shape, inputs[j].shape, golden.shape, text):
            for side in _SIDES.values():
                for post in _after(golden.shape):
                    yield from _product(i, j, others, pre_a, pre_b, side, post, inputs, golden, softmax, mask)


def _product(
    i: int, j: int, others: Sequence[int], pre_a: Function, pre_b: Function, side: Function, post: Function,
    inputs: Sequence[Tensor], golden: Tensor, softmax: bool, mask: bool,
) -> Iterator[Replay]:  # fmt: skip
    def raw(*xs: Tensor) -> Tensor:
        return post(side(pre_a(xs[i]), pre_b(xs[j])))

    try:  # shapes first: on meta tensors nothing is computed
        shape = raw(*(torch.empty(x.shape, device="meta", dtype=torch.float64) for x in inputs)).shape
        a, b = (torch.empty(x.shape, device="meta") for x in (inputs[i], inputs[j]))
        a, b = pre_a(a), pre_b(b)
    except (RuntimeError, IndexError, ValueError):
        return
    if shape != golden.shape:
        return
    try:
        rest = golden - _added([inputs[k] for k in others]) if others else golden
    except RuntimeError:
        return
    if rest.shape != golden.shape:
        return
    length = a.shape[-2] if side is _SIDES["a^T b"] and a.ndim > 1 else a.shape[-1]
    value = raw(*inputs)
    factors = _product_factors(value, rest, softmax, length)
    for factor in factors:

        def run(*xs: Tensor, factor: float = factor) -> Tensor:
            total = _added([raw(*xs) * factor, *(xs[k] for k in others)])
            total = _causal(total) if mask else total
            return _softmax(total) if softmax else total

        def magnitude(*xs: Tensor, factor: float = factor) -> Tensor:
            total = raw(*(x.abs() for x in xs)) * abs(factor)
            return _added([total, *(xs[k].abs() for k in others)]) if others else total

        def squares(*xs: Tensor, factor: float = factor) -> Tensor:
            return raw(*(x * x for x in xs)) * factor * factor

        yield Replay(run, magnitude, squares, length, softmax, True)


def _product_factors(value: Tensor, rest: Tensor, softmax: bool, length: int) -> list[float]:
    if softmax:
        return [1.0, 1.0 / math.sqrt(length)]
    fitted = _fitted(value, torch.where(rest.isfinite(), rest, 0.0))
    return [1.0, fitted] if fitted not in (0.0, 1.0) and math.isfinite(fitted) else [1.0]


def _split(x: Tensor, heads: int) -> Tensor:
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads).transpose(-3, -2)


def _merged(x: Tensor) -> Tensor:
    return x.transpose(-3, -2).reshape(*x.shape[:-3], x.shape[-2], -1)


def _head_splits(a: torch.Size, b: torch.Size, after: torch.Size, text: str) -> Iterator[tuple[Function, Function]]:
    def same(x: Tensor) -> Tensor:
        return x

    yield same, same
    if len(after) >= 3 and re.search(r"head|q k|q @ k|softmax|probs", text):
        for heads in {after[-3], after[1] if len(after) > 1 else 1, after[0]}:
            if heads > 1:

                def split(x: Tensor, heads: int = heads) -> Tensor:
                    return _split(x, heads)

                yield split, split
                yield split, same
                yield same, split
    if len(b) == len(a) + 1 == len(after) + 1:  # one token of each head, over keys of which it may have a share

        def alone(x: Tensor) -> Tensor:
            return x.unsqueeze(-2)

        for swapped in (True, False):

            def shared(x: Tensor, swapped: bool = swapped) -> Tensor:
                x = x.transpose(-2, -3) if swapped else x
                return x.repeat_interleave(max(1, a[-2] // max(1, x.shape[-3])), -3)

            yield alone, shared
    if len(a) >= 3 and len(after) == len(b) == 2:

        def flat(x: Tensor) -> Tensor:
            return x.flatten(1)

        yield flat, same
    if len(b) >= 3 and len(after) == len(a) == 2:
        yield same, lambda x: x.flatten(1)
    if len(a) >= 3 and len(b) >= 3 and a[-3] != b[-3]:  # grouped heads
        yield same, lambda x: x.repeat_interleave(max(1, a[-3] // max(1, x.shape[-3])), -3)


def _after(shape: torch.Size) -> Iterator[Function]:
    def same(x: Tensor) -> Tensor:
        return x

    yield same
    yield _merged
    if len(shape) >= 3:
        heads = shape[-3]

        def split(x: Tensor) -> Tensor:
            return _split(x, heads)

        yield split
    yield lambda x: x.reshape(shape)
