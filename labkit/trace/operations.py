"""The ATen operations that a recorded program may hold: one table, which is the allow-list of files too.

Each name stands under what rounding does to it. What is not here is decomposed into what is, by torch's own table of
decompositions; what cannot be is named when it is recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch._decomp import decomposition_table

Tensor = torch.Tensor
aten: Any = torch.ops.aten


def _named(text: str) -> frozenset[str]:
    return frozenset(text.split())


MOVES = _named("""
    view _unsafe_view reshape t transpose permute expand slice select unsqueeze squeeze clone cat stack split
    split_with_sizes unbind index gather index_select embedding where masked_fill flip roll tril triu repeat
    diagonal unfold as_strided as_strided_scatter _to_copy scatter slice_scatter select_scatter diagonal_scatter
    slice_backward select_backward constant_pad_nd masked_select getitem
""")
"""Values change their place and nothing else; zeros or a number may come in."""

FACTORIES = _named("""
    zeros ones full arange scalar_tensor eye zeros_like ones_like full_like new_zeros new_ones new_full
""")
"""Values that do not depend on any input's."""

CHOICES = _named("""
    abs neg relu clamp clamp_min clamp_max maximum minimum amax amin max min sign sgn eq ne lt le gt ge isnan isinf
    isfinite logical_not logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor argmax
    argmin sort topk argsort any all round floor ceil trunc remainder fmod fill copysign hardtanh threshold cummax
    max_pool2d_with_indices nonzero bucketize
""")
"""Exact, and not linear: which value is taken may depend on a rounding before."""

ARITHMETIC = _named("""
    add sub mul div rsub
""")
"""One rounding of each element's result."""

PRODUCTS = _named("""
    mm bmm mv dot convolution convolution_backward
""")
"""Sums of products, whose factors may be cut to fewer digits first."""

POOLS = _named("""
    avg_pool2d avg_pool2d_backward avg_pool3d avg_pool3d_backward _adaptive_avg_pool2d_backward _adaptive_avg_pool3d
    _adaptive_avg_pool3d_backward upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward
    upsample_linear1d_backward upsample_bilinear2d_backward upsample_trilinear3d_backward
""")
"""Sums of neighbours with fixed weights from 0 to 1."""

SUMS = POOLS | _named("""
    sum mean cumsum index_add index_put scatter_add embedding_dense_backward index_reduce
""")
"""Sums in an order that is not known."""

MOMENTS = frozenset({"var_mean"})
"""Variance and mean, which programs compute in one pass, in two, or by updates."""

FUNCTIONS = _named("""
    exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal pow sin cos tan asin acos atan atan2 sinh cosh tanh
    erf erfc erfinv sigmoid lgamma digamma hypot prod cumprod
""")
"""What a library computes, to a unit or two in the last place."""

ALLOWED = MOVES | FACTORIES | CHOICES | ARITHMETIC | PRODUCTS | SUMS | MOMENTS | FUNCTIONS

IGNORED = _named("""
    detach alias lift_fresh lift is_same_size lift_fresh_copy
""")
"""The same values in the same place."""


def name_of(func: Any) -> str:
    """An operation's name in ATen, without its overload."""
    return func._schema.name.split("::")[1]


def full_name(func: Any) -> str:
    """Name and overload, as a file has it."""
    return f"{name_of(func)}.{func._overloadname or 'default'}"


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
    wanted = [(a.name, str(a.type)) for a in func._schema.arguments if not a.is_out]
    packet = getattr(aten, name, None)
    for overload in packet.overloads() if packet is not None else ():
        one = getattr(packet, overload)
        if not one._schema.is_mutable and [(a.name, str(a.type)) for a in one._schema.arguments] == wanted:
            return one
    return None


@cache
def decomposition(func: Any) -> Callable[..., Any] | None:
    """How an operation that is not in the table is made of others; None where that is not known."""
    return _OURS.get(name_of(func)) or decomposition_table.get(func)


_OURS: dict[str, Callable[..., Any]] = {
    "var": lambda *a, **k: torch.var_mean(*a, **k)[0],
    "std": lambda *a, **k: torch.var_mean(*a, **k)[0].sqrt(),
}
"""Where torch's own way goes by operations that are not in the table."""
