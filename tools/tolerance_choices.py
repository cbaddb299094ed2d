"""How much the numbers matter that were chosen for tolerances, and not derived: each halved or doubled, or by four.

    python -m tools.tolerance_choices [DRAWS] --out data/results/tolerance_choices.csv

For each value DRAWS correct programs and a fifth as many with one fault, of :mod:`tools.correct_programs`, the same
ones each time: how many are flagged, and how many faults of one, 4 and 32 round-offs are found.
"""

import argparse
import csv
from importlib import import_module
from pathlib import Path

from tools.correct_programs import run

SEED = 3_000_000
SIZES = (1.0, 4.0, 32.0)
CHOICES = {
    "checking.with_program.SIMULATED_RUNS": (12, 24, 48),
    "checking.rounding.FUNCTION_ULPS": (1.0, 2.0, 4.0),
    "checking.rounding.HASH_BINS": (16, 64, 256),
    "comparing.structure.TILE": (16, 64, 256),
}


def measured(draws: int) -> dict[str, int]:
    """The counts of a row, with the constants as they are now."""
    correct = [one for one in run(range(SEED, SEED + draws)) if "first" in one]
    faulty = run(range(SEED + draws, SEED + draws + draws // 5), grades=SIZES)
    row = {"correct": len(correct), "flagged": sum(one["first"] is not None for one in correct)}
    for size in SIZES:
        found = [f["found"] for one in faulty for f in one.get("faults", ()) if f["grade"] == size]
        row |= {f"faults of {size:g}": len(found), f"found of {size:g}": sum(found)}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("draws", type=int, nargs="?", default=800)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    usual, rows = measured(asked.draws), []
    for name, values in CHOICES.items():
        module = import_module(f"whywrong.{name.rpartition('.')[0]}")
        constant = name.rpartition(".")[2]
        chosen = getattr(module, constant)
        for value in values:
            setattr(module, constant, value)
            row = usual if value == chosen else measured(asked.draws)
            rows.append({"constant": name, "value": value, "chosen": value == chosen} | row)
            print(rows[-1], flush=True)
        setattr(module, constant, chosen)
    with asked.out.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)


if __name__ == "__main__":
    main()
