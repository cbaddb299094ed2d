"""Q K^T and P V for all heads, row-major, by the column-major sgemm: as a loop, a pointer batch, a strided batch.

A row-major [rows, columns] matrix is the column-major [columns, rows] one with leading dimension `columns`. So the
row-major S = Q K^T is the column-major S^T = K Q^T: m = M, n = N, k = d_k, with A = K^T as it lies in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from kernels.attention.blas import CuBlas, Gemm, HostBlas
from kernels.attention.memory import Layout

Blas = HostBlas | CuBlas
Product = Callable[[torch.Tensor, Layout, Blas], None]


def correct_call(layout: Layout, left: str, right: str, out: str) -> Gemm:
    """The sgemm of head 0 that gives row-major out = left @ right for row-major operands of these names."""
    rows, inner = layout.shapes[left]
    columns = layout.shapes[right][1]
    return Gemm(
        "N",
        "N",
        columns,
        rows,
        inner,
        layout.starts[right],
        columns,
        layout.starts[left],
        inner,
        layout.starts[out],
        columns,
    )


def each_head(g: Gemm, layout: Layout) -> list[Gemm]:
    """The call of head 0, moved on to every head."""
    step = layout.stride
    return [replace(g, a=g.a + h * step, b=g.b + h * step, c=g.c + h * step) for h in range(layout.heads)]


def loop(memory: torch.Tensor, layout: Layout, blas: Blas, operands: tuple[str, str, str] = ("Q", "KT", "QK")) -> None:
    """One sgemm a head, as the report's fix does it."""
    _make(memory, each_head(correct_call(layout, *operands), layout), blas)


def batched(
    memory: torch.Tensor, layout: Layout, blas: Blas, operands: tuple[str, str, str] = ("Q", "KT", "QK")
) -> None:
    """One pointer-array batched sgemm."""
    blas.sgemm_batched(memory, each_head(correct_call(layout, *operands), layout))


def strided(
    memory: torch.Tensor, layout: Layout, blas: Blas, operands: tuple[str, str, str] = ("Q", "KT", "QK")
) -> None:
    """One strided-batched sgemm: the heads lie one layout stride apart."""
    g = correct_call(layout, *operands)
    blas.sgemm_strided_batched(memory, g, (layout.stride,) * 3, layout.heads)


PRODUCTS: dict[str, Callable[..., None]] = {"loop": loop, "batched": batched, "strided": strided}


def prepared(how: str, memory: torch.Tensor, layout: Layout, blas: Blas) -> Callable[[], None]:
    """One of PRODUCTS for Q K^T with its arguments made beforehand, to be called many times: what benchmarks time."""
    gemms = each_head(correct_call(layout, "Q", "KT", "QK"), layout)
    if how == "loop":
        return partial(_make, memory, gemms, blas)
    if how == "batched" and isinstance(blas, CuBlas):
        return partial(blas.sgemm_batched, memory, gemms, blas.pointers(memory, gemms))
    return partial(PRODUCTS[how], memory, layout, blas)


def _make(memory: torch.Tensor, gemms: list[Gemm], blas: Blas) -> None:
    for g in gemms:
        blas.sgemm(memory, g)
