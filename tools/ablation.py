"""What each part of the search for causes earns: the part is taken out, and the cases in which it spoke run again.

python -m tools.ablation RUN.csv [--parts regions twins ...]

RUN.csv is what `python -m benchmark score whywrong --out RUN.csv` wrote. A case in whose sentence no part shows would
end the same without it, but for the time that the part takes: those are not run again.
"""

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch

from benchmark import base, programs
from benchmark.adapters import TOOLS
from benchmark.score import OUTCOMES, Row, read, scored
from whywrong.explaining import search
from whywrong.explaining.residual import Residual

PARTS = {
    "regions": r"but only (?!in [^;]* of dimension \d+ of \d+ of |for |from time)|^(in|from|at|where|outside) ",
    "part of a sum": r"leaves out",
    "a number looked for": r" has about |times what it should be|too (large|small)$",
    "several numbers": r"holds other numbers| has \S+ where the reference has \S+;",
    "a term": r"(is|are) (added|subtracted)",
    "from a time on": r"but only from time",
    "part of a dimension": r"but only in [^;]* of dimension \d+ of \d+ of ",
    "twins": r"; and ",
    "one way": r"but only for ",
    "not written": r"never written|at all\?",
    "twice, or later": r"is done twice|comes after",
    "tiles": r"by itself| means of each ",
}
"""The parts, and how a sentence shows that one of them spoke."""

STAGES = {
    "part of a sum": "_sums",
    "several numbers": "_solved",
    "a term": "_terms",
    "from a time on": "_later",
    "part of a dimension": "_inside",
    "twins": "_twins",
    "one way": "_one_way",
}
GENERATORS = {"twice, or later": "in_a_row", "tiles": "in_tiles"}


@contextmanager
def without(part: str) -> Iterator[None]:
    """The search without a part, in the block."""
    nothing = patch.object(search._Search, STAGES.get(part, "_late"), lambda self: None)
    if part == "regions":
        nothing = patch.object(Residual, "left", lambda self, value, explained: None)
    elif part in ("a number looked for", "not written"):
        name = "_fitted" if part == "a number looked for" else "_unwritten"
        nothing = patch.object(search._Search, name, lambda self: iter(()))
    elif part in GENERATORS:
        nothing = patch(f"whywrong.explaining.mutations.{GENERATORS[part]}", lambda c: iter(()))
    with nothing:
        yield


def again(rows: list[Row], part: str) -> Iterator[Row]:
    """The cases in which a part spoke, without it."""
    spoke = [row["case"] for row in rows if row["verdict"] == "cause" and re.search(PARTS[part], row["says"])]
    chosen = {program.id: program for program in programs([])}
    wanted = [chosen[name] for name in dict.fromkeys(case.split("/")[0] for case in spoke) if name in chosen]
    for case in base.cases(wanted, clean=False, defects=True):
        if case["id"] in spoke:
            with without(part):
                yield scored(case, TOOLS["whywrong"])


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS, metavar="PART")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = read(given.run)
    before = {row["case"]: row["outcome"] for row in rows}
    for part in given.parts:
        now, was = Counter[str](), Counter[str]()
        for row in again(rows, part):
            was[before[row["case"]]] += 1
            now[row["outcome"]] += 1
            print(f"  {row['case']}: {before[row['case']]} -> {row['outcome']} {row['says']}", flush=True)
        counts = (f"{name} {was[name]} -> {now[name]}" for name in OUTCOMES if was[name] or now[name])
        print(f"without {part}: {was.total()} cases; {', '.join(counts)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
