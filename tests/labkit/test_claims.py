import numpy as np
import pytest

import labkit
from labkit.errors import UsageError
from labkit.session.catalogue import ROOT, notebooks
from labkit.session.claims import Claim, Ledger
from labkit.session.record import Record


@pytest.fixture
def ledger():
    return Ledger("demo", {"a": Claim("a", "it is so", 1.5), "b": Claim("b", "it is not")})


def test_a_claim_gets_one_verdict_with_its_reason(ledger):
    ledger.settle("a", True, measured=np.float64(1.4), because="measured")
    ledger.settle("b", "undecidable", because="two causes fit")
    assert ledger.as_json()["a"] == {
        "verdict": "confirmed", "measured": 1.4, "reported": 1.5, "because": "measured", "source": "",
    }  # fmt: skip
    assert ledger.counts() == {"confirmed": 1, "refuted": 0, "undecidable": 1, "untestable": 0}


def test_an_open_claim_stops_the_ledger(ledger):
    ledger.settle("a", False, because="no")
    assert ledger.open == ["b"]
    with pytest.raises(UsageError, match="no verdict yet for b"):
        ledger.as_json()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("c", "refuted"), "'c': demo has none of that id; it has a, b"),
        (("a", "maybe"), "'maybe' is no verdict"),
    ],
)
def test_an_unknown_claim_or_verdict_is_refused(ledger, arguments, message):
    with pytest.raises(UsageError, match=message):
        ledger.settle(*arguments, because="x")


def test_a_verdict_needs_a_reason(ledger):
    with pytest.raises(UsageError, match="because is empty"):
        ledger.settle("a", "refuted", because=" ")


def test_a_recorded_verdict_says_where_it_was_made(ledger, monkeypatch):
    claim = {"verdict": "confirmed", "measured": 2.0, "because": "seen"}
    record = Record(ROOT, {"claims": {"a": claim}, "device": {"name": "GPU X"}, "date": "2026-01-01"})
    monkeypatch.setattr(Record, "age", "")
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
