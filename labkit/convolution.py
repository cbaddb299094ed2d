"""Convolutions of one and two dimensions as replays: forward, and the gradients of their input and of their weight.

Tensors are [batch, channel, ..] and weights [out, in / groups, ..], as PyTorch has them. Stride, padding and dilation
are taken from the text, or tried.
"""

from __future__ import annotations

import itertools
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
        shape = (x.shape, y.shape, golden.shape)
        for stride, pad, dilation in _settings(text, n):
            for run, length, filtered in (
                (_forward(shape, stride, pad, dilation), y[0].numel(), y),
                (_of_input(shape, stride, pad, dilation), y[:, 0].numel(), y),
                (_of_weight(shape, stride, pad, dilation), x[:, 0].numel(), None),
            ):
                if run is not None and (not others or filtered is not None):
                    quick = filtered is not None and stride == (1, 1) and tuple(filtered.shape[2:]) == (3, 3)
                    yield _replay(run, i, j, others, length, WINOGRAD if quick else 1.0)


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


def _fits(x: torch.Size, w: torch.Size, out: torch.Size, *settings: Pair) -> int:
    """The groups of a convolution of these shapes; 0 if there is none."""
    groups = x[1] // w[1] if w[1] and x[1] % w[1] == 0 else 0
    return groups if groups and w[0] % groups == 0 and _sizes(x, w, *settings) == out else 0


def _forward(shape: tuple[torch.Size, ...], stride: Pair, pad: Pair, dilation: Pair) -> Function | None:
    x, w, out = shape
    groups = _fits(x, w, out, stride, pad, dilation)
    way = functional.conv1d if len(x) == 3 else functional.conv2d
    return partial(way, stride=stride, padding=pad, dilation=dilation, groups=groups) if groups else None


def _of_input(shape: tuple[torch.Size, ...], stride: Pair, pad: Pair, dilation: Pair) -> Function | None:
    dy, w, out = shape
    groups = _fits(out, w, dy, stride, pad, dilation)
    way = grad.conv1d_input if len(w) == 3 else grad.conv2d_input
    if not groups:
        return None
    return lambda dy, w: way(out, w, dy, stride=stride, padding=pad, dilation=dilation, groups=groups)


def _of_weight(shape: tuple[torch.Size, ...], stride: Pair, pad: Pair, dilation: Pair) -> Function | None:
    x, dy, w = shape
    groups = _fits(x, w, dy, stride, pad, dilation)
    way = grad.conv1d_weight if len(w) == 3 else grad.conv2d_weight
    if not groups:
        return None
    return lambda x, dy: way(x, w, dy, stride=stride, padding=pad, dilation=dilation, groups=groups)
