"""The error that a tensor is allowed: derived, never picked by hand.

Sums of products follow Higham and Mary, "A new approach to probabilistic rounding error analysis", SIAM J. Sci.
Comput. 41 (2019): with roundings of mean zero, an inner product of length K computed in any order is off by at most
lambda sqrt(K) u sum|a||b| with probability 1 - 2 K exp(-lambda^2 / 2); K u sum|a||b| holds whatever the roundings do
(Higham, "Accuracy and Stability of Numerical Algorithms", section 3.1). The smaller of the two is used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from whywrong.comparing.precision import SMALLEST, UNIT_ROUNDOFF

TENSOR_FALSE_POSITIVES = 1e-9
"""The probability that a correct tensor, as a whole, is flagged by its elementwise bound."""


@dataclass(frozen=True)
class Bound:
    """|observed - golden| may be at most `absolute`, element by element.

    `absolute`, `noise` and `shared` are in the golden's unit, each a number or a float64 array or tensor of the
    golden's shape; `why` is the formula in words. The second instrument, :func:`whywrong.structure`, needs to know what
    noise looks like: `noise` is the standard deviation of each element's error, `shared` the part of an error that may
    be common to all of them; `null`, where there was no analysis, a :class:`~whywrong.comparing.structure.Null` of
    simulated correct implementations.
    """

    absolute: Any
    why: str
    noise: Any = None
    shared: Any = 0.0
    null: Any = None

    def __add__(self, other: Bound) -> Bound:
        known = self.noise is not None and other.noise is not None
        noise = (self.noise**2 + other.noise**2) ** 0.5 if known else None
        return Bound(self.absolute + other.absolute, f"{self.why} + {other.why}", noise, self.shared + other.shared)

    def scaled(self, factor: Any) -> Bound:
        """The bound after an exact multiplication by `factor`."""
        size = abs(factor)
        noise = None if self.noise is None else self.noise * size
        return Bound(self.absolute * size, f"({self.why}) scaled", noise, self.shared * size)


EXACT = Bound(0.0, "exact: values are moved, not computed", 0.0)


def confidence(length: int, count: int) -> float:
    """lambda for which `count` inner products of `length` terms all hold with probability 1 -
    TENSOR_FALSE_POSITIVES."""
    return math.sqrt(2.0 * math.log(2.0 * length * count / TENSOR_FALSE_POSITIVES))


def worst_case(length: float, u: float) -> float:
    """K u / (1 - K u): `length` roundings, whatever their signs; infinite where they could lose everything."""
    return length * u / (1.0 - length * u) if length * u < 1.0 else math.inf


def gamma(length: int, u: float, count: int) -> float:
    """The factor on sum|a||b| for an inner product of `length` terms with unit round-off `u` (see the module)."""
    probable = math.expm1(confidence(length, count) * math.sqrt(length) * u + length * u * u / (1.0 - u))
    return min(worst_case(length, u), probable)


def variance_of_sum(total: Any, squares: Any, length: float, u: float) -> Any:
    """Variance of the rounding error of a sum of `length` terms in an order that is not known.

    Each of K additions errs by at most u of its partial sum, uniformly: variance u^2/3 of its square. Over all orders
    the squares of the partial sums add up to K/3 S^2 + K/6 (Q - S^2/K) on average, with S = `total` and Q = `squares`,
    the sum of the terms' squares.
    """
    square = 1.0 * total**2
    scatter = squares - square / max(length, 1.0)
    scatter *= scatter > 0.0
    scatter *= length / 6.0  # in place: a large one is in memory once
    square *= length / 3.0
    scatter += square
    scatter *= u * u / 3.0
    return scatter


def lost_terms(length: float, u: float) -> float:
    """What a long sum of one sign loses, relative to it and with one sign: (K u)^2, at most all of it.

    A term below half a unit of the partial sum is lost. Of K like terms a share of about K u is so small when the sum
    is large, and each of these is at most K u times the usual one.
    """
    return min(1.0, (length * u) ** 2)


def sum_of_products(
    magnitude: Any,
    length: int,
    compute: str = "float32",
    *,
    count: int | None = None,
    value: Any = None,
    squares: Any = None,
) -> Bound:
    """Bound of inner products of `length` terms whose sum|a||b| is `magnitude` (float64, any shape).

    `compute` is ``float32``, ``float64``, ``float16``, ``bfloat16`` (the accumulator, inputs exact in it) or ``tf32``.
    With tf32 each factor is first cut to 11 significant bits; NVIDIA does not say whether it is rounded or truncated,
    so a whole unit 2^-10 is allowed for each. Tensor cores may truncate as they accumulate (Fasi, Higham, Mikaitis,
    Pranesh 2021), which has no mean of zero, so the worst case holds there: K v / (1 - K v), v = 2^-23. `value`, the
    exact sum, and `squares`, sum (ab)^2, give the noise too. What tf32's accumulators drift, and what truncated factors
    shrink, is shared. `count` is the number of inner products that share the false-positive rate, when it is more than
    those of `magnitude`.
    """
    if compute == "tf32":
        cut, u = 2.0 * UNIT_ROUNDOFF["tf32"], 2.0 * UNIT_ROUNDOFF["float32"]
        factor = (1.0 + cut) ** 2 * (1.0 + worst_case(length, u)) - 1.0
        text = f"tf32: ((1 + 2^-10)^2 (1 + K v / (1 - K v)) - 1) sum|a||b|, K = {length}, v = 2^-23"
        product, drift, smallest = 2.0 / 3.0 * cut**2, length * u + cut, SMALLEST["float32"]
    else:
        u, smallest = UNIT_ROUNDOFF[compute], SMALLEST[compute]
        factor = gamma(length, u, count or math.prod(getattr(magnitude, "shape", ())) or 1)
        text = f"min(lambda sqrt(K), K) u sum|a||b|, K = {length}, u = 2^{round(math.log2(u))}"
        # a product is rounded once, unless it is fused with the addition; then the sum
        product, drift = u * u / 3.0, lost_terms(length, u)
    absolute = magnitude * factor + length * smallest
    if value is None or squares is None:
        return Bound(absolute, text)
    noise = (product * squares + variance_of_sum(value, squares, length, u)) ** 0.5 + length**0.5 * smallest
    return Bound(absolute, text, noise, drift * abs(value))


def roundings(values: Any, number: int, dtype: str = "float32") -> Bound:
    """Bound of `number` successive roundings of `values` to `dtype`, in the worst case."""
    u, smallest = UNIT_ROUNDOFF[dtype], SMALLEST[dtype]
    why = f"{number} rounding{'s' if number > 1 else ''} to {dtype}"
    noise = (number / 3.0) ** 0.5 * (abs(values) * u + smallest)
    return Bound(abs(values) * worst_case(number, u) + number * smallest, why, noise)


@lru_cache(maxsize=4096)
def quantile(chance: float, freedom: float) -> float:
    """Student's t with P(|T| > t) = `chance`, for a spread that was estimated from `freedom` runs; normal if Inf."""
    from scipy.special import ndtri, stdtrit  # the quantiles alone: scipy.stats takes a second to import

    half = max(0.5 * chance, 1e-300)
    return float(-ndtri(half)) if math.isinf(freedom) else float(-stdtrit(freedom, half))
