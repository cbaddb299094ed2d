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

from whywrong.errors import UsageError

MODES = ("poison", "adjacent")
ALIGNMENT = 64  # float32 elements: 256 bytes
QUIET_NAN = 0x7FC00000
PAYLOAD = 0x1FFFFF  # one bit short, so that no poison is the all-ones NaN that a GPU makes


@dataclass(frozen=True)
class Layout:
    """Where each operand of each head lies, in float32 elements from the start of the buffer."""

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
            raise UsageError(f"mode: expected one of {', '.join(MODES)}, got {mode!r}")
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
        """Operand `name` of all heads as [heads, rows, columns], sharing memory with the buffer."""
        rows, columns = self.shapes[name]
        return memory.as_strided((self.heads, rows, columns), (self.stride, columns, 1), self.starts[name])

    def numpy_view(self, memory: np.ndarray, name: str) -> np.ndarray:
        """As :meth:`view`, for a NumPy buffer of any dtype."""
        rows, columns = self.shapes[name]
        step = memory.itemsize
        return np.lib.stride_tricks.as_strided(
            memory[self.starts[name] :],
            (self.heads, rows, columns),
            (self.stride * step, columns * step, step),
        )

    def guards(self) -> np.ndarray:
        """True for each element of the buffer that belongs to no operand."""
        outside = np.ones(self.size, bool)
        for name in self.shapes:
            for head in range(self.heads):
                start = self.offset(name, head)
                outside[start : start + self.length(name)] = False
        return outside


def _aligned(elements: int) -> int:
    return -(-elements // ALIGNMENT) * ALIGNMENT


def poison(size: int, device: str = "cpu") -> torch.Tensor:
    """`size` quiet NaNs as int32, each with a payload of its own place.

    A CPU hands the payload of a NaN that it reads on to its result. Were they all alike, a NaN that was read outside an
    operand and written outside another would look untouched.
    """
    period = min(size, PAYLOAD + 1)
    places = torch.arange(period, dtype=torch.int64, device=device)
    bits = (QUIET_NAN | (places * 0x9E3779B1 & PAYLOAD)).to(torch.int32)
    return bits.repeat(-(-size // period))[:size]


def allocate(layout: Layout, device: str = "cpu", unwritten: tuple[str, ...] = ()) -> torch.Tensor:
    """A float32 buffer on `device`: everything outside operands is poisoned, and so are the operands `unwritten`.

    The others are zero, as fresh device memory often is, until they are filled.
    """
    bits = poison(layout.size, device)
    for name in layout.shapes:
        if name not in unwritten:
            layout.view(bits, name).fill_(0)
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
    """Look for reads and writes outside the operands of a poison-mode buffer after `result` was computed."""
    bits = memory.view(torch.int32).cpu().numpy()
    intact = bits == poison(layout.size).numpy()
    untouched = layout.numpy_view(intact, result)
    nan = np.isnan(layout.numpy_view(bits, result).view(np.float32)) & ~untouched
    return Escapes(int(nan.sum()), int(untouched.sum()), int((~intact[layout.guards()]).sum()))
