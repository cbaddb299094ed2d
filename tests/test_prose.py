"""Numbers that prose and docs repeat from the code and from records are those."""

import copy
import csv
import json
import math
import re
import textwrap

import pytest
import torch

from kernels.compare.checks import CHECKS
from labkit.session.catalogue import ROOT
from whywrong.checking.with_program import SIMULATED_RUNS
from whywrong.comparing.bounds import quantile


def words(name):
    """All text cells of a notebook, in a line."""
    cells = json.loads((ROOT / "notebooks" / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    return " ".join(" ".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown").split())


def rows(name):
    with (ROOT / "data" / "results" / name).open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("name", ["attention_matmul", "dalpha_atomics", "start_here"])
def test_the_runs_from_which_the_tolerance_comes_are_counted_right(name):
    assert f"{SIMULATED_RUNS} {'times with random rounding' if name == 'start_here' else 'runs of the step'}" in words(
        name
    )


def test_the_tolerances_of_the_checks_are_said_as_they_are():
    said = words("comparison_selftest")
    for check, sentence in (
        ("1 - cosine", "{:g} for 1 - cosine"),
        ("1 - 2<x,y>/(|x|^2+|y|^2)", "{:g} for the relative metric"),
        ("fixed tolerance", "1e-4 as a fixed tolerance"),
    ):
        assert sentence.format(CHECKS[check][1]) in said
    assert (CHECKS["fixed tolerance"][1], CHECKS["L1 norms"][1]) == (1e-4, 5e-6), "six digits"


def test_the_table_of_fuzzings_counts_what_is_on_record():
    docs = (ROOT / "docs" / "traces.md").read_text(encoding="utf-8").splitlines()
    table = [line.split(" | ") for line in docs if line.startswith("| `") and "hunts" in line]
    recorded = rows("fuzz.csv")
    assert {cells[0].strip("| `") for cells in table} == {row["set"] for row in recorded}
    for cells in table:
        fuzzed = [row for row in recorded if row["set"] == cells[0].strip("| `")]
        right, faulty = ([row for row in fuzzed if (row["kernel"] == "right") == so] for so in (True, False))
        right, faulty = ([row for row in some if row["outcome"] != "not run"] for some in (right, faulty))
        fell = [
            sum(row["outcome"] == "falls" and "OutOfMemory" not in row["words"] for row in some)
            for some in (right, faulty)
        ]
        assert f"up to {max(int(row['draws'] or 0) for row in right)}" in cells[2]
        assert f"{fell[0]} of {len(right)}" in cells[4]
        assert f"{fell[1]} of {len(faulty)}" in cells[3] or not faulty


def test_the_table_of_sweeps_has_the_records():
    docs = (ROOT / "docs" / "sweeps.md").read_text(encoding="utf-8")
    for name in ("sweep_bench.csv", "sweep_bench_first.csv"):
        for row in rows(name):
            what = f"{row['notebook']} 2 s" if row["notebook"] == "waits" else f"{row['notebook']} for 2 s"
            times = f"{float(row['sweep s']):.0f} s | {float(row['ideal s']):.0f} s | {float(row['of the ideal']):.2f}"
            assert f"| {what} | {row['runs']} | {times} | `{name}`" in docs


def test_what_is_said_of_tolerances_is_what_is_on_record():
    docs = " ".join((ROOT / "docs" / "tolerances.md").read_text(encoding="utf-8").split())
    for power in (3, 6, 9, 12):
        few, many = (quantile(10.0**-power, runs) for runs in (SIMULATED_RUNS, math.inf))
        assert f"| $10^{{-{power}}}$ | {few:.2f} | {many:.2f} | {few / many:.2f} |" in docs
    record = json.loads((ROOT / "data" / "results" / "right_programs.json").read_text())
    for storage, flagged in record["accused by"]["storage"].items():
        assert f"{flagged['count']} of {flagged['of']} in {storage}" in docs
    for size in ("1 roundings", "32 roundings"):
        for found in (sizes[size]["found"] for sizes in record["power"].values()):
            assert f"{found['count']} of {found['of']}" in docs
    for row in rows("tolerance_choices.csv"):
        found = " | ".join(f"{row[f'found of {size}']} of {row[f'faults of {size}']}" for size in (1, 4, 32))
        assert f"| {float(row['value']):g} | {row['flagged']} of {row['correct']} | {found} |" in docs


@pytest.mark.long
def test_the_blocks_of_the_docs_are_walked_to_the_wrong_one(capsys):
    docs = (ROOT / "docs" / "own_module.md").read_text(encoding="utf-8")
    module, walk = (textwrap.dedent(code) for code in re.findall(r"(?s)```python\n(.*?)```", docs))
    names = {"__name__": "block"}
    exec(module, names)
    reference, port = (torch.nn.Module() for _ in range(2))
    reference.layers = torch.nn.ModuleList(names["Block"]() for _ in range(4))
    port.layers = copy.deepcopy(reference.layers)
    port.layers[2].norm.eps = 1e-2
    names |= {"reference": reference, "port": port, "x": names["x"]}
    capsys.readouterr()
    exec(walk, names)
    assert names["its_port"] is port.layers[2]
    assert "add has 0.01 where the reference has 1e-05" in capsys.readouterr().out


def test_the_module_of_the_docs_is_explained_as_shown(capsys):
    docs = (ROOT / "docs" / "own_module.md").read_text(encoding="utf-8")
    exec(textwrap.dedent(re.search(r"(?s)```python\n(.*?)```", docs)[1]), {"__name__": "block"})
    printed = capsys.readouterr().out
    assert printed.startswith("norm\n")
    for shown in ("eps   add has 0.01 where the reference has 1e-05", "why norm: cause"):
        assert shown in docs
        assert shown in printed
