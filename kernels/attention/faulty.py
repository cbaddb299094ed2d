"""What is under investigation: the scores by a wrong call of sgemm, made for real on the device's own BLAS."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from kernels.attention import attention as right
from kernels.attention.blas import CuBlas, Gemm, GemmRejectedError, HostBlas, blas_for, check
from kernels.attention.golden import plan
from kernels.attention.memory import Escapes, Layout, escapes
from kernels.attention.problem import Inputs, Sizes
from whywrong.recording.steps import Trace


class Program(Protocol):
    """What can be run in place of the product: it says which calls of sgemm it makes for one head."""

    def gemms(self, sizes: Sizes, layout: Layout, head: int = 0) -> list[Gemm]:
        """The calls, in order."""


def batched_matmul(memory: torch.Tensor, layout: Layout, blas: HostBlas | CuBlas) -> None:
    """Q K^T of every head, row-major, with all corrections of the report undone in one call.

    The report's own code is not on record. BLAS is column-major: C [m, n] = A [m, k] B [k, n].
    """
    N, d_k = layout.shapes["Q"]
    M = layout.shapes["K"][0]
    for head in range(layout.heads):
        Q, KT, QK = (layout.offset(name, head) for name in ("Q", "KT", "QK"))
        product = Gemm("N", "N", m=N, n=M, k=d_k, a=Q, lda=N, b=KT, ldb=d_k, c=QK, ldc=N)
        blas.sgemm(memory, product)


def multiply(program: Program, inputs: Inputs, memory: torch.Tensor, layout: Layout, blas: HostBlas | CuBlas) -> None:
    """Make the calls of all heads. All are checked first: what BLAS rejects writes nothing.

    Heads go one after another where one may see what another wrote, and in one batch a call where none can, which
    gives the same numbers in a twelfth of the launches.
    """
    gemms = program.gemms(inputs.sizes, layout)
    for g in gemms:
        check(g)
    if heads_are_independent(gemms, layout):
        for g in gemms:
            blas.sgemm_strided_batched(memory, g, (layout.stride,) * 3, layout.heads)
        return
    for head in range(layout.heads):
        rest = memory[head * layout.stride :]
        for g in gemms:
            blas.sgemm(rest, g)


def heads_are_independent(gemms: list[Gemm], layout: Layout) -> bool:
    """Whether no head reads or writes what another one writes, by arithmetic on the arguments of head 0."""
    first = layout.offset("QK", 0)
    end = first + layout.length("QK")
    next_head = layout.offset("QK", 1)
    spans = [g.extents() for g in gemms]
    return all(first <= s["C"][0] and s["C"][1] <= end and max(s["A"][1], s["B"][1]) <= next_head for s in spans)


def prepare(inputs: Inputs, layout: Layout, device: str = "cpu") -> torch.Tensor:
    """A buffer with Q, K and K^T in place, ready for the product."""
    memory = right.upload(inputs, layout, device)
    layout.view(memory, "KT").copy_(layout.view(memory, "K").transpose(1, 2))
    return memory


def _run(program: Program, inputs: Inputs, device: str, mode: str, compute: str) -> tuple[Layout, torch.Tensor]:
    """The buffer after the product. Raises GemmRejectedError where BLAS rejects the arguments."""
    layout = plan(inputs.sizes, mode)
    memory = prepare(inputs, layout, device)
    multiply(program, inputs, memory, layout, blas_for(device, compute))
    return layout, memory


def scores(
    program: Program, inputs: Inputs, device: str = "cpu", *, mode: str = "poison", compute: str = "float32"
) -> np.ndarray:
    """QK as the wrong call gives it, [heads, n, m] float32.

    Raises GemmRejectedError where BLAS rejects the arguments.
    """
    layout, memory = _run(program, inputs, device, mode, compute)
    return layout.view(memory, "QK").cpu().numpy()


def poisoned(program: Program, inputs: Inputs, device: str = "cpu") -> Escapes:
    """What the wrong call did outside its operands, found by poison. Raises as :func:`scores`."""
    return escapes(*_run(program, inputs, device, "poison", "float32"), "QK")


def attention(
    program: Program, inputs: Inputs, device: str = "cpu", *, mode: str = "poison", compute: str = "float32"
) -> Trace:
    """The whole pipeline with the wrong call in place of the right one.

    Where BLAS rejects the call, the trace ends before the scores, as the program would.
    """

    def wrong(memory: torch.Tensor, layout: Layout, blas: HostBlas | CuBlas) -> None:
        multiply(program, inputs, memory, layout, blas)

    trace = Trace()
    with suppress(GemmRejectedError):
        right.attention(inputs, device, multiply=wrong, compute=compute, layout=plan(inputs.sizes, mode), trace=trace)
    return trace


@dataclass(frozen=True)
class Suspect:
    """A wrong call whose arguments are sealed: it can be run at any sizes, and revealed at the end."""

    _program: Program
    device: str

    def scores(self, inputs: Inputs, *, mode: str = "poison") -> np.ndarray:
        """QK on these inputs, [heads, n, m]. Raises GemmRejectedError where BLAS rejects the arguments."""
        return scores(self._program, inputs, self.device, mode=mode)

    def attention(self, inputs: Inputs, *, mode: str = "poison", compute: str = "float32") -> Trace:
        """The whole pipeline with the sealed call in it."""
        return attention(self._program, inputs, self.device, mode=mode, compute=compute)

    def rejected(self, sizes: Sizes) -> str:
        """The argument that BLAS rejects at these sizes, or nothing."""
        try:
            for g in self._program.gemms(sizes, plan(sizes)):
                check(g)
        except GemmRejectedError as error:
            return error.argument
        return ""

    def reveal(self) -> Program:
        """Open the envelope."""
        return self._program
