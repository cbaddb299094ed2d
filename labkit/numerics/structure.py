"""Structure in a residual: what is systematically off although every element is within its bound.

Rounding noise averages out and a defect does not. The residual is taken in units of each element's noise, z = r / s,
and a few sums of it are held to what chance gives them: the slope on the golden, sum z h with h = g / s; the mean; the
means and slopes of each row, column and tile; and the RMS, of the whole and of each row. What chance gives comes from
one of two places.

- Where the noise is known (a sum in unknown order, `Bound.noise`), elements are independent: a sum of z over n elements
  has variance n. `Bound.shared`, what may be common to all elements, is added with one sign.
- Otherwise from simulated right implementations (`Bound.null`): the same sums of the error of each, whose spread is an
  estimate, so that Student's quantile replaces the normal one.

All tests of a tensor share its false-alarm rate (Bonferroni).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from labkit.numerics.bounds import Bound, quantile
from labkit.tables import Table

Tensor = torch.Tensor

FALSE_ALARM = 1e-6
"""The probability that a right tensor, as a whole, is called systematically wrong."""

TILE = 64
"""Rows and columns of a tile: the smallest that GPU kernels commonly take for an output."""

KEPT = 2.0**-20
"""Relative: what the order of a sum may change where simulated errors are all alike and their spread is none."""

KINDS = ("slope", "mean", "rows", "columns", "tiles", "rms")
SUMS = ("mean", "rows", "columns", "tiles", "slope", "rows", "columns", "tiles")
"""What is tested by each sum: means, then slopes."""


@dataclass(frozen=True)
class Test:
    """One test: its statistic over what chance and `shared` allow; above 1 it fails. `at` is the group of several."""

    name: str
    share: float
    value: float
    """The slope, or the mean in units of the noise; of the RMS its ratio to what is expected."""
    at: int | None = None

    @property
    def ok(self) -> bool:
        """Whether chance explains it."""
        return self.share <= 1.0


@dataclass(frozen=True, repr=False)
class Structure:
    """What :func:`structure` found, a test each."""

    tests: tuple[Test, ...]

    @property
    def ok(self) -> bool:
        """Whether every test passes."""
        return all(test.ok for test in self.tests)

    @property
    def worst(self) -> Test:
        """The test that uses most of what it is allowed."""
        return max(self.tests, key=lambda test: test.share)

    def __str__(self) -> str:
        rows = [(t.name, t.value, t.share, t.at, "ok" if t.ok else "SYSTEMATIC") for t in self.tests]
        return str(Table(("structure", "value", "of allowed", "at", "finding"), rows))

    __repr__ = __str__


def structure(residual: Tensor, golden: Tensor, bound: Bound, false_alarm: float = FALSE_ALARM) -> Structure:
    """Test `residual` = observed - golden, float64, any shape, for structure below its elementwise bound.

    `bound` says what noise looks like, by `noise` and `shared` or by `null`. Elements that are not finite are left out.
    The last dimension is a row's, all others count rows. A tensor without elements passes.
    """
    if not residual.numel():
        return Structure(tuple(Test(name, 0.0, 0.0) for name in KINDS))
    chance = false_alarm / len(KINDS)
    if bound.null is not None:
        return Structure(bound.null.tests(residual, chance))
    x = _Scale(golden, bound.noise)
    common = x.units(
        torch.as_tensor(bound.shared, dtype=torch.float64, device=golden.device).expand(golden.shape).abs()
    )
    sums = []
    for variance, more in zip(x.squares, x.sums(common, torch.abs), strict=True):
        sums.append(quantile(0.5 * chance / variance.numel(), math.inf) * variance.sqrt() + more)
    sizes = []
    for n, more in zip(_sizes(x.counted), _sizes(common), strict=True):
        # a sum of n squares: n + 2 sqrt(n t) + 2 t at most (Laurent and Massart 2000)
        t = math.log(2.0 * len(n) / chance)
        sizes.append(((n.square() + 2.0 * n * t**0.5 + 2.0 * t).sqrt() + more, n))
    return Structure(_tests(x, residual, sums, sizes))


class _Scale:
    """Errors and the golden in units of the noise; where there is none, or no finite golden, nothing is counted."""

    def __init__(self, golden: Tensor, noise: Tensor | float) -> None:
        self._dimensions, self._rows = golden.ndim, (-1, *golden.shape[-1:]) if golden.ndim else (1, 1)
        g = golden.reshape(self._rows)
        s = torch.as_tensor(noise, dtype=torch.float64, device=g.device).expand(golden.shape).reshape(self._rows)
        counted = (s > 0.0) & g.isfinite()
        self._unit = torch.where(counted, 1.0 / s, 0.0)
        self.counted = counted.double()
        self.h = torch.where(counted, g * self._unit, 0.0)

    def units(self, error: Tensor) -> Tensor:
        """An error in units of the noise, as a matrix; of each run, where runs come first."""
        e = error.reshape(*error.shape[: error.ndim - self._dimensions], *self._unit.shape)
        return torch.where(e.isfinite(), e, 0.0) * self._unit

    def sums(self, z: Tensor, of: Callable[[Tensor], Tensor] = lambda weight: weight) -> list[Tensor]:
        """The sums of z in the order of SUMS: weighted alike, for means, and by the golden, for slopes."""
        return [total for weight in (self.counted, self.h) for total in _grouped(z * of(weight))]

    @cached_property
    def squares(self) -> list[Tensor]:
        """The variance of each sum where elements are independent, and the unit of what it measures."""
        return [total for weight in (self.counted, self.h) for total in _grouped(weight.square())]


class Null:
    """What chance gives the sums of a residual: those of simulated errors, of several kinds, whichever give most."""

    def __init__(self, golden: Tensor, noise: Tensor) -> None:
        self._scale = _Scale(golden, noise)
        self._kinds: dict[bool, tuple[list[Any], list[tuple[Tensor, Tensor]]]] = {}

    def add(self, error: Tensor, kind: bool = False) -> None:
        """Simulated errors of the whole tensor, runs first."""
        z = self._scale.units(error)
        squares, sizes = self._kinds.setdefault(kind, ([0.0] * len(SUMS), []))
        totals = self._scale.sums(z)
        squares[:] = [before + total.square().sum(0) for before, total in zip(squares, totals, strict=True)]
        sizes.append(_sizes(z))

    def tests(self, residual: Tensor, chance: float) -> tuple[Test, ...]:
        """A residual held against what was added; `chance` is the false-alarm rate of a kind of test."""
        sums, sizes = zip(*(_allowed(*one, chance) for one in self._kinds.values()), strict=True)
        most = [torch.stack(each).amax(0) for each in zip(*sums, strict=True)]
        sized = [torch.stack(each).amax(0).unbind() for each in zip(*sizes, strict=True)]
        return _tests(self._scale, residual, most, sized)


def _allowed(squares: list[Tensor], sizes: list[tuple[Tensor, Tensor]], chance: float) -> tuple[list[Any], list[Any]]:
    """What sums may be at most by simulated ones, and sizes: at most and usually."""
    nulls = [torch.cat(parts) for parts in zip(*sizes, strict=True)]
    count = len(nulls[0])
    sums = [quantile(0.5 * chance / s.numel(), count) * (s / count).sqrt() for s in squares]
    found = []
    for null in nulls:
        t = quantile(0.5 * chance / null.shape[1], count - 1) * (1.0 + 1.0 / count) ** 0.5
        expected = null.mean(0) * (1.0 + KEPT)
        found.append(torch.stack([expected + t * null.std(0), expected]))
    return sums, found


def _tests(x: _Scale, residual: Tensor, sums: list[Tensor], sizes: Sequence[Sequence[Tensor]]) -> tuple[Test, ...]:
    """The worst of each kind, by what the sums may be, and the sizes of the rows and of the whole: at most, usually."""
    z = x.units(residual)
    found = [_test(*each) for each in zip(SUMS, x.sums(z), sums, x.squares, strict=True)]
    found += [_test("rms", size, *allowed) for size, allowed in zip(_sizes(z), sizes, strict=True)]
    return tuple(max((test for test in found if test.name == kind), key=lambda test: test.share) for kind in KINDS)


def _test(name: str, total: Tensor, allowed: Tensor, unit: Tensor) -> Test:
    share = torch.where(total == 0.0, 0.0, total.abs() / allowed.clamp(min=1e-300))
    at = int(share.argmax())
    return Test(name, float(share[at]), float(total[at] / unit[at].clamp(min=1e-300)), at if len(total) > 1 else None)


def _sizes(z: Tensor) -> tuple[Tensor, Tensor]:
    """The root of the sum of squares of each row, and of the whole; of each run, where there are several."""
    rows = z.square().sum(-1)
    return rows.sqrt(), rows.sum(-1, keepdim=True).sqrt()


def _grouped(x: Tensor) -> list[Tensor]:
    """The sum of a matrix, those of its rows, columns and tiles; of each run, where there are several."""
    strips = _strips(x, -1)
    rows, columns, tiles = strips.sum(-1), x.sum(-2), _strips(strips, -2)
    return [rows.sum(-1, keepdim=True), rows, columns, tiles.flatten(-2)]


def _strips(x: Tensor, dimension: int) -> Tensor:
    """Sums of TILE neighbours along a dimension, and of what is left."""
    count, rest = divmod(x.shape[dimension], TILE)
    first, last = x.split([count * TILE, rest], dimension)
    first = first.unflatten(dimension, (count, TILE)).sum(dimension)
    return torch.cat([first, last.sum(dimension, keepdim=True)], dimension) if rest else first
