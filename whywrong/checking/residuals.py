"""The passes over a block of numbers that the check without a program needs, compiled by numba; in float64.

A block is a part of an observed step and of the golden, float32 or float64, contiguous on the CPU. Expected is the
golden or, where a step is an earlier one and a small change (p.1 after p.0), what was observed there and that change.
"""

from __future__ import annotations

import math
from collections import namedtuple
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from torch import Tensor, from_numpy

from whywrong.checking.masks import LOWEST
from whywrong.checking.updates import sample
from whywrong.comparing.cpu import NOTHING, PIECE_ELEMENTS, Array, gather, ulps_of
from whywrong.comparing.precision import dtype_of
from whywrong.comparing.statistics import Statistics

MASK = 0.5 * LOWEST
"""Numbers up to this one are masks, which have no part in the sizes of rows and columns."""

CHUNK = 1 << 12
"""Elements that are kept with their tolerances at a time, in a core's own cache."""

Sums = namedtuple("Sums", "counted z zz rr zh hh least largest")
"""Over the elements that count, with r = observed - expected, z = r / size and h = scale / size: how many, and the sums
of z, z^2, r^2 in the :func:`_unit` of the largest |r|, z h and h^2. Then the least size of all elements, which is 0
where one has none, and the largest |r|."""


class Tolerance(NamedTuple):
    """|observed - expected| may reach half[exponent of expected] + factor size + constant."""

    half: Array
    factor: float
    constant: float

    def halves(self, expected: Tensor) -> Tensor:
        """half[exponent] of each of what is expected, float64 on the CPU."""
        return from_numpy(np.asarray(self.half[expected.numpy().view(np.int64) >> 52 & 2047]))


class Groups(NamedTuple):
    """Groups of like values of the scale, between `borders`; every `apart`-th element is looked at."""

    borders: Array
    apart: int


ULPS = ulps_of(torch.float64)
UNJUDGED, ONE_GROUP = Tolerance(np.zeros(0), 0.0, 0.0), Groups(np.zeros(0), 1 << 62)


@dataclass(frozen=True)
class Pair:
    """What is observed and the golden; of a change also what both were before it, and the dtype it was stored in."""

    observed: Tensor
    golden: Tensor
    before: tuple[Tensor, Tensor] | None = None
    dtype: str = "float64"

    @cached_property
    def scale(self) -> Tensor:
        """What errors scale with, in float64."""
        return self.golden.double() - self.before[1].double() if self.before else self.golden.double()

    @cached_property
    def expected(self) -> Tensor:
        """In float64, by the arithmetic of :func:`_residuals`."""
        if not self.before:
            return self.scale
        spacing, top = _format(self.dtype)
        made = self.before[0].double() + self.scale
        ulp = from_numpy(np.asarray(spacing[made.numpy().view(np.int64) >> 52 & 2047]))
        return torch.where(self.scale.isfinite(), (made / ulp).round().mul(ulp).clamp(-top, top), self.golden.double())

    @cached_property
    def _arrays(self) -> list[Any]:
        """Observed and golden, and both before the change, without an element where there is none; (n, width) each."""
        width = self.golden.shape[-1] if self.golden.ndim else 1
        o, g, *before = (x.reshape(-1, width).numpy() for x in (self.observed, self.golden, *(self.before or ())))
        return [o, g, *(before or [o[:0], g[:0]])]

    @cached_property
    def sizes(self) -> tuple[Array, Array, float]:
        """RMS of the scale in each row and each column, of what is finite and no mask; and of what the observed was off
        before the change, where that is finite."""
        _, g, before_o, before_g = self._arrays
        rows, columns, drift, largest = _squares(g, before_o, before_g, 1.0)
        if (unit := _unit(largest)) != 1.0:
            rows, columns, _, _ = _squares(g, before_o, before_g, unit)
        n, width = g.shape
        return np.sqrt(rows / width) * unit, np.sqrt(columns / n) * unit, math.sqrt(drift / (n * width))

    def sampled_scale(self, most: int) -> Array:
        """The scale of `most` elements about, float64."""
        first, *other = (sample(x, most).double() for x in (self.golden, *(self.before or ())[1:]))
        return (first - other[0] if other else first).numpy()

    def measured(
        self, tolerance: Tolerance = UNJUDGED, groups: Groups = ONE_GROUP, *, fill: bool = True, shrink: float = 0.0
    ) -> Residuals:
        """Errors up to `shrink` count as none. `fill` asks for a tensor of each element's numbers. Without a tolerance
        there are neither statistics nor `allowed`."""
        o, g, before_o, before_g = self._arrays
        rows, columns, _ = self.sizes
        z, size = (np.empty(g.size if fill else 0) for _ in range(2))
        allowed = np.empty(z.size if tolerance is not UNJUDGED else 0)

        def run(unit: float) -> Any:
            given = o, g, before_o, before_g, rows, columns, *_format(self.dtype), tolerance, groups, ULPS
            return _residuals(*given, z, size, allowed, shrink, unit)

        sums, statistics, sampled = run(1.0)
        if (unit := _unit(sums[-1])) != 1.0:
            sums, statistics, sampled = run(unit)
        filled = (from_numpy(x).view(self.golden.shape if x.size else (0, 0)) for x in (z, size, allowed))
        return Residuals(self.golden.numel(), Sums(*sums), statistics, sampled, *filled)


@dataclass(frozen=True)
class Residuals:
    """Of every element of a block z = (observed - expected) / size, 0 where it does not count.

    `size` is that of errors: the scale's own, or the RMS of its row or its column, whichever is largest; Inf where an
    element does not count, since it has no size or its error is not finite. `allowed` is its tolerance. These are
    float64, and empty if they were not asked for. `groups` has, of the elements of each group that were looked at and
    count, their number and the sums of z and z^2.
    """

    count: int
    sums: Sums
    statistics: Statistics
    groups: tuple[Array, Array, Array]
    z: Tensor
    size: Tensor
    allowed: Tensor

    @property
    def relative(self) -> float:
        """The RMS of z."""
        return math.sqrt(self.sums.zz / self.count)

    @property
    def absolute(self) -> float:
        """The RMS of observed - expected, of what counts."""
        return _unit(self.sums.largest) * math.sqrt(self.sums.rr / self.count)


def plain(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in a dtype that holds it, contiguous, on the CPU; in pieces so small that torch takes one thread for each."""
    if x.dtype == dtype:
        return x.cpu().contiguous()
    flat, out = x.cpu().reshape(-1), torch.empty(x.numel(), dtype=dtype, device="cpu")
    for to, piece in zip(out.split(PIECE_ELEMENTS), flat.split(PIECE_ELEMENTS), strict=True):
        to.copy_(piece)
    return out.view(x.shape)


def float64(x: Tensor) -> Tensor:
    """x in float64, contiguous, on the CPU."""
    return plain(x, torch.float64)


def _format(dtype: str) -> tuple[Array, float]:
    """The unit in the last place of a dtype, by the exponent in a float64's bits; and its largest number."""
    return ulps_of(dtype_of(dtype)), torch.finfo(dtype_of(dtype)).max


def _unit(largest: float) -> float:
    """What numbers up to `largest` are divided by, so that float64 has their squares; 1 as a rule."""
    return 1.0 if 1e-150 < largest < 1e150 else largest or 1.0


@numba.njit(nogil=True, cache=True, fastmath={"reassoc"})
def change_sums(old: Array, new: Array) -> tuple[float, float, float]:
    """The largest |number| of two arrays, and the sums of squares of the old one and of the change; of finite ones."""
    largest = squares = changed = 0.0
    for k in range(len(old)):
        a, b = np.float64(old[k]), np.float64(new[k])
        x, y = a if abs(a) < math.inf else 0.0, b if abs(b) < math.inf else 0.0
        largest = max(largest, max(abs(x), abs(y)))
        squares += x * x
        changed += (y - x) ** 2
    return largest, squares, changed


@numba.njit(nogil=True, cache=True, fastmath={"reassoc"})
def _squares(g: Array, before_o: Array, before_g: Array, unit: float) -> tuple[Array, Array, float, float]:
    """Sums of squares of each row and column of the scale, in units of `unit`, and of how far the observed was off
    before; and the largest number of the scale."""
    n, width = g.shape
    rows, columns, largest, drift, based = np.zeros(n), np.zeros(width), 0.0, 0.0, len(before_g) > 0
    for i in range(n):
        row = 0.0
        for j in range(width):
            x: Any = np.float64(g[i, j])
            if based:
                was = np.float64(before_g[i, j])
                x -= was
                off = before_o[i, j] - was
                drift += off * off if abs(off) < math.inf else 0.0
            x = x if MASK < x < math.inf else 0.0
            largest = max(largest, abs(x))
            x = x if unit == 1.0 else x / unit
            square = x * x
            row += square
            columns[j] += square
        rows[i] = row
    return rows, columns, drift, largest


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"reassoc"})
def _residuals(
    o: Array,
    g: Array,
    before_o: Array,
    before_g: Array,
    rows: Array,
    columns: Array,
    spacing: Array,
    top: float,
    tolerance: Tolerance,
    groups: Groups,
    ulps: Array,
    z: Array,
    size: Array,
    allowed: Array,
    shrink: float,
    unit: float,
) -> tuple[tuple[float, ...], Statistics, tuple[Array, Array, Array]]:
    """:data:`Sums`, with r^2 in units of `unit`, and what else is in :class:`Residuals`; fills what is not empty."""
    n, width, based, half, several = *g.shape, len(before_g) > 0, tolerance.half, len(groups.borders) + 1
    x, y, scale, own = np.empty(CHUNK), np.empty(CHUNK), np.empty(CHUNK), np.empty(CHUNK)
    d, limit, bits, most = np.empty(CHUNK), np.empty(CHUNK), y.view(np.int64), np.finfo(np.float64).max
    count, total, squares = np.zeros(several), np.zeros(several), np.zeros(several)
    sums: Any = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, math.inf, 0.0
    found, done, k, sampled = NOTHING, 0, 0, 0
    for i in range(n):
        j = 0
        while j < width:
            m = min(width - j, CHUNK - k)
            for t in range(m):
                x[k + t], y[k + t] = o[i, j + t], g[i, j + t]
                scale[k + t], own[k + t] = y[k + t], max(rows[i], columns[j + t])
            for t in range(m if based else 0):
                scale[k + t] -= before_g[i, j + t]
                if abs(scale[k + t]) < math.inf:  # else it is the golden's that is not finite
                    y[k + t] = before_o[i, j + t] + scale[k + t]
                    ulp = spacing[(bits[k + t] >> 52) & 2047]
                    rounded = np.rint(y[k + t] / ulp) * ulp
                    y[k + t] = math.copysign(top, rounded) if abs(rounded) > top else rounded
            j, k = j + m, k + m
            if k < CHUNK and (i < n - 1 or j < width):
                continue
            sums = _added(x[:k], y[:k], scale, own, d, shrink, unit, sums)
            if len(half) > 0:
                for t in range(k):
                    most_off = half[(bits[t] >> 52) & 2047] + tolerance.factor * own[t] + tolerance.constant
                    limit[t] = min(most_off, most) if most_off >= 0.0 else 0.0  # NaN where there is no size
                found = gather(x[:k], y[:k], limit[:k], done, ulps, 0.0, math.inf, math.inf, found)
            for t in range(k):
                own[t] = max(own[t], 1e-300) if own[t] > 0.0 and abs(x[t] - y[t]) < math.inf else math.inf
            for filled, part in ((z, d), (size, own), (allowed, limit)):
                for t in range(k if len(filled) > 0 else 0):
                    filled[done + t] = part[t]
            while sampled < done + k:
                t, group = sampled - done, 0
                for border in groups.borders:
                    group += scale[t] >= border
                count[group] += own[t] < math.inf
                total[group] += d[t]
                squares[group] += d[t] * d[t]
                sampled += groups.apart
            done, k = done + k, 0
    return sums, found, (count, total, squares)


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"reassoc"})
def _added(
    x: Array, y: Array, scale: Array, own: Array, d: Array, shrink: float, unit: float, sums: tuple[float, ...]
) -> tuple[float, ...]:
    """:data:`Sums` with those of a chunk. `own`, the RMS of row or column, becomes the size; `d` is filled with z.

    No branch depends on an element, few arrays are written, and extremes are looked for only where there is one, so
    that the loop over all is compiled to vector instructions.
    """
    counted, sum_z, zz, rr, zh, hh, least, largest = sums
    extreme = False
    for t in range(len(x)):
        r = x[t] - y[t]
        whole = scale[t] if abs(scale[t]) < math.inf else 0.0
        own[t] = max(abs(whole), own[t])
        counts = (own[t] > 0.0) & (abs(r) < math.inf)
        by = max(own[t], 1e-300)
        r = r if counts & (abs(r) > shrink) else 0.0
        h = whole / by if counts else 0.0
        d[t] = r / by
        counted += counts
        sum_z += d[t]
        zz += d[t] * d[t]
        q = r if unit == 1.0 else r / unit
        rr += q * q
        zh += d[t] * h
        hh += h * h
        extreme |= (own[t] < least) | (abs(r) > largest)
    for t in range(len(x) if extreme else 0):
        r = abs(x[t] - y[t]) if own[t] > 0.0 else 0.0
        least, largest = min(least, own[t]), max(largest, r if shrink < r < math.inf else 0.0)
    return counted, sum_z, zz, rr, zh, hh, least, largest
