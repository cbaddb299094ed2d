"""The first divergent step, and for each step its own error against the error that it inherits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from labkit.errors import UsageError
from labkit.numerics.compare import Comparison, compare
from labkit.numerics.structure import Structure, structure
from labkit.tables import Table, number
from labkit.trace.steps import Step, Trace


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
    structure: Structure | None = None
    """What is systematically off in the own error, below the bound; None where the noise is not known."""

    @property
    def own_error(self) -> bool:
        """The step is wrong on the inputs that it was given."""
        return (self.own is not None and not self.own.ok) or (self.structure is not None and not self.structure.ok)

    @property
    def diverges(self) -> bool:
        """The step is missing, beyond the bound of the chain up to it, or systematically off."""
        return self.total is None or not self.total.ok or self.own_error


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
        return [name for name, f in self.findings.items() if f.own_error]

    @property
    def inherited(self) -> list[str]:
        """The steps that diverge although they are right on the inputs that they were given."""
        return [name for name, f in self.findings.items() if f.diverges and f.own is not None and not f.own_error]

    def table(self) -> Table:
        """A row a step: largest difference, share of the bound that it uses, own and inherited error."""
        columns = ("step", "largest |o - g|", "of bound", "own, of bound", "structure", "inherited (rms)", "finding")
        rows = [_row(finding, self.first) for finding in self.findings.values()]
        rows += [(name, "", "", "", "", "", "not in the golden") for name in self.unexpected]
        return Table(columns, rows)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()

    def __str__(self) -> str:
        return str(self.table())


def _row(f: Finding, first: str | None) -> tuple[str, ...]:
    if f.total is None:
        mark = "  <- first" if f.name == first else ""
        return (f.name, "", "", "", "", "", f"missing in the observed{mark}")
    if f.own is None:
        words = "DIVERGES, own and inherited not separated" if f.diverges else "ok"
    elif f.own_error:
        words = "DIVERGES, own error" if not f.own.ok else "DIVERGES, systematic own error"
    else:
        words = "diverges, inherited only" if f.diverges else "ok"
    if f.name == first:
        words += "  <- first"
    own = "" if f.own is None else number(f.own.bound_used)
    inherited = "" if f.inherited is None else number(f.inherited)
    below = "" if f.structure is None else number(f.structure.worst.share)
    return (f.name, number(f.total.max_abs), number(f.total.bound_used), own, below, inherited, words)


def localise(observed: Trace, golden: Trace, names: Mapping[str, str] | None = None) -> Localisation:
    """Hold each observed step against the golden's, within the golden's bounds.

    Where a golden step can be replayed and its inputs were observed, it is recomputed in float64 from them: what is
    left is the step's own error, and how far the replay is from the golden is what it inherits. A missing step, a
    different shape and a NaN on one side only are divergences, not exceptions. Where the noise of a step is known,
    its own error is also tested for structure. A step that cannot be replayed, such as an intermediate that a
    monolithic kernel lets out, is reported with own and inherited not separated.

    `names` maps the golden's steps to the observed's where two implementations call them differently; a golden step
    that it leaves out keeps its name. Raises UsageError for a name that neither has.
    """
    if names:
        observed = _renamed(observed, golden, names)
    result = Localisation(unexpected=[name for name in observed.names if name not in golden])
    for step in golden:
        if step.name not in observed:
            result.findings[step.name] = Finding(step.name, None, None, None)
            continue
        total = compare(observed[step.name], step.value, step.bound)
        result.findings[step.name] = Finding(step.name, total, *_separate(observed, golden, step))
    return result


def _separate(observed: Trace, golden: Trace, step: Step) -> tuple[Comparison | None, float | None, Structure | None]:
    right = {name: golden[name] for name in step.inputs}
    if step.replay is None or any(_shape(observed, name) != tuple(value.shape) for name, value in right.items()):
        return None, None, None
    value, bound = step.replay(*(_as_golden(observed[name], step.value) for name in step.inputs))
    found = observed[step.name]
    own = compare(found, value, bound)
    below = None
    if bound.noise is not None and own.count > 0 and not own.observed_nan:
        exact = torch.as_tensor(value)
        residual = torch.as_tensor(found).detach().to(exact.device, torch.float64) - exact
        below = structure(residual, exact, torch.as_tensor(bound.noise), torch.as_tensor(bound.shared))
    return own, compare(value, step.value).rms_ratio, below


def _renamed(observed: Trace, golden: Trace, names: Mapping[str, str]) -> Trace:
    for ours, theirs in names.items():
        if ours not in golden or theirs not in observed:
            side, name = ("golden", ours) if ours not in golden else ("observed", theirs)
            raise UsageError(f"names: the {side} has no step {name!r}; wanted golden names mapped to observed ones")
    back = {theirs: ours for ours, theirs in names.items()}
    renamed = Trace(about=observed.about)
    for step in observed:
        inputs = tuple(back.get(name, name) for name in step.inputs)
        renamed.add(back.get(step.name, step.name), step.value, inputs, step.bound, step.replay, step.about)
    return renamed


def _shape(trace: Trace, name: str) -> tuple[int, ...] | None:
    return tuple(trace[name].shape) if name in trace else None


def _as_golden(values: Any, golden: Any) -> Any:
    """Observed values in float64, as the kind of array that the golden is, where it is."""
    if isinstance(golden, torch.Tensor):
        return torch.as_tensor(values).detach().to(golden.device, torch.float64)
    return values.detach().double().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values, float)
