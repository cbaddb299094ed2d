"""First wrong steps by whywrong and by what others use, over all sets and reports: a row a case, and a table."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any

from benchmark import HERE, SETS, base, programs, public
from benchmark.adapters import TOOLS
from benchmark.baselines import JUDGES, PACKAGES
from benchmark.score import Row, interval

REPORTS = ("public_reports_1", "public_reports_2")
COMPARED = ("localise", *JUDGES)
COLUMNS = ("set", "case", "true_step", *COMPARED)
"""A tool's column has the step that it names first: empty for none, ABSENT where the tool is not installed."""
ABSENT = "not installed"


def missing(tool: str) -> bool:
    """Whether its package is not installed."""
    return tool in PACKAGES and find_spec(tool) is None


def cases(names: Sequence[str], percent: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each case with the set or the folder that it is of; of programs those whose id has a CRC-32 that is below
    `percent`, modulo 100."""
    for name in names:
        if name in REPORTS:
            yield from ((name, case) for case in public.cases(HERE / name))
        else:
            found = base.cases(programs([name]))
            yield from ((name, case) for case in found if zlib.crc32(case["id"].encode()) % 100 < percent)


def rows(names: Sequence[str], tools: Sequence[str], seconds: float, percent: int = 100) -> Iterator[Row]:
    """A row of COLUMNS a case."""
    lacking = {tool for tool in tools if missing(tool)}
    for where, case in cases(names or (*SETS, *REPORTS), percent):
        true = case["true_step"] or ""
        true += "#2" * (true in case["inputs"])
        row = dict.fromkeys(COLUMNS, ABSENT) | {"set": where, "case": case["id"], "true_step": true}
        for tool in tools:
            if tool not in lacking:
                row[tool] = TOOLS[tool](case, seconds).step or ""
        yield row


def cell(right: int, of: int) -> str:
    """A count with the 95% Wilson interval of its share."""
    return "{} of {} ({:.0f}% to {:.0f}%)".format(right, of, *interval(right, of)) if of else "none run"


def table(found: Sequence[Row]) -> str:
    """In Markdown, a row a tool: first steps that are right and correct runs flagged, of programs and of reports."""
    head = (
        "tool",
        "programs: first step right",
        "correct runs flagged",
        "reports: first step right",
        "correct flagged",
    )
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for tool in COMPARED:
        cells = []
        for reports in (False, True):
            mine = [row for row in found if (row["set"] in REPORTS) == reports and row[tool] != ABSENT]
            wrong = [row for row in mine if row["true_step"]]
            clean = [row for row in mine if not row["true_step"]]
            cells.append(cell(sum(row[tool] == row["true_step"] for row in wrong), len(wrong)))
            cells.append(cell(sum(row[tool] != "" for row in clean), len(clean)))
        if not any(row[tool] != ABSENT for row in found):
            cells = [f"{ABSENT}: pip install {PACKAGES[tool]}" if missing(tool) else "not run", "", "", ""]
        lines.append(f"| {tool} | {' | '.join(cells)} |")
    return "\n".join(lines)
