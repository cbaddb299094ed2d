"""The coefficients' backward in float64, with a wrong access injected; each step with what it may be off.

It reads operands by their flat index, as the kernel does, and shares no other code with it.
"""

from __future__ import annotations

import torch

from kernels.mhc.faulty import RIGHT, Access, Problem
from labkit.numerics.bounds import EXACT, Bound, roundings, sum_of_products
from labkit.trace.steps import Trace

Tensor = torch.Tensor


def _read(values: Tensor, at: Tensor) -> Tensor:
    """Elements by flat index; zero outside."""
    flat = values.double().flatten()
    return torch.where(at < flat.numel(), flat[at.clamp(max=flat.numel() - 1)], 0.0)


def _inner(x: Tensor, dx_in: Tensor) -> tuple[Tensor, Bound]:
    """The sum of x dx_in over the columns, and what a float32 sum in any order may be off."""
    terms = x * dx_in
    value = terms.sum(-1)
    return value, sum_of_products(terms.abs().sum(-1), terms.shape[-1], value=value, squares=terms.square().sum(-1))


def _read_x(p: Problem, access: Access) -> tuple[Tensor, Tensor]:
    """x [T, n, C] and dx_in [T, 1, C] of the C columns that are summed."""
    tokens, n, d = p.x.shape
    tile, (x_token, x_stream, x_column), _ = access.strides(n, d)
    t = torch.arange(tokens, device=p.x.device)[:, None]
    i = torch.arange(n, device=p.x.device)[None, :]
    c = torch.arange(min(tile, d), device=p.x.device)
    x = _read(p.x, t[..., None] * x_token + i[..., None] * x_stream + c * x_column)
    return x, _read(p.dx_in, t * d + c + access.dx_in)[:, None, :]


def _read_rest(p: Problem, access: Access) -> tuple[Tensor, Tensor, Tensor]:
    """pre without hc_eps [T, n]; of mix, which is raw times r, pre's columns [T, n] and all [T, M]."""
    tokens, n, d = p.x.shape
    pre_token = access.strides(n, d)[2]
    t = torch.arange(tokens, device=p.x.device)[:, None]
    i = torch.arange(n, device=p.x.device)[None, :]
    gate = _read(p.pre, t * pre_token + i + access.pre_start) - (p.eps if access.eps else 0.0)
    r = p.r.double()[:, None]
    mix_pre = _read(p.raw, t * p.raw.shape[1] + access.mix + i) * (r if access.r else 1.0)
    return gate, mix_pre, p.raw.double() * r


def _g_post(p: Problem) -> Tensor:
    post = p.post.double()
    return p.dpost.double() * post * (1.0 - 0.5 * post)


def _pairs(g_pre: Tensor, mix_pre: Tensor, g_post: Tensor, g_res: Tensor, mix: Tensor) -> tuple[Tensor, ...]:
    """The products whose sums are dalpha_pre, dalpha_post and dalpha_res; mix [T, M] is as it should be."""
    n = mix_pre.shape[1]
    return g_pre * mix_pre, g_post * mix[:, n : 2 * n], g_res * mix[:, 2 * n :]


def dalpha(p: Problem, access: Access = RIGHT) -> Tensor:
    """dalpha [3] of :func:`backward`, without its other steps and without bounds, for many draws."""
    x, dx_in = _read_x(p, access)
    gate, mix_pre, mix = _read_rest(p, access)
    g_pre = (x * dx_in).sum(-1) * gate * (1.0 - gate)
    pairs = _pairs(g_pre, mix_pre, _g_post(p), p.dz.double().flatten(-2), mix)
    return torch.stack([pair.sum() for pair in pairs])


def backward(p: Problem, access: Access = RIGHT) -> Trace:
    """Steps dpre, g_pre, mix_pre, g_post, g_res and dalpha [3], float64, with bounds for a float32 kernel."""
    trace = Trace()
    trace.add("x", p.x.double(), bound=EXACT)
    trace.add("dx_in", p.dx_in.double(), bound=EXACT)
    dpre, bound = _inner(*_read_x(p, access))
    trace.add("dpre", dpre, ("x", "dx_in"), bound, lambda x, dx_in: _inner(x.double(), dx_in.double()[:, None, :]))
    gate, mix_pre, mix = _read_rest(p, access)
    slope = (gate * (1.0 - gate)).abs()
    g_pre = dpre * gate * (1.0 - gate)
    off = bound.scaled(slope) + Bound(4.0 * 2.0**-24 * dpre.abs() * (slope + gate.abs()), "four roundings of the gate")

    def again(value: Tensor) -> tuple[Tensor, Bound]:
        return value.double() * gate * (1.0 - gate), Bound(
            4.0 * 2.0**-24 * value.double().abs() * (slope + gate.abs()), "four roundings of the gate"
        )

    trace.add("g_pre", g_pre, ("dpre",), off, again)
    trace.add("mix_pre", mix_pre, bound=roundings(mix_pre, 1))
    g_post, g_res = _g_post(p), p.dz.double().flatten(-2)
    off_post = 4.0 * 2.0**-24 * (p.dpost.double() * p.post.double()).abs()
    trace.add("g_post", g_post, bound=Bound(off_post, "four roundings"))
    trace.add("g_res", g_res, bound=EXACT)
    pairs = _pairs(g_pre, mix_pre, g_post, g_res, mix)
    errors = _pairs(off.absolute, mix_pre.abs(), off_post, torch.zeros_like(g_res), mix.abs())
    sums = [sum_of_products(pair.abs().sum(), pair.numel()) for pair in pairs]
    absolute = [s.absolute + e.sum() + 2.0**-23 * q.abs().sum() for s, e, q in zip(sums, errors, pairs, strict=True)]
    value = torch.stack([pair.sum() for pair in pairs])
    names = ("g_pre", "mix_pre", "g_post", "g_res")
    trace.add("dalpha", value, names, Bound(torch.stack(absolute), sums[0].why), lambda *xs: summed(*xs, mix=mix))
    return trace


def summed(g_pre: Tensor, mix_pre: Tensor, g_post: Tensor, g_res: Tensor, *, mix: Tensor) -> tuple[Tensor, Bound]:
    """dalpha [3] from what it is made of, and what float32 sums in any order may be off."""
    pairs = _pairs(g_pre.double(), mix_pre.double(), g_post.double(), g_res.double(), mix)
    bounds = [sum_of_products(pair.abs().sum(), pair.numel()).absolute + 2.0**-23 * pair.abs().sum() for pair in pairs]
    return torch.stack([pair.sum() for pair in pairs]), Bound(torch.stack(bounds), "sums of products, any order")
