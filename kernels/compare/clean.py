"""Differences that are none: other orders, other precisions that were declared, other right ways to the same number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from kernels.compare.systems import Tensor
from whywrong import Precision

Way = Callable[[Tensor, "dict[str, Tensor]"], Tensor]


@dataclass(frozen=True)
class Difference:
    """Another right way to one or more steps of `system`, in `dtype`; `declared` is the precision that goes with it."""

    name: str
    system: str
    ways: dict[str, Way] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    declared: Precision = field(default_factory=Precision)
    scale: float = 1.0
    """A factor on the floating-point inputs."""
    offset: float = 0.0
    """Added to the floating-point inputs: ill-conditioned where a mean is taken away."""


def _blocked(a: Tensor, b: Tensor, block: int) -> Tensor:
    parts = [a[..., i : i + block] @ b[..., i : i + block, :] for i in range(0, a.shape[-1], block)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _sequential(a: Tensor, b: Tensor) -> Tensor:
    return _blocked(a, b, 1)


def _shuffled(a: Tensor, b: Tensor) -> Tensor:
    order = torch.randperm(a.shape[-1], generator=torch.Generator().manual_seed(1)).to(a.device)
    return _blocked(a[..., order], b[..., order, :], 3)


def _cut(x: Tensor) -> Tensor:
    """To TF32: ten bits after the point, to nearest."""
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


def _split_k(x: Tensor, s: dict[str, Tensor]) -> Tensor:
    return _blocked(s["probs"], s["v"], 32)


def _kahan(a: Tensor, b: Tensor) -> Tensor:
    total = lost = torch.zeros((*a.shape[:-1], b.shape[-1]), dtype=a.dtype, device=a.device)
    for k in range(a.shape[-1]):
        term = a[..., k : k + 1] * b[..., k : k + 1, :] - lost
        grown = total + term
        lost = (grown - total) - term
        total = grown
    return total


def _online(x: Tensor, s: dict[str, Tensor]) -> Tensor:
    """Softmax block by block with a running maximum, as flash attention has it."""
    masked = s["masked"]
    top = torch.full_like(masked[..., :1], -torch.inf)
    total = torch.zeros_like(top)
    for block in masked.split(16, -1):
        grown = torch.maximum(top, block.amax(-1, keepdim=True))
        total = total * torch.exp(top - grown) + torch.exp(block - grown).sum(-1, keepdim=True)
        top = grown
    return torch.exp(masked - top) / total


def _base_two(x: Tensor, s: dict[str, Tensor]) -> Tensor:
    z = (s["masked"] - s["masked"].amax(-1, keepdim=True)) * 1.4426950408889634
    e = torch.exp2(z)
    return e / e.sum(-1, keepdim=True)


def _two_pass(x: Tensor, s: dict[str, Tensor]) -> Tensor:
    centred = s["x"] - s["x"].mean(-1, keepdim=True)
    return centred / ((centred * centred).mean(-1, keepdim=True) + 1e-5).sqrt()


def _flushed(x: Tensor, s: dict[str, Tensor]) -> Tensor:
    return torch.where(x.abs() < torch.finfo(x.dtype).tiny, 0.0, x)


FP32 = Precision()
TF32 = Precision(products="tf32")
BF16 = Precision(storage="bfloat16", products="bfloat16", eager=True)
FP16 = Precision(storage="float16", products="float16", eager=True)

CLEAN = (
    Difference("float32 as it is", "attention", declared=FP32),
    Difference("float32 as it is", "layernorm", declared=FP32),
    Difference("float32 as it is", "cross_entropy", declared=FP32),
    Difference("float32 as it is", "adam", declared=FP32),
    Difference("sums in sequence", "attention", {"qk": lambda x, s: _sequential(s["q"], s["kt"])}, declared=FP32),
    Difference("sums in blocks, split K", "attention", {"pv": _split_k}, declared=FP32),
    Difference("sums in shuffled order", "attention", {"qk": lambda x, s: _shuffled(s["q"], s["kt"])}, declared=FP32),
    Difference("compensated sums (Kahan)", "attention", {"qk": lambda x, s: _kahan(s["q"], s["kt"])}, declared=FP32),
    Difference("online softmax", "attention", {"probs": _online}, declared=FP32),
    Difference("softmax by powers of two", "attention", {"probs": _base_two}, declared=FP32),
    Difference(
        "TF32 products, declared",
        "attention",
        {"qk": lambda x, s: _cut(s["q"]) @ _cut(s["kt"]), "pv": lambda x, s: _cut(s["probs"]) @ _cut(s["v"])},
        declared=TF32,
    ),
    Difference("stored in bfloat16", "attention", dtype=torch.bfloat16, declared=BF16),
    Difference("stored in float16", "attention", dtype=torch.float16, declared=FP16),
    Difference("stored in bfloat16", "cross_entropy", dtype=torch.bfloat16, declared=BF16),
    Difference("stored in float16", "layernorm", dtype=torch.float16, declared=FP16),
    Difference("two-pass variance", "layernorm", {"normal": _two_pass}, declared=FP32),
    Difference("large mean, ill-conditioned", "layernorm", declared=FP32, offset=300.0),
    Difference("large magnitudes", "layernorm", declared=FP32, scale=1e6),
    Difference("large logits, confident", "cross_entropy", declared=FP32, scale=6.0),
    Difference("tiny gradients, denormals", "adam", declared=FP32, scale=1e-18),
    Difference(
        "denormals flushed, declared",
        "adam",
        {f"t{t}.v": _flushed for t in (1, 2, 3)},
        scale=1e-18,
        declared=Precision(flush=True),
    ),
    Difference("large scores", "attention", declared=FP32, scale=4.0),
)
