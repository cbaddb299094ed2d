"""The problem: its sizes and its inputs. Q is [heads, n, d_k], K and V are [heads, m, d_k], row-major float32."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np

from whywrong.errors import UsageError


@dataclass(frozen=True, order=True)
class Sizes:
    """How large the problem is: `n` queries and `m` keys of `d_k` numbers in each of `heads` heads."""

    heads: int = 12
    n: int = 128
    m: int = 128
    d_k: int = 64

    def __post_init__(self) -> None:
        for name in ("heads", "n", "m", "d_k"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}: expected at least 1, got {getattr(self, name)}")

    def __getitem__(self, symbol: str) -> int:
        """The value of ``N``, ``M`` or ``d_k``, as calls name them."""
        return {"N": self.n, "M": self.m, "d_k": self.d_k}[symbol]

    def __str__(self) -> str:
        return f"{self.heads} x {self.n} x {self.m} x {self.d_k}"

    def check_memory(self, buffer: int = 0) -> Sizes:
        """Raise UsageError where the host would run out of memory; return self.

        The float64 golden, its bounds and the re-runs hold about two dozen arrays of heads x n x m at a time; `buffer`
        is the number of elements of the buffer of operands, which stands there twice.
        """
        needed = self.heads * self.n * self.m * 24 * 8 + 8 * buffer
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if needed > 0.8 * there:
            raise UsageError(
                f"sizes: heads x n x m x d_k = {self} needs about {needed / 2**30:.0f} GiB of host memory; "
                f"expected sizes that need {0.8 * there / 2**30:.0f} GiB at most"
            )
        return self


REPORT = Sizes(heads=12, n=128, m=128, d_k=64)
"""The report's own sizes."""


@dataclass(frozen=True)
class Inputs:
    """Q, K and V as the implementation gets them: float32 arrays."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray

    @property
    def sizes(self) -> Sizes:
        """Sizes, read off the arrays."""
        heads, n, d_k = self.q.shape
        return Sizes(heads, n, self.k.shape[1], d_k)


def uniform(sizes: Sizes, rng: np.random.Generator) -> Inputs:
    """Uniform on [0, 1), rounded to six decimals as the report's generator writes them to text."""
    shapes = [(sizes.heads, rows, sizes.d_k) for rows in (sizes.n, sizes.m, sizes.m)]
    return Inputs(*(np.round(rng.random(shape, np.float32), 6).astype(np.float32) for shape in shapes))


def index_coded(sizes: Sizes) -> Inputs:
    """Inputs that make the scores legible.

    Row i of Q is one-hot at column i mod d_k and K holds its own element number, counted from one. The right score
    (i, j) is then K[j, i mod d_k]: the number of the one element of K that was read. Exact below 2^24 elements.
    """
    rows = np.arange(sizes.n)
    q = np.zeros((sizes.heads, sizes.n, sizes.d_k), np.float32)
    q[:, rows, rows % sizes.d_k] = 1.0
    numbers = np.arange(1, sizes.m * sizes.d_k + 1, dtype=np.float32).reshape(sizes.m, sizes.d_k)
    k = np.broadcast_to(numbers, (sizes.heads, sizes.m, sizes.d_k)).copy()
    return Inputs(q, k, np.ones_like(k))


def decode(value: float, sizes: Sizes) -> str:
    """Which element of an index-coded K a score is: ``K[row, column]``, or what it is instead."""
    if np.isnan(value):
        return "NaN: outside the operand, or never written"
    if value != int(value) or not 1 <= value <= sizes.m * sizes.d_k:
        return f"{value:g}: no element of K"
    row, column = divmod(int(value) - 1, sizes.d_k)
    return f"K[{row}, {column}]"
