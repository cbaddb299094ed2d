"""`whywrong diff`: a golden and one or more observed runs, step by step; and the runs against each other.

As JSON: ``alarm``; ``first_divergent_step`` (null where there is none, or the order is not known) and
``divergent_steps``; ``order_known``; ``precision`` (``fields`` and ``guessed``); ``steps``: for each the fields of a
:class:`whywrong.Comparison` with the golden, ``ok`` (null for a step that a fused kernel does not record),
``separated``, ``own`` (a Comparison and ``ok``) and ``inherited``, "not separated" both where no program tells them
apart, ``reasons`` and ``reading``; ``unexpected`` steps; ``notes``; ``texts``, the free text of the files, which
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
from whywrong.recording.steps import Trace
from whywrong.tables import Table, number, printable

WHOLE = "own and inherited errors are not told apart: that needs a golden that can be re-run, whywrong.golden"
EQUAL = "every run gave the same bits in every step"


@dataclass
class Report:
    """One or more observed runs against one golden."""

    runs: dict[str, Localisation]
    repeats: dict[str, Repeated]
    """For each step that is not bit-identical in all runs, its results."""
    texts: dict[str, str]
    """Free text of the files, for the reader."""

    @property
    def alarm(self) -> bool:
        """Whether any run diverges."""
        return any(found.first is not None for found in self.runs.values())

    @property
    def run(self) -> str:
        """The run to show: the one that diverges first, else the first."""
        order = [*dict.fromkeys(name for found in self.runs.values() for name in found.findings), None]
        return min(self.runs, key=lambda run: order.index(self.runs[run].first))

    @property
    def shown(self) -> Localisation:
        """What was found of :attr:`run`."""
        return self.runs[self.run]

    def short(self, run: str) -> str:
        """A run's file name, or its whole path where several are called the same."""
        names = [Path(one).name for one in self.runs]
        return Path(run).name if names.count(Path(run).name) == 1 else run

    def finding(self, name: str) -> str:
        """What a step that differs between runs says."""
        wrong = [self.short(run) for run, found in self.runs.items() if name in found.divergent]
        if not wrong:
            return ORDER_NOISE
        if len(wrong) < len(self.runs):
            return f"beyond the bound in {', '.join(wrong)} only: a race or an uninitialised read"
        return "beyond the bound in every run, and not the same: a race or an uninitialised read, or noise upon a fault"

    @property
    def run_to_run(self) -> Table:
        """A row for each step that is not bit-identical in all runs."""
        rows = [(n, one.distinct, number(one.spread), self.finding(n)) for n, one in self.repeats.items()]
        return Table(("step", f"distinct of {len(self.runs)}", "spread", "finding"), rows)

    def as_json(self) -> dict[str, Any]:
        """What `whywrong diff --json` prints; `steps` are those of :attr:`run`."""
        shown = self.shown
        first = {run: {"first_divergent_step": one.first if one.ordered else None} for run, one in self.runs.items()}
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
                name: {"distinct": one.distinct, "spread": plain(one.spread), "finding": self.finding(name)}
                for name, one in self.repeats.items()
            },
        }

    def __str__(self) -> str:
        shown = self.shown
        lines = [str(shown.table()), shown.assumed, *shown.notes]
        lines += [f"{key}, as the files have it: {text[:200]}" for key, text in self.texts.items()]
        lines += [] if any(f.separated for f in shown.findings.values()) else [WHOLE]
        if len(self.runs) > 1:
            runs = f"shown: {self.short(self.run)}, of {len(self.runs)} runs"
            lines += [runs, str(self.run_to_run) if self.repeats else EQUAL]
        return printable("\n\n".join([*lines, shown.verdict]))


def report(
    golden: Path,
    observed: Sequence[Path],
    *,
    precision: Precision | None = None,
    progress: Callable[[str], None] = print,
    names: dict[str, str] | None = None,
    elements: bool = False,
) -> Report:
    """Hold each observed trace against the golden, and the observed ones against each other.

    `names` maps the golden's steps to the observed's where they are called differently. `elements` are kept as
    :func:`whywrong.localise` keeps them, where there is one run.
    Raises UsageError for what cannot be read or compared.
    """
    reference = load(golden)
    dumps = {str(path): renamed(open_dump(path), reference, names or {}) for path in observed}
    if len(dumps) < len(observed):
        raise UsageError("OBSERVED: the same path twice; expected each run once")
    runs = {}
    for path, dump in dumps.items():
        said = precision or dump.precision or getattr(reference, "precision", None)
        if isinstance(reference, Trace) and not reference.ordered and dump.ordered:
            reference = reference.named({name: name for name in (*dump.names, *reference.names) if name in reference})
            reference.ordered = True
        runs[path] = localise(dump, reference, precision=said, progress=progress, elements=elements and len(dumps) == 1)
    texts = {key: text for one in (*dumps.values(), reference) for key, text in getattr(one, "texts", {}).items()}
    return Report(runs, dict(_repeats(list(dumps.values()), next(iter(runs.values())).findings)), texts)


def _repeats(dumps: Sequence[Trace], names: Iterable[str]) -> Iterator[tuple[str, Repeated]]:
    for name in names:
        there = [dump for dump in dumps if name in dump]
        if len(there) > 1:
            repeated = Repeated(there[0].read(name))
            if sum(repeated.add(dump.read(name)) for dump in there[1:]):
                yield name, repeated
