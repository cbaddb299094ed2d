"""What a tool says of each defect, held against what the defect is.

A tool is a function of a case, a dict with `reference` (a function of its inputs), `inputs` (float64), `loss`,
`observed` (inputs and steps of a port by their names) and `precision` (what the port declares), and of the seconds that
it may take. It returns an :class:`Answer`. A step that is named a second time is NAME#2; one that updates an input
stands in `observed` in the input's place, and is NAME#2 in an answer.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from scipy.stats import binomtest

COLUMNS = ("case", "kind", "accepted", "step", "verdict", "named", "says", "outcome", "tried", "seconds")
OUTCOMES = (
    "right",  # one cause, of an accepted kind
    "undecidable with the right one",  # several, one of them of an accepted kind
    "undecidable without",
    "none of these",
    "not found",  # no step was wrong
    "other step",
    "wrong kind",  # one cause, of no accepted kind
)
"""From the best to the worst."""

Row = dict[str, str]


class Answer(NamedTuple):
    """What a tool says of a case: the first wrong step or None, a verdict, the kinds of causes, the likeliest first."""

    step: str | None
    verdict: str = "none of these"
    """``cause``, ``undecidable`` or ``none of these``."""
    kinds: Sequence[str] = ()
    text: str = ""
    tried: int = 0


Tool = Callable[[dict[str, Any], float], Answer]


def outcome(accepted: Sequence[str], true_step: str, answer: Answer) -> str:
    """One of OUTCOMES."""
    if answer.step is None:
        return "not found"
    if answer.step != true_step:
        return "other step"
    if answer.verdict == "undecidable":
        return "undecidable with the right one" if {*answer.kinds} & {*accepted} else "undecidable without"
    if answer.verdict == "none of these":
        return answer.verdict
    return "right" if answer.kinds[0] in accepted else "wrong kind"


def scored(case: dict[str, Any], tool: Tool, seconds: float = 20.0) -> Row:
    """The row of a case; the time in it has the run of the reference in it, where the tool runs that."""
    start = time.perf_counter()
    answer = tool(case, seconds)
    took = time.perf_counter() - start
    true = case["true_step"] + "#2" * (case["true_step"] in case["inputs"])  # what was updated, under the same name
    label = (case["id"], case["kind"], " ".join(case["accept"]))
    said = (answer.step or "", answer.verdict, " ".join(answer.kinds), answer.text)
    cells = (*label, *said, outcome(case["accept"], true, answer), str(answer.tried), f"{took:.1f}")
    return dict(zip(COLUMNS, cells, strict=True))


def read(path: Path) -> list[Row]:
    """The rows of a file; lines that begin with # say how it was made."""
    with path.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def write(path: Path, rows: Iterable[Row], columns: Sequence[str] = COLUMNS) -> Iterator[Row]:
    """Write rows as they come, and pass them on."""
    with path.open("w", encoding="utf-8", newline="") as out:
        table = csv.DictWriter(out, columns, lineterminator="\n")
        table.writeheader()
        for row in rows:
            table.writerow(row)
            out.flush()
            yield row


def share(rows: Sequence[Row], name: str) -> tuple[int, float, float]:
    """How often an outcome came, and the 95% Wilson interval of its share in percent."""
    count = sum(row["outcome"] == name for row in rows)
    return count, *interval(count, len(rows))


def interval(count: int, of: int) -> tuple[float, float]:
    """The 95% Wilson interval of a share, in percent."""
    found = binomtest(count, of).proportion_ci(method="wilson")
    return 100 * found.low, 100 * found.high
