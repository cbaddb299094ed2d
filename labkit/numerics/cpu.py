"""The one pass of :func:`labkit.compare` on a CPU: compiled by numba, two threads or more, a few blocks of memory.

A block of both tensors is decoded to float64 in the first-level cache, and every statistic is taken from there.
Chunks are cut by position alone and combined in order, so the result does not depend on the number of threads.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numba
import numpy as np
import torch

from labkit.numerics.layout import Walk
from labkit.numerics.statistics import FIELDS, Format, Rule, Statistics, combine

BLOCK = 2048
CHUNK = 1 << 20
_LOSSY = {"nsz", "reassoc", "contract"}  # lets sums be vectorised; their squares may overflow
_BITS = {1: torch.uint8, 2: torch.int16}
_F = {name: i for i, name in enumerate(FIELDS)}


def measure(o: torch.Tensor, g: torch.Tensor, bound: torch.Tensor | None, walk: Walk, rule: Rule) -> Statistics:
    """Every statistic of `o` against `g`; `bound` is a float64 tensor of their shape when `rule` is elementwise."""
    operands = [_flat(t, strides, walk) for t, strides in zip((o, g), walk.strides, strict=False)]
    tables = [_table(o.dtype), _table(g.dtype)]
    allowed = _flat(bound, walk.strides[2], walk) if bound is not None else np.zeros(1)
    sizes = np.array(walk.sizes, np.int64)
    strides = np.zeros((4, len(walk.sizes)), np.int64)
    strides[: len(walk.strides)] = walk.strides
    strides[3] = walk.logical
    exact = not (o.is_floating_point() or g.is_floating_point())
    fixed = (*operands, *tables, allowed, sizes, strides, rule.number, rule.mode, exact, *_format(rule.format))

    def run(span: tuple[int, int]) -> np.ndarray:
        found = np.zeros(len(FIELDS))
        _chunk(*fixed, *span, walk.row_major, found)
        return found

    spans = list(_spans(walk.sizes))
    if len(spans) == 1:
        return combine([run(spans[0])])
    with ThreadPoolExecutor(min(len(spans), torch.get_num_threads(), os.cpu_count() or 1)) as pool:
        return combine(list(pool.map(run, spans)))


def _spans(sizes: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Ranges of rows x blocks of the innermost dimension, of about CHUNK elements each."""
    blocks = -(-sizes[-1] // BLOCK)
    total = math.prod(sizes[:-1]) * blocks
    step = max(1, CHUNK * blocks // max(1, sizes[-1]))
    for start in range(0, total, step):
        yield start, min(total, start + step)


def _flat(t: torch.Tensor, strides: tuple[int, ...], walk: Walk) -> np.ndarray:
    """The memory that `t` reaches, as one contiguous array; floats of 16 and 8 bits as their bits."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(walk.sizes, strides, strict=True))
    flat = t.as_strided((extent,), (1,))
    if t.is_floating_point() and t.element_size() <= 2:
        flat = flat.view(_BITS[t.element_size()])
    elif t.dtype == torch.bool:
        flat = flat.view(torch.uint8)
    array = flat.numpy()
    return array.view(np.uint16) if array.dtype == np.int16 and t.is_floating_point() else array


@cache
def _table(dtype: torch.dtype) -> np.ndarray | None:
    """float32 value of each bit pattern of a float of 16 or 8 bits; None for the others."""
    if not dtype.is_floating_point or dtype.itemsize > 2:
        return None
    patterns = torch.arange(1 << 8 * dtype.itemsize, dtype=torch.int32)
    return patterns.to(_BITS[dtype.itemsize]).view(dtype).float().numpy()


def _format(f: Format | None) -> tuple[bool, int, int, float, float]:
    return (False, 0, 0, 0.0, 0.0) if f is None else (True, f.exponent, f.mantissa, f.largest, f.overflow)


def _jit(**options: Any) -> Any:
    return numba.njit(nogil=True, cache=True, error_model="numpy", **options)


@_jit()
def _decode(raw: Any, table: Any, at: int, step: int, n: int, out: Any) -> None:
    if table is None:
        if step == 1:
            for j in range(n):
                out[j] = raw[at + j]
        else:
            for j in range(n):
                out[j] = raw[at + j * step]
    else:
        for j in range(n):
            out[j] = table[raw[at + j * step]]


@_jit()
def _integer_difference(o: Any, at_o: int, step_o: int, g: Any, at_g: int, step_g: int, n: int, out: Any) -> None:
    for j in range(n):
        out[j] = np.int64(o[at_o + j * step_o]) - np.int64(g[at_g + j * step_g])


@_jit()
def _all_finite(bits: Any, n: int) -> bool:
    largest = np.int64(0)
    for j in range(n):
        largest = max(largest, bits[j] & np.int64(0x7FFFFFFFFFFFFFFF))
    return bool(largest < np.int64(0x7FF0000000000000))


@_jit(fastmath=_LOSSY)
def _sums(o: Any, g: Any, d: Any, n: int, s: Any) -> Any:
    total = absolute = dd = gg = dg = 0.0
    largest = relative = 0.0
    o_zero = g_zero = 0
    for j in range(n):
        difference = d[j]
        magnitude = abs(difference)
        total += difference
        absolute += magnitude
        dd += difference * difference
        gg += g[j] * g[j]
        dg += difference * g[j]
        largest = max(largest, magnitude)
        o_zero += o[j] == 0.0
        g_zero += g[j] == 0.0
        quotient = magnitude / abs(g[j])
        relative = max(relative, quotient if g[j] != 0.0 else 0.0)
    s[0] += total
    s[1] += absolute
    s[2] += dd
    s[3] += gg
    s[4] += dg
    s[5] += o_zero
    s[6] += g_zero
    s[7] = max(s[7], relative)
    return largest


@_jit()
def _ulps(d: Any, bits: Any, n: int, exponent: int, mantissa: int, out: Any) -> float:
    """Fill `out` with |d| in units of the last place at g (whose bits are given), return the largest."""
    largest = 0.0
    low = np.int64(exponent + 1023)
    for j in range(n):
        biased = max((bits[j] >> np.int64(52)) & np.int64(0x7FF), low)
        out[j] = np.int64(2047 - biased) << np.int64(52)  # the bits of 2^(1024 - biased)
    scale = 2.0 ** (mantissa - 1)
    values = out.view(np.float64)
    for j in range(n):
        values[j] = abs(d[j]) * values[j] * scale
        largest = max(largest, values[j])
    return largest


@_jit()
def _chunk(
    o_raw: Any, g_raw: Any, o_table: Any, g_table: Any, bound: Any, sizes: Any, strides: Any, number: float,
    mode: int, exact: bool, has_ulp: bool, exponent: int, mantissa: int, top: float, overflow: float,
    start: int, stop: int, row_major: bool, found: Any,
) -> None:  # fmt: skip
    o, g, d, b = np.empty(BLOCK), np.empty(BLOCK), np.empty(BLOCK), np.empty(BLOCK)
    units = np.empty(BLOCK, np.int64)
    s = np.zeros(8)
    first = np.int64(-1)
    worst = np.int64(-1)
    one_sided = np.int64(-1)
    worst_o = worst_g = one_o = one_g = 0.0
    largest = max_ulp = used = 0.0
    mismatches = 0
    o_nan = g_nan = o_inf = g_inf = 0
    inner = sizes[-1]
    blocks = (inner + BLOCK - 1) // BLOCK
    dims = len(sizes)
    base = np.zeros(4, np.int64)
    for k in range(start, stop):
        row, j0 = k // blocks, (k % blocks) * BLOCK
        n = min(BLOCK, inner - j0)
        for t in range(4):
            base[t] = j0 * strides[t, dims - 1]
        rest = row
        for i in range(dims - 2, -1, -1):
            index = rest % sizes[i]
            rest = rest // sizes[i]
            for t in range(4):
                base[t] += index * strides[t, i]
        step = strides[3, dims - 1]
        _decode(o_raw, o_table, base[0], strides[0, dims - 1], n, o)
        _decode(g_raw, g_table, base[1], strides[1, dims - 1], n, g)
        if exact:
            _integer_difference(o_raw, base[0], strides[0, dims - 1], g_raw, base[1], strides[1, dims - 1], n, d)
        else:
            for j in range(n):
                d[j] = o[j] - g[j]
        special = not _all_finite(d.view(np.int64), n)
        if special:
            for j in range(n):
                if math.isfinite(d[j]):
                    continue
                o_nan += math.isnan(o[j])
                g_nan += math.isnan(g[j])
                o_inf += math.isinf(o[j])
                g_inf += math.isinf(g[j])
                same = o[j] == g[j] or (math.isnan(o[j]) and math.isnan(g[j]))
                if mode == 2:
                    same = same or bound[base[2] + j * strides[2, dims - 1]] == math.inf
                elif mode == 1:
                    same = same or number == math.inf
                elif has_ulp and abs(g[j]) > overflow and not math.isnan(g[j]):
                    same = same or math.isnan(o[j]) or (abs(o[j]) >= top and (o[j] > 0.0) == (g[j] > 0.0))
                if not same:
                    mismatches += 1
                    at = base[3] + j * step
                    if first < 0 or at < first:
                        first = at
                    if one_sided < 0 or at < one_sided:
                        one_sided, one_o, one_g = at, o[j], g[j]
                # What is not finite on both sides stays out of the sums, but a zero is still counted.
                s[5] += (o[j] == 0.0) - 1
                s[6] += (g[j] == 0.0) - 1
                o[j] = g[j] = d[j] = 0.0
        top_of_block = _sums(o, g, d, n, s)
        if top_of_block > 0.0 and top_of_block >= largest:
            for j in range(n):
                if abs(d[j]) == top_of_block:
                    at = base[3] + j * step
                    if top_of_block > largest or worst < 0 or at < worst:
                        largest, worst, worst_o, worst_g = top_of_block, at, o[j], g[j]
                    if row_major:
                        break
        ulp_of_block = 0.0
        if has_ulp:
            ulp_of_block = _ulps(d, g.view(np.int64), n, exponent, mantissa, units)
            max_ulp = max(max_ulp, ulp_of_block)
        if mode == 2:
            at_b, step_b = base[2], strides[2, dims - 1]
            for j in range(n):
                b[j] = bound[at_b + j * step_b]
            for j in range(n):
                if d[j] != 0.0:
                    used = max(used, abs(d[j]) / b[j])
                    if not (abs(d[j]) <= b[j] and (b[j] > 0.0 or not exact)):
                        mismatches += 1
                        at = base[3] + j * step
                        if first < 0 or at < first:
                            first = at
        elif mode == 1:
            if top_of_block > 0.0:
                used = max(used, top_of_block / number)
            if top_of_block > 0.0 and not (top_of_block <= number and (number > 0.0 or not exact)):
                for j in range(n):
                    if d[j] != 0.0 and not (abs(d[j]) <= number and (number > 0.0 or not exact)):
                        mismatches += 1
                        at = base[3] + j * step
                        if first < 0 or at < first:
                            first = at
        elif has_ulp:
            if ulp_of_block > 0.5:
                ulps = units.view(np.float64)
                for j in range(n):
                    saturated = abs(g[j]) > overflow and abs(o[j]) == top and (o[j] > 0.0) == (g[j] > 0.0)
                    if ulps[j] > 0.5 and not saturated:
                        used = max(used, 2.0 * ulps[j])
                        mismatches += 1
                        at = base[3] + j * step
                        if first < 0 or at < first:
                            first = at
                    elif not saturated:
                        used = max(used, 2.0 * ulps[j])
            else:
                used = max(used, 2.0 * ulp_of_block)
        elif top_of_block > 0.0:
            used = math.inf
            for j in range(n):
                if d[j] != 0.0:
                    mismatches += 1
                    at = base[3] + j * step
                    if first < 0 or at < first:
                        first = at
    found[0], found[1], found[2], found[3] = mismatches, first, worst, one_sided
    found[4], found[5], found[6], found[7] = worst_o, worst_g, one_o, one_g
    found[8], found[9], found[10], found[11] = largest, s[7], max_ulp, used
    found[12], found[13], found[14], found[15], found[16] = s[0], s[1], s[2], s[3], s[4]
    found[17], found[18], found[19], found[20], found[21], found[22] = o_nan, g_nan, o_inf, g_inf, s[5], s[6]
