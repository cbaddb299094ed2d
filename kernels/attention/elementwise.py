"""The two steps that are no matrix product, in Triton: scaling, and a row-wise softmax of any width."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def scale_kernel(x_ptr, y_ptr, factor, per_head, x_stride, y_stride, BLOCK_SIZE: tl.constexpr):
    """y = factor x, one head a row of the grid; heads lie `x_stride` and `y_stride` elements apart."""
    head = tl.program_id(1).to(tl.int64)
    offsets = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < per_head
    x = tl.load(x_ptr + head * x_stride + offsets, mask=mask)
    tl.store(y_ptr + head * y_stride + offsets, x * factor, mask=mask)


@triton.jit
def softmax_kernel(
    x_ptr,
    y_ptr,
    n_rows,
    n_columns,
    x_stride,
    y_stride,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    N_BLOCKS: tl.constexpr,
):
    """Softmax over rows of n_columns: one pass for maximum and sum, rescaled as the maximum grows, one to write."""
    head = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)  # [BR]
    rows = tl.minimum(rows, n_rows - 1)  # past the end the last row is done again: same values, same place
    x_rows = x_ptr + head * x_stride + rows[:, None] * n_columns
    y_rows = y_ptr + head * y_stride + rows[:, None] * n_columns
    maximum = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_ROWS,), tl.float32)
    for block in range(N_BLOCKS):
        columns = block * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)[None, :]  # [1, BC]
        mask = columns < n_columns
        x = tl.load(x_rows + columns, mask=mask, other=float("-inf"))  # [BR, BC]
        larger = tl.maximum(maximum, tl.max(x, axis=1))
        # A row that is all -inf so far has no scale yet: subtract 0 there, not -inf.
        shift = tl.where(larger == float("-inf"), 0.0, larger)
        total = total * tl.exp(maximum - shift) + tl.sum(tl.exp(x - shift[:, None]), axis=1)
        maximum = larger
    shift = tl.where(maximum == float("-inf"), 0.0, maximum)
    for block in range(N_BLOCKS):
        columns = block * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)[None, :]
        mask = columns < n_columns
        x = tl.load(x_rows + columns, mask=mask, other=float("-inf"))
        tl.store(y_rows + columns, tl.exp(x - shift[:, None]) / total[:, None], mask=mask)


def heads_of_rows(name: str, x: torch.Tensor) -> None:
    """Raise ValueError unless x is float32 [heads, rows, columns] with contiguous heads."""
    if x.dtype != torch.float32 or x.dim() != 3 or x.stride(2) != 1 or x.stride(1) != x.shape[2]:
        raise ValueError(
            f"{name}: expected float32 [heads, rows, columns] with contiguous heads, "
            f"got {x.dtype} of shape {tuple(x.shape)} and strides {x.stride()}"
        )


def laid_out(x: torch.Tensor) -> torch.Tensor:
    """x [heads, rows, columns] with contiguous heads: x itself where it is."""
    return x if x.dim() == 3 and x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def _pair(x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """Check the operands; without `out` make one, poisoned so that what is not written shows."""
    y = torch.full(x.shape, float("nan"), device=x.device) if out is None else out
    heads_of_rows("x", x)
    heads_of_rows("out", y)
    if y.shape != x.shape:
        raise ValueError(f"out: expected {tuple(x.shape)}, got shape {tuple(y.shape)}")
    return y


def scale(x: torch.Tensor, factor: float, out: torch.Tensor | None = None) -> torch.Tensor:
    """`factor` times x, float32 [heads, rows, columns] with contiguous heads."""
    y = _pair(x, out)
    heads, per_head = x.shape[0], x.shape[1] * x.shape[2]
    block = 1024 if x.is_cuda else 1 << 16
    grid = (triton.cdiv(per_head, block), heads)
    with torch.cuda.device_of(x):
        scale_kernel[grid](x, y, factor, per_head, x.stride(0), y.stride(0), BLOCK_SIZE=block)
    return y


def softmax(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Softmax over the last axis of float32 [heads, rows, columns] with contiguous heads, any number of columns."""
    y = _pair(x, out)
    heads, n_rows, n_columns = x.shape
    columns = min(triton.next_power_of_2(n_columns), 4096)
    rows = max(1, 4096 // columns) if x.is_cuda else max(1, (1 << 16) // columns)
    rows = min(rows, triton.next_power_of_2(n_rows))
    grid = (triton.cdiv(n_rows, rows), heads)
    with torch.cuda.device_of(x):
        softmax_kernel[grid](
            x,
            y,
            n_rows,
            n_columns,
            x.stride(0),
            y.stride(0),
            BLOCK_ROWS=rows,
            BLOCK_COLUMNS=columns,
            N_BLOCKS=triton.cdiv(n_columns, columns),
        )
    return y
