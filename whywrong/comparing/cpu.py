"""The one pass of :func:`whywrong.compare` on a CPU: compiled by numba, as many threads as torch has, no large memory.

A piece of both tensors is brought to float64 in the cache, and every statistic is taken from there. Pieces are cut by
position alone and combined in order, so the result does not depend on the number of threads.
"""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numba
import numpy as np
import torch

from whywrong.comparing.statistics import Piece, Statistics, combine, pieces

PIECE_ELEMENTS = 1 << 15
"""Elements at a time: 256 KiB a tensor, and no more than torch converts on one thread."""

SLICE = 512
"""Elements of which the sums are taken first, and the places only where one is worth knowing."""

RUN = 32 * PIECE_ELEMENTS
"""Elements that a thread takes at a time."""

Array = np.ndarray

NOTHING = Statistics(*[0, -1, -1, -1], *[0.0] * 12, *[0] * 6)
"""Of no element."""


def measure(o: torch.Tensor, g: torch.Tensor, allowed: float | torch.Tensor | None) -> Statistics:
    """Every statistic of `o` against `g`; `allowed` is a number, a tensor of their shape or None: see compare."""
    info = torch.finfo(o.dtype) if o.is_floating_point() else None
    ulps = ulps_of(o.dtype)
    half, overflow, top = 0.0, math.inf, math.inf
    if allowed is None and info:
        half, overflow, top = 0.5, info.max * (1.0 + 0.25 * info.eps), info.max
    tensors = [o, g, allowed] if isinstance(allowed, torch.Tensor) else [o, g]
    number = np.array([0.0 if allowed is None or len(tensors) == 3 else allowed])

    def run(part: Piece) -> Statistics:
        found = NOTHING
        for start, piece in pieces(part, PIECE_ELEMENTS):
            x, y, *bound = (t.to("cpu", torch.float64).reshape(-1).numpy() for t in piece)
            found = gather(x, y, bound[0] if bound else number, start, ulps, half, overflow, top, found)
        return found

    if o.numel() <= RUN:
        return run((0, tensors))
    with ThreadPoolExecutor(min(torch.get_num_threads(), os.cpu_count() or 1)) as pool:
        return combine(list(pool.map(run, pieces((0, tensors), RUN))))


@cache
def ulps_of(dtype: torch.dtype) -> Array:
    """The unit in the last place of a dtype, by the exponent in a float64's bits; 1 for whole numbers."""
    if not dtype.is_floating_point:
        return np.ones(2048)
    info, exponents = torch.finfo(dtype), np.arange(2048) - 1023
    return np.ldexp(info.eps, np.maximum(exponents, int(math.log2(info.tiny))))


@numba.njit(nogil=True, cache=True, error_model="numpy")
def gather(
    o: Array, g: Array, bound: Array, at: int, ulps: Array, half: float, overflow: float, top: float, found: Statistics
) -> Statistics:
    """Statistics of a piece, which begins at place `at`, and of what was `found` before.

    An element may differ by its `bound` and by `half` of its unit in the last place; where |golden| is beyond
    `overflow`, Inf of its sign, `top` and NaN are correct too.
    """
    for j in range(0, len(o), SLICE):
        x, y, most = o[j : j + SLICE], g[j : j + SLICE], bound if len(bound) == 1 else bound[j : j + SLICE]
        unusual, summed = _sums(x, y, most, ulps, half, overflow, found)
        if unusual or (summed.mismatches > 0 and found.first < 0):
            found = _one_by_one(x, y, most, at + j, ulps, half, overflow, top, found)
        else:
            found = summed
    return found


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"reassoc"})
def _sums(
    o: Array, g: Array, bound: Array, ulps: Array, half: float, overflow: float, found: Statistics
) -> tuple[bool, Statistics]:
    """Whether a slice has what needs a place or a rule of its own: a number that is not finite or beyond `overflow`, or
    an error that is by some measure larger than what was found; and what was found, with its mismatches and sums.

    No branch depends on an element, so that the loop is compiled to vector instructions.
    """
    largest, relative, most_ulps, used, sum_abs, sum_dd, sum_gg, sum_dg = found[8:16]
    o_zero, g_zero = found[20:]
    bits, step, unusual, wrong = g.view(np.int64), 0 if len(bound) == 1 else 1, False, 0
    for j in range(len(o)):
        x, y = o[j], g[j]
        d, scale = x - y, abs(y)
        size, ulp = abs(d), ulps[(bits[j] >> 52) & 2047]
        limit = bound[j * step] + half * ulp
        larger = (size > largest) | (size >= most_ulps * ulp) | (size >= used * limit)
        larger |= (scale > 0.0) & (size >= relative * scale)
        unusual |= (larger & (size > 0.0)) | (not size < math.inf) | (scale > overflow)
        wrong += not size <= limit
        sum_abs += size
        sum_dd += d * d
        sum_gg += y * y
        sum_dg += d * y
        o_zero += x == 0.0
        g_zero += y == 0.0
    sums = sum_abs, sum_dd, sum_gg, sum_dg
    return unusual, Statistics(found[0] + wrong, *found[1:12], *sums, *found[16:20], o_zero, g_zero)


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _one_by_one(
    o: Array, g: Array, bound: Array, at: int, ulps: Array, half: float, overflow: float, top: float, found: Statistics
) -> Statistics:
    """What :func:`gather` gives, element by element."""
    mismatches, first, worst, one_sided, worst_o, worst_g, one_o, one_g = found[:8]
    largest, relative, most_ulps, used, sum_abs, sum_dd, sum_gg, sum_dg = found[8:16]
    o_nan, g_nan, o_inf, g_inf, o_zero, g_zero = found[16:]
    bits, step = g.view(np.int64), 0 if len(bound) == 1 else 1
    for j in range(len(o)):
        x, y = o[j], g[j]
        d, scale = x - y, abs(y)
        size = abs(d)
        o_zero += x == 0.0
        g_zero += y == 0.0
        ulp = ulps[(bits[j] >> 52) & 2047]
        limit = bound[j * step] + half * ulp
        if scale > overflow and (math.isnan(x) or (abs(x) >= top and (x > 0.0) == (y > 0.0))):
            limit = math.inf
        if size < math.inf:
            right = size <= limit
            sum_abs += size
            sum_dd += d * d
            sum_gg += y * y
            sum_dg += d * y
            if size > largest:
                largest, worst, worst_o, worst_g = size, at + j, x, y
            # A quotient is taken only where it may be the largest: a product takes less time, and cannot hide it.
            if size >= most_ulps * ulp and size > 0.0:
                most_ulps = max(most_ulps, size / ulp)
            if size >= used * limit and size > 0.0:
                used = max(used, size / limit)
            if size >= relative * scale and size > 0.0 and scale > 0.0:
                relative = max(relative, size / scale)
        else:
            right = x == y or limit == math.inf or (math.isnan(x) and math.isnan(y))
            o_nan += math.isnan(x)
            g_nan += math.isnan(y)
            o_inf += math.isinf(x)
            g_inf += math.isinf(y)
            if not right and one_sided < 0:
                one_sided, one_o, one_g = at + j, x, y
        mismatches += not right
        if first < 0 and not right:
            first = at + j
    places = mismatches, first, worst, one_sided, worst_o, worst_g, one_o, one_g
    sizes = largest, relative, most_ulps, used, sum_abs, sum_dd, sum_gg, sum_dg
    return Statistics(*places, *sizes, o_nan, g_nan, o_inf, g_inf, o_zero, g_zero)
