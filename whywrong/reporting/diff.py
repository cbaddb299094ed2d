"""`whywrong diff`: a golden and one or more observed runs, step by step; and the runs against each other.

As JSON: ``alarm``; ``first_divergent_step`` (null where there is none, or the order is not known) and
``divergent_steps``; ``order_known``; ``precision`` (``fields`` and ``guessed``); ``steps``: for each the fields of a
:class:`whywrong.Comparison` with the golden, ``ok`` (null for a step that a fused kernel does not record),
``separated``, ``own`` (a Comparison and ``ok``) and ``inherited``, both "not separated" without a program,
``reasons`` and ``reading``; ``unexpected`` steps; ``notes``; ``texts``, the free text of the files, which
changes nothing; ``run``, the one that is shown; ``runs``, each with its ``first_divergent_step``; ``run_to_run``: for
steps whose bits differ how many ``distinct`` results, the ``spread`` and a ``finding``. NaN and Inf are words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from whywrong.checking.alignment import renamed
from whywrong.checking.findings import Localisation, plain
from whywrong.checking.localise import localise
from whywrong.checking.repetition import ORDER_NOISE, Repeated
from whywrong.comparing.precision import Precision
from whywrong.errors import UsageError
from whywrong.recording.dumps import open_dump
from whywrong.recording.golden import load
from whywrong.recording.shards import check_patterns
from whywrong.recording.steps import DIFFERS, Trace
from whywrong.tables import Table, number, printable

NOT_SEPARATED_NOTE = "own and inherited errors are not separated: that needs a recorded golden, by whywrong.golden"
ALL_EQUAL = "every run gave the same bits in every step"


@dataclass
class Report:
    """One or more observed runs against one golden."""

    runs: dict[str, Localisation]
    repeats: dict[str, Repeated]
    """For each step that is not bit-identical in all runs, its results."""
    texts: dict[str, str]
    """Free text of the files, which is shown and not used."""
    golden: str = ""
    """The golden's file name."""
    full: bool = False
    """Whether its text has a row for every step."""

    @property
    def alarm(self) -> bool:
        """Whether any run diverges."""
        return any(run.first is not None for run in self.runs.values())

    @property
    def unchecked(self) -> bool:
        """Whether a step of a run could not be checked."""
        return any(run.unchecked for run in self.runs.values())

    @property
    def run(self) -> str:
        """The run to show: the one that diverges first, else the first."""
        order = [*dict.fromkeys(name for localisation in self.runs.values() for name in localisation.findings), None]
        return min(self.runs, key=lambda run: order.index(self.runs[run].first))

    @property
    def shown(self) -> Localisation:
        """The localisation of :attr:`run`."""
        return self.runs[self.run]

    def short(self, run: str) -> str:
        """A run's file name, or its path where several have the same name."""
        names = [Path(path).name for path in self.runs]
        return Path(run).name if names.count(Path(run).name) == 1 else run

    def finding(self, name: str) -> str:
        """What it means that a step differs between runs."""
        wrong = [self.short(run) for run, localisation in self.runs.items() if name in localisation.divergent]
        if not wrong:
            return ORDER_NOISE
        if len(wrong) < len(self.runs):
            return f"beyond the bound in {', '.join(wrong)} only: a race or an uninitialised read"
        causes = "a race, an uninitialised read, or noise on top of a fault"
        return f"beyond the bound in every run, by different errors: {causes}"

    @property
    def run_to_run(self) -> Table:
        """A row for each step that is not bit-identical in all runs."""
        rows = [(n, step.distinct, number(step.spread), self.finding(n)) for n, step in self.repeats.items()]
        return Table(("step", f"distinct of {len(self.runs)}", "spread", "finding"), rows)

    def as_json(self) -> dict[str, Any]:
        """What `whywrong diff --json` prints; `steps` are those of :attr:`run`."""
        shown = self.shown
        runs = self.runs.items()
        first = {path: {"first_divergent_step": run.first if run.ordered else None} for path, run in runs}
        return {
            "alarm": self.alarm,
            **first[self.run],
            "divergent_steps": shown.divergent,
            "order_known": shown.ordered,
            "precision": {"fields": asdict(shown.precision), "guessed": shown.guessed},
            "steps": {name: finding.as_json() for name, finding in shown.findings.items()},
            "unexpected": shown.unexpected,
            "notes": shown.notes,
            "texts": self.texts,
            "run": self.run,
            "runs": first,
            "run_to_run": {
                name: {"distinct": step.distinct, "spread": plain(step.spread), "finding": self.finding(name)}
                for name, step in self.repeats.items()
            },
        }

    def __str__(self) -> str:
        shown = self.shown
        lines = [shown.assumed, *shown.notes]
        said = [
            key for key, text in self.texts.items() if text.startswith(DIFFERS) and any(text in n for n in shown.notes)
        ]
        lines += [f"{key}, as the files have it: {text[:200]}" for key, text in self.texts.items() if key not in said]
        lines += [] if any(f.separated for f in shown.findings.values()) else [NOT_SEPARATED_NOTE]
        if len(self.runs) > 1:
            runs = f"shown: {self.short(self.run)}, of {len(self.runs)} runs"
            lines += [runs, str(self.run_to_run) if self.repeats else ALL_EQUAL]
        return "\n\n".join([str(shown.table(self.full)), *map(printable, [*lines, shown.verdict])])


def report(
    golden: Path,
    observed: Sequence[Path],
    *,
    precision: Precision | None = None,
    progress: Callable[[str], None] = print,
    names: dict[str, str] | None = None,
    elements: bool = False,
    dims: dict[str, str] | None = None,
) -> Report:
    """Compare each observed trace with the golden, and the observed ones with each other.

    `golden` and `observed` are paths of files or folders; `names` maps golden names to observed ones, where they
    differ, and `dims` names of steps to how their shards are put together. `elements` are kept as
    :func:`whywrong.localise` keeps them, where there is one run.
    Raises UsageError for files that cannot be read or compared.
    """
    reference = load(golden, dims)
    opened = {str(path): open_dump(path, dims) for path in observed}
    check_patterns(dims or {}, dict.fromkeys(name for trace in (*opened.values(), reference) for name in trace.names))
    dumps = {path: renamed(dump, reference, names or {}) for path, dump in opened.items()}
    if len(dumps) < len(observed):
        raise UsageError("OBSERVED: expected each path once, got one twice")
    runs = {}
    for path, dump in dumps.items():
        declared = precision or dump.precision or getattr(reference, "precision", None)
        if isinstance(reference, Trace) and not reference.ordered and dump.ordered:
            reference = reference.named({name: name for name in (*dump.names, *reference.names) if name in reference})
            reference.ordered = True
        keep = elements and len(dumps) == 1
        runs[path] = localise(dump, reference, precision=declared, progress=progress, elements=keep)
    texts = {key: text for trace in (*dumps.values(), reference) for key, text in getattr(trace, "texts", {}).items()}
    return Report(runs, dict(_repeats(list(dumps.values()), next(iter(runs.values())).findings)), texts, golden.name)


def _repeats(dumps: Sequence[Trace], names: Iterable[str]) -> Iterator[tuple[str, Repeated]]:
    for name in names:
        there = [dump for dump in dumps if name in dump]
        if len(there) > 1:
            repeated = Repeated(there[0].read(name))
            if sum(repeated.add(dump.read(name)) for dump in there[1:]):
                yield name, repeated
