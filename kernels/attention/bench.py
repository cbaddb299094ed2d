"""Q K^T side by side: the per-head loop, the pointer-array batch, the strided batch, torch.bmm, each in fp32 and TF32.

The golden is float64 on the same device, head by head, so that 96 x 1024 x 1024 fits. A GPU shows times as called from
Python (cold cache) and inside a CUDA graph (warm cache, the device's own time).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from kernels.attention import product
from kernels.attention.arena import Layout, allocate
from kernels.attention.attention import transpose
from kernels.attention.blas import blas_for
from kernels.attention.problem import Sizes, uniform
from labkit.bench import Case, Provider
from labkit.numerics.bounds import sum_of_products
from labkit.numerics.compare import Comparison, compare
from labkit.session.device import Device

CUDA_SIZES = (
    Sizes(12, 128, 128, 64),
    Sizes(96, 128, 128, 64),
    Sizes(12, 1024, 1024, 64),
    Sizes(96, 1024, 1024, 64),
    Sizes(12, 4096, 4096, 64),
    Sizes(12, 127, 131, 61),
)
CPU_SIZES = (Sizes(12, 128, 128, 64), Sizes(12, 1024, 1024, 64))


def cases(device: Device) -> Iterator[Case]:
    """One case a size."""
    for sizes in CUDA_SIZES if device.is_cuda else CPU_SIZES:
        yield _case(sizes, device.kind)


def against_float64(q: torch.Tensor, kt: torch.Tensor, compute: str, result: torch.Tensor) -> Comparison:
    """The worst head's comparison with float64, one head in memory at a time. All heads share the false-alarm rate."""
    worst: Comparison | None = None
    heads, n, d_k = q.shape
    for head in range(heads):
        a, b = q[head].double(), kt[head].double()
        bound = sum_of_products(a.abs() @ b.abs(), d_k, compute, count=heads * n * kt.shape[2])
        found = compare(result[head], a @ b, bound)
        if worst is None or found.bound_used > worst.bound_used or not found.ok:
            worst = found
        if not found.ok:
            break
    assert worst is not None
    return worst


def _case(sizes: Sizes, device: str) -> Case:
    shapes = {
        "Q": (sizes.n, sizes.d_k),
        "K": (sizes.m, sizes.d_k),
        "KT": (sizes.d_k, sizes.m),
        "QK": (sizes.n, sizes.m),
    }
    layout = Layout.plan(shapes, sizes.heads, "adjacent", 64)
    memory = allocate(layout, device)
    inputs = uniform(sizes, np.random.default_rng(0))
    layout.view(memory, "Q").copy_(torch.from_numpy(inputs.q))
    layout.view(memory, "K").copy_(torch.from_numpy(inputs.k))
    transpose(memory, layout, blas_for(device))
    q, kt, out = (layout.view(memory, name) for name in ("Q", "KT", "QK"))
    operands = (q.contiguous(), kt.contiguous(), torch.empty(out.shape, device=device))
    providers = []
    for compute in ("float32", "tf32") if device == "cuda" else ("float32",):
        check = partial(against_float64, q, kt, compute)
        blas = blas_for(device, compute)
        for how in product.PRODUCTS:
            providers.append(
                _provider(f"ours: {how}", compute, product.prepared(how, memory, layout, blas), out, check)
            )
        providers.append(_provider("torch.bmm", compute, partial(_bmm, *operands, compute), operands[2], check))
    element = 4
    return Case(
        kernel="attention_qk",
        mode="forward",
        x_name="heads x N x M x d_k",
        x_value=str(sizes),
        providers=providers,
        bytes=element * sizes.heads * (sizes.n * sizes.d_k + sizes.d_k * sizes.m + sizes.n * sizes.m),
        operations=2 * sizes.heads * sizes.n * sizes.m * sizes.d_k,
    )


def _provider(
    name: str,
    compute: str,
    run: Callable[[], None],
    out: torch.Tensor,
    check: Callable[[torch.Tensor], Comparison],
) -> Provider:
    label = name if compute == "float32" else f"{name}, TF32"
    return Provider(label, run, partial(_poison, out), lambda: check(out))


def _bmm(q: torch.Tensor, kt: torch.Tensor, out: torch.Tensor, compute: str) -> None:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = compute == "tf32"
    torch.bmm(q, kt, out=out)
    torch.backends.cuda.matmul.allow_tf32 = before


def _poison(out: torch.Tensor) -> None:
    out.fill_(float("nan"))
