"""Counterfactuals: which defect, injected into the golden, reproduces the observed numbers at every setting."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from whywrong.comparing.bounds import EXACT, Bound
from whywrong.comparing.comparison import as_tensor, compare
from whywrong.errors import UsageError
from whywrong.recording.steps import Trace
from whywrong.tables import Table, digits

UNDECIDABLE = "undecidable"
MOST_ROWS = 20
"""Rows that a matrix shows: what a screen holds."""


@dataclass(frozen=True)
class Fit:
    """One hypothesis at one setting."""

    ok: bool
    residual: float
    """Largest |observed - counterfactual| / bound; NaN where one of the two raised."""
    words: str
    tested: bool = True
    """False where nothing could have distinguished them: no element, no step, or an infinite bound for each."""


@dataclass(repr=False)
class Weighing:
    """What :func:`weigh` found: a fit for each hypothesis at each setting that was tried."""

    settings: list[str]
    fits: dict[str, dict[str, Fit]] = field(default_factory=dict)

    @property
    def left(self) -> list[str]:
        """The hypotheses that reproduce the observed numbers at every setting."""
        return [name for name, fits in self.fits.items() if fits and all(fit.ok for fit in fits.values())]

    @property
    def refuted(self) -> dict[str, str]:
        """For each hypothesis that fails, the first setting at which it does."""
        failed = {name: [s for s, fit in fits.items() if fit.tested and not fit.ok] for name, fits in self.fits.items()}
        return {name: settings[0] for name, settings in failed.items() if settings}

    @property
    def untested(self) -> list[str]:
        """The hypotheses that nothing refuted, and that were not tested at every setting."""
        decided = {*self.left, *self.refuted}
        return [name for name in self.fits if name not in decided]

    @property
    def cause(self) -> str:
        """The one hypothesis left, or ``undecidable``; with none left, ``none of these``."""
        left, untested = self.left, self.untested
        if len(left) == 1 and not untested:
            return left[0]
        return UNDECIDABLE if left or untested else "none of these"

    @property
    def rivals(self) -> int:
        """How many hypotheses were refuted by an experiment that could have gone the other way."""
        return len(self.refuted)

    def matrix(self) -> Table:
        """Hypotheses by settings: those left first, then the refuted ones, MOST_ROWS rows in all."""
        left, settings = self.left, self.settings
        ordered = sorted(self.fits.items(), key=lambda item: (item[0] not in left, -len(item[1])))
        shown = ordered[:MOST_ROWS]
        rows = [(name, *(fits[s].words if s in fits else "not tried" for s in settings)) for name, fits in shown]
        hidden = f" ({len(ordered) - MOST_ROWS} more not shown)" if len(ordered) > MOST_ROWS else ""
        return Table(("hypothesis", *settings), rows, f"{len(left)} left, {self.rivals} refuted{hidden}")

    def _repr_html_(self) -> str:
        return self.matrix()._repr_html_()

    def __repr__(self) -> str:
        return str(self.matrix())


def weigh(
    observe: Callable[[Any], Any],
    hypotheses: Mapping[str, Callable[[Any], Any]],
    *,
    settings: Mapping[str, Any],
    outcomes: tuple[type[Exception], ...] = (),
    thorough: bool = True,
) -> Weighing:
    """Compare every hypothesis with the observation at every setting.

    `observe(setting)` runs the real implementation and gives an array or a Trace; `hypotheses[name](setting)` gives
    the counterfactual: ``(value, Bound)``, or a Trace whose steps carry bounds; whole numbers need none. Exceptions of
    the types `outcomes` are outcomes too, alike when their texts are. Unless `thorough`, a hypothesis is dropped at the
    first setting that refutes it, which is what makes thousands of them affordable. Raises UsageError for a
    counterfactual without a bound, and for an observed trace without the inputs of a counterfactual's. Steps that a
    fused kernel does not return are skipped; a hypothesis of which nothing is left to compare is not tested.
    """
    seen = {name: _outcome(observe, setting, outcomes) for name, setting in settings.items()}
    result = Weighing(list(settings))
    for name, counterfactual in hypotheses.items():
        fits = result.fits[name] = {}
        for setting, value in settings.items():
            fits[setting] = _fit(name, seen[setting], _outcome(counterfactual, value, outcomes))
            if not thorough and fits[setting].tested and not fits[setting].ok:
                break
    return result


def _outcome(run: Callable[[Any], Any], setting: Any, outcomes: tuple[type[Exception], ...]) -> Any:
    try:
        return run(setting)
    except outcomes as error:
        return error


def _fit(name: str, observed: Any, expected: Any) -> Fit:
    if isinstance(observed, Exception) or isinstance(expected, Exception):
        same = type(observed) is type(expected) and str(observed) == str(expected)
        words = str(observed) if isinstance(observed, Exception) else "ran"
        return Fit(same, float("nan"), ("fits: " if same else "differs: observed ") + words)
    if isinstance(expected, Trace):
        steps = [step for step in expected if step.name in observed]
        values = [step.value for step in steps]  # a value may have two names, as a last step that is returned
        missing = [s.name for s in expected if s.name not in observed and not any(s.value is v for v in values)]
        inputs = [n for n in missing if expected.step(n).bound is None and any(s.bound for s in expected)]
        if inputs:  # what was computed has a bound
            raise UsageError(f"observe: has no {', '.join(inputs)}; expected the inputs of hypothesis {name!r} too")
        if missing and not any(step.bound for step in steps):  # fused: what was computed is not among the steps
            return Fit(False, float("nan"), f"not tested: the observed has no {missing[0]}", tested=False)
        pairs = [(observed[step.name], step.value, step.bound) for step in steps]
    else:
        value, bound = expected if isinstance(expected, tuple) and len(expected) == 2 else (expected, None)
        pairs = [(observed, value, bound)]
    if all(bound is None for *_, bound in pairs):
        pairs = [(o, value, EXACT if _whole(value) else bound) for o, value, bound in pairs]
    bounds = [bound for *_, bound in pairs if bound is not None]
    if (pairs and not bounds) or not all(isinstance(bound, Bound) for bound in bounds):
        expectation = "expected (value, whywrong.Bound), a Trace with bounds, or whole numbers"
        raise UsageError(f"hypothesis {name!r}: {expectation}, got no bound")
    tests = [bound for _, value, bound in pairs if torch.as_tensor(value).numel()]
    if not any(bound is None or bool(torch.as_tensor(bound.absolute).isfinite().any()) for bound in tests):
        return Fit(False, float("nan"), "not tested", tested=False)
    comparisons = [compare(value, counterfactual, bound=bound) for value, counterfactual, bound in pairs]
    residual = max(comparison.bound_used for comparison in comparisons)
    ok = all(comparison.ok for comparison in comparisons)
    return Fit(ok, residual, f"{'fits' if ok else 'REFUTED'}: {digits(residual, 3)} times the tolerance")


def _whole(value: Any) -> bool:
    """Whether a value holds whole numbers only, which are equal or not."""
    x = as_tensor("counterfactual", value).double()
    return bool((x == x.round()).all())
