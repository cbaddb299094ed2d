"""The ATen operations that a recorded program may hold: one table, which is the allow-list of files too.

Each name stands under what rounding does to it. What is not here is decomposed into what is, by torch's own table of
decompositions; what cannot be is named when it is recorded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from whywrong.torch_private import DispatchKey, decomposition_table

aten: Any = torch.ops.aten


def _named(text: str) -> frozenset[str]:
    return frozenset(text.split())


MOVES = _named("""view _unsafe_view reshape t transpose permute expand slice select unsqueeze squeeze clone cat stack
    split split_with_sizes unbind index gather index_select embedding where masked_fill flip roll tril triu repeat
    diagonal unfold as_strided as_strided_scatter _to_copy scatter slice_scatter select_scatter diagonal_scatter
    slice_backward select_backward constant_pad_nd masked_select getitem copy masked_scatter complex view_as_complex
    view_as_real _conj _conj_physical resolve_conj _neg_view""")
"""Values change their place and nothing else; zeros or a number may come in."""

FACTORIES = _named("""zeros ones full arange scalar_tensor eye zeros_like ones_like full_like new_zeros new_ones
    new_full tril_indices triu_indices""")
"""Values that do not depend on any input's."""

SELECTIONS = _named("""abs neg relu clamp clamp_min clamp_max maximum minimum amax amin max min sign sgn eq ne lt le gt
    ge isnan isinf isfinite logical_not logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_not
    bitwise_xor argmax argmin sort topk argsort any all round floor ceil trunc remainder fmod fill copysign hardtanh
    threshold cummax max_pool2d_with_indices nonzero bucketize searchsorted cummin median nanmedian kthvalue mode
    unique_consecutive unique_dim _unique _unique2 repeat_interleave max_pool3d_with_indices adaptive_max_pool2d
    adaptive_max_pool3d gcd lcm __lshift__ __rshift__ bitwise_left_shift bitwise_right_shift _int_mm _is_all_true
    _is_any_true""")
"""Exact, and not linear: which value is taken, or counted where, may depend on a rounding before."""

ORDERS = _named("""topk sort argsort argmax argmin max min median nanmedian kthvalue mode cummax cummin
    max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d adaptive_max_pool3d""")
"""Those that choose among numbers by their order, equal ones too; they give places, or numbers and places."""

ARITHMETIC = _named("add sub mul div rsub")
"""One rounding of each element's result."""

PRODUCTS = _named("mm bmm mv dot convolution convolution_backward")
"""Sums of products, whose factors may be cut to fewer digits first."""

POOLS = _named("""avg_pool2d avg_pool2d_backward avg_pool3d avg_pool3d_backward _adaptive_avg_pool2d_backward
    _adaptive_avg_pool3d _adaptive_avg_pool3d_backward upsample_nearest1d_backward upsample_nearest2d_backward
    upsample_nearest3d_backward upsample_linear1d_backward upsample_bilinear2d_backward
    upsample_trilinear3d_backward max_pool2d_with_indices_backward max_pool3d_with_indices_backward
    adaptive_max_pool2d_backward adaptive_max_pool3d_backward""")
"""Sums of neighbours with fixed weights from 0 to 1."""

SUMS = POOLS | _named("""sum mean cumsum index_add index_put scatter_add embedding_dense_backward index_reduce
    scatter_reduce put bincount _embedding_bag _embedding_bag_forward_only _embedding_bag_backward
    _embedding_bag_dense_backward""")
"""Sums in an order that is not known."""

MOMENTS = frozenset({"var_mean"})
"""Variance and mean, which programs compute in one pass, in two, or by updates."""

FUNCTIONS = _named("""exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal pow sin cos tan asin acos atan atan2
    sinh cosh tanh erf erfc erfinv sigmoid lgamma digamma hypot prod cumprod acosh asinh atanh polar angle polygamma
    i0 special_i0e special_i1 special_i1e special_ndtri special_erfcx special_log_ndtr logcumsumexp""")
"""What a library computes, to a unit or two in the last place."""

ELIMINATIONS = _named("""linalg_cholesky_ex cholesky_solve cholesky_inverse linalg_lu_factor_ex linalg_lu
    linalg_lu_solve lu_unpack _linalg_solve_ex linalg_solve_triangular linalg_inv_ex _linalg_det _linalg_slogdet""")
"""Elimination: correct for matrices that are off by sqrt(n) round-offs of the norm of each column."""

REFLECTIONS = _named("""_linalg_svd _linalg_eigh linalg_qr linalg_lstsq linalg_pinv linalg_matrix_exp""")
"""n reflections from each side, or squarings: correct for matrices off by 2 n round-offs of the whole's norm."""

TRANSFORMS = _named("_fft_r2c _fft_c2r _fft_c2c")
"""Fourier transforms: off by log2(n) round-offs of the norm of what is transformed."""

RESAMPLERS = _named("""grid_sampler_2d grid_sampler_2d_backward grid_sampler_3d grid_sampler_3d_backward
    upsample_bicubic2d_backward _upsample_bicubic2d_aa _upsample_bicubic2d_aa_backward _upsample_bilinear2d_aa
    _upsample_bilinear2d_aa_backward""")
"""Sums of neighbours with weights from positions, which are off by a round-off of the size of the image."""

KERNELS = _named("""_cdist_forward _cdist_backward _pdist_forward _pdist_backward _ctc_loss _ctc_loss_backward
    _trilinear multi_margin_loss_backward _weight_norm_interface_backward _embedding_bag_per_sample_weights_backward""")
"""Sums and functions in one operation, each of whose arguments counts as off by sqrt(n) round-offs."""

ALGORITHMS = ELIMINATIONS | REFLECTIONS | TRANSFORMS | RESAMPLERS | KERNELS
"""What is run as one operation: its error is that of one on arguments moved at random, each element and all of them."""

ALLOWED = MOVES | FACTORIES | SELECTIONS | ARITHMETIC | PRODUCTS | SUMS | MOMENTS | FUNCTIONS | ALGORITHMS

IN_STORAGE = _named("""
    native_layer_norm_backward embedding_dense_backward _embedding_bag_dense_backward index_put _index_put_impl
    _unsafe_index_put convolution_backward col2im im2col index_add prod max_pool2d_with_indices_backward
    max_pool3d_with_indices_backward avg_pool2d_backward _adaptive_avg_pool2d_backward _adaptive_avg_pool3d
    _adaptive_avg_pool3d_backward _embedding_bag_backward put index_reduce
""")
"""What torch's CPU kernels add up in the type of what they give, with more than half a unit of error."""

Limits = dict[int, Callable[[Any], range] | None]


def _places(k: int, d: int) -> Callable[[Any], range]:
    """Places in dimension `d` of argument `k`."""
    return lambda args: range(args[k].shape[d])


def _pixels(dims: int) -> Callable[[Any], range]:
    """Places in the last `dims` dimensions of argument 1, in one row."""
    return lambda args: range(math.prod(args[1].shape[-dims:]))


def _target_lengths(args: Any) -> range:
    """Up to what the table of states has room for; those of targets in one row are known only together."""
    return range((args[6].shape[-1] + 1) // 2) if args[2].ndim == 2 else range(0)


UNCHECKED: dict[str, Limits] = {
    name: {}
    for name in _named("""_embedding_bag _embedding_bag_forward_only
    _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward avg_pool2d_backward avg_pool3d_backward
    grid_sampler_3d_backward linalg_lstsq lu_unpack multi_margin_loss_backward _pdist_backward""")
} | {
    "_ctc_loss": {1: _places(0, -1)},
    "_ctc_loss_backward": {2: _places(1, -1), 3: lambda a: range(1, a[1].shape[0] + 1), 4: _target_lengths, 7: None},
    "max_pool2d_with_indices_backward": {7: _pixels(2)},
    "max_pool3d_with_indices_backward": {2: None, 7: _pixels(3)},
    "adaptive_max_pool2d_backward": {2: _pixels(2)},
    "adaptive_max_pool3d_backward": {2: _pixels(3)},
    "_embedding_bag_backward": {1: lambda a: range(a[6]), 3: _places(0, 0), 6: None},
    "_embedding_bag_dense_backward": {1: lambda a: range(a[5]), 2: _places(0, 0), 5: None},
    "_embedding_bag_per_sample_weights_backward": {2: _places(1, 0), 4: _places(0, 0)},
    "_weight_norm_interface_backward": {4: None},
    "grid_sampler_2d_backward": {2: lambda _: range(-(2**20), 2**20)},
    "_fft_r2c": {1: None},
    "_fft_c2r": {1: None},
    "_fft_c2c": {1: None},
    "_upsample_bilinear2d_aa": {1: None},
}
"""Operations whose CPU kernels may read or write outside of a tensor: where shapes do not fit each other, and where an
argument holds what they do not check, integers or coordinates. By the place of such an argument the range of what it
may hold; None is only what the program has there.

Measured by tools/unchecked_integers.py with torch 2.13, which has what is not here: single numbers that no mutation
gives.
"""

IGNORED = _named("""detach alias lift_fresh lift is_same_size lift_fresh_copy _linalg_check_errors
    _record_function_enter_new _record_function_exit""")
"""The same values in the same place, or none."""

FROZEN = _named("_local_scalar_dense equal")
"""What gives a Python number or truth value."""

NOT_UNIQUE = {"_linalg_svd": "singular vectors", "_linalg_eigh": "eigenvectors"}
"""Results that another correct program may give with another sign, or turned where two values are equal."""

WRITE_INSTEAD = {"_fused_": "an optimizer with fused=False", "linalg_eig": "linalg.eigh", "histogram": "histc"}
"""What to write in place of an operation that cannot be recorded, by how its name begins."""


def instead(name: str) -> str:
    """What to write in place of an operation that cannot be recorded."""
    known = (words for start, words in WRITE_INSTEAD.items() if name.startswith(start))
    return next(known, "operations of docs/operations.md, or give its result as one more input")


def name_of(func: Any) -> str:
    """An operation's name in ATen, without its overload."""
    return func._schema.name.split("::")[1]


def full_name(func: Any) -> str:
    """Name and overload, as a file has it."""
    return func if isinstance(func, str) else f"{name_of(func)}.{func._overloadname or 'default'}"


@cache
def resolve(text: str) -> Any:
    """The operation of a full name. Raises ValueError for one that a program may not hold."""
    name, _, overload = text.partition(".")
    packet = getattr(aten, name) if name in ALLOWED and hasattr(aten, name) else None
    func = getattr(packet, overload) if packet is not None and overload in packet.overloads() else None
    if func is None or func._schema.is_mutable:
        raise ValueError(f"{text[:60]!r} is no operation that a recorded program may hold")
    return func


@cache
def functional(func: Any) -> Any:
    """The pure counterpart of an operation that writes in place or to ``out=``; None where there is none."""
    name = name_of(func).removesuffix("_")
    arguments = [(a.name, str(a.type)) for a in func._schema.arguments if not a.is_out]
    packet = getattr(aten, name, None)
    for overload in packet.overloads() if packet is not None else ():
        pure = getattr(packet, overload)
        if not pure._schema.is_mutable and [(a.name, str(a.type)) for a in pure._schema.arguments] == arguments:
            return pure
    return None


@cache
def decomposition(func: Any) -> Callable[..., Any] | None:
    """How an operation that is not in the table is made of others; None where that is not known."""
    key = DispatchKey.CompositeExplicitAutograd
    by_torch = partial(func._op_dk, key) if name_of(func).startswith(_MADE_OF_OTHERS) else None
    return _OURS.get(name_of(func)) or decomposition_table.get(func) or by_torch


def _histc(x: Tensor, bins: int = 100, min: Any = 0.0, max: Any = 0.0) -> Tensor:
    if min == max:  # from the smallest to the largest
        alike = x.amin() == x.amax()
        min, max = torch.where(alike, x.amin() - 1, x.amin()), torch.where(alike, x.amax() + 1, x.amax())
    inside = (x >= min) & (x <= max)
    places = torch.where(inside, (x - min) * (bins / (max - min)), 0).floor().clamp(max=bins - 1).long().flatten()
    return x.new_zeros(bins).scatter_add(0, places, inside.to(x.dtype).flatten())


def _norm(x: Tensor, order: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """torch's own way has another shape, or another value, in some versions where there is one element to sum."""
    x, dim = x.to(dtype or x.dtype).abs(), tuple(range(x.ndim)) if dim is None else dim
    if math.isinf(order):
        return (torch.amax if order > 0 else torch.amin)(x, dim, keepdim)
    if order == 0:
        return (x != 0).to(x.dtype).sum(dim, keepdim)
    if order == 2:
        return x.square().sum(dim, keepdim).sqrt()
    return x.sum(dim, keepdim) if order == 1 else x.pow(order).sum(dim, keepdim).pow(1.0 / order)


def _grouped_mm(a: Tensor, b: Tensor, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Tensor:
    """A product for each group of rows (or of columns, or of what is summed over) that ends at one of `offs`."""
    if offs is None:
        return a @ b
    ends = offs.tolist()
    groups = [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    if a.ndim == b.ndim == 2:
        return torch.stack([a[:, group] @ b[group] for group in groups])
    if a.ndim == 2:
        return torch.cat([a[group] @ b[i] for i, group in enumerate(groups)])
    return torch.cat([a[i] @ b[:, group] for i, group in enumerate(groups)], -1)


_MADE_OF_OTHERS = ("_foreach_", "masked_scatter_backward")
"""How the names of operations begin that torch itself makes of others, in C++."""


def _biased(x: Tensor, weight: Tensor, bias: Tensor, *rest: Any) -> Tensor:
    """A convolution whose bias is added by itself, as an unfused program does."""
    return torch.ops.aten.convolution(x, weight, None, *rest) + bias.view(-1, *[1] * (weight.ndim - 2))


_OURS: dict[str, Callable[..., Any]] = {
    "convolution": _biased,
    "histc": _histc,
    "_grouped_mm": _grouped_mm,
    "linalg_vector_norm": _norm,
    "var": lambda *a, **k: torch.var_mean(*a, **k)[0],
    "std": lambda *a, **k: torch.var_mean(*a, **k)[0].sqrt(),
}
"""Where torch's own way goes by operations that are not in the table."""
