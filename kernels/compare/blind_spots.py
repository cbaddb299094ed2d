"""Faults that the checks in common use let pass, and a correct product that a fixed tolerance does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels.compare.checks import cosine, relative_metric
from whywrong.comparing.comparison import compare

COSINE, METRIC = 0.99, 1e-3
"""The cosine that msprobe asks for at least, and the relative metric that DeepSeek's kernel tests allow at most."""
SMALLEST_TOLERANCE, LARGEST_TOLERANCE = 1e-4, 1e-2
"""Two fixed tolerances that people choose."""


@dataclass(frozen=True)
class Passes:
    """What the cosine and the global relative metric say of a fault, tried several times."""

    tried: int
    passed: int
    """By both."""
    cosine: float
    """The smallest."""
    metric: float
    """The largest."""
    reported: int
    """By whywrong.compare."""


def one_row_times(golden: torch.Tensor, factor: float) -> Passes:
    """Every sixteenth row of `golden` [rows, columns], float32, multiplied by `factor`, one at a time."""
    faulty = []
    for row in range(0, len(golden), 16):
        faulty.append(golden.clone())
        faulty[-1][row] *= factor
    return _passes(faulty, golden.double())


def all_times(golden: torch.Tensor, factor: float) -> Passes:
    """All of `golden`, float32, multiplied by `factor`."""
    return _passes([factor * golden], golden.double())


def _passes(faulty: Sequence[torch.Tensor], golden: torch.Tensor) -> Passes:
    measures = [(cosine(x.double(), golden), relative_metric(x.double(), golden)) for x in faulty]
    passed = sum(c >= COSINE and m <= METRIC for c, m in measures)
    reported = sum(not compare(x, golden).ok for x in faulty)
    return Passes(len(faulty), passed, min(c for c, _ in measures), max(m for _, m in measures), reported)


def l1_norms(x: torch.Tensor, y: torch.Tensor) -> tuple[str, str]:
    """The L1 norms of two tensors to six digits."""
    return f"{float(x.double().abs().sum()):#.6g}", f"{float(y.double().abs().sum()):#.6g}"


def error_of_correct_product(rng: np.random.Generator, terms: int) -> float:
    """Largest error of a [32, terms] x [terms, 32] float32 product, summed one term after the other."""
    a = rng.standard_normal((32, terms), dtype=np.float32)
    b = rng.standard_normal((terms, 32), dtype=np.float32)
    total = np.zeros((32, 32), np.float32)
    for k in range(terms):
        total += a[:, k, None] * b[k]
    return float(np.abs(total - a.astype(float) @ b.astype(float)).max())


def error_of_scaled_product(rng: np.random.Generator, scale: float, largest_factor: float = 1.0) -> float:
    """Largest error of an outer product [32, 32] that is multiplied by `scale`; factors uniform below the largest."""
    x, y = rng.random((32, 1), dtype=np.float32), rng.random((1, 32), dtype=np.float32)
    error = np.abs(np.float32(scale) * (x @ y) - x.astype(float) @ y.astype(float)).max()
    return float(largest_factor**2 * error)
