"""Held to account: the report's own check by text files, and the derived bounds over many sizes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import torch

from kernels.attention import golden, product
from kernels.attention.attention import attention, transpose, upload
from kernels.attention.blas import blas_for
from kernels.attention.problem import Inputs, Sizes, uniform
from labkit.bench.timing import cuda_times
from whywrong import Trace, compare, localise

SIX_DIGITS = "%g"
"""How a C++ stream prints a float by default: six significant digits."""

AT_ONCE = {"cuda": 1 << 26, "cpu": 1 << 20}
"""By device: scores whose golden and simulated roundings are held in memory at a time, at least one head's."""

MOST = 1 << 26
"""Scores that are checked, in whole heads: 48 simulated runs of as many take seconds on a GPU."""


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


def checked_heads(sizes: Sizes) -> list[int]:
    """The heads whose steps are checked: all, or where `MOST` has no room for all, some from the first to the last."""
    count = min(sizes.heads, max(2, MOST // (sizes.n * sizes.m)))
    return [int(head) for head in np.linspace(0, sizes.heads - 1, count)]


def shares_of_bound(
    sizes: Sizes,
    device: str,
    products: Iterable[str] = ("strided",),
    compute: str = "float32",
    seed: int = 0,
) -> dict[str, dict[str, float]]:
    """Run the fixed pipeline by some of `product.PRODUCTS`: for each and each step, the largest share of its own bound.

    Every head is computed, and those of :func:`checked_heads` are checked. The golden is recorded on `device`, as many
    heads at a time as fit into `AT_ONCE`, once for all products; products that agree to the last bit in every step
    share their figures. Above 1 a step is wrong; infinite where it is systematically so.
    """
    inputs = uniform(sizes, np.random.default_rng([seed, 5]))
    layout = golden.plan(sizes, room=False)
    runs = {
        how: attention(inputs, device, multiply=product.PRODUCTS[how], compute=compute, layout=layout)
        for how in products
    }
    found: dict[str, dict[str, float]] = {how: {} for how in runs}
    heads = checked_heads(sizes)
    at_once = max(1, AT_ONCE[device] // (sizes.n * sizes.m))
    for first in range(0, len(heads), at_once):
        some = heads[first : first + at_once]
        recorded = golden.attention(*(torch.from_numpy(x[some]).to(device) for x in (inputs.q, inputs.k, inputs.v)))
        for how, observed in runs.items():
            if twin := next((one for one in list(runs)[: list(runs).index(how)] if _same(runs[one], observed)), None):
                found[how] = found[twin]
                continue
            report = localise({s.name: s.value[some] for s in observed}, recorded, precision=golden.DECLARED[compute])
            for name, finding in report.findings.items():
                share = math.inf if finding.own is None or finding.wrong else finding.own.bound_used
                found[how][name] = max(found[how].get(name, 0.0), share)
    return found


def _same(one: Trace, other: Trace) -> bool:
    """Whether two traces agree to the last bit."""
    return all(torch.equal(step.value, other[step.name]) for step in one)


def worst_share(found: Iterable[Mapping[str, float]]) -> float:
    """The largest share of any bound in several rows of :func:`shares_of_bound`."""
    return max(max(shares.values()) for shares in found)


def at_scale(device: str) -> dict[str, float]:
    """The repair's largest error, in tolerances, at large sizes; by size and how many of its heads were checked."""
    errors = {}
    for sizes in (Sizes(96, 4096, 4096, 64), Sizes(96, 1000, 4096, 64), Sizes(7, 4096, 1009, 61)):
        worst = worst_share(shares_of_bound(sizes, device).values())
        errors[f"{sizes} ({len(checked_heads(sizes))} heads checked)"] = worst
    return errors


def times(sizes: Sizes, how: str) -> list[float]:
    """Microseconds of one Q K^T on the GPU as called from Python, quantiles 0.5, 0.2, 0.8.

    ValueError where the product is wrong.
    """
    inputs = uniform(sizes, np.random.default_rng(0))
    layout, blas = golden.plan(sizes, room=False), blas_for("cuda")
    memory = upload(inputs, layout, "cuda")
    transpose(memory, layout, blas)
    run = product.prepared(how, memory, layout, blas)
    run()
    value, bound = golden.scores(*(x.astype(np.float64) for x in (inputs.q, inputs.k.swapaxes(1, 2))))
    found = compare(layout.view(memory, "QK").cpu(), value, bound=bound)
    if not found.ok:
        raise ValueError(f"{how} is not timed, since it is wrong: {found}")
    return cuda_times(run)
