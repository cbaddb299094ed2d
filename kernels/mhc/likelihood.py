"""What the report's ratio of wrong to right dalpha_pre says for each fault: its likelihood, draw by draw.

For a given x, phi, b and alpha both values of dalpha_pre, the wrong and the right, are linear in dx_in. Where dx_in is
normal they are normal together, with mean zero, and their ratio q has a Cauchy distribution (Marsaglia 1965): with the
variances W and R and the covariance C, its centre is C / R and its half-width sqrt(W R - C^2) / R. Its density at the
reported ratio is the fault's likelihood in that draw; no draw of dx_in, and no window around the ratio, is needed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
import torch

from kernels.mhc.faulty import CORRECT_ACCESS, PRIORS, Access, Priors, Problem
from kernels.mhc.problem import Constants
from whywrong.comparing.bounds import gamma
from whywrong.comparing.precision import UNIT_ROUNDOFF

Tensor = torch.Tensor
ORDER = "correct products, added in another order"
LEAST = 2.0**-52
"""The width of a fault that changes nothing at these sizes: what float64 resolves."""
FAMILY = 0.05
"""What is allowed over all rivals at once: that an interval misses, and that the one that is named is another."""


@dataclass(frozen=True)
class Ratios:
    """Of one fault, a number a draw: the Cauchy distribution's `centre` and `width`, the ratio that was `drawn`, and
    dalpha_pre as it is `right`.
    """

    centre: np.ndarray
    width: np.ndarray
    drawn: np.ndarray
    right: np.ndarray

    def density(self, ratio: float) -> np.ndarray:
        """The likelihood of `ratio` in each draw."""
        return self.width / math.pi / ((ratio - self.centre) ** 2 + self.width**2)

    def share(self, low: float, high: float) -> float:
        """The probability of a ratio between `low` and `high`, over draws."""
        edges = [np.arctan2(edge - self.centre, self.width) for edge in (low, high)]
        return float(np.mean(edges[1] - edges[0]) / math.pi)


def weights(p: Problem, access: Access) -> Tensor:
    """[T D] float64: dalpha_pre is their inner product with dx_in, where operands are read as `access` says."""
    t, n, d = p.x.shape
    tile, strides, pre_token = access.strides(n, d)
    columns = min(tile, d)
    last = sum((size - 1) * stride for size, stride in zip((t, n, columns), strides, strict=True))
    flat = _padded(p.x, last + 1)
    x = flat.as_strided((t, n, columns), strides)
    at = torch.arange(t)[:, None] * pre_token + torch.arange(n) + access.pre_start
    gate = _padded(p.pre, int(at.max()) + 1)[at] - (p.eps if access.eps else 0.0)
    row = torch.arange(t)[:, None] * p.raw.shape[1] + access.mix + torch.arange(n)
    mix = _padded(p.raw, int(row.max()) + 1)[row] * (p.r.double()[:, None] if access.r else 1.0)
    found = torch.zeros(t * d + access.dx_in + d, dtype=torch.float64)
    inner = (gate * (1.0 - gate) * mix)[:, None, :] @ x
    found[access.dx_in : access.dx_in + t * d].view(t, d)[:, :columns] = inner[:, 0]
    return found[: t * d]


def _padded(values: Tensor, count: int) -> Tensor:
    flat = values.double().flatten()
    return torch.nn.functional.pad(flat, (0, max(0, count - flat.numel())))


def ratios(
    tokens: int,
    n: int,
    d: int,
    seeds: Sequence[int],
    accesses: Mapping[str, Access],
    constants: Constants,
    priors: Priors = PRIORS,
) -> dict[str, Ratios]:
    """Each fault's ratios over the same draws; `ORDER` is the correct kernel, off by what any order may be off."""
    rows: dict[str, list[tuple[float, float, float, float]]] = {name: [] for name in (ORDER, *accesses)}
    lost = gamma(tokens * n, UNIT_ROUNDOFF["float32"], 1)
    for seed in seeds:
        p = Problem.sample(tokens, n, d, seed, constants, "cpu", priors=priors)
        p = replace(p, x=p.x.double(), raw=p.raw.double(), pre=p.pre.double())  # once, and not for every access
        right, dx_in = weights(p, CORRECT_ACCESS), p.dx_in.double().flatten()
        variance, value = float(right @ right), float(right @ dx_in)
        rows[ORDER].append((1.0, lost * float(right.abs().sum()) / math.sqrt(variance), 1.0, value))
        for name, access in accesses.items():
            wrong = weights(p, access)
            centre = float(wrong @ right) / variance
            apart = wrong - centre * right  # what is left of it, exactly uncorrelated: no difference of large squares
            width = max(math.sqrt(float(apart @ apart) / variance), LEAST)
            rows[name].append((centre, width, float(wrong @ dx_in) / value, value))
    return {name: Ratios(*np.array(found).T) for name, found in rows.items()}


@dataclass(frozen=True)
class Comparison:
    """The likeliest fault against each other one: the likelihood ratio, and its interval from `low` to `high`, by name.

    A likelihood is the mean of its densities over the draws; the intervals hold for all rivals at once with a
    probability of 1 - FAMILY, as far as the number of draws goes (delta method, normal, Bonferroni). `share` is each
    fault's share of all likelihoods: its probability, if all are equally probable beforehand.
    """

    best: str
    ratio: dict[str, float]
    low: dict[str, float]
    high: dict[str, float]
    share: dict[str, float]

    @property
    def needed(self) -> float:
        """The ratio at which a rival is refuted: with all of them there, the likeliest has a share of 95%."""
        return len(self.ratio) * (1.0 - FAMILY) / FAMILY

    @property
    def left(self) -> list[str]:
        """The likeliest, and every rival that is not refuted."""
        return self.left_at(self.needed)

    def left_at(self, times: float) -> list[str]:
        """The likeliest, and every rival that is not less likely by `times` or more, at the lower end."""
        return [self.best, *(name for name, low in self.low.items() if low < times)]

    @property
    def likelier(self) -> list[str]:
        """The rivals over which the likeliest is likelier for sure: the interval excludes 1."""
        return [name for name, low in self.low.items() if low > 1.0]


def compare(found: Mapping[str, Ratios], reported: Sequence[float]) -> Comparison:
    """Compare the likelihoods of ratios that were reported, each of a test with inputs of its own."""
    densities = {name: np.stack([one.density(q) for q in reported]) for name, one in found.items()}
    logs = {name: float(np.log(one.mean(1)).sum()) for name, one in densities.items()}
    best = max(logs, key=lambda name: logs[name])
    total = sum(math.exp(value - logs[best]) for value in logs.values())
    relative = {name: (one / one.mean(1, keepdims=True)).sum(0) for name, one in densities.items()}
    z = NormalDist().inv_cdf(1.0 - FAMILY / 2.0 / (len(found) - 1))
    ratio, low, high = {}, {}, {}
    for name in found:
        if name != best:
            off = z * float(np.std(relative[best] - relative[name], ddof=1)) / math.sqrt(len(relative[name]))
            at = logs[best] - logs[name]
            ratio[name], low[name], high[name] = (math.exp(min(value, 700.0)) for value in (at, at - off, at + off))
    return Comparison(best, ratio, low, high, {name: math.exp(one - logs[best]) / total for name, one in logs.items()})
