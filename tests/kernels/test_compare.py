"""The self-test: every fault is found at its step, no clean difference is flagged, the bounds are calibrated."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import labkit
import whywrong
from kernels.compare import blind_spots, calibration, claims, correct_programs, figures, speed, trials
from kernels.compare.checks import (
    CHECKS,
    LABKIT,
    RERUN,
    STORED,
    differences,
    first_above,
    first_wrong,
    narrowest,
    rerun,
)
from kernels.compare.clean import CLEAN, FP32
from kernels.compare.faulty import FAULTS
from kernels.compare.speed import Speed
from kernels.compare.systems import SIZES, golden, inputs, run
from whywrong import Precision, Trace, localise
from whywrong.checking.with_program import Simulated
from whywrong.comparing.structure import Null


def _names(kinds):
    return [f"{kind.system}: {kind.name}" for kind in kinds]


def test_there_are_as_many_kinds_as_the_tables_promise():
    assert len({fault.name for fault in FAULTS}) >= 20
    assert len({way.name for way in CLEAN}) >= 15
    assert {fault.system for fault in FAULTS} == {way.system for way in CLEAN}


@pytest.mark.long(cases=2)
@pytest.mark.parametrize("fault", FAULTS, ids=_names(FAULTS))
def test_a_fault_is_found_at_its_step(device, fault):
    for size in SIZES[:2]:
        x = trials.sample_inputs(fault.system, size, 11, device)
        observed = trials.observed_fault(fault, x)
        assert first_wrong(observed, golden(fault.system, x), FP32) == fault.step


@pytest.mark.long(cases=3)
@pytest.mark.parametrize("way", CLEAN, ids=_names(CLEAN))
def test_a_clean_difference_is_not_called_wrong(device, way):
    for size in SIZES[:2]:
        x = trials.sample_inputs(way.system, size, 11, device, way)
        observed = trials.observed_clean(way, x)
        assert first_wrong(observed, golden(way.system, x), way.declared) is None


@pytest.mark.parametrize("fault", FAULTS, ids=_names(FAULTS))
def test_a_fault_changes_its_step_and_no_earlier_one(device, fault):
    x = trials.sample_inputs(fault.system, SIZES[0], 4, device)
    right = run(fault.system, x)
    wrong = trials.observed_fault(fault, x)
    changed = [step.name for step in right if not torch.equal(step.value, wrong[step.name])]
    assert changed[0] == fault.step


def trial(truth, localised, number=0.5, strength=None, accused_by_stored=None):
    """A case at step qk: what labkit reports with the re-run reference, and the number of every check."""
    numbers = {which: {check: {"qk": number} for check in CHECKS} for which in (STORED, RERUN)}
    reported = {STORED: accused_by_stored, RERUN: localised}
    return trials.Trial("a", "attention", SIZES[0], truth, strength, "", reported, numbers)


def test_a_score_counts_what_is_reported():
    done = [trial("qk", "pv"), trial("qk", "qk"), trial(None, None), trial(None, "qk")]
    assert trials.score(done, LABKIT) == trials.Score(reported=2, right_step=1, faults=2, flagged=1, clean=2)
    assert trials.score(done, "1 - cosine", threshold=0.6) == trials.Score(0, 0, 2, 0, 2)
    assert trials.score(done, "1 - cosine", threshold=0.4) == trials.Score(2, 2, 2, 2, 2)
    assert trials.roc(done, "1 - cosine") == [(1.0, 1.0), (0.0, 0.0)]
    assert trials.flagged(done, LABKIT) == ["attention: a"]
    assert trials.flagged(done, LABKIT, STORED) == []
    assert trials.sizes_and_draws(done) == (1, 2)


@pytest.mark.parametrize(("number", "as_good"), [(0.4, True), (0.6, False)])
def test_a_check_is_as_good_if_one_of_its_tolerances_is(number, as_good):
    """A threshold distinguishes a fault of 0.5 from a correct run of 0.4, and none distinguishes it from one of 0.6."""
    done = [trial("qk", "qk"), trial(None, None, number)]
    everything = [f"{check}, {which}" for which in (STORED, RERUN) for check in CHECKS]
    assert trials.as_good_as_labkit(done) == (everything if as_good else [])
    shares = trials.without_false_positives(done, RERUN)
    assert (shares[LABKIT], shares["1 - cosine"]) == (1.0, float(as_good))


def test_a_judge_that_accuses_a_right_run_has_no_share_without_accusing():
    assert trials.without_false_positives([trial("qk", "qk"), trial(None, "qk")], RERUN)[LABKIT] is None


def test_the_checks_do_what_they_are_known_for():
    """A dead row of 2048 passes the cosine rule and the global metric, and fails assert_close."""
    generator = torch.Generator().manual_seed(0)
    g = 0.1 * torch.randn(2048, 64, generator=generator, dtype=torch.float64)
    o = g.float()
    o[99] = 0.0
    reference = whywrong.golden(lambda a: {"x": a + 0.0}, a=g)
    numbers = differences(Trace({"x": o}), {"x": reference["x"]}, FP32)
    first = {check: first_above(numbers[check], threshold) for check, (_, threshold) in CHECKS.items()}
    assert first_wrong(Trace({"x": o}), reference, FP32) == first["torch.testing.assert_close"] == "x"
    assert first["1 - cosine"] is first["1 - 2<x,y>/(|x|^2+|y|^2)"] is None


@pytest.mark.parametrize("name", ["mask off by one", "one Inf", "tail not written: NaN"])
def test_every_check_reports_what_is_finite_on_one_side_only(name):
    """As torch.testing.assert_close does; it is fair to the others, whose numbers would be nan."""
    fault = next(fault for fault in FAULTS if fault.name == name)
    x = trials.sample_inputs(fault.system, SIZES[0], 0, "cpu")
    observed, reference = trials.observed_fault(fault, x), golden(fault.system, x)
    numbers = differences(observed, {fault.step: reference[fault.step]}, FP32)
    assert {numbers[check][fault.step] for check in CHECKS} == {float("inf")}


def test_a_rerun_reference_starts_from_what_was_observed(device):
    """A step after the faulty one is right on what it was given, and far from the stored value."""
    fault = next(fault for fault in FAULTS if fault.name == "4% scale")
    x = trials.sample_inputs(fault.system, SIZES[0], 0, device)
    observed, reference = trials.observed_fault(fault, x), golden(fault.system, x)
    again = rerun(reference, observed)
    assert list(again) == ["kt", "qk", "scaled", "masked", "probs", "pv"]
    assert torch.equal(again["scaled"], reference["scaled"]) is False  # made of the observed qk, rounded
    probs = observed["probs"].double()
    assert float((probs - again["probs"]).abs().max()) < 1e-6 < 1e-3 < float((probs - reference["probs"]).abs().max())
    assert float((observed["scaled"] - again["scaled"]).abs().max()) > 1e-2


def test_the_checks_are_given_the_precision():
    assert narrowest(FP32) == "float32"
    assert narrowest(Precision(products="tf32")) == "tf32"
    assert narrowest(Precision(storage="bfloat16", products="float16")) == "bfloat16"


def test_a_strength_is_what_an_observer_who_knows_the_shape_sees():
    """Adding the change's own shape up over many draws of the noise gives d = strength x SMALLEST on average."""
    fault = next(f for f in FAULTS if f.name == "1% scale")
    strengths = []
    for seed in range(12):
        x = trials.sample_inputs("attention", SIZES[0], seed, "cpu")
        sigma = trials.rounding_noise("attention", "qk", x)
        exact = x["q"].double() @ x["k"].double().mT
        shape = exact / sigma / (exact / sigma).norm()
        observed, where = trials.observed_scaled(fault, x, 3.0)
        strengths.append(float((shape * (observed["qk"].double() - exact) / sigma).sum()))
        assert where == "nearly everywhere"
    assert np.mean(strengths) == pytest.approx(3.0 * trials.SMALLEST, abs=4.0 / 12**0.5)


@pytest.mark.long(cases=2)
@pytest.mark.parametrize("instrument", [name for name in trials.FAULT_FOR if name != "elements"])
def test_without_one_test_of_structure_a_fault_is_lost(instrument, monkeypatch):
    fault, x, observed = trials.observed_for(instrument)
    reference = golden(fault.system, x)
    assert localise(observed, reference, precision=FP32).first == fault.step
    whole = Null.tests
    monkeypatch.setattr(Null, "tests", lambda *given: [t for t in whole(*given) if t.name != instrument])
    assert localise(observed, reference, precision=FP32).first is None


def test_without_the_elementwise_bound_a_fault_is_lost(monkeypatch):
    fault, x, observed = trials.observed_for("elements")
    reference = golden(fault.system, x)
    assert localise(observed, reference, precision=FP32).first == fault.step
    whole = Simulated.bound
    monkeypatch.setattr(Simulated, "bound", lambda *given: replace(whole(*given), absolute=float("inf")))
    assert localise(observed, reference, precision=FP32).first != fault.step


@pytest.mark.long
def test_the_table_of_instruments_has_a_fault_that_each_alone_reports():
    assert [row[-1] for row in trials.faults_by_instrument().rows] == [*trials.FAULT_FOR]


def test_the_strength_of_a_whole_fault_is_where_grading_ends():
    found = trials.whole_strengths(SIZES[0], 0, "cpu")
    assert {f.name for f in FAULTS} - set(found) == {"mask off by one", "tail not written: NaN", "one Inf"}
    for fault in FAULTS[:6]:
        x = trials.sample_inputs(fault.system, SIZES[0], 0, "cpu")
        assert trials.observed_scaled(fault, x, 0.999 * found[fault.name]) is not None
        assert trials.observed_scaled(fault, x, 1.001 * found[fault.name]) is None


# The ledger: for each claim an input on which it is confirmed, and one on which it is refuted


@pytest.fixture
def ledger():
    return labkit.claims("comparison_selftest")


def verdicts(ledger):
    return {name: settled.verdict for name, settled in ledger.settled.items()}


NORMAL = torch.from_numpy(np.random.default_rng(1).standard_normal((2048, 64), dtype=np.float32))
LOUD_ROW = NORMAL * torch.where(torch.arange(2048) == 16, 10.0, 1.0)[:, None]
"""One row holds a twentieth of the sum of squares."""
QUIET_ROWS = NORMAL * torch.where(torch.arange(2048) % 16 == 0, 0.1, 1.0)[:, None]


@pytest.mark.long(cases=1)
@pytest.mark.parametrize(
    ("golden", "scale", "dead", "flipped", "scaled"),
    [
        (NORMAL, 1.04, "confirmed", "refuted", "confirmed"),
        (QUIET_ROWS, 1.04, "confirmed", "confirmed", "confirmed"),
        (LOUD_ROW, 1.1, "refuted", "refuted", "refuted"),
    ],
    ids=["as in the notebook", "weak rows", "a strong row, 10% off"],
)
def test_what_the_global_checks_pass_depends_on_the_rows_share_and_on_the_scale(
    ledger, golden, scale, dead, flipped, scaled
):
    row = blind_spots.one_row_times
    claims.settle_global_checks(ledger, row(golden, 0.0), row(golden, -1.0), blind_spots.all_times(golden, scale))
    assert list(verdicts(ledger).values()) == [dead, flipped, scaled]


def test_the_metrics_of_a_dead_and_a_flipped_row_follow_from_its_share():
    """By the row's share p of the sum of squares the metric is p / (2 - p), and 2 p."""
    dead, flipped = (blind_spots.one_row_times(NORMAL, factor) for factor in (0.0, -1.0))
    assert dead.passed == dead.tried == dead.reported > 100
    assert 0 < flipped.passed < flipped.tried
    shares = NORMAL.double().square().sum(1)
    p = float((shares / shares.sum())[::16].max())
    assert dead.metric == pytest.approx(p / (2.0 - p), rel=1e-9)
    assert flipped.metric == pytest.approx(2.0 * p, rel=1e-9)


@pytest.mark.parametrize(("other", "verdict"), [(NORMAL.T, "confirmed"), (1.001 * NORMAL, "refuted")])
def test_l1_norms_see_a_scale_and_no_transpose(ledger, other, verdict):
    claims.settle_norms(ledger, blind_spots.l1_norms(NORMAL, other))
    assert verdicts(ledger) == {"l1_norm_is_blind_to_layout": verdict}


@pytest.mark.parametrize(("terms", "largest_factor", "verdict"), [(1 << 16, 1.0, "confirmed"), (16, 2.0, "refuted")])
def test_fixed_tolerances_depend_on_the_length_and_on_the_factors(ledger, terms, largest_factor, verdict):
    rng = np.random.default_rng(1)
    right = blind_spots.error_of_correct_product(rng, terms)
    scaled = blind_spots.error_of_scaled_product(rng, 1.01, largest_factor)
    claims.settle_fixed_tolerances(ledger, terms, right, scaled, 4.0 * scaled)
    assert set(verdicts(ledger).values()) == {verdict}
    assert len(ledger.settled) == 2


@pytest.mark.parametrize(
    ("different", "alarms", "missed", "products", "elements"),
    [
        (1001, 0, 0, "confirmed", "confirmed"),
        (1000, 0, 0, "undecidable", "confirmed"),
        (1000, 1, 0, "refuted", "confirmed"),
        (1001, 0, 1, "confirmed", "refuted"),
    ],
)
def test_a_thousand_right_products_are_a_thousand_different_results(
    ledger, different, alarms, missed, products, elements
):
    claims.settle_products(ledger, [calibration.Tally("a, b", 2000, different, alarms, 0, {1: 0.9}, (5, 0, missed))])
    assert list(verdicts(ledger).values()) == [products, elements]


def test_faults_identified_and_right_runs_spared_confirm_the_claims_on_localising(ledger):
    done = [trial("qk", "qk", 2.0), trial("qk", "qk", 2.0, 10.0), trial(None, None, 2.0)]
    claims.settle_localising(ledger, done)
    assert set(verdicts(ledger).values()) == {"confirmed"}
    assert len(ledger.settled) == 4


def test_a_fault_at_another_step_and_a_right_run_accused_refute_them(ledger):
    done = [trial("qk", "pv"), trial("qk", None, 0.5, 10.0), trial(None, "qk")]
    claims.settle_localising(ledger, done)
    assert set(verdicts(ledger).values()) == {"refuted"}
    assert ledger.settled["no_clean_run_is_called_wrong"].measured["names"] == ["attention: a"]
    assert ledger.settled["every_fault_is_found"].measured["reported"] == 1


@pytest.mark.parametrize(
    ("stated", "verdict", "undecided"),
    [
        (3e-3, "confirmed", []),
        (1e-3, "undecidable", ["float32", "bfloat16"]),
        (1e-4, "refuted", ["float16", "bfloat16"]),
    ],
)
def test_the_stated_rate_is_held_against_the_interval_of_each_precision(ledger, stated, verdict, undecided):
    claims.settle_correct_programs(ledger, correct_programs.read_record(), stated)
    settled = ledger.settled["right_programs_are_accused_as_stated"]
    assert (settled.verdict, settled.measured["open"]) == (verdict, undecided)


def test_the_record_of_right_programs_holds_each_precision():
    record = correct_programs.read_record()
    rates = correct_programs.flagged(record)
    assert sum(rate["of"] for rate in rates.values()) == record["accused"]["of"] >= 20_000
    assert sum(rate["count"] for rate in rates.values()) == record["accused"]["count"]
    assert all(list(shares) == [1.0, 4.0, 32.0, 1000.0] for shares in correct_programs.identified(record).values())
    assert correct_programs.STATED == 1e-3


@pytest.mark.parametrize(
    ("times", "verdict"),
    [
        (Speed(500.0, 500.0, 5500.0, 499.0, 0.001, 3.25), "confirmed"),
        (Speed(900.0, 900.0, 990.0, 499.0, 1.0, 4.0), "refuted"),
    ],
)
def test_the_claims_on_speed_follow_the_times(ledger, monkeypatch, times, verdict):
    monkeypatch.setattr(claims, "recorded_ratios", lambda: [10.5, 11.0])
    claims.settle_speed(ledger, times)
    assert verdicts(ledger) == dict.fromkeys(claims.SPEED, verdict)


def test_the_claim_on_whole_calls_holds_where_it_does_in_each_record(ledger, monkeypatch):
    name = "torch.testing.assert_close"
    rows = [{"ours: whywrong.compare": "500", name: "5500"}, {"ours: whywrong.compare": "800", name: "5600"}]
    monkeypatch.setattr(speed, "records", lambda: rows)
    claims.settle_speed(ledger, Speed(500.0, 500.0, 5500.0, 499.0, 0.001, 3.25))
    settled = ledger.settled["ten_times_assert_close"]
    assert settled.verdict == "refuted"
    measured = settled.measured
    assert (measured["records"], measured["recorded"], measured["reached"]) == (2, [7.0, 11.0], 1)


def test_every_record_of_the_whole_call_is_there():
    from labkit import bench
    from labkit.session.catalogue import ROOT

    runs = {row["timestamp"] for row in bench.read(ROOT / "data" / "benchmarks" / "compare.csv")}
    assert all(run in speed.RECORDS.read_text(encoding="utf-8") for run in runs)


def test_the_titles_of_figures_are_made_from_what_they_show():
    record = correct_programs.read_record()
    left, right = figures.plot_correct_programs(record).axes
    assert left.get_title(loc="left") == "Of 20,000 correct programs 8 are flagged"
    record["accused"] = {"count": 40, "of": 30_000}
    for storage in record["power"].values():
        storage["32 roundings"]["right first step"] = {"count": 1, "of": 2}
    left, right = figures.plot_correct_programs(record).axes
    assert left.get_title(loc="left") == "Of 30,000 correct programs 40 are flagged"
    assert right.get_title(loc="left") == "Of faults of 32 roundings at least 50% are identified"


def test_titles_say_from_which_length_on_the_slope_sees_more_than_the_elements_do():
    def faults(*gains):
        return [dict.fromkeys(calibration.INSTRUMENTS, 1e-3) | {"elements, all scaled": 1e-3 * gain} for gain in gains]

    smallest = {"float32": faults(0.5, 3.0, 2.0), "bfloat16": faults(2.0, 3.0, 1.0)}
    figure = figures.plot_smallest_faults((1, 2, 4), smallest, "here")
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == [
        "In float32 the slope sees\na smaller scale from K = 2 on",
        "In bfloat16 the slope sees\nno smaller scale at the longest",
    ]
    assert "3 times smaller at K = 2 in float32" in figure.get_supxlabel()


def test_seven_against_one_is_what_chance_gives_in_seven_of_a_hundred():
    """The sum of two binomial tails, 9 / 256 each, where as many programs of each type were sampled."""
    rates = {name: {"count": count, "of": 1000} for name, count in (("float32", 7), ("float16", 3), ("bfloat16", 1))}
    assert correct_programs.by_chance({"accused by": {"storage": rates}}) == pytest.approx(18 / 256)


def test_the_figure_of_what_is_identified_names_the_best_of_the_checks():
    """And it has no share for labkit where that flags a correct run."""
    done = [trial("qk", "qk"), trial(None, "qk", 0.4)]
    (axes,) = figures.plot_identified(done, "here").axes
    assert (
        axes.get_title(loc="left")
        == "With no correct run flagged, the other checks identify 100% of the faults at most"
    )
    assert [text.get_text() for text in axes.texts] == ["100%"] * len(CHECKS)
    done = [trial("qk", "qk"), trial(None, None, 0.4, accused_by_stored="qk")]
    (axes,) = figures.plot_identified(done, "here").axes
    assert [text.xy[0] for text in axes.texts] == [100.0] * (1 + len(CHECKS))


@pytest.mark.long
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
    monkeypatch.setattr(calibration, "compare", lambda o, g, bound: right(o, g, bound=bound.scaled(3.0)))
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


def test_lamps_are_dark_on_a_correct_run_but_for_a_check_that_flags_it_and_lit_for_a_large_fault():
    lit = trials.lamps(lambda qk, steps: 1.01 * qk, "qk", (1.0, 1e5))
    assert list(lit) == [0.0, 1.0, 1e5]
    assert not lit[0.0][LABKIT]
    assert lit[0.0]["numpy.allclose"]
    assert lit[1e5][LABKIT]
    assert not lit[1.0][LABKIT]


def test_cases_of_one_fault_count_once_in_an_interval():
    first = next(t for t in trials.trials(SIZES[:1], [0], "cpu", (100.0,)) if t.strength)
    low, high = trials.interval_by_fault([first] * 40, LABKIT)
    assert high - low > 0.9, "forty cases of one fault say as little as one"
    assert trials.interval_by_fault([], LABKIT) == (0.0, 1.0)
