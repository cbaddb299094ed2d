"""Whether two tensors have the same bits, and a hash of them."""

from __future__ import annotations

import hashlib

import torch


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether shapes, dtypes, devices and bits are the same. Compared where they are, so nothing goes to the CPU."""
    if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        return False
    pieces = (_bytes(x).split(1 << 26) for x in (a, b))  # torch.equal makes a mask of its operands' size
    return all(torch.equal(x, y) for x, y in zip(*pieces, strict=True))


def _bytes(value: torch.Tensor) -> torch.Tensor:
    """As integers: NaNs are equal where their bits are."""
    flat = value.contiguous().as_strided((value.numel(),), (1,))  # of one element the stride may be 0
    return flat.view(torch.uint8) if len(flat) else flat.byte()  # of no elements torch makes no view


def digest(value: torch.Tensor) -> str:
    """A hash of a tensor's bits."""
    return hashlib.sha256(_bytes(value.cpu()).numpy().tobytes()).hexdigest()
