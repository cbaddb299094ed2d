"""Products as replays: which two inputs, how their heads are laid out, what is added, masked and normalised after."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence

import torch

from labkit.replayed import Function, Replay

Tensor = torch.Tensor


def added(xs: Sequence[Tensor]) -> Tensor:
    """The sum of all of them."""
    total = xs[0]
    for x in xs[1:]:
        total = total + x
    return total


def fitted(x: Tensor, golden: Tensor) -> float:
    """The factor from x to the golden, by least squares over what is finite in both."""
    keep = x.isfinite() & golden.isfinite()
    a, b = x[keep], golden[keep]
    scale = float(a.abs().max()) if a.numel() else 0.0
    if scale == 0.0:
        return 0.0
    return float(((a / scale) * b).sum() / ((a / scale) ** 2).sum() / scale)


def causal(x: Tensor) -> Tensor:
    """-Inf where a key comes after its query; the last query sees all keys."""
    n, m = x.shape[-2:]
    return x.masked_fill(torch.ones(n, m, dtype=torch.bool).triu(1 + m - n), -math.inf)


def for_heads(x: Tensor, heads: int) -> Tensor:
    """Keys or values [.., heads, tokens, width] of fewer heads, each of them as often as query heads share it."""
    return x.repeat_interleave(max(1, heads // max(1, x.shape[-3])), -3)


_SIDES: dict[str, Function] = {
    "a b": lambda a, b: a @ b,
    "a b^T": lambda a, b: a @ b.mT,
    "a^T b": lambda a, b: a.mT @ b,
}


def products(inputs: Sequence[Tensor], golden: Tensor, softmax: bool, mask: bool, text: str) -> Iterator[Replay]:
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
        rest = golden - added([inputs[k] for k in others]) if others else golden
    except RuntimeError:
        return
    if rest.shape != golden.shape:
        return
    length = a.shape[-2] if side is _SIDES["a^T b"] and a.ndim > 1 else a.shape[-1]
    value = raw(*inputs)
    factors = _product_factors(value, rest, softmax, length)
    for factor in factors:

        def run(*xs: Tensor, factor: float = factor) -> Tensor:
            total = added([raw(*xs) * factor, *(xs[k] for k in others)])
            total = causal(total) if mask else total
            return torch.softmax(total, -1) if softmax else total

        def magnitude(*xs: Tensor, factor: float = factor) -> Tensor:
            total = raw(*(x.abs() for x in xs)) * abs(factor)
            return added([total, *(xs[k].abs() for k in others)]) if others else total

        def squares(*xs: Tensor, factor: float = factor) -> Tensor:
            return raw(*(x * x for x in xs)) * factor * factor

        yield Replay(run, magnitude, squares, length, softmax, True, factor=factor)


def _product_factors(value: Tensor, rest: Tensor, softmax: bool, length: int) -> list[float]:
    if softmax:
        return [1.0, 1.0 / math.sqrt(length)]
    factor = fitted(value, torch.where(rest.isfinite(), rest, 0.0))
    return [1.0, factor] if factor not in (0.0, 1.0) and math.isfinite(factor) else [1.0]


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
                return for_heads(x.transpose(-2, -3) if swapped else x, a[-2])

            yield alone, shared
    if len(a) >= 3 and len(after) == len(b) == 2:

        def flat(x: Tensor) -> Tensor:
            return x.flatten(1)

        yield flat, same
    if len(b) >= 3 and len(after) == len(a) == 2:
        yield same, lambda x: x.flatten(1)
    if len(a) >= 3 and len(b) >= 3 and a[-3] != b[-3]:  # grouped heads
        yield same, lambda x: for_heads(x, a[-3])


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
