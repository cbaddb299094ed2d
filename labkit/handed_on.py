"""What a step's inputs were off, and what its operation hands on of that, read from the words of the operation."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from labkit import words
from labkit.magnitude import finite, spread
from labkit.precision import UNIT

Tensor = torch.Tensor


@dataclass(frozen=True)
class Input:
    """One recorded input of a step: both sides in float64, and whether its own step was found wrong."""

    name: str
    observed: Tensor
    golden: Tensor
    wrong: bool

    @property
    def difference(self) -> Tensor:
        """Observed minus golden where both are finite."""
        d = self.observed - self.golden
        return torch.where(d.isfinite(), d, 0.0)


def inherited_error(inputs: Sequence[Input], op: str, results: int | None) -> tuple[float, float, float]:
    """Relative RMS error that the inputs bring, the largest single one relative to their RMS, and what averages out."""
    rms = peak = average = 0.0
    for one in inputs:
        d, g = one.difference, finite(one.golden)
        if not d.numel() or not bool(d.any()):
            continue
        size = float(g.pow(2).mean().sqrt())
        if words.SHIFTED.search(op) or not op:
            size = min(size, spread(g))
        error, largest = float(d.pow(2).mean().sqrt()), float(d.abs().max())
        relative, single = (error / size, largest / size) if size else (math.inf, math.inf)
        if words.EXPONENTIAL.search(op):
            relative, single = max(relative, error), max(single, largest)
        slope = abs(float((d * g).sum())) / max(float((g * g).sum()), 1e-300)
        rms, peak = max(rms, relative), max(peak, single)
        average = max(average, slope + 6.0 * relative / math.sqrt(min(d.numel(), results or d.numel())))
    return rms, peak, average


def locally(g: Tensor, op: str, inputs: Sequence[Input]) -> Tensor:
    """What elementwise operations hand on, element by element."""
    total = torch.zeros_like(finite(g))
    size = float(finite(g).pow(2).mean().sqrt())
    for one in inputs:
        d = one.difference.abs().expand(g.shape)
        x = finite(one.golden).expand(g.shape)
        before = float(x.pow(2).mean().sqrt())
        if words.ACTIVATION.search(op) and len(inputs) == 1:
            total = total + 1.2 * d
        elif before > 0.0:
            total = (
                total + min(2.0 * size / before, 1.0 if words.CANCELS.search(op) and size < before else math.inf) * d
            )
        if words.QUOTIENT.search(op):
            relative = torch.where(d > 0.0, 2.0 * d / x.abs(), 0.0)
            total = total + torch.where(relative > 0.5, math.inf, relative * finite(g).abs())  # no digit left: anything
        if words.MINUS.search(op) and "lr" not in op and size < before:
            total = total + 3.0 * d + 8.0 * UNIT["float32"] * x.abs()
    return total


def rescaled(g: Tensor, op: str, inputs: Sequence[Input]) -> Tensor:
    """What a normalisation hands on: it scales columns, and an error goes with its own column, not with the largest."""
    total = torch.zeros_like(finite(g))
    if not re.search(r"norm|\bln\d*\b", op, re.IGNORECASE) or g.ndim < 2:
        return total
    for one in inputs:
        if one.golden.shape == g.shape:
            flat = tuple(range(g.ndim - 1))
            before = finite(one.golden)
            before = before - before.mean(flat) if "rms" not in op.lower() else before
            column = (finite(g).pow(2).mean(flat) / before.pow(2).mean(flat).clamp(min=1e-300)).sqrt()
            scaled = (finite(g) / column.clamp(min=1e-300)).pow(2).mean(-1, keepdim=True)
            row = (scaled / before.pow(2).mean(-1, keepdim=True).clamp(min=1e-300)).sqrt()
            total = total + column * row * one.difference.abs()
    return total


def cancelled(g: Tensor, op: str, inputs: Sequence[Input]) -> float:
    """The absolute error that a subtraction of larger numbers leaves, where it is not elementwise."""
    if words.ONE_HOT.search(op):  # a probability near 1 less 1
        worst = max((float(x.difference.abs().max()) for x in inputs if x.golden.is_floating_point()), default=0.0)
        return (3.0 * worst + 16.0 * UNIT["float32"]) / (g.numel() / g.shape[-1] if "/" in op or "mean" in op else 1.0)
    if not words.MINUS.search(op) or re.search(r"lr|[*/]", op):
        return 0.0
    size = float(finite(g).pow(2).mean().sqrt())
    larger = [x for x in inputs if x.golden.is_floating_point() and float(finite(x.golden).pow(2).mean().sqrt()) > size]
    parts = [
        3.0 * float(x.difference.abs().max()) + 8.0 * UNIT["float32"] * float(finite(x.golden).abs().max())
        for x in larger
    ]
    return max(parts, default=0.0)


def sum_size(g: Tensor, inputs: Sequence[Input], op: str) -> tuple[float, float]:
    """About sum|a||b| of a reduction whose operands are the recorded inputs, and how many terms it has."""
    large = [x for x in inputs if x.golden.numel() >= g.numel()]
    if not large:
        return 0.0, 1.0
    product, most = 1.0, 1
    for x in inputs:
        if "scale" in x.name.lower() and x not in large[:2]:
            product *= float(finite(x.golden).abs().mean())
    for x in large[:2]:
        product *= float(finite(x.golden).abs().mean())
        most = max(most, x.golden.numel())
    ratio = most / max(1, g.numel())
    ratio = max(1.0, ratio)
    return (product if "mean" in op.lower() else product * ratio), ratio
