"""sgemm with the BLAS's own arguments, column-major, on both machines: cuBLAS on a GPU, SciPy's BLAS on a CPU.

    C = alpha op(A) op(B) + beta C,   op(A) is m x k, op(B) is k x n, C is m x n, each column-major

Operands are offsets, in elements, into one buffer, so that the same wrong arguments read and write the same elements
on both. Every call is checked before it is made: the host's BLAS only prints what it rejects.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class Gemm:
    """The arguments of one sgemm, in BLAS's order; `a`, `b` and `c` are offsets into the buffer."""

    transa: str
    transb: str
    m: int
    n: int
    k: int
    a: int
    lda: int
    b: int
    ldb: int
    c: int
    ldc: int
    alpha: float = 1.0
    beta: float = 0.0

    @property
    def a_shape(self) -> tuple[int, int]:
        """Rows and columns of A as it is stored, column-major."""
        return (self.m, self.k) if self.transa == "N" else (self.k, self.m)

    @property
    def b_shape(self) -> tuple[int, int]:
        """Rows and columns of B as it is stored, column-major."""
        return (self.k, self.n) if self.transb == "N" else (self.n, self.k)

    def extents(self) -> dict[str, tuple[int, int]]:
        """First element and one past the last that A, B and C touch."""
        return {
            "A": (self.a, self.a + _span(self.a_shape, self.lda)),
            "B": (self.b, self.b + _span(self.b_shape, self.ldb)),
            "C": (self.c, self.c + _span((self.m, self.n), self.ldc)),
        }


def _span(shape: tuple[int, int], leading_dimension: int) -> int:
    rows, columns = shape
    return 0 if 0 in shape else (columns - 1) * leading_dimension + rows


class GemmRejectedError(ValueError):
    """Arguments that BLAS does not accept. `argument` is the name, `position` its number in the call from 1."""

    def __init__(self, argument: str, position: int, value: Any, wanted: str) -> None:
        super().__init__(f"sgemm: {argument} (argument {position}) is {value!r}; expected {wanted}")
        self.argument = argument
        self.position = position


def check(g: Gemm, elements: int | None = None) -> None:
    """Raise GemmRejectedError for what BLAS rejects, and IndexError for a call that would leave the buffer itself.

    Of BLAS's letters for a transpose only N and T are taken here.
    """
    for position, name in ((1, "transa"), (2, "transb")):
        if getattr(g, name) not in ("N", "T"):
            raise GemmRejectedError(name, position, getattr(g, name), "N or T")
    for position, name in ((3, "m"), (4, "n"), (5, "k")):
        if getattr(g, name) < 0:
            raise GemmRejectedError(name, position, getattr(g, name), "at least 0")
    for position, name, rows in ((8, "lda", g.a_shape[0]), (10, "ldb", g.b_shape[0]), (13, "ldc", g.m)):
        if getattr(g, name) < max(1, rows):
            raise GemmRejectedError(name, position, getattr(g, name), f"at least {max(1, rows)}, the rows stored")
    if elements is not None:
        for name, (first, end) in g.extents().items():
            if first < 0 or end > elements:
                raise IndexError(f"sgemm: {name} spans [{first}, {end}) of a buffer of {elements} elements")


class HostBlas:
    """The Fortran sgemm of the BLAS that SciPy carries. Batched forms are loops here: BLAS has none."""

    compute = "float32"
    name = "SciPy's BLAS"

    def sgemm(self, memory: torch.Tensor, g: Gemm) -> None:
        """One product in `memory`, a one-dimensional float32 CPU tensor."""
        check(g, memory.numel())
        _fortran_sgemm(memory.data_ptr(), g)

    def sgemm_batched(self, memory: torch.Tensor, gemms: Sequence[Gemm]) -> None:
        """Each product after the other."""
        for g in gemms:
            self.sgemm(memory, g)

    def sgemm_strided_batched(self, memory: torch.Tensor, g: Gemm, strides: tuple[int, int, int], count: int) -> None:
        """`count` products, each operand moved on by its stride in elements."""
        check(g, memory.numel())
        check(_moved(g, strides, count - 1), memory.numel())
        for i in range(count):
            _fortran_sgemm(memory.data_ptr(), g, (i * strides[0], i * strides[1], i * strides[2]))

    def transpose(self, memory: torch.Tensor, source: int, rows: int, columns: int, target: int) -> None:
        """Row-major [rows, columns] at `source` to row-major [columns, rows] at `target`: a plain copy."""
        block = memory[source : source + rows * columns].view(rows, columns)
        memory[target : target + rows * columns].view(columns, rows).copy_(block.T)


@cache
def _kept(alpha: float, beta: float) -> np.ndarray:
    return np.array([alpha, beta], np.float32)


def scalars(alpha: float, beta: float) -> tuple[int, int]:
    """The addresses of alpha and beta in host memory, as cuBLAS reads them; they stay for the process's life."""
    pair = _kept(alpha, beta).ctypes.data
    return pair, pair + 4


def _moved(g: Gemm, strides: tuple[int, int, int], times: int) -> Gemm:
    """The product with each operand moved on by `times` its stride."""
    sa, sb, sc = strides
    return replace(g, a=g.a + times * sa, b=g.b + times * sb, c=g.c + times * sc)


@cache
def _scipy_sgemm() -> Any:
    from scipy.linalg import cython_blas

    capsule = cython_blas.__pyx_capi__["sgemm"]
    api = ctypes.pythonapi
    api.PyCapsule_GetName.restype = ctypes.c_char_p
    api.PyCapsule_GetName.argtypes = [ctypes.py_object]
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    address = api.PyCapsule_GetPointer(capsule, api.PyCapsule_GetName(capsule))
    return ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 13)(address)


@lru_cache(maxsize=1024)
def _packed(g: Gemm) -> tuple[int, int, int, tuple[np.ndarray, ...]]:
    """The addresses of what Fortran takes so: six integers, two factors, two letters; and the arrays that hold them."""
    integers = np.array([g.m, g.n, g.k, g.lda, g.ldb, g.ldc], np.int32)
    kept = integers, np.array([g.alpha, g.beta], np.float32), np.array([ord(g.transa), ord(g.transb)], np.uint8)
    i, s, t = (x.ctypes.data for x in kept)
    return i, s, t, kept


def _fortran_sgemm(base: int, g: Gemm, moved: tuple[int, int, int] = (0, 0, 0)) -> None:
    i, s, t, _ = _packed(g)
    a, b, c = base + 4 * (g.a + moved[0]), base + 4 * (g.b + moved[1]), base + 4 * (g.c + moved[2])
    _scipy_sgemm()(t, t + 1, i, i + 4, i + 8, s, a, i + 12, b, i + 16, s + 4, c, i + 20)


class CuBlas:
    """cuBLAS through nvmath-python's bindings, which raise on any status but success.

    `compute` is ``float32`` or ``tf32``; work goes to the device of the buffer, to torch's current stream there.
    """

    name = "cuBLAS"

    def __init__(self, compute: str = "float32") -> None:
        from nvmath.bindings import cublas

        self.compute = compute
        self._api = cublas
        self._mode = {"float32": cublas.Math.DEFAULT_MATH, "tf32": cublas.Math.TF32_TENSOR_OP_MATH}[compute]
        self._handles: dict[torch.device, int] = {}
        self._streams: dict[int, int] = {}
        self._op = {"N": cublas.Operation.N, "T": cublas.Operation.T}

    def handle(self, device: torch.device) -> int:
        """The handle of the current device, whose work goes to torch's current stream there."""
        if device not in self._handles:
            self._handles[device] = self._api.create()
            self._api.set_math_mode(self._handles[device], self._mode)
        handle, stream = self._handles[device], torch.cuda.current_stream(device).cuda_stream
        if stream != self._streams.get(handle):
            self._api.set_stream(handle, stream)
            self._streams[handle] = stream
        return handle

    def sgemm(self, memory: torch.Tensor, g: Gemm) -> None:
        """One product in `memory`, a one-dimensional float32 CUDA tensor."""
        check(g, memory.numel())
        base = memory.data_ptr()
        alpha, beta = scalars(g.alpha, g.beta)
        with torch.cuda.device_of(memory):
            self._api.sgemm(
                self.handle(memory.device),
                self._op[g.transa],
                self._op[g.transb],
                g.m,
                g.n,
                g.k,
                alpha,
                base + 4 * g.a,
                g.lda,
                base + 4 * g.b,
                g.ldb,
                beta,
                base + 4 * g.c,
                g.ldc,
            )

    def pointers(self, memory: torch.Tensor, gemms: Sequence[Gemm]) -> torch.Tensor:
        """The device's arrays of operand addresses for a pointer-array batch: [3, count] int64."""
        for g in gemms:
            check(g, memory.numel())
        base = memory.data_ptr()
        rows = [[base + 4 * getattr(g, operand) for g in gemms] for operand in ("a", "b", "c")]
        return torch.tensor(rows, dtype=torch.int64, device=memory.device)

    def sgemm_batched(self, memory: torch.Tensor, gemms: Sequence[Gemm], pointers: torch.Tensor | None = None) -> None:
        """Products of one shape by cublasSgemmBatched. `pointers` reuses what :meth:`pointers` made."""
        where = self.pointers(memory, gemms) if pointers is None else pointers
        g, row = gemms[0], where.stride(0) * 8
        alpha, beta = scalars(g.alpha, g.beta)
        with torch.cuda.device_of(memory):
            self._api.sgemm_batched(
                self.handle(memory.device),
                self._op[g.transa],
                self._op[g.transb],
                g.m,
                g.n,
                g.k,
                alpha,
                where.data_ptr(),
                g.lda,
                where.data_ptr() + row,
                g.ldb,
                beta,
                where.data_ptr() + 2 * row,
                g.ldc,
                len(gemms),
            )

    def sgemm_strided_batched(self, memory: torch.Tensor, g: Gemm, strides: tuple[int, int, int], count: int) -> None:
        """`count` products by cublasSgemmStridedBatched, each operand moved on by its stride in elements."""
        base, (sa, sb, sc) = memory.data_ptr(), strides
        check(g, memory.numel())
        check(_moved(g, strides, count - 1), memory.numel())
        alpha, beta = scalars(g.alpha, g.beta)
        with torch.cuda.device_of(memory):
            self._api.sgemm_strided_batched(
                self.handle(memory.device),
                self._op[g.transa],
                self._op[g.transb],
                g.m,
                g.n,
                g.k,
                alpha,
                base + 4 * g.a,
                g.lda,
                sa,
                base + 4 * g.b,
                g.ldb,
                sb,
                beta,
                base + 4 * g.c,
                g.ldc,
                sc,
                count,
            )

    def transpose(self, memory: torch.Tensor, source: int, rows: int, columns: int, target: int) -> None:
        """Row-major [rows, columns] to row-major [columns, rows] by cublasSgeam: alpha 1, beta 0, B null."""
        base = memory.data_ptr()
        one, zero = scalars(1.0, 0.0)
        with torch.cuda.device_of(memory):
            self._api.sgeam(
                self.handle(memory.device),
                self._op["T"],
                self._op["N"],
                rows,
                columns,
                one,
                base + 4 * source,
                columns,
                zero,
                0,
                rows,
                base + 4 * target,
                rows,
            )


@cache
def cublas(compute: str = "float32") -> CuBlas:
    """The process's cuBLAS for float32 or tf32."""
    return CuBlas(compute)


def blas_for(device: str, compute: str = "float32") -> HostBlas | CuBlas:
    """The BLAS of ``cpu`` or ``cuda``. tf32 is a GPU's; on a CPU it is a ValueError, never silently float32."""
    if compute not in ("float32", "tf32"):
        raise ValueError(f"compute: expected float32 or tf32, got {compute!r}")
    if device == "cuda":
        return cublas(compute)
    if compute != "float32":
        raise ValueError(f"compute: {compute!r} needs a GPU; expected float32 on the CPU")
    return HostBlas()
