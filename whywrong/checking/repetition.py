"""The same computation several times: how many distinct results, and whether the order of sums explains them; and
poisoned memory."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from whywrong.comparing.bits import digest, same_bits
from whywrong.comparing.bounds import Bound
from whywrong.comparing.comparison import compare
from whywrong.comparing.precision import Precision
from whywrong.errors import UsageError
from whywrong.process_state import attribute, process_wide, temporarily
from whywrong.recording.golden import Golden
from whywrong.recording.steps import Trace, as_trace
from whywrong.tables import Table, number

BIT_IDENTICAL = "bit-identical"
ORDER_NOISE = "order noise, within the bound"
UNWRITTEN = "NaN in every run: not written, or made of what was not written"
BEYOND_BOUND = "beyond the bound: a race or an uninitialised read"
WITHOUT_BOUND = "differs; no bound to hold it to"


class Repeated:
    """The results of one step over all runs: the first, and how far the others are from it."""

    def __init__(self, first: torch.Tensor) -> None:
        self.first, self._others = first, set[str]()
        self.spread = 0.0
        """The largest difference of any run from the first; Inf where NaN or Inf are at other places."""
        self.of_bound = 0.0
        """That over twice the bound, since either run may be off by it; NaN where runs differ and there is none."""

    @property
    def distinct(self) -> int:
        """How many results have different bits."""
        return 1 + len(self._others)

    @property
    def finding(self) -> str:
        """What the differences mean, in words."""
        if self.of_bound > 1.0 or math.isinf(self.spread):
            return BEYOND_BOUND
        if bool(self.first.isnan().any()):
            return UNWRITTEN
        if self.distinct == 1:
            return BIT_IDENTICAL
        return WITHOUT_BOUND if math.isnan(self.of_bound) else ORDER_NOISE

    def add(self, value: torch.Tensor) -> bool:
        """Take another result, and return whether its bits are new."""
        if same_bits(value, self.first) or (hashed := digest(value)) in self._others:
            return False
        self._others.add(hashed)
        self.spread = max(self.spread, distance(value, self.first))
        return True


@dataclass(repr=False)
class Repetition:
    """The result of :func:`repeat`."""

    times: int
    """How many runs there were."""
    steps: dict[str, Repeated] = field(default_factory=dict)
    """The results of each step, by name; an array is the step "result"."""

    @property
    def identical(self) -> bool:
        """Whether every run gave the same bits in every step."""
        return all(step.distinct == 1 for step in self.steps.values())

    @property
    def ok(self) -> bool:
        """Whether every step was written, and none goes beyond its bound."""
        return not any(step.finding in (BEYOND_BOUND, UNWRITTEN) for step in self.steps.values())

    def table(self) -> Table:
        """A row for each step."""
        used = {name: "" if math.isnan(s.of_bound) else number(s.of_bound) for name, s in self.steps.items()}
        rows = [(name, s.distinct, number(s.spread), used[name], s.finding) for name, s in self.steps.items()]
        return Table(("step", f"distinct of {self.times}", "spread", "spread / tolerance", "finding"), rows)

    def __repr__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def repeat(
    run: Callable[[], Any],
    *,
    times: int = 10,
    golden: Golden | Trace | Bound | None = None,
    precision: Precision | None = None,
) -> Repetition:
    """Call `run()` `times` times and compare the bits of each result with those of the first.

    run: a function without arguments, which returns an array, a Trace or a dict of arrays, of the same names and shapes
    each time.
    golden: gives the tolerance of each step: a recorded golden, with the declared `precision`, or a Trace with bounds,
    or a Bound for a single array.

    Two correct runs are each within the bound of the golden, so they may differ by twice that; a larger difference is a
    race or an uninitialised read. Only the first result is stored, and a hash of each other. Raises UsageError for
    fewer than two times, and for runs that give different steps.
    """
    if not callable(run):
        raise UsageError(f"run: expected a function without arguments, got a {type(run).__name__}")
    if not isinstance(times, int) or times < 2:
        raise UsageError(f"times: expected a whole number from 2, got {times!r}")
    if golden is not None and not isinstance(golden, (Golden, Trace, Bound)):
        raise UsageError(f"golden: expected a Golden, a Trace or a Bound, got a {type(golden).__name__}")
    first = _trace(run())
    result = Repetition(times, {name: Repeated(first.read(name).clone()) for name in first.names})
    for _ in range(times - 1):
        again = _trace(run())
        if again.names != first.names:
            raise UsageError(f"run: gave steps {again.names}, then {first.names}; expected the same each time")
        changed = {name: again.read(name) for name, step in result.steps.items() if step.add(again.read(name))}
        used = _shares(changed, again, result.steps, golden, precision)
        for name in changed:
            step = result.steps[name]
            step.of_bound = max(step.of_bound, used[name]) if name in used else math.nan
    return result


def _shares(
    changed: dict[str, torch.Tensor], again: Trace, steps: dict[str, Repeated], golden: Any, precision: Any
) -> dict[str, float]:
    """The difference of each changed step over its tolerance, where that is known."""
    if changed and isinstance(golden, Golden):
        from whywrong.checking.localise import localise

        findings = localise(again, golden, precision=precision).findings.items()
        return {n: math.inf if f.wrong else f.own.bound_used for n, f in findings if n in changed and f.own is not None}
    shares = {}
    for name, value in changed.items():
        bound = golden.step(name).bound if isinstance(golden, Trace) and name in golden else golden
        if isinstance(bound, Bound):
            shares[name] = compare(value.double(), steps[name].first.double(), bound=bound.scaled(2.0)).bound_used
    return shares


def distance(value: torch.Tensor, first: torch.Tensor) -> float:
    """The largest difference of two results; Inf where shapes, or places of NaN or Inf, are not the same."""
    any_finite = torch.finfo(torch.float64).max
    comparison = compare(value.double(), first.double(), bound=any_finite)
    return comparison.max_abs if math.isfinite(comparison.bound_used) else math.inf


def _trace(value: Any) -> Trace:
    return as_trace("run", value if isinstance(value, (Trace, dict)) else {"result": value})


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill memory that torch allocates uninitialised with NaN (integers: their largest), to show unwritten elements.

    That is torch's own fill of uninitialised memory, which works while its deterministic algorithms are requested;
    operations that have none run as usual. Both settings, and the filters of warnings, are process-wide and restored
    afterwards: other threads see them meanwhile, except where whywrong runs in them, which waits.
    """
    mode = temporarily(torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, "warn")
    fill = attribute(torch.utils.deterministic, "fill_uninitialized_memory", True)
    with process_wide(mode, fill), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*deterministic.*")
        yield
