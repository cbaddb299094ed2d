"""Held to account: the report's own check by text files, and the derived bounds over many sizes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

from kernels.attention import golden, product
from kernels.attention.attention import attention, transpose, upload
from kernels.attention.blas import blas_for
from kernels.attention.problem import Inputs, Sizes, uniform
from labkit import Trace, compare, localise

SIX_DIGITS = "%g"
"""How a C++ stream prints a float by default: six significant digits."""


def numpy_float32(inputs: Inputs) -> Trace:
    """The report's reference: NumPy in float32, head by head as its script does it."""
    qk = np.stack([q @ k.T for q, k in zip(inputs.q, inputs.k, strict=True)])
    factor = np.float32(1.0 / math.sqrt(inputs.sizes.d_k))
    return Trace({"q": inputs.q, "k": inputs.k, "kt": inputs.k.swapaxes(1, 2), "qk": qk, "scaled": qk * factor})


def through_files(matrices: np.ndarray, directory: Path, name: str) -> np.ndarray:
    """Write [heads, rows, columns] to text as the report's program does, and read it back as its script does."""
    found = np.empty(matrices.shape, np.float32)
    for head, matrix in enumerate(matrices):
        path = directory / f"{name}_head_{head}.txt"
        np.savetxt(path, matrix, fmt=SIX_DIGITS)
        found[head] = np.loadtxt(path, dtype=np.float32, ndmin=2)
    return found


def shares_of_bound(
    sizes: Sizes, device: str, how: str = "strided", compute: str = "float32", seed: int = 0
) -> dict[str, float]:
    """Run the fixed pipeline and return, for each step, the largest share of its own bound in any head.

    The golden is recorded on `device`, head by head, so that 96 x 4096 x 4096 fits. Above 1 a step is wrong; infinite
    where it is systematically so.
    """
    inputs = uniform(sizes, np.random.default_rng([seed, 5]))
    layout = golden.plan(sizes, room=False)
    observed = attention(inputs, device, multiply=product.PRODUCTS[how], compute=compute, layout=layout)
    worst: dict[str, float] = {}
    for head in range(sizes.heads):
        one = slice(head, head + 1)
        recorded = golden.attention(*(torch.from_numpy(x[one]).to(device) for x in (inputs.q, inputs.k, inputs.v)))
        report = localise({s.name: s.value[one] for s in observed}, recorded, golden.PROMISED[compute])
        for name, finding in report.findings.items():
            share = math.inf if finding.own is None or finding.wrong else finding.own.bound_used
            worst[name] = max(worst.get(name, 0.0), share)
    return worst


def worst_share(found: Iterable[dict[str, float]]) -> float:
    """The largest share of any bound in several results of :func:`shares_of_bound`."""
    return max(max(shares.values()) for shares in found)


def milliseconds(sizes: Sizes, how: str) -> float:
    """Median time of one Q K^T on the GPU as called from Python; ValueError where the product is wrong."""
    from labkit.bench import cuda_times

    inputs = uniform(sizes, np.random.default_rng(0))
    layout, blas = golden.plan(sizes, room=False), blas_for("cuda")
    memory = upload(inputs, layout, "cuda")
    transpose(memory, layout, blas)
    run = product.prepared(how, memory, layout, blas)
    run()
    value, bound = golden.scores(*(x.astype(np.float64) for x in (inputs.q, inputs.k.swapaxes(1, 2))))
    found = compare(layout.view(memory, "QK"), value, bound)
    if not found.ok:
        raise ValueError(f"{how} is not timed, since it is wrong: {found}")
    return 1e-3 * cuda_times(run)[0]
