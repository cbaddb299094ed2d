"""softmax(Q K^T / sqrt(d_k)) V in one pass over the keys, no score in memory, at float32's accuracy on tensor cores.

As FlashAttention does it (Dao 2023): a program keeps its queries' maximum, sum and weighted values, and rescales them
as the maximum grows. K and V are split for their three TF32 products once, before, and V is transposed with it: tensor
cores take TF32 factors only with the summed index innermost.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime.errors import OutOfResources

from kernels.attention import tf32x3
from kernels.attention.elementwise import heads_of_rows, laid_out
from kernels.attention.scores import MOST_COLUMNS
from kernels.operations import differentiable, operation, shapes_of
from whywrong.comparing.bounds import UNIT_ROUNDOFF, Bound, gamma, worst_case
from whywrong.comparing.launching import Compiled, aligned, launch, specialised
from whywrong.errors import UsageError

PADDING = 64
"""Keys are padded with zeros to a multiple of this, the most that a tile has."""
TILES = {
    64: ((128, 64, 8, 2), (64, 32, 4, 2), (64, 32, 4, 1), (32, 16, 4, 1)),
    128: ((128, 64, 8, 1), (64, 32, 4, 1), (32, 16, 4, 1)),
}
"""By columns, queries and keys of a tile, warps and tiles on their way, the fastest on an H200 first: the first that
fits the GPU's shared memory is taken."""

_compiled: Compiled = {}
_chosen: dict[tuple[torch.device, int], tuple[int, int, int, int]] = {}


@triton.jit
def split_kernel(
    k_ptr,  # [heads, n_keys, n_columns], float32
    v_ptr,  # [heads, n_keys, n_columns], float32
    k_high_ptr,  # [heads, n_padded, COLUMNS], float32, written, as the next
    k_low_ptr,  # [heads, n_padded, COLUMNS]
    v_high_ptr,  # [heads, COLUMNS, n_padded], float32, written, as the next
    v_low_ptr,  # [heads, COLUMNS, n_padded]
    n_keys,
    n_padded,
    n_columns,
    k_head_stride,
    v_head_stride,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """K to [n_padded, COLUMNS] and V to [COLUMNS, n_padded], each in two parts, zeros past the end.

    Each eight of V's keys stand in the order 0 2 4 6 1 3 5 7: see :func:`fused_kernel`.
    """
    head = tl.program_id(1).to(tl.int64)
    places = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    columns = tl.arange(0, COLUMNS)
    inside = (places[:, None] < n_keys) & (columns[None, :] < n_columns)
    at = places[:, None].to(tl.int64) * n_columns + columns[None, :]
    high, low = tf32x3.split(tl.load(k_ptr + head * k_head_stride + at, mask=inside, other=0.0))
    to = (head * n_padded + places[:, None]) * COLUMNS + columns[None, :]
    tl.store(k_high_ptr + to, high)
    tl.store(k_low_ptr + to, low)
    keys = (places & -8) | ((places & 3) << 1) | ((places >> 2) & 1)
    inside = (keys[:, None] < n_keys) & (columns[None, :] < n_columns)
    at = keys[:, None].to(tl.int64) * n_columns + columns[None, :]
    high, low = tf32x3.split(tl.load(v_ptr + head * v_head_stride + at, mask=inside, other=0.0).T)
    to = (head * COLUMNS + columns[:, None]) * n_padded + places[None, :]
    tl.store(v_high_ptr + to, high)
    tl.store(v_low_ptr + to, low)


@triton.jit
def fused_kernel(
    q_ptr,  # [heads, n_queries, n_columns], float32
    k_high_ptr,  # [heads, n_padded, COLUMNS], float32, as the next
    k_low_ptr,  # [heads, n_padded, COLUMNS]
    v_high_ptr,  # [heads, COLUMNS, n_padded], float32, as the next
    v_low_ptr,  # [heads, COLUMNS, n_padded]
    out_ptr,  # [heads, n_queries, n_columns], float32, written
    n_queries,
    n_keys,
    n_padded,
    n_columns,
    q_head_stride,
    out_head_stride,
    factor,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A tile of queries a program, over all keys. `factor` is log2(e) / sqrt(d_k): powers are of two.

    A thread holds two neighbouring keys of a weight's row, and the tensor core wants from it two that are four apart:
    so each eight keys are renumbered, here for the weights and in :func:`split_kernel` for V, instead of moved between
    threads. The weights times V are summed anew for each tile and added in float32, since tensor cores truncate.
    """
    head = tl.program_id(1).to(tl.int64)
    queries = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    columns = tl.arange(0, COLUMNS)
    keys = tl.arange(0, KEYS)
    inside = (queries[:, None] < n_queries) & (columns[None, :] < n_columns)
    at = queries[:, None].to(tl.int64) * n_columns + columns[None, :]
    q_high, q_low = tf32x3.split(tl.load(q_ptr + head * q_head_stride + at, mask=inside, other=0.0))
    k_at = (head * n_padded + keys[:, None]) * COLUMNS + columns[None, :]
    v_at = (head * COLUMNS + columns[:, None]) * n_padded + keys[None, :]
    weighted = tl.zeros([QUERIES, COLUMNS], tl.float32)
    maximum = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    for start in range(0, n_keys, KEYS):
        k_low = tl.load(k_low_ptr + k_at + start * COLUMNS)  # [KEYS, COLUMNS]
        k_high = tl.load(k_high_ptr + k_at + start * COLUMNS)
        x = tf32x3.dot(q_high, q_low, k_high.T, k_low.T) * factor  # [QUERIES, KEYS]
        x = tl.where(start + keys[None, :] < n_keys, x, float("-inf"))
        larger = tl.maximum(maximum, tl.max(x, axis=1))
        shrink = tl.exp2(maximum - larger)
        weights = tl.exp2(x - larger[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        maximum = larger
        v_low = tl.load(v_low_ptr + v_at + start)  # [COLUMNS, KEYS]
        v_high = tl.load(v_high_ptr + v_at + start)
        weights = weights.reshape(QUERIES, KEYS // 8, 4, 2).permute(0, 1, 3, 2).reshape(QUERIES, KEYS)
        high, low = tf32x3.split(weights)
        weighted = weighted * shrink[:, None] + tf32x3.dot(high, low, v_high.T, v_low.T)
    tl.store(out_ptr + head * out_head_stride + at, weighted / total[:, None], mask=inside)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """softmax(q k^T / sqrt(d_k)) v [heads, N, d_k]: float32, q [heads, N, d_k], k and v [heads, M, d_k].

    d_k is up to 128. Beside the operands it takes four times K's memory. `out` has contiguous heads. Differentiable
    where it is not given; the gradient is the plain formula's by torch, which holds the scores in memory. Raises
    UsageError for other types and sizes, and on a GPU whose shared memory holds none of TILES. An infinite number gives
    NaN.
    """
    if out is None:
        return _differentiable(q, k, v)
    run = attended_into if torch.compiler.is_compiling() else _into
    run(q, k, v, out)
    return out


def _into(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
    heads, _, columns = q.shape
    for name, x in (("q", q), ("k", k), ("v", v), ("out", out)):
        heads_of_rows(name, x)
    if k.shape != v.shape or k.shape[0] != heads or k.shape[2] != columns or not 1 <= columns <= MOST_COLUMNS:
        raise UsageError(
            f"q, k, v: expected [heads, N, d_k] and twice [heads, M, d_k], d_k from 1 to {MOST_COLUMNS}, "
            f"got shapes {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if out.shape != q.shape:
        raise UsageError(f"out: expected {tuple(q.shape)}, got shape {tuple(out.shape)}")
    padded, width = _padded(k.shape[1], columns)
    parts = torch.empty((4, heads, padded, width), device=q.device).unbind()
    keys = k.shape[1]
    integers = keys, padded, columns, k.stride(0), v.stride(0)
    with torch.cuda.device_of(q):
        launch(
            _compiled,
            # all operands are float32, and the parts, whose rows are multiples of 64 bytes, are aligned
            (specialised(*integers), width, k.device, aligned(k, v)),
            split_kernel,
            (padded // PADDING, heads, 1),
            *(k, v, *parts, *integers),
            KEYS=PADDING,
            COLUMNS=width,
            num_warps=4,
        )
        _launch(q, parts, out, keys)


attended_into = torch.library.custom_op("workbook::attention_out", _into, mutates_args={"out"})


@operation("attention")
def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """:func:`attention` into memory of its own."""
    y = torch.empty(q.shape, device=q.device)
    _into(laid_out(q), laid_out(k), laid_out(v), y)
    return y


@shapes_of("attention")
def _(q: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
    return q.new_empty(q.shape)


def _keep(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
    q, k, v = ctx.saved_tensors
    scale = q.shape[-1] ** -0.5
    p = torch.softmax(q @ k.mT * scale, -1)
    dp = dy @ v.mT
    dx = p * (dp - (p * dp).sum(-1, keepdim=True)) * scale
    return dx @ k, dx.mT @ q, p.mT @ dy


_differentiable = differentiable(attended, _gradients, _keep)


@lru_cache(maxsize=1024)  # Triton's helpers take microseconds
def _padded(keys: int, columns: int) -> tuple[int, int]:
    """Keys and columns with what is added to them."""
    return triton.cdiv(keys, PADDING) * PADDING, max(16, triton.next_power_of_2(columns))


def _launch(q: torch.Tensor, parts: tuple[torch.Tensor, ...], y: torch.Tensor, keys: int) -> None:
    heads, n, columns = q.shape
    padded, width = parts[0].shape[1:]
    factor = math.log2(math.e) / math.sqrt(columns)
    integers = n, keys, padded, columns, q.stride(0), y.stride(0)
    known = _chosen.get((q.device, width))
    for tile in (known,) if known else TILES[64 if width <= 64 else 128]:
        rows, block, warps, stages = tile
        try:
            launch(
                _compiled,
                (specialised(*integers), width, tile, q.device, aligned(q, y)),  # a float's value is not compiled for
                fused_kernel,
                (-(-n // rows), heads, 1),
                *(q, *parts, y, *integers, factor),
                QUERIES=rows,
                KEYS=block,
                COLUMNS=width,
                num_warps=warps,
                num_stages=stages,
            )
        except OutOfResources:
            continue
        _chosen[q.device, width] = tile
        return
    raise UsageError(f"attention: no tile for {columns} columns fits the shared memory of {q.device}")


def bound(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, accumulated: int = PADDING) -> tuple[torch.Tensor, Bound]:
    """The result in float64 and how far :func:`attention` may be from it. Operands are float64, float32's values.

    To first order in u, with z = x - max. The scores x are off by their product's bound and two roundings. A weight p
    is off by what they make of it: p'_i / p_i = exp(d_i) / E_p[exp(d)], |d| <= error, lies between exp(-error_i) /
    E_p[exp(error)] and, by Jensen's inequality, exp(error_i + E_p[error]). It is off by its own roundings and its
    sum's: |z| u for z and again for its rescalings, 4 u (PTX ISA, ex2.approx: 2^-22) for each power, of which there may
    be one for each tile of 16 keys, and the sum of M. The weights times V: `accumulated` terms at a time by tensor
    cores, and for each tile a rescaling and an addition; the division has 2 ULP = 4 u (PTX ISA, div.full.f32). An
    implementation that lets tensor cores add up all keys has `accumulated` = M.
    """
    u, keys, scale = UNIT_ROUNDOFF["float32"], k.shape[-2], q.shape[-1] ** -0.5
    tiles = -(-keys // 16)
    x = q @ k.swapaxes(-1, -2) * scale
    error = tf32x3.bound(abs(q) @ abs(k).swapaxes(-1, -2), q.shape[-1]).absolute * scale
    error = error + 2.0 * u * (abs(x) + error)
    p = torch.softmax(x, -1)
    up = torch.expm1(error + (p * error).sum(-1, keepdim=True))
    down = 1.0 - torch.exp(-error) / (p * torch.exp(error)).sum(-1, keepdim=True)
    inherited = p * torch.maximum(up, down)
    depth = x.amax(-1, keepdim=True) - x + 2.0 * error
    term = u * (2.0 * depth + 4.0 * (tiles + 1))
    total = term.amax(-1, keepdim=True) + gamma(keys, u, x.shape[:-1].numel()) + worst_case(tiles, u)
    t = term + total + 4.0 * u
    weights = inherited + torch.where(t < 1.0, (p + inherited) * t / (1.0 - t) + 2.0**-126, math.inf)
    off = weights @ abs(v)
    own = tf32x3.bound(p @ abs(v) + off, accumulated, parts=2 * tiles)
    return p @ v, Bound(off, "first-order analysis of float32 softmax") + own
