"""The backward under investigation: of the coefficients alone, a program a token, dalpha by atomic additions.

In the report dalpha_pre is 95% off while dalpha_post and dalpha_res are right. Its author's repository gives a tile of
32 columns of x and dx_in, at 128 columns, and no loop. Every way in which the kernel here can read its operands wrongly
is an :class:`Access`, which the Triton kernel and the float64 counterfactual both follow.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from kernels.mhc import golden
from kernels.mhc.problem import Constants
from whywrong.recording.steps import Trace

Tensor = torch.Tensor


@dataclass(frozen=True)
class Access:
    """How operands are read. None or 0 is right; what lies outside an operand reads as zero.

    `tile`: columns of x and dx_in that are summed (None: all). `x`: elements from a token, a stream and a column to the
    next (None: n D, D, 1). `pre`: from a token to the next (None: n), and where it starts. `dx_in`, `mix`: where a
    token's row starts, elements too late. `eps`: whether hc_eps is taken off pre. `r`: whether mix is normalised.
    """

    tile: int | None = None
    x: tuple[int, int, int] | None = None
    pre: int | None = None
    pre_start: int = 0
    dx_in: int = 0
    mix: int = 0
    eps: bool = True
    r: bool = True

    def strides(self, n: int, d: int) -> tuple[int, tuple[int, int, int], int]:
        """Tile, strides of x, stride of pre, for these sizes."""
        return self.tile or d, self.x or (n * d, d, 1), n if self.pre is None else self.pre


CORRECT_ACCESS = Access()


TILES = (8, 16, 32, 64)
"""Widths that a tile may have: powers of two, as Triton wants them, from the least that is in use."""


def tiles(tile: int) -> dict[str, Access]:
    """A tile of x and dx_in that is too narrow, of each width, and of `tile` columns."""
    return {f"first tile of {width} columns only": Access(tile=width) for width in sorted({*TILES, tile})}


def rivals(n: int, d: int, tile: int = 32) -> dict[str, Access]:
    """Ways to read an operand wrongly, the same at all sizes, as they are at these; a tile of `tile` among them."""
    return tiles(tile) | {
        "pre without its stride over tokens": Access(pre=1),
        "pre one element late": Access(pre_start=1),
        "x as [T, D, n]": Access(x=(n * d, 1, n)),
        "x without its stream in the token's stride": Access(x=(d, d, 1)),
        "dx_in one element late": Access(dx_in=1),
        "mix from post's columns": Access(mix=n),
        "mix not normalised": Access(r=False),
        "hc_eps not taken off": Access(eps=False),
    }


@dataclass(frozen=True)
class Priors:
    """What draws of the inputs are taken from; the report says "generated", and neither distribution nor seed.

    phi's standard deviation and each alpha are log-uniform over a range, so that no scale in it is preferred; b is
    normal, times a factor uniform from 0. x and the gradients are standard normal: dalpha's ratio does not depend on
    their scales. The ranges hold what is in use, and were fixed before any likelihood was computed: weights
    start between 0.02 (a transformer's usual initial value) and 1 (`torch.randn` as it is), with 1 / sqrt(n D) in
    between; alpha between 0.01 (Xie et al. 2026) and 1 (`torch.ones`); b between 0 and `torch.randn`.
    """

    phi: tuple[float, float] = (0.01, 1.0)
    alpha: tuple[float, float] = (0.01, 1.0)
    b: float = 1.0


PRIORS = Priors()


@dataclass(frozen=True)
class Problem:
    """What the kernel is given, float32 but for x and dx_in: the forward's results and three gradients from above.

    x [T, n, D], dx_in [T, D], dpost [T, n], dz [T, n, n] (of Sinkhorn's input), raw [T, M] (x phi, not yet
    normalised), r [T], pre and post [T, n]; eps is hc_eps, rounded to float32 as the kernel gets it.
    """

    x: Tensor
    dx_in: Tensor
    dpost: Tensor
    dz: Tensor
    raw: Tensor
    r: Tensor
    pre: Tensor
    post: Tensor
    eps: float

    @classmethod
    def sample(
        cls,
        tokens: int,
        n: int,
        d: int,
        seed: int,
        c: Constants,
        device: str,
        kind: str = "normal",
        priors: Priors = PRIORS,
    ) -> Problem:
        """Operands drawn from `priors`. `one-hot` dx_in has one column a token, and `columns` token t has column t of
        D; `index` x holds its own index.
        """
        rng = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=rng, dtype=torch.float64)

        def between(low: float, high: float, *shape: int) -> Tensor:
            return low * (high / low) ** torch.rand(shape, generator=rng, dtype=torch.float64)

        m, dtype = n * n + 2 * n, torch.bfloat16 if device == "cuda" else torch.float32
        x, phi = normal(tokens, n, d).to(dtype).double(), normal(n * d, m).float().double() * between(*priors.phi)
        b, alpha = normal(m) * priors.b * torch.rand(1, generator=rng, dtype=torch.float64), between(*priors.alpha, 3)
        dx_in = normal(tokens, d).to(dtype).double()
        if kind == "one-hot":
            dx_in = torch.nn.functional.one_hot(torch.randint(0, d, (tokens,), generator=rng), d).double()
        if kind == "columns":
            dx_in = torch.nn.functional.one_hot(torch.arange(tokens) % d, d).double()
        if kind == "index":
            x = (torch.arange(tokens * n * d) % 251).double().view(tokens, n, d) / 128.0
        r, mix = golden.projection(x, phi, c)
        pre, post, _ = golden.coefficients(mix, b, alpha, n, c)
        made = (x.to(dtype), dx_in.to(dtype), normal(tokens, n), normal(tokens, n, n), mix / r[:, None], r, pre, post)
        return cls(
            *(v.to(device) if i < 2 else v.float().to(device) for i, v in enumerate(made)), float(np.float32(c.hc_eps))
        )


WRITTEN = ("dpre", "g_pre", "raw_pre", "mix_pre", "g_post")


@triton.jit
def pre_backward_kernel(
    x_ptr,  # [T, N, D], bfloat16, float16 or float32
    dx_in_ptr,  # [T, D], of x's type
    dpost_ptr,  # [T, N], float32, as all that follow
    dz_ptr,  # [T, N, N]
    raw_ptr,  # [T, M], the projection before its division by the norm
    r_ptr,  # [T]
    pre_ptr,  # [T, N]
    post_ptr,  # [T, N]
    dpre_ptr,  # [T, N], written, as all that follow
    g_pre_ptr,  # [T, N]
    raw_pre_ptr,  # [T, N]
    mix_pre_ptr,  # [T, N]
    g_post_ptr,  # [T, N]
    dalpha_ptr,  # [3], added to
    X_SIZE,
    DX_IN_SIZE,
    PRE_SIZE,
    tile,
    x_token,
    x_stream,
    x_column,
    pre_token,
    pre_start,
    dx_in_start,
    mix_start,
    eps,
    N: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NORMALISED: tl.constexpr,
):
    """dalpha by atomic additions, and what it is made of, written out."""
    M: tl.constexpr = N * N + 2 * N
    t = tl.program_id(0)
    i = tl.arange(0, N)
    d = tl.arange(0, BLOCK_D)
    at = t * x_token + i[:, None] * x_stream + d[None, :] * x_column
    read = (d < tile) & (d < D)
    x = tl.load(x_ptr + at, mask=read[None, :] & (at < X_SIZE), other=0.0).to(tl.float32)
    row = t * D + d + dx_in_start
    dx_in = tl.load(dx_in_ptr + row, mask=read & (row < DX_IN_SIZE), other=0.0).to(tl.float32)
    dpre = tl.sum(x * dx_in[None, :], 1)
    at_pre = t * pre_token + i + pre_start
    gate = tl.load(pre_ptr + at_pre, mask=at_pre < PRE_SIZE, other=0.0) - eps
    g_pre = dpre * gate * (1.0 - gate)
    post = tl.load(post_ptr + t * N + i)
    g_post = tl.load(dpost_ptr + t * N + i) * post * (1.0 - 0.5 * post)
    r = tl.load(r_ptr + t) if NORMALISED else 1.0
    raw_pre = tl.load(raw_ptr + t * M + mix_start + i)
    mix_pre = raw_pre * r
    mix_post = tl.load(raw_ptr + t * M + N + i) * tl.load(r_ptr + t)
    square = i[:, None] * N + i[None, :]
    mix_res = tl.load(raw_ptr + t * M + 2 * N + square) * tl.load(r_ptr + t)
    g_res = tl.load(dz_ptr + t * N * N + square)
    tl.store(dpre_ptr + t * N + i, dpre)
    tl.store(g_pre_ptr + t * N + i, g_pre)
    tl.store(raw_pre_ptr + t * N + i, raw_pre)
    tl.store(mix_pre_ptr + t * N + i, mix_pre)
    tl.store(g_post_ptr + t * N + i, g_post)
    tl.atomic_add(dalpha_ptr, tl.sum(g_pre * mix_pre, 0))
    tl.atomic_add(dalpha_ptr + 1, tl.sum(g_post * mix_post, 0))
    tl.atomic_add(dalpha_ptr + 2, tl.sum(tl.sum(g_res * mix_res, 1), 0))


def backward(p: Problem, access: Access = CORRECT_ACCESS) -> Trace:
    """The real kernel, reading as `access` says; outputs start as NaN, dalpha as zero."""
    t, n, d = p.x.shape
    tile, x, pre = access.strides(n, d)
    out = {name: torch.full((t, n), float("nan"), device=p.x.device) for name in WRITTEN}
    dalpha = torch.zeros(3, device=p.x.device)
    with torch.cuda.device_of(p.x):
        pre_backward_kernel[(t,)](
            p.x, p.dx_in, p.dpost, p.dz, p.raw, p.r, p.pre, p.post, *out.values(), dalpha, p.x.numel(), p.dx_in.numel(),
            p.pre.numel(), tile, *x, pre, access.pre_start, access.dx_in, access.mix, p.eps if access.eps else 0.0,
            N=n, D=d, BLOCK_D=triton.next_power_of_2(d), NORMALISED=access.r,
        )  # fmt: skip
    trace = Trace({"x": p.x, "dx_in": p.dx_in, **out})
    trace.add("g_res", p.dz.flatten(-2))
    trace.add("dalpha", dalpha)
    return trace


@triton.jit
def isolated_kernel(
    x_ptr,
    dx_in_ptr,
    pre_ptr,
    g_pre_ptr,
    tile,
    eps,
    N: tl.constexpr,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """g_pre alone, as the first stage of the report's plan has it: one tile of columns, and no loop."""
    t = tl.program_id(0)
    i = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    read = (d < tile) & (d < D)
    x = tl.load(x_ptr + (t * N + i[:, None]) * D + d[None, :], mask=(i < N)[:, None] & read[None, :], other=0.0)
    dx_in = tl.load(dx_in_ptr + t * D + d, mask=read, other=0.0).to(tl.float32)
    dpre = tl.sum(x.to(tl.float32) * dx_in[None, :], 1)
    gate = tl.load(pre_ptr + t * N + i, mask=i < N, other=0.0) - eps
    tl.store(g_pre_ptr + t * N + i, dpre * gate * (1.0 - gate), mask=i < N)


def isolated(p: Problem, tile: int) -> Tensor:
    """g_pre [T, n] by the isolated kernel, launched with a tile of `tile` columns."""
    t, n, d = p.x.shape
    out = torch.full((t, n), float("nan"), device=p.x.device)
    with torch.cuda.device_of(p.x):
        isolated_kernel[(t,)](
            p.x, p.dx_in, p.pre, out, tile, p.eps, N=n, D=d, BLOCK_N=n, BLOCK_D=triton.next_power_of_2(tile)
        )
    return out
