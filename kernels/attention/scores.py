"""Q K^T on tensor cores at float32's accuracy. K is read as it lies: nothing is transposed in memory."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.attention import tf32x3
from kernels.attention.elementwise import heads_of_rows, laid_out
from kernels.gpu import multiprocessors
from kernels.operations import differentiable, operation, shapes_of
from whywrong.comparing.bounds import Bound
from whywrong.comparing.launching import Compiled, aligned, launch, specialised
from whywrong.errors import UsageError

TILE = 64
"""Queries and keys of a tile."""
MOST_STEPS = 8
"""Tiles of queries that a program takes one after another at most, with the keys of its own kept split."""
MOST_COLUMNS = 128

_compiled: Compiled = {}


@triton.jit
def scores_kernel(
    q_ptr,  # [heads, n_queries, COLUMNS], float32
    k_ptr,  # [heads, n_keys, COLUMNS], float32
    out_ptr,  # [heads, n_queries, n_keys], float32, written
    n_queries,
    n_keys,
    q_head_stride,
    k_head_stride,
    out_head_stride,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    HALF: tl.constexpr,
    STEPS: tl.constexpr,
):
    """A tile of keys a program, STEPS tiles of queries against it.

    The columns are summed in two halves, added in float32: the tensor cores truncate as they accumulate, and
    truncation grows with the sum.
    """
    head = tl.program_id(2).to(tl.int64)
    columns = tl.arange(0, HALF)[None, :]
    left, right = columns < COLUMNS, columns + HALF < COLUMNS
    keys = tl.program_id(0) * TILE + tl.arange(0, TILE)  # [T]
    k_at = k_ptr + head * k_head_stride + keys[:, None].to(tl.int64) * COLUMNS + columns
    there = keys[:, None] < n_keys
    k_high, k_low = tf32x3.split(tl.load(k_at, mask=there & left, other=0.0))  # [T, HALF]
    k_high2, k_low2 = tf32x3.split(tl.load(k_at + HALF, mask=there & right, other=0.0))
    for step in range(STEPS):
        queries = (tl.program_id(1) * STEPS + step) * TILE + tl.arange(0, TILE)
        asked = queries[:, None] < n_queries
        q_at = q_ptr + head * q_head_stride + queries[:, None].to(tl.int64) * COLUMNS + columns
        q_high, q_low = tf32x3.split(tl.load(q_at, mask=asked & left, other=0.0))
        total = tf32x3.dot(q_high, q_low, k_high.T, k_low.T)  # [T, T]
        q_high, q_low = tf32x3.split(tl.load(q_at + HALF, mask=asked & right, other=0.0))
        total += tf32x3.dot(q_high, q_low, k_high2.T, k_low2.T)
        out_at = out_ptr + head * out_head_stride + queries[:, None].to(tl.int64) * n_keys + keys[None, :]
        tl.store(out_at, total, mask=asked & (keys[None, :] < n_keys))


def scores(q: torch.Tensor, k: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Q K^T [heads, N, M] of float32 q [heads, N, d_k] and k [heads, M, d_k], d_k up to 128.

    `out` has contiguous heads. Differentiable where it is not given; the gradients are products by torch. Raises
    UsageError for operands of other types and sizes. An infinite number gives NaN.
    """
    if out is None:
        return _differentiable(q, k)
    run = scored_into if torch.compiler.is_compiling() else _into
    run(q, k, out)
    return out


def _into(q: torch.Tensor, k: torch.Tensor, out: torch.Tensor) -> None:
    heads, n, columns = q.shape
    for name, x in (("q", q), ("k", k), ("out", out)):
        heads_of_rows(name, x)
    if k.shape[0] != heads or k.shape[2] != columns or not 1 <= columns <= MOST_COLUMNS:
        raise UsageError(
            f"q, k: expected [heads, N, d_k] and [heads, M, d_k], d_k from 1 to {MOST_COLUMNS}, "
            f"got shapes {tuple(q.shape)} and {tuple(k.shape)}"
        )
    if out.shape != (heads, n, k.shape[1]):
        raise UsageError(f"out: expected {(heads, n, k.shape[1])}, got shape {tuple(out.shape)}")
    grid, constants = _plan(heads, n, k.shape[1], columns, multiprocessors(q.device))
    strides = (q.stride(0), k.stride(0), out.stride(0))
    with torch.cuda.device_of(q):
        launch(
            _compiled,
            # the operands are float32, and the number of heads is in the grid alone
            (specialised(n, k.shape[1], *strides), *constants.values(), q.device, aligned(q, k, out)),
            scores_kernel,
            grid,
            *(q, k, out, n, k.shape[1], *strides),
            **constants,
        )


scored_into = torch.library.custom_op("workbook::scores_out", _into, mutates_args={"out"})


@operation("scores")
def scored(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """:func:`scores` into memory of its own."""
    y = torch.empty((*q.shape[:2], k.shape[1]), device=q.device)
    _into(laid_out(q), laid_out(k), y)
    return y


@shapes_of("scores")
def _(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return q.new_empty((*q.shape[:2], k.shape[1]))


def _keep(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
    q, k = ctx.saved_tensors
    return dy @ k, dy.mT @ q


_differentiable = differentiable(scored, _gradients, _keep)


def bound(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, Bound]:
    """Q K^T in float64 and how far :func:`scores` may be from it. q and k are float64, their values float32's."""
    kt = k.swapaxes(-1, -2)
    return q @ kt, tf32x3.bound(abs(q) @ abs(kt), _half(q.shape[-1]), parts=2)


def _half(columns: int) -> int:
    return max(16, triton.next_power_of_2(triton.cdiv(columns, 2)))


@lru_cache(maxsize=1024)  # Triton's helpers take microseconds
def _plan(
    heads: int, n: int, m: int, columns: int, multiprocessors: int
) -> tuple[tuple[int, int, int], dict[str, int]]:
    """The grid, and what the kernel is compiled with."""
    steps = _steps(heads, n, m, multiprocessors)
    grid = (triton.cdiv(m, TILE), triton.cdiv(n, TILE * steps), heads)
    return grid, {
        "COLUMNS": columns,
        "TILE": TILE,
        "HALF": _half(columns),
        "STEPS": steps,
        "num_warps": 4,
        "num_stages": 2,
    }


def _steps(heads: int, n: int, m: int, multiprocessors: int) -> int:
    """As many as leave two programs for each multiprocessor, up to MOST_STEPS and to all queries."""
    tiles = triton.cdiv(n, TILE)
    steps = min(MOST_STEPS, triton.next_power_of_2(tiles))
    while steps > 1 and triton.cdiv(m, TILE) * triton.cdiv(tiles, steps) * heads < 2 * multiprocessors:
        steps //= 2
    return steps
