"""Computations that give other bits each time: additions in any order, a lost update, a tail that is not written."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from whywrong.comparing.bounds import Bound, sum_of_products

Run = tuple[Callable[[], torch.Tensor], Bound]


def _terms(rng: np.random.Generator) -> tuple[np.ndarray, Bound]:
    terms = rng.standard_normal((512, 64), dtype=np.float32)
    return terms, sum_of_products(abs(terms.astype(float)).sum(0), len(terms))


def atomic_additions(rng: np.random.Generator) -> Run:
    """Sums of 512 terms whose order is sampled anew each time, as atomic additions arrive."""
    terms, bound = _terms(rng)

    def run() -> torch.Tensor:
        total = np.zeros(terms.shape[1], np.float32)
        for k in rng.permutation(len(terms)):
            total += terms[k]
        return torch.from_numpy(total)

    return run, bound


def lost_update(rng: np.random.Generator) -> Run:
    """The same, and one in four runs loses an update: read, add and write without a lock."""
    terms, bound = _terms(rng)

    def run() -> torch.Tensor:
        total = terms.sum(0)
        if rng.random() < 0.25 or not lost:
            total = total - terms[int(rng.integers(len(terms)))]
        lost.append(True)
        return torch.from_numpy(total)

    lost: list[bool] = []
    return run, bound


def unwritten_tail(rng: np.random.Generator) -> Run:
    """The last elements of the result are left as they were allocated; how many depends on the run."""
    terms, bound = _terms(rng)

    def run() -> torch.Tensor:
        out = torch.empty(terms.shape[1])
        count = len(out) - int(rng.integers(1, 4))
        out[:count] = torch.from_numpy(terms.sum(0))[:count]
        return out

    return run, bound
