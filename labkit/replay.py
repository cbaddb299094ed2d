"""The closed list of operations that a trace's step is replayed for.

They are matmul, transpose, scale, add, softmax, sums, means, variances and maxima along axes, convolutions and
their windows, attention, and Sinkhorn's normalisation.

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
from labkit.products import added, causal, fitted, products
from labkit.replayed import Function, Replay
from labkit.sinkhorn import sinkhorn
from labkit.windows import windows

Tensor = torch.Tensor

_CLOSED = re.compile(
    r"matmul|linear|mm\b|gemm|@|transpose|permute|scale|\badd\b|bias|residual|softmax|mask|^(sum|mean|max)\b|variance|conv|im2col|col2im|fold|sinkhorn|attention|\battn\b|sdpa|flash",
    re.IGNORECASE,
)

_WINDOWS = re.compile(r"im2col|col2im|fold", re.IGNORECASE)
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
        windows(inputs, golden) if _WINDOWS.search(text) else (),
        sinkhorn(inputs, golden, precision) if "sinkhorn" in text.lower() else (),
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
    if re.search(r"matmul|linear|mm\b|gemm|@|q k", text) and len(inputs) >= 2:
        for mask in masked:
            yield from products(inputs, golden, softmax, mask, text)
    elif softmax:
        for axis in _axes(text, inputs[0]):
            for mask in masked:
                for factor in _softmax_factors(text):
                    yield Replay(_softmax_of(axis, mask, factor), None, None, inputs[0].shape[axis], True, False)
    elif len(inputs) >= 2 and re.search(r"add|bias|residual|mask", text):
        yield Replay(lambda *xs: added(xs), lambda *xs: added([x.abs() for x in xs]), None, len(inputs), False, False)
    elif len(inputs) == 1 and re.search(r"transpose|permute", text):
        for way in _moves(inputs[0].shape, golden.shape):
            yield Replay(way, None, None, 0, False, False)
    elif len(inputs) == 1 and "scale" in _without(text):
        x = inputs[0]
        if x.shape == golden.shape:
            factor = fitted(x, golden)
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
        x = added((x * factor, *others))
        return torch.softmax(causal(x) if mask else x, axis)

    return run


def _moves(before: torch.Size, after: torch.Size) -> Iterator[Function]:
    for order in itertools.permutations(range(len(before))):
        if len(before) <= 5:
            yield lambda x, order=order: x.permute(order).reshape(after)
