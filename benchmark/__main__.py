"""Score a tool on the benchmark, check its labels, or write its manifest.

python -m benchmark score whywrong --set heldout_1 --out OUT.csv
python -m benchmark score my_package.my_module:my_tool --correct
python -m benchmark score whywrong --folder ../other/programs     # a set of the same form elsewhere
python -m benchmark public ../other/reports                       # what whywrong says of public reports, to be judged
python -m benchmark compare --out data/results/comparison.csv     # the first wrong step by each tool that there is
python -m benchmark check heldout_3
python -m benchmark manifest
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from benchmark import HERE, SETS, base, check, compare, manifest, programs, public
from benchmark.adapters import TOOLS
from benchmark.public import importable
from benchmark.score import COLUMNS, OUTCOMES, Tool, read, scored, share, write


def tool(name: str) -> Tool:
    """One of TOOLS, or MODULE:FUNCTION."""
    if name in TOOLS:
        return TOOLS[name]
    module, colon, function = name.partition(":")
    if not colon:
        raise SystemExit(f"TOOL: expected {', '.join(TOOLS)} or MODULE:FUNCTION, got {name}")
    return getattr(import_module(module), function)


def cases(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The cases that the arguments ask for."""
    which = {"clean": given.correct, "defects": not given.correct}
    if given.folder:
        with importable(given.folder):
            outside = import_module("programs")
        return outside.cases(given.names or None, **which)
    chosen = {program.id: program for program in programs(given.set)}
    if unknown := [name for name in given.names if name not in chosen]:
        raise SystemExit(f"--names: expected programs of {', '.join(given.set or SETS)}, got {', '.join(unknown)}")
    return base.cases([chosen[name] for name in given.names or chosen], **which)


def score(given: argparse.Namespace) -> int:
    """Print a row a case and a table of outcomes; of correct ports, how many are flagged."""
    torch.set_num_threads(1)
    run = tool(given.tool)
    if given.correct:
        answers = [(case["id"], run(case, given.seconds)) for case in cases(given)]
        flagged = [f"{name}: {answer.step}" for name, answer in answers if answer.step is not None]
        print(*flagged, f"flagged: {len(flagged)} of {len(answers)} correct ports", sep="\n")
        return 0
    rows = []
    found = (scored(case, run, given.seconds) for case in cases(given))
    for row in write(given.out, found) if given.out else found:
        rows.append(row)
        print(f"{row['case']:45} {row['kind']:10} {row['outcome']:15} {row['seconds']:>5} s  {row['says']}", flush=True)
    if not rows:
        raise SystemExit("NAMES: expected programs that have defects, got none")
    for name in OUTCOMES:
        count, low, high = share(rows, name)
        print(f"{name:30} {count:4} of {len(rows)}: {low:.1f}% to {high:.1f}%")
    return 0


def compared(given: argparse.Namespace) -> int:
    """Write a row a case as it comes, and print the table; or the table of a file."""
    torch.set_num_threads(1)
    if given.table:
        found = read(given.table)
    else:
        made = compare.rows(given.set, given.tools, given.seconds, given.percent)
        found = list(write(given.out, made, compare.COLUMNS) if given.out else made)
    print(compare.table(found))
    return 0


def reports(given: argparse.Namespace) -> int:
    """Print what is said of public reports; with --one of a single case, as JSON."""
    if given.one:
        print(json.dumps(public.said(given.folder, given.one, given.seconds)))
    else:
        public.main(given.folder, given.names, given.seconds, given.out)
    return 0


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("score", help="score a tool")
    one.add_argument("tool", help=f"{', '.join(TOOLS)}, or MODULE:FUNCTION")
    one.add_argument("--set", nargs="+", action="extend", default=[], choices=SETS, metavar="NAME", help="sets (all)")
    one.add_argument("--names", nargs="+", default=[], metavar="PROGRAM", help="programs of these sets, as q01 (all)")
    one.add_argument("--folder", type=Path, help="a folder with a module `programs` of the same form")
    one.add_argument("--correct", action="store_true", help="the correct ports in place of the defects")
    one.add_argument("--seconds", type=float, default=20.0, help="time that the tool may take for a case (20)")
    one.add_argument("--out", type=Path, help=f"a CSV of {', '.join(COLUMNS)}")
    one.set_defaults(run=score)
    two = commands.add_parser("check", help="are the labels right? Runs references in float64, and no tool")
    two.add_argument("names", nargs="*", help="sets or programs (all)")
    two.set_defaults(run=lambda given: check.main(given.names))
    three = commands.add_parser("manifest", help="write manifest.csv")
    three.set_defaults(run=lambda _: manifest.write(HERE / "manifest.csv"))
    four = commands.add_parser("public", help="what whywrong says of public bug reports, beside their truth")
    four.add_argument("folder", type=Path, help="the scripts of the reports")
    four.add_argument("--names", nargs="+", default=[], metavar="ID", help="cases of truth.yaml (all)")
    four.add_argument("--seconds", type=float, default=20.0, help="time that the search may take for a case (20)")
    four.add_argument("--out", type=Path, help=f"a CSV of {', '.join(public.COLUMNS)}")
    four.add_argument("--one", help=argparse.SUPPRESS)
    four.set_defaults(run=reports)
    five = commands.add_parser("compare", help="the first wrong step by whywrong and by what others use")
    every = (*SETS, *compare.REPORTS)
    five.add_argument("--set", nargs="+", action="extend", default=[], choices=every, metavar="NAME", help="sets (all)")
    five.add_argument("--tools", nargs="+", default=compare.COMPARED, choices=compare.COMPARED, help="tools (all)")
    five.add_argument("--seconds", type=float, default=20.0, help="time that a tool may take for a case (20)")
    five.add_argument(
        "--percent", type=int, default=100, help="of the programs' runs, chosen by their ids' CRC-32 (100)"
    )
    five.add_argument("--out", type=Path, help="a CSV: a row a case, the step that each tool names")
    five.add_argument("--table", type=Path, help="print the table of such a CSV, and run nothing")
    five.set_defaults(run=compared)
    given = parser.parse_args()
    return given.run(given) or 0


if __name__ == "__main__":
    sys.exit(main())
