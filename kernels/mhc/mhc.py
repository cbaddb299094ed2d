"""Hyper-connections as torch knows them: operations of the library `workbook` over the Triton kernels, and a module
around any layer.

The backward passes over the streams as few times as it can, so the gradient of the streams is made in one place, that
of :func:`pre`, which for that needs the gradient of :func:`post`'s result. It comes along the edge of a tensor without
memory, `carrier`, which holds no value and which :func:`hyper_connection` shows to nobody: x, the layer's input, its
output and the parameters all get their true gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from kernels.mhc import launch
from kernels.mhc.problem import STREAMS, Constants
from kernels.operations import differentiable, operation, shapes_of
from whywrong.errors import UsageError

Tensor = torch.Tensor
Layer = Callable[[Tensor], Tensor]
SAVED = ("mix", "r", "pre", "p")
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def hyper_connection(
    x: Tensor, layer: Layer, phi: Tensor, b: Tensor, alpha: Tensor, constants: Constants | None = None
) -> Tensor:
    """P^T x + post layer(sum of pre x): x [.., n, D] to the same shape and type, differentiable once, in all tensors.

    phi [n D, n^2 + 2 n], b [n^2 + 2 n], alpha [3], float32; n is 1, 2, 4 or 8. `layer` takes [.., D] to [.., D].
    Raises UsageError for other shapes and types, and for bfloat16 and float16 where kernels are interpreted.
    """
    check(x, phi, b, alpha)
    c = constants or Constants()
    x_in, to_streams, p, carrier = _pre(x, phi, b, alpha, c.norm_eps, c.hc_eps, c.iterations)[:4]
    y = layer(x_in)
    if y.shape != x_in.shape:
        raise UsageError(f"layer: gives {tuple(y.shape)}; expected {tuple(x_in.shape)}, as it was given")
    return _post(carrier, x.detach(), y.to(x.dtype), to_streams, p)


def check(x: Tensor, phi: Tensor, b: Tensor, alpha: Tensor) -> None:
    """Raises UsageError that names the tensor, what it is and what would be right."""
    if x.dtype not in FLOATS:
        raise UsageError(f"x: expected bfloat16, float16 or float32, got {x.dtype}")
    if x.ndim < 3 or x.shape[-2] not in STREAMS or x.shape[-1] < 1:
        raise UsageError(f"x: expected [.., n, D] with n one of {STREAMS}, D from 1, got shape {tuple(x.shape)}")
    n, d = x.shape[-2:]
    m = n * n + 2 * n
    for name, tensor, shape in (("phi", phi, (n * d, m)), ("b", b, (m,)), ("alpha", alpha, (3,))):
        if tuple(tensor.shape) != shape or tensor.dtype != torch.float32:
            raise UsageError(f"{name}: expected torch.float32 {shape}, got {tensor.dtype} {tuple(tensor.shape)}")
        if tensor.device != x.device:
            raise UsageError(f"{name}: is on {tensor.device}, x on {x.device}; expected both on one device")
    if not x.is_cuda and x.dtype != torch.float32:
        raise UsageError(
            f"x: {x.dtype} needs a GPU, since Triton's interpreter multiplies it wrongly; expected float32"
        )


@operation("mhc_pre")
def pre(
    x: Tensor, phi: Tensor, b: Tensor, alpha: Tensor, norm_eps: float, hc_eps: float, iterations: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x [.., n, D] -> x_in [.., D] of x's type; post [.., n] and p [.., n, n] in float32; the carrier, of x's shape,
    without memory, for :func:`post` alone. And what the backward needs: mix [T, n^2 + 2 n], r [T], pre [T, n]."""
    lead, (n, d) = x.shape[:-2], x.shape[-2:]
    rows = x.contiguous().view(-1, n, d)
    s = launch.forward(
        rows, phi.contiguous(), b.contiguous(), alpha.contiguous(), Constants(norm_eps, hc_eps, iterations)
    )
    kept = (s[name] for name in SAVED[:3])
    return s["x_in"].view(*lead, d), s["post"].view(*lead, n), s["p"].view(*lead, n, n), _carrier(x), *kept


def _carrier(x: Tensor) -> Tensor:
    return x.new_zeros(()).expand(x.shape)


@shapes_of("mhc_pre")
def _(x: Tensor, phi: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    lead, (n, d), wide = x.shape[:-2], x.shape[-2:], {"dtype": torch.float32}
    t = math.prod(lead)
    shapes = ((t, phi.shape[1]), (t,), (t, n))
    return (
        x.new_empty(*lead, d),
        x.new_empty(*lead, n, **wide),
        x.new_empty(*lead, n, n, **wide),
        _carrier(x),
        *(x.new_empty(shape, **wide) for shape in shapes),
    )


@operation("mhc_pre_backward")
def pre_backward(
    x: Tensor,
    phi: Tensor,
    b: Tensor,
    alpha: Tensor,
    mix: Tensor,
    r: Tensor,
    weights: Tensor,
    p: Tensor,
    dx_in: Tensor | None,
    dpost: Tensor | None,
    dp: Tensor | None,
    dout: Tensor | None,
    norm_eps: float,
    hc_eps: float,
    iterations: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, phi, b and alpha from those of x_in, post, p and :func:`post`'s result (None: zero)."""
    n, d = x.shape[-2:]
    rows = x.contiguous().view(-1, n, d)
    t, wide = rows.shape[0], torch.float32
    above = ((dx_in, (t, d), x.dtype), (dpost, (t, n), wide), (dp, (t, n, n), wide), (dout, (t, n, d), x.dtype))
    gradients = (
        torch.zeros(shape, dtype=dtype, device=x.device) if g is None else g.to(dtype).contiguous().view(shape)
        for g, shape, dtype in above
    )
    kept = dict(zip(SAVED, (mix, r, weights, p.view(-1, n, n)), strict=True))
    given = (rows, phi.contiguous(), b.contiguous(), alpha.contiguous(), kept)
    found = launch.backward(*given, *gradients, Constants(norm_eps, hc_eps, iterations))
    return found["dx"].view(x.shape), found["dphi"], found["db"], found["dalpha"]


@shapes_of("mhc_pre_backward")
def _(x: Tensor, phi: Tensor, b: Tensor, alpha: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(one.new_empty(one.shape) for one in (x, phi, b, alpha))


def _keep_pre(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, norm_eps, hc_eps, iterations = inputs
    _, _, p, _, *kept = output
    ctx.save_for_backward(*tensors, *kept, p)
    ctx.constants = norm_eps, hc_eps, iterations
    ctx.mark_non_differentiable(*kept)
    ctx.set_materialize_grads(False)


@once_differentiable
def _pre_gradients(ctx: Any, *above: Tensor | None) -> tuple[Any, ...]:
    return *pre_backward(*ctx.saved_tensors, *above[:4], *ctx.constants), None, None, None


_pre = differentiable(pre, _pre_gradients, _keep_pre)


@operation("mhc_post")
def post(carrier: Tensor, x: Tensor, y: Tensor, weights: Tensor, p: Tensor) -> Tensor:
    """x [.., n, D], y [.., D] of one type, weights [.., n], p [.., n, n] -> P^T x + weights y, [.., n, D]. Along the
    carrier it hands the gradient of its result to :func:`pre`."""
    n, d = x.shape[-2:]
    rows, given = x.contiguous().view(-1, n, d), y.contiguous().view(-1, d)
    return launch.expand(rows, given, weights.contiguous().view(-1, n), p.contiguous().view(-1, n, n)).view(x.shape)


@shapes_of("mhc_post")
def _(carrier: Tensor, x: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(x.shape)


@operation("mhc_post_backward")
def post_backward(x: Tensor, y: Tensor, weights: Tensor, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dy [.., D] of y's type, the gradients of weights [.., n] and of p [.., n, n] in float32."""
    lead, (n, d) = x.shape[:-2], x.shape[-2:]
    rows, given, above = x.contiguous().view(-1, n, d), y.contiguous().view(-1, d), dout.contiguous().view(-1, n, d)
    dy, dweights, dp = launch.expand_backward(rows, given, weights.contiguous().view(-1, n), above)
    return dy.view(y.shape), dweights.view(*lead, n), dp.view(*lead, n, n)


@shapes_of("mhc_post_backward")
def _(x: Tensor, y: Tensor, weights: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
    n = x.shape[-2]
    return y.new_empty(y.shape), weights.new_empty(weights.shape), weights.new_empty(*weights.shape, n)


def _keep_post(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:4])


@once_differentiable
def _post_gradients(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    """dout for :func:`pre`; none for x, whose gradient :func:`pre` makes; dy, dpost, dp."""
    dout = dout.to(ctx.saved_tensors[0].dtype)
    return dout, None, *post_backward(*ctx.saved_tensors, dout)


_post = differentiable(post, _post_gradients, _keep_post)


class HyperConnection(torch.nn.Module):
    """Wraps any layer [.., D] -> [.., D] so that it works on n streams [.., n, D].

    phi starts at zero, so that pre, post and p start from b alone, as in Xie et al. 2026; b is such that every stream
    is read alike, the layer's output is added once, and p is near the identity.
    """

    def __init__(self, layer: torch.nn.Module, d: int, n: int = 4, constants: Constants | None = None) -> None:
        super().__init__()
        if n not in STREAMS:
            raise UsageError(f"n: expected one of {STREAMS}, got {n}")
        if d < 1:
            raise UsageError(f"d: expected 1 at least, got {d}")
        self.layer, self.constants = layer, constants or Constants()
        self.phi = torch.nn.Parameter(torch.zeros(n * d, n * n + 2 * n))
        start = torch.cat((torch.full((n,), -1.0), torch.zeros(n), 4.0 * torch.eye(n).flatten()))
        self.b = torch.nn.Parameter(start)
        self.alpha = torch.nn.Parameter(torch.full((3,), 0.01))

    def forward(self, x: Tensor) -> Tensor:
        """x [.., n, D] to the same shape."""
        return hyper_connection(x, self.layer, self.phi, self.b, self.alpha, self.constants)
