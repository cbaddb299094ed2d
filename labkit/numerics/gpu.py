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
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch

from labkit.numerics import launching
from labkit.numerics.gpu_kernels import SCALE, combine, one_pass
from labkit.numerics.launching import Compiled, aligned
from labkit.numerics.layout import Walk
from labkit.numerics.statistics import FIELDS, NUMBER, Format, Rule, Statistics

TILE, WARPS, PROGRAMS_PER_SM = 2048, 4, 4
ROWS = 32  # FIELDS, padded to a power of two
_CODES = {torch.float8_e4m3fn: 1, torch.float8_e5m2: 2}


def measure(o: torch.Tensor, g: torch.Tensor, bound: torch.Tensor | None, walk: Walk, rule: Rule) -> Statistics:
    """Every statistic of `o` against `g`; `bound` is a float64 tensor of their shape when `rule` is elementwise."""
    # The last kernel writes to host memory that is pinned, so that waiting for it is all that reading takes.
    result = torch.empty(ROWS, dtype=torch.float64, pin_memory=o.is_cuda)
    if o.is_cuda and o.device.index != torch.cuda.current_device():
        with torch.cuda.device(o.device):
            launch(o, g, bound, walk, rule, result)
    else:
        launch(o, g, bound, walk, rule, result)
    if o.is_cuda:
        torch.cuda.current_stream(o.device).synchronize()
    return Statistics(*result.tolist()[: len(FIELDS)])


def launch(
    o: torch.Tensor, g: torch.Tensor, bound: torch.Tensor | None, walk: Walk, rule: Rule, result: torch.Tensor,
    tile: int = TILE, warps: int = WARPS, programs_per_sm: int = PROGRAMS_PER_SM, stages: int | None = None,
) -> None:  # fmt: skip
    """As :func:`measure`, without waiting: fills `result`, float64 [32], which the device can write to."""
    anything = rule.mode == NUMBER and rule.number == math.inf
    plan = _plan(
        o.device, o.dtype, g.dtype, bound is not None, walk, rule.mode, rule.format, anything, rule.number > 0.0,
        tile, warps, programs_per_sm, stages,
    )  # fmt: skip
    parts = torch.empty((ROWS, plan.programs), dtype=torch.float64, device=o.device)
    near = min(rule.number * SCALE * (1.0 - 1e-6), 3e38)
    number = _bits(rule.number)
    third = o if bound is None else bound
    short = number >> 31 in (0, -1)
    launching.launch(
        plan.compiled, (short, aligned(o, g, third)), one_pass, (plan.programs, 1, 1),
        _bytes(o), _bytes(g), third, parts, plan.count, plan.programs, number, near, *plan.shape, *plan.constants,
        num_warps=warps,
    )  # fmt: skip
    launching.launch(
        plan.compiled, short, combine, (1, 1, 1),
        parts, result, plan.programs, number, rule.mode, ROWS, 1 << (plan.programs - 1).bit_length(), num_warps=8,
    )  # fmt: skip


@dataclass(frozen=True)
class _Plan:
    """What follows from types, shapes and rule alone; and the kernels that were compiled for them."""

    count: int
    programs: int
    shape: tuple[tuple[int, ...], ...]
    """Sizes, strides of the three tensors, row-major strides."""
    constants: tuple[Any, ...]
    """What one_pass is compiled for, in the order of its parameters."""
    compiled: Compiled


@lru_cache(maxsize=256)
def _plan(
    device: torch.device, observed: torch.dtype, golden: torch.dtype, has_bound: bool, walk: Walk,
    mode: int, form: Format | None, anything: bool, positive: bool,
    tile: int, warps: int, programs_per_sm: int, stages: int | None,
) -> _Plan:  # fmt: skip
    count = math.prod(walk.sizes)
    programs = min(-(-count // tile), _multiprocessors(device) * programs_per_sm)
    stages = (3 if max(observed.itemsize, golden.itemsize) <= 4 else 1) if stages is None else stages
    strides = (*walk.strides, *(() if has_bound else (walk.strides[0],)), walk.logical)
    reach = max(sum((n - 1) * s for n, s in zip(walk.sizes, one, strict=True)) for one in strides)
    constants = {
        "WIDE": any(kind.itemsize > 4 or not kind.is_floating_point for kind in (observed, golden)),
        "INTEGERS": not (observed.is_floating_point or golden.is_floating_point),
        "HAS_ULP": form is not None, "EXPONENT": form.exponent if form else 0, "MANTISSA": form.mantissa if form else 0,
        "LARGEST": form.largest if form else 0.0, "OVERFLOW": form.overflow if form else 0.0, "MODE": mode,
        "ANYTHING": anything, "POSITIVE": positive,
        "LINEAR": walk.linear, "LARGE": reach + tile >= 2**31, "DIMENSIONS": len(walk.sizes),
        "O_CODE": _CODES.get(observed, 0), "G_CODE": _CODES.get(golden, 0), "TILE": tile, "THREADS": 32 * warps,
        "VECTOR": 4, "STAGES": stages, "FAST": os.environ.get("TRITON_INTERPRET") != "1",
    }  # fmt: skip
    names = [name for name in one_pass.arg_names if name.isupper()]
    return _Plan(count, programs, (walk.sizes, *strides), tuple(constants[name] for name in names), {})


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _bits(number: float) -> int:
    """The bits of a float64: a kernel would take a Python float as float32."""
    return int.from_bytes(struct.pack("<d", number), "little", signed=True)


def _bytes(t: torch.Tensor) -> torch.Tensor:
    """What the kernel reads: floats of 8 bits and truth values as bytes, so that every GPU and the interpreter can."""
    return t.view(torch.uint8) if t.dtype == torch.bool or t.dtype in _CODES else t
