"""Structure in a residual: what is systematically off although every element is within its bound.

Rounding noise averages out and a defect does not. The noise of element i is taken as independent, of mean zero and
sub-Gaussian with parameter s_i (half an ULP for one rounding to nearest: Hoeffding's lemma), so that for any weights

    P(|sum w e| > t) <= 2 exp(-t^2 / (2 sum w^2 s^2))                          (Hoeffding 1963)
    P(sum e^2 / s^2 > N + 2 sqrt(N t) + 2 t) <= exp(-t)                        (Hsu, Kakade, Zhang 2012)

Six tests share the false-alarm rate: the slope of the residual on the golden, its mean, the means of rows, columns and
tiles (each also as a slope of its own), and the RMS of the whole and of each row, both as it is and in units of s.
Noise that is not independent (a factor rounded once, inputs that were off) is allowed for by `shared`: it may add up
with one sign everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from labkit.tables import Table

FALSE_ALARM = 1e-9
"""The probability that a right tensor, as a whole, is called systematically wrong."""

TILE = 64
LEAST, FEW = 8, 1.5
"""A group of fewer elements than LEAST is allowed FEW times as much, where each one's noise is not known."""

_KINDS = ("slope", "mean", "rows", "columns", "tiles", "rms")


@dataclass(frozen=True)
class Test:
    """One test: its statistic over what chance and `shared` allow; above 1 it fails. `at` is the group, if one."""

    name: str
    share: float
    value: float
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


def structure(
    residual: torch.Tensor,
    golden: torch.Tensor,
    noise: torch.Tensor | float,
    shared: torch.Tensor | float = 0.0,
    overall: torch.Tensor | float | None = None,
    false_alarm: float = FALSE_ALARM,
    *,
    by_element: bool = True,
) -> Structure:
    """Test `residual` = observed - golden, float64, any shape, for structure below the elementwise bound.

    `noise` is the parameter s_i of each element, `shared` the absolute part of each that may be common to a
    row, column or tile, `overall` the part that may be common to all (`shared` where it is not given). Elements that
    are not finite are left out. The last dimension is a row's, all others count rows. `by_element` is False where the
    noise is only known in the mean over many elements: then the RMS is not also taken in units of each one's noise, and
    groups of fewer than `LEAST` elements are allowed `FEW` times as much.
    """
    r, g = (_matrix(x) for x in (residual, golden))
    parts = (noise, shared, shared if overall is None else overall)
    s, c, w = (
        _matrix(torch.as_tensor(x, dtype=torch.float64, device=residual.device).expand(residual.shape)) for x in parts
    )
    if not r.numel():
        return Structure(tuple(Test(name, 0.0, 0.0) for name in _KINDS))
    keep = torch.isfinite(r) & torch.isfinite(g)
    r, g, s, c, w = (torch.where(keep, x, 0.0) for x in (r, g, s, c, w))
    return Structure(tuple(_tests(r, g, s, c, w, false_alarm, by_element)))


def _matrix(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1]) if x.ndim else x.reshape(1, 1)


def _tests(
    r: torch.Tensor, g: torch.Tensor, s: torch.Tensor, c: torch.Tensor, w: torch.Tensor, false_alarm: float,
    by_element: bool,
) -> Iterator[Test]:  # fmt: skip
    each = false_alarm / (2.0 * len(_KINDS))
    t = math.log(2.0 / each)
    s2 = s * s
    yield _linear("slope", (r * g).sum(), (g * g * s2).sum(), (w * g.abs()).sum(), t, (g * g).sum())
    yield _linear("mean", r.sum(), s2.sum(), w.sum(), t, float(r.numel()))
    for name, groups in (("rows", _by_row), ("columns", _by_column), ("tiles", _by_tile)):
        sums = [(groups(r), groups(s2), groups(c), groups(torch.ones_like(r)))]
        sums.append((groups(r * g), groups(g * g * s2), groups(c * g.abs()), groups(g * g)))
        found = [_grouped(name, *part, math.log(2.0 * part[0].numel() / each)) for part in sums]
        worst = max(found, key=lambda test: test.share)
        few = r.numel() < LEAST * sums[0][0].numel() and not by_element
        yield replace(worst, share=worst.share / FEW) if few else worst
    in_rows = math.log(r.shape[0] / each)
    scales = [(r, s, c)]
    if by_element:  # where an element's noise is small, a small error counts
        unit = torch.where(s > 0.0, 1.0 / s, 0.0)
        scales.append((r * unit, (s > 0.0).double(), c * unit))
    found = [_energy(a, b, d, in_rows, 0) for a, b, d in scales]
    found += [_energy(a.reshape(1, -1), b.reshape(1, -1), d.reshape(1, -1), t, None) for a, b, d in scales]
    yield max(found, key=lambda test: test.share)


def _linear(
    name: str, total: torch.Tensor, variance: torch.Tensor, common: torch.Tensor, t: float, scale: object
) -> Test:
    allowed = float((2.0 * t * variance).sqrt() + common)
    weight = float(scale)  # type: ignore[arg-type]
    return Test(name, _share(abs(float(total)), allowed), float(total) / weight if weight else 0.0)


def _grouped(
    name: str, total: torch.Tensor, variance: torch.Tensor, common: torch.Tensor, weight: torch.Tensor, t: float
) -> Test:
    allowed = (2.0 * t * variance).sqrt() + common
    share = torch.where(total.abs() <= allowed, total.abs() / allowed.clamp(min=1e-300), torch.inf)
    share = torch.where((allowed > 0.0) & (total.abs() > allowed), total.abs() / allowed.clamp(min=1e-300), share)
    at = int(share.argmax())
    return Test(name, float(share[at]), float(total[at] / weight[at].clamp(min=1e-300)), at)


def _energy(r: torch.Tensor, s: torch.Tensor, c: torch.Tensor, t: float, at: int | None) -> Test:
    n = (s > 0.0).sum(1).double()
    s2 = s * s
    top = s2.amax(1)
    # Unequal parameters: sum s^2 + 2 sqrt(t sum s^4) + 2 t max s^2; what is shared adds in norm.
    allowed = (s2.sum(1) + 2.0 * (t * (s2 * s2).sum(1)).sqrt() + 2.0 * t * top).sqrt() + (c * c).sum(1).sqrt()
    found = (r * r).sum(1).sqrt()
    share = torch.where(found > 0.0, found / allowed.clamp(min=1e-300), 0.0)
    k = int(share.argmax())
    return Test("rms", float(share[k]), float(found[k] / n[k].clamp(min=1.0).sqrt()), None if at is None else k)


def _share(value: float, allowed: float) -> float:
    return 0.0 if value == 0.0 else value / allowed if allowed > 0.0 else math.inf


def _by_row(x: torch.Tensor) -> torch.Tensor:
    return x.sum(1)


def _by_column(x: torch.Tensor) -> torch.Tensor:
    return x.sum(0)


def _by_tile(x: torch.Tensor) -> torch.Tensor:
    rows, columns = x.shape
    grown = torch.nn.functional.pad(x, (0, -columns % TILE, 0, -rows % TILE))
    return grown.reshape(-(-rows // TILE), TILE, -(-columns // TILE), TILE).sum((1, 3)).reshape(-1)
