"""The first divergent step, and for each step its own error against the error that it inherits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from labkit.compare import Comparison, compare
from labkit.tables import Table, number
from labkit.trace import Step, Trace


@dataclass(frozen=True)
class Finding:
    """One step: against the golden as a whole, and by itself."""

    name: str
    total: Comparison | None
    """Against the golden of the whole chain; None where the observed has no such step."""
    own: Comparison | None
    """Against the golden step replayed on the observed inputs; None where it cannot be replayed."""
    inherited: float | None
    """RMS, relative to the golden, of what the observed inputs alone make wrong."""

    @property
    def diverges(self) -> bool:
        """The step is missing, or beyond the bound of the chain up to it."""
        return self.total is None or not self.total.ok


@dataclass(repr=False)
class Localisation:
    """What :func:`localise` found, a finding a step, in the golden's order."""

    findings: dict[str, Finding] = field(default_factory=dict)
    unexpected: list[str] = field(default_factory=list)
    """Steps that the observed has and the golden has not."""

    @property
    def first(self) -> str | None:
        """The first divergent step, or None."""
        return next((name for name, finding in self.findings.items() if finding.diverges), None)

    @property
    def own(self) -> list[str]:
        """The steps with an error of their own: wrong on the inputs that they were given."""
        return [name for name, f in self.findings.items() if f.own is not None and not f.own.ok]

    @property
    def inherited(self) -> list[str]:
        """The steps that diverge although they are right on the inputs that they were given."""
        return [name for name, f in self.findings.items() if f.diverges and f.own is not None and f.own.ok]

    def table(self) -> Table:
        """A row a step: largest difference, share of the bound that it uses, own and inherited error."""
        columns = ("step", "largest |o - g|", "of bound", "own, of bound", "inherited (rms)", "finding")
        return Table(columns, [_row(finding, self.first) for finding in self.findings.values()])

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()

    def __str__(self) -> str:
        return str(self.table())


def _row(f: Finding, first: str | None) -> tuple[str, ...]:
    if f.total is None:
        return (f.name, "", "", "", "", "missing in the observed")
    if f.own is None:
        words = "DIVERGES, own and inherited not separated" if f.diverges else "ok"
    elif not f.own.ok:
        words = "DIVERGES, own error"
    else:
        words = "diverges, inherited only" if f.diverges else "ok"
    if f.name == first:
        words += "  <- first"
    own = "" if f.own is None else number(f.own.bound_used)
    inherited = "" if f.inherited is None else number(f.inherited)
    return (f.name, number(f.total.max_abs), number(f.total.bound_used), own, inherited, words)


def localise(observed: Trace, golden: Trace) -> Localisation:
    """Hold each observed step against the golden's, within the golden's bounds.

    Where a golden step can be replayed and its inputs were observed, it is recomputed in float64 from them: what is
    left is the step's own error, and how far the replay is from the golden is what it inherits. A missing step, a
    different shape and a NaN on one side only are divergences, not exceptions.
    """
    result = Localisation(unexpected=[name for name in observed.names if name not in golden])
    for step in golden:
        if step.name not in observed:
            result.findings[step.name] = Finding(step.name, None, None, None)
            continue
        total = compare(observed[step.name], step.value, step.bound)
        own, inherited = _separate(observed, golden, step)
        result.findings[step.name] = Finding(step.name, total, own, inherited)
    return result


def _separate(observed: Trace, golden: Trace, step: Step) -> tuple[Comparison | None, float | None]:
    right = {name: golden[name] for name in step.inputs}
    if step.replay is None or any(_shape(observed, name) != tuple(value.shape) for name, value in right.items()):
        return None, None
    value, bound = step.replay(*(_as_golden(observed[name], step.value) for name in step.inputs))
    return compare(observed[step.name], value, bound), compare(value, step.value).rms_ratio


def _shape(trace: Trace, name: str) -> tuple[int, ...] | None:
    return tuple(trace[name].shape) if name in trace else None


def _as_golden(values: Any, golden: Any) -> Any:
    """Observed values in float64, as the kind of array that the golden is, where it is."""
    if isinstance(golden, torch.Tensor):
        return torch.as_tensor(values).detach().to(golden.device, torch.float64)
    return values.detach().double().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values, float)
