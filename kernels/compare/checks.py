"""whywrong.localise and the checks in common use, side by side, each against the same two references.

A reference is *stored*, its values as they were computed once, or *re-run*: each step computed again in float64 on what
was observed before it. `whywrong.localise` reports the first wrong step. A check gives every step a number that is
larger the more it differs, told what precision was declared; what it flags is the first step above a threshold,
so that a sweep of thresholds is one pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from whywrong import Golden, Precision, Trace, localise

Tensor = torch.Tensor
Difference = Callable[[Tensor, Tensor, str], float]
"""Of an observed and a reference tensor, float64, and the narrowest format that was declared."""

STORED, RERUN = "stored", "re-run"
REFERENCES = (STORED, RERUN)
LABKIT = "whywrong.localise"

TOLERANCES = {"float32": (1.3e-6, 1e-5), "float16": (1e-3, 1e-5), "tf32": (1e-3, 1e-5), "bfloat16": (1.6e-2, 1e-5)}
"""Relative and absolute, torch.testing.assert_close's own; TF32 has as many digits as float16."""


def first_wrong(observed: Trace, golden: Golden, declared: Precision, reference: str = RERUN) -> str | None:
    """The first step that `whywrong.localise` flags, against the re-run reference or its stored values alone."""
    return localise(observed, golden if reference == RERUN else golden.trace(), precision=declared).first


def narrowest(declared: Precision) -> str:
    """The format with the fewest digits that a precision names: what a user would choose a tolerance for."""
    formats = [kind for kind in (declared.storage, declared.products) if kind in TOLERANCES]
    return max(["float32", *formats], key=lambda kind: TOLERANCES[kind][0])


def _finite_pair(observed: Tensor, reference: Tensor) -> tuple[Tensor, Tensor, bool]:
    """Both in float64 where the reference is finite, and whether they disagree on what is not finite."""
    observed = observed.double()
    finite = reference.isfinite()
    infinite, wanted = observed[~finite], reference[~finite]
    same = (infinite == wanted) | (infinite.isnan() & wanted.isnan())
    return observed[finite], reference[finite], not bool(observed[finite].isfinite().all() and same.all())


def cosine(a: Tensor, b: Tensor) -> float:
    """Cosine of two float64 tensors; 1 for two zeros."""
    norms = float(a.norm() * b.norm())
    return float(a.flatten() @ b.flatten()) / norms if norms else float(bool((a == b).all()))


def relative_metric(a: Tensor, b: Tensor) -> float:
    """1 - 2<x,y>/(|x|^2+|y|^2), float64."""
    a, b = a.flatten(), b.flatten()
    total = float(a @ a + b @ b)
    return 1.0 - 2.0 * float(a @ b) / total if total else 0.0


def _times_tolerance(a: Tensor, b: Tensor, relative: float, absolute: float) -> float:
    return float(((a - b).abs() / (absolute + relative * b.abs())).max()) if a.numel() else 0.0


def l1_difference(a: Tensor, b: Tensor) -> float:
    """How far the L1 norms of two float64 tensors differ, relative to the second's."""
    x, y = float(a.abs().sum()), float(b.abs().sum())
    return abs(x - y) / y if y else float(x != y)


CHECKS: dict[str, tuple[Difference, float]] = {
    "torch.testing.assert_close": (lambda a, b, kind: _times_tolerance(a, b, *TOLERANCES[kind]), 1.0),
    "numpy.allclose": (lambda a, b, kind: _times_tolerance(a, b, 1e-5 * TOLERANCES[kind][0] / 1.3e-6, 1e-8), 1.0),
    "1 - cosine": (lambda a, b, kind: 1.0 - cosine(a, b), 0.01),
    "1 - 2<x,y>/(|x|^2+|y|^2)": (lambda a, b, kind: relative_metric(a, b), 1e-3),
    "L1 norms": (lambda a, b, kind: l1_difference(a, b), 5e-6),
    "fixed tolerance": (lambda a, b, kind: float((a - b).abs().max()) if a.numel() else 0.0, 1e-4),
}
"""For each its number, and the threshold in use: the function's default, the rule's published one, six digits, 1e-4.

assert_close and allclose are swept by a factor on both of their tolerances. 1 - cosine < 0.01 is Ascend's msprobe's
rule, the relative metric below 1e-3 that of DeepSeek's kernel tests."""


def rerun(golden: Golden, observed: Trace) -> dict[str, Tensor]:
    """Each computed step of the golden, computed again in float64 on what was observed before it."""
    before = {number: observed[name] for name, number in golden.steps.items()}
    before = {number: x.double() if x.is_floating_point() else x for number, x in before.items()}
    again = {}
    for name in (name for name in golden.names if name not in golden.inputs):
        number = golden.steps[name]
        inputs = {other: x for other, x in before.items() if other != number}
        operations = golden.program.cone({number}, inputs)
        again[name] = golden.program.run(operations, inputs, {number})[number]
    return again


def differences(observed: Trace, reference: Mapping[str, Tensor], declared: Precision) -> dict[str, dict[str, float]]:
    """For each of CHECKS and each step of the reference its number.

    Infinite where the two disagree on what is not finite, or shapes differ. Steps of whole numbers are left out.
    """
    kind = narrowest(declared)
    numbers: dict[str, dict[str, float]] = {check: {} for check in CHECKS}
    for step, right in reference.items():
        if not right.is_floating_point():
            continue
        same_shape = observed[step].shape == right.shape
        a, b, disagree = _finite_pair(observed[step], right) if same_shape else (observed[step], right, True)
        for check, (difference, _) in CHECKS.items():
            numbers[check][step] = math.inf if disagree else difference(a, b, kind)
    return numbers


def first_above(numbers: Mapping[str, float], threshold: float) -> str | None:
    """The first step whose number is above the threshold."""
    return next((step for step, number in numbers.items() if number > threshold), None)
