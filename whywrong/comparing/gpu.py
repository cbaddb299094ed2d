"""The one pass of :func:`whywrong.compare` on a GPU: Triton, deterministic, no temporary of the data's size.

A few programs a multiprocessor stride through the tiles. A tile is first taken in float32: sums of a few elements a
thread, then float64 from tile to tile; and four maxima. When these say that something in the tile needs care (NaN or
Inf, a mismatch or nearly one, a range that float32 cannot square), the whole program takes the tile again from the
cache, exactly, in float64. So nothing is decided in float32: counts, indices and values are exact, sums have about
seven digits, and max_rel six. Each program writes its statistics, and one more combines them.
"""

from __future__ import annotations

import math
import os
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from whywrong.comparing.gpu_kernels import combined, statistics_of_tiles
from whywrong.comparing.launching import Compiled, aligned, launch, specialised
from whywrong.comparing.statistics import STATISTICS_FIELDS, Statistics

PROGRAMS_PER_SM = 4
TILE_SHAPES = {False: (2048, 4), True: (1024, 8)}
"""Elements of a tile and warps of a program, without and with a type of 64 bits: the fastest of 18 on an H100."""

_COMPILED: Compiled = {}


def measure(o: torch.Tensor, g: torch.Tensor, allowed: float | torch.Tensor | None) -> Statistics:
    """Every statistic of `o` against `g`; `allowed` is a number, a tensor of their shape or None: see compare."""
    return Statistics(*one_pass(o, g, allowed).tolist())


def one_pass(o: torch.Tensor, g: torch.Tensor, allowed: float | torch.Tensor | None) -> torch.Tensor:
    """As :func:`measure`, without waiting: every statistic, float64 [STATISTICS_FIELDS] on the device."""
    dtype, o, g = o.dtype, _readable(o), _readable(g)
    mode = 2 if isinstance(allowed, torch.Tensor) else 0 if allowed is None and dtype.is_floating_point else 1
    bound, number = (allowed, 0.0) if isinstance(allowed, torch.Tensor) else (o, allowed or 0.0)
    which = o.device, dtype, o.dtype, g.dtype, mode, o.shape, o.stride(), g.stride(), bound.stride()
    programs, walks, constants, key = _plan(*which)
    parts = torch.empty((len(STATISTICS_FIELDS), programs), dtype=torch.float64, device=o.device)
    statistics = parts.new_empty(len(STATISTICS_FIELDS))
    bits = int(np.float64(number).view(np.int64))  # a kernel would take a Python float as float32
    key = *key, bound.dtype, -(2**31) <= bits < 2**31, aligned(o, g, bound)
    with torch.cuda.device_of(o):
        given = o, g, bound, parts, o.numel(), bits, *walks
        launch(_COMPILED, key, statistics_of_tiles, (programs, 1, 1), *given, **constants)
        lanes = triton.next_power_of_2(programs)
        launch(_COMPILED, (o.device, programs), combined, (1, 1, 1), parts, statistics, programs, LANES=lanes)
    return statistics


@lru_cache(maxsize=256)
def _plan(
    device: torch.device,
    dtype: torch.dtype,
    o: torch.dtype,
    g: torch.dtype,
    mode: int,
    shape: torch.Size,
    *strides: tuple[int, ...],
) -> tuple[int, list[tuple[Any, ...]], dict[str, Any], tuple[Any, ...]]:
    """What follows from types, shape and strides alone: how many programs, what they walk, their constants, and the
    part of the key of the compiled form that these determine: not the shape, but what is compiled for it.

    `dtype` is that of the observed itself, `o` that in which it is read.
    """
    info = torch.finfo(dtype) if dtype.is_floating_point else None
    walks = walk(shape, *strides)
    reach = max(sum((n - 1) * s for n, s in zip(walks[0], steps, strict=True)) for steps in walks[1:])
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    tile, warps = TILE_SHAPES[max(o.itemsize, g.itemsize) > 4]
    real, narrow = [t.is_floating_point for t in (o, g)], max(o.itemsize, g.itemsize) <= 4
    constants = {
        "KIND": (tl.float32 if narrow else tl.float64) if all(real) else tl.float64 if any(real) else tl.int64,
        "EXPONENT": int(math.log2(info.tiny)) if info else 0,
        "MANTISSA": -int(math.log2(info.eps)) if info else 0,
        "LARGEST": info.max if info else 0.0,
        "MODE": mode,
        "LARGE": reach + tile >= 2**31,
        "DIMENSIONS": len(walks[0]),
        "TILE": tile,
        "THREADS": 32 * warps,
        "FAST": os.environ.get("TRITON_INTERPRET") != "1",
        "num_warps": warps,
    }
    integers = specialised(shape.numel(), *[size for walked in walks for size in walked])
    programs = min(-(-shape.numel() // tile), multiprocessors * PROGRAMS_PER_SM)
    return programs, walks, constants, (device, o, g, integers, *constants.values())


def walk(shape: torch.Size, *strides: tuple[int, ...]) -> list[tuple[Any, ...]]:
    """How strided tensors are walked together: sizes, the strides of each, and those of the row-major index.

    In the order of the first one's strides, the smallest innermost, and in the fewest dimensions.
    """
    logical = torch.empty(shape, device="meta").stride()
    dimensions = [dimension for dimension in zip(shape, *strides, logical, strict=True) if dimension[0] != 1]
    dimensions.sort(key=lambda dimension: -dimension[1])  # stable: row-major where strides are equal
    merged: list[tuple[int, ...]] = []
    for size, *steps in dimensions:
        if merged and all(outer == size * inner for outer, inner in zip(merged[-1][1:], steps, strict=True)):
            size *= merged.pop()[0]
        merged.append((size, *steps))
    return list(zip(*(merged or [(1,) * (len(strides) + 2)]), strict=True))


def _readable(t: torch.Tensor) -> torch.Tensor:
    """What any GPU and the interpreter can read: truth values as bytes, floats of 8 bits copied to float16."""
    if t.dtype == torch.bool:
        return t.view(torch.uint8)
    return t.half() if t.is_floating_point() and t.itemsize == 1 else t
