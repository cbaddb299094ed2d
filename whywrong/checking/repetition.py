"""The same computation several times: how many distinct results, and whether order noise explains them. Poisoned
memory."""

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
    """The results of one step over all runs: the first, and what the others are beside it."""

    def __init__(self, first: torch.Tensor) -> None:
        self.first, self._others = first, set[str]()
        self.spread = 0.0
        """Largest difference of any run from the first; Inf where one has a NaN that the first has not."""
        self.of_bound = 0.0
        """That over twice the bound (each run may use its own); NaN where runs differ and there is none."""

    @property
    def distinct(self) -> int:
        """How many there are whose bits differ."""
        return 1 + len(self._others)

    @property
    def finding(self) -> str:
        """What that means, in words."""
        if self.of_bound > 1.0 or math.isinf(self.spread):
            return BEYOND_BOUND
        if bool(self.first.isnan().any()):
            return UNWRITTEN
        if self.distinct == 1:
            return BIT_IDENTICAL
        return WITHOUT_BOUND if math.isnan(self.of_bound) else ORDER_NOISE

    def add(self, value: torch.Tensor) -> bool:
        """Take another one; whether its bits are those of none before."""
        if same_bits(value, self.first) or (mark := digest(value)) in self._others:
            return False
        self._others.add(mark)
        self.spread = max(self.spread, distance(value, self.first))
        return True


@dataclass(repr=False)
class Repetition:
    """What :func:`repeat` found, a step each."""

    times: int
    steps: dict[str, Repeated] = field(default_factory=dict)

    @property
    def identical(self) -> bool:
        """Whether every run gave the same bits in every step."""
        return all(step.distinct == 1 for step in self.steps.values())

    @property
    def ok(self) -> bool:
        """Whether every step was written, and none goes beyond its bound."""
        return not any(step.finding in (BEYOND_BOUND, UNWRITTEN) for step in self.steps.values())

    def table(self) -> Table:
        """A row a step."""
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
    """Call `run()` `times` times and hold each result against the first, bit by bit.

    `run` gives an array or a Trace. `golden` says what a step may be off: a recorded golden, with the `precision` that
    was declared, or a Trace with bounds, or a Bound for a single array. Two correct runs are each within the bound of
    the golden, so they may differ by twice that: more is a race or a read of what nobody wrote. Only the first run is
    kept, and a hash of each other result. Raises UsageError for fewer than two times.
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
    """What each changed step uses of what it may be off, where that is known."""
    if changed and isinstance(golden, Golden):
        from whywrong.checking.localise import localise

        known = localise(again, golden, precision=precision).findings.items()
        return {n: math.inf if f.wrong else f.own.bound_used for n, f in known if n in changed and f.own is not None}
    found = {}
    for name, value in changed.items():
        bound = golden.step(name).bound if isinstance(golden, Trace) and name in golden else golden
        if isinstance(bound, Bound):
            found[name] = compare(value.double(), steps[name].first.double(), bound=bound.scaled(2.0)).bound_used
    return found


def distance(value: torch.Tensor, first: torch.Tensor) -> float:
    """The largest difference of two results; Inf where shapes, or NaN and Inf anywhere, are not the same."""
    found = compare(
        value.double(), first.double(), bound=torch.finfo(torch.float64).max
    )  # which any finite one is within
    return found.max_abs if math.isfinite(found.bound_used) else math.inf


def _trace(value: Any) -> Trace:
    return as_trace("run", value if isinstance(value, (Trace, dict)) else {"result": value})


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill what torch allocates without a value with NaN (integers: their largest), so that what nobody wrote shows.

    That is torch's own fill of uninitialised memory, which works while its deterministic algorithms are asked for;
    those that have none run as usual. Both are settings of the process: other threads see them meanwhile, but for
    those of whywrong's, which wait.
    """
    mode = temporarily(torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, "warn")
    fill = attribute(torch.utils.deterministic, "fill_uninitialized_memory", True)
    with process_wide(mode, fill), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*deterministic.*")
        yield
