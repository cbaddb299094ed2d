"""manifest.csv: a row a defect, from the sets themselves and from the record of each one's first run."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from benchmark import SETS, programs
from benchmark.score import read

COLUMNS = (
    *("id", "set", "program", "kind", "accepted", "step", "precision", "author"),
    *("date", "first_run_commit", "first_run_verdict"),
)
RECORD = Path(__file__).resolve().parent.parent / "data" / "results" / "explain.csv"
AUTHORS = dict(zip([*"qrstuvwxyzab", "ba", "bb"], "ABCDEFGHIJKLMN", strict=True))
"""The author, as a letter, by the letters with which the ids of that author's programs begin."""


def text() -> str:
    """The whole file."""
    recorded = {(row["set"], row["case"]): row for row in read(RECORD)}
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    table.writerow(COLUMNS)
    for name in SETS:
        for program in programs([name]):
            for defect in program.defects:
                precision = program.variants[0]
                case = f"{program.id}/{defect.name}/{precision}/0"
                first = recorded[name, case]
                accepted = " ".join((defect.kind, *defect.accept))
                what = (
                    case,
                    name,
                    program.name,
                    defect.kind,
                    accepted,
                    defect.step,
                    precision,
                    AUTHORS[program.id.rstrip("0123456789")],
                )
                table.writerow((*what, first["date"], first["commit"], first["outcome"]))
    return out.getvalue()


def write(path: Path) -> None:
    """Write the file."""
    path.write_text(text(), encoding="utf-8")
