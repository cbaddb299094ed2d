"""Operands at stated offsets in one block of memory, so that a call that leaves its operand lands somewhere known.

Two modes. ``poison``: a guard of NaN around each operand, so that a read outside shows as NaN in the result and a
write outside as a damaged guard. ``adjacent``: the operands of a head lie one after another, each on a 256-byte
boundary as cudaMalloc gives them, and head after head, so that a read outside gets what a real run would get.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from labkit.errors import UsageError

MODES = ("poison", "adjacent")
ALIGNMENT = 64  # float32 elements: 256 bytes
GUARD_BITS = 0x7FC0DEAD  # a quiet NaN that arithmetic does not make by itself
UNWRITTEN_BITS = 0x7FC0BEEF  # another one: still there after a call, nobody wrote the element


@dataclass(frozen=True)
class Layout:
    """Where each operand of each head lies, in float32 elements from the start of the arena."""

    shapes: dict[str, tuple[int, int]]
    """Rows and columns of each operand, row-major."""
    heads: int
    mode: str
    guard: int
    """Elements between operands in poison mode, and before the first and after the last one in both."""
    starts: dict[str, int]
    """Offset of each operand of head 0."""
    stride: int
    """Elements from one head to the next."""
    size: int

    @classmethod
    def plan(cls, shapes: Mapping[str, tuple[int, int]], heads: int, mode: str, guard: int) -> Layout:
        """Lay the operands out in the given order. Raises UsageError for a mode that there is not."""
        if mode not in MODES:
            raise UsageError(f"mode: {mode!r} is not right; wanted one of {', '.join(MODES)}")
        guard = _aligned(guard)
        starts, at = {}, guard
        for name, (rows, columns) in shapes.items():
            starts[name] = at
            at += _aligned(rows * columns) + (guard if mode == "poison" else 0)
        stride = at - guard
        return cls(dict(shapes), heads, mode, guard, starts, stride, guard + stride * heads + guard)

    def offset(self, name: str, head: int) -> int:
        """First element of operand `name` of `head`."""
        return self.starts[name] + head * self.stride

    def length(self, name: str) -> int:
        """Elements in operand `name`."""
        rows, columns = self.shapes[name]
        return rows * columns

    def view(self, memory: torch.Tensor, name: str) -> torch.Tensor:
        """Operand `name` of all heads as [heads, rows, columns], sharing memory with the arena."""
        rows, columns = self.shapes[name]
        return memory.as_strided((self.heads, rows, columns), (self.stride, columns, 1), self.starts[name])

    def numpy_view(self, memory: np.ndarray, name: str) -> np.ndarray:
        """As :meth:`view`, for a NumPy arena of any dtype."""
        rows, columns = self.shapes[name]
        step = memory.itemsize
        return np.lib.stride_tricks.as_strided(
            memory[self.starts[name] :],
            (self.heads, rows, columns),
            (self.stride * step, columns * step, step),
        )

    def guards(self) -> np.ndarray:
        """True for each element of the arena that belongs to no operand."""
        outside = np.ones(self.size, bool)
        for name in self.shapes:
            for head in range(self.heads):
                start = self.offset(name, head)
                outside[start : start + self.length(name)] = False
        return outside


def _aligned(elements: int) -> int:
    return -(-elements // ALIGNMENT) * ALIGNMENT


def allocate(layout: Layout, device: str = "cpu", unwritten: tuple[str, ...] = ()) -> torch.Tensor:
    """A float32 arena on `device`, everything outside operands poisoned, and so are the operands `unwritten`.

    In adjacent mode operands not named are left zero, as fresh device memory often is, until they are filled.
    """
    bits = torch.full((layout.size,), GUARD_BITS, dtype=torch.int32, device=device)
    for name in layout.shapes:
        layout.view(bits, name).fill_(UNWRITTEN_BITS if name in unwritten else 0)
    return bits.view(torch.float32)


@dataclass(frozen=True)
class Escapes:
    """What one product did outside its operands, found by poison."""

    nan_results: int
    """Elements of the result that are NaN: something outside an operand was read."""
    unwritten: int
    """Elements of the result that nobody wrote."""
    guards_written: int
    """Elements outside every operand that were overwritten."""

    @property
    def any(self) -> bool:
        """Whether anything outside an operand was read or written."""
        return bool(self.nan_results or self.guards_written)


def escapes(layout: Layout, memory: torch.Tensor, result: str) -> Escapes:
    """Look for reads and writes outside the operands of a poison-mode arena after `result` was computed."""
    bits = memory.view(torch.int32).cpu().numpy()
    values = layout.numpy_view(bits, result)
    untouched = values == np.int32(UNWRITTEN_BITS)
    nan = np.isnan(values.view(np.float32)) & ~untouched
    damaged = bits[layout.guards()] != np.int32(GUARD_BITS)
    return Escapes(int(nan.sum()), int(untouched.sum()), int(damaged.sum()))
