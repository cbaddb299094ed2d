"""The sum of a b on the device where a and b are, by each way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kernels import gpu
from kernels.mhc.reductions import reduction_kernels as kernels
from kernels.operations import differentiable, operation, shapes_of
from whywrong.errors import UsageError

Tensor = torch.Tensor
WAYS = {
    "atomic_add": kernels.ATOMIC,
    "two-stage": kernels.TWO_STAGE,
    "Kahan": kernels.KAHAN,
    "pairwise": kernels.PAIRWISE,
    "float64": kernels.FLOAT64,
    "flagged": kernels.FLAGGED,
}
PROGRAMS = 8
"""For each multiprocessor; pairwise takes a program for each tile, so that no lane adds in turn."""


def plan(count: int, way: str, programs: int, block: int = 2048) -> tuple[int, int, int]:
    """Programs, `programs` at most, tiles that each takes, and elements of a tile."""
    block = min(block, max(128, 1 << (count - 1).bit_length()))
    tiles = -(-count // block)
    if way == "pairwise":
        programs = 1 << 16
    if tiles <= programs:
        return tiles, 1, block
    steps = 1 << (-(-tiles // programs) - 1).bit_length()
    return -(-tiles // steps), steps, block


def prepared(
    way: str, a: Tensor, b: Tensor, out: Tensor, programs: int = PROGRAMS, block: int = 2048, warps: int = 8
) -> Callable[[], None]:
    """A call without arguments that leaves the sum in `out` [1], float32. a and b are float32, contiguous, alike.

    At most `programs` programs of at most `warps` warps a multiprocessor take tiles of at most `block` elements.

    Raises UsageError for another way, type or shape, and for "flagged" on a GPU that cannot hold all programs at once.
    """
    if way not in WAYS:
        raise UsageError(f"way: expected one of {', '.join(WAYS)}, got {way!r}")
    if a.shape != b.shape or a.dtype != torch.float32 or b.dtype != torch.float32:
        raise UsageError(
            f"a, b: {a.dtype} {tuple(a.shape)}, {b.dtype} {tuple(b.shape)}; expected float32, shapes alike"
        )
    if not a.numel():
        raise UsageError("a: holds nothing; expected one element at least")
    count = a.numel()
    programs, steps, block = plan(count, way, programs * gpu.multiprocessors(a.device), block)
    kind = {"float64": torch.float64, "flagged": torch.int64}.get(way, torch.float32)
    parts = torch.zeros(programs, dtype=kind, device=a.device)
    counter = torch.zeros(1, dtype=torch.int32, device=a.device)
    options = {
        "PROGRAMS": programs, "STEPS": steps, "BLOCK": block, "BLOCK_P": 1 << (programs - 1).bit_length(),
        "WAY": WAYS[way], "num_warps": max(1, min(warps, block // 64)),
    }  # fmt: skip
    given = (a, b, out, parts, counter, count)
    if way == "flagged" and a.is_cuda:
        with torch.cuda.device_of(a):
            compiled = kernels.sum_kernel.warmup(*given, grid=(programs,), **options)
        gpu.refuse_unless_resident("flagged", programs, compiled, a.device)

    def run() -> None:
        if way == "atomic_add":
            out.zero_()
        with torch.cuda.device_of(a):
            kernels.sum_kernel[(programs,)](*given, **options)

    return run


def total(way: str, a: Tensor, b: Tensor) -> Tensor:
    """The sum of a b, [1] float32, differentiable. Raises UsageError as :func:`prepared` does."""
    return _differentiable(way, a, b)


@operation("sum_of_products")
def summed(way: str, a: Tensor, b: Tensor) -> Tensor:
    """:func:`total`."""
    out = torch.empty(1, device=a.device)
    prepared(way, a.contiguous(), b.contiguous(), out)()
    return out


@shapes_of("sum_of_products")
def _(way: str, a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(1)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _gradients(ctx: Any, above: Tensor) -> tuple[Any, ...]:
    a, b = ctx.saved_tensors
    return None, above * b, above * a


_differentiable = differentiable(summed, _gradients, _keep)


def distinct(way: str, a: Tensor, b: Tensor, times: int) -> tuple[int, float]:
    """How many different results `times` runs give, and the largest distance between two."""
    out = torch.zeros(1, device=a.device)
    run, found = prepared(way, a, b, out), []
    for _ in range(times):
        run()
        found.append(out.clone())
    results = torch.cat(found).double()
    return int(results.unique().numel()), float(results.max() - results.min())
