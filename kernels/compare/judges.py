"""Judges side by side: ours, and those that are in use. Each says whether a trace is wrong, and at which step first."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from labkit import Golden, Precision, Trace, localise

Judge = Callable[[Trace, Golden, Precision], "str | None"]


def ours(observed: Trace, golden: Golden, promised: Precision) -> str | None:
    """`labkit.localise` against the recorded golden."""
    return localise(observed, golden, promised).first


def steps_alone(observed: Trace, golden: Golden, promised: Precision) -> str | None:
    """`labkit.localise` against the golden's numbers, without its program."""
    return localise(observed, golden.trace(), promised).first


def _by_step(rule: Callable[[torch.Tensor, torch.Tensor], bool]) -> Judge:
    def judge(observed: Trace, golden: Golden, promised: Precision) -> str | None:
        for name in (one for one in golden.names if one not in golden.inputs):
            o, g = observed[name], golden[name]
            if g.is_floating_point() and (o.shape != g.shape or rule(o, g)):
                return name
        return None

    return judge


def _assert_close(o: torch.Tensor, g: torch.Tensor) -> bool:
    try:
        torch.testing.assert_close(o, g.to(o.dtype), equal_nan=True)
    except AssertionError:
        return True
    return False


def _allclose(o: torch.Tensor, g: torch.Tensor) -> bool:
    return not np.allclose(o.double().cpu().numpy(), g.cpu().numpy(), equal_nan=True)


def _finite_pair(o: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Both in float64 where the golden is finite, and whether the observed is not finite there."""
    o = o.double()
    keep = g.isfinite()
    return o[keep], g[keep], bool((~o[keep].isfinite()).any() or (o.isnan() & ~g.isnan()).any())


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    """Cosine of two float64 tensors; 1 for two zeros."""
    norms = float(a.norm() * b.norm())
    return float(a.flatten() @ b.flatten()) / norms if norms else float(bool((a == b).all()))


def relative_metric(a: torch.Tensor, b: torch.Tensor) -> float:
    """1 - 2<x,y>/(|x|^2+|y|^2), float64."""
    a, b = a.flatten(), b.flatten()
    total = float(a @ a + b @ b)
    return 1.0 - 2.0 * float(a @ b) / total if total else 0.0


def _cosine_rule(o: torch.Tensor, g: torch.Tensor) -> bool:
    a, b, odd = _finite_pair(o, g)
    if odd:
        return True
    alike = cosine(a, b)
    largest = float((a - b).abs().max()) if a.numel() else 0.0
    return alike < 0.9 or largest > 1.0 or (alike < 0.99 and largest > 1e-3)


def _relative_rule(o: torch.Tensor, g: torch.Tensor) -> bool:
    a, b, odd = _finite_pair(o, g)
    return odd or relative_metric(a, b) > 1e-3


def _l1_equal(o: torch.Tensor, g: torch.Tensor) -> bool:
    """Equality of L1 norms, to the six digits that such a hash is printed with."""
    a, b, odd = _finite_pair(o, g)
    return odd or f"{float(a.abs().sum()):.5e}" != f"{float(b.abs().sum()):.5e}"


def _fixed(tolerance: float) -> Callable[[torch.Tensor, torch.Tensor], bool]:
    def rule(o: torch.Tensor, g: torch.Tensor) -> bool:
        a, b, odd = _finite_pair(o, g)
        return odd or bool(((a - b).abs() > tolerance).any())

    return rule


JUDGES: dict[str, Judge] = {
    "labkit, recorded golden": ours,
    "labkit, steps alone": steps_alone,
    "torch.testing.assert_close": _by_step(_assert_close),
    "numpy.allclose": _by_step(_allclose),
    "cosine and max_abs rule": _by_step(_cosine_rule),
    "1 - 2<x,y>/(|x|^2+|y|^2) > 1e-3": _by_step(_relative_rule),
    "equal L1 norms": _by_step(_l1_equal),
    "fixed 1e-4": _by_step(_fixed(1e-4)),
    "fixed 1e-2": _by_step(_fixed(1e-2)),
}
