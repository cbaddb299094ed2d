"""Judges side by side: ours, and the checks that are in use, each with the tolerance that it is swept over.

Ours name the first wrong step. The others give every step a number that is larger the more it differs, told what
precision was promised; their verdict is the first step above a threshold, so that a sweep of thresholds is one pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from labkit import Golden, Precision, Trace, localise

Tensor = torch.Tensor
Judge = Callable[[Trace, Golden, Precision], "str | None"]
Score = Callable[[Tensor, Tensor, str], float]
"""Of an observed and a golden tensor, and the narrowest format that was promised."""


def ours(observed: Trace, golden: Golden, promised: Precision) -> str | None:
    """`labkit.localise` against the recorded golden."""
    return localise(observed, golden, promised).first


def steps_alone(observed: Trace, golden: Golden, promised: Precision) -> str | None:
    """`labkit.localise` against the golden's numbers, without its program."""
    return localise(observed, golden.trace(), promised).first


OURS: dict[str, Judge] = {"labkit, recorded golden": ours, "labkit, steps alone": steps_alone}

TOLERANCES = {"float32": (1.3e-6, 1e-5), "float16": (1e-3, 1e-5), "tf32": (1e-3, 1e-5), "bfloat16": (1.6e-2, 1e-5)}
"""Relative and absolute, torch.testing.assert_close's own; TF32 has as many digits as float16."""


def narrowest(promised: Precision) -> str:
    """The format with the fewest digits that a precision names: what a user would choose a tolerance for."""
    named = [kind for kind in (promised.storage, promised.products) if kind in TOLERANCES]
    return max(["float32", *named], key=lambda kind: TOLERANCES[kind][0])


def _finite_pair(o: Tensor, g: Tensor) -> tuple[Tensor, Tensor, bool]:
    """Both in float64 where the golden is finite, and whether the observed is not finite there."""
    o = o.double()
    keep = g.isfinite()
    return o[keep], g[keep], bool((~o[keep].isfinite()).any() or (o.isnan() & ~g.isnan()).any())


def cosine(a: Tensor, b: Tensor) -> float:
    """Cosine of two float64 tensors; 1 for two zeros."""
    norms = float(a.norm() * b.norm())
    return float(a.flatten() @ b.flatten()) / norms if norms else float(bool((a == b).all()))


def relative_metric(a: Tensor, b: Tensor) -> float:
    """1 - 2<x,y>/(|x|^2+|y|^2), float64."""
    a, b = a.flatten(), b.flatten()
    total = float(a @ a + b @ b)
    return 1.0 - 2.0 * float(a @ b) / total if total else 0.0


def _share(a: Tensor, b: Tensor, relative: float, absolute: float) -> float:
    return float(((a - b).abs() / (absolute + relative * b.abs())).max()) if a.numel() else 0.0


def _l1(a: Tensor, b: Tensor) -> float:
    x, y = float(a.abs().sum()), float(b.abs().sum())
    return abs(x - y) / y if y else float(x != y)


SCORES: dict[str, tuple[Score, float]] = {
    "torch.testing.assert_close": (lambda a, b, kind: _share(a, b, *TOLERANCES[kind]), 1.0),
    "numpy.allclose": (lambda a, b, kind: _share(a, b, 1e-5 * TOLERANCES[kind][0] / 1.3e-6, 1e-8), 1.0),
    "1 - cosine": (lambda a, b, kind: 1.0 - cosine(a, b), 0.01),
    "1 - 2<x,y>/(|x|^2+|y|^2)": (lambda a, b, kind: relative_metric(a, b), 1e-3),
    "L1 norms": (lambda a, b, kind: _l1(a, b), 5e-6),
    "fixed tolerance": (lambda a, b, kind: float((a - b).abs().max()) if a.numel() else 0.0, 1e-4),
}
"""For each its number, and the threshold in use: the function's default, the rule's published one, six digits, 1e-4.

assert_close and allclose are swept by a factor on both of their tolerances. 1 - cosine < 0.01 is Ascend's msprobe's
rule, the relative metric below 1e-3 that of DeepSeek's kernel tests."""


def graded(observed: Trace, golden: Golden, promised: Precision) -> dict[str, dict[str, float]]:
    """For each of SCORES and each step its number; infinite where one side only is finite or shapes differ."""
    kind = narrowest(promised)
    found: dict[str, dict[str, float]] = {name: {} for name in SCORES}
    for step in (one for one in golden.names if one not in golden.inputs):
        o, g = observed[step], golden[step]
        if not g.is_floating_point():
            continue
        a, b, odd = _finite_pair(o, g) if o.shape == g.shape else (o, g, True)
        for name, (score, _) in SCORES.items():
            found[name][step] = math.inf if odd else score(a, b, kind)
    return found


def verdict(numbers: Mapping[str, float], threshold: float) -> str | None:
    """The first step whose number is above the threshold."""
    return next((step for step, number in numbers.items() if number > threshold), None)
