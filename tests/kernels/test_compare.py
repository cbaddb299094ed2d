"""The self-test: every fault is found at its step, no clean difference is called wrong, the bounds are calibrated."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import labkit
from kernels.compare import calibration, evidence, measured, trials
from kernels.compare.clean import CLEAN, FP32
from kernels.compare.faulty import FAULTS
from kernels.compare.judges import SCORES, graded, narrowest, ours, verdict
from kernels.compare.measured import Passed, Speed
from kernels.compare.systems import SIZES, golden, inputs, run
from labkit import Precision, Trace, localise
from labkit.numerics.structure import Null
from labkit.session.catalogue import notebook
from labkit.trace.judge_rerun import Simulated


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
    assert trials.called_wrong(done, "us") == ["attention: a"]
    assert trials.tried(done) == "1 size, 2 draws"


@pytest.mark.parametrize(("number", "as_good"), [(0.4, ["1 - cosine"]), (0.6, [])])
def test_a_check_is_as_good_if_one_of_its_tolerances_is(number, as_good, monkeypatch):
    """A threshold parts a fault of 0.5 from a clean run of 0.4, and none parts it from one of 0.6."""
    monkeypatch.setattr(trials, "SCORES", {"1 - cosine": trials.SCORES["1 - cosine"]})

    def trial(truth, number):
        return trials.Trial("a", "attention", SIZES[0], truth, None, "", {"us": truth}, {"1 - cosine": {"qk": number}})

    assert trials.as_good([trial("qk", 0.5), trial(None, number)], "us") == as_good


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


@pytest.mark.parametrize("instrument", [name for name in trials.ALONE if name != "elements"])
def test_without_one_test_of_structure_a_fault_is_lost(instrument, monkeypatch):
    fault, x, observed = trials.observed_alone(instrument)
    reference = golden(fault.system, x)
    assert localise(observed, reference, FP32).first == fault.step
    whole = Null.tests
    monkeypatch.setattr(Null, "tests", lambda *given: [t for t in whole(*given) if t.name != instrument])
    assert localise(observed, reference, FP32).first is None


def test_without_the_elementwise_bound_a_fault_is_lost(monkeypatch):
    fault, x, observed = trials.observed_alone("elements")
    reference = golden(fault.system, x)
    assert localise(observed, reference, FP32).first == fault.step
    whole = Simulated.bound
    monkeypatch.setattr(Simulated, "bound", lambda *given: replace(whole(*given), absolute=float("inf")))
    assert localise(observed, reference, FP32).first != fault.step


def test_the_table_of_instruments_has_a_fault_that_each_alone_reports():
    assert [row[-1] for row in trials.alone().rows] == [*trials.ALONE]


def test_the_strength_of_a_whole_fault_is_where_grading_ends():
    found = trials.whole_strengths(SIZES[0], 0, "cpu")
    assert {f.name for f in FAULTS} - set(found) == {"mask off by one", "tail not written: NaN", "one Inf"}
    for fault in FAULTS[:6]:
        x = trials.drawn(fault.system, SIZES[0], 0, "cpu")
        assert trials.observed_graded(fault, x, 0.999 * found[fault.name]) is not None
        assert trials.observed_graded(fault, x, 1.001 * found[fault.name]) is None


@pytest.mark.parametrize("holds", [True, False])
def test_every_reason_follows_its_outcome(holds):
    """Each experiment of the notebook is flipped, and no reason goes with both outcomes."""
    ledger = labkit.claims("comparison_selftest")
    off = 0 if holds else 3
    evidence.products(ledger, [calibration.Tally("a", 2000, 1500, off, 0, {1: 0.9}, (0, 0, off))])
    numbers = Passed(9, 9, 0.999, 1e-4, 9) if holds else Passed(9, 8, 0.9, 1e-1, 0)
    evidence.global_checks(ledger, dict.fromkeys(("dead row", "flipped row", "4% scale"), numbers))
    right, off_by_1 = (1e-3, 1e-3) if holds else (1e-5, 0.1)
    fixed = {"right, K = 65536": right, "1% off, K = 1": off_by_1, "1% off, K = 1, factors up to 2": 4 * off_by_1}
    evidence.other_checks(ledger, holds, fixed)
    score = trials.Score(5, 5 - off, 5, off, 10)
    evidence.localising(ledger, score, score, trials.Score(5, 5, 5, 9 if holds else 1, 10), "1 size, 1 draw")
    evidence.speed(
        ledger,
        Speed(500.0, 500.0, 5500.0, 499.0, 0.001, 3.25) if holds else Speed(900.0, 900.0, 990.0, 499.0, 1.0, 4.0),
    )
    assert len(ledger.as_json()) == len(ledger.claims)
    assert {s.verdict for s in ledger.settled.values()} == {"confirmed" if holds else "refuted"}


def test_what_follows_by_arithmetic_says_so():
    ledger = labkit.claims("comparison_selftest")
    evidence.products(ledger, [calibration.Tally("a", 2000, 1500, 0, 0, {1: 0.9}, (0, 0, 0))])
    evidence.global_checks(ledger, measured.global_measures(np.random.default_rng(1)))
    evidence.other_checks(ledger, True, measured.fixed_tolerances(np.random.default_rng(1)))
    given = {name for name, settled in ledger.settled.items() if settled.given}
    assert given == set(ledger.settled) - {"no_clean_product_is_called_wrong", "fixed_tolerance_flakes"}


@pytest.mark.parametrize(
    ("different", "alarms", "verdict"), [(1001, 0, "confirmed"), (1000, 0, "undecidable"), (1000, 1, "refuted")]
)
def test_a_thousand_clean_products_are_a_thousand_different_results(different, alarms, verdict):
    ledger = labkit.claims("comparison_selftest")
    evidence.products(ledger, [calibration.Tally("a", 2000, different, alarms, 0, {1: 0.9}, (0, 0, 0))])
    assert ledger.settled["no_clean_product_is_called_wrong"].verdict == verdict


def test_every_dead_row_passes_the_global_checks_and_some_flipped_ones_do_not():
    """By the row's share p of the sum of squares the metric is p / (2 - p), and 2 p."""
    found = measured.global_measures(np.random.default_rng(1))
    assert found["dead row"].passed == found["dead row"].tried > 100
    assert 0 < found["flipped row"].passed < found["flipped row"].tried
    shares = np.square(np.random.default_rng(1).standard_normal((2048, 64), dtype=np.float32).astype(float)).sum(1)
    p = (shares / shares.sum())[::16].max()
    assert found["dead row"].metric == pytest.approx(p / (2.0 - p), rel=1e-9)
    assert found["flipped row"].metric == pytest.approx(2.0 * p, rel=1e-9)


def test_the_records_of_speed_are_counted_as_records(monkeypatch):
    name = "torch.testing.assert_close"
    rows = [{"ours: labkit.compare": "500", name: "5500"}, {"ours: labkit.compare": "800", name: "5600"}]
    monkeypatch.setattr(evidence, "_records", lambda: rows)
    assert evidence.on_record() == "in the 2 records of the benchmark the ratio is 7 to 11; ten is reached by 1 of them"


def test_the_ways_of_use_are_told_apart():
    def trial(alone):
        said = dict(zip(trials.OURS, (None, alone), strict=True))
        return trials.Trial("large", "adam", SIZES[0], None, None, "", said, {})

    with_program, alone = evidence.two_ways([trial("t1.m"), trial(None)]).splitlines()
    assert with_program == "With the recorded program ours calls 0 of 2 right runs wrong"
    assert alone == "Against the numbers alone ours calls 1 of 2 right runs wrong: adam: large"


def test_the_answer_is_the_one_that_the_notebook_computed():
    book = notebook("comparison_selftest")
    first, *_, last = book.content["cells"]
    (output,) = last["outputs"]
    answer = "".join(output["text"]).splitlines()[-1]
    assert book.about["answer"] == answer
    assert f"**Answer.** {answer} **Cost.**" in " ".join("".join(first["source"]).split())


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
        assert (tally.elementwise, tally.structure, *tally.missed) == (0, 0, 0, 0, 0), tally
        assert max(tally.used.values()) > 0.01, "a bound that nothing comes near could not fail"


def test_a_judge_that_allows_three_bounds_is_seen_to_miss_elements(monkeypatch):
    """And results of the same bits are counted as different once: at K = 1 the orders are one."""
    right = calibration.compare
    monkeypatch.setattr(calibration, "compare", lambda o, g, bound: right(o, g, bound.scaled(3.0)))
    rng = np.random.default_rng(8)
    tallies = calibration.tally(calibration.cpu_cases((1, 64), 2, rng), rng)
    assert all(tally.missed == (4, 4, 0) for tally in tallies)
    assert [tally.different for tally in tallies if "mixed" in tally.kind] == [4, 2, 2]


@pytest.mark.gpu
def test_no_false_alarm_over_the_gpus_own_products():
    rng = np.random.default_rng(8)
    cases = [*calibration.gpu_cases(calibration.LENGTHS[::2], 20, rng)]
    assert len(cases) > 2000
    for tally in calibration.tally(iter(cases), rng):
        assert (tally.elementwise, tally.structure, *tally.missed) == (0, 0, 0, 0, 0), tally


def test_the_inputs_are_those_that_the_implementation_has():
    x = inputs("attention", SIZES[0], torch.Generator().manual_seed(0), torch.bfloat16)
    reference = golden("attention", x)
    assert torch.equal(reference["q"], x["q"].double())
