"""Triton kernels of the forward pass: projection, coefficients with Sinkhorn, aggregation, expansion.

T tokens, N streams, D columns, K = N D, M = N^2 + 2 N. Rows are contiguous. Offsets are int64: x may have more than
2^31 elements. Where x is bfloat16 (SPLIT), a float32 factor is packed as two bfloat16 that add up to it, high | low,
so that products run on bfloat16 tensor cores and lose 2^-16 of it; other types take three TF32 products.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["ROWS"])
def pack_kernel(w_ptr, packed_ptr, ROWS, M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr):
    """packed[row] = high [BLOCK_M] | low [BLOCK_M] of w[row, :M], zeros beyond M."""
    row = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    m = tl.arange(0, BLOCK_M)
    w = tl.load(w_ptr + row[:, None] * M + m[None, :], mask=(row < ROWS)[:, None] & (m < M)[None, :], other=0.0)
    high = w.to(tl.bfloat16)
    to = packed_ptr + row[:, None] * (2 * BLOCK_M) + m[None, :]
    tl.store(to, high, mask=(row < ROWS)[:, None])
    tl.store(to + BLOCK_M, (w - high.to(tl.float32)).to(tl.bfloat16), mask=(row < ROWS)[:, None])


@triton.jit(do_not_specialize=["T"])
def project_kernel(
    x_ptr,  # [T, K], bfloat16, float16 or float32
    phi_ptr,  # packed [K, WIDTH] bfloat16 where SPLIT, else [K, M] float32
    partial_ptr,  # [splits, T, WIDTH], float32, written
    squares_ptr,  # [splits, T], float32, written
    T,
    runtime_one,  # 1.0, unknown to the compiler
    K: tl.constexpr,
    M: tl.constexpr,
    PER_SPLIT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """partial[split, t] = x[t, ks] phi[ks] and squares[split, t] = sum of x^2, over this split's part of K.

    phi is packed [K, WIDTH] where SPLIT, and [K, M] otherwise. `runtime_one` is 1: because the loop multiplies by it,
    the product of a step is waited for within the step, in every type. Triton keeps one tile fewer of x than of phi,
    since the squares read x as well, and would load the next tile over one that a pending product still reads
    (race.py).
    """
    split = tl.program_id(1)
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    m = tl.arange(0, WIDTH)
    rows = t.to(tl.int64)[:, None] * K
    total = tl.zeros([BLOCK_T, WIDTH], tl.float32)
    squares = tl.zeros([BLOCK_T], tl.float32)
    for step in range(PER_SPLIT // BLOCK_K):
        k = split * PER_SPLIT + step * BLOCK_K + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + rows + k[None, :], mask=(t < T)[:, None] & (k < K)[None, :], other=0.0)
        if SPLIT:
            phi = tl.load(phi_ptr + k[:, None] * WIDTH + m[None, :], mask=(k < K)[:, None], other=0.0)
            total = tl.dot(x, phi, total) * runtime_one
        else:
            phi = tl.load(phi_ptr + k[:, None] * M + m[None, :], mask=(k < K)[:, None] & (m < M)[None, :], other=0.0)
            total = tl.dot(x.to(tl.float32), phi, total, input_precision="tf32x3") * runtime_one
        wide = x.to(tl.float32)
        squares += tl.sum(wide * wide, 1)
    row = split.to(tl.int64) * T + t
    tl.store(partial_ptr + row[:, None] * WIDTH + m[None, :], total, mask=(t < T)[:, None])
    tl.store(squares_ptr + row, squares, mask=t < T)


@triton.jit(do_not_specialize=["T"])
def coefficient_kernel(
    partial_ptr,  # [SPLITS, T, HALVES * BLOCK_M], float32
    squares_ptr,  # [SPLITS, T], float32
    b_ptr,  # [M], float32
    alpha_ptr,  # [3], float32
    mix_ptr,  # [T, M], float32, written
    r_ptr,  # [T], float32, written
    pre_ptr,  # [T, N], float32, written
    post_ptr,  # [T, N], float32, written
    p_ptr,  # [T, N, N], float32, written
    T,
    norm_eps,
    hc_eps,
    K: tl.constexpr,
    N: tl.constexpr,
    SPLITS: tl.constexpr,
    HALVES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ITERATIONS: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Add the splits, normalise, and make pre, post and the doubly stochastic p."""
    M: tl.constexpr = N * N + 2 * N
    t = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    i = tl.arange(0, N)
    there = t < T
    row_mask = there[:, None] & (i >= 0)[None, :]
    square_mask = row_mask[:, :, None] & (i >= 0)[None, None, :]
    place = 2 * N + i[None, :, None] * N + i[None, None, :]
    squares = tl.zeros([BLOCK_T], tl.float32)
    a_pre = tl.zeros([BLOCK_T, N], tl.float32)
    a_post = tl.zeros([BLOCK_T, N], tl.float32)
    a_res = tl.zeros([BLOCK_T, N, N], tl.float32)
    for split in range(SPLITS):
        row = split * T.to(tl.int64) + t
        squares += tl.load(squares_ptr + row, mask=there, other=0.0)
        for half in tl.static_range(HALVES):
            part = partial_ptr + row * (HALVES * BLOCK_M) + half * BLOCK_M
            a_pre += tl.load(part[:, None] + i[None, :], mask=row_mask, other=0.0)
            a_post += tl.load(part[:, None] + N + i[None, :], mask=row_mask, other=0.0)
            a_res += tl.load(part[:, None, None] + place, mask=square_mask, other=0.0)
    r = tl.rsqrt(squares / K + norm_eps)
    a_pre, a_post, a_res = a_pre * r[:, None], a_post * r[:, None], a_res * r[:, None, None]
    tl.store(r_ptr + t, r, mask=there)
    to = mix_ptr + t[:, None] * M + i[None, :]
    tl.store(to, a_pre, mask=row_mask)
    tl.store(to + N, a_post, mask=row_mask)
    tl.store(mix_ptr + t[:, None, None] * M + place, a_res, mask=square_mask)

    z_pre = tl.load(alpha_ptr) * a_pre + tl.load(b_ptr + i)[None, :]
    z_post = tl.load(alpha_ptr + 1) * a_post + tl.load(b_ptr + N + i)[None, :]
    z = tl.load(alpha_ptr + 2) * a_res + tl.load(b_ptr + place)
    tl.store(pre_ptr + t[:, None] * N + i[None, :], 1.0 / (1.0 + tl.exp(-z_pre)) + hc_eps, mask=row_mask)
    tl.store(post_ptr + t[:, None] * N + i[None, :], 2.0 / (1.0 + tl.exp(-z_post)), mask=row_mask)

    e = tl.exp(z - tl.max(z, 2)[:, :, None])
    p = e / tl.sum(e, 2)[:, :, None] + hc_eps
    p = p * (1.0 / (tl.sum(p, 1) + hc_eps))[:, None, :]
    for _ in range(ITERATIONS - 1):
        p = p * (1.0 / (tl.sum(p, 2) + hc_eps))[:, :, None]
        p = p * (1.0 / (tl.sum(p, 1) + hc_eps))[:, None, :]
    tl.store(p_ptr + t[:, None, None] * N * N + i[None, :, None] * N + i[None, None, :], p, mask=square_mask)


@triton.jit
def aggregate_kernel(x_ptr, pre_ptr, out_ptr, D: tl.constexpr, N: tl.constexpr, BLOCK_D: tl.constexpr):
    """out[t, :] = sum over i of pre[t, i] x[t, i, :]; a program takes one token and BLOCK_D columns."""
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK_D], tl.float32)
    for i in tl.static_range(N):
        x = tl.load(x_ptr + (t * N + i) * D + d, mask=d < D, other=0.0)
        total += tl.load(pre_ptr + t * N + i) * x.to(tl.float32)
    tl.store(out_ptr + t * D + d, total.to(out_ptr.dtype.element_ty), mask=d < D)


@triton.jit
def expand_kernel(x_ptr, y_ptr, post_ptr, p_ptr, out_ptr, D: tl.constexpr, N: tl.constexpr, BLOCK_D: tl.constexpr):
    """out[t, j, :] = post[t, j] y[t, :] + sum over i of p[t, i, j] x[t, i, :]."""
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    y = tl.load(y_ptr + t * D + d, mask=d < D, other=0.0).to(tl.float32)
    x = ()
    for i in tl.static_range(N):
        x = x + (tl.load(x_ptr + (t * N + i) * D + d, mask=d < D, other=0.0),)
    for j in tl.static_range(N):
        total = tl.load(post_ptr + t * N + j) * y
        for i in tl.static_range(N):
            total += tl.load(p_ptr + (t * N + i) * N + j) * x[i].to(tl.float32)
        tl.store(out_ptr + (t * N + j) * D + d, total.to(out_ptr.dtype.element_ty), mask=d < D)
