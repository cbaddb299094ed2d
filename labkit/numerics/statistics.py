"""What one pass over two tensors gathers, how parts of it are combined, and what the dtypes allow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

ELEMENTWISE, NUMBER, DTYPES = 2, 1, 0
"""The kinds of bound: a tensor of them, one number, or what the observed dtype cannot represent."""


@dataclass(frozen=True)
class Format:
    """A floating-point dtype: exponent of the smallest normal number, bits after the point, largest finite number."""

    exponent: int
    mantissa: int
    largest: float

    @property
    def overflow(self) -> float:
        """From here on rounding to nearest leaves the finite numbers."""
        return self.largest * (1.0 + 2.0 ** -(self.mantissa + 2))


@cache
def format_of(dtype: torch.dtype) -> Format | None:
    """The format of a floating-point dtype; None for integers."""
    if not dtype.is_floating_point:
        return None
    info = torch.finfo(dtype)
    return Format(int(math.log2(info.tiny)), -int(math.log2(info.eps)), info.max)


@dataclass(frozen=True)
class Rule:
    """Which differences are allowed: `mode` ELEMENTWISE, NUMBER (then `number`) or DTYPES (then `format`)."""

    mode: int
    number: float
    format: Format | None


class Statistics(NamedTuple):
    """One value of each of FIELDS, in their order."""

    mismatches: float
    first: float
    worst: float
    one_sided: float
    worst_observed: float
    worst_golden: float
    one_sided_observed: float
    one_sided_golden: float
    max_abs: float
    max_rel: float
    max_ulp: float
    used: float
    sum_d: float
    sum_abs: float
    sum_dd: float
    sum_gg: float
    sum_dg: float
    observed_nan: float
    golden_nan: float
    observed_inf: float
    golden_inf: float
    observed_zero: float
    golden_zero: float


FIELDS = Statistics._fields
"""One float64 each. Indices are row-major, -1 for none; d = observed - golden over elements finite on both sides."""

MAXIMA = ("max_rel", "max_ulp", "used")
SUMS = ("mismatches", *FIELDS[12:])


def combine(parts: Sequence[np.ndarray]) -> Statistics:
    """Statistics of the whole from those of its parts, in order."""
    table = np.stack(parts)
    column = {name: table[:, i] for i, name in enumerate(FIELDS)}
    found = {name: math.fsum(column[name]) for name in SUMS}
    found |= {name: float(column[name].max()) for name in MAXIMA}
    found["max_abs"] = float(column["max_abs"].max())
    found["first"] = _lowest(column["first"])
    for name, rank in (("worst", column["max_abs"]), ("one_sided", None)):
        candidates = column[name] >= 0
        if rank is not None:
            candidates &= rank == found["max_abs"]
        found[name] = _lowest(np.where(candidates, column[name], -1.0))
        row = int(np.flatnonzero(column[name] == found[name])[0])
        for side in ("observed", "golden"):
            found[f"{name}_{side}"] = float(column[f"{name}_{side}"][row])
    return Statistics(**found)


EMPTY = Statistics(*(-1.0 if name in ("first", "worst", "one_sided") else 0.0 for name in FIELDS))
"""Of no elements at all."""


def _lowest(indices: np.ndarray) -> float:
    there = indices[indices >= 0]
    return float(there.min()) if len(there) else -1.0
