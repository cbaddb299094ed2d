"""`labkit diff`: a golden trace and one or more observed ones, step by step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from labkit.errors import UsageError
from labkit.judge import step
from labkit.judgement import Judgement, State
from labkit.numerics.compare import compare
from labkit.ordering import deduced, in_order
from labkit.tables import Table, number
from labkit.trace.dumps import Dump, open_dump
from labkit.trace.repetition import digest

NOT_SEPARATED = "not separated"
FUSED = "not recorded in the observed, which goes on after it"


@dataclass
class Diff:
    """What :func:`diff` found for one observed trace."""

    steps: dict[str, Judgement | None] = field(default_factory=dict)
    """In the order in which they were judged; None for a step that the observed has not."""
    unexpected: list[str] = field(default_factory=list)
    fused: set[str] = field(default_factory=set)
    """Steps that the observed has not, though it has one that comes after: a fused kernel keeps no such steps."""

    @property
    def first(self) -> str | None:
        """The first divergent step, or None."""
        wrong = (name for name, j in self.steps.items() if (name not in self.fused if j is None else j.wrong))
        return next(wrong, None)


def diff(observed: Dump, golden: Dump) -> Diff:
    """Judge every step of the golden. Reads a step and its inputs at a time."""
    result = Diff(unexpected=[name for name in observed.names if name not in golden])
    state = State(observed, golden)
    if not state.ordered:
        state.deduced = deduced(state)
    missing: list[str] = []
    computed = False
    state.order = in_order(state)
    for name in state.order:
        if name not in observed:
            result.steps[name] = None
            missing.append(name)
            continue
        found = step(name, state)
        result.steps[name] = found
        if found.wrong or found.tied or any(x in state.wrong for x in state.inputs(name)):
            state.wrong.add(name)
        if state.inputs(name) or state.computed(name):
            result.fused.update(missing)
            computed = True
    if computed and observed.about.get("order") and not golden.about.get("order"):
        result.fused.update(missing)  # nobody tells that one of them comes last
    return result


@dataclass
class Report:
    """One or more observed traces against one golden."""

    runs: dict[str, Diff]
    order: list[str]
    repeats: dict[str, tuple[int, float]]
    """For each step that is not bit-identical in all runs: how many distinct results, and the largest difference."""

    @property
    def first(self) -> str | None:
        """The first divergent step of any run, in the golden's order."""
        firsts = [found.first for found in self.runs.values() if found.first]
        return min(firsts, key=self.order.index) if firsts else None

    @property
    def run(self) -> str:
        """The run to show: the one that diverges first, else the first."""
        return next((name for name, found in self.runs.items() if found.first == self.first), next(iter(self.runs)))

    def short(self, run: str) -> str:
        """A run's file name, or its whole path where several are called the same."""
        names = [Path(one).name for one in self.runs]
        return Path(run).name if names.count(Path(run).name) == 1 else run

    def finding(self, name: str) -> str:
        """What a step that differs between runs says."""
        wrong = [
            self.short(run) for run, found in self.runs.items() if (j := found.steps.get(name)) is None or j.diverges
        ]
        if not wrong:
            return "order noise, within the bound"
        if len(wrong) < len(self.runs):
            return f"beyond the bound in {', '.join(wrong)} only: a race or an uninitialised read"
        return "beyond the bound in every run, and not the same: a race or an uninitialised read, or noise upon a fault"

    def as_json(self) -> dict[str, Any]:
        """What `labkit diff --json` prints; `steps` are those of :attr:`run`."""
        shown = self.runs[self.run]
        return {
            "alarm": self.first is not None,
            "first_divergent_step": self.first,
            "steps": steps_json(shown),
            "unexpected": shown.unexpected,
            "run": self.run,
            "runs": {name: {"first_divergent_step": found.first} for name, found in self.runs.items()},
            "run_to_run": {
                name: {"distinct": distinct, "spread": plain(spread), "finding": self.finding(name)}
                for name, (distinct, spread) in self.repeats.items()
            },
        }

    def __str__(self) -> str:
        shown = self.runs[self.run]
        lines = [str(table(shown))]
        if shown.unexpected:
            lines.append(f"not in the golden: {', '.join(shown.unexpected)}")
        nans = [f"{n} ({j.total.observed_nan})" for n, j in shown.steps.items() if j and j.total.observed_nan]
        if nans:
            lines.append(f"NaN in the observed: {', '.join(nans)}")
        if len(self.runs) > 1:
            lines.append(f"shown: {self.short(self.run)}, of {len(self.runs)} runs")
            names = ("step", f"distinct of {len(self.runs)}", "spread", "finding")
            rows = [(n, d, number(x), self.finding(n)) for n, (d, x) in self.repeats.items()]
            lines.append(str(Table(names, rows)) if rows else "every run gave the same bits in every step")
        lines.append(f"first divergence: {self.first}" if self.first else "no divergence")
        return "\n\n".join(lines)


def report(golden: Path, observed: Sequence[Path]) -> Report:
    """Hold each observed trace against the golden, and the observed ones against each other.

    Raises UsageError for what cannot be read or compared.
    """
    reference = open_dump(golden)
    dumps = {str(path): open_dump(path) for path in observed}
    if len(dumps) < len(observed):
        raise UsageError("OBSERVED: the same path twice; wanted each run once")
    for path, dump in dumps.items():
        if not set(dump.names) & set(reference.names):
            if len(dump.names) == len(reference.names) == 1:
                dumps[path] = dump.renamed(reference.names[0])
            else:
                raise UsageError(f"{path}: shares no step with {golden}; wanted the same names")
    runs = {path: diff(dump, reference) for path, dump in dumps.items()}
    order = list(next(iter(runs.values())).steps)
    return Report(runs, order, _repeats(list(dumps.values()), order))


def _repeats(dumps: Sequence[Dump], names: Sequence[str]) -> dict[str, tuple[int, float]]:
    found: dict[str, tuple[int, float]] = {}
    if len(dumps) < 2:
        return found
    for name in names:
        there = [dump for dump in dumps if name in dump]
        if len(there) < 2:
            continue
        first = there[0].read(name)
        hashes, spread = {digest(first)}, 0.0
        for dump in there[1:]:
            value = dump.read(name)
            if (mark := digest(value)) in hashes:
                continue
            hashes.add(mark)
            if value.shape != first.shape:
                spread = math.inf
                continue
            pair = compare(value.double(), first.double(), math.inf)
            odd = pair.observed_nan != pair.golden_nan
            spread = math.inf if odd else max(spread, pair.max_abs)
        if len(hashes) > 1:
            found[name] = (len(hashes), spread)
    return found


def steps_json(found: Diff) -> dict[str, Any]:
    """A run's steps as `labkit diff --json` prints them."""
    steps: dict[str, Any] = {}
    for name, j in found.steps.items():
        if j is None:
            why = FUSED if name in found.fused else "missing"
            steps[name] = {"ok": False, "own": NOT_SEPARATED, "inherited": NOT_SEPARATED, "reasons": [why]}
            if name in found.fused:
                steps[name]["ok"] = None
            continue
        steps[name] = comparison_json(j.total) | {
            "ok": not j.diverges,
            "own": comparison_json(j.own) | {"ok": not j.wrong} if j.own is not None and j.separated else NOT_SEPARATED,
            "inherited": plain(j.inherited) if j.separated else NOT_SEPARATED,
            "reasons": j.reasons,
        }
    return steps


def comparison_json(c: Any) -> dict[str, Any]:
    """The fields of a Comparison, NaN and Inf as words."""
    return {item.name: plain(getattr(c, item.name)) for item in fields(c)}


def plain(value: Any) -> Any:
    """JSON has neither NaN nor Inf."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


def table(found: Diff) -> Table:
    """A row a step."""
    rows = []
    for name, j in found.steps.items():
        mark = "  <- first" if name == found.first else ""
        if j is None:
            rows.append((name, "", "", "", "", FUSED if name in found.fused else "missing in the observed" + mark))
            continue
        own = number(j.own.bound_used) if j.own is not None and j.separated else NOT_SEPARATED
        inherited = number(j.inherited) if j.inherited is not None and j.separated else ""
        words = "; ".join(j.reasons) or ("ok: another choice among equals" if j.tied else "ok")
        rows.append((name, number(j.total.max_abs), number(j.total.rms_ratio), own, inherited, words + mark))
    return Table(("step", "largest |o - g|", "rms", "own, of bound", "inherited (rms)", "finding"), rows)
