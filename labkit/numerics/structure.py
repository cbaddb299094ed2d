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
from collections.abc import Iterator
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Test:
    """One test: its statistic over what chance and `shared` allow; above 1 it fails. `at` is the group, if one."""

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
        rows = [
            (t.name, t.value, t.share, "" if t.at is None else t.at, "ok" if t.ok else "SYSTEMATIC") for t in self.tests
        ]
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
        return Structure(tuple(bound.null.tests(residual, chance)))
    scale = _Scale(golden, bound.noise)
    shared = torch.as_tensor(bound.shared, dtype=torch.float64, device=residual.device).expand(residual.shape)
    return Structure(tuple(_by_noise(scale, scale.units(residual), scale.units(shared.abs()), chance)))


def _matrix(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]) if x.ndim else x.reshape(1, 1)


class _Scale:
    """Errors and the golden in units of the noise; where there is none, or no finite golden, nothing is counted."""

    def __init__(self, golden: Tensor, noise: Tensor | float) -> None:
        g, self._dimensions = _matrix(golden), golden.ndim
        s = _matrix(torch.as_tensor(noise, dtype=torch.float64, device=g.device).expand(golden.shape))
        counted = (s > 0.0) & g.isfinite()
        self._unit = torch.where(counted, 1.0 / s, 0.0)
        self.counted = counted.double()
        self.h = torch.where(counted, g * self._unit, 0.0)

    def units(self, error: Tensor) -> Tensor:
        """An error in units of the noise, as a matrix; of each run, where runs come first."""
        e = error.reshape(*error.shape[: error.ndim - self._dimensions], *self._unit.shape)
        return torch.where(e.isfinite(), e, 0.0) * self._unit

    def sums(self) -> Iterator[tuple[str, Tensor]]:
        """The name of a test, which says how elements are grouped, and the weight of each element in its sum."""
        for name in ("mean", "rows", "columns", "tiles"):
            yield name, self.counted
            yield ("slope" if name == "mean" else name), self.h


class Null:
    """What chance gives the sums of a residual: those of simulated errors, one :meth:`add` each."""

    def __init__(self, golden: Tensor, noise: Tensor) -> None:
        self._scale = _Scale(golden, noise)
        self._squares: list[Tensor | float] = [0.0] * 8
        self._sizes: list[tuple[Tensor, Tensor]] = []

    def add(self, error: Tensor) -> None:
        """Simulated errors of the whole tensor, runs first."""
        z = self._scale.units(error)
        totals = (_GROUPS[name](z * weight) for name, weight in self._scale.sums())
        self._squares = [before + total.square().sum(0) for before, total in zip(self._squares, totals, strict=True)]
        self._sizes += zip(_size(z, whole=False), _size(z, whole=True), strict=True)

    def tests(self, residual: Tensor, chance: float) -> Iterator[Test]:
        """A residual held against what was added; `chance` is the false-alarm rate of a kind of test."""
        z, count = self._scale.units(residual), len(self._sizes)
        found: dict[str, Test] = {}
        for (name, weight), squares in zip(self._scale.sums(), self._squares, strict=True):
            total = _GROUPS[name](z * weight)
            allowed = quantile(0.5 * chance / total.numel(), count) * (torch.as_tensor(squares) / count).sqrt()
            found[name] = _worse(found.get(name), name, total, allowed, _GROUPS[name](weight * weight))
        yield from (found[name] for name in KINDS[:-1])
        worst = Test("rms", 0.0, 0.0)
        for whole in (False, True):
            null = torch.stack([sizes[whole] for sizes in self._sizes])
            t = quantile(0.5 * chance / null.shape[1], count - 1) * (1.0 + 1.0 / count) ** 0.5
            expected = null.mean(0) * (1.0 + KEPT)
            worst = _larger(worst, _size(z, whole), expected + t * null.std(0), expected, whole)
        yield worst


def _by_noise(x: _Scale, z: Tensor, common: Tensor, chance: float) -> Iterator[Test]:
    found: dict[str, Test] = {}
    for name, weight in x.sums():
        group = _GROUPS[name]
        total, variance = group(z * weight), group(weight * weight * x.counted)
        allowed = quantile(0.5 * chance / total.numel(), math.inf) * variance.sqrt() + group(common * weight.abs())
        found[name] = _worse(found.get(name), name, total, allowed, variance)
    yield from (found[name] for name in KINDS[:-1])
    worst = Test("rms", 0.0, 0.0)
    for whole in (False, True):  # a sum of n squares: n + 2 sqrt(n t) + 2 t at most (Laurent and Massart 2000)
        a, b, c = (x.reshape(1, -1) if whole else x for x in (z, common, x.counted))
        n, t = c.sum(1), math.log(2.0 * len(a) / chance)
        allowed = (n + 2.0 * (n * t).sqrt() + 2.0 * t).sqrt() + b.square().sum(1).sqrt()
        worst = _larger(worst, a.square().sum(1).sqrt(), allowed, n.sqrt(), whole)
    yield worst


def _larger(worst: Test, size: Tensor, allowed: Tensor, expected: Tensor, whole: bool) -> Test:
    share = torch.where(size > 0.0, size / allowed.clamp(min=1e-300), 0.0)
    at = int(share.argmax())
    if float(share[at]) < worst.share:
        return worst
    return Test("rms", float(share[at]), float(size[at] / expected[at].clamp(min=1e-300)), None if whole else at)


def _size(z: Tensor, whole: bool) -> Tensor:
    """The root mean square of the whole, or of each row; of each run, where there are several."""
    squares = z.square()
    return squares.mean((-2, -1)).sqrt().unsqueeze(-1) if whole else squares.mean(-1).sqrt()


def _worse(before: Test | None, name: str, total: Tensor, allowed: Tensor, scale: Tensor) -> Test:
    share = torch.where(total == 0.0, 0.0, total.abs() / allowed.clamp(min=1e-300))
    at = int(share.argmax())
    value = float(total[at] / scale[at].clamp(min=1e-300))
    test = Test(name, float(share[at]), value, None if name in ("slope", "mean") else at)
    return test if before is None or test.share > before.share else before


def _whole(x: Tensor) -> Tensor:
    return x.sum((-2, -1)).unsqueeze(-1)


def _rows(x: Tensor) -> Tensor:
    return x.sum(-1)


def _columns(x: Tensor) -> Tensor:
    return x.sum(-2)


def _tiles(x: Tensor) -> Tensor:
    grown = torch.nn.functional.pad(x, (0, -x.shape[-1] % TILE, 0, -x.shape[-2] % TILE))
    return grown.unflatten(-1, (-1, TILE)).unflatten(-3, (-1, TILE)).sum((-3, -1)).flatten(-2)


_GROUPS = {"slope": _whole, "mean": _whole, "rows": _rows, "columns": _columns, "tiles": _tiles}
