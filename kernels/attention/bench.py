"""Q K^T side by side: the per-head loop, the pointer-array batch, the strided batch, torch.bmm, each in fp32 and TF32,
and three TF32 products; then softmax(Q K^T / sqrt(d_k)) V: fused, in steps, and torch's own.

The golden is float64 on the same device, head by head, so that 96 x 1024 x 1024 fits. A GPU shows times as called from
Python (cold cache) and inside a CUDA graph (warm cache, the device's own time).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels.attention import baselines, elementwise, fused, product, scores
from kernels.attention.attention import transpose
from kernels.attention.blas import blas_for
from kernels.attention.memory import Layout, allocate
from kernels.attention.problem import Sizes, uniform
from labkit.bench import Case, Provider
from labkit.session.device import Device
from whywrong.comparing.bounds import Bound, sum_of_products
from whywrong.comparing.comparison import Comparison, compare

CUDA_SIZES = (
    Sizes(12, 128, 128, 64),
    Sizes(96, 128, 128, 64),
    Sizes(12, 1024, 1024, 64),
    Sizes(96, 1024, 1024, 64),
    Sizes(12, 4096, 4096, 64),
    Sizes(12, 127, 131, 61),
)
CPU_SIZES = (Sizes(12, 128, 128, 64), Sizes(12, 1024, 1024, 64))
ATTENTION_SIZES = (
    Sizes(12, 1024, 1024, 64),
    Sizes(12, 4096, 4096, 64),
    Sizes(12, 4096, 4096, 128),
    Sizes(12, 127, 131, 61),
)
"""Of the whole operator, on a GPU."""


def cases(device: Device) -> Iterator[Case]:
    """One case a size."""
    for sizes in CUDA_SIZES if device.is_cuda else CPU_SIZES:
        yield _case(sizes, device.kind)
    for sizes in ATTENTION_SIZES if device.is_cuda else ():
        yield _attention_case(sizes)


def against_float64(q: torch.Tensor, kt: torch.Tensor, compute: str, result: torch.Tensor) -> Comparison:
    """The comparison with float64, one head in memory at a time. All heads share the false-alarm rate."""
    heads, n, d_k = q.shape

    def exact(head: int) -> tuple[torch.Tensor, Bound]:
        a, b = q[head].double(), kt[head].double()
        return a @ b, sum_of_products(a.abs() @ b.abs(), d_k, compute, count=heads * n * kt.shape[2])

    return _over_heads(result, exact)


def _over_heads(result: torch.Tensor, exact: Callable[[int], tuple[torch.Tensor, Bound]]) -> Comparison:
    """The comparison of the head that uses most of its bound, with the largest error of any head in it."""
    pairs = ((head_result, *exact(head)) for head, head_result in enumerate(result))
    found = [compare(head_result, golden, bound=bound) for head_result, golden, bound in pairs]
    worst = max(found, key=lambda one: (not one.ok, one.bound_used))
    return replace(worst, max_abs=max(one.max_abs for one in found))


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
        if compute == "float32" and device == "cuda":  # held to float32's bound, not to its own wider one
            three = partial(scores.scores, q, layout.view(memory, "K"), out)
            providers.append(_provider("ours: three TF32 products", compute, three, out, check))
            keys = layout.view(memory, "K").contiguous()
            for tile in baselines.tiles():
                theirs = partial(baselines.cutlass_scores, operands[0], keys, operands[2], tile)
                name = f"CUTLASS, three TF32 products, {tile}"
                providers.append(_provider(name, compute, theirs, operands[2], check))
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


def _attention_case(sizes: Sizes) -> Case:
    """softmax(Q K^T / sqrt(d_k)) V in float32."""
    inputs = uniform(sizes, np.random.default_rng(0))
    q, k, v = (torch.from_numpy(x).cuda() for x in (inputs.q, inputs.k, inputs.v))
    ours = torch.empty_like(q)  # torch's own results lie otherwise
    kept = {"out": ours}
    square = torch.empty(sizes.heads, sizes.n, sizes.m, device="cuda")
    torch.backends.cuda.matmul.allow_tf32 = False

    def exact(head: int) -> tuple[torch.Tensor, Bound]:
        one = (x[head].double() for x in (q, k, v))
        return fused.bound(*one, accumulated=sizes.m)  # torch's kernel lets tensor cores add up all keys

    def check() -> Comparison:
        return _over_heads(kept["out"], exact)

    def in_steps() -> None:
        scaled = elementwise.scale(scores.scores(q, k, square), sizes.d_k**-0.5, square)
        kept["out"] = torch.bmm(elementwise.softmax(scaled, square), v, out=ours)

    def torchs() -> None:
        kept["out"] = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None])[0]

    def torchs_math() -> None:
        with sdpa_kernel(SDPBackend.MATH):
            torchs()

    def flex() -> None:
        kept["out"] = baselines.flex_attention(q, k, v)

    runs: dict[str, Callable[[], object]] = {
        "ours: fused": lambda: kept.update(out=fused.attention(q, k, v, ours)),
        "ours: in steps": in_steps,
        "torch, its own choice": torchs,  # memory-efficient, and math where d_k is no multiple of four
        "torch, math": torchs_math,
        "FlexAttention": flex,
    }
    element = 4
    return Case(
        kernel="attention",
        mode="forward",
        x_name="heads x N x M x d_k",
        x_value=str(sizes),
        providers=[Provider(name, run, lambda: _poison(kept["out"]), check) for name, run in runs.items()],
        bytes=element * 2 * sizes.heads * (sizes.n + sizes.m) * sizes.d_k,
        operations=4 * sizes.heads * sizes.n * sizes.m * sizes.d_k,
    )


def _provider(
    name: str,
    compute: str,
    run: Callable[[], object],
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
