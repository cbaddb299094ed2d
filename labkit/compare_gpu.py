"""The one pass of :func:`labkit.compare` on a GPU: Triton, deterministic, no temporary of the data's size.

A few hundred programs stride through the tiles; each keeps its statistics in registers, lane by lane, and writes one row at
the end; a second launch of one program combines the rows. Only that result is read back. What is rare (NaN, Inf, the first
mismatch) is looked at tile by tile, behind a branch that all lanes take together. For pairs of float32 or
narrower the relative error and the search for the largest are in float32, all else in float64.
"""

from __future__ import annotations

import math
import struct

import torch
import triton
import triton.language as tl

from labkit.layout import Walk
from labkit.statistics import FIELDS, Rule, Statistics

TILE, WARPS, PROGRAMS_PER_SM = 1024, 4, 4
_ROWS = 32  # FIELDS, padded to a power of two


def measure(o: torch.Tensor, g: torch.Tensor, bound: torch.Tensor | None, walk: Walk, rule: Rule) -> Statistics:
    """Every statistic of `o` against `g`; `bound` is a float64 tensor of their shape when `rule` is elementwise."""
    return Statistics(tuple(launch(o, g, bound, walk, rule).tolist()))


def launch(
    o: torch.Tensor, g: torch.Tensor, bound: torch.Tensor | None, walk: Walk, rule: Rule,
    tile: int = TILE, warps: int = WARPS, programs_per_sm: int = PROGRAMS_PER_SM, stages: int = 2,
) -> torch.Tensor:  # fmt: skip
    """As :func:`measure`, without waiting: the statistics as a float64 tensor on the device."""
    count = o.numel()
    programs = min(-(-count // tile), _multiprocessors(o.device) * programs_per_sm)
    parts = torch.empty((_ROWS, programs), dtype=torch.float64, device=o.device)
    result = torch.empty(_ROWS, dtype=torch.float64, device=o.device)
    strides = [*walk.strides, *([walk.strides[0]] if bound is None else []), walk.logical]
    wide = any(t.dtype.itemsize > 4 or not t.is_floating_point() for t in (o, g))
    form = rule.format
    reach = max(sum((n - 1) * s for n, s in zip(walk.sizes, one, strict=True)) for one in strides)
    _pass[(programs,)](
        _bytes(o), _bytes(g), o if bound is None else bound, parts, count, programs, _bits(rule.number),
        walk.sizes, *(tuple(one) for one in strides),
        NARROW=not wide, INTEGERS=not (o.is_floating_point() or g.is_floating_point()), HAS_ULP=form is not None,
        EXPONENT=form.exponent if form else 0, MANTISSA=form.mantissa if form else 0,
        LARGEST=form.largest if form else 0.0, OVERFLOW=form.overflow if form else 0.0,
        MODE=rule.mode, ANYTHING=rule.number == math.inf, POSITIVE=rule.number > 0.0, LINEAR=walk.linear, ROW_MAJOR=walk.row_major, LARGE=reach + tile >= 2**31,
        DIMENSIONS=len(walk.sizes), TILE=tile, STAGES=stages, O_CODE=_CODES.get(o.dtype, 0), G_CODE=_CODES.get(g.dtype, 0), num_warps=warps,
    )  # fmt: skip
    _combine[(1,)](parts, result, programs, _bits(rule.number), MODE=rule.mode, ROWS=_ROWS,
                   WIDTH=triton.next_power_of_2(programs), num_warps=8)  # fmt: skip
    return result[: len(FIELDS)]


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def _bits(number: float) -> int:
    """The bits of a float64: a kernel would take a Python float as float32."""
    return int.from_bytes(struct.pack("<d", number), "little", signed=True)


_CODES = {torch.float8_e4m3fn: 1, torch.float8_e5m2: 2}


def _bytes(t: torch.Tensor) -> torch.Tensor:
    """What the kernel reads: floats of 8 bits and truth values as bytes, so that every GPU and the interpreter can."""
    return t.view(torch.uint8) if t.dtype == torch.bool or t.dtype in _CODES else t


@triton.jit
def _decoded(raw, CODE: tl.constexpr):
    """The values of a float of 8 bits, by way of float16: e5m2 is its upper byte, e4m3fn has its exponent 2^8 away."""
    if CODE == 0:
        return raw
    bits = raw.to(tl.int16)
    if CODE == 2:
        return (bits << 8).to(tl.float16, bitcast=True).to(tl.float32)
    value = ((bits & 127) << 7).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    value = tl.where((bits & 127) == 127, float("nan"), value)
    return tl.where((bits & 128) != 0, -value, value)


@triton.jit
def _offsets(index, sizes, strides, DIMENSIONS: tl.constexpr):
    offset = index * 0
    rest = index
    for i in tl.static_range(DIMENSIONS - 1, 0, -1):
        quotient = rest // sizes[i]
        offset += (rest - quotient * sizes[i]) * strides[i]
        rest = quotient
    return offset + rest * strides[0]


@triton.jit
def _exact_zero(d, o, g, INTEGERS: tl.constexpr):
    if INTEGERS:
        return o == g
    else:
        return d == 0.0


@triton.jit
def _pass(
    o_ptr, g_ptr, b_ptr, parts_ptr, count, programs, number_bits,
    sizes, o_strides, g_strides, b_strides, logical,
    NARROW: tl.constexpr, INTEGERS: tl.constexpr, HAS_ULP: tl.constexpr, EXPONENT: tl.constexpr,
    MANTISSA: tl.constexpr, LARGEST: tl.constexpr, OVERFLOW: tl.constexpr, MODE: tl.constexpr,
    ANYTHING: tl.constexpr, POSITIVE: tl.constexpr, LINEAR: tl.constexpr, ROW_MAJOR: tl.constexpr, LARGE: tl.constexpr,
    DIMENSIONS: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, O_CODE: tl.constexpr, G_CODE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    lanes = tl.arange(0, TILE)
    tiles = tl.cdiv(count, TILE)
    inf = float("inf")
    number = number_bits.to(tl.int64).to(tl.float64, bitcast=True)
    none = 9.0e15  # beyond any index; float64 holds indices exactly up to here

    zero = tl.zeros([TILE], tl.float64)
    sum_d, sum_abs, sum_dd, sum_gg, sum_dg = zero, zero, zero, zero, zero
    if NARROW:
        small = tl.zeros([TILE], tl.float32)
    else:
        small = zero
    largest, relative, ulps, used = small - 1.0, small, zero, zero
    at = tl.zeros([TILE], tl.int32) - 1
    mismatches, o_zero, g_zero = (tl.zeros([TILE], tl.int32), tl.zeros([TILE], tl.int32), tl.zeros([TILE], tl.int32))
    first = tl.full((), none, tl.float64)
    one_sided = tl.full((), none, tl.float64)
    o_nan = tl.full((), 0, tl.int64)
    g_nan, o_inf, g_inf = o_nan, o_nan, o_nan

    rounds = tl.cdiv(tiles - program, programs).to(tl.int32)
    for i in tl.range(0, rounds, num_stages=STAGES):
        start = (program + i * programs.to(tl.int64)) * TILE
        inside = lanes < count - start
        if LINEAR:
            o = tl.load(o_ptr + start + lanes, mask=inside, other=0.0)
            g = tl.load(g_ptr + start + lanes, mask=inside, other=0.0)
        else:
            if LARGE:
                index = start + lanes
            else:
                index = start.to(tl.int32) + lanes
            o = tl.load(o_ptr + _offsets(index, sizes, o_strides, DIMENSIONS), mask=inside, other=0.0)
            g = tl.load(g_ptr + _offsets(index, sizes, g_strides, DIMENSIONS), mask=inside, other=0.0)
        o, g = _decoded(o, O_CODE), _decoded(g, G_CODE)
        if INTEGERS:
            d = (o.to(tl.int64) - g.to(tl.int64)).to(tl.float64)
        else:
            d = o.to(tl.float64) - g.to(tl.float64)
        g64 = g.to(tl.float64)
        if NARROW:
            o_value, g_value = o.to(tl.float32), g.to(tl.float32)
            magnitude = tl.abs(d.to(tl.float32))
        else:
            o_value, g_value = o.to(tl.float64), g64
            magnitude = tl.abs(d)
        if MODE == 2:
            if LINEAR:
                allowed = tl.load(b_ptr + start + lanes, mask=inside, other=0.0)
            else:
                allowed = tl.load(b_ptr + _offsets(index, sizes, b_strides, DIMENSIONS), mask=inside, other=0.0)

        if HAS_ULP:
            if NARROW:
                biased = tl.maximum((g_value.to(tl.int32, bitcast=True) >> 23) & 255, EXPONENT + 127)
                exponent = (1150 + MANTISSA - biased).to(tl.int64)
                share = tl.abs(d) * (exponent << 52).to(tl.float64, bitcast=True)  # 2^(127 + MANTISSA - biased)
            else:
                biased = tl.maximum((g_value.to(tl.int64, bitcast=True) >> 52) & 2047, EXPONENT + 1023)
                scale = ((2047 - biased) << 52).to(tl.float64, bitcast=True)  # 2^(1024 - biased)
                share = tl.abs(d) * scale * (2.0 ** (MANTISSA - 1))
        if MODE == 2:
            wrong = (tl.abs(d) <= allowed) == 0
            if INTEGERS:
                wrong = wrong | (allowed <= 0.0)
            wrong = wrong & (_exact_zero(d, o, g, INTEGERS) == 0)
        elif MODE == 1:
            wrong = (tl.abs(d) <= number) == 0
            if INTEGERS:
                wrong = (wrong & (o != g)) if POSITIVE else o != g
        elif HAS_ULP:
            wrong = (share <= 0.5) == 0
        else:
            wrong = _exact_zero(d, o, g, INTEGERS) == 0

        finite = (tl.abs(d) < inf) & inside
        look = tl.where(finite == inside, 0, 1)
        if MODE == 0 or not ROW_MAJOR:
            look = look | wrong.to(tl.int32)
        else:
            look = look | (wrong.to(tl.int32) * tl.where(first == none, 1, 0))
        if tl.max(look, axis=0) > 0:
            both_nan = (o_value != o_value) & (g_value != g_value)
            same = (o_value == g_value) | both_nan
            if INTEGERS:
                same = o == g
            if MODE == 2:
                same = same | (allowed == inf)
            elif MODE == 1:
                if ANYTHING:
                    same = inside
            elif HAS_ULP:
                beyond = (tl.abs(g_value) > OVERFLOW) & ((tl.abs(o_value) >= LARGEST) | (o_value != o_value))
                same = same | (beyond & (((o_value > 0) == (g_value > 0)) | (o_value != o_value)))
            wrong = wrong & (same == 0) & inside
            if LINEAR:
                place = start + lanes
            else:
                place = _offsets(start + lanes, sizes, logical, DIMENSIONS)
            where = place.to(tl.float64)
            first = tl.minimum(first, tl.min(tl.where(wrong, where, none), axis=0))
            one_sided = tl.minimum(one_sided, tl.min(tl.where(wrong & (finite == 0), where, none), axis=0))
            o_nan += tl.sum(((o_value != o_value) & inside).to(tl.int64), axis=0)
            g_nan += tl.sum(((g_value != g_value) & inside).to(tl.int64), axis=0)
            o_inf += tl.sum(((tl.abs(o_value) == inf) & inside).to(tl.int64), axis=0)
            g_inf += tl.sum(((tl.abs(g_value) == inf) & inside).to(tl.int64), axis=0)
            d = tl.where(finite, d, 0.0)
            g64 = tl.where(finite, g64, 0.0)
            magnitude = tl.where(finite, magnitude, 0.0)
            if HAS_ULP:
                share = tl.where(finite, share, 0.0)
            if MODE == 0:
                if HAS_ULP:
                    used = tl.maximum(used, tl.where(same | (finite == 0), 0.0, share * 2.0))

        sum_d += d
        sum_abs += tl.abs(d)
        sum_dd += d * d
        sum_gg += g64 * g64
        sum_dg += d * g64
        mismatches += (wrong & inside).to(tl.int32)
        o_zero += ((o_value == 0) & inside).to(tl.int32)
        g_zero += ((g_value == 0) & inside).to(tl.int32)
        larger = magnitude > largest
        largest = tl.where(larger, magnitude, largest)
        at = tl.where(larger, i, at)
        if NARROW:
            quotient = tl.div_rn(magnitude, tl.abs(g_value))
        else:
            quotient = magnitude / tl.abs(g_value)
        relative = tl.maximum(relative, tl.where((g64 != 0.0), quotient, 0.0))
        if HAS_ULP:
            ulps = tl.maximum(ulps, share)
        if MODE == 2:
            used = tl.maximum(used, tl.where(d != 0.0, tl.abs(d) / allowed, 0.0))

    best = tl.max(largest, axis=0)
    lane_place = (program + at.to(tl.int64) * programs) * TILE + lanes
    if LINEAR:
        lane_logical = lane_place
    else:
        lane_logical = _offsets(lane_place, sizes, logical, DIMENSIONS)
    worst = tl.min(tl.where((largest == best) & (at >= 0), lane_logical.to(tl.float64), none), axis=0)
    walked = tl.min(tl.where((largest == best) & (at >= 0) & (lane_logical.to(tl.float64) == worst), lane_place, 1 << 62))
    if LINEAR:
        o_worst = _decoded(tl.load(o_ptr + walked), O_CODE).to(tl.float64)
        g_worst = _decoded(tl.load(g_ptr + walked), G_CODE).to(tl.float64)
    else:
        o_worst = _decoded(tl.load(o_ptr + _offsets(walked, sizes, o_strides, DIMENSIONS)), O_CODE).to(tl.float64)
        g_worst = _decoded(tl.load(g_ptr + _offsets(walked, sizes, g_strides, DIMENSIONS)), G_CODE).to(tl.float64)
    o_one, g_one = o_worst * 0.0, g_worst * 0.0
    if one_sided < none:
        place = _walked(one_sided.to(tl.int64), sizes, logical, DIMENSIONS, LINEAR)
        if LINEAR:
            o_one = _decoded(tl.load(o_ptr + place), O_CODE).to(tl.float64)
            g_one = _decoded(tl.load(g_ptr + place), G_CODE).to(tl.float64)
        else:
            o_one = _decoded(tl.load(o_ptr + _offsets(place, sizes, o_strides, DIMENSIONS)), O_CODE).to(tl.float64)
            g_one = _decoded(tl.load(g_ptr + _offsets(place, sizes, g_strides, DIMENSIONS)), G_CODE).to(tl.float64)
    ulps_used = tl.max(ulps, axis=0)
    used_most = tl.max(used, axis=0)
    if MODE == 0:
        if HAS_ULP:
            used_most = tl.maximum(used_most, tl.minimum(ulps_used * 2.0, 1.0))
    row = parts_ptr + program
    tl.store(row, tl.sum(mismatches.to(tl.int64), axis=0).to(tl.float64))
    tl.store(row + 1 * programs, first)
    tl.store(row + 2 * programs, worst)
    tl.store(row + 3 * programs, one_sided)
    tl.store(row + 4 * programs, o_worst)
    tl.store(row + 5 * programs, g_worst)
    tl.store(row + 6 * programs, o_one)
    tl.store(row + 7 * programs, g_one)
    tl.store(row + 8 * programs, best.to(tl.float64))
    tl.store(row + 9 * programs, tl.max(relative, axis=0).to(tl.float64))
    tl.store(row + 10 * programs, ulps_used)
    tl.store(row + 11 * programs, used_most)
    tl.store(row + 12 * programs, tl.sum(sum_d, axis=0))
    tl.store(row + 13 * programs, tl.sum(sum_abs, axis=0))
    tl.store(row + 14 * programs, tl.sum(sum_dd, axis=0))
    tl.store(row + 15 * programs, tl.sum(sum_gg, axis=0))
    tl.store(row + 16 * programs, tl.sum(sum_dg, axis=0))
    tl.store(row + 17 * programs, o_nan.to(tl.float64))
    tl.store(row + 18 * programs, g_nan.to(tl.float64))
    tl.store(row + 19 * programs, o_inf.to(tl.float64))
    tl.store(row + 20 * programs, g_inf.to(tl.float64))
    tl.store(row + 21 * programs, tl.sum(o_zero.to(tl.int64), axis=0).to(tl.float64))
    tl.store(row + 22 * programs, tl.sum(g_zero.to(tl.int64), axis=0).to(tl.float64))


@triton.jit
def _walked(place, sizes, logical, DIMENSIONS: tl.constexpr, LINEAR: tl.constexpr):
    """The position in the walk of the element whose row-major index is `place`."""
    if LINEAR:
        return place
    else:
        found = place * 0
        for i in tl.static_range(DIMENSIONS):
            found = found * sizes[i] + (place // logical[i]) % sizes[i]
        return found


@triton.jit
def _combine(parts_ptr, out_ptr, programs, number_bits, MODE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    column = tl.arange(0, WIDTH)
    inside = column < programs
    none = 9.0e15
    largest = tl.load(parts_ptr + 8 * programs + column, mask=inside, other=-1.0)
    best = tl.max(largest, axis=0)
    worst = tl.load(parts_ptr + 2 * programs + column, mask=inside & (largest == best), other=none)
    one = tl.load(parts_ptr + 3 * programs + column, mask=inside, other=none)
    first = tl.load(parts_ptr + programs + column, mask=inside, other=none)
    for row in tl.static_range(ROWS):
        if row == 0 or (row >= 12 and row < 23):
            tl.store(out_ptr + row, tl.sum(tl.load(parts_ptr + row * programs + column, mask=inside, other=0.0), axis=0))
        elif row >= 9 and row < 12:
            tl.store(out_ptr + row, tl.max(tl.load(parts_ptr + row * programs + column, mask=inside, other=0.0), axis=0))
    if MODE == 1:
        share = best / number_bits.to(tl.int64).to(tl.float64, bitcast=True)
        tl.store(out_ptr + 11, tl.where(best > 0.0, share, 0.0))
    at = tl.min(worst, axis=0)
    owner = tl.min(tl.where(worst == at, column, WIDTH), axis=0)
    moved = best > 0.0
    tl.store(out_ptr + 2, tl.where(moved, at, -1.0))
    tl.store(out_ptr + 4, tl.load(parts_ptr + 4 * programs + owner))
    tl.store(out_ptr + 5, tl.load(parts_ptr + 5 * programs + owner))
    tl.store(out_ptr + 8, best)
    at = tl.min(one, axis=0)
    owner = tl.min(tl.where(one == at, column, WIDTH), axis=0)
    tl.store(out_ptr + 3, tl.where(at < none, at, -1.0))
    tl.store(out_ptr + 6, tl.load(parts_ptr + 6 * programs + owner))
    tl.store(out_ptr + 7, tl.load(parts_ptr + 7 * programs + owner))
    at = tl.min(first, axis=0)
    tl.store(out_ptr + 1, tl.where(at < none, at, -1.0))
