"""Hyper-connections as torch knows them: two autograd Functions over the Triton kernels, and a module around any layer.

The backward passes over the streams as few times as it can, so the gradient of the streams is made in one place,
:class:`_Pre`, which for that needs the gradient of :class:`_Post`'s result. It comes along the edge of a tensor without
memory, `carrier`, which holds no value and which :func:`hyper_connection` shows to nobody: x, the layer's input, its
output and the parameters all get their true gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from kernels.mhc import launch
from kernels.mhc.problem import STREAMS, Constants
from labkit.errors import UsageError

Tensor = torch.Tensor
Layer = Callable[[Tensor], Tensor]
KEPT = ("mix", "r", "pre", "p")
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def hyper_connection(
    x: Tensor, layer: Layer, phi: Tensor, b: Tensor, alpha: Tensor, constants: Constants | None = None
) -> Tensor:
    """P^T x + post layer(sum of pre x): x [.., n, D] to the same shape and type, differentiable once, in all tensors.

    phi [n D, n^2 + 2 n], b [n^2 + 2 n], alpha [3], float32; n is 1, 2, 4 or 8. `layer` takes [.., D] to [.., D].
    Raises UsageError for other shapes and types, and for bfloat16 and float16 where kernels are interpreted.
    """
    check(x, phi, b, alpha)
    x_in, post, p, carrier = _Pre.apply(x, phi, b, alpha, constants or Constants())
    y = layer(x_in)
    if y.shape != x_in.shape:
        raise UsageError(f"layer: gives {tuple(y.shape)}; wanted {tuple(x_in.shape)}, as it was given")
    return _Post.apply(carrier, x.detach(), y.to(x.dtype), post, p)


def check(x: Tensor, phi: Tensor, b: Tensor, alpha: Tensor) -> None:
    """Raises UsageError that names the tensor, what it is and what would be right."""
    if x.dtype not in FLOATS:
        raise UsageError(f"x: {x.dtype} is not right; wanted bfloat16, float16 or float32")
    if x.ndim < 3 or x.shape[-2] not in STREAMS or x.shape[-1] < 1:
        raise UsageError(f"x: shape {tuple(x.shape)} is not right; wanted [.., n, D] with n one of {STREAMS}, D from 1")
    n, d = x.shape[-2:]
    m = n * n + 2 * n
    for name, tensor, shape in (("phi", phi, (n * d, m)), ("b", b, (m,)), ("alpha", alpha, (3,))):
        if tuple(tensor.shape) != shape or tensor.dtype != torch.float32:
            raise UsageError(f"{name}: {tensor.dtype} {tuple(tensor.shape)} is not right; wanted torch.float32 {shape}")
        if tensor.device != x.device:
            raise UsageError(f"{name}: is on {tensor.device}, x on {x.device}; wanted both on one device")
    if not x.is_cuda and x.dtype != torch.float32:
        raise UsageError(f"x: {x.dtype} needs a GPU, since Triton's interpreter multiplies it wrongly; wanted float32")


class _Pre(torch.autograd.Function):
    """x -> x_in, post, p, and the carrier: of x's shape, without memory, for :class:`_Post` alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, phi: Tensor, b: Tensor, alpha: Tensor, constants: Constants) -> tuple[Tensor, ...]:
        """x [.., n, D] -> x_in [.., D] of x's type, post [.., n] and p [.., n, n] in float32."""
        lead, (n, d) = x.shape[:-2], x.shape[-2:]
        rows = x.detach().contiguous().view(-1, n, d)
        phi, b, alpha = phi.contiguous(), b.contiguous(), alpha.contiguous()
        s = launch.forward(rows, phi, b, alpha, constants)
        ctx.save_for_backward(rows, phi, b, alpha, *(s[name] for name in KEPT))
        ctx.constants, ctx.shape = constants, x.shape
        ctx.set_materialize_grads(False)
        carrier = x.new_empty(()).expand(x.shape)
        return s["x_in"].view(*lead, d), s["post"].view(*lead, n), s["p"].view(*lead, n, n), carrier

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *above: Tensor | None) -> tuple[Any, ...]:
        """The gradients of x, phi, b and alpha from those of x_in, post and p, and of _Post's result."""
        x, phi, b, alpha, *kept = ctx.saved_tensors
        (t, n, d), like = x.shape, torch.zeros
        shapes = ((t, d), (t, n), (t, n, n), (t, n, d))
        types = (x.dtype, torch.float32, torch.float32, x.dtype)
        dx_in, dpost, dp, dout = (
            like(shape, dtype=dtype, device=x.device) if g is None else g.to(dtype).contiguous().view(shape)
            for g, shape, dtype in zip(above, shapes, types, strict=True)
        )
        steps = dict(zip(KEPT, kept, strict=True))
        found = launch.backward(x, phi, b, alpha, steps, dx_in, dpost, dp, dout, ctx.constants)
        return found["dx"].view(ctx.shape), found["dphi"], found["db"], found["dalpha"], None


class _Post(torch.autograd.Function):
    """x, y, post, p -> P^T x + post y. Along the carrier it hands the gradient of its result to :class:`_Pre`."""

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, x: Tensor, y: Tensor, post: Tensor, p: Tensor) -> Tensor:
        """x [.., n, D], y [.., D] of one type, post [.., n], p [.., n, n] -> [.., n, D]."""
        n, d = x.shape[-2:]
        rows, y = x.contiguous().view(-1, n, d), y.contiguous().view(-1, d)
        post, p = post.contiguous().view(-1, n), p.contiguous().view(-1, n, n)
        ctx.save_for_backward(rows, y, post)
        ctx.shape = x.shape
        return launch.expand(rows, y, post, p).view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        """dout for _Pre; none for x, whose gradient _Pre makes; dy, dpost, dp."""
        x, y, post = ctx.saved_tensors
        lead, n = ctx.shape[:-2], x.shape[1]
        dout = dout.to(x.dtype).contiguous()
        dy, dpost, dp = launch.expand_backward(x, y, post, dout.view(x.shape))
        return (
            dout,
            None,
            dy.view(*lead, -1) if y.numel() else dy.view(*lead, y.shape[-1]),
            dpost.view(*lead, n),
            dp.view(*lead, n, n),
        )


class HyperConnection(torch.nn.Module):
    """Wraps any layer [.., D] -> [.., D] so that it works on n streams [.., n, D].

    phi starts at zero, so that pre, post and p start from b alone, as in Xie et al. 2026; b is such that every stream
    is read alike, the layer's output is added once, and p is near the identity.
    """

    def __init__(self, layer: torch.nn.Module, d: int, n: int = 4, constants: Constants | None = None) -> None:
        super().__init__()
        if n not in STREAMS:
            raise UsageError(f"n: {n} is not right; wanted one of {STREAMS}")
        if d < 1:
            raise UsageError(f"d: {d} is not right; wanted 1 at least")
        self.layer, self.constants = layer, constants or Constants()
        self.phi = torch.nn.Parameter(torch.zeros(n * d, n * n + 2 * n))
        start = torch.cat((torch.full((n,), -1.0), torch.zeros(n), 4.0 * torch.eye(n).flatten()))
        self.b = torch.nn.Parameter(start)
        self.alpha = torch.nn.Parameter(torch.full((3,), 0.01))

    def forward(self, x: Tensor) -> Tensor:
        """x [.., n, D] to the same shape."""
        return hyper_connection(x, self.layer, self.phi, self.b, self.alpha, self.constants)
