"""The Triton kernels of :mod:`whywrong.comparing.gpu`, one pass over the tiles, and what it does to a tile."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

_NONE = tl.constexpr(9.0e15)  # beyond any index; float64 holds indices exactly up to here
_SCALE = tl.constexpr(2.0**40)  # on differences in float32: they are small, and their squares smaller
_VECTOR = tl.constexpr(4)  # elements that a thread takes at a time
_LEAST, _MOST = tl.constexpr(1e-15), tl.constexpr(1e17)  # what float32 can square and sum


@triton.jit
def offsets(index, sizes, strides, DIMENSIONS: tl.constexpr):
    """The offset of the element at `index` of the walk, for one tensor's strides."""
    offset = index * 0
    rest = index
    for i in tl.static_range(DIMENSIONS - 1, 0, -1):
        upper = rest // sizes[i]
        offset += (rest - upper * sizes[i]) * strides[i]
        rest = upper
    return offset + rest * strides[0]


@triton.jit
def element(ptr, index, there, sizes, strides, DIMENSIONS: tl.constexpr):
    """The values at `index` of the walk where they are `there`, else 0."""
    return tl.load(ptr + offsets(index, sizes, strides, DIMENSIONS), mask=there, other=0)


@triton.jit
def walked(place, sizes, logical, DIMENSIONS: tl.constexpr):
    """The position in the walk of the element whose row-major index is `place`."""
    position = place * 0
    for i in tl.static_range(DIMENSIONS):
        position = position * sizes[i] + (place // logical[i]) % sizes[i]
    return position


@triton.jit
def thread_sum(x, THREADS: tl.constexpr):
    """[TILE] -> [THREADS]: each thread adds what it holds, so nothing is exchanged."""
    return tl.sum(tl.sum(tl.reshape(x, (x.shape[0] // (_VECTOR * THREADS), THREADS, _VECTOR)), axis=2), axis=0)


@triton.jit
def thread_max(x, THREADS: tl.constexpr):
    """[TILE] -> [THREADS], as :func:`thread_sum`."""
    return tl.max(tl.max(tl.reshape(x, (x.shape[0] // (_VECTOR * THREADS), THREADS, _VECTOR)), axis=2), axis=0)


@triton.jit
def quotient(a, b, FAST: tl.constexpr):
    """a / b; fast, it is within two units in the last place."""
    if FAST:
        return libdevice.fast_dividef(a, b)
    return a / b


@triton.jit(do_not_specialize=["number_bits"])
def statistics_of_tiles(
    o_ptr,
    g_ptr,
    b_ptr,
    parts_ptr,
    count,
    number_bits,
    sizes,
    o_strides,
    g_strides,
    b_strides,
    logical,
    KIND: tl.constexpr,
    EXPONENT: tl.constexpr,
    MANTISSA: tl.constexpr,
    LARGEST: tl.constexpr,
    MODE: tl.constexpr,
    LARGE: tl.constexpr,
    DIMENSIONS: tl.constexpr,
    TILE: tl.constexpr,
    THREADS: tl.constexpr,
    FAST: tl.constexpr,
):
    """Statistics of a strided share of the tiles, one row of `parts_ptr` a statistic, one column a program."""
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    lanes = tl.arange(0, TILE)
    threads = tl.arange(0, THREADS)
    inf = float("inf")
    number = number_bits.to(tl.int64).to(tl.float64, bitcast=True)
    near = (number * (_SCALE * (1.0 - 1e-6))).to(tl.float32)
    INTEGERS: tl.constexpr = tl.int64 == KIND
    overflow: tl.constexpr = LARGEST * (1.0 + 2.0 ** -(MANTISSA + 2))  # a quarter of a unit beyond

    zero = tl.zeros([THREADS], tl.float64)
    sum_abs, sum_dd, sum_gg, sum_dg = zero, zero, zero, zero
    relative, ulps, used, largest = zero, zero, zero, zero
    at = tl.zeros([THREADS], tl.int32)
    o_zero, g_zero, mismatches = at, at, at
    o_nan, g_nan, o_inf, g_inf = at, at, at, at
    first = tl.full([THREADS], _NONE, tl.float64)
    one_sided = first

    rounds = tl.cdiv(tl.cdiv(count, TILE) - program, programs).to(tl.int32)
    for i in tl.range(0, rounds, num_stages=3):
        start = (program + i * programs) * TILE
        inside = lanes < count - start
        index = start + lanes if LARGE else start.to(tl.int32) + lanes
        o = element(o_ptr, index, inside, sizes, o_strides, DIMENSIONS)
        g = element(g_ptr, index, inside, sizes, g_strides, DIMENSIONS)
        d = (o.to(KIND) - g.to(KIND)).to(tl.float32) * _SCALE
        v = g.to(tl.float32)
        a = tl.abs(d)
        most = thread_max(a.to(tl.int32, bitcast=True), THREADS)  # as integers: NaN is largest
        most = most.to(tl.float32, bitcast=True)
        most_golden = thread_max(tl.abs(v), THREADS)
        ratio = thread_max(quotient(a, tl.abs(v), FAST), THREADS)
        care = ((most < _MOST) & (most_golden < _MOST)) == 0
        care = care | (ratio == inf)
        care = care | ((most > 0.0) & (most < _LEAST)) | ((most_golden > 0.0) & (most_golden < _LEAST))
        biased = tl.maximum((v.to(tl.int32, bitcast=True) >> 23) & 255, EXPONENT + 127)
        power = ((255 - biased) << 23).to(tl.float32, bitcast=True)  # 2^(128 - biased)
        share = thread_max(a * power, THREADS).to(tl.float64) * (2.0 ** (MANTISSA - 1) / _SCALE)
        care = care | ((share < inf) == 0)
        if MODE == 2:
            allowed = tl.load(b_ptr + offsets(index, sizes, b_strides, DIMENSIONS), mask=inside, other=1.0)
            part = quotient(a, allowed.to(tl.float32) * _SCALE, FAST)
            part = thread_max(tl.where(part == part, part, inf), THREADS)
            care = care | (part >= 1.0 - 1e-5)
        elif MODE == 1:
            care = care | ((most >= near) & (most > 0.0))
        else:
            care = care | (share > 0.5 - 1e-6)
        size = most.to(tl.float64) * (1.0 / _SCALE)
        if tl.max(care.to(tl.int32), axis=0) > 0:
            size = zero
            for j in range(TILE // THREADS):
                spot = start + j * THREADS + threads
                there = spot < count
                o1 = element(o_ptr, spot, there, sizes, o_strides, DIMENSIONS)
                g1 = element(g_ptr, spot, there, sizes, g_strides, DIMENSIONS)
                x, y = o1.to(tl.float64), g1.to(tl.float64)
                e = (o1.to(tl.int64) - g1.to(tl.int64)).to(tl.float64) if INTEGERS else x - y
                finite = tl.abs(e) < inf
                exponent = tl.maximum((y.to(tl.int64, bitcast=True) >> 52) & 2047, EXPONENT + 1023)
                inverse = ((2047 - exponent) << 52).to(tl.float64, bitcast=True)  # 2^(1024 - exponent)
                units = tl.where(finite, tl.abs(e) * inverse * (2.0 ** (MANTISSA - 1)), 0.0)
                ulps = tl.maximum(ulps, units)
                if MODE > 0:
                    limit = zero + number
                    if MODE == 2:
                        limit = element(b_ptr, spot, there, sizes, b_strides, DIMENSIONS)
                    of_limit, free = tl.abs(e) / limit, limit == inf
                else:
                    of_limit = 2.0 * units
                    free = (tl.abs(y) > overflow) & (((tl.abs(x) >= LARGEST) & ((x > 0.0) == (y > 0.0))) | (x != x))
                of_limit = tl.where((finite == 0) | free | (e == 0.0), 0.0, of_limit)
                used = tl.maximum(used, of_limit)
                right = free | (x == y) | ((x != x) & (y != y)) | (finite & (of_limit <= 1.0))
                wrong = there & (right == 0)
                place = offsets(spot, sizes, logical, DIMENSIONS).to(tl.float64)
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
                sum_abs += tl.abs(e)
                sum_dd += e * e
                sum_gg += y * y
                sum_dg += e * y
                relative = tl.maximum(relative, tl.where(y != 0.0, tl.abs(e) / tl.abs(y), 0.0))
                size = tl.maximum(size, tl.abs(e))
        else:
            sum_abs += thread_sum(a, THREADS).to(tl.float64) * (1.0 / _SCALE)
            sum_dd += thread_sum(d * d, THREADS).to(tl.float64) * (1.0 / _SCALE / _SCALE)
            sum_gg += thread_sum(v * v, THREADS).to(tl.float64)
            sum_dg += thread_sum(d * v, THREADS).to(tl.float64) * (1.0 / _SCALE)
            o_zero += thread_sum((o == 0).to(tl.int32), THREADS)
            g_zero += thread_sum((g == 0).to(tl.int32), THREADS)
            relative = tl.maximum(relative, ratio.to(tl.float64) * (1.0 / _SCALE))
            ulps = tl.maximum(ulps, share)
            if MODE == 0:
                used = tl.maximum(used, 2.0 * share)
            if MODE == 2:
                used = tl.maximum(used, part.to(tl.float64))
        larger = size > largest
        largest = tl.where(larger, size, largest)
        at = tl.where(larger, i, at)

    # The largest difference of this program, exactly: its tile again.
    best = tl.max(largest, axis=0)
    round_of_best = tl.min(tl.where(largest == best, at, 2147483647), axis=0)
    start = (program + round_of_best.to(tl.int64) * programs) * TILE
    exact = zero - 1.0
    spot_of = (threads + start) * 0
    for j in range(TILE // THREADS):
        spot = start + j * THREADS + threads
        there = spot < count
        o1 = element(o_ptr, spot, there, sizes, o_strides, DIMENSIONS)
        g1 = element(g_ptr, spot, there, sizes, g_strides, DIMENSIONS)
        e = (o1.to(tl.int64) - g1.to(tl.int64)).to(tl.float64) if INTEGERS else o1.to(tl.float64) - g1.to(tl.float64)
        e = tl.abs(e)
        larger = there & (e < inf) & (e > exact)
        exact = tl.where(larger, e, exact)
        spot_of = tl.where(larger, spot, spot_of)
    best = tl.maximum(tl.max(exact, axis=0), 0.0)
    if MODE == 1:
        used = tl.where(best > 0.0, best / number, 0.0) + zero

    first, one = tl.min(first, axis=0), tl.min(one_sided, axis=0)
    place = offsets(spot_of, sizes, logical, DIMENSIONS).to(tl.float64)
    worst = tl.min(tl.where((exact == best) & (exact > 0.0), place, _NONE), axis=0)
    spot = walked(tl.where(worst < _NONE, worst, 0.0).to(tl.int64), sizes, logical, DIMENSIONS)
    spot1 = walked(tl.where(one < _NONE, one, 0.0).to(tl.int64), sizes, logical, DIMENSIONS)
    # Lanes beyond the end were read as zeros on both sides.
    beyond = tl.where((tl.cdiv(count, TILE) - 1) % programs == program, tl.cdiv(count, TILE) * TILE - count, 0)
    found = (
        tl.sum(mismatches, axis=0),
        tl.where(first < _NONE, first, -1.0),
        tl.where(worst < _NONE, worst, -1.0),
        tl.where(one < _NONE, one, -1.0),
        element(o_ptr, spot, spot >= 0, sizes, o_strides, DIMENSIONS),
        element(g_ptr, spot, spot >= 0, sizes, g_strides, DIMENSIONS),
        element(o_ptr, spot1, spot1 >= 0, sizes, o_strides, DIMENSIONS),
        element(g_ptr, spot1, spot1 >= 0, sizes, g_strides, DIMENSIONS),
        best,
        tl.max(relative, axis=0),
        tl.max(ulps, axis=0),
        tl.max(used, axis=0),
        tl.sum(sum_abs, axis=0),
        tl.sum(sum_dd, axis=0),
        tl.sum(sum_gg, axis=0),
        tl.sum(sum_dg, axis=0),
        tl.sum(o_nan, axis=0),
        tl.sum(g_nan, axis=0),
        tl.sum(o_inf, axis=0),
        tl.sum(g_inf, axis=0),
        tl.sum(o_zero, axis=0) - beyond,
        tl.sum(g_zero, axis=0) - beyond,
    )
    for k in tl.static_range(len(found)):
        tl.store(parts_ptr + k * programs + program, found[k].to(tl.float64))


@triton.jit
def combined(parts_ptr, found_ptr, programs, LANES: tl.constexpr):
    """The statistics of the whole from what each program stored: see whywrong.comparing.statistics, and its order."""
    lanes = tl.arange(0, LANES)
    there = lanes < programs
    largest = tl.load(parts_ptr + 8 * programs + lanes, mask=there, other=0.0)
    for k in tl.static_range(22):
        values = tl.load(parts_ptr + k * programs + lanes, mask=there, other=0.0)
        if k == 0 or k > 11:
            tl.store(found_ptr + k, tl.sum(values, axis=0))
        elif k > 7:
            tl.store(found_ptr + k, tl.max(values, axis=0))
        elif k < 4:
            candidate = there & (values >= 0.0)
            if k == 2:
                candidate = candidate & (largest == tl.max(largest, axis=0))
            place = tl.min(tl.where(candidate, values, _NONE), axis=0)
            tl.store(found_ptr + k, tl.where(place < _NONE, place, -1.0))
            if k > 1:  # the two values there
                for j in tl.static_range(2):
                    at = parts_ptr + (2 * k + j) * programs + lanes
                    value = tl.load(at, mask=candidate & (values == place), other=0.0)
                    tl.store(found_ptr + 2 * k + j, tl.sum(value, axis=0))
