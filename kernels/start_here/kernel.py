"""The correct kernel: a program takes a row, and reads it four times in tiles of BLOCK columns.

Each of its parts is a function of its own, and :class:`Parts` says which: so that faulty.py can exchange one of them.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kernels.start_here.golden import EPS

Tensor = torch.Tensor
BLOCK = 32
"""Columns of a tile; the last tile of a row is not full, unless BLOCK divides the number of columns."""


@triton.jit
def mean_square(x_ptr, columns, BLOCK: tl.constexpr):
    """The mean of the squares of a row that begins at `x_ptr`."""
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + column, mask=column < columns, other=0.0)
        squares += x * x
    return tl.sum(squares, 0) / columns


@triton.jit
def scaled(x, gain_ptr, column, columns, mean_square, eps):
    """One tile of the row over its root mean square, times the gain."""
    gain = tl.load(gain_ptr + column, mask=column < columns, other=0.0)
    return x / tl.sqrt_rn(mean_square + eps) * gain


@triton.jit
def largest(scaled_ptr, columns, BLOCK: tl.constexpr):
    """The largest number of a row that begins at `scaled_ptr`."""
    found = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        found = tl.maximum(found, tl.load(scaled_ptr + column, mask=column < columns, other=float("-inf")))
    return tl.max(found, 0)


@triton.jit
def exponential(z):
    """e to the power of z."""
    return tl.exp(z)


@triton.jit
def total(scaled_ptr, largest, columns, BLOCK: tl.constexpr, EXPONENTIAL: tl.constexpr):
    """The sum of the exponentials of a row, its largest number subtracted."""
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        z = tl.load(scaled_ptr + column, mask=column < columns, other=float("-inf"))
        sums += EXPONENTIAL(z - largest)
    return tl.sum(sums, 0)


@triton.jit(do_not_specialize=["columns"])
def row_kernel(
    x_ptr,  # [rows, columns], float32, as all that follow
    gain_ptr,  # [columns]
    mean_square_ptr,  # [rows], written, as all that follow
    scaled_ptr,  # [rows, columns]
    largest_ptr,  # [rows]
    total_ptr,  # [rows]
    y_ptr,  # [rows, columns]
    columns,
    eps,
    BLOCK: tl.constexpr,
    MEAN_SQUARE: tl.constexpr,
    SCALED: tl.constexpr,
    LARGEST: tl.constexpr,
    EXPONENTIAL: tl.constexpr,
    TOTAL: tl.constexpr,
):
    """Everything for one row of x, each step written to where its pointer says."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * columns
    scaled_ptr += row * columns
    y_ptr += row * columns
    mean_square = MEAN_SQUARE(x_ptr, columns, BLOCK)
    tl.store(mean_square_ptr + row, mean_square)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + column, mask=column < columns, other=0.0)
        scaled = SCALED(x, gain_ptr, column, columns, mean_square, eps)
        tl.store(scaled_ptr + column, scaled, mask=column < columns)
    tl.debug_barrier()  # what one thread wrote, another reads
    largest = LARGEST(scaled_ptr, columns, BLOCK)
    tl.store(largest_ptr + row, largest)
    total = TOTAL(scaled_ptr, largest, columns, BLOCK, EXPONENTIAL)
    tl.store(total_ptr + row, total)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        z = tl.load(scaled_ptr + column, mask=column < columns, other=float("-inf"))
        tl.store(y_ptr + column, EXPONENTIAL(z - largest) / total, mask=column < columns)


class Parts(NamedTuple):
    """The functions that the kernel is made of."""

    MEAN_SQUARE: Any = mean_square
    SCALED: Any = scaled
    LARGEST: Any = largest
    EXPONENTIAL: Any = exponential
    TOTAL: Any = total


CORRECT_PARTS = Parts()


def run(x: Tensor, gain: Tensor, parts: Parts = CORRECT_PARTS) -> dict[str, Tensor]:
    """x [rows, columns] and gain [columns] in float32, of any strides; each step of the reference, by its name."""
    rows, columns = x.shape
    x, gain = x.contiguous(), gain.contiguous()
    steps = {name: torch.empty_like(x[:, :1]) for name in ("mean_square", "largest", "total")}
    steps |= {"scaled": torch.empty_like(x), "y": torch.empty_like(x)}
    with torch.cuda.device_of(x):  # Triton launches on the current device
        row_kernel[(rows,)](
            x, gain, steps["mean_square"], steps["scaled"], steps["largest"], steps["total"], steps["y"],
            columns, EPS, BLOCK, *parts, num_warps=1,
        )  # fmt: skip
    return steps


def probabilities(x: Tensor, gain: Tensor) -> dict[str, Tensor]:
    """As :func:`run` with the right parts."""
    return run(x, gain)
