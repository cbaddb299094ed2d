import json

import numpy as np
import pytest
import torch

import labkit
from labkit.errors import UsageError
from labkit.session.catalogue import ROOT, notebooks
from labkit.session.claims import Claim, Ledger
from labkit.session.record import Record


@pytest.fixture
def ledger():
    asserted, ours = (
        Claim("a", "asserted", "title", "it is so", "try it", 1.5),
        Claim("b", "ours", "", "it is not", "try"),
    )
    return Ledger("demo", {"a": asserted, "b": ours})


WHY = {"confirmed": "measured", "refuted": "measured otherwise"}


def test_a_claim_gets_one_verdict_with_its_reason(ledger):
    ledger.settle("a", True, measured=np.float64(1.4), because=WHY, given="the author's repository")
    ledger.settle("b", "undecidable", because={"undecidable": "two causes fit"})
    assert ledger.as_json()["a"] == {
        "kind": "asserted", "where": "title", "verdict": "confirmed", "measured": 1.4, "reported": 1.5,
        "because": "measured", "given": "the author's repository", "source": "",
    }  # fmt: skip
    assert "Given: the author's repository." in str(ledger)


def test_what_was_measured_is_kept_as_json_has_it(ledger):
    ledger.settle("a", True, measured={"x": np.arange(2), 3: (np.int64(4), torch.tensor(0.5))}, because=WHY)
    assert json.dumps(ledger.settled["a"].measured) == '{"x": [0, 1], "3": [4, 0.5]}'


def test_verdicts_stand_alone_and_some_can_be_left_out(ledger):
    ledger.settle("a", True, because=WHY)
    assert ledger.verdicts().rows == [("a", "asserted", "confirmed"), ("b", "ours", "OPEN")]
    assert ledger.verdicts(without=["a"]).rows == [("b", "ours", "OPEN")]


def test_the_reason_follows_the_outcome(ledger):
    ledger.settle("a", False, because=WHY)
    assert ledger.settled["a"].because == "measured otherwise"


def test_questions_of_this_workbook_stand_in_a_table_of_their_own(ledger):
    ledger.settle("a", True, because=WHY)
    ledger.settle("b", True, because=WHY)
    report, ours = str(ledger).split("\n\n")
    assert report.startswith("What the report says")
    assert "it is not" not in report
    assert ours.startswith("What this workbook asks beyond it")
    assert "it is so" not in ours


def test_an_open_claim_stops_the_ledger(ledger):
    ledger.settle("a", False, because=WHY)
    with pytest.raises(UsageError, match="no verdict yet for b"):
        ledger.as_json()


@pytest.mark.parametrize(
    ("claim", "truth", "because", "message"),
    [
        ("c", "refuted", WHY, "'c': demo has none of that id; it has a, b"),
        ("a", "maybe", WHY, "'maybe' is no verdict"),
        ("a", True, WHY | {"maybe": "x"}, "'maybe' is no verdict"),
        ("a", "refuted", {"refuted": " "}, "no reason for refuted"),
        ("a", True, {"confirmed": "only one outcome is thought of"}, "no reason for refuted"),
        ("a", "undecidable", WHY, "no reason for undecidable"),
        ("a", True, {"confirmed": "the same", "refuted": "the same "}, "one reason for two verdicts"),
    ],
)
def test_what_is_no_claim_verdict_or_reason_is_refused(ledger, claim, truth, because, message):
    with pytest.raises(UsageError, match=message):
        ledger.settle(claim, truth, because=because)


@pytest.mark.parametrize(
    "entry",
    [
        "- a",
        "- {id: a}",
        "- {id: a, kind: told, where: x, says: y, settles: z}",
        "- {id: a, kind: ours, where: x, says: y}",
        "- {id: a, kind: ours, where: x, says: y, settles: ''}",
        "- {id: a, kind: ours, where: x, says: y, settles: z}\n  - {id: a, kind: ours, where: x, says: y, settles: z}",
    ],
)
def test_an_entry_that_is_not_as_it_should_be_is_named(tmp_path, monkeypatch, entry):
    (tmp_path / "data" / "claims").mkdir(parents=True)
    (tmp_path / "data" / "claims" / "demo.yaml").write_text(f"claims:\n  {entry}\n")
    monkeypatch.setattr("labkit.session.claims.ROOT", tmp_path)
    with pytest.raises(UsageError, match=r"demo\.yaml has an entry .*wanted id"):
        labkit.claims("demo")


def test_a_recorded_verdict_says_where_it_was_made(ledger, monkeypatch):
    claim = {"verdict": "confirmed", "measured": 2.0, "because": "seen"}
    record = Record(ROOT, {"claims": {"a": claim}, "device": {"name": "GPU X"}, "date": "2026-01-01"})
    monkeypatch.setattr(Record, "changed", [])
    ledger.settle_from("a", record, needs="a GPU")
    assert ledger.settled["a"].source == "recorded on GPU X, 2026-01-01"
    ledger.settle_from("b", None, needs="a GPU")
    assert ledger.settled["b"].verdict == "untestable"


def test_a_missing_claims_file_is_named():
    with pytest.raises(UsageError, match=r"data/claims/nothing\.yaml is not there"):
        labkit.claims("nothing")


def test_every_notebook_that_names_a_report_has_claims():
    for name in notebooks():
        assert labkit.claims(name).claims
