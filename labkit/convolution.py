"""Convolutions of one and two dimensions as replays: forward, and the gradients of their input and of their weight.

Tensors are [batch, channel, ..] and weights [out, in / groups, ..], as PyTorch has them. Stride, padding and dilation
are taken from the text, or tried.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch.nn import functional, grad

from labkit.replayed import Function, Replay

Tensor = torch.Tensor
Pair = tuple[int, ...]
WINOGRAD = 4.0
"""What is allowed for 3 x 3 filters of stride 1, against the sum as it is written: libraries take Winograd's F(4, 3),
whose errors in float32 were 5 to 11 times a direct convolution's, and 0.4 to 1.3 times what is allowed for that one
(Gaussian data, 4 to 512 channels)."""


def convolutions(text: str, inputs: Sequence[Tensor], golden: Tensor) -> Iterator[Replay]:
    """What a text with "conv" may mean of its inputs, one of them as it is, another the weight, the rest added."""
    for i, j in itertools.permutations(range(len(inputs)), 2):
        x, y = inputs[i], inputs[j]
        n = x.ndim - 2
        if n not in (1, 2) or y.ndim != x.ndim or golden.ndim != x.ndim:
            continue
        others = [k for k in range(len(inputs)) if k not in (i, j)]
        for settings in _settings(text, n):
            for run, length, weights in _ways(x.shape, y.shape, golden.shape, *settings):
                if not others or weights is not None:
                    quick = weights is not None and settings[0] == (1, 1) and tuple(weights[2:]) == (3, 3)
                    yield _replay(run, i, j, others, length, WINOGRAD if quick else 1.0)


def _ways(
    x: torch.Size, y: torch.Size, out: torch.Size, stride: Pair, pad: Pair, dilation: Pair
) -> Iterator[tuple[Function, int, torch.Size | None]]:
    """What gives a result of this shape: forward, x being the input; the gradient of the input, x being that of the
    result; the gradient of the weights, y being that of the result. With each, what is summed over, and the weights."""
    flat = len(x) == 3
    forward = functional.conv1d if flat else functional.conv2d
    of_input = grad.conv1d_input if flat else grad.conv2d_input
    of_weight = grad.conv1d_weight if flat else grad.conv2d_weight
    fits = partial(_fits, stride=stride, pad=pad, dilation=dilation)
    for groups, call, summed, weights in (
        (fits(x, y, out), forward, y[1:], y),
        (fits(out, y, x), lambda dy, w, **s: of_input(out, w, dy, **s), y[:1] + y[2:], y),
        (fits(x, out, y), lambda x, dy, **s: of_weight(x, out, dy, **s), x[:1] + x[2:], None),
    ):
        if groups:
            yield (
                partial(call, stride=stride, padding=pad, dilation=dilation, groups=groups),
                math.prod(summed),
                weights,
            )


def _replay(run: Function, i: int, j: int, others: Sequence[int], length: int, transformed: float) -> Replay:
    def added(total: Tensor, xs: Sequence[Tensor]) -> Tensor:
        for k in others:
            total = total + (xs[k].reshape(1, -1, *(1,) * (total.ndim - 2)) if xs[k].ndim == 1 else xs[k])
        return total

    return Replay(
        lambda *xs: added(run(xs[i], xs[j]), xs),
        lambda *xs: added(run(xs[i].abs(), xs[j].abs()), [x.abs() for x in xs]),
        lambda *xs: run(xs[i].square(), xs[j].square()),
        length, False, True, transformed,
    )  # fmt: skip


def _settings(text: str, n: int) -> Iterator[tuple[Pair, Pair, Pair]]:
    """Stride, padding and dilation in every dimension."""

    def given(pattern: str) -> list[int]:
        found = re.search(rf"(?:{pattern})\w*\s*[=:]?\s*\(?(\d+)", text)
        return [int(found.group(1))] if found else []

    strides, dilations = given("stride") or [1, 2], given("dilat") or [1]
    pads = given("pad") or [0, 1, 2, 3]
    for stride, pad, dilation in itertools.product(strides, pads, dilations):
        yield (stride,) * n, (pad,) * n, (dilation,) * n


def _sizes(x: torch.Size, w: torch.Size, stride: Pair, pad: Pair, dilation: Pair) -> torch.Size:
    spatial = [
        (size + 2 * p - d * (k - 1) - 1) // s + 1
        for size, k, s, p, d in zip(x[2:], w[2:], stride, pad, dilation, strict=True)
    ]
    return torch.Size((x[0], w[0], *spatial))


def _fits(x: torch.Size, w: torch.Size, out: torch.Size, stride: Pair, pad: Pair, dilation: Pair) -> int:
    """The groups of a convolution of these shapes; 0 if there is none."""
    groups = x[1] // w[1] if w[1] and x[1] % w[1] == 0 else 0
    return groups if groups and w[0] % groups == 0 and _sizes(x, w, stride, pad, dilation) == out else 0
