"""The right pipeline on real kernels: transpose, batched sgemm, Triton scaling and softmax, batched sgemm."""

from __future__ import annotations

import math

import torch

from kernels.attention import elementwise, product
from kernels.attention.blas import CuBlas, HostBlas, blas_for
from kernels.attention.golden import plan
from kernels.attention.memory import Layout, allocate
from kernels.attention.problem import Inputs
from whywrong.recording.steps import Trace


def upload(inputs: Inputs, layout: Layout, device: str) -> torch.Tensor:
    """A buffer on `device` with Q and K in place, and K^T and QK poisoned (adjacent mode: zero)."""
    memory = allocate(layout, device, unwritten=("KT", "QK") if layout.mode == "poison" else ())
    layout.view(memory, "Q").copy_(torch.from_numpy(inputs.q))
    layout.view(memory, "K").copy_(torch.from_numpy(inputs.k))
    return memory


def transpose(memory: torch.Tensor, layout: Layout, blas: HostBlas | CuBlas) -> None:
    """K to K^T for each head: cublasSgeam on a GPU, a copy on a CPU."""
    rows, columns = layout.shapes["K"]
    for head in range(layout.heads):
        blas.transpose(memory, layout.offset("K", head), rows, columns, layout.offset("KT", head))


def attention(
    inputs: Inputs,
    device: str = "cpu",
    *,
    multiply: product.Product = product.strided,
    compute: str = "float32",
    layout: Layout | None = None,
    trace: Trace | None = None,
) -> Trace:
    """Run the pipeline and return its steps q, k, kt, qk, scaled, softmax, pv as float32 tensors on `device`.

    `multiply` computes QK in the buffer: one of `product.PRODUCTS`, or the product under investigation. Steps go into
    `trace` as they are made, so that those before an error are there to look at.
    """
    layout = layout or plan(inputs.sizes)
    blas = blas_for(device, compute)
    memory = upload(inputs, layout, device)
    trace = Trace() if trace is None else trace
    trace.add("q", layout.view(memory, "Q").clone())
    trace.add("k", layout.view(memory, "K").clone())
    transpose(memory, layout, blas)
    trace.add("kt", layout.view(memory, "KT"))
    multiply(memory, layout, blas)
    qk = trace.add("qk", layout.view(memory, "QK"))
    trace.add("scaled", elementwise.scale(qk, 1.0 / math.sqrt(inputs.sizes.d_k)))
    p, pv = weighted_values(trace["scaled"], inputs, blas)
    trace.add("softmax", p)
    trace.add("pv", pv)
    return trace


def weighted_values(x: torch.Tensor, inputs: Inputs, blas: HostBlas | CuBlas) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(x) and its product with V, through a buffer of their own."""
    s = inputs.sizes
    layout = Layout.plan({"P": (s.n, s.m), "V": (s.m, s.d_k), "PV": (s.n, s.d_k)}, s.heads, "poison", 64)
    memory = allocate(layout, str(x.device), unwritten=("P", "PV"))
    layout.view(memory, "V").copy_(torch.from_numpy(inputs.v))
    p = elementwise.softmax(x, out=layout.view(memory, "P"))
    product.strided(memory, layout, blas, operands=("P", "V", "PV"))
    return p, layout.view(memory, "PV")
