"""The one pass of :func:`labkit.compare` on a GPU: Triton, deterministic, no temporary of the data's size.

A few programs a multiprocessor stride through the tiles. A tile is first taken in float32: sums of a few elements a
thread, then float64 from tile to tile; and four maxima. When these say that something in the tile needs care (NaN or
Inf, a mismatch or nearly one, a range that float32 cannot square), the whole program takes the tile again from the
cache, exactly, in float64. So nothing is decided in float32: counts, indices and values are exact, sums have about
seven digits, and max_rel six. Each program writes one row of statistics, and a second launch of one program combines
them.
"""

from __future__ import annotations

import math
import os
import struct
from functools import cache

import torch

from labkit.compare_kernels import SCALE, combine, one_pass
from labkit.layout import Walk
from labkit.statistics import FIELDS, NUMBER, Rule, Statistics

TILE, WARPS, PROGRAMS_PER_SM = 2048, 4, 4
ROWS = 32  # FIELDS, padded to a power of two
_CODES = {torch.float8_e4m3fn: 1, torch.float8_e5m2: 2}


def measure(o: torch.Tensor, g: torch.Tensor, bound: torch.Tensor | None, walk: Walk, rule: Rule) -> Statistics:
    """Every statistic of `o` against `g`; `bound` is a float64 tensor of their shape when `rule` is elementwise."""
    # The last kernel writes to host memory that is pinned, so that waiting for it is all that reading takes.
    result = torch.empty(ROWS, dtype=torch.float64, pin_memory=o.is_cuda)
    launch(o, g, bound, walk, rule, result)
    if o.is_cuda:
        torch.cuda.current_stream(o.device).synchronize()
    return Statistics(*result.tolist()[: len(FIELDS)])


def launch(
    o: torch.Tensor, g: torch.Tensor, bound: torch.Tensor | None, walk: Walk, rule: Rule, result: torch.Tensor,
    tile: int = TILE, warps: int = WARPS, programs_per_sm: int = PROGRAMS_PER_SM, stages: int | None = None,
) -> None:  # fmt: skip
    """As :func:`measure`, without waiting: fills `result`, float64 [32], which the device can write to."""
    count = o.numel()
    programs = min(-(-count // tile), _multiprocessors(o.device) * programs_per_sm)
    parts = torch.empty((ROWS, programs), dtype=torch.float64, device=o.device)
    itemsize = max(o.element_size(), g.element_size())
    stages = (3 if itemsize <= 4 else 1) if stages is None else stages
    strides = [*walk.strides, *([walk.strides[0]] if bound is None else []), walk.logical]
    form = rule.format
    reach = max(sum((n - 1) * s for n, s in zip(walk.sizes, one, strict=True)) for one in strides)
    near = min(rule.number * SCALE * (1.0 - 1e-6), 3e38)
    one_pass[(programs,)](
        _bytes(o), _bytes(g), o if bound is None else bound, parts, count, programs, _bits(rule.number), float(near),
        walk.sizes, *(tuple(one) for one in strides),
        WIDE=any(t.dtype.itemsize > 4 or not t.is_floating_point() for t in (o, g)),
        INTEGERS=not (o.is_floating_point() or g.is_floating_point()), HAS_ULP=form is not None,
        EXPONENT=form.exponent if form else 0, MANTISSA=form.mantissa if form else 0,
        LARGEST=form.largest if form else 0.0, OVERFLOW=form.overflow if form else 0.0, MODE=rule.mode,
        ANYTHING=rule.mode == NUMBER and rule.number == math.inf, POSITIVE=rule.number > 0.0,
        LINEAR=walk.linear, LARGE=reach + tile >= 2**31, DIMENSIONS=len(walk.sizes),
        O_CODE=_CODES.get(o.dtype, 0), G_CODE=_CODES.get(g.dtype, 0), TILE=tile, THREADS=32 * warps,
        VECTOR=4,
        STAGES=stages, FAST=os.environ.get("TRITON_INTERPRET") != "1", num_warps=warps,
    )  # fmt: skip
    combine[(1,)](parts, result, programs, _bits(rule.number), MODE=rule.mode, ROWS=ROWS,
                   WIDTH=1 << (programs - 1).bit_length(), num_warps=8)  # fmt: skip


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _bits(number: float) -> int:
    """The bits of a float64: a kernel would take a Python float as float32."""
    return int.from_bytes(struct.pack("<d", number), "little", signed=True)


def _bytes(t: torch.Tensor) -> torch.Tensor:
    """What the kernel reads: floats of 8 bits and truth values as bytes, so that every GPU and the interpreter can."""
    return t.view(torch.uint8) if t.dtype == torch.bool or t.dtype in _CODES else t
