"""What whywrong.explain says of every defect of a folder of programs, held against what the defects are.

    python tests/whywrong/explain_programs.py tests/whywrong/blind OUT.csv [--seconds 20] [q01 ...]

The folder's `programs.py` has `cases(names, clean, defects)`, which yields a reference, its inputs, what a port with a
defect gave, and the label: the first wrong step, the defect's kind, and the kinds that pass for it.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from scipy.stats import binomtest

import whywrong

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


def programs(folder: Path) -> ModuleType:
    """The module `programs` of a folder, with what it imports from there and from the folder above.

    Another folder may have modules of the same names.
    """
    folder, known = folder.resolve(), set(sys.modules)
    sys.path[:0] = here = [str(folder), str(folder.parent)]
    try:
        return importlib.import_module("programs")
    finally:
        del sys.path[: len(here)]
        for name in set(sys.modules) - known:
            if str(Path(getattr(sys.modules[name], "__file__", None) or "/").parent) in here:
                del sys.modules[name]


def outcome(accepted: Sequence[str], true_step: str, step: str | None, verdict: str, named: Sequence[str]) -> str:
    """One of OUTCOMES. `named` are the kinds of the causes, the most likely first."""
    if step is None:
        return "not found"
    if step != true_step:
        return "other step"
    if verdict == "undecidable":
        return "undecidable with the right one" if {*named} & {*accepted} else "undecidable without"
    if verdict == "none of these":
        return verdict
    return "right" if named[0] in accepted else "wrong kind"


def explained(case: dict[str, Any], seconds: float = 20.0) -> Row:
    """The row of a case. `seconds` bounds the search; the time in the row has the run of the reference in it."""
    start = time.perf_counter()
    golden = whywrong.golden(case["reference"], loss=case["loss"], **case["inputs"])
    found = whywrong.explain(
        case["observed"], golden, precision=whywrong.Precision(**case["precision"]), seconds=seconds
    )
    took = time.perf_counter() - start
    named = [cause.kind for cause in found.causes]
    said = found.causes[0].says if found.causes else ""
    true = case["true_step"] + "#2" * (case["true_step"] in case["inputs"])  # what was updated, under the same name
    judged = outcome(case["accept"], true, found.step, found.verdict, named)
    label = (case["id"], case["kind"], " ".join(case["accept"]))
    answer = (found.step or "", found.verdict, " ".join(named), said, judged, str(found.tried), f"{took:.1f}")
    return dict(zip(COLUMNS, (*label, *answer), strict=True))


def read(path: Path) -> list[Row]:
    """The rows of a file; lines that begin with # say how it was made."""
    with path.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def write(path: Path, rows: Iterable[Row], about: Sequence[str] = ()) -> Iterator[Row]:
    """Write rows as they come, and pass them on."""
    with path.open("w", encoding="utf-8", newline="") as out:
        out.writelines(f"# {line}\n" for line in about)
        table = csv.DictWriter(out, COLUMNS, lineterminator="\n")
        table.writeheader()
        for row in rows:
            table.writerow(row)
            out.flush()
            yield row


def share(rows: Sequence[Row], name: str) -> tuple[int, float, float]:
    """How often an outcome came, and the 95% Wilson interval of its share in percent."""
    count = sum(row["outcome"] == name for row in rows)
    interval = binomtest(count, len(rows)).proportion_ci(method="wilson")
    return count, 100 * interval.low, 100 * interval.high


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*", help="programs; all where none is named")
    parser.add_argument("--seconds", type=float, default=20.0, help="time that the search for one cause may take")
    given = parser.parse_args()
    torch.set_num_threads(1)
    cases = programs(given.folder).cases(given.names or None, clean=False)
    rows = []
    for row in write(given.out, (explained(case, given.seconds) for case in cases)):
        rows.append(row)
        print(f"{row['case']:45} {row['kind']:10} {row['outcome']:15} {row['seconds']:>5} s  {row['says']}", flush=True)
    if not rows:
        parser.error(f"names: {' '.join(given.names)} is not right; wanted programs of {given.folder}")
    for name in OUTCOMES:
        count, low, high = share(rows, name)
        print(f"{name:30} {count:4} of {len(rows)}: {low:.1f}% to {high:.1f}%")


if __name__ == "__main__":
    main()
