"""The fused embedding as torch knows it: an autograd Function over the Triton kernels, and their launches."""

from __future__ import annotations

from typing import Any

import torch

from kernels.bert import embedding_kernels as kernels
from labkit.errors import UsageError
from labkit.numerics.launching import Compiled, aligned, launch

Tensor = torch.Tensor
FLOATS = (torch.bfloat16, torch.float32)
TYPES = 4
"""The most token types: a program keeps a sum for each."""
MOST_HIDDEN = 65536
CHUNK = 32
"""Sorted rows that one program adds up."""

_compiled: Compiled = {}


@torch.compiler.disable
def embed(
    ids: Tensor, types: Tensor | None, tokens: Tensor, positions: Tensor, kinds: Tensor, gain: Tensor, shift: Tensor, *,
    eps: float = 1e-12, dropout: float = 0.0, padding: int = -1, seed: int | None = None,
) -> Tensor:  # fmt: skip
    """dropout(LayerNorm(tokens[ids] + positions[s] + kinds[types])), [B, S, H], differentiable in the five tables.

    ids [B, S] and types [B, S] (None: all 0) int64; tokens [V, H], positions [P, H] with P from S on, kinds [T, H], T
    up to 4, gain and shift [H], all float32 or all bfloat16; sums are float32. The gradient of row `padding` of tokens
    is 0, as torch's `padding_idx` has it. `dropout` is :func:`rounded`, and which elements it drops follows from
    `seed`, row and column; None draws a seed from torch's CPU generator. The gradients of repeated runs are
    bit-identical. Raises UsageError for wrong shapes and types, and on a CPU for bfloat16 and ids outside their tables;
    on a GPU, where that look would wait for it, such a row is NaN, and so is a gradient that it adds to.
    """
    check(ids, types, tokens, positions, kinds, gain, shift, dropout)
    drop = round(rounded(dropout) * 2**16)
    if seed is None:
        seed = int(torch.randint(2**62, (), dtype=torch.int64)) if drop else 0
    wide = seed % 2**62 + 2**62  # always 64 bits, so that one compiled form serves every seed
    return Embed.apply(ids, types, tokens, positions, kinds, gain, shift, eps, drop, padding, wide)


def rounded(dropout: float) -> float:
    """The nearest multiple of 2^-16, as an element's dropout is decided by 16 bits."""
    return round(dropout * 2**16) / 2**16


def check(
    ids: Tensor, types: Tensor | None, tokens: Tensor, positions: Tensor, kinds: Tensor, gain: Tensor, shift: Tensor,
    dropout: float,
) -> None:  # fmt: skip
    """Raises UsageError that names the tensor, what it is and what would be right."""
    if ids.ndim != 2 or ids.dtype != torch.int64:
        raise UsageError(f"ids: {ids.dtype} {tuple(ids.shape)} is not right; wanted torch.int64 [B, S]")
    if types is not None and (types.shape != ids.shape or types.dtype != torch.int64):
        raise UsageError(
            f"types: {types.dtype} {tuple(types.shape)} is not right; wanted torch.int64 {tuple(ids.shape)}"
        )
    if tokens.ndim != 2 or tokens.dtype not in FLOATS or not 1 <= tokens.shape[1] <= MOST_HIDDEN:
        given = f"{tokens.dtype} {tuple(tokens.shape)}"
        raise UsageError(f"tokens: {given} is not right; wanted float32 or bfloat16 [V, H], H to {MOST_HIDDEN}")
    hidden, length = tokens.shape[1], ids.shape[1]
    others = {"positions": (positions, 2), "kinds": (kinds, 2), "gain": (gain, 1), "shift": (shift, 1)}
    for name, (table, ndim) in others.items():
        if table.ndim != ndim or table.shape[-1] != hidden or table.dtype != tokens.dtype:
            wanted = f"{tokens.dtype} {'[.., ' if ndim == 2 else '['}{hidden}]"
            raise UsageError(f"{name}: {table.dtype} {tuple(table.shape)} is not right; wanted {wanted}")
        if table.device != tokens.device:
            raise UsageError(f"{name}: is on {table.device}, tokens on {tokens.device}; wanted both on one device")
    if positions.shape[0] < length:
        raise UsageError(f"ids: {length} tokens are too many; wanted {positions.shape[0]} at most, as positions has")
    if not 1 <= kinds.shape[0] <= TYPES:
        raise UsageError(f"kinds: {kinds.shape[0]} types is not right; wanted 1 to {TYPES}")
    if not 0.0 <= dropout < 1.0 - 2.0**-16:
        raise UsageError(f"dropout: {dropout} is not right; wanted a number from 0, below 1")
    if ids.is_cuda:
        return
    if tokens.dtype == torch.bfloat16:
        raise UsageError(
            "tokens: torch.bfloat16 needs a GPU, since Triton's interpreter does not round; wanted float32"
        )
    for name, one, count in (("ids", ids, tokens.shape[0]), ("types", types, kinds.shape[0])):
        if one is not None and one.numel() and not 0 <= int(one.min()) <= int(one.max()) < count:
            raise UsageError(f"{name}: {int(one.min())} to {int(one.max())} is not right; wanted 0 to {count - 1}")


class Embed(torch.autograd.Function):
    """The embedding and its gradients."""

    @staticmethod
    def forward(
        ctx: Any, ids: Tensor, types: Tensor | None, tokens: Tensor, positions: Tensor, kinds: Tensor, gain: Tensor,
        shift: Tensor, eps: float, drop: int, padding: int, seed: int,
    ) -> Tensor:  # fmt: skip
        """[B, S, H] of the tables' type."""
        ids = ids.contiguous()
        types = None if types is None else types.contiguous()
        tables = [table.contiguous() for table in (tokens, positions, kinds, gain, shift)]
        out, mean, inverse = forward(ids, types, tables, eps, drop, seed)
        ctx.save_for_backward(ids, types, *tables, mean, inverse)
        ctx.drop, ctx.padding, ctx.seed = drop, padding, seed
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        """The gradients of tokens, positions, kinds, gain and shift."""
        ids, types, *tables, mean, inverse = ctx.saved_tensors
        dout = dout.to(tables[0].dtype).contiguous()
        found = backward(ids, types, tables, mean, inverse, dout, ctx.drop, ctx.padding, ctx.seed)
        return None, None, *found, None, None, None, None


def parts(hidden: int) -> tuple[int, int]:
    """Columns of a part, a power of two from 16, and the number of parts, 8 at most."""
    part = max(16, min(128, 1 << (hidden - 1).bit_length()))
    while -(-hidden // part) > 8:
        part *= 2
    return part, -(-hidden // part)


def warps_of(part: int) -> int:
    """Warps that share a row: one, so that its sums need no exchange between warps, and more for wide rows."""
    return max(1, min(16, part // 256))


def forward(
    ids: Tensor, types: Tensor | None, tables: list[Tensor], eps: float, drop: int, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The result [B, S, H], and of each row the mean and 1 / deviation [B S], float32."""
    tokens, positions, kinds, gain, shift = tables
    (b, s), (v, h) = ids.shape, tokens.shape
    out = torch.empty(b, s, h, device=ids.device, dtype=tokens.dtype)
    mean = torch.empty(b * s, device=ids.device, dtype=torch.float32)
    inverse = torch.empty_like(mean)  # on its own, since kernels are compiled for where it begins
    if b * s == 0:
        return out, mean, inverse
    part, count = parts(h)
    given = ids if types is None else types
    kind = (
        h,
        tokens.dtype,
        ids.device,
        types is None,
        drop,
        aligned(ids, given, *tables),
        v,
        kinds.shape[0],
        b * s < 2**31,
    )
    launch(
        _compiled, kind, kernels.forward_kernel, (b * s, 1, 1),
        ids, given, tokens, positions, kinds, gain, shift, out, mean, inverse,
        b * s, s, v, kinds.shape[0], seed, eps,
        H=h, PART=part, PARTS=count, TYPED=types is not None, DROP=drop, BLOCK=1, num_warps=warps_of(part),
    )  # fmt: skip
    return out, mean, inverse


def backward(
    ids: Tensor, types: Tensor | None, tables: list[Tensor], mean: Tensor, inverse: Tensor, dout: Tensor, drop: int,
    padding: int, seed: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """dtokens, dpositions, dkinds, dgain, dshift, each of its table's type.

    Two passes over the rows make the gradient of each row's sum again: by position, where dpositions, dkinds, dgain and
    dshift are added up, and sorted by id, where dtokens is. Neither keeps it, so each reads dout once.
    """
    tokens, positions, kinds, gain, _ = tables
    (b, s), (v, h), t = ids.shape, tokens.shape, kinds.shape[0]
    dtokens, dpositions = torch.zeros_like(tokens), torch.zeros_like(positions)
    if b * s == 0:
        return dtokens, dpositions, torch.zeros_like(kinds), torch.zeros_like(gain), torch.zeros_like(gain)
    part, count = parts(h)
    warps = warps_of(part)
    block = max(1, 4 // warps)
    ids = ids.clamp(0, v - 1)  # a row that was outside is NaN, and must not write beyond the table
    given = ids if types is None else types.clamp(0, t - 1)
    kind = (h, tokens.dtype, ids.device, types is None, drop, aligned(ids, given, dout, *tables), t, b * s < 2**31)
    constants = {"H": h, "PART": part, "PARTS": count, "TYPED": types is not None, "DROP": drop}
    sorts = 1 if types is None else t
    steps = max(1, min(16, 1 << (max(1, b * s // (1024 * block)) - 1).bit_length()))
    groups = -(-b // (steps * block))
    wide = {"device": ids.device, "dtype": torch.float32}
    sums, norms = torch.empty(groups, sorts, s, h, **wide), torch.empty(groups * s, 2, h, **wide)
    launch(
        _compiled, (*kind, steps), kernels.position_kernel, (s, groups, 1),
        ids, given, tokens, positions, kinds, gain, mean, inverse, dout, sums, norms, b, s, seed,
        **(constants | {"T": sorts, "BLOCK": block, "STEPS": steps}), num_warps=max(4, warps),
    )  # fmt: skip
    narrow = torch.int16 if v <= 2**15 else torch.int32 if v <= 2**31 else torch.int64  # fewer bits are sorted sooner
    ordered, order = ids.flatten().to(narrow).sort(stable=True)
    chunks = -(-b * s // CHUNK)
    partial = torch.empty(chunks, 2, h, **wide)
    launch(
        _compiled, (*kind, narrow), kernels.token_kernel, (chunks, 1, 1),
        ordered, order, given, tokens, positions, kinds, gain, mean, inverse, dout, dtokens, partial, b * s, s, seed,
        padding, **(constants | {"CHUNK": CHUNK}), num_warps=warps,
    )  # fmt: skip
    across = min(128, max(16, 1 << (h - 1).bit_length()))
    launch(
        _compiled, (*kind, narrow, "join"), kernels.join_kernel, (chunks, -(-h // across), 1),
        ordered, partial, dtokens, b * s, chunks, padding, H=h, CHUNK=CHUNK, BLOCK=32, BLOCK_H=across, num_warps=4,
    )  # fmt: skip
    by_type = sums.sum(0)
    dpositions[:s] = by_type.sum(0)
    dkinds = torch.zeros_like(kinds)
    dkinds[:sorts] = by_type.sum(1)
    dgain, dshift = norms.sum(0).to(gain.dtype)
    return dtokens, dpositions, dkinds, dgain, dshift
