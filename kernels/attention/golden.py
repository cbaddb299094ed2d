"""The reference: attention in float64, step by step, with the bound of each step; and sgemm itself, in float64.

    kt = k^T    qk = q kt    scaled = qk / sqrt(d_k)    softmax = row-wise softmax    pv = softmax v

`attention(inputs, call=...)` injects a defect: the scores are then what that wrong call gives in exact arithmetic.
Works on NumPy arrays, and on torch tensors for sizes that are better checked where they were computed.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import torch

from kernels.attention.arena import ALIGNMENT, Layout
from kernels.attention.blas import Gemm, check
from kernels.attention.calls import Call
from kernels.attention.problem import Inputs, Sizes
from labkit.numerics.bounds import EXACT, UNIT_ROUNDOFF, Bound, gamma, roundings, sum_of_products
from labkit.trace.steps import Trace

Array = Any
"""A float64 NumPy array or torch tensor, [heads, rows, columns]."""


def _xp(x: Array) -> Any:
    return torch if isinstance(x, torch.Tensor) else np


def _double(x: Array) -> Array:
    return x.double() if isinstance(x, torch.Tensor) else np.asarray(x, np.float64)


def transposed(k: Array) -> tuple[Array, Bound]:
    """K^T. Nothing is computed, so nothing may differ."""
    return k.swapaxes(-1, -2), EXACT


def scores(q: Array, kt: Array, compute: str = "float32") -> tuple[Array, Bound]:
    """Q K^T, with the bound of a sum of d_k products. Q and K^T are exact."""
    value = q @ kt
    squares = (q * q) @ (kt * kt)
    return value, sum_of_products(abs(q) @ abs(kt), q.shape[-1], compute, value=value, squares=squares)


def scaled(qk: Array, error: Array | float = 0.0, *, d_k: int) -> tuple[Array, Bound]:
    """QK / sqrt(d_k), QK off by at most `error`. The factor is rounded to float32 and so is the product."""
    factor = 1.0 / math.sqrt(d_k)
    size = (abs(qk) + error) * factor
    shared = error * factor + UNIT_ROUNDOFF["float32"] * size  # the factor is rounded once for all
    return qk * factor, Bound(error * factor, "inherited", 0.0, shared) + roundings(size, 2)


def softmax(x: Array, error: Array | float = 0.0) -> tuple[Array, Bound]:
    """Row-wise softmax, with the bound of the float32 kernel on inputs that are off by at most `error`.

    Inherited: p'_i / p_i = exp(d_i) / E_p[exp(d)] with |d| <= error lies between exp(-error_i) / E_p[exp(error)] and,
    by Jensen's inequality, exp(error_i + E_p[error]).

    Own, to first order in u: z = x - max is rounded once, 2^(z log2 e) adds two roundings of |z| and exp2's error of
    4 u (PTX ISA, ex2.approx.ftz.f32: 2^-22); each term of the sum carries that, the sum of M terms its own, and each
    block of 4096 columns after the first rescales it once more; the full-range division has 2 ULP = 4 u (PTX ISA,
    div.full.f32). t / (1 - t) covers the higher orders. Results below the smallest normal number may be flushed to 0.
    """
    xp, u = _xp(x), UNIT_ROUNDOFF["float32"]
    z = x - xp.amax(x, -1, keepdims=True)
    e = xp.exp(z)
    p = e / e.sum(-1, keepdims=True)
    error = error + 0.0 * x  # of x's shape
    up = xp.expm1(error + (p * error).sum(-1, keepdims=True))
    down = 1.0 - xp.exp(-error) / (p * xp.exp(error)).sum(-1, keepdims=True)
    inherited = _unknown_is_infinite(p * xp.maximum(up, down), p)

    depth = abs(z) + 2.0 * error  # |x' - max'| at most
    term = u * (3.0 * depth + 4.0)
    rescaled = -(-x.shape[-1] // 4096) - 1
    total = xp.amax(term, -1, keepdims=True) * (rescaled + 1) + gamma(x.shape[-1], u, math.prod(x.shape))
    t = term + total + (4.0 + rescaled) * u
    own = xp.where(t < 1.0, (p + inherited) * t / (1.0 - t) + 2.0**-126, math.inf)
    return p, Bound(inherited, "inherited") + Bound(own, "first-order analysis of float32 softmax")


def weighted(p: Array, v: Array, error: Array | float = 0.0, *, compute: str = "float32") -> tuple[Array, Bound]:
    """P V, with the bound of a sum of M products and of P off by at most `error`. V is exact."""
    value = p @ v
    inherited = _unknown_is_infinite((error + 0.0 * p) @ abs(v), value)
    magnitude = abs(p) @ abs(v) + inherited
    squares = (p * p) @ (v * v)
    own = sum_of_products(magnitude, p.shape[-1], compute, value=value, squares=squares)
    return value, Bound(inherited, "inherited", 0.0, inherited) + own


def _unknown_is_infinite(error: Array, value: Array) -> Array:
    """An error that came out as NaN, of a value that did not, has no bound."""
    xp = _xp(value)
    return xp.where(xp.isnan(error) & ~xp.isnan(value), math.inf, error)


def attention(
    q: Array, k: Array, v: Array, *, compute: str = "float32", call: Call | None = None, mode: str = "poison"
) -> Trace:
    """Every step in float64 with the bound that the whole chain up to it may use, and its replay.

    q is [heads, n, d_k], k and v are [heads, m, d_k]; float32 values, upcast here. `compute` is how the products are
    computed: ``float32`` or ``tf32``. `call` injects that call of sgemm in place of Q K^T (NumPy only); `mode` is
    then the arena's, and decides what a read outside an operand finds.
    """
    q, k, v = (_double(x) for x in (q, k, v))
    trace = Trace()
    for name, value in (("q", q), ("k", k)):
        trace.add(name, value, bound=EXACT)
    kt, bound = transposed(k)
    trace.add("kt", kt, ("k",), bound, transposed)
    if call is None:
        qk, bound = scores(q, kt, compute)
    else:
        qk, bound = called(call, Inputs(q, k, v), mode, compute)
    trace.add("qk", qk, ("q", "kt"), bound, partial(scores, compute=compute))
    scale = partial(scaled, d_k=q.shape[-1])
    s, bound = scale(qk, bound.absolute)
    trace.add("scaled", s, ("qk",), bound, scale)
    p, bound = softmax(s, bound.absolute)
    trace.add("softmax", p, ("scaled",), bound, softmax)
    times_v = partial(weighted, v=v, compute=compute)
    o, bound = times_v(p, error=bound.absolute)
    trace.add("pv", o, ("softmax",), bound, times_v)
    return trace


def plan(sizes: Sizes, mode: str = "poison", *, room: bool = True) -> Layout:
    """The arena of Q, K, K^T and QK; with `room` around them for any wrong call of `calls`."""
    shapes = {
        "Q": (sizes.n, sizes.d_k),
        "K": (sizes.m, sizes.d_k),
        "KT": (sizes.d_k, sizes.m),
        "QK": (sizes.n, sizes.m),
    }
    largest = max(sizes.n, sizes.m, sizes.d_k)
    return Layout.plan(shapes, sizes.heads, mode, 2 * largest * largest if room else ALIGNMENT)


def called(call: Call, inputs: Inputs, mode: str = "poison", compute: str = "float32") -> tuple[np.ndarray, Bound]:
    """What a call of sgemm gives in exact arithmetic, [heads, n, m], and how far float32 may be from it.

    Runs on a float64 copy of the arena, head after head, with the error of each element beside it: a call that
    reads what an earlier one wrote inherits its error, and one that reads what it is writing has an infinite bound.
    NaN stands for what lies outside every operand, and for what nobody wrote. Raises GemmRejectedError for arguments
    that BLAS rejects.
    """
    sizes = inputs.sizes
    layout = plan(sizes, mode)
    memory = np.full(layout.size, np.nan)
    for name, value in (("Q", inputs.q), ("K", inputs.k), ("KT", inputs.k.swapaxes(-1, -2))):
        layout.numpy_view(memory, name)[...] = value
    layout.numpy_view(memory, "QK")[...] = np.nan if mode == "poison" else 0.0  # nobody wrote it yet
    error = np.zeros(layout.size)
    count = sizes.heads * sizes.n * sizes.m
    for head in range(sizes.heads):
        for g in call.gemms(sizes, layout, head):
            check(g, layout.size)
            _sgemm(g, memory, error, compute, count)
    bound = Bound(layout.numpy_view(error, "QK").copy(), "sgemm with these arguments, in exact arithmetic")
    return layout.numpy_view(memory, "QK").copy(), bound


def _column_major(memory: np.ndarray, start: int, rows: int, columns: int, leading: int) -> np.ndarray:
    step = memory.itemsize
    return np.lib.stride_tricks.as_strided(memory[start:], (rows, columns), (step, leading * step))


def _sgemm(g: Gemm, memory: np.ndarray, error: np.ndarray, compute: str, count: int) -> None:
    """One sgemm on the float64 arena. An infinite error marks an element whose value nothing determines."""

    def operands(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        a = _column_major(x, g.a, *g.a_shape, g.lda)
        b = _column_major(x, g.b, *g.b_shape, g.ldb)
        return (a if g.transa == "N" else a.T), (b if g.transb == "N" else b.T)

    first, end = g.extents()["C"]
    if any(g.extents()[name][0] < end and first < g.extents()[name][1] for name in "AB"):
        # It reads what it is writing: the order of its loads and stores decides, and BLAS promises none.
        _column_major(error, g.c, g.m, g.n, g.ldc)[...] = np.inf
    (a, b), (ea, eb) = operands(memory), operands(error)
    if ea.any() or eb.any():
        unknown = np.isinf(ea).any(axis=1)[:, None] | np.isinf(eb).any(axis=0)[None, :]
        ea, eb = (np.where(np.isinf(x), 0.0, x) for x in (ea, eb))
        bound = sum_of_products((abs(a) + ea) @ (abs(b) + eb), g.k, compute, count=count).absolute
        bound = np.where(unknown, np.inf, bound + ea @ (abs(b) + eb) + abs(a) @ eb)
    else:
        bound = sum_of_products(abs(a) @ abs(b), g.k, compute, count=count).absolute
    value = a @ b
    _column_major(memory, g.c, g.m, g.n, g.ldc)[...] = value
    _column_major(error, g.c, g.m, g.n, g.ldc)[...] = bound
