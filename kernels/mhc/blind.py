"""Faults sampled at random, for whoever is to name them: what names them does not import this module.

A fifth of them is not on the list of :func:`~kernels.mhc.faulty.rivals`; some of those that are compute the same as
another one there, or as the correct kernel, at the sizes of the case (one stream has no stride between streams).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from kernels.mhc import faulty
from kernels.mhc.faulty import CORRECT_ACCESS, Access, Problem
from whywrong import Trace


@dataclass(frozen=True)
class Case:
    """A kernel with a fault. `name` is the list's, or says in words what is wrong; `listed` whether it is there."""

    name: str
    listed: bool
    tile: int

    def access(self, n: int, d: int) -> Access:
        """How operands are read at these sizes."""
        return faulty.rivals(n, d, self.tile)[self.name] if self.listed else outside(n, d)[self.name]

    def kernel(self, p: Problem) -> Trace:
        """The real kernel with this fault."""
        n, d = p.x.shape[1:]
        return faulty.backward(p, self.access(n, d))


def outside(n: int, d: int) -> dict[str, Access]:
    """Faults that the list does not have, at these sizes."""
    m = n * n + 2 * n
    return {
        "the last column is left out": Access(tile=d - 1),
        "a tile of three quarters of the columns": Access(tile=3 * d // 4),
        "a tile of a fifth of the columns": Access(tile=max(1, d // 5)),
        "every second column of x": Access(x=(n * d, d, 2)),
        "x without its stride between tokens": Access(x=(0, d, 1)),
        "x of the next token": Access(x=(n * d + 1, d, 1)),
        "dx_in two elements late": Access(dx_in=2),
        "dx_in a row late": Access(dx_in=d),
        "pre two elements late": Access(pre_start=2),
        "pre with a stride of n + 1": Access(pre=n + 1),
        "mix from the last columns": Access(mix=m - n),
        "mix one column late": replace(CORRECT_ACCESS, mix=1),
        "dx_in one element late and mix not normalised": Access(dx_in=1, r=False),
        "a tile of 16 columns and pre one element late": Access(tile=16, pre_start=1),
    }


def sample(seed: int, tile: int) -> Case:
    """One case in five is outside the list, by its seed; which one, of each kind, is sampled."""
    rng = np.random.default_rng([5, seed])
    listed = seed % 5 != 4
    names = list(faulty.rivals(4, 128, tile) if listed else outside(4, 128))
    return Case(names[int(rng.integers(len(names)))], listed, tile)
