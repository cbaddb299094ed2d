"""Structure in a residual: what is systematically off although every element is within its bound.

Rounding noise averages out and a defect does not. The residual is taken in units of each element's noise, z = r / s,
and a few sums of it are tested against what chance gives them: the slope on the golden, sum z h with h = g / s; the
mean; the means and slopes of each row, column and tile; and the RMS, of the whole and of each row. What chance gives
comes from one of two places.

- Where the noise is known (a sum in unknown order, `Bound.noise`), elements are independent: a sum of z over n elements
  has variance n. `Bound.shared`, what may be common to all elements, is added with one sign.
- Otherwise from simulated correct implementations (`Bound.null`): the same sums of the error of each, whose spread is
  an estimate, so that Student's quantile replaces the normal one.

All tests of a tensor share its rate of false positives (Bonferroni).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whywrong.comparing.bounds import Bound, quantile

STRUCTURE_FALSE_POSITIVES = 1e-6
"""The probability that a correct tensor, as a whole, is flagged as systematically wrong."""

TILE = 64
"""Rows and columns of a tile: the smallest that GPU kernels commonly take for an output."""

ORDER_EFFECT = 2.0**-20
"""Relative: what the order of a sum may change where simulated errors are all alike and their spread is none."""

STRUCTURE_TESTS = ("slope", "mean", "rows", "columns", "tiles", "rms")
SUM_TESTS = ("mean", "rows", "columns", "tiles", "slope", "rows", "columns", "tiles")
"""What is tested by each group of sums: means, then slopes."""
SIZE_TESTS = ("rms", "rms")
"""By each group of sizes: of the rows, and of the whole."""


@dataclass(frozen=True)
class Test:
    """One test: `share` is its statistic over what chance and `shared` allow; above 1 it fails.

    `name` is one of :data:`STRUCTURE_TESTS`; `at` is the number of the row, column or tile where there are several.
    """

    name: str
    share: float
    value: float
    """The slope, or the mean in units of the noise; of the RMS its ratio to what is expected."""
    at: int | None = None

    @property
    def ok(self) -> bool:
        """Whether chance explains it."""
        return self.share <= 1.0


@dataclass(frozen=True)
class Structure:
    """What :func:`structure` found: the worst test of each kind, in the order of :data:`STRUCTURE_TESTS`."""

    tests: tuple[Test, ...]

    @property
    def ok(self) -> bool:
        """Whether every test passes."""
        return all(test.ok for test in self.tests)

    @property
    def worst(self) -> Test:
        """The test that uses most of what it is allowed."""
        return max(self.tests, key=lambda test: test.share)


def structure(
    residual: Tensor, golden: Tensor, bound: Bound, *, false_alarm: float = STRUCTURE_FALSE_POSITIVES
) -> Structure:
    """Test `residual` = observed - golden, float64, any shape, for structure below its elementwise bound.

    `bound` says what noise looks like, by `noise` and `shared` or by `null`. Elements that are not finite are left out.
    The last dimension is a row's, all others count rows. A tensor without elements passes.
    """
    if not residual.numel():
        return Structure(tuple(Test(name, 0.0, 0.0) for name in STRUCTURE_TESTS))
    chance = false_alarm / len(STRUCTURE_TESTS)
    if bound.null is not None:
        return Structure(bound.null.tests(residual, chance))
    x = _Scale(golden, bound.noise)
    shared = torch.as_tensor(bound.shared, dtype=torch.float64, device=golden.device).expand(golden.shape)
    common = x.units(shared.abs())
    n = x.sizes(x.weights[0])
    # a sum of n squares: n + 2 sqrt(n t) + 2 t at most (Laurent and Massart 2000)
    t = _each(x.size_groups, lambda count: math.log(2.0 * count / chance), n)
    spread = _each(x.sum_groups, lambda count: quantile(0.5 * chance / count, math.inf), n)
    sums = spread * x.squares.sqrt() + _grouped(common * x.weights.abs())
    sizes = (n.square() + 2.0 * n * t.sqrt() + 2.0 * t).sqrt() + x.sizes(common)
    return Structure(x.tests(residual, torch.cat([sums, sizes]), n))


class _Scale:
    """Errors and the golden in units of the noise; where there is none, or no finite golden, nothing is counted.

    Sums are in groups, those of :data:`SUM_TESTS`, one after the other in a vector; so are sizes, the roots of sums of
    squares, in the groups of :data:`SIZE_TESTS`.
    """

    def __init__(self, golden: Tensor, noise: Tensor | float) -> None:
        self._dimensions, matrix = golden.ndim, (-1, *golden.shape[-1:]) if golden.ndim else (1, 1)
        g = golden.reshape(matrix)
        s = torch.as_tensor(noise, dtype=torch.float64, device=g.device).expand(golden.shape).reshape(matrix)
        counted = (s > 0.0) & g.isfinite()
        self._unit = torch.where(counted, 1.0 / s, 0.0)
        self.weights = torch.stack([counted.double(), torch.where(counted, g * self._unit, 0.0)])
        rows, columns = self._unit.shape
        self.sum_groups = (1, rows, columns, -(-rows // TILE) * -(-columns // TILE)) * 2
        self.size_groups = (rows, 1)

    def units(self, error: Tensor) -> Tensor:
        """An error in units of the noise, as a matrix; of each run, where runs come first."""
        e = error.reshape(*error.shape[: error.ndim - self._dimensions], *self._unit.shape)
        return e.nan_to_num(0.0, 0.0, 0.0) * self._unit

    def sums(self, z: Tensor) -> Tensor:
        """The sums of z, for means, and of z times the golden, for slopes; of each run where there are several."""
        return _grouped(z.unsqueeze(-3) * self.weights)

    @cached_property
    def squares(self) -> Tensor:
        """The variance of each sum where elements are independent, and the unit of what it measures."""
        return _grouped(self.weights.square())

    def sizes(self, z: Tensor) -> Tensor:
        """The sizes of z, of each run where there are several."""
        rows = z.square().sum(-1)
        return torch.cat([rows, rows.sum(-1, keepdim=True)], -1).sqrt()

    def tests(self, residual: Tensor, allowed: Tensor, usual: Tensor) -> tuple[Test, ...]:
        """The worst of each kind, by what sums and sizes may be at most, and what sizes are usually."""
        z = self.units(residual)
        total = torch.cat([self.sums(z), self.sizes(z)])
        numbers = torch.stack([total, allowed, torch.cat([self.squares, usual])]).cpu().numpy()
        value, share = (numbers[0] / np.maximum(each, 1e-300) for each in (numbers[2], numbers[1]))
        share, worst, start = abs(share), dict.fromkeys(STRUCTURE_TESTS, Test("", -1.0, 0.0)), 0
        for name, count in zip((*SUM_TESTS, *SIZE_TESTS), (*self.sum_groups, *self.size_groups), strict=True):
            k = start + int(share[start : start + count].argmax())
            if share[k] > worst[name].share:
                worst[name] = Test(name, float(share[k]), float(value[k]), k - start if count > 1 else None)
            start += count
        return tuple(worst.values())


class Null:
    """What chance gives the sums of a residual: those of simulated errors, of several kinds, whichever give most."""

    def __init__(self, golden: Tensor, noise: Tensor) -> None:
        self._scale = _Scale(golden, noise)
        self._kinds: dict[bool, tuple[Any, list[Tensor]]] = {}

    def add(self, error: Tensor, kind: bool = False) -> None:
        """Simulated errors of the whole tensor, runs first."""
        z = self._scale.units(error)
        squares, sizes = self._kinds.get(kind, (0.0, []))
        self._kinds[kind] = squares + self._scale.sums(z).square().sum(0), [*sizes, self._scale.sizes(z)]

    def tests(self, residual: Tensor, chance: float) -> tuple[Test, ...]:
        """A residual tested against what was added; `chance` is the false-positive rate of a kind of test."""
        most = [self._allowed(squares, torch.cat(sizes), chance) for squares, sizes in self._kinds.values()]
        allowed, usual = (torch.stack(each).amax(0) for each in zip(*most, strict=True))
        return self._scale.tests(residual, allowed, usual)

    def _allowed(self, squares: Any, sizes: Tensor, chance: float) -> tuple[Tensor, Tensor]:
        """What sums and sizes may be at most by simulated ones, and what sizes are usually."""
        count = len(sizes)
        spread = _each(self._scale.sum_groups, lambda n: quantile(0.5 * chance / n, count), squares)
        t = _each(self._scale.size_groups, lambda n: quantile(0.5 * chance / n, count - 1), squares)
        expected = sizes.mean(0) * (1.0 + ORDER_EFFECT)
        most = expected + t * (1.0 + 1.0 / count) ** 0.5 * sizes.std(0)
        return torch.cat([spread * (squares / count).sqrt(), most]), expected


def _each(groups: Sequence[int], of: Callable[[int], float], like: Tensor) -> Tensor:
    """A number for each group by its length, as often as the group is long; where `like` is."""
    return torch.from_numpy(np.repeat([of(count) for count in groups], groups)).to(like.device)


def _grouped(x: Tensor) -> Tensor:
    """The sum of each of two matrices, those of its rows, columns and tiles, one after the other; of each run."""
    strips = _strips(x, -1)
    rows, columns, tiles = strips.sum(-1), x.sum(-2), _strips(strips, -2)
    return torch.cat([rows.sum(-1, keepdim=True), rows, columns, tiles.flatten(-2)], -1).flatten(-2)


def _strips(x: Tensor, dimension: int) -> Tensor:
    """Sums of TILE neighbours along a dimension, and of what is left."""
    count, rest = divmod(x.shape[dimension], TILE)
    first, last = x.split([count * TILE, rest], dimension)
    first = first.unflatten(dimension, (count, TILE)).sum(dimension)
    return torch.cat([first, last.sum(dimension, keepdim=True)], dimension) if rest else first
