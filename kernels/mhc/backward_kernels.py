"""Triton kernels of the backward pass. Every sum is taken in a fixed order: partial sums by program, then those.

T tokens, N streams, D columns, K = N D, M = N^2 + 2 N. Offsets are int64. SPLIT as in the forward kernels: x is
bfloat16, and a float32 factor is two bfloat16.
"""

import triton
import triton.language as tl


@triton.jit
def dot(a, b, total, NARROW: tl.constexpr):
    """total + a b: exact products of 16-bit numbers (NARROW), or of float32 in three TF32 products."""
    return tl.dot(a, b, total) if NARROW else tl.dot(a, b, total, input_precision="tf32x3")


@triton.jit(do_not_specialize=["T"])
def expand_backward_kernel(
    x_ptr,  # [T, N, D], bfloat16, float16 or float32
    y_ptr,  # [T, D], of x's type
    post_ptr,  # [T, N], float32
    dout_ptr,  # [T, N, D], of x's type
    dy_ptr,  # [T, D], of x's type, written
    dpost_ptr,  # [T, N], float32, written
    dp_ptr,  # [T, N, N], float32, written
    T,
    D: tl.constexpr,
    N: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NARROW: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """dy = sum over j of post_j dout_j; dpost_j = <y, dout_j>; dp_ij = <x_i, dout_j>, for TOKENS tokens.

    The streams of the tokens are the rows of one matrix: x dout^T holds dp in its diagonal blocks, and what lies
    outside them is computed for nothing, on tensor cores that would idle. ROWS is TOKENS, or 16 where that is less.
    """
    first = tl.program_id(0).to(tl.int64) * TOKENS
    s = tl.arange(0, TOKENS * N)
    a = tl.arange(0, ROWS)
    streams = first * N + s < T.to(tl.int64) * N
    tokens = (a < TOKENS) & (first + a < T)
    own = (s // N)[None, :] == a[:, None]
    weight = tl.load(post_ptr + first * N + s, mask=streams, other=0.0)
    weight = tl.where(own, weight[None, :], 0.0)
    high = weight.to(x_ptr.dtype.element_ty)
    low = (weight - high.to(tl.float32)).to(x_ptr.dtype.element_ty)
    dp = tl.zeros([TOKENS * N, TOKENS * N], tl.float32)
    dpost = tl.zeros([ROWS, TOKENS * N], tl.float32)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        inside = streams[:, None] & (d < D)[None, :]
        at = (first * N + s)[:, None] * D + d[None, :]
        x = tl.load(x_ptr + at, mask=inside, other=0.0)
        dout = tl.load(dout_ptr + at, mask=inside, other=0.0)
        here = (first + a)[:, None] * D + d[None, :]
        y = tl.load(y_ptr + here, mask=tokens[:, None] & (d < D)[None, :], other=0.0)
        dp = dot(x, tl.trans(dout), dp, NARROW)
        dpost = dot(y, tl.trans(dout), dpost, NARROW)
        dy = dot(high, dout, tl.zeros([ROWS, BLOCK_D], tl.float32), NARROW)
        if SPLIT:
            dy = dot(low, dout, dy, NARROW)
        tl.store(dy_ptr + here, dy.to(dy_ptr.dtype.element_ty), mask=tokens[:, None] & (d < D)[None, :])
    block = (s // N)[:, None] == (s // N)[None, :]
    tl.store(dp_ptr + (first * N + s)[:, None] * N + (s % N)[None, :], dp, mask=block & streams[:, None])
    tl.store(dpost_ptr + (first * N + s)[None, :] + a[:, None] * 0, dpost, mask=own & streams[None, :])


@triton.jit
def aggregate_backward_kernel(x_ptr, dx_in_ptr, dpre_ptr, D: tl.constexpr, N: tl.constexpr, BLOCK_D: tl.constexpr):
    """dpre_i = <x_i, dx_in>. A program takes one token."""
    t = tl.program_id(0).to(tl.int64)
    for i in tl.static_range(N):
        total = 0.0
        for start in tl.static_range(0, D, BLOCK_D):
            d = start + tl.arange(0, BLOCK_D)
            dx_in = tl.load(dx_in_ptr + t * D + d, mask=d < D, other=0.0).to(tl.float32)
            x = tl.load(x_ptr + (t * N + i) * D + d, mask=d < D, other=0.0).to(tl.float32)
            total += tl.sum(x * dx_in, 0)
        tl.store(dpre_ptr + t * N + i, total)


@triton.jit(do_not_specialize=["T"])
def coefficient_backward_kernel(
    dpre_ptr,  # [T, N], float32
    dpost_ptr,  # [T, N], float32
    dp_ptr,  # [T, N, N], float32
    mix_ptr,  # [T, M], float32
    r_ptr,  # [T], float32
    b_ptr,  # [M], float32
    alpha_ptr,  # [3], float32
    sums_ptr,  # [2 (ITERATIONS - 1), T, N], float32, written and read again
    g_ptr,  # [T, M], float32, written
    dproj_ptr,  # [T, M], float32, written
    packed_ptr,  # [T, 2 BLOCK_M], bfloat16, written where SPLIT
    shrink_ptr,  # [T], float32, written
    partial_ptr,  # [programs, M + 3], float32, written
    T,
    hc_eps,
    K: tl.constexpr,
    N: tl.constexpr,
    ITERATIONS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """g, the projection's gradient and shrink of BLOCK_T tokens, and their part of db [M] and dalpha [3].

    Sinkhorn is run once more, each normaliser into `sums`, and then backwards: what was divided is had by multiplying.
    """
    M: tl.constexpr = N * N + 2 * N
    program = tl.program_id(0).to(tl.int64)
    t = program * BLOCK_T + tl.arange(0, BLOCK_T)
    i = tl.arange(0, N)
    there = t < T
    row_mask = there[:, None] & (i >= 0)[None, :]
    square_mask = row_mask[:, :, None] & (i >= 0)[None, None, :]
    row = t[:, None] * N + i[None, :]
    inner = i[None, :, None] * N + i[None, None, :]
    r = tl.load(r_ptr + t, mask=there, other=0.0)
    mix = mix_ptr + t[:, None] * M + i[None, :]
    a_pre = tl.load(mix, mask=row_mask, other=0.0)
    a_post = tl.load(mix + N, mask=row_mask, other=0.0)
    a_res = tl.load(mix_ptr + t[:, None, None] * M + 2 * N + inner, mask=square_mask, other=0.0)
    alpha_pre, alpha_post, alpha_res = tl.load(alpha_ptr), tl.load(alpha_ptr + 1), tl.load(alpha_ptr + 2)

    s_pre = 1.0 / (1.0 + tl.exp(-(alpha_pre * a_pre + tl.load(b_ptr + i)[None, :])))
    g_pre = tl.load(dpre_ptr + row, mask=row_mask, other=0.0) * s_pre * (1.0 - s_pre)
    s_post = 1.0 / (1.0 + tl.exp(-(alpha_post * a_post + tl.load(b_ptr + N + i)[None, :])))
    g_post = 2.0 * tl.load(dpost_ptr + row, mask=row_mask, other=0.0) * s_post * (1.0 - s_post)

    z = alpha_res * a_res + tl.load(b_ptr + 2 * N + inner)
    e = tl.exp(z - tl.max(z, 2)[:, :, None])
    s = e / tl.sum(e, 2)[:, :, None]
    p = s + hc_eps
    first = tl.sum(p, 1) + hc_eps
    p = p * (1.0 / first)[:, None, :]
    for k in range(ITERATIONS - 1):
        rows = tl.sum(p, 2) + hc_eps
        p = p * (1.0 / rows)[:, :, None]
        columns = tl.sum(p, 1) + hc_eps
        p = p * (1.0 / columns)[:, None, :]
        tl.store(sums_ptr + 2 * k * T.to(tl.int64) * N + row, rows, mask=row_mask)
        tl.store(sums_ptr + (2 * k + 1) * T.to(tl.int64) * N + row, columns, mask=row_mask)
    tl.debug_barrier()  # what a thread stored another one loads

    dp = tl.load(dp_ptr + t[:, None, None] * N * N + inner, mask=square_mask, other=0.0)
    for back in range(ITERATIONS - 1):
        k = ITERATIONS - 2 - back
        columns = tl.load(sums_ptr + (2 * k + 1) * T.to(tl.int64) * N + row, mask=row_mask, other=1.0)
        rows = tl.load(sums_ptr + 2 * k * T.to(tl.int64) * N + row, mask=row_mask, other=1.0)
        dp = (dp - tl.sum(dp * p, 1)[:, None, :]) * (1.0 / columns)[:, None, :]
        p = p * columns[:, None, :]
        dp = (dp - tl.sum(dp * p, 2)[:, :, None]) * (1.0 / rows)[:, :, None]
        p = p * rows[:, :, None]
    dp = (dp - tl.sum(dp * p, 1)[:, None, :]) / first[:, None, :]
    g_res = s * (dp - tl.sum(dp * s, 2)[:, :, None])

    tl.store(g_ptr + t[:, None] * M + i[None, :], g_pre, mask=row_mask)
    tl.store(g_ptr + t[:, None] * M + N + i[None, :], g_post, mask=row_mask)
    tl.store(g_ptr + t[:, None, None] * M + 2 * N + inner, g_res, mask=square_mask)
    d_pre, d_post = alpha_pre * g_pre * r[:, None], alpha_post * g_post * r[:, None]
    d_res = alpha_res * g_res * r[:, None, None]
    out = dproj_ptr + t[:, None] * M + i[None, :]
    tl.store(out, d_pre, mask=row_mask)
    tl.store(out + N, d_post, mask=row_mask)
    tl.store(dproj_ptr + t[:, None, None] * M + 2 * N + inner, d_res, mask=square_mask)
    if SPLIT:
        high_pre, high_post, high_res = d_pre.to(tl.bfloat16), d_post.to(tl.bfloat16), d_res.to(tl.bfloat16)
        narrow = packed_ptr + t[:, None] * (2 * BLOCK_M) + i[None, :]
        wide = packed_ptr + t[:, None, None] * (2 * BLOCK_M) + 2 * N + inner
        tl.store(narrow, high_pre, mask=row_mask)
        tl.store(narrow + N, high_post, mask=row_mask)
        tl.store(wide, high_res, mask=square_mask)
        tl.store(narrow + BLOCK_M, (d_pre - high_pre.to(tl.float32)).to(tl.bfloat16), mask=row_mask)
        tl.store(narrow + BLOCK_M + N, (d_post - high_post.to(tl.float32)).to(tl.bfloat16), mask=row_mask)
        tl.store(wide + BLOCK_M, (d_res - high_res.to(tl.float32)).to(tl.bfloat16), mask=square_mask)
    with_pre, with_post = tl.sum(g_pre * a_pre, 1), tl.sum(g_post * a_post, 1)
    with_res = tl.sum(tl.sum(g_res * a_res, 2), 1)
    pairs = alpha_pre * with_pre + alpha_post * with_post + alpha_res * with_res
    tl.store(shrink_ptr + t, r * r * pairs / K, mask=there)

    sums = partial_ptr + program * (M + 3)
    tl.store(sums + i, tl.sum(g_pre, 0))
    tl.store(sums + N + i, tl.sum(g_post, 0))
    tl.store(sums + 2 * N + i[:, None] * N + i[None, :], tl.sum(g_res, 0))
    tl.store(sums + M, tl.sum(with_pre, 0))
    tl.store(sums + M + 1, tl.sum(with_post, 0))
    tl.store(sums + M + 2, tl.sum(with_res, 0))


@triton.jit(do_not_specialize=["T"])
def stream_backward_kernel(
    x_ptr,  # [T, N, D], bfloat16, float16 or float32
    phi_ptr,  # packed [K, 2 BLOCK_M] bfloat16 where SPLIT, else [K, M] float32
    pre_ptr,  # [T, N], float32
    p_ptr,  # [T, N, N], float32
    dout_ptr,  # [T, N, D], of x's type
    dx_in_ptr,  # [T, D], of x's type
    dproj_ptr,  # packed [T, 2 BLOCK_M] bfloat16 where SPLIT, else [T, M] float32
    shrink_ptr,  # [T], float32
    dx_ptr,  # [T, N, D], of x's type, written
    T,
    D: tl.constexpr,
    N: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dx of BLOCK_D columns of all streams, over TILES tiles of tokens; phi and dproj are packed where SPLIT."""
    M: tl.constexpr = N * N + 2 * N
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    m = tl.arange(0, BLOCK_M)
    phi, rest = (), ()
    for i in tl.static_range(N):
        if SPLIT:
            weights = phi_ptr + (i * D + d)[:, None] * (2 * BLOCK_M) + m[None, :]
            phi = phi + (tl.trans(tl.load(weights, mask=(d < D)[:, None], other=0.0)),)
            rest = rest + (tl.trans(tl.load(weights + BLOCK_M, mask=(d < D)[:, None], other=0.0)),)
        else:
            weights = phi_ptr + (i * D + d)[None, :] * M + m[:, None]
            phi = phi + (tl.load(weights, mask=(m < M)[:, None] & (d < D)[None, :], other=0.0),)
    for tile in tl.range(TILES, num_stages=STAGES):
        t = ((tl.program_id(1) * TILES + tile) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
        there = t < T
        inside = there[:, None] & (d < D)[None, :]
        known = there[:, None] & (m < M)[None, :]
        if SPLIT:
            packed = dproj_ptr + t[:, None] * (2 * BLOCK_M) + m[None, :]
            high = tl.load(packed, mask=known, other=0.0)
            low = tl.load(packed + BLOCK_M, mask=known, other=0.0)
        else:
            dproj = tl.load(dproj_ptr + t[:, None] * M + m[None, :], mask=known, other=0.0)
        shrink = tl.load(shrink_ptr + t, mask=there, other=0.0)
        dx_in = tl.load(dx_in_ptr + t[:, None] * D + d[None, :], mask=inside, other=0.0).to(tl.float32)
        dout, x = (), ()
        for j in tl.static_range(N):
            at = (t[:, None] * N + j) * D + d[None, :]
            dout = dout + (tl.load(dout_ptr + at, mask=inside, other=0.0),)
            x = x + (tl.load(x_ptr + at, mask=inside, other=0.0),)
        for i in tl.static_range(N):
            if SPLIT:
                dx = tl.dot(high, rest[i])
                dx = tl.dot(low, phi[i], dx)
                dx = tl.dot(high, phi[i], dx)
            else:
                dx = tl.dot(dproj, phi[i], input_precision="tf32x3")
            local = tl.load(pre_ptr + t * N + i, mask=there, other=0.0)[:, None] * dx_in
            local -= shrink[:, None] * x[i].to(tl.float32)
            for j in tl.static_range(N):
                p = tl.load(p_ptr + (t * N + i) * N + j, mask=there, other=0.0)
                local += p[:, None] * dout[j].to(tl.float32)
            at = (t[:, None] * N + i) * D + d[None, :]
            tl.store(dx_ptr + at, (local + dx).to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["T"])
def phi_backward_kernel(
    x_ptr,  # [T, K], bfloat16, float16 or float32
    dproj_ptr,  # packed [T, 2 BLOCK_M] bfloat16 where SPLIT, else [T, M] float32
    partial_ptr,  # [groups, K, WIDTH], float32, written
    T,
    K: tl.constexpr,
    M: tl.constexpr,
    WIDTH: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """partial[group, k] = x[ts, k]^T dproj[ts] over this group's TILES tiles of tokens; dproj packed where SPLIT."""
    group = tl.program_id(1)
    k = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    m = tl.arange(0, WIDTH)
    total = tl.zeros([BLOCK_K, WIDTH], tl.float32)
    for tile in range(TILES):
        t = ((group * TILES + tile) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
        x = tl.load(x_ptr + t[:, None] * K + k[None, :], mask=(t < T)[:, None] & (k < K)[None, :], other=0.0)
        if SPLIT:
            known = (t < T)[:, None] & (m % (WIDTH // 2) < M)[None, :]
            dproj = tl.load(dproj_ptr + t[:, None] * WIDTH + m[None, :], mask=known, other=0.0)
            total = tl.dot(tl.trans(x), dproj, total)
        else:
            known = (t < T)[:, None] & (m < M)[None, :]
            dproj = tl.load(dproj_ptr + t[:, None] * M + m[None, :], mask=known, other=0.0)
            total = tl.dot(tl.trans(x).to(tl.float32), dproj, total, input_precision="tf32x3")
    at = (group.to(tl.int64) * K + k)[:, None] * WIDTH + m[None, :]
    tl.store(partial_ptr + at, total, mask=(k < K)[:, None])


@triton.jit(do_not_specialize=["K", "PROGRAMS"])
def finish_kernel(
    parts_ptr,  # [GROUPS, K, HALVES * BLOCK_M], float32
    sums_ptr,  # [PROGRAMS, M + 3], float32
    dphi_ptr,  # [K, M], float32, written
    db_ptr,  # [M], float32, written
    dalpha_ptr,  # [3], float32, written
    K,
    PROGRAMS,
    M: tl.constexpr,
    GROUPS: tl.constexpr,
    HALVES: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_SUMS: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Add the parts: dphi's by row; those of db and dalpha, in the one program after, by column."""
    program = tl.program_id(0)
    if program < tl.num_programs(0) - 1:
        k = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        m = tl.arange(0, BLOCK_M)
        inside = (k < K)[:, None] & (m < M)[None, :]
        total = tl.zeros([BLOCK, BLOCK_M], tl.float32)
        for group in range(GROUPS):
            for half in tl.static_range(HALVES):
                at = (group * K.to(tl.int64) + k)[:, None] * (HALVES * BLOCK_M) + half * BLOCK_M + m[None, :]
                total += tl.load(parts_ptr + at, mask=inside, other=0.0)
        tl.store(dphi_ptr + k[:, None] * M + m[None, :], total, mask=inside)
    else:
        c = tl.arange(0, BLOCK_SUMS)
        sums = tl.zeros([BLOCK_P, BLOCK_SUMS], tl.float32)
        for step in range(STEPS):
            p = step * BLOCK_P + tl.arange(0, BLOCK_P)
            inner = (p < PROGRAMS)[:, None] & (c < M + 3)[None, :]
            sums += tl.load(sums_ptr + p[:, None] * (M + 3) + c[None, :], mask=inner, other=0.0)
        column = tl.sum(sums, 0)
        tl.store(db_ptr + c, column, mask=c < M)
        tl.store(dalpha_ptr + c - M, column, mask=(c >= M) & (c < M + 3))
