"""The record of correct cases is extended by seeds that it has not, and the limit is Clopper and Pearson's."""

import sys

import pytest

from tools import correct_cases


@pytest.mark.long
def test_a_second_run_takes_other_seeds(tmp_path, monkeypatch, capsys):
    path = tmp_path / "record.csv"
    for run in (1, 2):
        command = ["x", str(path), "--minutes", "0.0001", "--draws", "3", "--only", "small: softmax"]
        monkeypatch.setattr(sys, "argv", command)
        assert correct_cases.main() == 0
        rows = correct_cases.read(path)
        assert [(row["seed"], row["cases"], row["flagged"]) for row in rows] == [(str(k), "3", "0") for k in range(run)]
    assert capsys.readouterr().out.splitlines()[-1].startswith("6 cases on ")


def test_the_limit_of_none_flagged_is_the_rule_of_three():
    assert correct_cases.limit(0, 100_000) == pytest.approx(3.0 / 100_000, rel=0.01)
    assert correct_cases.limit(1, 1000) > correct_cases.limit(0, 1000)
    assert correct_cases.limit(0, 0) == 1.0
