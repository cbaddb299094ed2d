"""The Triton kernels of :mod:`labkit.numerics.gpu`: one pass over the tiles, and the launch that combines its rows."""

from __future__ import annotations

import triton
import triton.language as tl

from labkit.numerics.gpu_parts import decoded, in_ulps, offsets, quotient, thread_max, thread_sum, walked

SCALE = 2.0**40
_NONE = tl.constexpr(9.0e15)  # beyond any index; float64 holds indices exactly up to here
_SCALE = tl.constexpr(SCALE)  # on differences in float32: they are small, and their squares smaller
_LEAST, _MOST = tl.constexpr(1e-15), tl.constexpr(1e17)  # what float32 can square and sum


@triton.jit(do_not_specialize=["number_bits"])
def one_pass(
    o_ptr, g_ptr, b_ptr, parts_ptr, count, programs, number_bits, near,
    sizes, o_strides, g_strides, b_strides, logical,
    WIDE: tl.constexpr, INTEGERS: tl.constexpr, HAS_ULP: tl.constexpr, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr,
    LARGEST: tl.constexpr, OVERFLOW: tl.constexpr, MODE: tl.constexpr, ANYTHING: tl.constexpr, POSITIVE: tl.constexpr,
    LINEAR: tl.constexpr, LARGE: tl.constexpr, DIMENSIONS: tl.constexpr, O_CODE: tl.constexpr, G_CODE: tl.constexpr,
    TILE: tl.constexpr, THREADS: tl.constexpr, VECTOR: tl.constexpr, STAGES: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Statistics of a strided share of the tiles, one row of `parts_ptr` a statistic, one column a program."""
    program = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, TILE)
    threads = tl.arange(0, THREADS)
    inf = float("inf")
    number = number_bits.to(tl.int64).to(tl.float64, bitcast=True)

    zero = tl.zeros([THREADS], tl.float64)
    sum_d, sum_abs, sum_dd, sum_gg, sum_dg = zero, zero, zero, zero, zero
    relative, ulps, used = zero, zero, zero
    largest = zero
    at = tl.zeros([THREADS], tl.int32)
    o_zero, g_zero, mismatches = at, at, at
    first = tl.full([THREADS], _NONE, tl.float64)
    one_sided = first
    o_nan, g_nan, o_inf, g_inf = at, at, at, at

    rounds = tl.cdiv(tl.cdiv(count, TILE) - program, programs).to(tl.int32)
    for i in tl.range(0, rounds, num_stages=STAGES):
        start = (program + i * programs) * TILE
        inside = lanes < count - start
        index = start + lanes if LARGE or LINEAR else start.to(tl.int32) + lanes
        o = tl.load(o_ptr + offsets(index, sizes, o_strides, DIMENSIONS, LINEAR), mask=inside, other=0.0)
        g = tl.load(g_ptr + offsets(index, sizes, g_strides, DIMENSIONS, LINEAR), mask=inside, other=0.0)
        o, g = decoded(o, O_CODE), decoded(g, G_CODE)
        if INTEGERS:
            d = (o.to(tl.int64) - g.to(tl.int64)).to(tl.float32) * _SCALE
        elif WIDE:
            d = (o.to(tl.float64) - g.to(tl.float64)).to(tl.float32) * _SCALE
        else:
            d = (o.to(tl.float32) - g.to(tl.float32)) * _SCALE
        v = g.to(tl.float32)
        a = tl.abs(d)
        most = thread_max(a.to(tl.int32, bitcast=True), THREADS, VECTOR).to(
            tl.float32, bitcast=True
        )  # as integers: NaN is largest
        most_golden = thread_max(tl.abs(v), THREADS, VECTOR)
        ratio = thread_max(quotient(a, tl.abs(v), FAST), THREADS, VECTOR)
        care = ((most < _MOST) & (most_golden < _MOST)) == 0
        care = care | (ratio == inf)
        care = care | ((most > 0.0) & (most < _LEAST)) | ((most_golden > 0.0) & (most_golden < _LEAST))
        if HAS_ULP:
            biased = tl.maximum((v.to(tl.int32, bitcast=True) >> 23) & 255, EXPONENT + 127)
            share = thread_max(
                a * ((255 - biased) << 23).to(tl.float32, bitcast=True), THREADS, VECTOR
            )  # times 2^(128 - biased)
            share = share.to(tl.float64) * (2.0 ** (MANTISSA - 1) / _SCALE)
            care = care | ((share < inf) == 0)
        if MODE == 2:
            allowed = tl.load(b_ptr + offsets(index, sizes, b_strides, DIMENSIONS, LINEAR), mask=inside, other=1.0)
            part = quotient(a, allowed.to(tl.float32) * _SCALE, FAST)
            part = thread_max(tl.where(part == part, part, inf), THREADS, VECTOR)
            care = care | (part >= 1.0 - 1e-5)
        elif MODE == 1:
            care = care | ((most >= near) & (most > 0.0))
        elif HAS_ULP:
            care = care | (share > 0.5 - 1e-6)
        else:
            care = care | (most > 0.0)
        if tl.max(care.to(tl.int32), axis=0) > 0:
            for j in range(TILE // THREADS):
                spot = start + j * THREADS + threads
                there = spot < count
                o1 = tl.load(o_ptr + offsets(spot, sizes, o_strides, DIMENSIONS, LINEAR), mask=there, other=0.0)
                g1 = tl.load(g_ptr + offsets(spot, sizes, g_strides, DIMENSIONS, LINEAR), mask=there, other=0.0)
                o1, g1 = decoded(o1, O_CODE), decoded(g1, G_CODE)
                x, y = o1.to(tl.float64), g1.to(tl.float64)
                if INTEGERS:
                    e = (o1.to(tl.int64) - g1.to(tl.int64)).to(tl.float64)
                    same = o1 == g1
                else:
                    e = x - y
                    same = (x == y) | ((x != x) & (y != y))
                finite = tl.abs(e) < inf
                if HAS_ULP:
                    units = tl.where(finite, in_ulps(e, y, EXPONENT, MANTISSA), 0.0)
                    ulps = tl.maximum(ulps, units)
                if MODE == 2:
                    limit = tl.load(b_ptr + offsets(spot, sizes, b_strides, DIMENSIONS, LINEAR), mask=there, other=1.0)
                    used = tl.maximum(used, tl.where(finite & (e != 0.0), tl.abs(e) / limit, 0.0))
                    near_enough = (tl.abs(e) <= limit) & ((limit > 0.0) if INTEGERS else there)
                    same = same | near_enough | (limit == inf)
                elif MODE == 1:
                    if POSITIVE or not INTEGERS:
                        same = same | (tl.abs(e) <= number)
                    if ANYTHING:
                        same = there
                elif HAS_ULP:
                    beyond = (tl.abs(y) > OVERFLOW) & (tl.abs(x) >= LARGEST) & ((x > 0.0) == (y > 0.0))
                    same = same | beyond | ((tl.abs(y) > OVERFLOW) & (x != x))
                    used = tl.maximum(used, tl.where(same & (units > 0.5), 0.0, 2.0 * units))
                    same = same | (finite & (units <= 0.5))
                else:
                    used = tl.maximum(used, tl.where(same, 0.0, inf))
                wrong = there & (same == 0)
                place = offsets(spot, sizes, logical, DIMENSIONS, LINEAR).to(tl.float64)
                mismatches += wrong.to(tl.int32)
                first = tl.minimum(first, tl.where(wrong, place, _NONE))
                one_sided = tl.minimum(one_sided, tl.where(wrong & (finite == 0), place, _NONE))
                o_nan += (x != x).to(tl.int32)
                g_nan += (y != y).to(tl.int32)
                o_inf += (tl.abs(x) == inf).to(tl.int32)
                g_inf += (tl.abs(y) == inf).to(tl.int32)
                o_zero += (o1 == 0).to(tl.int32)
                g_zero += (g1 == 0).to(tl.int32)
                e = tl.where(finite, e, 0.0)
                y = tl.where(finite, y, 0.0)
                sum_d += e
                sum_abs += tl.abs(e)
                sum_dd += e * e
                sum_gg += y * y
                sum_dg += e * y
                relative = tl.maximum(relative, tl.where(y != 0.0, tl.abs(e) / tl.abs(y), 0.0))
                larger = tl.abs(e) > largest
                largest = tl.where(larger, tl.abs(e), largest)
                at = tl.where(larger, i, at)
        else:
            size = most.to(tl.float64) * (1.0 / _SCALE)
            larger = size > largest
            largest = tl.where(larger, size, largest)
            at = tl.where(larger, i, at)
            sum_d += thread_sum(d, THREADS, VECTOR).to(tl.float64) * (1.0 / _SCALE)
            sum_abs += thread_sum(a, THREADS, VECTOR).to(tl.float64) * (1.0 / _SCALE)
            sum_dd += thread_sum(d * d, THREADS, VECTOR).to(tl.float64) * (1.0 / _SCALE / _SCALE)
            sum_gg += thread_sum(v * v, THREADS, VECTOR).to(tl.float64)
            sum_dg += thread_sum(d * v, THREADS, VECTOR).to(tl.float64) * (1.0 / _SCALE)
            o_zero += thread_sum((o == 0).to(tl.int32), THREADS, VECTOR)
            g_zero += thread_sum((g == 0).to(tl.int32), THREADS, VECTOR)
            relative = tl.maximum(relative, ratio.to(tl.float64) * (1.0 / _SCALE))
            if HAS_ULP:
                ulps = tl.maximum(ulps, share)
                if MODE == 0:
                    used = tl.maximum(used, 2.0 * share)
            if MODE == 2:
                used = tl.maximum(used, part.to(tl.float64))

    # The largest difference of this program, exactly: its tile again.
    best = tl.max(largest, axis=0)
    round_of_best = tl.min(tl.where(largest == best, at, 2147483647), axis=0)
    start = (program + round_of_best.to(tl.int64) * programs) * TILE
    exact = zero - 1.0
    spot_of = (threads + start) * 0
    for j in range(TILE // THREADS):
        spot = start + j * THREADS + threads
        there = spot < count
        o1 = tl.load(o_ptr + offsets(spot, sizes, o_strides, DIMENSIONS, LINEAR), mask=there, other=0.0)
        g1 = tl.load(g_ptr + offsets(spot, sizes, g_strides, DIMENSIONS, LINEAR), mask=there, other=0.0)
        o1, g1 = decoded(o1, O_CODE), decoded(g1, G_CODE)
        if INTEGERS:
            e = tl.abs((o1.to(tl.int64) - g1.to(tl.int64)).to(tl.float64))
        else:
            e = tl.abs(o1.to(tl.float64) - g1.to(tl.float64))
        larger = there & (e < inf) & (e > exact)
        exact = tl.where(larger, e, exact)
        spot_of = tl.where(larger, spot, spot_of)
    best = tl.maximum(tl.max(exact, axis=0), 0.0)
    place = offsets(spot_of, sizes, logical, DIMENSIONS, LINEAR).to(tl.float64)
    worst = tl.min(tl.where(exact == best, place, _NONE), axis=0)
    spot = walked(tl.where(worst < _NONE, worst, 0.0).to(tl.int64), sizes, logical, DIMENSIONS, LINEAR)
    one = tl.min(one_sided, axis=0)
    spot_one = walked(tl.where(one < _NONE, one, 0.0).to(tl.int64), sizes, logical, DIMENSIONS, LINEAR)
    o_offset, o_one = (
        offsets(spot, sizes, o_strides, DIMENSIONS, LINEAR),
        offsets(spot_one, sizes, o_strides, DIMENSIONS, LINEAR),
    )
    g_offset, g_one = (
        offsets(spot, sizes, g_strides, DIMENSIONS, LINEAR),
        offsets(spot_one, sizes, g_strides, DIMENSIONS, LINEAR),
    )

    # Lanes beyond the end were read as zeros on both sides.
    beyond = tl.where((tl.cdiv(count, TILE) - 1) % programs == program, tl.cdiv(count, TILE) * TILE - count, 0)
    row = parts_ptr + program
    tl.store(row, tl.sum(mismatches.to(tl.float64), axis=0))
    tl.store(row + 1 * programs, tl.min(first, axis=0))
    tl.store(row + 2 * programs, worst)
    tl.store(row + 3 * programs, one)
    tl.store(row + 4 * programs, decoded(tl.load(o_ptr + o_offset), O_CODE).to(tl.float64))
    tl.store(row + 5 * programs, decoded(tl.load(g_ptr + g_offset), G_CODE).to(tl.float64))
    tl.store(row + 6 * programs, decoded(tl.load(o_ptr + o_one), O_CODE).to(tl.float64))
    tl.store(row + 7 * programs, decoded(tl.load(g_ptr + g_one), G_CODE).to(tl.float64))
    tl.store(row + 8 * programs, best)
    tl.store(row + 9 * programs, tl.max(relative, axis=0))
    tl.store(row + 10 * programs, tl.max(ulps, axis=0))
    tl.store(row + 11 * programs, tl.max(used, axis=0))
    tl.store(row + 12 * programs, tl.sum(sum_d, axis=0))
    tl.store(row + 13 * programs, tl.sum(sum_abs, axis=0))
    tl.store(row + 14 * programs, tl.sum(sum_dd, axis=0))
    tl.store(row + 15 * programs, tl.sum(sum_gg, axis=0))
    tl.store(row + 16 * programs, tl.sum(sum_dg, axis=0))
    tl.store(row + 17 * programs, tl.sum(o_nan.to(tl.float64), axis=0))
    tl.store(row + 18 * programs, tl.sum(g_nan.to(tl.float64), axis=0))
    tl.store(row + 19 * programs, tl.sum(o_inf.to(tl.float64), axis=0))
    tl.store(row + 20 * programs, tl.sum(g_inf.to(tl.float64), axis=0))
    tl.store(row + 21 * programs, tl.sum(o_zero.to(tl.float64), axis=0) - beyond)
    tl.store(row + 22 * programs, tl.sum(g_zero.to(tl.float64), axis=0) - beyond)


@triton.jit(do_not_specialize=["number_bits"])
def combine(parts_ptr, out_ptr, programs, number_bits, MODE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The rows of `parts_ptr` to one number each, in a fixed order."""
    column = tl.arange(0, WIDTH)
    inside = column < programs
    for row in tl.static_range(ROWS):
        if row == 0 or (row >= 12 and row < 23):
            values = tl.load(parts_ptr + row * programs + column, mask=inside, other=0.0)
            tl.store(out_ptr + row, tl.sum(values, axis=0))
        elif row >= 9 and row < 12:
            values = tl.load(parts_ptr + row * programs + column, mask=inside, other=0.0)
            tl.store(out_ptr + row, tl.max(values, axis=0))
    largest = tl.load(parts_ptr + 8 * programs + column, mask=inside, other=-1.0)
    best = tl.max(largest, axis=0)
    tl.store(out_ptr + 8, best)
    if MODE == 1:
        share = best / number_bits.to(tl.int64).to(tl.float64, bitcast=True)
        tl.store(out_ptr + 11, tl.where(best > 0.0, share, 0.0))
    first = tl.min(tl.load(parts_ptr + programs + column, mask=inside, other=_NONE), axis=0)
    tl.store(out_ptr + 1, tl.where(first < _NONE, first, -1.0))
    places = tl.load(parts_ptr + 2 * programs + column, mask=inside & (largest == best), other=_NONE)
    worst = tl.min(places, axis=0)
    owner = tl.min(tl.where(places == worst, column, WIDTH), axis=0)
    tl.store(out_ptr + 2, tl.where(best > 0.0, worst, -1.0))
    tl.store(out_ptr + 4, tl.load(parts_ptr + 4 * programs + owner))
    tl.store(out_ptr + 5, tl.load(parts_ptr + 5 * programs + owner))
    places = tl.load(parts_ptr + 3 * programs + column, mask=inside, other=_NONE)
    one = tl.min(places, axis=0)
    owner = tl.min(tl.where(places == one, column, WIDTH), axis=0)
    tl.store(out_ptr + 3, tl.where(one < _NONE, one, -1.0))
    tl.store(out_ptr + 6, tl.load(parts_ptr + 6 * programs + owner))
    tl.store(out_ptr + 7, tl.load(parts_ptr + 7 * programs + owner))
