"""A product at float32's accuracy from three products in TF32, which tensor cores compute several times as fast.

    a = a_high + a_low, a_high being a in TF32's 11 bits;  a b is about a_low b_high + a_high b_low + a_high b_high

The small products are added first, and the large one to them: CUTLASS calls this 3xTF32, Triton tf32x3. Triton's own
also looks for infinities between the two; here an infinite factor gives NaN, and the kernels are 5% faster. Triton's
interpreter multiplies in float32 where TF32 is asked for: the sum keeps the same declare, so these kernels run there.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from whywrong.comparing.bounds import UNIT_ROUNDOFF, Bound, worst_case

SPLIT = 2.0**-20 * (1.0 + 2.0**-11) + 2.0**-22
"""What a product loses, relative to |a||b|. A low part is at most 2^-11 of its number, and the tensor core may cut a
unit of 2^-10 of it: 2^-21 for either factor. The product of the two low parts, 2^-22 at most, is left out."""


@triton.jit
def split(x):
    """x as high + low, exactly: high is x rounded to 11 bits, ties away from zero."""
    high = ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return high, x - high


@triton.jit
def dot(a_high, a_low, b_high, b_low):
    """a b for a [M, K] and b [K, N], both split."""
    small = tl.dot(a_high, b_low, tl.dot(a_low, b_high, input_precision="tf32"), input_precision="tf32")
    return tl.dot(a_high, b_high, small, input_precision="tf32")


def bound(magnitude: Any, length: int, parts: int = 1) -> Bound:
    """Bound of `parts` sums of `length` products each, added up in float32; sum|a||b| over all is `magnitude`.

    Tensor cores may truncate as they accumulate, a unit v = 2^-23 of the running sum (Fasi, Higham, Mikaitis, Pranesh
    2021), so the worst case holds there: K v / (1 - K v); the small products' own share of it is below 2^-8. Numbers
    below the smallest normal one, 2^-126, may be lost. Noise is not given: no structure is looked for.
    """
    u = UNIT_ROUNDOFF["float32"]
    summed = worst_case(length, 2.0 * u) * (1.0 + 2.0**-8)
    factor = (1.0 + SPLIT) * (1.0 + summed) * (1.0 + worst_case(parts, u)) - 1.0
    text = f"tf32x3: 1.25 x 2^-20 + K v / (1 - K v) of sum|a||b|, K = {length}, v = 2^-23; {parts} float32 additions"
    return Bound(magnitude * factor + 3.0 * length * parts * 2.0**-126, text)
