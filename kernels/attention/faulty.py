"""What is under investigation: the scores by a wrong call of sgemm, made for real on the device's own BLAS."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import torch

from kernels.attention import attention as right
from kernels.attention.arena import Escapes, Layout, escapes
from kernels.attention.blas import CuBlas, GemmRejectedError, HostBlas, blas_for, check
from kernels.attention.calls import Call, blocked
from kernels.attention.golden import plan
from kernels.attention.problem import Inputs, Sizes
from labkit.trace.steps import Trace


def multiply(call: Call, inputs: Inputs, memory: torch.Tensor, layout: Layout, blas: HostBlas | CuBlas) -> None:
    """Make `call` head after head. All of it is checked first: a call that is rejected writes nothing."""
    gemms = call.gemms(inputs.sizes, layout)
    for g in gemms:
        check(g)
    for head in range(layout.heads):
        rest = memory[head * layout.stride :]
        for g in gemms:
            blas.sgemm(rest, g)


def prepare(inputs: Inputs, layout: Layout, device: str = "cpu") -> torch.Tensor:
    """An arena with Q, K and K^T in place, ready for the product."""
    memory = right.upload(inputs, layout, device)
    layout.view(memory, "KT").copy_(layout.view(memory, "K").transpose(1, 2))
    return memory


def scores(
    call: Call, inputs: Inputs, device: str = "cpu", *, mode: str = "poison", compute: str = "float32"
) -> tuple[np.ndarray, Escapes]:
    """QK as the wrong call gives it, [heads, n, m] float32, and what it did outside its operands.

    Raises GemmRejectedError where BLAS rejects the arguments.
    """
    layout = plan(inputs.sizes, mode)
    blas = blas_for(device, compute)
    memory = prepare(inputs, layout, device)
    multiply(call, inputs, memory, layout, blas)
    return layout.view(memory, "QK").cpu().numpy(), escapes(layout, memory, "QK")


def attention(
    call: Call, inputs: Inputs, device: str = "cpu", *, mode: str = "poison", compute: str = "float32"
) -> Trace:
    """The whole pipeline with the wrong call in place of the right one.

    Where BLAS rejects the call, the trace ends before the scores, as the program would.
    """

    def wrong(memory: torch.Tensor, layout: Layout, blas: HostBlas | CuBlas) -> None:
        multiply(call, inputs, memory, layout, blas)

    trace = Trace()
    with suppress(GemmRejectedError):
        right.attention(inputs, device, multiply=wrong, compute=compute, layout=plan(inputs.sizes, mode), trace=trace)
    return trace


@dataclass(frozen=True)
class Suspect:
    """A wrong call whose arguments are sealed: it can be run at any sizes, and revealed at the end."""

    _call: Call
    device: str

    def scores(self, inputs: Inputs, *, mode: str = "poison") -> np.ndarray:
        """QK on these inputs, [heads, n, m]. Raises GemmRejectedError where BLAS rejects the arguments."""
        return scores(self._call, inputs, self.device, mode=mode)[0]

    def attention(self, inputs: Inputs, *, mode: str = "poison", compute: str = "float32") -> Trace:
        """The whole pipeline with the sealed call in it."""
        return attention(self._call, inputs, self.device, mode=mode, compute=compute)

    def rejected(self, sizes: Sizes) -> str:
        """The argument that BLAS rejects at these sizes, or nothing."""
        try:
            for g in self._call.gemms(sizes, plan(sizes)):
                check(g)
        except GemmRejectedError as error:
            return error.argument
        return ""

    def reveal(self) -> Call:
        """Open the envelope."""
        return self._call


def named(block: int = 32) -> dict[str, Call]:
    """Wrong calls with a name of their own: what a notebook's `defect` may ask for, besides ``blind``."""
    return {
        "column_major_result": Call(a="Q", b="K", transa="T", m="N", n="M", lda="d_k", ldc="N"),
        "operands_swapped": Call(a="Q", b="KT"),
        "k_not_transposed": Call(a="K"),
        "tile_offset_transposed": replace(blocked(block), c_offset="j*M + i"),
        "q_leading_dimension": Call(ldb="N"),
    }


def suspect(defect: str, seed: int, pool: Sequence[Call], device: str = "cpu", block: int = 32) -> Suspect:
    """Seal a wrong call: one of :func:`named`, or with ``blind`` one that the seed picks from `pool`."""
    if defect == "blind":
        pick = int(np.random.default_rng([seed, 4]).integers(len(pool)))
        return Suspect(pool[pick], device)
    if defect not in named(block):
        raise ValueError(f"defect: {defect!r} is not right; wanted blind or one of {', '.join(named(block))}")
    return Suspect(named(block)[defect], device)
