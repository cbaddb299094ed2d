"""Small references, one for each operation that people use: what it is called, how it runs, on what."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

Tensor = torch.Tensor


class Draw:
    """Inputs of a case, from a seed."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator)

    def positive(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self._generator) + 0.5

    def whole(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self._generator)

    def mask(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self._generator) > 0.5

    def well(self, n: int) -> Tensor:
        """A matrix of condition 10 or so."""
        return self.normal(n, n) + 3.0 * n**0.5 * torch.eye(n)

    def definite(self, n: int) -> Tensor:
        a = self.normal(n, 2 * n)
        return a @ a.T / n + torch.eye(n)


@dataclass(frozen=True)
class Case:
    run: Callable[..., Any]
    inputs: Callable[[Draw], tuple[Tensor, ...]]
    backward: bool = True


CASES: dict[str, Case] = {}


def case(name: str, run: Callable[..., Any], inputs: Callable[[Draw], Any], backward: bool = True) -> None:
    CASES[name] = Case(run, lambda d: found if isinstance(found := inputs(d), tuple) else (found,), backward)


# linear algebra
case("cholesky", torch.linalg.cholesky, lambda d: d.definite(9))
case("cholesky_solve", lambda a, b: torch.cholesky_solve(b, torch.linalg.cholesky(a)), lambda d: (d.definite(9), d.normal(9, 3)))
case("cholesky_inverse", lambda a: torch.cholesky_inverse(torch.linalg.cholesky(a)), lambda d: d.definite(9))
case("solve", torch.linalg.solve, lambda d: (d.well(9), d.normal(9, 3)))
case("solve_batch", torch.linalg.solve, lambda d: (torch.stack([d.well(5), d.well(5)]), d.normal(2, 5, 3)))
case("solve_vector", torch.linalg.solve, lambda d: (d.well(9), d.normal(9)))
case("solve_triangular", lambda a, b: torch.linalg.solve_triangular(a.tril(), b, upper=False), lambda d: (d.well(9), d.normal(9, 3)))
case("inv", torch.linalg.inv, lambda d: d.well(9))
case("det", torch.linalg.det, lambda d: d.well(5))
case("slogdet", lambda a: torch.linalg.slogdet(a)[1], lambda d: d.well(9))
case("svdvals", torch.linalg.svdvals, lambda d: d.normal(8, 5))
case("svd", lambda a: torch.linalg.svd(a, full_matrices=False).S, lambda d: d.normal(8, 5))
case("low_rank", lambda a: (lambda s: (s.U[:, :2] * s.S[:2]) @ s.Vh[:2])(torch.linalg.svd(a, full_matrices=False)), lambda d: d.normal(8, 5), False)
case("qr", lambda a: torch.linalg.qr(a)[1], lambda d: d.normal(8, 5))
case("qr_q", lambda a: torch.linalg.qr(a)[0], lambda d: d.normal(8, 5))
case("eigvalsh", torch.linalg.eigvalsh, lambda d: d.definite(7))
case("eigh", lambda a: torch.linalg.eigh(a)[0], lambda d: d.definite(7))
case("lu_factor", lambda a: torch.linalg.lu_factor(a)[0], lambda d: d.well(7))
case("lstsq", lambda a, b: torch.linalg.lstsq(a, b).solution, lambda d: (d.normal(9, 4), d.normal(9, 2)), False)
case("pinv", torch.linalg.pinv, lambda d: d.normal(8, 4))
case("matrix_exp", torch.linalg.matrix_exp, lambda d: d.normal(6, 6) / 3)
case("matrix_power", lambda a: torch.linalg.matrix_power(a, 3), lambda d: d.normal(6, 6))
case("matrix_norm", lambda a: torch.linalg.matrix_norm(a, 2), lambda d: d.normal(6, 4))
case("vector_norm", torch.linalg.vector_norm, lambda d: d.normal(30))
case("einsum", lambda a, b: torch.einsum("bij,bjk->bik", a, b), lambda d: (d.normal(2, 4, 5), d.normal(2, 5, 3)))
case("addmm", torch.addmm, lambda d: (d.normal(4, 3), d.normal(4, 5), d.normal(5, 3)))
case("baddbmm", torch.baddbmm, lambda d: (d.normal(2, 4, 3), d.normal(2, 4, 5), d.normal(2, 5, 3)))
case("outer", torch.outer, lambda d: (d.normal(4), d.normal(5)))
case("kron", torch.kron, lambda d: (d.normal(2, 3), d.normal(3, 2)))
case("cross", lambda a, b: torch.linalg.cross(a, b), lambda d: (d.normal(5, 3), d.normal(5, 3)))
case("trace", torch.trace, lambda d: d.normal(5, 5))
case("_int_mm", lambda a, b: torch._int_mm(a.to(torch.int8), b.to(torch.int8)), lambda d: (d.whole(100, 32, 16), d.whole(100, 16, 8)), False)
# distances and losses
case("cdist", torch.cdist, lambda d: (d.normal(6, 4), d.normal(5, 4)))
case("cdist_large", torch.cdist, lambda d: (d.normal(40, 4), d.normal(30, 4)))
case("cdist_l1", lambda a, b: torch.cdist(a, b, p=1.0), lambda d: (d.normal(6, 4), d.normal(5, 4)))
case("pdist", torch.pdist, lambda d: d.normal(6, 4))
case("pairwise_distance", F.pairwise_distance, lambda d: (d.normal(6, 4), d.normal(6, 4)))
case("cosine_similarity", F.cosine_similarity, lambda d: (d.normal(6, 4), d.normal(6, 4)))
case("ctc_loss", lambda x, t: F.ctc_loss(x.log_softmax(-1), t + 1, [12, 12], [3, 4]), lambda d: (d.normal(12, 2, 6), d.whole(5, 2, 4)))
case("cross_entropy", F.cross_entropy, lambda d: (d.normal(8, 6), d.whole(6, 8)))
case("nll_loss", lambda x, t: F.nll_loss(x.log_softmax(-1), t), lambda d: (d.normal(8, 6), d.whole(6, 8)))
case("kl_div", lambda a, b: F.kl_div(a.log_softmax(-1), b.softmax(-1), reduction="batchmean"), lambda d: (d.normal(8, 6), d.normal(8, 6)))
case("bce_with_logits", F.binary_cross_entropy_with_logits, lambda d: (d.normal(20), d.positive(20) / 2))
case("smooth_l1", F.smooth_l1_loss, lambda d: (d.normal(20), d.normal(20)))
case("huber", F.huber_loss, lambda d: (d.normal(20), d.normal(20)))
case("triplet", F.triplet_margin_loss, lambda d: (d.normal(5, 4), d.normal(5, 4), d.normal(5, 4)))
case("multi_margin", F.multi_margin_loss, lambda d: (d.normal(8, 6), d.whole(6, 8)))
# gathering and scattering
case("embedding_bag", lambda w, i: F.embedding_bag(i, w, mode="mean"), lambda d: (d.normal(10, 4), d.whole(10, 5, 3)))
case("embedding_bag_offsets", lambda w, i: F.embedding_bag(i, w, torch.tensor([0, 4, 6]), mode="sum"), lambda d: (d.normal(10, 4), d.whole(10, 9)))
case("embedding_bag_max", lambda w, i: F.embedding_bag(i, w, torch.tensor([0, 4, 6]), mode="max"), lambda d: (d.normal(10, 4), d.whole(10, 9)))
case("scatter_reduce_sum", lambda x, i: torch.zeros(5, 4, dtype=x.dtype).scatter_reduce(0, i, x, "sum"), lambda d: (d.normal(9, 4), d.whole(5, 9, 4)))
case("scatter_reduce_mean", lambda x, i: torch.zeros(5, 4, dtype=x.dtype).scatter_reduce(0, i, x, "mean"), lambda d: (d.normal(9, 4), d.whole(5, 9, 4)))
case("scatter_reduce_amax", lambda x, i: torch.zeros(5, 4, dtype=x.dtype).scatter_reduce(0, i, x, "amax"), lambda d: (d.normal(9, 4), d.whole(5, 9, 4)))
case("scatter_reduce_prod", lambda x, i: torch.ones(5, 4, dtype=x.dtype).scatter_reduce(0, i, x, "prod"), lambda d: (d.normal(9, 4), d.whole(5, 9, 4)), False)
case("scatter_add", lambda x, i: torch.zeros(5, 4, dtype=x.dtype).scatter_add(0, i, x), lambda d: (d.normal(9, 4), d.whole(5, 9, 4)))
case("index_add", lambda x, i: torch.zeros(5, 4, dtype=x.dtype).index_add(0, i, x), lambda d: (d.normal(9, 4), d.whole(5, 9)))
case("index_copy", lambda x, i: torch.zeros(9, 4, dtype=x.dtype).index_copy(0, i.argsort(), x), lambda d: (d.normal(9, 4), d.normal(9)))
case("index_fill", lambda x, i: x.index_fill(0, i, 2.0), lambda d: (d.normal(9, 4), d.whole(9, 3)))
case("masked_scatter", lambda x, m, y: x.masked_scatter(m, y), lambda d: (d.normal(6, 4), d.mask(6, 4), d.normal(6, 4)))
case("masked_select", lambda x, m: x.masked_select(m), lambda d: (d.normal(6, 4), d.mask(6, 4)))
case("take", torch.take, lambda d: (d.normal(6, 4), d.whole(24, 7)))
case("take_along_dim", lambda x, i: torch.take_along_dim(x, i, 1), lambda d: (d.normal(6, 4), d.whole(4, 6, 2)))
case("put", lambda x, i, y: x.put(i, y), lambda d: (d.normal(6, 4), torch.arange(0, 24, 3), d.normal(8)))
case("repeat_interleave", lambda x, n: torch.repeat_interleave(x, n, 0), lambda d: (d.normal(6, 4), d.whole(3, 6)))
case("repeat_interleave_int", lambda x: torch.repeat_interleave(x, 3, 1), lambda d: d.normal(6, 4))
case("index_put", lambda x, i, y: x.index_put((i,), y, accumulate=True), lambda d: (d.normal(6, 4), d.whole(6, 9), d.normal(9, 4)))
case("one_hot", lambda i: F.one_hot(i, 6), lambda d: d.whole(6, 8), False)
case("nonzero", lambda m: m.nonzero(), lambda d: d.mask(6, 4), False)
case("diag_embed", torch.diag_embed, lambda d: d.normal(3, 4))
case("rot90", torch.rot90, lambda d: d.normal(3, 4))
case("tensor_split", lambda x: torch.tensor_split(x, 3, 1)[1], lambda d: d.normal(3, 7))
# counting, ordering, searching
case("histc", lambda x: torch.histc(x, 8, -2.0, 2.0), lambda d: d.normal(50), False)
case("histc_int", lambda i: torch.histc(i.float(), 8, 0, 7), lambda d: d.whole(8, 50), False)
case("histc_experts", lambda i: torch.histc(i.int(), 8, 0, 7), lambda d: d.whole(8, 50), False)
case("histogram", lambda x: torch.histogram(x, 8, range=(-2.0, 2.0))[0], lambda d: d.normal(50), False)
case("bincount", lambda i: torch.bincount(i, minlength=8), lambda d: d.whole(8, 50), False)
case("bincount_weights", lambda i, w: torch.bincount(i, w, minlength=8), lambda d: (d.whole(8, 50), d.normal(50)), False)
case("searchsorted", torch.searchsorted, lambda d: (d.normal(9).sort()[0], d.normal(6)), False)
case("bucketize", lambda x, b: torch.bucketize(x, b), lambda d: (d.normal(6), d.normal(9).sort()[0]), False)
case("median", torch.median, lambda d: d.normal(31))
case("median_dim", lambda x: torch.median(x, 1)[0], lambda d: d.normal(4, 31))
case("nanmedian", torch.nanmedian, lambda d: d.normal(31))
case("kthvalue", lambda x: torch.kthvalue(x, 3, 1)[0], lambda d: d.normal(4, 31))
case("mode", lambda i: torch.mode(i, 1)[0], lambda d: d.whole(4, 3, 9), False)
case("quantile", lambda x: torch.quantile(x, 0.3, dim=1), lambda d: d.normal(4, 31))
case("unique", torch.unique, lambda d: d.whole(30, 20), False)
case("unique_inverse", lambda i: torch.unique(i, return_inverse=True)[1], lambda d: d.whole(30, 20), False)
case("unique_consecutive", lambda i: torch.unique_consecutive(i), lambda d: d.whole(3, 20), False)
case("unique_dim", lambda i: torch.unique(i, dim=0), lambda d: d.whole(2, 9, 2), False)
case("isin", torch.isin, lambda d: (d.whole(30, 20), d.whole(30, 10)), False)
case("sort", lambda x: torch.sort(x, 1)[0], lambda d: d.normal(4, 9))
case("topk", lambda x: torch.topk(x, 3)[0], lambda d: d.normal(4, 9))
case("cummin", lambda x: torch.cummin(x, 1)[0], lambda d: d.normal(4, 9))
case("aminmax", lambda x: torch.aminmax(x, dim=1)[1], lambda d: d.normal(4, 9))
case("shifts", lambda i: (i << 3) + (i >> 1), lambda d: d.whole(100, 20), False)
case("unpack_int4", lambda p, w: ((p.unsqueeze(-1) >> torch.tensor([0, 4])) & 15).flatten(-2).to(w.dtype) * w, lambda d: (d.whole(255, 6, 4), d.normal(6, 8)))
case("gcd", torch.gcd, lambda d: (d.whole(30, 20) + 1, d.whole(30, 20) + 1), False)
case("triu_indices", lambda x: x[tuple(torch.triu_indices(5, 5))], lambda d: d.normal(5, 5))
# functions and scans
case("logcumsumexp", lambda x: torch.logcumsumexp(x, 1), lambda d: d.normal(4, 9))
case("logsumexp", lambda x: torch.logsumexp(x, 1), lambda d: d.normal(4, 9))
case("logaddexp", torch.logaddexp, lambda d: (d.normal(9), d.normal(9)))
case("cumprod", lambda x: torch.cumprod(x, 1), lambda d: d.positive(4, 9))
case("softmax", lambda x: x.softmax(-1), lambda d: d.normal(4, 9))
case("gumbel", lambda x: (x - x.exp().log()).softmax(-1), lambda d: d.normal(4, 9), False)
case("xlogy", torch.xlogy, lambda d: (d.normal(9), d.positive(9)))
case("special_i0", torch.special.i0, lambda d: d.normal(9))
case("special_i1e", torch.special.i1e, lambda d: d.normal(9))
case("polygamma", lambda x: torch.polygamma(1, x), lambda d: d.positive(9))
case("ndtri", torch.special.ndtri, lambda d: d.positive(9) / 2)
case("erfcx", torch.special.erfcx, lambda d: d.positive(9))
case("log_ndtr", torch.special.log_ndtr, lambda d: d.normal(9))
case("acosh", torch.acosh, lambda d: d.positive(9) + 1)
case("asinh", torch.asinh, lambda d: d.normal(9))
case("atanh", torch.atanh, lambda d: d.positive(9) / 2)
case("sinc", torch.sinc, lambda d: d.normal(9))
case("nextafter_frexp", lambda x: torch.ldexp(x, torch.tensor(3)), lambda d: d.normal(9))
case("renorm", lambda x: torch.renorm(x, 2, 0, 1.0), lambda d: d.normal(4, 5))
case("mish", F.mish, lambda d: d.normal(9))
case("glu", F.glu, lambda d: d.normal(4, 8))
case("prelu", F.prelu, lambda d: (d.normal(4, 8), d.normal(8)))
case("nan_to_num", torch.nan_to_num, lambda d: d.normal(9))
case("lerp", torch.lerp, lambda d: (d.normal(9), d.normal(9), d.positive(9)))
case("addcdiv", torch.addcdiv, lambda d: (d.normal(9), d.normal(9), d.positive(9)))
case("trapezoid", torch.trapezoid, lambda d: d.normal(4, 9))
case("cov", torch.cov, lambda d: d.normal(4, 9))
case("corrcoef", torch.corrcoef, lambda d: d.normal(4, 9))
# convolutions, images, norms
case("conv_transpose", lambda x, w: F.conv_transpose2d(x, w, stride=2), lambda d: (d.normal(2, 3, 5, 5), d.normal(3, 4, 3, 3)))
case("unfold", lambda x: F.unfold(x, 3), lambda d: d.normal(1, 2, 5, 5))
case("fold", lambda x: F.fold(x, (5, 5), 3), lambda d: d.normal(1, 18, 9))
case("grid_sample", lambda x, g: F.grid_sample(x, g.tanh(), align_corners=False), lambda d: (d.normal(1, 2, 5, 6), d.normal(1, 3, 4, 2)))
case("grid_sample_nearest", lambda x, g: F.grid_sample(x, g.tanh(), mode="nearest", align_corners=False), lambda d: (d.normal(1, 2, 5, 6), d.normal(1, 3, 4, 2)), False)
case("grid_sample_3d", lambda x, g: F.grid_sample(x, g.tanh(), align_corners=False), lambda d: (d.normal(1, 2, 4, 5, 6), d.normal(1, 2, 3, 4, 3)))
case("affine_grid", lambda t: F.affine_grid(t, [1, 2, 4, 5], align_corners=False), lambda d: d.normal(1, 2, 3))
case("bicubic", lambda x: F.interpolate(x, scale_factor=1.7, mode="bicubic"), lambda d: d.normal(1, 2, 5, 6))
case("bicubic_antialias", lambda x: F.interpolate(x, size=(3, 4), mode="bicubic", antialias=True), lambda d: d.normal(1, 2, 7, 8))
case("bilinear_antialias", lambda x: F.interpolate(x, size=(3, 4), mode="bilinear", antialias=True), lambda d: d.normal(1, 2, 7, 8))
case("bilinear", lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"), lambda d: d.normal(1, 2, 5, 6))
case("area", lambda x: F.interpolate(x, size=(3, 4), mode="area"), lambda d: d.normal(1, 2, 7, 8))
case("nearest", lambda x: F.interpolate(x, scale_factor=2.0), lambda d: d.normal(1, 2, 5, 6))
case("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), lambda d: d.normal(1, 8, 3, 3))
case("reflection_pad", lambda x: F.pad(x, (1, 2, 1, 1), mode="reflect"), lambda d: d.normal(1, 2, 5, 6))
case("circular_pad", lambda x: F.pad(x, (1, 2, 1, 1), mode="circular"), lambda d: d.normal(1, 2, 5, 6))
case("max_pool", lambda x: F.max_pool2d(x, 2), lambda d: d.normal(1, 2, 6, 6))
case("max_pool3d", lambda x: F.max_pool3d(x, 2), lambda d: d.normal(1, 2, 4, 4, 4))
case("max_unpool", lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2), lambda d: d.normal(1, 2, 6, 6))
case("adaptive_max_pool", lambda x: F.adaptive_max_pool2d(x, 3), lambda d: d.normal(1, 2, 7, 6))
case("lp_pool", lambda x: F.lp_pool2d(x, 2, 2), lambda d: d.normal(1, 2, 6, 6))
case("weight_norm", lambda v, g: torch._weight_norm(v, g, 0), lambda d: (d.normal(4, 5), d.positive(4, 1)))
case("batch_norm", lambda x: F.batch_norm(x, None, None, training=True), lambda d: d.normal(8, 5))
case("group_norm", lambda x: F.group_norm(x, 2), lambda d: d.normal(3, 4, 5))
case("layer_norm", lambda x: F.layer_norm(x, (5,)), lambda d: d.normal(3, 5))
case("local_response_norm", lambda x: F.local_response_norm(x, 2), lambda d: d.normal(2, 4, 5))
case("bilinear_layer", F.bilinear, lambda d: (d.normal(3, 4), d.normal(3, 5), d.normal(2, 4, 5)))
case("attention", F.scaled_dot_product_attention, lambda d: (d.normal(2, 4, 8), d.normal(2, 5, 8), d.normal(2, 5, 8)))


# Fourier transforms and complex numbers
def rotary(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary embedding as Llama's first code has it."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles.float()), angles.float())).flatten(-2).to(x.dtype)


def rotary_no_cast(x: Tensor, angles: Tensor) -> Tensor:
    pairs = torch.complex(x[..., ::2], x[..., 1::2])
    turned = pairs * torch.exp(1j * angles)
    return torch.stack([turned.real, turned.imag], -1).flatten(-2)


case("rotary", rotary, lambda d: (d.normal(3, 5, 8), d.normal(5, 4)))
case("rotary_exp", rotary_no_cast, lambda d: (d.normal(3, 5, 8), d.normal(5, 4)))
case("rfft", lambda x: torch.view_as_real(torch.fft.rfft(x)), lambda d: d.normal(3, 16))
case("fft_abs", lambda x: torch.fft.fft(x).abs(), lambda d: d.normal(3, 12))
case("power_spectrum", lambda x: (lambda f: f.real.square() + f.imag.square())(torch.fft.rfft(x, norm="ortho")), lambda d: d.normal(3, 16))
case("fft_conv", lambda x, k: torch.fft.irfft(torch.fft.rfft(x, 32) * torch.fft.rfft(k, 32), 32)[..., :16], lambda d: (d.normal(3, 16), d.normal(3, 16)))
case("fft2", lambda x: torch.fft.fft2(x).real, lambda d: d.normal(3, 6, 8))
case("fftshift", lambda x: torch.fft.fftshift(torch.fft.fft(x)).angle().cos(), lambda d: d.normal(3, 9), False)
case("stft", lambda x: torch.view_as_real(torch.stft(x, 16, 8, window=torch.hann_window(16, dtype=x.dtype), return_complex=True)), lambda d: d.normal(64))
case("complex_matmul", lambda a, b: torch.view_as_real(torch.complex(a, b) @ torch.complex(b, a).mH), lambda d: (d.normal(4, 5), d.normal(4, 5)))
case("s4_kernel", lambda a, c: (torch.complex(c, c) * torch.exp(torch.complex(-a, a)[..., None] * torch.arange(6.0)).mT).sum(-1).real, lambda d: (d.positive(4), d.normal(6, 4)))


# optimizers
def optimizer(make: Callable[..., Any], steps: int = 2) -> Callable[..., Any]:
    def run(w: Tensor, x: Tensor) -> Tensor:
        p = torch.nn.Parameter(w.detach().clone())
        chosen = make([p])
        for _ in range(steps):
            chosen.zero_grad()
            (p * x).square().sum().backward()
            chosen.step()
        return p.detach() + 0.0

    return run


O = torch.optim
for title, make in {
    "sgd": lambda p: O.SGD(p, 0.1, momentum=0.9, weight_decay=0.01),
    "sgd_foreach": lambda p: O.SGD(p, 0.1, momentum=0.9, foreach=True),
    "sgd_plain": lambda p: O.SGD(p, 0.1),
    "adam": lambda p: O.Adam(p, 0.01),
    "adamw": lambda p: O.AdamW(p, 0.01, foreach=False),
    "adamw_foreach": lambda p: O.AdamW(p, 0.01, foreach=True),
    "adamw_fused": lambda p: O.AdamW(p, 0.01, fused=True),
    "adagrad": lambda p: O.Adagrad(p, 0.1),
    "rmsprop": lambda p: O.RMSprop(p, 0.1),
    "lion_like": lambda p: O.Adamax(p, 0.1),
}.items():
    case(title, optimizer(make), lambda d: (d.normal(6), d.normal(6)), False)


def clipped(w: Tensor, x: Tensor) -> Tensor:
    p = torch.nn.Parameter(w.detach().clone())
    (p * x).square().sum().backward()
    torch.nn.utils.clip_grad_norm_([p], 1.0)
    return p.grad + 0.0


case("clip_grad_norm", clipped, lambda d: (d.normal(6), d.normal(6)), False)
# recurrent layers and others that are one kernel
def recurrent(kind: Callable[..., Any], gates: int) -> Callable[..., Any]:
    def run(x: Tensor, *w: Tensor) -> Tensor:
        layer = kind(4, 5).to(x.dtype)
        return torch.func.functional_call(layer, dict(zip(["weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"], w)), x)[0]

    return run


case("lstm", recurrent(torch.nn.LSTM, 4), lambda d: (d.normal(6, 2, 4), d.normal(20, 4), d.normal(20, 5), d.normal(20), d.normal(20)))
case("gru", recurrent(torch.nn.GRU, 3), lambda d: (d.normal(6, 2, 4), d.normal(15, 4), d.normal(15, 5), d.normal(15), d.normal(15)))
case("rnn", recurrent(torch.nn.RNN, 1), lambda d: (d.normal(6, 2, 4), d.normal(5, 4), d.normal(5, 5), d.normal(5), d.normal(5)))
case("where_scalar_math", lambda x: torch.where(x > 0, x * math.sqrt(2.0), x), lambda d: d.normal(9))
