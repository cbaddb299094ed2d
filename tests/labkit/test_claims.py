import json
from dataclasses import replace
from html import unescape

import numpy as np
import pytest
import torch

import labkit
from labkit.session.catalogue import ROOT, notebooks
from labkit.session.claims import Claim, Ledger
from labkit.session.record import Record
from whywrong.errors import UsageError

TEXTS = {"confirmed": "It is {{ x | digits }}.", "refuted": "Not so: {{ x | digits }}."}


@pytest.fixture
def ledger():
    first = Claim("a", "asserted", "title", "it is so", "try it", TEXTS, 1.5, given="{{ who }}'s repository")
    ours = Claim("b", "ours", "", "it is not", "try", {"undecidable": "Two causes fit."}, only="nobody can tell")
    return Ledger("demo", {"a": first, "b": ours})


def test_a_claim_gets_one_verdict_with_its_reason(ledger):
    ledger.settle("a", True, x=np.float64(1.4), who="the author")
    ledger.settle("b", None)
    assert ledger.as_json()["a"] == {
        "kind": "asserted",
        "where": "title",
        "verdict": "confirmed",
        "measured": {"x": 1.4, "who": "the author"},
        "reported": 1.5,
        "because": "It is 1.4.",
        "given": "the author's repository",
        "source": "",
    }
    assert ledger.as_json()["b"]["verdict"] == "undecidable"
    assert "Given: the author's repository." in str(ledger)


def test_what_was_measured_is_kept_as_json_has_it(ledger):
    ledger.settle("a", True, x=1, who={"x": np.arange(2), 3: (np.int64(4), torch.tensor(0.5))})
    assert json.dumps(ledger.settled["a"].measured["who"]) == '{"x": [0, 1], "3": [4, 0.5]}'


def test_verdicts_stand_alone_and_some_can_be_left_out(ledger):
    ledger.settle("a", True, x=1, who="x")
    assert ledger.verdicts().rows == [("a", "asserted", "confirmed"), ("b", "ours", "OPEN")]
    assert ledger.verdicts(without=["a"]).rows == [("b", "ours", "OPEN")]


@pytest.mark.parametrize("truth", [False, np.False_, "refuted"])
def test_the_reason_follows_the_outcome(ledger, truth):
    ledger.settle("a", truth, x=2, who="x")
    assert (ledger.settled["a"].verdict, ledger.settled["a"].because) == ("refuted", "Not so: 2.")


def test_questions_of_this_workbook_stand_in_a_table_of_their_own(ledger):
    report, ours = str(ledger).split("\n\n")
    assert report.startswith("What the report says")
    assert "it is not" not in report
    assert ours.startswith("What this workbook asks")
    assert "it is so" not in ours


def test_in_a_notebook_a_claim_is_a_line_whose_reason_unfolds(ledger):
    ledger.claims["a"] = replace(ledger.claims["a"], says="a < b")
    ledger.settle("a", True, x=1, who="x")
    (line,) = [unescape(line) for line in ledger._repr_html_().splitlines() if "a &lt; b" in line]
    assert line.startswith("<details><summary>")
    assert "confirmed" in line.partition("</summary>")[0]
    assert "It is 1. Given: x's repository." in line.partition("</summary>")[2]


def test_an_open_claim_stops_the_ledger(ledger):
    ledger.settle("a", False, x=1, who="x")
    with pytest.raises(UsageError, match="no verdict yet for b"):
        ledger.as_json()


@pytest.mark.parametrize(
    ("claim", "truth", "measured", "message"),
    [
        ("c", True, {}, "'c': demo has none of that id; it has a, b"),
        ("a", "maybe", {"x": 1, "who": 1}, "claim a: expected confirmed or refuted, .* got maybe"),
        ("a", None, {"x": 1, "who": 1}, "claim a: expected confirmed or refuted, .* got undecidable"),
        ("a", 7, {"x": 1, "who": 1}, "claim a: expected confirmed or refuted, .* got 7"),
        ("a", True, {"x": 1}, "claim a: its texts need who"),
        ("a", True, {"x": "words", "who": 1}, "claim a: its text cannot be filled in"),
    ],
)
def test_what_is_no_claim_verdict_or_measured_field_is_refused(ledger, claim, truth, measured, message):
    with pytest.raises(UsageError, match=message):
        ledger.settle(claim, truth, **measured)


GOOD = "id: a, kind: ours, where: x, says: y, settles: z"


@pytest.mark.parametrize(
    "entry",
    [
        "- a",
        "- {id: a}",
        "- {id: a, kind: told, where: x, says: y, settles: z, confirmed: c, refuted: r}",
        "- {id: a, kind: ours, where: x, says: y, confirmed: c, refuted: r}",
        "- {id: a, kind: ours, where: x, says: y, settles: '', confirmed: c, refuted: r}",
        f"- {{{GOOD}}}",
        f"- {{{GOOD}, confirmed: c}}",
        f"- {{{GOOD}, confirmed: c, refuted: c}}",
        f"- {{{GOOD}, confirmed: c, refuted: r, perhaps: p}}",
        f"- {{{GOOD}, confirmed: c, refuted: r}}\n  - {{{GOOD}, confirmed: c, refuted: r}}",
    ],
)
def test_an_entry_that_is_not_as_it_should_be_is_named(tmp_path, monkeypatch, entry):
    (tmp_path / "data" / "claims").mkdir(parents=True)
    (tmp_path / "data" / "claims" / "demo.yaml").write_text(f"claims:\n  {entry}\n")
    monkeypatch.setattr("labkit.session.claims.ROOT", tmp_path)
    with pytest.raises(
        UsageError, match=r"claims: .*demo\.yaml.*expected (YAML of a claims|ids and texts that differ)"
    ):
        labkit.claims("demo")


@pytest.mark.parametrize(
    "text", ["", "[]", "claims:", "claims: 3", "{", "[" * 400, "\x00", "a: b: c"], ids=lambda t: t[:9]
)
def test_a_file_that_is_not_of_claims_is_one_line(tmp_path, monkeypatch, text):
    (tmp_path / "data" / "claims").mkdir(parents=True)
    (tmp_path / "data" / "claims" / "demo.yaml").write_text(text)
    monkeypatch.setattr("labkit.session.claims.ROOT", tmp_path)
    with pytest.raises(UsageError, match=r"claims: /.*/data/claims/demo\.yaml cannot be read .*expected YAML") as error:
        labkit.claims("demo")
    assert "\n" not in str(error.value)


def test_a_claim_with_one_outcome_says_why(tmp_path, monkeypatch):
    (tmp_path / "data" / "claims").mkdir(parents=True)
    text = f"claims:\n  - {{{GOOD}, untestable: no data, only: the data are not public}}\n"
    (tmp_path / "data" / "claims" / "demo.yaml").write_text(text)
    monkeypatch.setattr("labkit.session.claims.ROOT", tmp_path)
    assert list(labkit.claims("demo").claims["a"].texts) == ["untestable"]


def test_a_recorded_verdict_says_where_it_was_made(ledger, monkeypatch):
    claim = {"verdict": "confirmed", "measured": 2.0, "because": "seen"}
    record = Record(ROOT, {"claims": {"a": claim}, "device": {"name": "GPU X"}, "date": "2026-01-01"})
    monkeypatch.setattr(Record, "changed", [])
    ledger.settle_from("a", record, needs="a GPU")
    assert ledger.settled["a"].source == "recorded on GPU X, 2026-01-01"
    ledger.settle_from("b", None, needs="a GPU")
    assert ledger.settled["b"].verdict == "untestable"


def test_a_missing_claims_file_is_named():
    with pytest.raises(UsageError, match=r"claims: expected data/claims/nothing\.yaml .*, got no such file"):
        labkit.claims("nothing")


def test_every_notebook_that_names_a_report_has_claims():
    for name in notebooks():
        assert labkit.claims(name).claims
