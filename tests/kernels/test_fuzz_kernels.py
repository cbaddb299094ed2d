"""Every kernel of the workbook that can be called, fuzzed: the right ones do not fall, the faulty ones do.

The cases are those of fuzz_kernels.py. `make test` fuzzes one correct and one faulty kernel of each kind, on small
inputs.
"""

import csv

import pytest
import torch  # noqa: F401

import whywrong
from labkit.session.catalogue import ROOT
from tools import fuzz_kernels
from tools.fuzz_kernels import CASES
from whywrong.fuzzing.fuzz import check, sample  # noqa: F401

SHORT = {
    "softmax": 3,
    "sum by atomic_add": 3,
    "start_here's kernel": 2,
    "start_here: padded_mean": 5,
    "pre backward: mix not normalised": 5,
    "TinyLLM's Tensor, there and back": 3,
    "report's Tensor, no switch set": 3,
    "report's Tensor: resize_by_size": 3,
    "product by BLAS in blocks": 2,
    "product by BLAS: in one call": 50,
    "masked cross entropy": 4,
    "rms norm": 4,
    "rotary positions": 3,
    "adam in torch": 3,
    "attention: dead row": 10,
    "layernorm: variance over n - 1": 10,
    "sums: atomic additions": 3,
    "sums: an unwritten tail": 3,
}
"""What `make test` fuzzings, and in how many examples."""


@pytest.mark.long(cases=1)
@pytest.mark.parametrize("name", SHORT)
def test_a_kernel_stands_or_falls(name):
    case = CASES[name]
    found = case.fuzz(SHORT[name], most=1 << (10 if case.language == "BLAS" else 7))
    assert (found.failure is not None) == case.faulty, found
    assert found.examples >= (1 if case.faulty else 2)


@pytest.mark.parametrize("kind", ["Triton", "CUDA C++", "BLAS", "torch"])
@pytest.mark.parametrize("faulty", [False, True])
def test_the_short_form_has_each_kind(kind, faulty):
    assert any((CASES[name].language, CASES[name].faulty) == (kind, faulty) for name in SHORT)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_kernel_stands_or_falls_in_50_examples(name):
    case = CASES[name]
    if not case.runs_here:
        pytest.skip(case.why)
    found = case.fuzz(50)
    assert (found.failure is not None) == case.faulty, found
    assert found.examples > 0


def test_the_command_writes_a_row_a_case(tmp_path, monkeypatch):
    monkeypatch.setattr(
        fuzz_kernels, "CASES", {name: CASES[name] for name in ("sum by Kahan", "report's Tensor: resize_by_size")}
    )
    rows = [fuzz_kernels.result(case, 2, 60.0, explain=False) for case in fuzz_kernels.CASES.values()]
    assert [(row["outcome"], row["as_expected"]) for row in rows] == [("stands", "yes"), ("falls", "yes")]
    assert rows[0]["draws"] == 2
    made = {name: eval(text) for name, _, text in (x.partition(": ") for x in rows[1]["smallest_input"].split("; "))}
    assert check(CASES[rows[1]["name"]].kernel, fuzz_kernels.copied, made, precision=whywrong.Precision()) is not None


def test_a_case_that_raises_is_a_row():
    case = CASES["softmax"]._replace(reference=None)
    row = fuzz_kernels.result(case, 2, 60.0, explain=False)
    assert (row["outcome"], row["as_expected"]) == ("fuzz failed", "no")
    assert "expected a torch.nn.Module or a function" in row["words"]


with (ROOT / "data" / "results" / "fuzz.csv").open(encoding="utf-8") as file:
    RECORDED = list(csv.DictReader(file))


@pytest.mark.parametrize("name", sorted({row["set"] for row in RECORDED if row["set"].startswith("hunts_")}))
def test_what_is_recorded_is_of_these_cases_and_as_expected(name):
    rows = [row for row in RECORDED if row["set"] == name]
    assert {row["name"] for row in rows} == set(CASES)
    assert [row["name"] for row in rows if row["as_expected"] != "yes"] == []
