"""How several strided tensors of one shape are walked together: fewest dimensions, the smallest stride innermost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

MOST_DIMENSIONS = 6
"""After collapsing; what does not fit is copied first."""


@dataclass(frozen=True)
class Walk:
    """Iteration order over tensors of one shape. `strides[i]` are those of tensor i, in elements; `logical` row-
    major."""

    sizes: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]
    logical: tuple[int, ...]

    @property
    def row_major(self) -> bool:
        """Whether the walk goes through the elements in row-major order."""
        return self.logical == _row_major(self.sizes)

    @property
    def linear(self) -> bool:
        """Whether every tensor is one contiguous run, in row-major order."""
        return len(self.sizes) == 1 and all(one == (1,) for one in self.strides)


def walk(shape: Sequence[int], *tensors: torch.Tensor) -> Walk:
    """The walk over `tensors`, all of `shape` (broadcast dimensions have stride 0), ordered by the first one's
    strides."""
    return _walk(tuple(shape), tuple(t.stride() for t in tensors))


@lru_cache(maxsize=256)
def _walk(shape: tuple[int, ...], given: tuple[tuple[int, ...], ...]) -> Walk:
    logical = _row_major(shape)
    kept = [i for i, size in enumerate(shape) if size != 1]
    kept.sort(key=lambda i: -given[0][i])  # stable: row-major where strides are equal
    sizes: list[int] = []
    strides: list[tuple[int, ...]] = []  # one tuple a dimension: each tensor's, then the logical one
    for i in kept:
        steps = (*(one[i] for one in given), logical[i])
        if sizes and all(outer == inner * shape[i] for outer, inner in zip(strides[-1], steps, strict=True)):
            sizes[-1], strides[-1] = sizes[-1] * shape[i], steps
        else:
            sizes.append(shape[i])
            strides.append(steps)
    if not sizes:
        sizes, strides = [1], [(1,) * (len(given) + 1)]
    columns = list(zip(*strides, strict=True))
    return Walk(tuple(sizes), tuple(columns[:-1]), columns[-1])


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
