"""The verdicts: each experiment's outcome turned over, and no reason that would be false under its verdict."""

import pytest

import labkit
from kernels.attention import evidence
from kernels.attention.experiments import SCALINGS, Counted, Final, Turned

LEVEL = 0.01
CONFIRMED, REFUTED, UNDECIDABLE = "confirmed", "refuted", "undecidable"
NONE_WRONG = dict.fromkeys(SCALINGS, False)
ONE, TWO = {"x": 0.02}, {"K": 0.02, "zeros": 0.0}


def turned(fit_turned, fit_straight):
    return Turned(10, 0, 9, fit_turned, fit_straight, 5, 0)


def final(through=5e-5, passes=True, of_bound=0.6):
    return Final({"qk": 0.0}, {"q": 0.0, "qk": through}, {"q": True, "qk": passes}, 5e-5, of_bound)


def counted(share, hits=0):
    return {"a": Counted(hits, 200, share, (8.5, 11.0)), "b": Counted(0, 200, share / 2, (5.0, 7.0))}


CASES = [
    # claim, what was measured, verdict, what its reason has to say, and what it must not say
    ("unscaled_range", (counted(0.7, 2), LEVEL), CONFIRMED, "not below the level", "more seldom"),
    ("unscaled_range", (counted(0.52), LEVEL), UNDECIDABLE, "more seldom than the level", "not below"),
    ("unscaled_range", (counted(0.1), LEVEL), REFUTED, "Under no call", "agree"),
    ("scaled_range", ((7.67, 8.36), 8.0), CONFIRMED, "agrees with both", "does not"),
    ("scaled_range", ((7.67, 7.9), 8.0), REFUTED, "does not agree", "8 agrees"),
    ("scaled_range", ((7.67, 8.36), 7.0), REFUTED, "re-run it is 7.000", "8 agrees"),
    ("scaling_is_right", ({"right": 0.9}, NONE_WRONG), CONFIRMED, "each of 11", "adds an error"),
    ("scaling_is_right", ({"right": 1.9}, NONE_WRONG), REFUTED, "adds an error", "each of"),
    ("scaling_is_right", ({"right": 0.9}, {"x": True, "y": False}), UNDECIDABLE, "wrong scalings too: x", "y"),
    ("ratio_confirms_scaling", ({"x": 0.1, "y": 0.0}, LEVEL), CONFIRMED, "x, y", "does not rule"),
    ("ratio_confirms_scaling", ({"x": 0.9, "y": 0.0}, LEVEL), REFUTED, "out: x. At the level", "each"),
    ("symptom_names_parameter", (1, 4, LEVEL), CONFIRMED, "one listed outcome", "different"),
    ("symptom_names_parameter", (60, 280, LEVEL), REFUTED, "60 outcomes of 280 calls", "no listed"),
    ("symptom_names_parameter", (0, 0, LEVEL), UNDECIDABLE, "no listed call fits", "different in what"),
    ("dims_reversed", (turned(5, 0), LEVEL), CONFIRMED, "only calls with exchanged", "without it"),
    ("dims_reversed", (turned(0, 5), LEVEL), REFUTED, "none of them with exchanged", "only calls"),
    ("dims_reversed", (turned(0, 0), LEVEL), UNDECIDABLE, "no listed call fits", "cannot tell"),
    ("dims_reversed", (turned(3, 5), LEVEL), UNDECIDABLE, "3 hold a call with the exchange and 5", "only"),
    ("q_leading_dimension", (TWO, 0, LEVEL), CONFIRMED, "with K behind Q", "as well"),
    ("q_leading_dimension", ({"K": 0.0, "zeros": 0.0}, 9, LEVEL), REFUTED, "each of these behind it: K, zeros", "fits"),
    ("q_leading_dimension", (TWO, 9, LEVEL), UNDECIDABLE, "9 other outcomes", "no other outcome"),
    ("diagnosis_as_a_whole", (ONE, {"x": 2e-3}, ("b", 4e-3), 0, LEVEL), CONFIRMED, "is ruled out", "of many"),
    ("diagnosis_as_a_whole", ({"x": 2e-5}, {"x": 2e-6}, ("b", 4e-3), 9, LEVEL), REFUTED, "below the level", "many"),
    ("diagnosis_as_a_whole", (ONE, {"x": 2e-3}, ("b", 4e-3), 9, LEVEL), UNDECIDABLE, "and 9 other outcomes", "at best"),
    ("blocking_wrong", (5, 0, LEVEL), CONFIRMED, "without blocks none", "cannot tell"),
    ("blocking_wrong", (0, 5, LEVEL), REFUTED, "wrong blocks none", "cannot tell"),
    ("blocking_wrong", (4, 5, LEVEL), UNDECIDABLE, "cannot tell", "neither"),
    ("blocking_wrong", (0, 0, LEVEL), UNDECIDABLE, "neither", "cannot tell"),
    ("blocking_unnecessary", ({"s": 0.2, "t": 0.1},), CONFIRMED, "within the bounds", "beyond"),
    ("blocking_unnecessary", ({"s": 0.2, "t": 1.1},), REFUTED, "beyond its bound at t", "stays"),
    ("blocking_by_itself", ({"s": 0.2, "t": 1.1},), CONFIRMED, "beyond the product's bound at t", "at most"),
    ("blocking_by_itself", ({"s": 0.2, "t": 0.1},), REFUTED, "at most 20%", "beyond"),
    ("fixed_call_row_major", ({"s": True}, {"t": 0.2}), CONFIRMED, "every score is", "wrong at"),
    ("fixed_call_row_major", ({"s": False}, {"t": 0.2}), REFUTED, "wrong at s", "every score"),
    ("fixed_call_row_major", ({"s": True}, {"t": 2.0}), REFUTED, "wrong at t", "every score"),
    ("geam_transpose", ({"s": True, "t": True},), CONFIRMED, "bit for bit at 2 sizes", "differs"),
    ("geam_transpose", ({"s": True, "t": False},), REFUTED, "differs at t", "bit for bit"),
    ("final_through_files", (final(),), CONFIRMED, "it would not hold", "fails"),
    ("final_through_files", (final(through=2e-5),), CONFIRMED, "it would hold", "fails"),
    ("final_through_files", (final(through=2e-4),), REFUTED, "0.0002", "takes every step"),
    ("final_through_files", (final(passes=False),), REFUTED, "fails for qk", "takes every step"),
    ("final_is_float_rounding", (final(),), CONFIRMED, "in keeping", "more than"),
    ("final_is_float_rounding", (final(of_bound=1.4),), REFUTED, "more than float32", "in keeping"),
    ("final_in_memory", ({"q": 0.0, "qk": 1.1e-5}, 1.2e-5), CONFIRMED, "1.1e-05", "above"),
    ("final_in_memory", ({"q": 0.0, "qk": 3e-5}, 1.2e-5), REFUTED, "above 2e-5", "strided"),
    ("check_is_absolute", ({5e-6: True, 1e-5: True, 2e-5: False},), CONFIRMED, "largest shift", "rtol"),
    ("check_is_absolute", ({5e-6: True, 1e-5: True, 2e-5: True},), REFUTED, "by 2e-05 passes", "largest shift"),
    ("batched_is_faster", ((145, 144, 150), (9, 8, 10)), CONFIRMED, "batch is faster", "slower"),
    ("batched_is_faster", ((9, 8, 10), (145, 144, 150)), REFUTED, "batch is slower", "faster"),
    ("batched_is_faster", ((9, 8, 10), (9.5, 9, 11)), UNDECIDABLE, "overlap", "faster"),
    ("holds_at_scale", ({"s": 0.2, "t": 0.3},), CONFIRMED, "within its bound at s; t", "beyond"),
    ("holds_at_scale", ({"s": 0.2, "t": 1.3},), REFUTED, "beyond its bound at t", "within"),
]  # fmt: skip


@pytest.mark.parametrize(("claim", "measured", "verdict", "says", "not_this"), CASES)
def test_the_reason_is_that_of_the_verdict_that_came_out(claim, measured, verdict, says, not_this):
    ledger = labkit.claims("attention_matmul")
    ledger.settle(claim, **getattr(evidence, claim)(*measured))
    settled = ledger.settled[claim]
    assert settled.verdict == verdict
    assert says in settled.because
    assert not_this not in settled.because


def test_every_claim_can_come_out_at_least_two_ways():
    outcomes = {
        claim: {case[2] for case in CASES if case[0] == claim} for claim in labkit.claims("attention_matmul").claims
    }
    assert all(len(verdicts) >= 2 for verdicts in outcomes.values()), outcomes


def test_what_rests_on_something_given_says_so():
    assert evidence.scaling_is_right({"a": 0.5}, {})["given"]
    assert evidence.q_leading_dimension({"K": 0.5}, 3, LEVEL)["given"]
    assert evidence.unscaled_range(counted(0.7), LEVEL)["given"]
    assert evidence.diagnosis_as_a_whole(ONE, {"x": 2e-3}, ("b", 4e-3), 9, LEVEL)["given"]


METRICS = {
    "level": 0.05, "outcomes_that_fit": 60, "best_chance": 0.03, "likeliest": "ldb=N",
    "diagnosis_fits": True, "unrelated_chance": 0.01,
}  # fmt: skip


def test_the_answer_follows_from_the_counts():
    assert evidence.answer(METRICS).startswith("Undecidable: 60 different wrong products, the")
    assert "the report's diagnosis among them" in evidence.answer(METRICS)
    assert "in 5% of cases" in evidence.answer(METRICS)
    assert "unrelated inputs differ by as much, and 60" in evidence.answer(METRICS | {"unrelated_chance": 0.07})
    assert "not the report's diagnosis" in evidence.answer(METRICS | {"diagnosis_fits": False})
    assert evidence.answer(METRICS | {"outcomes_that_fit": 1}).startswith("One listed call passes")
    assert evidence.answer(METRICS | {"outcomes_that_fit": 0}).startswith("None of the listed calls")
