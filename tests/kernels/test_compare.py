"""The self-test: every fault is found at its step, no clean difference is called wrong, the bounds are calibrated."""

import numpy as np
import pytest
import torch

import labkit
from kernels.compare import calibration, trials
from kernels.compare.clean import CLEAN, FP32
from kernels.compare.faulty import FAULTS
from kernels.compare.judges import JUDGES, ours
from kernels.compare.systems import SIZES, golden, inputs, run
from labkit import Trace


def _drawn(system, size, seed, device, way=None):
    return trials._drawn(system, size, seed, device, way)


def _names(kinds):
    return [f"{kind.system}: {kind.name}" for kind in kinds]


def test_there_are_as_many_kinds_as_the_tables_promise():
    assert len({fault.name for fault in FAULTS}) >= 20
    assert len({way.name for way in CLEAN}) >= 15
    assert {fault.system for fault in FAULTS} == {way.system for way in CLEAN}


@pytest.mark.parametrize("fault", FAULTS, ids=_names(FAULTS))
def test_a_fault_is_found_at_its_step(device, fault):
    for size in SIZES[:2]:
        x = _drawn(fault.system, size, 11, device)
        observed = trials.observed_fault(fault, x)
        assert ours(observed, golden(fault.system, x), FP32) == fault.step


@pytest.mark.parametrize("way", CLEAN, ids=_names(CLEAN))
def test_a_clean_difference_is_not_called_wrong(device, way):
    for size in SIZES[:2]:
        x = _drawn(way.system, size, 11, device, way)
        observed = trials.observed_clean(way, x)
        assert ours(observed, golden(way.system, x), way.promised) is None


@pytest.mark.parametrize("fault", FAULTS, ids=_names(FAULTS))
def test_a_fault_changes_its_step_and_no_earlier_one(device, fault):
    x = _drawn(fault.system, SIZES[0], 4, device)
    right = run(fault.system, x)
    wrong = trials.observed_fault(fault, x)
    changed = [step.name for step in right if not torch.equal(step.value, wrong[step.name])]
    assert changed[0] == fault.step


def test_the_tally_counts_what_a_judge_says():
    done = [
        trials.Trial("a", "attention", SIZES[0], "qk", dict.fromkeys(JUDGES, "pv")),
        trials.Trial("b", "attention", SIZES[0], None, dict.fromkeys(JUDGES)),
        trials.Trial("c", "attention", SIZES[0], None, dict.fromkeys(JUDGES, "qk")),
    ]
    score = trials.scores(done)["labkit, recorded golden"]
    assert (score.found, score.right_step, score.faults, score.false_alarms, score.clean) == (1, 0, 1, 1, 2)


def test_todays_judges_do_what_they_are_known_for():
    """A dead row of 2048 passes the cosine rule and the global metric, and fails assert_close."""
    generator = torch.Generator().manual_seed(0)
    g = 0.1 * torch.randn(2048, 64, generator=generator, dtype=torch.float64)
    o = g.float()
    o[99] = 0.0
    said = {
        name: judge(Trace({"x": o}), labkit.golden(lambda a: {"x": a + 0.0}, a=g), FP32)
        for name, judge in JUDGES.items()
    }
    assert said["labkit, recorded golden"] == said["torch.testing.assert_close"] == "x"
    assert said["cosine and max_abs rule"] is said["1 - 2<x,y>/(|x|^2+|y|^2) > 1e-3"] is None


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
