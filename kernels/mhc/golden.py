"""The hyper-connection in float64, forward and a backward written by hand, step by step.

Shapes: x [T, n, D], phi [n D, M] with M = n^2 + 2 n, b [M], alpha [3]. Columns of the projection: n for pre, n for
post, n^2 for the residual mix. Formulas: Xie et al. 2026; README.md has the derivation of the backward.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.mhc.problem import Constants, Inputs

Tensor = torch.Tensor
Layer = Callable[[Tensor], Tensor]


def parts(row: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """The three parts of the last dimension: pre [.., n], post [.., n], residual [.., n, n]."""
    return row[..., :n], row[..., n : 2 * n], row[..., 2 * n :].unflatten(-1, (n, n))


def projection(x: Tensor, phi: Tensor, c: Constants) -> tuple[Tensor, Tensor]:
    """r [T] and mix [T, M]: x flattened, normalised by its root mean square, times phi."""
    flat = x.flatten(-2)
    r = torch.rsqrt(flat.square().mean(-1) + c.norm_eps)
    return r, (flat @ phi) * r[:, None]


def coefficients(mix: Tensor, b: Tensor, alpha: Tensor, n: int, c: Constants) -> tuple[Tensor, Tensor, Tensor]:
    """pre [T, n], post [T, n] and the doubly stochastic p [T, n, n] of a projection."""
    (a_pre, a_post, a_res), (b_pre, b_post, b_res) = parts(mix, n), parts(b, n)
    pre = torch.sigmoid(alpha[0] * a_pre + b_pre) + c.hc_eps
    post = 2.0 * torch.sigmoid(alpha[1] * a_post + b_post)
    return pre, post, sinkhorn(alpha[2] * a_res + b_res, c)


def sinkhorn(z: Tensor, c: Constants) -> Tensor:
    """Softmax of rows, then columns, then rows and columns in turn, until there were `iterations` of columns."""
    p = torch.softmax(z, -1) + c.hc_eps
    p = p / (p.sum(-2, keepdim=True) + c.hc_eps)
    for _ in range(c.iterations - 1):
        p = p / (p.sum(-1, keepdim=True) + c.hc_eps)
        p = p / (p.sum(-2, keepdim=True) + c.hc_eps)
    return p


def sinkhorn_backward(z: Tensor, dp: Tensor, c: Constants) -> Tensor:
    """dz of :func:`sinkhorn`: each normalisation y = x / (s + eps) takes dy to (dy - <dy, y>) / (s + eps)."""
    s = torch.softmax(z, -1)
    p, passed = s + c.hc_eps, []
    for k in range(2 * c.iterations - 1):
        axis = -2 if k % 2 == 0 else -1
        total = p.sum(axis, keepdim=True) + c.hc_eps
        p = p / total
        passed.append((axis, total, p))
    for axis, total, after in reversed(passed):
        dp = (dp - (dp * after).sum(axis, keepdim=True)) / total
    return s * (dp - (dp * s).sum(-1, keepdim=True))


def aggregate(x: Tensor, pre: Tensor) -> Tensor:
    """x_in [T, D]: what the wrapped layer gets."""
    return (pre[..., None] * x).sum(-2)


def expand(x: Tensor, y: Tensor, post: Tensor, p: Tensor) -> Tensor:
    """The streams after the layer, [T, n, D]: P^T x + post y."""
    return p.mT @ x + post[..., None] * y[..., None, :]


def forward(
    x: Tensor, phi: Tensor, b: Tensor, alpha: Tensor, y: Tensor | Layer, c: Constants, transposed: bool = True
) -> dict[str, Tensor]:
    """Every step by name. `y` is the layer's output, or the layer. Not `transposed`: P mixes the streams, not P^T."""
    n = x.shape[-2]
    s: dict[str, Tensor] = {}
    s["r"], s["mix"] = projection(x, phi, c)
    s["pre"], s["post"], s["p"] = coefficients(s["mix"], b, alpha, n, c)
    s["x_in"] = aggregate(x, s["pre"])
    s["y"] = y(s["x_in"]) if callable(y) else y
    s["out"] = expand(x, s["y"], s["post"], s["p"] if transposed else s["p"].mT)
    return s


def expand_backward(x: Tensor, y: Tensor, post: Tensor, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dy [T, D], dpost [T, n], dp [T, n, n]."""
    return (post[..., None] * dout).sum(-2), (dout @ y[..., None])[..., 0], x @ dout.mT


def coefficients_backward(
    mix: Tensor, b: Tensor, alpha: Tensor, dpre: Tensor, dpost: Tensor, dp: Tensor, c: Constants
) -> Tensor:
    """g [T, M]: the gradient of alpha mix + b, before the sigmoids and Sinkhorn."""
    n = dpre.shape[-1]
    (a_pre, a_post, a_res), (b_pre, b_post, b_res) = parts(mix, n), parts(b, n)
    s_pre = torch.sigmoid(alpha[0] * a_pre + b_pre)
    s_post = torch.sigmoid(alpha[1] * a_post + b_post)
    g_res = sinkhorn_backward(alpha[2] * a_res + b_res, dp, c)
    return torch.cat((dpre * s_pre * (1.0 - s_pre), 2.0 * dpost * s_post * (1.0 - s_post), g_res.flatten(-2)), -1)


def spread_alpha(alpha: Tensor, n: int) -> Tensor:
    """alpha's three numbers, each as often as its part has columns: [M]."""
    return torch.cat([a.expand(width) for a, width in zip(alpha, (n, n, n * n), strict=True)])


def alpha_gradient(g: Tensor, mix: Tensor, n: int) -> Tensor:
    """dalpha [3]: the sum of g mix over tokens and over the columns of each part."""
    columns = (g * mix).sum(0)
    return torch.stack((columns[:n].sum(), columns[n : 2 * n].sum(), columns[2 * n :].sum()))


def backward(
    inputs: Inputs, s: dict[str, Tensor], c: Constants, dx_in: Tensor | None = None, transposed: bool = True
) -> dict[str, Tensor]:
    """Every gradient by name, from the forward's steps `s`; `dx_in` is what the layer's backward gives."""
    x, b, alpha = inputs.x, inputs.b, inputs.alpha
    dx_in = inputs.dx_in if dx_in is None else dx_in
    d: dict[str, Tensor] = {}
    d["dy"], d["dpost"], dmixer = expand_backward(x, s["y"], s["post"], inputs.dout)
    d["dp"] = dmixer if transposed else dmixer.mT
    d["dpre"] = (x @ dx_in[..., None])[..., 0]
    d["g"] = coefficients_backward(s["mix"], b, alpha, d["dpre"], d["dpost"], d["dp"], c)
    return d | parameter_gradients(inputs, s, d["g"], dx_in, transposed)


def parameter_gradients(
    inputs: Inputs, s: dict[str, Tensor], g: Tensor, dx_in: Tensor, transposed: bool = True
) -> dict[str, Tensor]:
    """What :func:`backward` makes of g [T, M]: db, dalpha, dphi, dx and what is between."""
    x, phi, alpha = inputs.x, inputs.phi, inputs.alpha
    n, k = x.shape[-2], phi.shape[0]
    d: dict[str, Tensor] = {"db": g.sum(0), "dalpha": alpha_gradient(g, s["mix"], n)}
    dmix = g * spread_alpha(alpha, n)
    d["dprojection"] = dmix * s["r"][:, None]
    d["shrink"] = s["r"].square() * (dmix * s["mix"]).sum(-1) / k
    d["dphi"] = x.flatten(-2).T @ d["dprojection"]
    mixer = s["p"] if transposed else s["p"].mT
    d["dx"] = stream_gradient(x, phi, s["pre"], mixer, inputs.dout, dx_in, d["dprojection"], d["shrink"])
    return d


def stream_gradient(
    x: Tensor, phi: Tensor, pre: Tensor, p: Tensor, dout: Tensor, dx_in: Tensor, dprojection: Tensor, shrink: Tensor
) -> Tensor:
    """dx [T, n, D]: through the mix, the aggregation, the projection, and the norm."""
    through = (dprojection @ phi.T).view_as(x)
    return p @ dout + pre[..., None] * dx_in[..., None, :] + through - shrink[:, None, None] * x
