"""Other implementations of the same operator, with an identity for the wrapped layer, to hold ours against.

Every baseline is a function of our tensors to the streams after the layer; gradients come from autograd. What a
baseline does otherwise, its reference does too: transformer_engine has no hc_eps and takes the norm's epsilon from
float32; Liger multiplies by P where we, and Hugging Face's model, multiply by its transpose. Neither difference moves
a byte.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from kernels.mhc import golden
from kernels.mhc.mhc import hyper_connection
from kernels.mhc.problem import Constants

Tensor = torch.Tensor
Operator = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
TRANSFORMER_ENGINE = "TRANSFORMER_ENGINE_DIR"
"""Environment variable: the unpacked wheel of transformer_engine, which need not be installed (its import raises)."""


@dataclass(frozen=True)
class Baseline:
    """An operator(x, phi, b, alpha), the constants that it computes with, and whether it multiplies by P^T."""

    name: str
    make: Callable[[], Operator]
    constants: Constants = field(default_factory=Constants)
    transposed: bool = True
    interleaved: bool = False
    """Whether its x is [T, D, n] and its phi [M, D n]."""
    with_stored: bool = False
    """Whether what storing in x's type costs by itself is measured beside its errors, on the same draws."""

    def arranged(self, x: Tensor, phi: Tensor, b: Tensor, alpha: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
        """Our tensors as it wants them."""
        if not self.interleaved:
            return x, phi, b, alpha, dout
        n, d = x.shape[-2:]
        theirs = phi.view(n, d, -1).permute(2, 1, 0).flatten(1)
        return x.mT.contiguous(), theirs.contiguous(), b, alpha, dout.mT.contiguous()

    def back(self, out: Tensor, dx: Tensor, dphi: Tensor, db: Tensor, dalpha: Tensor) -> dict[str, Tensor]:
        """Its result and gradients as ours are."""
        if self.interleaved:
            d, n = dx.shape[-2:]
            dphi = dphi.unflatten(1, (d, n)).permute(2, 1, 0).reshape(n * d, -1)
            out, dx = out.mT, dx.mT
        return {"out": out, "dx": dx, "dphi": dphi, "db": db, "dalpha": dalpha}


def _identity(x: Tensor) -> Tensor:
    return x


def ours() -> Operator:
    """The kernels of this folder."""
    return lambda x, phi, b, alpha: hyper_connection(x, _identity, phi, b, alpha)


def _written(layer: Callable[[Tensor], Tensor], expand: Callable[..., Tensor]) -> Operator:
    """The golden's formulas as a torch user would write them: x in its own type, coefficients in float32."""

    def run(x: Tensor, phi: Tensor, b: Tensor, alpha: Tensor) -> Tensor:
        c, wide = Constants(), x.float()
        _, mix = golden.projection(wide, phi, c)
        pre, post, p = golden.coefficients(mix, b, alpha, x.shape[-2], c)
        y = layer(golden.aggregate(wide, pre).to(x.dtype))
        return expand(wide, y.float(), post, p).to(x.dtype)

    return run


def _expanded_by_element(x: Tensor, y: Tensor, post: Tensor, p: Tensor) -> Tensor:
    """golden.expand without a product of matrices of n rows, so that a compiler can fuse it."""
    mixed = sum(p[:, i, :, None] * x[:, i, None, :] for i in range(x.shape[-2]))
    return mixed + post[..., None] * y[..., None, :]


def eager() -> Operator:
    """Plain PyTorch."""
    return _written(_identity, golden.expand)


def compiled() -> Operator:
    """The same through torch.compile; the layer is a call of its own, as a real one is, and is given x's type."""
    return torch.compile(_written(torch.compiler.disable(_identity), _expanded_by_element), dynamic=False)


def liger() -> Operator:
    """liger-kernel's three functions."""
    from liger_kernel.transformers.functional import liger_mhc_coeffs, liger_mhc_post_res, liger_mhc_pre

    def run(x: Tensor, phi: Tensor, b: Tensor, alpha: Tensor) -> Tensor:
        c = Constants()
        pre, post, p = liger_mhc_coeffs(
            x,
            phi,
            b,
            alpha[0],
            alpha[1],
            alpha[2],
            allow_fp32=True,
            tmax=c.iterations,
            rms_eps=c.norm_eps,
            pre_eps=c.hc_eps,
            sinkhorn_eps=c.hc_eps,
        )
        return liger_mhc_post_res(x, liger_mhc_pre(x, pre), post, p)

    return run


@cache
def _transformer_engine(deterministic: bool) -> Any:
    """Its Triton mHC module, loaded by path: a copy a mode, since the mode is read at import."""
    root = os.environ.get(TRANSFORMER_ENGINE)
    if not root or not (Path(root) / "transformer_engine" / "pytorch" / "triton" / "mhc.py").exists():
        raise ModuleNotFoundError(f"{TRANSFORMER_ENGINE} names no unpacked wheel of transformer_engine")

    def gemm(a: Tensor, b: Tensor, *, out_dtype: torch.dtype, layout: str) -> list[Tensor]:
        before, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, True
        try:
            return [(b.T @ a).to(out_dtype)]  # layout NT; its own goes to cuBLAS in TF32 too
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before

    names = ("", ".common", ".common.triton", ".pytorch", ".pytorch.cpp_extensions", ".pytorch.cpp_extensions.gemm")
    added = {f"transformer_engine{name}": types.ModuleType(f"transformer_engine{name}") for name in names}
    added["transformer_engine.pytorch.cpp_extensions.gemm"].general_gemm = gemm  # type: ignore[attr-defined]
    kept = os.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO")
    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0" if deterministic else "1"
    sys.modules.update(added)
    try:
        for name in ("common", "pytorch"):
            path = Path(root) / "transformer_engine" / name / "triton" / "mhc.py"
            spec = importlib.util.spec_from_file_location(f"transformer_engine.{name}.triton.mhc", path)
            assert spec
            assert spec.loader
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            added[spec.name] = module
            spec.loader.exec_module(module)
        return module
    finally:
        for name in added:
            sys.modules.pop(name, None)
        if kept is None:
            del os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"]
        else:
            os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = kept


def transformer_engine(deterministic: bool) -> Operator:
    """transformer_engine's Triton operators; its x is [s, b, D, n], and its phi [M, D n]."""
    te = _transformer_engine(deterministic)

    def run(x: Tensor, phi: Tensor, b: Tensor, alpha: Tensor) -> Tensor:
        x4 = x[:, None]
        y, post, p = te.mhc_generate_mix_and_aggregate(x4, phi, alpha, b[None], use_split_k=not deterministic)
        return te.mhc_fused_expand_combine(y, None, post, x4, p, 4).squeeze(
            1
        )  # a slice's gradient is filled and copied

    return run


@dataclass
class _Streams:
    """What :func:`tile_kernels` hands from the forward to the backward, beside autograd: the gradient of x so far."""

    gradient: Tensor | None = None


def tile_kernels() -> Operator:
    """DeepSeek's TileKernels, with torch's products where theirs are DeepGEMM's, which no registry has.

    The products read x as it is, in bfloat16, phi and the gradient rounded to it, and add up in float32. Its kernel of
    x_in's gradient adds to the gradient of x in place, so that of the expansion is handed to it as it is.
    """
    from tile_kernels import mhc as tk

    c = Constants()

    class Pre(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any, x: Tensor, phi: Tensor, b: Tensor, alpha: Tensor, streams: _Streams
        ) -> tuple[Tensor, ...]:
            t, n, d = x.shape
            flat = x.view(t, n * d)
            product = torch.mm(flat, phi.bfloat16(), out_dtype=torch.float32)
            squares = torch.linalg.vector_norm(flat, dim=1, dtype=torch.float32).square_()
            post, p, x_in = phi.new_empty(t, n), phi.new_empty(t, n * n), x.new_empty(t, d)
            tk.mhc_pre_big_fuse_fwd(
                product[None], squares[None], alpha, b, x, post, p, x_in,
                c.norm_eps, c.hc_eps, c.hc_eps, 2.0, c.iterations, n_splits=1,
            )  # fmt: skip
            ctx.save_for_backward(x, phi, b, alpha, product, squares)
            ctx.streams = streams
            return x_in, post, p.view(t, n, n)

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
            dx_in, dpost, dp = gradients
            x, phi, b, alpha, product, squares = ctx.saved_tensors
            (t, n, d), m = x.shape, phi.shape[1]
            mix, product_, squares_ = phi.new_empty(t, m), phi.new_empty(t, 1, m), phi.new_empty(t, 1)
            tk.mhc_reduce_partials_and_rmsnorm_fwd(
                product.view(1, t, 1, m), squares.view(1, t, 1), product_, squares_, mix, n * d, c.norm_eps, 1
            )
            pre, post, z = phi.new_empty(t, n), phi.new_empty(t, n), phi.new_empty(t, n * n)
            tk.mhc_pre_split_mixes_fwd(mix, alpha, b, pre, post, z, 2.0, c.hc_eps)
            dz, dx = torch.empty_like(z), ctx.streams.gradient
            tk.mhc_sinkhorn_bwd(dp.contiguous(), z.view(t, n, n), dz.view(t, n, n), c.iterations, c.hc_eps)
            dpre = tk.mhc_pre_apply_mix_bwd(dx_in.contiguous(), x, pre, dx)
            dmix, dalpha, db = torch.empty_like(mix), torch.empty_like(alpha), torch.empty_like(b)
            tk.mhc_pre_split_mixes_bwd(dpre, dpost.contiguous(), dz, mix, post, alpha, b, dmix, dalpha, db, 2.0)
            dproduct, dsquares = torch.empty_like(product_), torch.empty_like(squares_)
            tk.mhc_reduce_partials_and_rmsnorm_bwd(dmix, product_, squares_, dproduct, dsquares, n * d, c.norm_eps)
            g, flat = dproduct.view(t, m).bfloat16(), x.view(t, n * d)
            dx.view(t, n * d).addmm_(g, phi.bfloat16().T).addcmul_(flat, (2.0 * dsquares).bfloat16())
            return dx, torch.mm(flat.T, g, out_dtype=torch.float32), db, dalpha, None

    class Post(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: Tensor, post: Tensor, p: Tensor, x: Tensor, streams: _Streams) -> Tensor:
            ctx.save_for_backward(y, x, post, p)
            ctx.streams = streams
            return tk.mhc_post_fwd(y[None], x[None], post[None, :, :, None], p[None])[0]

        @staticmethod
        def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
            y, x, post, p = ctx.saved_tensors
            dy, dx, dpost, dp = tk.mhc_post_bwd(y[None], x[None], post[None, :, :, None], p[None], dout[None])
            ctx.streams.gradient = dx[0]
            return dy[0], dpost[0, :, :, 0], dp[0], None, None

    def run(x: Tensor, phi: Tensor, b: Tensor, alpha: Tensor) -> Tensor:
        streams = _Streams()
        x_in, post, p = Pre.apply(x, phi, b, alpha, streams)
        return Post.apply(x_in, post, p, x.detach(), streams)

    return run


_TE = Constants(norm_eps=torch.finfo(torch.float32).eps, hc_eps=0.0)
BASELINES = (
    Baseline("ours", ours, with_stored=True),
    Baseline("liger-kernel", liger, transposed=False),
    Baseline("transformer_engine, atomic", lambda: transformer_engine(False), _TE, interleaved=True),
    Baseline("transformer_engine, deterministic", lambda: transformer_engine(True), _TE, interleaved=True),
    Baseline("TileKernels, products by torch", tile_kernels),
    Baseline("torch.compile", compiled),
    Baseline("torch eager", eager),
)
