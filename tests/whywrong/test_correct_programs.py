"""Correct programs without end: none is flagged beyond the stated rate, and a broken step is found."""

import json
import os
from datetime import date

import pytest
import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from labkit.session.catalogue import ROOT
from tools import correct_programs as rp
from whywrong.checking.localise import TRACE_FALSE_POSITIVES

RARE = 1e-6
"""What is less probable than that at the stated rate is no chance."""


@pytest.mark.long
def test_flagged_programs_are_as_rare_as_stated():
    found = rp.summary(rp.run(range(150)))
    print("\n".join(rp.printed(found)))
    assert not found["dishonest"]
    assert not found["crashes"]
    accused = found["accused"]
    assert rp.beyond(accused["count"], accused["of"], TRACE_FALSE_POSITIVES) > RARE, found["who"]


@pytest.mark.long
def test_a_step_that_is_off_by_1000_roundings_is_found():
    """Of 1,486 at 1000 roundings 1,468 were found, at the right step: 98.1% at least, with 95% confidence."""
    found = rp.summary(rp.run(range(36), grades=(1000.0,)))
    grades = [grades["1000 roundings"]["right first step"] for grades in found["power"].values()]
    right, total = sum(g["count"] for g in grades), sum(g["of"] for g in grades)
    assert total > 24
    assert rp.beyond(total - right, total, 0.02) > RARE


class Drawn(rp.Source):
    """Integers from hypothesis, which makes them small while a program still fails."""

    def __init__(self, data):
        self.integer = lambda low, high: data.draw(st.integers(low, high))


@settings(derandomize=True, max_examples=30, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(st.data())
def test_a_port_in_float64_is_the_reference(data):
    case = rp.drawn(Drawn(data), rp.STORAGES[data.draw(st.integers(0, 2))])
    note(str(case))
    assert case.ties or not case.differs()


def test_a_seed_gives_one_program_and_its_faults_are_as_large_as_said():
    case, again = (rp.program(8, to_break=True) for _ in range(2))
    assert str(case) == str(again)
    right = case.observed()
    for fault, seen in rp.faults(case, 8, rp.GRADES):
        name = case.instructions[fault.at].name
        g = case.golden[name]
        off = (seen[name].double() - right[name].double()).square().mean().sqrt() / g.square().mean().sqrt()
        unit = rp.UNIT_ROUNDOFF[case.stores[name]]
        assert 0.3 * fault.grade < float(off) / unit < 3.0 * fault.grade


@pytest.mark.slow
def test_twenty_thousand_draws_by_storage():
    jobs = os.cpu_count() or 1
    found = rp.summary(rp.run(range(10**6, 10**6 + 20000), jobs=jobs))
    found["power"] = rp.summary(rp.run(range(2 * 10**6, 2 * 10**6 + 1500), grades=(*rp.GRADES, None), jobs=jobs))[
        "power"
    ]
    what = "20,000 correct programs from seed 1000000, and 1,500 with a fault in one step from seed 2000000"
    about = {"what": f"tools/correct_programs.py: {what}", "date": f"{date.today()}", "torch": torch.__version__}
    about |= {"machine": f"{jobs} cores of a CPU"}
    (ROOT / "data" / "results" / "right_programs.json").write_text(json.dumps(about | found, indent=1) + "\n")
    assert not found["dishonest"]
    assert not found["crashes"]
    for accused in found["accused by"]["storage"].values():
        assert rp.beyond(accused["count"], accused["of"], TRACE_FALSE_POSITIVES) > RARE


def test_readme_and_docs_say_what_was_recorded():
    record = json.loads((ROOT / "data" / "results" / "right_programs.json").read_text())
    readme, docs = (" ".join((ROOT / path).read_text().split()) for path in ("README.md", "docs/traces.md"))
    for text in (readme, docs):
        assert f"of {record['accused']['of']:,} correct programs" in text
        assert f"{record['accused']['count']} were flagged" in text
    for storage, rate in record["accused by"]["storage"].items():
        assert f"{storage} {rate['count']} of {rate['of']}" in docs
