"""How many cases of correct kernels were fuzzed, and how many of them were flagged: a record that each run adds to.

    python -m tools.correct_cases RECORD.csv [--minutes M] [--draws N] [--device cpu|cuda] [--only NAME ..] [--part K/N]

Kernels are the workbook's correct ones (`fuzz_kernels.py`) and the tests' small ones. They take turns; each turn takes
the next seeds of its kernel on its device, so that no two rows are of the same cases, and is written when it ends. A
fuzzing stops at its first failure, and the turn goes on with the next seed. N processes, each with a record of its own
that begins as the same one, share the seeds as parts 0/N to N-1/N. Printed are the cases, those flagged, and the 95%
limit of the rate. 1 if any was flagged.
"""

import argparse
import csv
import sys
import time
from pathlib import Path

from scipy.stats import beta

from tools import small_kernels
from tools.fuzz_kernels import CASES, DEVICE, TORCH, Case, randn

COLUMNS = ("name", "language", "device", "seed", "cases", "refused", "discarded", "flagged", "seconds", "words")
SMALL = [
    Case("small: softmax", TORCH, small_kernels.right, small_kernels.reference, {"x": randn(4, 9)}),
    Case("small: product", TORCH, small_kernels.product, small_kernels.product, {"a": randn(4, 9), "b": randn(9, 5)}),
]
CORRECT = {case.name: case for case in (*CASES.values(), *SMALL) if not case.faulty and case.runs_here}


def limit(flagged: int, cases: int) -> float:
    """The largest rate at which so few, or fewer, are flagged in 5% of all records (Clopper and Pearson)."""
    return float(beta.ppf(0.95, flagged + 1, cases - flagged)) if cases > flagged else 1.0


def read(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def turn(case: Case, seed: int, draws: int) -> dict[str, object]:
    """The row of one seed."""
    begun = time.monotonic()
    found = case._replace(how=case.how | {"seed": seed, "progress": str}).fuzz(draws, most=1 << 12)
    counts = {"cases": found.examples, "refused": found.refused, "discarded": found.discarded}
    row = {"name": case.name, "language": case.language, "device": DEVICE.kind, "seed": seed} | counts
    words = found.failure.words if found.failure else ""
    return row | {"flagged": int(bool(words)), "seconds": round(time.monotonic() - begun, 1), "words": words}


def main() -> int:
    """Extend the record for so many minutes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("record", type=Path)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--draws", type=int, default=50)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--only", nargs="+", choices=CORRECT, default=list(CORRECT), metavar="NAME")
    parser.add_argument("--part", default="0/1", metavar="K/N")
    given = parser.parse_args()
    part, parts = map(int, given.part.split("/"))
    rows = read(given.record)
    used = dict.fromkeys(CORRECT, -1)
    for row in rows:
        if row["device"] == DEVICE.kind and row["name"] in used:
            used[row["name"]] = max(used[row["name"]], int(row["seed"]))
    seeds = {name: last + 1 + (part - last - 1) % parts for name, last in used.items()}
    end = time.monotonic() + 60.0 * given.minutes
    with given.record.open("a", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if not rows:
            table.writeheader()
        while time.monotonic() < end:
            name = min(given.only, key=seeds.__getitem__)
            row = turn(CORRECT[name], seeds[name], given.draws)
            seeds[name] += parts
            table.writerow(row)
            file.flush()
            if row["flagged"]:
                print(f"{name}, seed {row['seed']}: {row['words']}", flush=True)
    rows = [row for row in read(given.record) if row["device"] == DEVICE.kind]
    cases, flagged = (sum(int(row[what]) for row in rows) for what in ("cases", "flagged"))
    print(f"{cases} cases on {DEVICE.kind}, {flagged} flagged: under {limit(flagged, cases):.2g} at 95%")
    return int(bool(flagged))


if __name__ == "__main__":
    sys.exit(main())
