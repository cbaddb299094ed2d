"""The figures that the notebook's ledger needs: what today's checks pass, and the speed of one pass, measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels.compare.bench import ALLOWED, assert_close, kernels_alone, read
from kernels.compare.judges import cosine, relative_metric
from labkit.bench import cuda_times, extra_memory
from labkit.numerics.compare import compare
from labkit.session.device import Device


@dataclass(frozen=True)
class Passed:
    """What the cosine threshold of 0.99 and the global relative metric at 1e-3 say of a fault, tried several times."""

    tried: int
    passed: int
    """By both."""
    cosine: float
    """The smallest."""
    metric: float
    """The largest."""
    found: int
    """By labkit.compare."""

    def __str__(self) -> str:
        return (
            f"{self.passed} of {self.tried} pass both; cosine {self.cosine:.5f} at the least, relative metric "
            f"{self.metric:.2e} at the most; labkit.compare reports {self.found} of {self.tried}"
        )


def global_measures(rng: np.random.Generator) -> dict[str, Passed]:
    """Faults in a [2048, 64] tensor: every sixteenth row dead or flipped, one at a time, and all of it scaled."""
    golden = torch.from_numpy(rng.standard_normal((2048, 64), dtype=np.float32))
    rows = range(0, len(golden), 16)
    return {
        "dead row": _passed([_row_times(golden, row, 0.0) for row in rows], golden.double()),
        "flipped row": _passed([_row_times(golden, row, -1.0) for row in rows], golden.double()),
        "4% scale": _passed([1.04 * golden], golden.double()),
    }


def _row_times(x: torch.Tensor, row: int, factor: float) -> torch.Tensor:
    changed = x.clone()
    changed[row] *= factor
    return changed


def _passed(faulty: Sequence[torch.Tensor], golden: torch.Tensor) -> Passed:
    said = [(cosine(o.double(), golden), relative_metric(o.double(), golden)) for o in faulty]
    passed, found = sum(c >= 0.99 and m <= 1e-3 for c, m in said), sum(not compare(o, golden).ok for o in faulty)
    return Passed(len(faulty), passed, min(c for c, _ in said), max(m for _, m in said), found)


def l1_of_transpose(rng: np.random.Generator) -> bool:
    """Whether the L1 norms of a matrix and of its transpose are equal to six digits."""
    q = torch.from_numpy(rng.standard_normal((64, 64), dtype=np.float32)).double()
    return f"{float(q.abs().sum()):.5e}" == f"{float(q.T.abs().sum()):.5e}" and not bool((q == q.T).all())


def fixed_tolerances(rng: np.random.Generator) -> dict[str, float]:
    """Largest error of a right float32 product at K = 65,536, and of ones that are 1% off at K = 1."""
    a = rng.standard_normal((32, 1 << 16), dtype=np.float32)
    b = rng.standard_normal((1 << 16, 32), dtype=np.float32)
    total = np.zeros((32, 32), np.float32)
    for k in range(1 << 16):
        total += a[:, k, None] * b[k]
    right = float(np.abs(total - a.astype(float) @ b.astype(float)).max())
    x, y = rng.random((32, 1), dtype=np.float32), rng.random((1, 32), dtype=np.float32)
    error = np.abs(np.float32(1.01) * (x @ y) - x.astype(float) @ y.astype(float)).max()
    # twice each factor is exact, and so is four times the product
    return {
        "right, K = 65536": right,
        "1% off, K = 1": float(error),
        "1% off, K = 1, factors up to 2": float(4 * error),
    }


@dataclass(frozen=True)
class Speed:
    """Microseconds of a whole call, of our kernels alone, and GiB beside the pair."""

    ours: float
    kernels: float
    assert_close: float
    read: float
    ours_memory: float
    assert_close_memory: float
    """Of its default call, with relative and absolute tolerance."""


def speed(device: Device) -> Speed:
    """A pair of float32 of 1 GiB each, on a GPU."""
    golden = torch.randn(1 << 28, device=device.kind)
    observed = golden * (1.0 + 1e-7)
    run = {
        "ours": lambda: compare(observed, golden, ALLOWED),
        "kernels": lambda: kernels_alone(observed, golden),
        "assert_close": lambda: assert_close(observed, golden),
        "read": lambda: read(observed, golden),
    }
    times = {name: cuda_times(one)[0] for name, one in run.items()}
    run["assert_close"] = lambda: torch.testing.assert_close(observed, golden)
    memory = {name: extra_memory(run[name], device) / 1024 for name in ("ours", "assert_close")}
    return Speed(
        times["ours"], times["kernels"], times["assert_close"], times["read"], memory["ours"], memory["assert_close"]
    )
