"""The result of checking a step and a trace: the words, the table and the JSON of a localisation."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, fields
from html import escape
from typing import Any

from whywrong.comparing.comparison import Comparison
from whywrong.comparing.elements import Elements
from whywrong.comparing.precision import Precision
from whywrong.comparing.structure import Structure
from whywrong.recording.watching import GRADIENT
from whywrong.tables import EVERY_ROW, Table, digits, first_of, number, printable, runs

OWN, INHERITED, UNKNOWN = "own error", "inherited only", "own and inherited cannot be told apart"
MISSING, NOT_RECORDED = "missing in the observed", "not recorded in the observed"
OTHER_PARAMETER, NOT_IN_GOLDEN = "not the golden's parameter", "not in the golden"
FEWEST_IN_A_LOOP = 4
"""Steps of one line from which a table has one row for them."""
SHORT_TABLE = 12
"""Rows up to which a table is shown whole, and rows with errors of their own that a longer one has."""
NEIGHBOURS = 2
"""Rows before and behind the first wrong one that a longer table shows."""
WRONG, NOT_SEPARATED, NOT_CHECKED = "wrong", "not separated", "not checked"


@dataclass(frozen=True)
class Finding:
    """The result of checking one step, against the golden and against its own re-run."""

    name: str
    total: Comparison | None
    """Observed against golden; None where the observed does not have the step, or it was not checked."""
    own: Comparison | None = None
    """Observed against the step re-run on the observed steps before it; None where no program separates the two."""
    inherited: float | None = None
    """RMS of re-run minus golden over RMS of the golden; None as for `own`."""
    structure: Structure | None = None
    """The tests of structure, where no single element is beyond its tolerance."""
    wrong: bool = False
    """Whether the step adds an error: its own, or one of unknown origin."""
    diverges: bool = False
    """Whether it is wrong, or differs from the golden because a step before it is wrong."""
    words: str = "ok"
    """The finding: "ok", or the kind of error, how many elements and where first."""
    reading: str = ""
    """How the observed had to be read for the step to be correct, where not simply as it was stored."""
    touched: tuple[str, ...] = ()
    """Of a wrong step: which elements are wrong, in the words of its inputs, and what they hold, in sentences."""
    elements: Elements | None = field(default=None, repr=False, compare=False)
    """Every element, where :func:`whywrong.localise` was asked for them and the shapes are equal."""

    @property
    def separated(self) -> bool:
        """Whether own and inherited errors are separated."""
        return self.own is not None

    def as_json(self) -> dict[str, Any]:
        """The step's part of what `whywrong diff --json` prints."""
        known = not self.words.startswith((NOT_RECORDED, NOT_CHECKED))
        data: dict[str, Any] = {"ok": not self.diverges if known else None, "separated": self.separated}
        data |= {"own": NOT_SEPARATED, "inherited": NOT_SEPARATED}
        if self.own is not None:
            data |= {"own": comparison_json(self.own) | {"ok": not self.wrong}, "inherited": plain(self.inherited)}
        data |= {"reasons": [self.words] * (self.words != "ok"), "reading": self.reading, "touched": self.touched}
        return comparison_json(self.total) | data if self.total is not None else data


def absent(name: str, *, after_all: bool) -> Finding:
    """A step that the observed does not have. After all steps that it has, that is a divergence, except for a gradient,
    which is optional; before one of them, a fused kernel may not store it."""
    missing = after_all and not name.startswith(GRADIENT)
    return Finding(name, None, wrong=missing, diverges=missing, words=MISSING if missing else NOT_RECORDED)


@dataclass(repr=False)
class Localisation:
    """The result of :func:`whywrong.localise`: a finding for each step, and what follows from all of them."""

    precision: Precision
    """The precision that the tolerances come from: declared, or guessed."""
    guessed: bool
    """Whether the precision is a guess from the dtypes, since none was declared."""
    findings: dict[str, Finding] = field(default_factory=dict)
    """By the golden's names, in its order."""
    unexpected: list[str] = field(default_factory=list)
    """Steps that the observed has and the golden does not have."""
    notes: list[str] = field(default_factory=list)
    """What a reader has to know of how names, precision and order were taken, a sentence each."""
    ordered: bool = True
    """Whether the order of the steps is known."""
    inputs: Collection[str] = field(default=(), repr=False)
    """The steps that were given to the reference, where that was recorded."""
    lines: dict[str, str] = field(default_factory=dict, repr=False)
    """The line of the reference that computes each step, where that was recorded."""
    again: Callable[[], Localisation] | None = field(default=None, repr=False, compare=False)
    """The same check once more, from the same data, with every element kept."""

    @property
    def divergent(self) -> list[str]:
        """The divergent steps, in the golden's order."""
        return [name for name, finding in self.findings.items() if finding.diverges]

    @property
    def first(self) -> str | None:
        """The first divergent step, or None; where no order is known, one of those that may be it."""
        return next(iter(self.divergent), None)

    @property
    def touched(self) -> tuple[str, ...]:
        """Which elements of the first divergent step are wrong, and what they hold, in sentences."""
        return self.findings[self.first].touched if self.first else ()

    @property
    def own(self) -> list[str]:
        """The steps with an error of their own: wrong on the observed steps before them."""
        return [name for name, f in self.findings.items() if f.wrong and f.separated]

    @property
    def inherited(self) -> list[str]:
        """The steps that diverge although they are correct on the observed steps before them."""
        return [name for name, f in self.findings.items() if f.diverges and not f.wrong and f.separated]

    @property
    def unchecked(self) -> list[str]:
        """The steps that could not be checked, or come after inputs that differ."""
        return [name for name, f in self.findings.items() if f.words.startswith(NOT_CHECKED)]

    @property
    def verdict(self) -> str:
        """The first divergence in words."""
        if self.first is None:
            unchecked = f" in what was checked, and not checked: {', '.join(self.unchecked)}"
            return "no divergence" + unchecked * bool(self.unchecked)
        if any(finding.words == NOT_CHECKED for finding in self.findings.values()):
            return f"the inputs differ: {', '.join(self.divergent)}; nothing else was checked"
        if self.ordered:
            return f"first divergence: {self.first}"
        steps = ", ".join(self.divergent)
        return f"order not known: the first divergence is one of {steps}, off by more than any correct program is"

    @property
    def assumed(self) -> str:
        """The precision that was assumed, in words, and whether it was declared."""
        return f"precision: {self.precision}" + (" (a guess from the dtypes: nothing was declared)" * self.guessed)

    @property
    def detailed(self) -> Localisation:
        """The same with `elements` in each finding; where they were not kept, the steps are checked once more."""
        return self.again() if self.again is not None else self

    def explore(self, widgets: bool | None = None) -> None:
        """Show the steps, the error map of a selected one with axes to slice, and its worst elements.

        With `widgets`, the default in JupyterLab, a reader selects the step; without, a picture and a table of the
        first divergence are shown. Checks the steps once more. Raises UsageError for widgets where ipywidgets is not
        installed.
        """
        from whywrong.drawing import explorer

        shown = self.detailed
        steps = {name: f.elements for name, f in shown.findings.items() if f.elements and f.elements.share.numel()}
        findings = {name: shown.findings[name].words for name in steps}
        heading = f"{shown.table()._repr_html_()}<b>{escape(shown.verdict)}</b>"
        if steps:
            explorer.explore(
                steps, findings, self.first if self.first in steps else next(iter(steps)), heading, widgets
            )
        else:
            explorer.display(shown)

    def table(self, full: bool = False) -> Table:
        """A row for each step: largest difference, own error over tolerance, structure, inherited error, finding.

        Unless it is `full`, steps that one line of a loop computes are one row, with the worst of them, and from which
        on they are wrong. Of more than 12 such rows it has the first wrong one, or the one nearest to its tolerance
        where none is wrong; two before and two behind it, inputs apart; and the others with errors of their own, up to
        the 12th. Its last line counts what was left out. In a terminal and in a notebook wrong rows are in colour.
        """
        columns = ("step", "largest |o - g|", "own / tolerance", "structure", "inherited (rms)", "finding")
        first = self.first if self.ordered else None
        full = full or EVERY_ROW.get()
        groups = [[f] for f in self.findings.values()] if full else self._repeated()
        groups += [[Finding(name, None, words=NOT_IN_GOLDEN)] for name in self.unexpected]
        shown = range(len(groups)) if full or len(groups) <= SHORT_TABLE else self._shown(groups)
        rows, marked, left = list[tuple[str, ...]](), list[int](), Counter[str]()
        for k, some in enumerate(groups):
            if k in shown:
                marked += [len(rows)] * any(f.wrong for f in some)
                rows.append(_row(some[0], first) if len(some) == 1 else _loop(some, first))
            else:
                rows += [("...", *[""] * 5)] * (not k or k - 1 in shown)
                left.update("inputs" if f.name in self.inputs and not f.wrong else _kind(f) for f in some)
        counts = ", ".join(f"{kind} ({count})" for kind, count in left.items())
        every = f"table(full=True), whywrong diff --full and pytest -vv show all {sum(map(len, groups))} steps"
        return Table(columns, rows, marked=marked, note=f"left out: {counts}; {every}" if left else "")

    def _shown(self, groups: list[list[Finding]]) -> set[int]:
        """The places of the rows of a long table that is not full."""
        first, steps = self.first, self.findings.keys() - {*self.inputs}
        at = max(range(len(groups)), key=lambda k: max((f.name == first, _share(f)) for f in groups[k]))
        wrong = [k for k, some in enumerate(groups) if any(_kind(f) == WRONG for f in some)]
        made = [k for k, some in enumerate(groups) if some[0].name in steps]
        before, behind = [k for k in made if k < at], [k for k in made if k > at]
        return {at, *wrong[:SHORT_TABLE], *before[-NEIGHBOURS:], *behind[:NEIGHBOURS]}

    @property
    def loops(self) -> dict[str, list[str]]:
        """The steps that one line of a loop computes, by what they are called together: "h.0 ... h.9"."""
        return {several([f.name for f in some]): [f.name for f in some] for some in self._repeated(2) if len(some) > 1}

    def folded(self, names: list[str]) -> str:
        """Names in a sentence, the first of many; of neighbours in a loop the first and the last."""
        said = {name: name for name in names}
        for loop in self.loops.values():
            for first, last in runs([k for k, name in enumerate(loop) if name in said]):
                if last - first > 1:
                    said = {name: words for name, words in said.items() if name not in loop[first + 1 : last + 1]}
                    said[loop[first]] = f"{loop[first]} ... {loop[last]}"
        return first_of(said.values())

    def _repeated(self, fewest: int = FEWEST_IN_A_LOOP) -> list[list[Finding]]:
        """The findings, those of steps together that one line computes, and whose names differ in one number."""
        groups: dict[Any, list[Finding]] = {}
        for name, finding in self.findings.items():
            line = self.lines.get(name)
            alike = (line, re.sub(r"\d+", "0", _counted(name)), finding.total is None) if line else name
            groups.setdefault(alike, []).append(finding)
        looped = {id(f) for some in groups.values() if len(some) >= fewest and _varying(some) for f in some}
        some = ([f] for f in self.findings.values() if id(f) not in looped)
        loops = (each for each in groups.values() if id(each[0]) in looped)
        place = {name: k for k, name in enumerate(self.findings)}
        return sorted([*some, *loops], key=lambda each: place[each[0].name])

    def _repr_html_(self) -> str:
        lines = (self.assumed, *self.notes, self.verdict)
        return self.table()._repr_html_() + "".join(f"<p>{escape(line)}</p>" for line in lines)

    def __repr__(self) -> str:
        return "\n".join([str(self.table()), *map(printable, (self.assumed, *self.notes, self.verdict))])


def several(names: list[str]) -> str:
    """What several steps of one line are called together."""
    return f"{names[0]} ... {names[-1]}"


def _share(f: Finding) -> float:
    """The error of a step over its tolerance, its own where that is known."""
    return (f.own or f.total).bound_used if f.total else 0.0


def _kind(f: Finding) -> str:
    """The finding in few words, without its details."""
    return WRONG if f.wrong and f.total else re.split("[:;,]", f.words)[0]


def _row(f: Finding, first: str | None) -> tuple[str, ...]:
    words = f.words + (f" ({f.reading})" if f.reading else "") + ("  <- first" if f.name == first else "")
    words = "; ".join((words, *f.touched))
    if f.total is None:
        return (f.name, "", "", "", "", words)
    share = digits(_share(f), 3) + (" (whole)" if f.own is None else "")
    structure = "" if f.structure is None else number(f.structure.worst.share)
    nans = f.total.observed_nan - f.total.golden_nan
    largest = f"{nans} NaN" if nans > 0 else number(f.total.max_abs)
    return (f.name, largest, share, structure, number(f.inherited), words)


def _counted(name: str) -> str:
    """A step's name with the number of its time: the first of one name has none."""
    return name if "#" in name else f"{name}#1"


def _varying(some: list[Finding]) -> list[str]:
    """The number in which the names of steps differ, of each; nothing where they differ in several."""
    numbers = list(zip(*(re.findall(r"\d+", _counted(f.name)) for f in some), strict=True))
    differ = [list(each) for each in numbers if len({*each}) > 1]
    return differ[0] if len(differ) == 1 else []


def _loop(some: list[Finding], first: str | None) -> tuple[str, ...]:
    """The row of steps that one line computes: the largest of each column, and the finding of the first wrong one."""
    numbers = _varying(some)
    wrong = [n for n, f in zip(numbers, some, strict=True) if f.diverges]
    shown = next((f for f in some if f.name == first or f.wrong), next((f for f in some if f.diverges), some[-1]))
    rows = [_row(f, first) for f in some]
    worst = max(some, key=lambda f: (f.diverges, _share(f)))
    which = "all wrong: " if wrong else ""
    if len(wrong) == 1:
        which = f"wrong at {wrong[0]} alone: "
    elif 0 < len(wrong) < len(some):
        until = " on" if numbers[-len(wrong) :] == wrong else f" to {wrong[-1]}, in {len(wrong)} of {len(some)}"
        which = f"wrong from {wrong[0]}{until}: "
    off = max(some, key=lambda f: f.total.max_abs if f.total else 0.0)
    columns = _row(worst, first)
    largest = columns[1] if "NaN" in columns[1] else _row(off, first)[1]
    return (several([f.name for f in some]), largest, *columns[2:-1], which + rows[some.index(shown)][-1])


def reason(comparison: Comparison, structure: Structure | None) -> str:
    """Why a check fails, in words: how many elements and where first, or which test of structure."""
    if comparison.count < 0:
        return f"shape: {comparison.bound}"
    if not comparison.ok:
        nans = comparison.observed_nan - comparison.golden_nan
        if nans > 0:  # a NaN or an infinity on one side only is the worst
            first = "first" if math.isnan(comparison.worst_observed or 0.0) else "the first beyond any bound"
            return f"{nans} NaN, {first} at {comparison.worst_index}"
        infinite = math.isinf(comparison.bound_used)
        share = "beyond any bound" if infinite else f"up to {digits(comparison.bound_used, 3)} times the tolerance"
        return f"{comparison.mismatches} of {comparison.count} elements {share}, first at {comparison.first_index}"
    assert structure is not None
    return f"systematic: {structure.worst.name} {digits(structure.worst.share, 3)} times what chance allows"


def comparison_json(c: Comparison) -> dict[str, Any]:
    """The fields of a Comparison, NaN and Inf as words."""
    return {item.name: plain(getattr(c, item.name)) for item in fields(c)}


def plain(value: Any) -> Any:
    """JSON has neither NaN nor Inf."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
