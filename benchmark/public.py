"""What whywrong says of reproductions of public bug reports, beside their truth, for a reader to judge.

The reproductions are scripts in a folder outside; `public_reports/truth.yaml` says which of their lines set a case up,
what its true step and edit are, and what a true sentence must say. Each case runs in a process of its own, since one
that ends its process is a finding too. Whether a sentence is true is for a person to say who knows the truth: words
cannot be matched by a program.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import yaml

import whywrong

TRUTH = Path(__file__).parent / "public_reports" / "truth.yaml"
COLUMNS = ("id", "true_step", "step", "verdict", "seconds", "says", "edit", "must_say")
HUNG = 300
"""Seconds after which a case is ended."""


@contextmanager
def importable(folder: Path) -> Iterator[None]:
    """Modules of a folder outside can be imported in the block; after it none of them stays in `sys.modules`."""
    before, path = set(sys.modules), str(folder.resolve())
    sys.path.insert(0, path)
    try:
        yield
    finally:
        sys.path.remove(path)
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", None)).startswith(path):
                del sys.modules[name]


def truths(folder: Path) -> list[dict[str, Any]]:
    """The cases in which an observed run is explained, of the folder's truth.yaml, or of TRUTH where it has none."""
    own = folder / "truth.yaml"
    found = yaml.safe_load((own if own.exists() else TRUTH).read_text(encoding="utf-8"))
    return [case for case in [*found["cases"], *found.get("small", [])] if "observed" in case.get("setup", {})]


def _names_of_before() -> ModuleType:
    """The library under the name that the scripts import."""
    module = ModuleType("labkit")
    module.__dict__.update({name: getattr(whywrong, name) for name in whywrong.__all__})
    return module


def set_up(folder: Path, case: dict[str, Any]) -> dict[str, Any]:
    """Run the lines of a script that set a case up; returns golden, observed, precision and right (None if it has no
    correct port), and the reference."""
    how, space = case["setup"], {"__name__": "__main__"}
    script = how.get("exec_script", case["script"])
    lines = (folder / script).read_text(encoding="utf-8").splitlines(keepends=True)
    spans = [(*map(int, span.split("-")), None)[:2] for span in str(how["exec_lines"]).replace(" ", "").split(",")]
    text = "".join("".join(lines[a - 1 : (b or a)]) for a, b in spans)
    with importable(folder):
        exec(compile(text, script, "exec"), space)
        exec(how.get("then", ""), space)
        found = {n: eval(how.get(n, "None"), space) for n in ("golden", "observed", "precision", "right")}
        return found | {"reference": space.get("reference")}


def cases(folder: Path) -> Iterator[dict[str, Any]]:
    """A faulty port's run of each report and a correct one's, in the form of :func:`benchmark.base.cases`."""
    for report in truths(folder):
        found = set_up(folder, report)
        exact, observed = found["golden"], found["observed"]
        runs = {"faulty": observed[0] if isinstance(observed, list) else observed, "clean": found["right"]}
        for what, run in runs.items():
            if run is not None:
                yield {
                    "id": f"{report['id']}/{what}",
                    "reference": found["reference"],
                    "loss": None,
                    "inputs": {name: exact[name] for name in signature(found["reference"]).parameters},
                    "observed": run,
                    "precision": asdict(found["precision"]),
                    "clean": what == "clean",
                    "true_step": None if what == "clean" else report["true_step"],
                }


def said(folder: Path, name: str, seconds: float) -> dict[str, Any]:
    """What explain says of one case."""
    torch.set_num_threads(1)
    case = next(case for case in truths(folder) if case["id"] == name)
    sys.modules["labkit"] = _names_of_before()
    folder = folder.resolve()
    os.chdir(folder)
    given = set_up(folder, case)
    start = time.perf_counter()
    found = whywrong.explain(
        given["observed"],
        given["golden"],
        precision=given["precision"],
        step=case["setup"].get("step"),
        seconds=seconds,
        progress=lambda text: None,
    )
    took = f"{time.perf_counter() - start:.1f}"
    return {"step": found.step or "", "verdict": found.verdict, "seconds": took, "says": str(found)}


def rows(folder: Path, names: Sequence[str], seconds: float) -> Iterator[dict[str, Any]]:
    """A row a case, each made by a process of its own."""
    for case in truths(folder):
        if names and case["id"] not in names:
            continue
        command = [sys.executable, "-m", "benchmark", "public", str(folder), "--one", case["id"]]
        try:
            done = subprocess.run(
                [*command, "--seconds", str(seconds)], capture_output=True, text=True, check=False, timeout=HUNG
            )
            lines = done.stdout.splitlines() or [""]
            ended = f"the process ended with {done.returncode}"
            answer = json.loads(lines[-1]) if done.returncode == 0 else {"says": ended}
        except subprocess.TimeoutExpired:
            answer = {"says": f"no answer within {HUNG} s"}
        must = " | or ".join("; ".join(map(str, ideas)) for ideas in case.get("must_say") or ())
        truth = {
            "id": case["id"],
            "true_step": case.get("true_step", ""),
            "edit": case.get("edit", ""),
            "must_say": must,
        }
        yield {**dict.fromkeys(COLUMNS, ""), **truth, **answer}


def main(folder: Path, names: Sequence[str], seconds: float, out: Path | None) -> None:
    """Print each case, and write a CSV of COLUMNS, to be judged."""
    with out.open("w", encoding="utf-8", newline="") if out else nullcontext() as file:
        table = csv.DictWriter(file, COLUMNS) if file else None
        if table:
            table.writeheader()
        for row in rows(folder.resolve(), names, seconds):
            print(f"== {row['id']}: true step {row['true_step']}; {row['seconds']} s\n{row['says']}", flush=True)
            print("".join(f"   truth: {line}\n" for line in str(row["edit"]).strip().splitlines()), flush=True)
            if table:
                table.writerow(row)
