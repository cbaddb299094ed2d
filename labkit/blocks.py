"""How a step is cut into blocks that share a number: rows, columns, groups, tiles; the last ones perhaps not full."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

Tensor = torch.Tensor


@dataclass(frozen=True)
class Blocks:
    """How a step is cut: `counts` blocks along each axis, of `sizes`, the last of them perhaps not full."""

    shape: torch.Size
    counts: tuple[int, ...]
    sizes: tuple[int, ...]

    def spread(self, s: Tensor) -> Tensor:
        """A number of each block [counts] at every place of it."""
        for axis, (size, n) in enumerate(zip(self.sizes, self.shape, strict=True)):
            s = s.repeat_interleave(size, axis).narrow(axis, 0, n)
        return s

    def largest(self, x: Tensor) -> Tensor:
        """The largest magnitude of each block, [counts]."""
        padding = [
            p for count, size, n in zip(self.counts, self.sizes, x.shape, strict=True) for p in (count * size - n, 0)
        ]
        whole = torch.nn.functional.pad(x.abs(), padding[::-1])
        cut = whole.reshape([part for pair in zip(self.counts, self.sizes, strict=True) for part in pair])
        return cut.amax(tuple(range(1, 2 * x.ndim, 2)))


def cuts(shape: torch.Size, after: torch.Size) -> Iterator[Blocks]:
    """Ways to cut `shape` into `after` blocks; where sizes do not divide, by powers of two with a tail."""
    counts = [after] if len(after) == len(shape) else []
    missing = len(shape) - len(after)
    if missing > 0:
        counts += [torch.Size((*after, *(1,) * missing)), torch.Size((*(1,) * missing, *after))]
    seen = set()
    for count in counts:
        for whole in (True, False):
            sizes = tuple(_size(n, k, whole) for n, k in zip(shape, count, strict=True))
            fits = all(size and math.ceil(n / size) == k for n, k, size in zip(shape, count, sizes, strict=True))
            if fits and (count, sizes) not in seen:
                seen.add((count, sizes))
                yield Blocks(shape, tuple(count), sizes)


def _size(n: int, count: int, whole: bool) -> int:
    """Of `count` blocks of n: equal ones, or powers of two; 0 where there are none such."""
    if not count:
        return 0
    if whole or count == 1:
        return n // count if n % count == 0 else 0
    return 1 << (math.ceil(n / count) - 1).bit_length()


def spread_over(s: Tensor, x: Tensor) -> Tensor | None:
    """s in x's shape: as it broadcasts, as a row's, a group's along one axis, or a block's; None where it is none."""
    for candidate in (s, s.unsqueeze(-1)):
        try:
            return candidate.broadcast_to(x.shape)
        except RuntimeError:
            continue
    kept = [size for size in s.shape if size != 1]
    for axis, size in enumerate(x.shape):
        for groups in (v for v in s.shape if v > 1 and size % v == 0):
            shape = (*x.shape[:axis], groups, *x.shape[axis + 1 :])
            if [v for v in shape if v != 1] == kept:
                return s.reshape(shape).repeat_interleave(size // groups, axis)
    return next((one.spread(s) for one in cuts(x.shape, s.shape) if s.ndim == x.ndim), None)
