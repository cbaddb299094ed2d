"""What the search for a cause found: causes with their sentences, and what can be said where none is known."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from html import escape
from typing import Any

import torch

from whywrong.checking.findings import OTHER_PARAMETER, Localisation, plain
from whywrong.tables import Table, digits, first_of, printable

Tensor = torch.Tensor

CAUSE, UNDECIDABLE, NONE = "cause", "undecidable", "none of these"


@dataclass(frozen=True)
class Cause:
    """A mutation of the reference that gives what was observed."""

    kind: str
    says: str
    line: str
    """Where it stands in the reference: file, number and text; nothing where no line is known."""
    of_bound: float
    """The largest difference that is left, as a share of what rounding allows there."""
    also: tuple[str, ...] = ()
    """Equivalent mutations, which give the same on these inputs and on sampled ones, with their kinds."""
    elsewhere: tuple[str, ...] = ()
    """Other lines of the reference in which these are."""

    def as_json(self) -> dict[str, Any]:
        """Its fields."""
        return {key: plain(value) for key, value in asdict(self).items()}


@dataclass(repr=False)
class Explanation:
    """What :func:`explain` found."""

    step: str | None
    verdict: str
    causes: list[Cause] = field(default_factory=list)
    nearest: Cause | None = None
    """Where nothing fits, what comes nearest, and how far off it is."""
    separate: dict[str, Tensor] = field(default_factory=dict)
    """Inputs of the reference on which the causes that are left differ, by name."""
    blind_to: dict[str, str] = field(default_factory=dict)
    """Kinds of mutations that change nothing on these inputs, and would on others, with an example each."""
    others: list[str] = field(default_factory=list)
    """Steps after it with an error of their own: a second fault, or the same one in another place."""
    tried: int = 0
    notes: list[str] = field(default_factory=list)
    about: list[str] = field(default_factory=list)
    """Where no cause is known: what the error looks like, in sentences."""
    report: Localisation | None = None

    def as_json(self) -> dict[str, Any]:
        """The part "explain" of what `whywrong diff --explain --json` prints."""
        found: dict[str, Any] = {
            "step": self.step,
            "verdict": self.verdict,
            "causes": [c.as_json() for c in self.causes],
        }
        found |= {"nearest": self.nearest.as_json() if self.nearest else None, "separate": sorted(self.separate)}
        return found | {key: getattr(self, key) for key in ("about", "blind_to", "others", "tried", "notes")}

    def _sentences(self) -> Iterator[str]:
        why = f"why {self.step}: {self.verdict} ({self.tried} mutations tried)"
        yield why if self.step is not None else self.verdict
        found = self.report.findings.get(self.step or "") if self.report else None
        if found and found.words.startswith(OTHER_PARAMETER):
            yield f"{self.step} is {found.words}; what comes after is checked with it as observed"
        yield from self.notes
        for cause in self.causes:
            kinds = {each.partition(":")[0]: each for each in reversed(cause.also)}  # the first of each
            others = [says for kind, says in kinds.items() if kind != cause.kind][-3:]
            if others := [*others, *(f"also at {line}" for line in cause.elsewhere)]:
                yield f"{cause.says}; equivalent mutations: {'; '.join(others)} (.also has all {len(cause.also)})"
        yield from self.about
        if self.nearest is not None:
            off, line = self.nearest.of_bound, self.nearest.line
            why = "within the tolerance, but a pattern remains: perhaps a second fault"
            why = why if off <= 1.0 else f"up to {digits(off, 3)} times the tolerance is left"
            yield f"no fit, but nearest: {self.nearest.says} ({why}; {line})"
        if self.separate:
            yield f"they differ on other inputs: .separate has {first_of(self.separate)}"
        if self.blind_to:
            some = first_of(self.blind_to, 3)
            yield f"these inputs would not show some mutations, of {some} (.blind_to has an example of each kind)"
        if self.others:
            names = self.report.folded(self.others) if self.report else first_of(self.others)
            yield f"also wrong by themselves: {names} (step=, or --step, looks at each, or at a loop's in one)"

    def table(self) -> Table:
        """A row a cause."""
        rows = [(c.kind, c.says, c.line, f"{digits(c.of_bound, 3)} times the tolerance") for c in self.causes]
        return Table(("kind", "cause", "in the reference", "what is left"), rows)

    def _repr_html_(self) -> str:
        table = self.table()._repr_html_() if self.causes else ""
        return "".join(f"<p>{escape(line)}</p>" for line in self._sentences()) + table

    def __repr__(self) -> str:
        return printable("\n".join([*([str(self.table())] if self.causes else []), *self._sentences()]))
