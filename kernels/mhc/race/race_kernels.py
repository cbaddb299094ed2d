"""The projection of `forward_kernels.py` without its guard, in variants that show what the race needs; faulty ones."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["T"])
def variant_kernel(
    x_ptr,
    phi_ptr,
    out_ptr,
    squares_ptr,
    T,
    runtime_one,  # 1.0, unknown to the compiler
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    READERS: tl.constexpr,
    GUARDED: tl.constexpr,
    PRODUCTS: tl.constexpr,
    BY_SPLIT: tl.constexpr,
):
    """out[t] = x[t] phi and squares[t] = sum of x[t]^2, over all of K.

    BY_SPLIT: results go to row split T + t, as those of the operator, which may split K among programs; here there is
    one split, so that this is row t, which the compiler does not know. READERS 2: the squares read the tile of x that
    the product reads, as in the projection; 1: there are no squares. GUARDED: the total is multiplied by `runtime_one`,
    which is 1. PRODUCTS: "exact", or what tl.dot takes as input_precision.
    """
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    m = tl.arange(0, WIDTH)
    rows = t.to(tl.int64)[:, None] * K
    total = tl.zeros([BLOCK_T, WIDTH], tl.float32)
    squares = tl.zeros([BLOCK_T], tl.float32)
    for step in range(K // BLOCK_K):
        k = step * BLOCK_K + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + rows + k[None, :], mask=(t < T)[:, None] & (k < K)[None, :], other=0.0)
        phi = tl.load(phi_ptr + k[:, None] * WIDTH + m[None, :], mask=(k < K)[:, None], other=0.0)
        if PRODUCTS == "exact":
            total = tl.dot(x, phi, total)
        else:
            total = tl.dot(x.to(tl.float32), phi, total, input_precision=PRODUCTS)
        if GUARDED:
            total = total * runtime_one
        if READERS == 2:
            wide = x.to(tl.float32)
            squares += tl.sum(wide * wide, 1)
    row = t.to(tl.int64)
    if BY_SPLIT:
        row += tl.program_id(1).to(tl.int64) * T
    tl.store(out_ptr + row[:, None] * WIDTH + m[None, :], total, mask=(t < T)[:, None])
    tl.store(squares_ptr + row, squares, mask=t < T)
