"""The error that a step is allowed: derived, never picked by hand.

Sums of products follow Higham and Mary, "A new approach to probabilistic rounding error analysis", SIAM J. Sci.
Comput. 41 (2019): with roundings of mean zero, an inner product of length K computed in any order is off by at most
lambda sqrt(K) u sum|a||b| with probability 1 - 2 K exp(-lambda^2 / 2); K u sum|a||b| holds whatever the roundings do
(Higham, "Accuracy and Stability of Numerical Algorithms", section 3.1). The smaller of the two is used, with lambda
set so that a whole tensor raises a false alarm with probability `FALSE_ALARM` at most.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

FALSE_ALARM = 1e-9
"""The probability that a right tensor, as a whole, is called wrong."""

UNIT_ROUNDOFF = {
    "float64": 2.0**-53,
    "float32": 2.0**-24,
    "tf32": 2.0**-11,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
}
"""Half the distance from 1 to the next number: the relative error of one rounding to nearest."""

SMALLEST = {"float64": 2.0**-1074, "float32": 2.0**-149, "float16": 2.0**-24, "bfloat16": 2.0**-133}
"""The smallest subnormal: what one operation may lose to underflow."""


@dataclass(frozen=True)
class Bound:
    """|observed - golden| may be at most `absolute`, element by element.

    `absolute` is a number or a float64 array of the golden's shape; `why` is the formula in words. `noise` is the
    sub-Gaussian parameter of each element's error where that is known, and `shared` what may be common to all of them:
    the second instrument, :func:`labkit.structure`, needs both.
    """

    absolute: Any
    why: str
    noise: Any = None
    shared: Any = 0.0

    def __add__(self, other: Bound) -> Bound:
        if not isinstance(other, Bound):
            return NotImplemented
        known = self.noise is not None and other.noise is not None
        noise = (self.noise**2 + other.noise**2) ** 0.5 if known else None
        return Bound(self.absolute + other.absolute, f"{self.why} + {other.why}", noise, self.shared + other.shared)

    def scaled(self, factor: Any) -> Bound:
        """The bound after an exact multiplication by `factor`."""
        size = abs(factor)
        noise = None if self.noise is None else self.noise * size
        return Bound(self.absolute * size, f"({self.why}) scaled", noise, self.shared * size)


EXACT = Bound(0.0, "exact: values are moved, not computed", 0.0)


def confidence(length: int, count: int, false_alarm: float = FALSE_ALARM) -> float:
    """lambda for which `count` inner products of `length` terms all hold with probability 1 - `false_alarm`."""
    return math.sqrt(2.0 * math.log(2.0 * length * count / false_alarm))


def worst_case(length: int, u: float) -> float:
    """K u / (1 - K u): `length` roundings, whatever their signs; infinite where they could lose everything."""
    return length * u / (1.0 - length * u) if length * u < 1.0 else math.inf


def gamma(length: int, u: float, count: int, false_alarm: float = FALSE_ALARM) -> float:
    """The factor on sum|a||b| for an inner product of `length` terms with unit round-off `u` (see the module)."""
    lam = confidence(length, count, false_alarm)
    probable = math.expm1(lam * math.sqrt(length) * u + length * u * u / (1.0 - u))
    return min(worst_case(length, u), probable)


def sum_of_products(
    magnitude: Any,
    length: int,
    compute: str = "float32",
    *,
    count: int | None = None,
    false_alarm: float = FALSE_ALARM,
    value: Any = None,
    squares: Any = None,
) -> Bound:
    """Bound of inner products of `length` terms whose sum|a||b| is `magnitude` (float64, any shape).

    `compute` is ``float32``, ``float64``, ``float16``, ``bfloat16`` (the accumulator, inputs exact in it) or
    ``tf32``. With tf32 each factor is first cut to 11 significant bits; NVIDIA does not say whether it is rounded or
    truncated, so a whole unit 2^-10 is allowed for each. Tensor cores may truncate as they accumulate (Fasi, Higham,
    Mikaitis, Pranesh 2021), which has no mean of zero, so the worst case holds there: K v / (1 - K v), v = 2^-23.
    `value`, the exact sum, and `squares`, sum (ab)^2, give the noise too: partial sums are about as large as the sum
    and the root of the squares, and each of K roundings is u of one. What tf32's accumulators drift, and what
    truncated factors shrink, is shared.
    `count` is the number of inner products that share the false-alarm rate, when it is more than those of `magnitude`.
    """
    count = count or math.prod(getattr(magnitude, "shape", ())) or 1
    if compute == "tf32":
        cut, v = 2.0 * UNIT_ROUNDOFF["tf32"], 2.0 * UNIT_ROUNDOFF["float32"]
        factor = (1.0 + cut) ** 2 * (1.0 + worst_case(length, v)) - 1.0
        text = f"tf32: ((1 + 2^-10)^2 (1 + K v / (1 - K v)) - 1) sum|a||b|, K = {length}, v = 2^-23"
        if value is None or squares is None:
            return Bound(magnitude * factor + length * SMALLEST["float32"], text)
        noise = 2.0 * cut * squares**0.5 + v * length**0.5 * (abs(value) + squares**0.5)
        return Bound(magnitude * factor + length * SMALLEST["float32"], text, noise, (length * v + cut) * abs(value))
    u = UNIT_ROUNDOFF[compute]
    factor = gamma(length, u, count, false_alarm)
    text = f"min(lambda sqrt(K), K) u sum|a||b|, K = {length}, u = 2^{round(math.log2(u))}"
    absolute = magnitude * factor + length * SMALLEST[compute]
    if value is None or squares is None:
        return Bound(absolute, text)
    noise = u * length**0.5 * (abs(value) + squares**0.5) + length**0.5 * SMALLEST[compute]
    return Bound(absolute, text, noise, 4.0 * u * abs(value))


def roundings(values: Any, number: int, dtype: str = "float32") -> Bound:
    """Bound of `number` successive roundings of `values` to `dtype`, in the worst case."""
    u = UNIT_ROUNDOFF[dtype]
    size = abs(values)
    return Bound(
        size * (number * u / (1.0 - number * u)) + number * SMALLEST[dtype],
        f"{number} rounding{'s' if number > 1 else ''} to {dtype}",
        number**0.5 * (size * u + SMALLEST[dtype]),
    )


def perturbed(
    run: Callable[..., torch.Tensor],
    inputs: Sequence[torch.Tensor],
    rng: np.random.Generator,
    *,
    length: int = 1,
    dtype: str = "float32",
    times: int = 8,
    false_alarm: float = FALSE_ALARM,
) -> Bound:
    """Bound by experiment, where there is no analysis: the golden algorithm run in the working precision.

    `run(*inputs)` is taken in `dtype` `times` times, on inputs (float64) each moved at random by one rounding, and its
    RMS distance from `run` in float64 is taken over the runs, and over the last dimension where that is larger. One
    order of operations is not the worst: `length` successive roundings may differ by sqrt(length) as much. The
    factor on top is that of :func:`confidence`, for errors as for sums.
    """
    exact = run(*inputs)
    narrow, u = getattr(torch, dtype), UNIT_ROUNDOFF[dtype]
    squares = torch.zeros_like(exact)
    for _ in range(times):
        moved = [x * (1.0 + u * torch.from_numpy(rng.uniform(-1.0, 1.0, tuple(x.shape))).to(x.device)) for x in inputs]
        squares += (run(*(x.to(narrow) for x in moved)).double() - exact).square()
    spread = (squares / times).sqrt()
    if spread.ndim and spread.numel():
        spread = torch.maximum(spread, spread.square().mean(-1, keepdim=True).sqrt())
    spread = spread + u * abs(exact) + SMALLEST[dtype]
    factor = confidence(1, max(1, exact.numel()), false_alarm) * math.sqrt(length)
    return Bound(spread * factor, f"{times} runs in {dtype}, inputs moved by a rounding, times lambda sqrt({length})")


def ulp(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Distance between neighbouring numbers of `dtype` at |values|, in float64; subnormals share one distance."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(values.double().abs())[1].double() - 1.0
    exponent = torch.where(values == 0, -math.inf, exponent).clamp(min=math.log2(info.tiny))
    return torch.where(torch.isfinite(values), info.eps * torch.exp2(exponent), torch.nan)
