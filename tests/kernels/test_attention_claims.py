"""The verdicts: for each claim an input on which it is confirmed and one on which it is refuted, or why not."""

from dataclasses import replace

import numpy as np
import pytest

import labkit
from kernels.attention import blind, calls, claims, experiments, faulty, figures, golden, survey
from kernels.attention.attention import attention
from kernels.attention.calls import Call
from kernels.attention.experiments import SCALINGS, Counted, Exchange, Final
from kernels.attention.identify import Candidates, distinguishing, separating_settings
from kernels.attention.problem import REPORT, Sizes, uniform
from kernels.attention.survey import Fate, Likelihood, Outcome
from whywrong import Weighing
from whywrong.explaining.hypotheses import Fit

LEVEL = 0.01
CONFIRMED, REFUTED, UNDECIDABLE, UNTESTABLE = "confirmed", "refuted", "undecidable", "untestable"
NONE_ACCEPTED = dict.fromkeys(SCALINGS, False)
RATIOS = (7.67, 8.36)


def counted(share, hits=0):
    return Counted(hits, 200, share, (8.5, 11.0))


def item(*listed, head=0.7):
    return Likelihood(Outcome(Fate.WRONG, list(listed)), np.full((1, 12), 9.0), head, 1e-3, 0.5)


SINGLE, BLOCKED = item(Call(ldb="N")), item(replace(calls.blocked(32), c_offset="j*M + i"))


def ranges(share=0.7, allowed=RATIOS, ratio=8.0):
    return claims.settle_ranges, ({"the call": counted(share, 2), "another": counted(share / 2)}, allowed, ratio, LEVEL)


def scaling(error=0.9, passes=NONE_ACCEPTED, shown=(0.1, 0.0)):
    return claims.settle_scaling, ({"right": error}, dict(zip("xy", shown, strict=True)), passes, LEVEL)


def symptom(*fits):
    return claims.settle_symptom, (fits, {"a": len(fits), "b": 1, "c": 9}, LEVEL)


def diagnosis(exchanged=3, straight=5, behind=0.7, alone=0, chance=0.02, others=0):
    exchange = Exchange(10, 0, 9, exchanged, straight, 5, 0)
    filled = {"K": counted(behind), "zeros": counted(0.0)}
    rest = {"q_leading_dimension": alone, "diagnosis": others}
    return claims.settle_diagnosis, (exchange, filled, {"x": SINGLE}, {"x": chance}, BLOCKED, rest, LEVEL)


def repair(error=0.2, blocks=0.2, in_order=True):
    return claims.settle_repair, ({"s": 0.1, "t": error}, {"s": 0.1, "u": blocks}, {"s": in_order})


def final(through=5e-5, passes=True, of_bound=0.6, in_memory=1.1e-5):
    return Final({"q": 0.0, "qk": in_memory}, {"q": 0.0, "qk": through}, {"q": True, "qk": passes}, 5e-5, of_bound)


EARLY = {"128 x 64": "agrees", "128 x 128": "ValueError: operands", "128 x 1": "differs"}


def checks(shift=False, early=EARLY, **of_final):
    return claims.settle_checks, (final(**of_final), {5e-6: True, 1e-5: True, 2e-5: shift}, early)


def on_gpu(equal=True, **of_final):
    return claims.settle_on_gpu, ({"s": True, "t": equal}, final(**of_final), 1.2e-5)


def at_scale(loop=(145, 144, 150), batched=(9, 8, 10), error=0.3):
    return claims.settle_at_scale, (loop, batched, {"s": 0.2, "t": error})


CASES = [
    ("unscaled_range", ranges(0.7), UNTESTABLE, {"share": 0.7, "hits": 2}),
    ("unscaled_range", ranges(0.52), REFUTED, {"call": "the call"}),
    ("scaled_range", ranges(), CONFIRMED, {"root": 8.0}),
    ("scaled_range", ranges(allowed=(7.67, 7.9)), REFUTED, {}),
    ("scaled_range", ranges(ratio=7.0), REFUTED, {"ratio": 7.0}),
    ("scaling_is_right", scaling(), CONFIRMED, {"error": 0.9, "scalings": 11}),
    ("scaling_is_right", scaling(error=1.9), REFUTED, {"error": 1.9}),
    ("scaling_is_right", scaling(passes={"x": True, "y": False}), UNDECIDABLE, {"accepted": ["x"]}),
    ("ratio_confirms_scaling", scaling(), CONFIRMED, {"hidden": []}),
    ("ratio_confirms_scaling", scaling(shown=(0.9, 0.0)), REFUTED, {"hidden": ["x"], "excluded": ["y"]}),
    ("symptom_names_parameter", symptom(SINGLE), CONFIRMED, {"fits": 1, "call": "ldb=N"}),
    ("symptom_names_parameter", symptom(SINGLE, BLOCKED), REFUTED, {"fits": 2, "calls": 2, "by_statistic": [2, 1, 9]}),
    ("symptom_names_parameter", symptom(), UNDECIDABLE, {"fits": 0}),
    ("blocking_wrong", symptom(BLOCKED), CONFIRMED, {"blocked": 1, "single": 0}),
    ("blocking_wrong", symptom(SINGLE), REFUTED, {"blocked": 0, "single": 1}),
    ("blocking_wrong", symptom(SINGLE, BLOCKED), UNDECIDABLE, {"blocked": 1, "single": 1}),
    ("blocking_wrong", symptom(), UNDECIDABLE, {"blocked": 0, "single": 0}),
    ("dims_reversed", diagnosis(5, 0), CONFIRMED, {"exchanged": 5}),
    ("dims_reversed", diagnosis(0, 5), REFUTED, {"straight": 5}),
    ("dims_reversed", diagnosis(3, 5), UNDECIDABLE, {"pairs": 10, "changed_at_equal": 0}),
    ("dims_reversed", diagnosis(0, 0), UNDECIDABLE, {}),
    ("q_leading_dimension", diagnosis(), CONFIRMED, {"fit": ["K"], "excluded": ["zeros"]}),
    ("q_leading_dimension", diagnosis(behind=0.1, alone=9), REFUTED, {"fit": [], "excluded": ["K", "zeros"]}),
    ("q_leading_dimension", diagnosis(alone=9), UNDECIDABLE, {"others": 9}),
    ("diagnosis_as_a_whole", diagnosis(), CONFIRMED, {"chance": 0.02}),
    ("diagnosis_as_a_whole", diagnosis(chance=2e-5, others=9), REFUTED, {"chance": 2e-5}),
    ("diagnosis_as_a_whole", diagnosis(others=9), UNDECIDABLE, {"others": 9, "ends": 1e-3}),
    ("blocking_unnecessary", repair(), CONFIRMED, {"error": 0.2, "sizes": 2}),
    ("blocking_unnecessary", repair(error=1.1), REFUTED, {"wrong": ["t"]}),
    ("blocking_by_itself", repair(blocks=1.1), CONFIRMED, {"beyond": ["u"]}),
    ("blocking_by_itself", repair(), REFUTED, {"error": 0.2}),
    ("fixed_call_row_major", repair(), CONFIRMED, {"wrong": []}),
    ("fixed_call_row_major", repair(in_order=False), REFUTED, {"wrong": ["s"]}),
    ("fixed_call_row_major", repair(error=2.0), REFUTED, {"wrong": ["t"]}),
    ("final_through_files", checks(), CONFIRMED, {"difference": 5e-5, "nearest": False}),
    ("final_through_files", checks(through=2e-5), CONFIRMED, {"nearest": True}),
    ("final_through_files", checks(through=2e-4), REFUTED, {"failed": []}),
    ("final_through_files", checks(passes=False), REFUTED, {"failed": ["qk"]}),
    ("shape_error", checks(), CONFIRMED, {"column": "differs"}),
    ("shape_error", checks(early=EARLY | {"128 x 128": "differs"}), REFUTED, {"wrong": "differs"}),
    ("final_is_float_rounding", checks(), CONFIRMED, {"error": 0.6}),
    ("final_is_float_rounding", checks(of_bound=1.4), REFUTED, {"error": 1.4}),
    ("check_is_absolute", checks(), CONFIRMED, {"shift": 1e-5}),
    ("check_is_absolute", checks(shift=True), REFUTED, {"shift": 2e-5}),
    ("geam_transpose", on_gpu(), CONFIRMED, {"sizes": 2}),
    ("geam_transpose", on_gpu(equal=False), REFUTED, {"differs": ["t"]}),
    ("final_in_memory", on_gpu(), CONFIRMED, {"difference": 1.1e-5}),
    ("final_in_memory", on_gpu(in_memory=3e-5), REFUTED, {"difference": 3e-5}),
    ("batched_is_faster", at_scale(), CONFIRMED, {}),
    ("batched_is_faster", at_scale(loop=(9, 8, 10), batched=(145, 144, 150)), REFUTED, {}),
    ("batched_is_faster", at_scale(loop=(9, 8, 10), batched=(9.5, 9, 11)), UNDECIDABLE, {}),
    ("holds_at_scale", at_scale(), CONFIRMED, {"error": 0.3}),
    ("holds_at_scale", at_scale(error=1.3), REFUTED, {"wrong": ["t"]}),
]


@pytest.mark.long(cases=3)
@pytest.mark.parametrize(("claim", "settling", "verdict", "measured"), CASES)
def test_the_verdict_follows_from_what_was_measured(claim, settling, verdict, measured):
    ledger = labkit.claims("attention_matmul")
    settle, arguments = settling
    settle(ledger, *arguments)
    settled = ledger.settled[claim]
    assert settled.verdict == verdict
    assert settled.because
    assert settled.measured | measured == settled.measured


def test_every_claim_is_confirmed_by_one_case_and_refuted_by_another_or_the_file_says_why_not():
    for name, claim in labkit.claims("attention_matmul").claims.items():
        outcomes = {case[2] for case in CASES if case[0] == name}
        assert outcomes == set(claim.texts), name
        assert {CONFIRMED, REFUTED} <= outcomes or claim.only, name


def test_the_printed_call_is_the_diagnosis_in_one_call_of_the_list(device):
    inputs = uniform(REPORT, np.random.default_rng(0))
    layout = golden.plan(REPORT, "adjacent")
    printed = attention(inputs, device, multiply=faulty.batched_matmul, layout=layout)["qk"].cpu().numpy()
    listed = faulty.scores(calls.diagnosis(32)["in one call"], inputs, device, mode="adjacent")
    assert abs(printed - listed).max() < 1e-4
    assert abs(printed - inputs.q @ inputs.k.swapaxes(1, 2)).max() > 1.0


@pytest.fixture(scope="module")
def likelihoods(device):
    listed = [*calls.diagnosis(32).values(), Call(a="Q", b="K", transa="T"), Call(a="K"), Call(a="K", ldb="M")]
    return survey.measure_likelihoods(survey.suspects(survey.survey(REPORT, listed)), REPORT, 10, (8.8, 10.4), device)


def test_only_a_shape_that_cannot_be_broadcast_raises_in_the_reports_first_check():
    ends = experiments.early_check(uniform(REPORT, np.random.default_rng(0)))
    assert list(ends) == ["128 x 64", "128 x 128", "128 x 1"]
    assert ends["128 x 64"] == "agrees"
    assert ends["128 x 128"].startswith("ValueError")
    assert ends["128 x 1"] == "differs"


def test_the_strip_of_memory_draws_the_numbers_that_a_leading_dimension_picks():
    axes = figures.strip(64, right=1, wrong=128, rows=12).axes
    reads = [[round(line[0][0]) for line in axis.collections[0].get_segments()] for axis in axes]
    assert reads == [list(range(64)), [0, 128, 256, 384, 512, 640]]


def test_how_many_products_fit_depends_on_the_statistic_and_its_rate(likelihoods):
    at_5_percent = survey.count_by_statistic(likelihoods, 0.05, set(calls.diagnosis(32).values()))
    assert [number for number, _ in at_5_percent.values()][1] == 0
    assert at_5_percent[next(iter(survey.STATISTICS))][0] >= 1
    rates = [survey.false_alarms(name, 0.05, 12) for name in survey.STATISTICS]
    assert rates == [0.05, pytest.approx(0.22, abs=0.005), 0.05]


def test_the_draw_most_like_the_report_is_the_closest_of_all(likelihoods):
    best, number = survey.most_alike(likelihoods, (8.8, 10.4))
    ends = {(item.name, i): (d.min(), d.max()) for item in likelihoods for i, d in enumerate(item.differences)}
    distances = {key: abs(low - 8.8) + abs(high - 10.4) for key, (low, high) in ends.items()}
    assert distances[best.name, number] == min(distances.values())


def test_products_of_other_queries_and_keys_fit_and_those_with_one_right_operand_do_not():
    both, queries, keys = experiments.unrelated_products((8.8, 10.4), range(20)).values()
    assert both.chance >= LEVEL
    assert max(queries.chance, keys.chance) < 1e-6


def test_a_column_that_is_the_same_in_every_row_is_no_test_and_goes_into_the_title():
    def fit(ok, residual):
        return Fit(ok, residual, "")

    search = Weighing(["s"], {"sgemm x": {"s": fit(True, 0.1)}, "sgemm y": {"s": fit(False, 9.0)}})
    same = Fit(True, float("nan"), "fits: ldc")
    proof = Weighing(
        ["alike", "apart"],
        {"sgemm x": {"alike": same, "apart": fit(True, 0.1)}, "sgemm y": {"alike": same, "apart": fit(False, 5e7)}},
    )
    table = distinguishing(search, proof)
    assert table.columns == ("call", "by the search", "apart")
    assert table.rows == [("sgemm x", "left", "0.1"), ("sgemm y", "refuted", "over a million")]
    assert table.title.endswith("alike")
    assert not any("sgemm" in row[0] for row in distinguishing(search, proof, hidden=True).rows)


def test_a_guess_agrees_everywhere_only_where_it_computes_what_the_sealed_call_does(device):
    candidates = Candidates([], separating_settings(Sizes(1, 32, 32, 16)), 8)
    sealed = faulty.Suspect(blind.named(8)["q_leading_dimension"], device)
    rows = [candidates.check(guess, sealed).rows[0] for guess in (Call(ldb="N"), Call(a="K"))]
    assert rows[0][1] == rows[0][2] > rows[1][1]
