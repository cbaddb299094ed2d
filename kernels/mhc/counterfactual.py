"""The coefficients' backward in float64, with a wrong access injected; recorded, or with what each step may be off.

It reads operands by their flat index, as the kernel does, and shares no other code with it.
"""

from __future__ import annotations

from dataclasses import fields, replace

import torch

from kernels.mhc.faulty import CORRECT_ACCESS, Access, Problem
from whywrong import Bound, Golden, Trace, golden
from whywrong.comparing.bounds import EXACT, roundings, sum_of_products
from whywrong.comparing.precision import UNIT_ROUNDOFF

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


def _read_rest(p: Problem, access: Access) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """pre without hc_eps [T, n]; pre's columns of raw [T, n]; of mix, which is raw times r, pre's columns and all."""
    tokens, n, d = p.x.shape
    pre_token = access.strides(n, d)[2]
    t = torch.arange(tokens, device=p.x.device)[:, None]
    i = torch.arange(n, device=p.x.device)[None, :]
    gate = _read(p.pre, t * pre_token + i + access.pre_start) - (p.eps if access.eps else 0.0)
    r = p.r.double()[:, None]
    raw_pre = _read(p.raw, t * p.raw.shape[1] + access.mix + i)
    return gate, raw_pre, raw_pre * (r if access.r else 1.0), p.raw.double() * r


def _g_post(p: Problem) -> Tensor:
    post = p.post.double()
    return p.dpost.double() * post * (1.0 - 0.5 * post)


def _pairs(g_pre: Tensor, mix_pre: Tensor, g_post: Tensor, g_res: Tensor, mix: Tensor) -> tuple[Tensor, ...]:
    """The products whose sums are dalpha_pre, dalpha_post and dalpha_res; mix [T, M] is as it should be."""
    n = mix_pre.shape[1]
    return g_pre * mix_pre, g_post * mix[:, n : 2 * n], g_res * mix[:, 2 * n :]


def steps(p: Problem, access: Access = CORRECT_ACCESS) -> dict[str, Tensor]:
    """Steps dpre, g_pre, raw_pre, mix_pre, g_post, g_res and dalpha [3] by name, float64."""
    x, dx_in = _read_x(p, access)
    gate, raw_pre, mix_pre, mix = _read_rest(p, access)
    dpre = (x * dx_in).sum(-1)
    found = {"dpre": dpre, "g_pre": dpre * gate * (1.0 - gate), "raw_pre": raw_pre, "mix_pre": mix_pre}
    found["g_post"] = _g_post(p)
    found["g_res"] = p.dz.double().flatten(-2)
    pairs = _pairs(found["g_pre"], mix_pre, found["g_post"], found["g_res"], mix)
    return found | {"dalpha": torch.stack([pair.sum() for pair in pairs])}


def dalpha(p: Problem, access: Access = CORRECT_ACCESS) -> Tensor:
    """dalpha [3] alone, for many draws."""
    return steps(p, access)["dalpha"]


def recorded(p: Problem) -> Golden:
    """The right backward, recorded: what `whywrong.localise` holds the kernel under investigation against."""
    tensors = {f.name: getattr(p, f.name) for f in fields(p) if isinstance(getattr(p, f.name), Tensor)}
    return golden(lambda **given: steps(replace(p, **given)), **tensors)


def backward(p: Problem, access: Access = CORRECT_ACCESS) -> Trace:
    """The steps of :func:`steps`, each with what a float32 kernel with this access may be off in all."""
    found = steps(p, access)
    x, dx_in = _read_x(p, access)
    gate, _, mix_pre, _ = _read_rest(p, access)
    slope = (gate * (1.0 - gate)).abs()
    bounds = {"dpre": _inner(x, dx_in)[1], "raw_pre": EXACT, "mix_pre": roundings(mix_pre, 1), "g_res": EXACT}
    rounded = 4.0 * UNIT_ROUNDOFF["float32"] * found["dpre"].abs() * (slope + gate.abs())
    bounds["g_pre"] = bounds["dpre"].scaled(slope) + Bound(rounded, "four roundings of the gate")
    off_post = 4.0 * UNIT_ROUNDOFF["float32"] * (p.dpost.double() * p.post.double()).abs()
    bounds["g_post"] = Bound(off_post, "four roundings")
    off = (bounds["g_pre"].absolute, mix_pre.abs(), off_post)
    bounds["dalpha"] = dalpha_of(p, found["g_pre"], mix_pre, off)[1]
    trace = Trace({"x": p.x, "dx_in": p.dx_in})
    for name, value in found.items():
        trace.add(name, value, bounds[name])
    return trace


def dalpha_of(
    p: Problem, g_pre: Tensor, mix_pre: Tensor, off: tuple[Tensor, ...] | None = None
) -> tuple[Tensor, Bound]:
    """dalpha [3] from pre's factors as they are given, and what a float32 sum of such products may be off.

    `off`: what g_pre may be off, the size of mix_pre where it is, and what g_post may be off.
    """
    mix = p.raw.double() * p.r.double()[:, None]
    g_res = p.dz.double().flatten(-2)
    pairs = _pairs(g_pre, mix_pre, _g_post(p), g_res, mix)
    zero = torch.zeros_like(g_pre)
    more = off or (zero, zero, 4.0 * UNIT_ROUNDOFF["float32"] * (p.dpost.double() * p.post.double()).abs())
    brought = _pairs(*more, torch.zeros_like(g_res), mix.abs())
    total = [
        sum_of_products(pair.abs().sum(), pair.numel()).absolute + e.sum() + 2.0**-23 * pair.abs().sum()
        for pair, e in zip(pairs, brought, strict=True)
    ]
    bound = Bound(torch.stack(total), "sums of products in any order, and what they are made of")
    return torch.stack([pair.sum() for pair in pairs]), bound
