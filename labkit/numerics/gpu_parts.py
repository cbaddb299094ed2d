"""What the kernels of :mod:`labkit.numerics.gpu_kernels` do to one tile: decode, address, and reduce by thread."""

import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice


@triton.jit
def decoded(raw, CODE: tl.constexpr):
    """The values of a float of 8 bits, by way of float16: e5m2 is its upper byte, e4m3fn has its exponent 2^8 away."""
    if CODE == 0:
        return raw
    elif CODE == 2:
        return (raw.to(tl.int16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        bits = raw.to(tl.int16)
        value = ((bits & 127) << 7).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        value = tl.where((bits & 127) == 127, float("nan"), value)
        return tl.where((bits & 128) != 0, -value, value)


@triton.jit
def offsets(index, sizes, strides, DIMENSIONS: tl.constexpr, LINEAR: tl.constexpr):
    """The offset of the element at `index` of the walk, for one tensor's strides."""
    if LINEAR:
        return index
    else:
        offset = index * 0
        rest = index
        for i in tl.static_range(DIMENSIONS - 1, 0, -1):
            upper = rest // sizes[i]
            offset += (rest - upper * sizes[i]) * strides[i]
            rest = upper
        return offset + rest * strides[0]


@triton.jit
def walked(place, sizes, logical, DIMENSIONS: tl.constexpr, LINEAR: tl.constexpr):
    """The position in the walk of the element whose row-major index is `place`."""
    if LINEAR:
        return place
    else:
        found = place * 0
        for i in tl.static_range(DIMENSIONS):
            found = found * sizes[i] + (place // logical[i]) % sizes[i]
        return found


@triton.jit
def thread_sum(x, THREADS: tl.constexpr, VECTOR: tl.constexpr):
    """[TILE] -> [THREADS]: each thread adds what it holds, so nothing is exchanged."""
    return tl.sum(tl.sum(tl.reshape(x, (x.shape[0] // (VECTOR * THREADS), THREADS, VECTOR)), axis=2), axis=0)


@triton.jit
def thread_max(x, THREADS: tl.constexpr, VECTOR: tl.constexpr):
    """[TILE] -> [THREADS], as :func:`thread_sum`."""
    return tl.max(tl.max(tl.reshape(x, (x.shape[0] // (VECTOR * THREADS), THREADS, VECTOR)), axis=2), axis=0)


@triton.jit
def quotient(a, b, FAST: tl.constexpr):
    """a / b; fast, it is within two units in the last place."""
    if FAST:
        return libdevice.fast_dividef(a, b)
    return a / b


@triton.jit
def in_ulps(d, g, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr):
    """|d| in units in the last place at g, all float64."""
    biased = tl.maximum((g.to(tl.int64, bitcast=True) >> 52) & 2047, EXPONENT + 1023)
    scale = ((2047 - biased) << 52).to(tl.float64, bitcast=True)  # 2^(1024 - biased)
    return tl.abs(d) * scale * (2.0 ** (MANTISSA - 1))
