"""The race that a compiler made of the projection: compiled texts, what is read from them, and what runs give."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import labkit
from kernels.mhc.race import emitted, evidence, variants
from kernels.mhc.race.variants import ANOTHER_STORE, AS_IT_WAS, VARIANTS, Seen
from labkit import plots
from labkit.session.record import Record

K = 16384
RACING = {AS_IT_WAS, "2 stages", ANOTHER_STORE, "8 streams, 2 stages", "float32, one TF32 product"}
GUARDED = "guarded, 4 stages"


@pytest.fixture(scope="module")
def compiled():
    orders = {name: variant.order(K) for name, variant in VARIANTS.items()}
    for dtype in variants.TYPES:
        orders |= variants.as_launched(16384, 4096, dtype)
    return emitted.compiled(orders)


@pytest.fixture(scope="module")
def texts(compiled):
    return {name: emitted.read(text) for name, text in compiled.items()}


def test_the_text_overwrites_what_is_read_in_these_variants_and_in_no_other(texts):
    assert {name for name in VARIANTS if texts[name].overwrites} == RACING


def test_no_kernel_of_the_operator_overwrites_what_is_read(texts):
    own = {name: text for name, text in texts.items() if name not in VARIANTS}
    assert len(own) == 31  # eleven kernels in bfloat16, which packs its weights, and ten in the others
    assert not [name for name, text in own.items() if text.overwrites]
    assert own["phi_backward_kernel, bfloat16"].pending == 1  # read with the same eyes, and it has buffers enough
    assert all(own[f"project_kernel, {kind}"].pending == 0 for kind in ("bfloat16", "float16", "float32"))


def test_a_copy_is_called_an_overwrite_by_the_wait_before_it(compiled):
    """The racing text with its wait changed, and the guarded one: the same copies, other findings."""
    racing, guarded = compiled[AS_IT_WAS], compiled[GUARDED]
    assert not emitted.read(racing.replace("{pendings = 1 : i32}", "{pendings = 0 : i32}")).overwrites
    found = emitted.read(guarded.replace("{pendings = 0 : i32}", "{pendings = 1 : i32}"))
    assert [one.step for one in found.overwrites] == list(range(emitted.STEPS))
    assert {one.slot for one in found.overwrites} == {0, 1, 2}
    assert all(one.read_by == one.step for one in found.overwrites)


def test_a_slot_that_is_not_known_is_an_error_and_not_passed_over(compiled):
    racing = compiled[AS_IT_WAS]
    unknown = racing.replace("arith.select", "arith.unheard_of")
    with pytest.raises(ValueError, match="slot is not known"):
        emitted.read(unknown)
    with pytest.raises(ValueError, match="is not known"):
        emitted.read(racing.replace("ttg.memdesc_index", "ttg.other_index"))


def test_a_kernel_that_does_not_compile_is_an_error_with_the_compilers_words():
    wrong = replace(VARIANTS[AS_IT_WAS].order(K), kernel="kernels.mhc.race.race_kernels:absent")
    with pytest.raises(RuntimeError, match="absent"):
        emitted.compiled({"it": wrong})


def test_an_excerpt_holds_buffers_copies_products_and_waits(compiled):
    lines = emitted.excerpt(compiled[AS_IT_WAS]).splitlines()
    assert len(lines) < 15
    for word in ("memdesc<3x", "memdesc<4x", "async_copy", "warp_group_dot ", "pendings = 1"):
        assert any(word in line for line in lines), word


def test_a_variant_computes_the_projection_and_repeats_are_identical_where_it_is_interpreted(device):
    wide = replace(VARIANTS["float32, three TF32 products"], columns=64)
    found = variants.observe(wide, 70, 256, 0, 3, device)
    assert found.differ == 0
    assert found.error <= found.bound


SAME = Seen(20, 0, 1e-4, 1e-2, (2e-3, 2e-3))
DIFFER = Seen(20, 19, 0.2, 1e-2, (2e-3, 2.1e-3))
FAR = replace(DIFFER, rms=(2e-3, 5e-3))


def seen(racing):
    return {name: DIFFER if name in racing else SAME for name in VARIANTS}


def test_an_explanation_is_refuted_only_by_a_difference_that_it_does_not_allow(texts):
    found = evidence.weigh(texts, seen(RACING))
    assert (found.cause, len(found.left), found.rivals) == ("undecidable", len(evidence.HYPOTHESES), 0)
    assert evidence.weigh(texts, seen(RACING - {ANOTHER_STORE})).left == found.left  # what stays the same says nothing
    assert evidence.weigh(texts, seen({})) is None
    one = evidence.weigh(texts, seen({AS_IT_WAS, "one reader, 4 stages"}))
    assert one.refuted == dict.fromkeys(
        (evidence.CAUSE, "any pipelined tile with two readers", "the sum of squares itself"), "one reader, 4 stages"
    )
    assert one.cause == "undecidable"
    unpiped = {AS_IT_WAS, "1 stage", "32 tokens, 4 stages"}
    assert evidence.weigh(texts, seen(unpiped)).cause == "the sum of squares itself"
    assert evidence.weigh(texts, seen(unpiped | {"one reader, 4 stages"})).cause == "none of these"


def test_where_several_explanations_are_left_the_narrowest_and_what_would_decide_are_named(texts):
    rarely = seen(RACING) | {"2 stages": replace(DIFFER, differ=1)}
    lines = evidence.weighed(texts, rarely).splitlines()
    assert lines[0].startswith(f"undecidable: 6 of {len(evidence.HYPOTHESES)} explanations")
    assert f"  {evidence.CAUSE}: 5 of 14 variants may differ" in lines
    assert f"differ: {evidence.CAUSE}." in lines[7]
    assert "one buffer to spare" in lines[8]
    assert "1 of 19 repeats only" in lines[-1]
    without = evidence.weighed(texts, seen({AS_IT_WAS, "one reader, 4 stages"}))
    assert "differ: any product left pending from step to step." in without
    assert "What would decide" not in without
    assert evidence.weighed(texts, seen({})).startswith("not weighed")
    assert evidence.weighed(texts, seen({AS_IT_WAS, "1 stage", "32 tokens, 4 stages"})).startswith("the sum of squares")


def test_a_racing_variants_row_says_whether_a_check_of_the_layers_input_sees_it():
    rows = evidence.racing(seen({AS_IT_WAS}) | {"2 stages": FAR}).rows
    assert [(row[0], row[1], row[-1]) for row in rows] == [
        (AS_IT_WAS, "19 of 19 repeats", "passes"),
        ("2 stages", "19 of 19 repeats", "fails"),
    ]


def test_predictions_say_what_may_differ_and_how_many_repeats_did(texts):
    rows = {row[0]: row[1:] for row in evidence.predictions(texts, {AS_IT_WAS: DIFFER}).rows}
    assert set(rows[AS_IT_WAS][:-1]) == {"may differ"}
    assert (rows["1 stage"][0], rows["1 stage"][2]) == ("cannot", "may differ")
    assert (rows[AS_IT_WAS][-1], rows["1 stage"][-1]) == ("19 of 19 repeats", "no run")


def verdict(settlement):
    ledger = labkit.claims("pipeliner_race")
    (claim,) = settlement
    ledger.settle(claim, **settlement[claim])
    return ledger.settled[claim].verdict, ledger.settled[claim].because


@pytest.mark.parametrize(
    ("claim", "change", "phrases"),
    [
        ("text_has_the_overwrite", {AS_IT_WAS: GUARDED}, ("may still read", "no copy of Triton")),
        (
            "needs_both",
            {"one reader, 4 stages": AS_IT_WAS},
            ("of 12 steps: as it was 12, one reader 0", "one reader 12"),
        ),
    ],
)
def test_a_text_flips_its_verdict_and_its_reason(texts, claim, change, phrases):
    for outcome, phrase, given in (("confirmed", phrases[0], {}), ("refuted", phrases[1], change)):
        read = texts | {name: texts[other] for name, other in given.items()}
        found, why = verdict({claim: evidence.of_texts(read, {}, "3")[claim]})
        assert (found, phrase in why) == (outcome, True), why


def test_a_kernel_of_ours_that_overwrites_flips_its_verdict(texts):
    claim = "own_kernels_are_free"
    for name, outcome, phrase in ((GUARDED, "confirmed", "none has"), (AS_IT_WAS, "refuted", "is in a")):
        found, why = verdict({claim: evidence.of_texts(texts, {"a": texts[name]}, "3")[claim]})
        assert (found, phrase in why) == (outcome, True), why


OFF = replace(SAME, error=2.0)
OPERATOR = {"bfloat16": replace(SAME, error=0.3, bound=1.0)}


@pytest.mark.parametrize(
    ("claim", "runs", "wanted", "phrase"),
    [
        ("repeats_differ", seen(RACING), "confirmed", "all 19 repeats differ from the first run"),
        ("repeats_differ", seen({}) | {AS_IT_WAS: replace(DIFFER, differ=3)}, "confirmed", "3 of 19 repeats differ"),
        ("repeats_differ", seen({}), "refuted", "all 20 runs gave the same bits"),
        ("beyond_rounding", seen(RACING), "confirmed", "2.0e-01 off, where"),
        ("beyond_rounding", seen({}), "refuted", "no element is more than 1.0e-04 off"),
        ("tolerance_passes", seen(RACING), "confirmed", "1,024 tokens, is 2.00e-03 to 2.10e-03 over the runs"),
        ("tolerance_passes", seen({}) | {AS_IT_WAS: FAR}, "refuted", "1,024 tokens, reaches 5.00e-03"),
        ("text_predicts_the_runs", seen(RACING), "confirmed", "5 of 14 variants differ"),
        ("text_predicts_the_runs", seen({AS_IT_WAS}), "refuted", "all 20 runs are alike in 2 stages"),
        ("text_predicts_the_runs", seen({}), "refuted", "all 20 runs are alike in 64 tokens"),
        ("text_predicts_the_runs", seen(RACING | {"1 stage"}), "refuted", "repeats differ in 1 stage"),
        ("only_where_the_text_has_it", seen({AS_IT_WAS}), "confirmed", "among the 5 whose"),
        ("only_where_the_text_has_it", seen({"1 stage"}), "refuted", "such a copy in 1 stage"),
        ("only_where_the_text_has_it", seen({}), "undecidable", "no repeats differ"),
    ],
)
def test_runs_flip_verdicts_and_reasons(texts, claim, runs, wanted, phrase):
    found, why = verdict({claim: evidence.of_runs(texts, runs)[claim]})
    assert (found, phrase in why) == (wanted, True), why


@pytest.mark.parametrize(
    ("claim", "operator", "slower", "wanted", "phrase"),
    [
        ("guarded_repeats_are_identical", OPERATOR, 1.0, "confirmed", "the same bits, and within"),
        ("guarded_repeats_are_identical", {"float16": DIFFER}, 1.0, "refuted", "not so in float16"),
        ("guarded_repeats_are_identical", {"float16": OFF}, 1.0, "refuted", "0 of 19 repeats differ, 2 of"),
        ("guard_costs_nothing", OPERATOR, 1.02, "confirmed", "1.020 times as long, and up to"),
        ("guard_costs_nothing", OPERATOR, 1.2, "refuted", "1.200 times as long, more than"),
    ],
)
def test_the_guards_runs_and_times_flip_verdicts_and_reasons(claim, operator, slower, wanted, phrase):
    found, why = verdict({claim: evidence.of_guard(operator, slower)[claim]})
    assert (found, phrase in why) == (wanted, True), why


def kept_as(runs, guard="confirmed"):
    """A record of these runs, with verdicts and a cause that its own code wrote: none that follows from them."""
    claims = {
        name: {"verdict": "untestable", "because": "as recorded"} for name in labkit.claims("pipeliner_race").claims
    }
    claims["guarded_repeats_are_identical"]["verdict"] = guard
    result = {"claims": claims, "metrics": {"runs": variants.as_json(runs)}, "verdict": {"cause": "as recorded"}}
    return Record(Path("it"), result)


def test_a_records_claims_on_runs_are_judged_by_its_runs_and_the_others_as_recorded(texts):
    claims = evidence.judged_again(kept_as(seen(RACING)), texts).result["claims"]
    assert claims["repeats_differ"]["because"] == "all 19 repeats differ from the first run"
    assert claims["guard_costs_nothing"]["because"] == "as recorded"
    assert evidence.judged_again(None, texts) is None


def test_the_answer_follows_the_runs(texts):
    def said(racing, guard="confirmed"):
        return evidence.answer(kept_as(seen(racing), guard), texts)

    assert said({}).startswith("Not shown: all 20 runs")
    assert said(RACING).startswith("All 19 repeats differ from the first run. The differences appear only where")
    assert "allow 6 of 6 explanations, of which that copy is the narrowest" in said(RACING)
    assert "does not suffice" not in said(RACING)
    assert "stored by another address" in said(RACING - {ANOTHER_STORE})
    assert "some variants have such a copy" in said(RACING - {"2 stages"})
    assert "repeats of the guarded kernel are alike" in said(RACING)
    assert "guarded" not in said(RACING, "refuted")
    unlike = said(RACING | {"1 stage", "32 tokens, 4 stages", "one reader, 4 stages"})
    assert "leave: none of these" in unlike
    assert "appear only where" not in unlike


def test_the_picture_of_runs_counts_repeats_and_not_the_first_run():
    _, axes = plots.figure()
    evidence.draw_runs(axes, {"a": SAME, "b": DIFFER})
    assert [text.get_text() for text in axes.texts] == ["0 of 19", "19 of 19"]
    assert "what its products and a float32 sum may be off" in axes.get_xlabel()


def test_runs_come_back_from_a_record_as_they_were():
    import json

    kept = {"a": SAME, "b": DIFFER}
    again = variants.from_json(json.loads(json.dumps(variants.as_json(kept))))
    assert {name: variants.as_json({name: one}) for name, one in again.items()} == {
        name: variants.as_json({name: replace(one, rms=list(one.rms))}) for name, one in kept.items()
    }


@pytest.mark.gpu
def test_repeats_differ_where_the_text_says_so_and_the_guard_ends_it(texts):
    if "H200" not in torch.cuda.get_device_name() and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the texts are those of compute capability 9.0")
    for name in (AS_IT_WAS, GUARDED, "8 streams, 2 stages", "8 streams, guarded, 2 stages"):
        found = variants.observe(VARIANTS[name], 16384, K, 0, 20, "cuda")
        assert (found.differ > 0) == bool(texts[name].overwrites), name
