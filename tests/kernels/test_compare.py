"""The self-test: every fault is found at its step, no clean difference is called wrong, the bounds are calibrated."""

import numpy as np
import pytest
import torch

import labkit
from kernels.compare import calibration, evidence, trials
from kernels.compare.clean import CLEAN, FP32
from kernels.compare.faulty import FAULTS
from kernels.compare.judges import SCORES, graded, narrowest, ours, verdict
from kernels.compare.measured import Speed
from kernels.compare.systems import SIZES, golden, inputs, run
from labkit import Precision, Trace, localise
from labkit.numerics.structure import Null
from labkit.trace.replayed import Simulated


def _names(kinds):
    return [f"{kind.system}: {kind.name}" for kind in kinds]


def test_there_are_as_many_kinds_as_the_tables_promise():
    assert len({fault.name for fault in FAULTS}) >= 20
    assert len({way.name for way in CLEAN}) >= 15
    assert {fault.system for fault in FAULTS} == {way.system for way in CLEAN}


@pytest.mark.parametrize("fault", FAULTS, ids=_names(FAULTS))
def test_a_fault_is_found_at_its_step(device, fault):
    for size in SIZES[:2]:
        x = trials.drawn(fault.system, size, 11, device)
        observed = trials.observed_fault(fault, x)
        assert ours(observed, golden(fault.system, x), FP32) == fault.step


@pytest.mark.parametrize("way", CLEAN, ids=_names(CLEAN))
def test_a_clean_difference_is_not_called_wrong(device, way):
    for size in SIZES[:2]:
        x = trials.drawn(way.system, size, 11, device, way)
        observed = trials.observed_clean(way, x)
        assert ours(observed, golden(way.system, x), way.promised) is None


@pytest.mark.parametrize("fault", FAULTS, ids=_names(FAULTS))
def test_a_fault_changes_its_step_and_no_earlier_one(device, fault):
    x = trials.drawn(fault.system, SIZES[0], 4, device)
    right = run(fault.system, x)
    wrong = trials.observed_fault(fault, x)
    changed = [step.name for step in right if not torch.equal(step.value, wrong[step.name])]
    assert changed[0] == fault.step


def test_a_score_counts_what_a_judge_says():
    def trial(truth, step):
        return trials.Trial("a", "attention", SIZES[0], truth, None, "", {"us": step}, {"1 - cosine": {"qk": 0.5}})

    done = [trial("qk", "pv"), trial("qk", "qk"), trial(None, None), trial(None, "qk")]
    assert trials.score(done, "us") == trials.Score(found=2, right_step=1, faults=2, false_alarms=1, clean=2)
    assert trials.score(done, "1 - cosine", 0.6) == trials.Score(0, 0, 2, 0, 2)
    assert trials.score(done, "1 - cosine", 0.4) == trials.Score(2, 2, 2, 2, 2)
    assert trials.roc(done, "1 - cosine") == [(1.0, 1.0), (0.0, 0.0)]


def test_todays_judges_do_what_they_are_known_for():
    """A dead row of 2048 passes the cosine rule and the global metric, and fails assert_close."""
    generator = torch.Generator().manual_seed(0)
    g = 0.1 * torch.randn(2048, 64, generator=generator, dtype=torch.float64)
    o = g.float()
    o[99] = 0.0
    reference = labkit.golden(lambda a: {"x": a + 0.0}, a=g)
    numbers = graded(Trace({"x": o}), reference, FP32)
    said = {name: verdict(numbers[name], SCORES[name][1]) for name in SCORES}
    assert ours(Trace({"x": o}), reference, FP32) == said["torch.testing.assert_close"] == "x"
    assert said["1 - cosine"] is said["1 - 2<x,y>/(|x|^2+|y|^2)"] is None


def test_todays_judges_are_told_the_precision():
    assert narrowest(FP32) == "float32"
    assert narrowest(Precision(products="tf32")) == "tf32"
    assert narrowest(Precision(storage="bfloat16", products="float16")) == "bfloat16"


def test_a_strength_is_what_an_observer_who_knows_the_shape_sees():
    """Adding the change's own shape up over many draws of the noise gives d = strength x SMALLEST on average."""
    fault = next(f for f in FAULTS if f.name == "1% scale")
    found = []
    for seed in range(12):
        x = trials.drawn("attention", SIZES[0], seed, "cpu")
        sigma = trials.noise("attention", "qk", x)
        exact = x["q"].double() @ x["k"].double().mT
        shape = exact / sigma / (exact / sigma).norm()
        observed, where = trials.observed_graded(fault, x, 3.0)
        found.append(float((shape * (observed["qk"].double() - exact) / sigma).sum()))
        assert where == "nearly everywhere"
    assert np.mean(found) == pytest.approx(3.0 * trials.SMALLEST, abs=4.0 / 12**0.5)


ALONE = {
    "slope": ("1% scale", 4.5),
    "mean": ("a constant added", 2.4),
    "rows": ("dead row", 5.7),
    "columns": ("one column scaled", 4.8),
    "tiles": ("one tile of 64 rows scaled", 5.5),
    "rms": ("one flipped sign", 16.0),
}
"""For each test of structure a fault, and a strength at which no other instrument sees it."""


@pytest.mark.parametrize("instrument", ALONE)
def test_without_one_test_of_structure_a_fault_is_lost(instrument, monkeypatch):
    name, strength = ALONE[instrument]
    fault = next(f for f in FAULTS if f.name == name)
    x = trials.drawn(fault.system, SIZES[1], 0, "cpu")
    reference = golden(fault.system, x)
    observed, _ = trials.observed_graded(fault, x, strength)
    assert localise(observed, reference, FP32).first == fault.step
    whole = Null.tests
    monkeypatch.setattr(Null, "tests", lambda *given: [t for t in whole(*given) if t.name != instrument])
    assert localise(observed, reference, FP32).first is None


def test_without_the_elementwise_bound_a_fault_is_lost(monkeypatch):
    fault = next(f for f in FAULTS if f.name == "one Inf")
    x = trials.drawn(fault.system, SIZES[1], 0, "cpu")
    observed, reference = trials.observed_fault(fault, x), golden(fault.system, x)
    assert localise(observed, reference, FP32).first == fault.step
    whole = Simulated.bound
    monkeypatch.setattr(Simulated, "bound", lambda *given: whole(*given).scaled(float("inf")))
    assert localise(observed, reference, FP32).first != fault.step


@pytest.mark.parametrize("holds", [True, False])
def test_every_reason_follows_its_outcome(holds):
    """Each experiment of the notebook is flipped, and no reason goes with both outcomes."""
    ledger = labkit.claims("comparison_selftest")
    off = 0 if holds else 3
    evidence.products(ledger, [calibration.Tally("a", 10, off, 0, 0.9, off)])
    numbers = (0.999, 1e-4, True) if holds else (0.9, 1e-1, False)
    evidence.global_checks(ledger, dict.fromkeys(("dead row", "flipped row", "4% scale"), numbers))
    evidence.other_checks(
        ledger, holds, {"right, K = 65536": 1e-3 if holds else 1e-5, "1% off, K = 1": 1e-3 if holds else 0.1}
    )
    score = trials.Score(5, 5 - off, 5, off, 10)
    evidence.localising(ledger, score, score, trials.Score(5, 5, 5, 9 if holds else 1, 10))
    evidence.speed(
        ledger,
        Speed(500.0, 500.0, 5500.0, 499.0, 0.001, 3.25) if holds else Speed(900.0, 900.0, 990.0, 499.0, 1.0, 4.0),
    )
    assert len(ledger.as_json()) == len(ledger.claims)
    assert {s.verdict for s in ledger.settled.values()} == {"confirmed" if holds else "refuted"}


def test_every_record_of_the_whole_call_is_kept():
    from labkit import bench
    from labkit.session.catalogue import ROOT

    newest = bench.read(ROOT / "data" / "benchmarks" / "compare.csv")[0]["timestamp"]
    assert newest in evidence.HOSTS.read_text(encoding="utf-8")


def test_no_false_alarm_over_clean_products_and_every_spoilt_element_is_caught():
    """K from 1 to 65,536, three orders, four kinds of data; ten times beyond the bound is always seen."""
    rng = np.random.default_rng(8)
    lengths = (*calibration.LENGTHS[:13:2], 65_536)
    cases = [*calibration.cpu_cases(lengths[:-1], 12, rng), *calibration.cpu_cases(lengths[-1:], 1, rng)]
    assert len(cases) > 1000
    for tally in calibration.tally(iter(cases), rng):
        assert (tally.elementwise, tally.structure, tally.missed) == (0, 0, 0), tally
        assert tally.share > 0.01, "a bound that nothing comes near could not fail"


@pytest.mark.gpu
def test_no_false_alarm_over_the_gpus_own_products():
    rng = np.random.default_rng(8)
    cases = [*calibration.gpu_cases(calibration.LENGTHS[::2], 20, rng)]
    assert len(cases) > 2000
    for tally in calibration.tally(iter(cases), rng):
        assert (tally.elementwise, tally.structure, tally.missed) == (0, 0, 0), tally


def test_faults_far_below_the_elementwise_bound_are_caught_by_structure():
    found = {row[0]: row[-1] for row in calibration.below_the_bound(np.random.default_rng(2)).rows}
    assert found.pop("right") == "neither: right"
    assert len(found) == 3
    assert all("structure" in said for said in found.values()), found


def test_the_inputs_are_those_that_the_implementation_has():
    x = inputs("attention", SIZES[0], torch.Generator().manual_seed(0), torch.bfloat16)
    reference = golden("attention", x)
    assert torch.equal(reference["q"], x["q"].double())
