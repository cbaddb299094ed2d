"""The reference: attention in float64, recorded step by step; and sgemm itself in float64, with its bound.

    kt = k^T    qk = q kt    scaled = qk / sqrt(d_k)    softmax = row-wise softmax    pv = softmax v

`called` injects a defect: the scores are then what a wrong call gives in exact arithmetic.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from kernels.attention.blas import Gemm, check
from kernels.attention.calls import Call
from kernels.attention.memory import ALIGNMENT, Layout
from kernels.attention.problem import Inputs, Sizes
from whywrong import Bound, Golden, Precision, golden
from whywrong.comparing.bounds import sum_of_products

Tensor = torch.Tensor
Array = Any
"""A float64 NumPy array or torch tensor, [heads, rows, columns]."""

DECLARED = {"float32": Precision(), "tf32": Precision(products="tf32")}
"""By `compute`: how the products of the pipeline are computed."""


def steps(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
    """kt, qk, scaled, softmax and pv of q [heads, n, d_k], k and v [heads, m, d_k]."""
    kt = k.mT
    qk = q @ kt
    scaled = qk / math.sqrt(q.shape[-1])
    p = torch.softmax(scaled, -1)
    return {"kt": kt, "qk": qk, "scaled": scaled, "softmax": p, "pv": p @ v}


def attention(q: Array, k: Array, v: Array) -> Golden:
    """The pipeline recorded in float64, where its inputs are: float32 values of the shapes of :func:`steps`."""
    return golden(steps, q=q, k=k, v=v)


def scores(q: Array, kt: Array, compute: str = "float32") -> tuple[Array, Bound]:
    """Q K^T, with the bound of a sum of d_k products. Q and K^T are exact."""
    value = q @ kt
    squares = (q * q) @ (kt * kt)
    return value, sum_of_products(abs(q) @ abs(kt), q.shape[-1], compute, value=value, squares=squares)


def plan(sizes: Sizes, mode: str = "poison", *, room: bool = True) -> Layout:
    """The buffer of Q, K, K^T and QK; with `room` around them for any wrong call of `calls`."""
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

    Runs on a float64 copy of the buffer, head after head, with the error of each element beside it: a call that
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
    off = np.nan_to_num(layout.numpy_view(error, "QK"), nan=0.0, posinf=np.inf)  # of a NaN there is nothing to bound
    bound = Bound(off, "sgemm with these arguments, in exact arithmetic")
    return layout.numpy_view(memory, "QK").copy(), bound


def _column_major(memory: np.ndarray, start: int, rows: int, columns: int, leading: int) -> np.ndarray:
    step = memory.itemsize
    return np.lib.stride_tricks.as_strided(memory[start:], (rows, columns), (step, leading * step))


def _sgemm(g: Gemm, memory: np.ndarray, error: np.ndarray, compute: str, count: int) -> None:
    """One sgemm on the float64 buffer. An infinite error marks an element whose value nothing determines."""

    def operands(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        a = _column_major(x, g.a, *g.a_shape, g.lda)
        b = _column_major(x, g.b, *g.b_shape, g.ldb)
        return (a if g.transa == "N" else a.T), (b if g.transb == "N" else b.T)

    first, end = g.extents()["C"]
    if any(g.extents()[name][0] < end and first < g.extents()[name][1] for name in "AB"):
        # It reads what it is writing: the order of its loads and stores decides, and BLAS declares none.
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
