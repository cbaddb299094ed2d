"""Sinkhorn's normalisation of a matrix as a replay: its rows and its columns divided by their sums in turn."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch

from labkit.named import EPSILONS
from labkit.replayed import Function, Replay

Tensor = torch.Tensor
MOST = 128
"""Divisions by sums that are tried, of rows and of columns together."""
FEW = 4096
"""Elements, of whole matrices, that it is tried on first; larger matrices are left alone."""
_STARTS: tuple[Function, ...] = (
    torch.exp,
    lambda x: torch.exp(x - x.amax(-1, keepdim=True)),
    lambda x: torch.exp(x - x.amax((-2, -1), keepdim=True)),
    lambda x: x,
)
NEARLY = 1e-2
"""How far the sums of rows, or of columns, may be from one."""


def sinkhorn(inputs: Sequence[Tensor], golden: Tensor, precision: float) -> Iterator[Replay]:
    """How often, and from which side first, one input or its exponentials were normalised to give `golden`; the
    closest first, since a golden in float32 does not tell every epsilon from the next."""
    x = inputs[0]
    if len(inputs) != 1 or not _normalised(golden) or x.shape != golden.shape:
        return
    n, few = max(golden.shape[-2:]), FEW // golden.shape[-2:].numel()
    if not few:
        return
    x, golden = (one.reshape(-1, *one.shape[-2:])[:few] for one in (x, golden))
    fitting: list[tuple[float, int, Replay]] = []
    for start, first, eps in itertools.product(_STARTS, (-1, -2), map(float, EPSILONS)):
        m = start(x)
        if not bool((m > 0.0).all()):
            continue
        for done in range(1, MOST + 1):
            m = m / (m.sum(first if done % 2 else -3 - first, keepdim=True) + eps)
            length = done * (n + 1) + 8
            off = (m - golden).abs()
            if bool((off <= length * precision * golden).all()):
                run = _run(start, first, eps, done)
                fitting.append((float(off.max()), len(fitting), Replay(run, _sizes(run), None, length, False, False)))
    yield from (one for _, _, one in sorted(fitting))


def _normalised(g: Tensor) -> bool:
    if g.ndim < 2 or min(g.shape[-2:]) < 2 or not bool((g >= 0.0).all()):
        return False
    return any(bool(((g.sum(axis) - 1.0).abs() <= NEARLY).all()) for axis in (-1, -2))


def _run(start: Function, first: int, eps: float, times: int) -> Function:
    def run(x: Tensor) -> Tensor:
        m = start(x)
        for done in range(times):
            m = m / (m.sum(-3 - first if done % 2 else first, keepdim=True) + eps)
        return m

    return run


def _sizes(run: Function) -> Function:
    """Of the results, and of what an exponent that is rounded moves them."""
    return lambda x: run(x) * (1.0 + x.abs().amax((-2, -1), keepdim=True))
