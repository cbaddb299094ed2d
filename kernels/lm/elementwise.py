"""What a layer computes between its products, on a GPU: rotary positions and SwiGLU, the gradients in one pass each.

Query, key and value are one product, and so are gate and up, so their gradients have to lie side by side. A compiler
that fuses the parts of a concatenation evaluates every part for every element; here each is written to its own place.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.nn import functional

Tensor = torch.Tensor

BLOCK, WARPS = 1024, 4
"""Columns that a program of the SwiGLU's gradient takes, and its warps: 16 bytes of bfloat16 a thread."""


@triton.jit
def _turned(source, target, cos, sin, spots_in, spots_out, there, SIGN: tl.constexpr, D: tl.constexpr):
    """Pairs of neighbours turned by the angles of cos, sin [D / 2], or by those times -1."""
    x = tl.load(source + spots_in, mask=there, other=0.0).to(cos.dtype.element_ty)
    first, second = tl.split(tl.reshape(x, (x.shape[0] // 2, 2)))
    angles = tl.arange(0, x.shape[0] // 2) % (D // 2)
    c, s = tl.load(cos + angles), SIGN * tl.load(sin + angles)
    y = tl.reshape(tl.join(first * c - second * s, first * s + second * c), x.shape)
    tl.store(target + spots_out, y.to(target.dtype.element_ty), mask=there)


@triton.jit
def rotate_kernel(
    qkv, q, k, v, cos, sin, length, of_batch, of_token, of_head,
    BACKWARD: tl.constexpr, H: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Of a token, qkv [3, H, D] to q, k, v [H, D] of the given strides; BACKWARD the other way. A program a token."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, SIZE)
    there = columns < H * D
    packed = token * 3 * H * D + columns
    apart = token // length * of_batch + token % length * of_token + columns // D * of_head + columns % D
    c = cos + token % length * (D // 2)
    s = sin + token % length * (D // 2)
    if BACKWARD:
        _turned(q, qkv, c, s, apart, packed, there, -1.0, D)
        _turned(k, qkv + H * D, c, s, apart, packed, there, -1.0, D)
        tl.store(qkv + packed + 2 * H * D, tl.load(v + apart, mask=there), mask=there)
    else:
        _turned(qkv, q, c, s, packed, apart, there, 1.0, D)
        _turned(qkv + H * D, k, c, s, packed, apart, there, 1.0, D)
        tl.store(v + apart, tl.load(qkv + packed + 2 * H * D, mask=there), mask=there)


@triton.jit
def swiglu_gradient_kernel(gate_up, gradient, out, F: tl.constexpr, SIZE: tl.constexpr):
    """Gradients [2 F] of a row's gate and up from that of silu(gate) up [F]. A program a row and SIZE columns."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    there = column < F
    gate = tl.load(gate_up + row * 2 * F + column, mask=there, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * F + F + column, mask=there, other=0.0).to(tl.float32)
    d = tl.load(gradient + row * F + column, mask=there, other=0.0).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-gate))
    kind = out.dtype.element_ty
    tl.store(out + row * 2 * F + column, (d * up * share * (1.0 + gate * (1.0 - share))).to(kind), mask=there)
    tl.store(out + row * 2 * F + F + column, (d * gate * share).to(kind), mask=there)


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        b, s, columns = qkv.shape
        q, k, v = (qkv.new_empty(b, s, heads, columns // (3 * heads)) for _ in range(3))
        _rotate(qkv.contiguous(), (q, k, v), cos, sin, backward=False)
        return q, k, v

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        if len({g.stride() for g in gradients}) > 1 or gradients[0].stride(3) != 1:
            gradients = tuple(g.contiguous() for g in gradients)
        b, s, h, d = gradients[0].shape
        out = gradients[0].new_empty(b, s, 3 * h * d)
        _rotate(out, gradients, cos, sin, backward=True)
        return out, None, None, None


def _rotate(qkv: Tensor, parts: tuple[Tensor, ...], cos: Tensor, sin: Tensor, *, backward: bool) -> None:
    b, s, h, d = parts[0].shape
    size = triton.next_power_of_2(h * d)
    rotate_kernel[(b * s,)](
        qkv, *parts, cos, sin, s, *parts[0].stride()[:3], BACKWARD=backward, H=h, D=d, SIZE=size, num_warps=WARPS
    )


def rotated_parts(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value [B, S, H, d] of qkv [B, S, 3 H d], the first two turned by cos, sin [S, d / 2].

    Pairs (2i, 2i + 1) of columns, computed in the type of cos; any floating-point qkv.
    """
    return _Rotated.apply(qkv, cos.contiguous(), sin.contiguous(), heads)


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, -1)
        return functional.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate_up, gradient, f = gate_up.contiguous(), gradient.contiguous(), gradient.shape[-1]
        out = torch.empty_like(gate_up)
        grid = (gradient.numel() // f, triton.cdiv(f, BLOCK))
        swiglu_gradient_kernel[grid](gate_up, gradient, out, F=f, SIZE=BLOCK, num_warps=WARPS)
        return out


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) up [..., F] of gate and up side by side, [..., 2 F]; the gradient is computed in float32."""
    return _Swiglu.apply(gate_up)
