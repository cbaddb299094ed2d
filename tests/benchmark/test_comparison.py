"""What others use, run on a small defect and a correct run; the public reports; and the table that is shown."""

import re
import zlib

import pytest
import torch

import whywrong
from benchmark import HERE, __main__, compare, manifest, public
from benchmark.adapters import BASELINES, TOOLS
from benchmark.score import read
from labkit.session.catalogue import ROOT

RECORD = ROOT / "data" / "results" / "comparison.csv"


def reference(x, w):
    h = whywrong.step("h", x @ w)
    p = whywrong.step("p", torch.softmax(h, -1))
    return whywrong.step("y", p @ w.T)


def case(port, dtype=torch.float32):
    x, w = torch.randn(2, 12, 12, generator=torch.Generator().manual_seed(5)).to(dtype)
    return {
        "id": "tiny",
        "reference": reference,
        "loss": None,
        "inputs": {"x": x.double(), "w": w.double()},
        "observed": {"x": x, "w": w, **port(x, w)},
        "precision": {"storage": str(dtype).removeprefix("torch.")},
    }


def port(x, w, dim=-1):
    h = x @ w
    p = torch.softmax(h, dim)
    return {"h": h, "p": p, "y": p @ w.T}


@pytest.mark.parametrize("tool", [name for name in TOOLS if name != "whywrong"])
def test_each_tool_names_a_wrong_step_and_no_step_of_a_correct_run(tool):
    if compare.missing(tool):
        pytest.skip(f"pip install {compare.PACKAGES[tool]}")
    assert TOOLS[tool](case(lambda x, w: port(x, w, 0)), 1.0).step == "p"
    assert TOOLS[tool](case(port), 1.0).step is None
    assert TOOLS[tool](case(lambda x, w: port(x, w) | {"p": torch.full((12, 12), torch.nan)}), 1.0).step == "p"
    assert TOOLS[tool](case(lambda x, w: port(x, w) | {"p": torch.ones(11, 12)}), 1.0).step == "p"


def test_a_tolerance_is_that_of_the_type():
    slightly = dict.fromkeys("hpy", 1 + 0.001)
    wrong = {
        dtype: BASELINES["assert_close_by_type"](
            case(lambda x, w: {name: (v * slightly[name]).to(v.dtype) for name, v in port(x, w).items()}, dtype), 1.0
        ).step
        for dtype in (torch.float32, torch.float16)
    }
    assert wrong == {torch.float32: "h", torch.float16: None}


def test_a_tool_that_is_not_installed_has_a_row_that_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(compare, "find_spec", lambda name: None)
    rows = list(compare.rows(["public_reports_1"], ["sqnr", "polygraphy"], 1.0))
    table = compare.table(rows)
    assert "| polygraphy | not installed: pip install polygraphy |" in table
    assert re.search(r"\| sqnr \| none run \| none run \| \d+ of 18 \(\d+% to \d+%\) \| 0 of 17 ", table)
    assert "| msprobe | not " in table


@pytest.mark.long
@pytest.mark.parametrize("folder", compare.REPORTS)
def test_of_public_reports_the_true_step_is_first_and_a_correct_port_is_silent(folder):
    runs = {}
    for found in public.cases(HERE / folder):
        golden = whywrong.golden(found["reference"], **found["inputs"])
        declared = whywrong.Precision(**found["precision"])
        assert whywrong.localise(found["observed"], golden, precision=declared).first == found["true_step"], found["id"]
        runs.setdefault(found["id"].split("/")[0], []).append(found)
    for wrong, right in (pair for pair in runs.values() if len(pair) == 2):
        steps = [name for name in right["observed"] if name not in right["inputs"]]
        first = next(n for n in steps if not torch.equal(right["observed"][n], wrong["observed"][n]))
        assert steps.index(first) <= steps.index(wrong["true_step"]), "what is right before it may be in another order"
        assert not torch.allclose(*(run["observed"][wrong["true_step"]] for run in (right, wrong)), equal_nan=True)


def test_the_record_has_every_case_and_the_pages_say_what_it_says(capsys, monkeypatch):
    rows = read(RECORD)
    defects = [row["case"] for row in rows if row["true_step"] and row["set"] not in compare.REPORTS]
    known = (line.split(",")[0] for line in manifest.text().splitlines()[1:])
    sampled = [case for case in known if zlib.crc32(case.encode()) % 100 < 25 and not case.startswith("t06/")]
    assert defects == sampled
    monkeypatch.setattr("sys.argv", ["benchmark", "compare", "--table", str(RECORD)])
    threads = torch.get_num_threads()
    try:
        assert __main__.main() == 0
    finally:
        torch.set_num_threads(threads)
    table = capsys.readouterr().out.strip()
    assert table in (ROOT / "docs" / "comparison.md").read_text(encoding="utf-8")
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    for tool in ("localise", "assert_close_by_type"):
        wrong = [row for row in rows if row["true_step"]]
        clean = [row for row in rows if not row["true_step"]]
        right, flagged = sum(row[tool] == row["true_step"] for row in wrong), sum(row[tool] != "" for row in clean)
        assert f"{right} of {len(wrong)} first steps, and flagged {flagged} of {len(clean)} correct runs" in readme
