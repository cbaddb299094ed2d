"""The fused embedding as torch knows it, two operations of the library `workbook`, and the launches of its kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from kernels.bert import embedding_kernels as kernels
from kernels.operations import differentiable, operation, shapes_of
from whywrong.comparing.launching import Compiled, aligned, launch
from whywrong.errors import UsageError

Tensor = torch.Tensor
FLOATS = (torch.bfloat16, torch.float32)
TYPES = 4
"""The most token types: a program keeps a sum for each."""
MOST_HIDDEN = 65536
PROGRAMS = 1024
"""Backward, a program takes several rows one after the other, so many that about this many programs share them."""
MOST_STEPS = 64
"""Rows that a program adds up by position: fewer leave more sums to the last kernel."""
MOST_ROWS = 32
"""Rows that a program adds up by token: more of them wait longer for each other, and fewer leave more runs to join."""

_compiled: Compiled = {}


def embed(
    ids: Tensor,
    types: Tensor | None,
    tokens: Tensor,
    positions: Tensor,
    kinds: Tensor,
    gain: Tensor,
    shift: Tensor,
    *,
    eps: float = 1e-12,
    dropout: float = 0.0,
    padding: int = -1,
    seed: int | None = None,
) -> Tensor:
    """dropout(LayerNorm(tokens[ids] + positions[s] + kinds[types])), [B, S, H], differentiable in the five tables.

    ids [B, S] and types [B, S] (None: all 0) int64; tokens [V, H], positions [P, H] with P from S on, kinds [T, H], T
    up to 4, gain and shift [H], all float32 or all bfloat16; sums are float32. The gradient of row `padding` of tokens
    is 0, as torch's `padding_idx` has it. `dropout` is :func:`rounded`, and which elements it drops follows from
    `seed`, row and column; None draws a seed from torch's generator of the device, so that a CUDA graph draws anew at
    each replay. The gradients of repeated runs are bit-identical. Raises UsageError for wrong shapes and types, and on
    a CPU for bfloat16 and ids outside their tables; on a GPU, where that look would wait for it, such a row is NaN, and
    so is a gradient that it adds to.
    """
    check(ids, types, tokens, positions, kinds, gain, shift, dropout)
    drop = round(rounded(dropout) * 2**16)
    drawn = None
    if drop and seed is None:
        drawn = torch.randint(2**62, (), device=ids.device)
    elif drop:
        drawn = torch.full((), seed % 2**62, device=ids.device)
    return _differentiable(ids, types, tokens, positions, kinds, gain, shift, drawn, eps, drop, padding)[0]


def rounded(dropout: float) -> float:
    """The nearest multiple of 2^-16, as an element's dropout is decided by 16 bits."""
    return round(dropout * 2**16) / 2**16


def check(
    ids: Tensor,
    types: Tensor | None,
    tokens: Tensor,
    positions: Tensor,
    kinds: Tensor,
    gain: Tensor,
    shift: Tensor,
    dropout: float,
) -> None:
    """Raises UsageError that names the tensor, what it is and what would be right."""
    if ids.ndim != 2 or ids.dtype != torch.int64:
        raise UsageError(f"ids: expected torch.int64 [B, S], got {ids.dtype} {tuple(ids.shape)}")
    if ids.numel() >= 2**31:
        raise UsageError(f"ids: expected fewer than 2^31 tokens, got {tuple(ids.shape)}")
    if types is not None and (types.shape != ids.shape or types.dtype != torch.int64):
        raise UsageError(f"types: expected torch.int64 {tuple(ids.shape)}, got {types.dtype} {tuple(types.shape)}")
    if tokens.ndim != 2 or tokens.dtype not in FLOATS or not 1 <= tokens.shape[1] <= MOST_HIDDEN:
        given = f"{tokens.dtype} {tuple(tokens.shape)}"
        raise UsageError(f"tokens: expected float32 or bfloat16 [V, H], H to {MOST_HIDDEN}, got {given}")
    hidden, length = tokens.shape[1], ids.shape[1]
    others = {"positions": (positions, 2), "kinds": (kinds, 2), "gain": (gain, 1), "shift": (shift, 1)}
    for name, (table, ndim) in others.items():
        if table.ndim != ndim or table.shape[-1] != hidden or table.dtype != tokens.dtype:
            wanted = f"{tokens.dtype} {'[.., ' if ndim == 2 else '['}{hidden}]"
            raise UsageError(f"{name}: expected {wanted}, got {table.dtype} {tuple(table.shape)}")
        if table.device != tokens.device:
            raise UsageError(f"{name}: is on {table.device}, tokens on {tokens.device}; expected both on one device")
    if positions.shape[0] < length:
        raise UsageError(f"ids: {length} tokens are too many; expected {positions.shape[0]} at most, as positions has")
    if not 1 <= kinds.shape[0] <= TYPES:
        raise UsageError(f"kinds: expected 1 to {TYPES}, got {kinds.shape[0]} types")
    if not 0.0 <= dropout < 1.0 - 2.0**-16:
        raise UsageError(f"dropout: expected a number from 0, below 1, got {dropout}")
    if tokens.dtype == torch.bfloat16 and not ids.is_cuda:
        raise UsageError(
            "tokens: torch.bfloat16 needs a GPU, since Triton's interpreter does not round; expected float32"
        )


@operation("bert_embedding")
def embedded(
    ids: Tensor,
    types: Tensor | None,
    tokens: Tensor,
    positions: Tensor,
    kinds: Tensor,
    gain: Tensor,
    shift: Tensor,
    seed: Tensor | None,
    eps: float,
    drop: int,
    padding: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The result [B, S, H] of the tables' type, and of each row the mean and 1 / deviation [B S], float32.

    `seed` is an int64 where `drop`, the share of elements that are dropped times 2^16, is not 0.
    """
    tokens, positions, kinds, gain, shift = (table.contiguous() for table in (tokens, positions, kinds, gain, shift))
    ids, types = ids.contiguous(), None if types is None else types.contiguous()
    _look(ids, types, tokens, kinds)
    (b, s), (v, h) = ids.shape, tokens.shape
    out, mean, inverse = _results(ids, types, tokens)
    if b * s == 0:
        return out, mean, inverse
    part, count = parts(h)
    given = ids if types is None else types
    at = aligned(ids, given, tokens, positions, kinds, gain, shift)
    # B and S are not specialised on; V and T are a model's own
    key = (h, tokens.dtype, ids.device, types is None, drop, at, v, kinds.shape[0])
    launch(
        _compiled, key, kernels.forward_kernel, (b * s, 1, 1),
        ids, given, tokens, positions, kinds, gain, shift, out, mean, inverse,
        ids if seed is None else seed, s, v, kinds.shape[0], eps,
        H=h, PART=part, PARTS=count, TYPED=types is not None, DROP=drop, num_warps=warps_of(part),
    )  # fmt: skip
    return out, mean, inverse


@shapes_of("bert_embedding")
def _results(ids: Tensor, types: Tensor | None, tokens: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    wide = {"dtype": torch.float32, "device": ids.device}
    mean, inverse = torch.empty(ids.numel(), **wide), torch.empty(ids.numel(), **wide)
    return tokens.new_empty(*ids.shape, tokens.shape[1]), mean, inverse


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ids, types, tokens, positions, kinds, gain, _, seed, _, ctx.drop, ctx.padding = inputs
    ctx.save_for_backward(ids, types, tokens, positions, kinds, gain, *output[1:], seed)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


@once_differentiable
def _backward(ctx: Any, dout: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if dout is None:
        return (None,) * 11
    dout = dout.to(ctx.saved_tensors[2].dtype)
    return None, None, *embedding_backward(dout, *ctx.saved_tensors, ctx.drop, ctx.padding), *[None] * 4


_differentiable = differentiable(embedded, _backward, _keep)


def parts(hidden: int) -> tuple[int, int]:
    """Columns of a part, a power of two from 16, and the number of parts, 8 at most."""
    part = max(16, min(128, 1 << (hidden - 1).bit_length()))
    while -(-hidden // part) > 8:
        part *= 2
    return part, -(-hidden // part)


def warps_of(part: int) -> int:
    """Warps that share a row: one, so that its sums need no exchange between warps, and more for wide rows."""
    return max(1, min(16, part // 256))


def _look(ids: Tensor, types: Tensor | None, tokens: Tensor, kinds: Tensor) -> None:
    """Raises UsageError for rows outside of the tables, on a CPU alone."""
    for name, one, count in (("ids", ids, tokens.shape[0]), ("types", types, kinds.shape[0])):
        if one is None or one.is_cuda or not one.numel():
            continue
        low, high = map(int, one.aminmax())
        if low < 0 or high >= count:
            raise UsageError(f"{name}: expected 0 to {count - 1}, got {low} to {high}")


@operation("bert_embedding_backward")
def embedding_backward(
    dout: Tensor,
    ids: Tensor,
    types: Tensor | None,
    tokens: Tensor,
    positions: Tensor,
    kinds: Tensor,
    gain: Tensor,
    mean: Tensor,
    inverse: Tensor,
    seed: Tensor | None,
    drop: int,
    padding: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dtokens, dpositions, dkinds, dgain, dshift, each of its table's shape and type.

    Two passes over the rows make the gradient of each row's sum again: by position, where dpositions, dkinds, dgain and
    dshift are added up, and sorted by id, where dtokens is. Neither keeps it, so each reads dout once.
    """
    tokens, positions, kinds, gain = (table.contiguous() for table in (tokens, positions, kinds, gain))
    ids, types, dout = ids.contiguous(), None if types is None else types.contiguous(), dout.contiguous()
    (b, s), (v, h), t = ids.shape, tokens.shape, kinds.shape[0]
    dtokens = torch.zeros_like(tokens)
    if b * s == 0:
        return dtokens, *(torch.zeros_like(table) for table in (positions, kinds, gain, gain))
    _, dpositions, dkinds, dgain, dshift = _gradients(dout, ids, types, tokens, positions, kinds, gain)
    part, count = parts(h)
    warps = warps_of(part)
    given = ids if types is None else types
    number = ids if seed is None else seed
    at = aligned(ids, given, dout, tokens, positions, kinds, gain)
    key = (h, tokens.dtype, ids.device, types is None, drop, at, v, t)
    constants = {"H": h, "PART": part, "PARTS": count, "TYPED": types is not None, "DROP": drop}
    sorts = 1 if types is None else t
    steps, rows = (max(1, min(most, b * s // PROGRAMS)) for most in (MOST_STEPS, MOST_ROWS))
    groups = -(-b // steps)
    wide = {"device": ids.device, "dtype": torch.float32}
    sums, norms = torch.empty(groups, s, sorts, h, **wide), torch.empty(groups, s, 2, h, **wide)
    narrow = torch.int16 if v <= 2**15 else torch.int32 if v <= 2**31 else torch.int64  # fewer bits are sorted sooner
    short = torch.empty(b * s, device=ids.device, dtype=narrow)
    launch(
        _compiled, key, kernels.position_kernel, (s * groups, 1, 1),
        ids, given, tokens, positions, kinds, gain, mean, inverse, dout, number, short, sums, norms, b, s, v, t,
        steps, T=sorts, **constants, num_warps=warps,
    )  # fmt: skip
    ordered, order = short.sort(stable=True)
    chunks = -(-b * s // rows)
    partial = torch.empty(chunks, 2, h, **wide)
    launch(
        _compiled, key, kernels.token_kernel, (chunks, 1, 1),
        ordered, order, given, tokens, positions, kinds, gain, mean, inverse, dout, number, dtokens, partial, b * s, s,
        t, padding, rows, **constants, num_warps=warps,
    )  # fmt: skip
    across = min(128, max(16, 1 << (h - 1).bit_length()))
    launch(
        _compiled, key, kernels.join_kernel, (chunks, -(-h // across), 1),
        ordered, partial, dtokens, b * s, chunks, padding, rows, H=h, BLOCK=32, BLOCK_H=across, num_warps=1,
    )  # fmt: skip
    launch(
        _compiled, key, kernels.finish_kernel, (-(-positions.shape[0] // 64) + sorts + 2, -(-h // 16), 1),
        sums, norms, dpositions, dkinds, dgain, dshift, s, positions.shape[0], groups,
        H=h, T=sorts, KINDS=t, ROWS=64, BLOCK=256, BLOCK_H=16, num_warps=4,
    )  # fmt: skip
    return dtokens, dpositions, dkinds, dgain, dshift


@shapes_of("bert_embedding_backward")
def _gradients(
    dout: Tensor,
    ids: Tensor,
    types: Tensor | None,
    tokens: Tensor,
    positions: Tensor,
    kinds: Tensor,
    gain: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    found = [table.new_empty(table.shape) for table in (tokens, positions, kinds, gain, gain)]
    return found[0], found[1], found[2], found[3], found[4]
