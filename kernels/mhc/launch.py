"""The kernels in order, on contiguous rows: x [T, n, D]. Tile sizes follow from the shape alone, and how a sum is split
from the shape and the count of multiprocessors."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from kernels.gpu import multiprocessors
from kernels.mhc import backward_kernels, forward_kernels
from kernels.mhc.problem import Constants
from whywrong.comparing.launching import Compiled, aligned, launch

Tensor = torch.Tensor
PROJECTION_K = 64
MOST_COLUMNS = 4096
TOKENS = 8
"""Tokens of a program that works on their coefficients."""

_compiled: Compiled = {}


def _on_its_device(run: Callable[..., Any]) -> Callable[..., Any]:
    """Triton launches on the current device: while `run` runs, that is the one of its first tensor."""

    @wraps(run)
    def there(x: Tensor, *rest: Any) -> Any:
        with torch.cuda.device_of(x):
            return run(x, *rest)

    return there


def _launcher(x: Tensor, *given: Tensor, constants: Constants | None = None) -> Callable[..., None]:
    """Launches the kernels of one call.

    The key of a compiled form holds x's sizes but the first, its type and device, the constants, which of the caller's
    tensors are aligned (torch aligns those that are allocated here), and the options of the launch, some of which
    follow from T, as the splits of a product do. The types of all other tensors follow from x's. Of T, and of the
    counts that follow from it, only whether they fit 32 bits: every kernel that takes one has it in
    `do_not_specialize`.
    """
    key = x.shape[1:], x.shape[0] < 2**31, x.dtype, x.device, constants, aligned(x, *given)

    def run(kernel: Any, grid: tuple[int, int, int], *arguments: Any, **options: Any) -> None:
        launch(_compiled, (*key, *options.values()), kernel, grid, *arguments, **options)

    return run


def _power(x: int) -> int:
    return 1 << (x - 1).bit_length()  # Triton's own helpers take microseconds, and a call has a dozen of them


def _tiles(x: int, block: int) -> int:
    return -(-x // block)


def _columns(d: int) -> tuple[int, int]:
    """Columns of a tile for kernels that take a token each, and their warps."""
    block = min(MOST_COLUMNS, max(16, _power(d)))
    return block, max(1, min(8, block // 512))


def _projection(t: int, k: int, count: int) -> tuple[int, int]:
    """Splits of K, so that there are programs enough for `count` multiprocessors, and the part of K in each split."""
    tiles = _tiles(t, 64)
    splits = max(1, min(16, 2 * count // tiles, k // (2 * PROJECTION_K)))
    per_split = _tiles(_tiles(k, 1 << (splits.bit_length() - 1)), PROJECTION_K) * PROJECTION_K
    return _tiles(k, per_split), per_split


def _stages(split: bool, m: int, narrow: int, wide: int) -> int:
    """How many tiles of a product are on their way at a time, for factors up to 64 and to 256 columns wide."""
    if not split:
        return 2
    return narrow if _width(m) <= 32 else wide


def _width(m: int) -> int:
    return max(16, _power(m))


@_on_its_device
def pack(w: Tensor) -> Tensor:
    """float32 [rows, M] as two bfloat16 that add up to it: [rows, 2 x M rounded up to a power of two from 16]."""
    rows, m = w.shape
    packed = torch.empty(rows, 2 * _width(m), device=w.device, dtype=torch.bfloat16)
    run = _launcher(w)
    run(forward_kernels.pack_kernel, (_tiles(rows, 64), 1, 1), w, packed, rows, M=m, BLOCK_M=_width(m), BLOCK=64)
    return packed


@_on_its_device
def forward(x: Tensor, phi: Tensor, b: Tensor, alpha: Tensor, c: Constants) -> dict[str, Tensor]:
    """r [T], mix [T, M], pre and post [T, n], p [T, n, n], x_in [T, D].

    What a kernel alone needs is freed before the next one's results are allocated.
    """
    t, n, d = x.shape
    k, m = phi.shape
    empty = {"device": x.device, "dtype": torch.float32}
    run = _launcher(x, phi, b, alpha, constants=c)
    partial, squares = _project(run, x, phi) if t else (x, x)
    s = {
        "r": torch.empty(t, **empty),
        "mix": torch.empty(t, m, **empty),
        "pre": torch.empty(t, n, **empty),
        "post": torch.empty(t, n, **empty),
        "p": torch.empty(t, n, n, **empty),
    }
    if t == 0:
        return s | {"x_in": x.new_empty(t, d)}
    run(forward_kernels.coefficient_kernel, (_tiles(t, TOKENS), 1, 1),
        partial, squares, b, alpha, s["mix"], s["r"], s["pre"], s["post"], s["p"], t, c.norm_eps, c.hc_eps,
        K=k, N=n, SPLITS=partial.shape[0], HALVES=partial.shape[2] // _width(m), BLOCK_M=_width(m),
        ITERATIONS=c.iterations, BLOCK_T=TOKENS, num_warps=2,
    )  # fmt: skip
    del partial, squares
    s["x_in"] = x.new_empty(t, d)
    columns, warps = _columns(d)
    run(forward_kernels.aggregate_kernel, (t, _tiles(d, columns), 1),
        x, s["pre"], s["x_in"], D=d, N=n, BLOCK_D=columns, num_warps=warps,
    )  # fmt: skip
    return s


def _weights(x: Tensor, phi: Tensor) -> Tensor:
    """phi as the products with x take it."""
    return pack(phi) if x.dtype == torch.bfloat16 else phi


def _project(run: Callable[..., None], x: Tensor, phi: Tensor) -> tuple[Tensor, Tensor]:
    """Of each part of K x phi [parts, T, width] and the sums of squares [parts, T]."""
    t, (k, m) = x.shape[0], phi.shape
    split, weights = x.dtype == torch.bfloat16, _weights(x, phi)
    width = 2 * _width(m) if split else _width(m)
    splits, per_split = _projection(t, k, multiprocessors(x.device))
    partial = torch.empty(splits, t, width, device=x.device, dtype=torch.float32)
    squares = torch.empty(splits, t, device=x.device, dtype=torch.float32)
    run(forward_kernels.project_kernel, (_tiles(t, 64), splits, 1),
        x, weights, partial, squares, t, 1.0, K=k, M=m, PER_SPLIT=per_split, WIDTH=width, BLOCK_T=64,
        BLOCK_K=PROJECTION_K, SPLIT=split, num_warps=4 if _width(m) <= 32 else 8, num_stages=_stages(split, m, 5, 4),
    )  # fmt: skip
    return partial, squares


@_on_its_device
def expand(x: Tensor, y: Tensor, post: Tensor, p: Tensor) -> Tensor:
    """P^T x + post y, [T, n, D]."""
    t, n, d = x.shape
    out = torch.empty_like(x)
    columns, warps = _columns(d)
    if t:
        run = _launcher(x, y, post, p)
        run(forward_kernels.expand_kernel, (t, _tiles(d, columns), 1),
            x, y, post, p, out, D=d, N=n, BLOCK_D=columns, num_warps=warps,
        )  # fmt: skip
    return out


@_on_its_device
def expand_backward(x: Tensor, y: Tensor, post: Tensor, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dy [T, D] of y's type, dpost [T, n] and dp [T, n, n] in float32."""
    t, n, d = x.shape
    dy, dpost = torch.empty_like(y), torch.empty_like(post)
    dp = torch.empty(t, n, n, device=x.device, dtype=torch.float32)
    narrow = x.dtype != torch.float32
    if t:
        tokens = max(1, 32 // n)
        run = _launcher(x, y, post, dout)
        run(backward_kernels.expand_backward_kernel, (_tiles(t, tokens), 1, 1),
            x, y, post, dout, dy, dpost, dp, t, D=d, N=n, TOKENS=tokens, ROWS=max(16, tokens),
            BLOCK_D=min(128 if narrow else 64, max(16, _power(d))), NARROW=narrow, SPLIT=narrow,
            num_warps=4, num_stages=3 if narrow else 2,
        )  # fmt: skip
    return dy, dpost, dp


@_on_its_device
def backward(
    x: Tensor,
    phi: Tensor,
    b: Tensor,
    alpha: Tensor,
    s: dict[str, Tensor],
    dx_in: Tensor,
    dpost: Tensor,
    dp: Tensor,
    dout: Tensor,
    c: Constants,
) -> dict[str, Tensor]:
    """dx [T, n, D] of x's type; dphi, db, dalpha in float32; the steps on the way: dpre, g, dprojection, shrink."""
    t, n, d = x.shape
    k, m = phi.shape
    empty = {"device": x.device, "dtype": torch.float32}
    out = {
        "dpre": torch.empty(t, n, **empty),
        "g": torch.empty(t, m, **empty),
        "dprojection": torch.empty(t, m, **empty),
        "shrink": torch.empty(t, **empty),
        "dx": torch.empty_like(x),
        "dphi": torch.empty_like(phi),
        "db": torch.empty_like(b),
        "dalpha": torch.empty_like(alpha),
    }
    if t == 0:
        return out | {name: out[name].zero_() for name in ("dphi", "db", "dalpha")}
    split, width = x.dtype == torch.bfloat16, _width(m)
    halves = 2 if split else 1
    columns, warps = _columns(d)
    run = _launcher(x, phi, b, alpha, dx_in, dpost, dp, dout, *s.values(), constants=c)
    run(backward_kernels.aggregate_backward_kernel, (t, 1, 1),
        x, dx_in, out["dpre"], D=d, N=n, BLOCK_D=columns, num_warps=warps,
    )  # fmt: skip
    programs = _tiles(t, TOKENS)
    sums, normalisers = torch.empty(programs, m + 3, **empty), torch.empty(2 * (c.iterations - 1), t, n, **empty)
    packed = torch.empty(t, 2 * width, device=x.device, dtype=torch.bfloat16) if split else out["dprojection"]
    run(backward_kernels.coefficient_backward_kernel, (programs, 1, 1),
        out["dpre"], dpost, dp, s["mix"], s["r"], b, alpha, normalisers, out["g"], out["dprojection"], packed,
        out["shrink"], sums, t, c.hc_eps, K=k, N=n, ITERATIONS=c.iterations, BLOCK_T=TOKENS, BLOCK_M=width, SPLIT=split,
        num_warps=2,
    )  # fmt: skip
    del normalisers
    count = multiprocessors(x.device)
    block_t, stages = (64, 1) if split and n <= 4 else (32, 1)
    block_d, tiles = min(32, max(16, _power(d))), _tiles(t, block_t)
    strips = _tiles(d, block_d)
    per_group = _power(_tiles(tiles, max(1, _tiles(3 * count, strips))))
    run(backward_kernels.stream_backward_kernel, (strips, _tiles(tiles, per_group), 1),
        x, _weights(x, phi), s["pre"], s["p"], dout, dx_in, packed, out["shrink"], out["dx"], t, D=d, N=n,
        TILES=per_group, BLOCK_T=block_t, BLOCK_D=block_d, BLOCK_M=width, SPLIT=split, STAGES=stages, num_warps=4,
    )  # fmt: skip
    block_k, block_t = 128 if split else 64, 64 if split else 32
    strips, tiles = _tiles(k, block_k), _tiles(t, block_t)
    per_group = min(_power(tiles), max(2, _power(_tiles(tiles, min(16, _tiles(2 * count, strips))))))
    groups = _tiles(tiles, per_group)
    parts = torch.empty(groups, k, halves * width, **empty)
    run(backward_kernels.phi_backward_kernel, (strips, groups, 1),
        x, packed, parts, t, K=k, M=m, WIDTH=halves * width, TILES=per_group, BLOCK_T=block_t, BLOCK_K=block_k,
        SPLIT=split, num_warps=4, num_stages=_stages(split, m, 4, 2),
    )  # fmt: skip
    block, block_p = 64, 64
    run(backward_kernels.finish_kernel, (_tiles(k, block) + 1, 1, 1),
        parts, sums, out["dphi"], out["db"], out["dalpha"], k, programs, M=m, GROUPS=groups, HALVES=halves,
        STEPS=_power(_tiles(programs, block_p)), BLOCK=block, BLOCK_M=width, BLOCK_SUMS=_power(m + 3),
        BLOCK_P=block_p, num_warps=4,
    )  # fmt: skip
    return out
