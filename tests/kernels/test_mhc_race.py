"""The race that a compiler made of the projection: compiled texts, what is read from them, and what runs give."""

from dataclasses import replace

import pytest
import torch

import labkit
from kernels.mhc.race import emitted, evidence, variants
from kernels.mhc.race.variants import ANOTHER_STORE, AS_IT_WAS, VARIANTS, Seen

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
DIFFER = Seen(20, 20, 0.2, 1e-2, (2e-3, 2.1e-3))


def seen(racing):
    return {name: DIFFER if name in racing else SAME for name in VARIANTS}


def test_the_cause_is_named_where_runs_are_as_the_text_says_and_not_where_they_are_not(texts):
    found = evidence.weigh(texts, seen(RACING))
    assert found.cause == evidence.CAUSE
    assert found.rivals == len(evidence.HYPOTHESES) - 1
    assert evidence.weigh(texts, seen(RACING - {ANOTHER_STORE})).cause == evidence.CAUSE  # they agree on that variant
    assert evidence.weigh(texts, seen({AS_IT_WAS, "one reader, 4 stages"})).cause == "none of these"
    assert evidence.weigh(texts, seen({})) is None
    piped = {name for name, variant in VARIANTS.items() if variant.stages > 1}
    assert evidence.weigh(texts, seen(piped)).cause == "any pipeline of two stages or more"


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


FAR, OFF = replace(DIFFER, rms=(2e-3, 5e-3)), replace(SAME, error=2.0)
OPERATOR = {"bfloat16": replace(SAME, error=0.3, bound=1.0)}


@pytest.mark.parametrize(
    ("claim", "runs", "operator", "slower", "wanted", "phrase"),
    [
        ("repeats_differ", seen(RACING), OPERATOR, 1.0, "confirmed", "20 of 20 runs differ"),
        ("repeats_differ", seen({}), OPERATOR, 1.0, "refuted", "all 20 runs gave the same bits"),
        ("beyond_rounding", seen(RACING), OPERATOR, 1.0, "confirmed", "2.0e-01 off, where"),
        ("beyond_rounding", seen({}), OPERATOR, 1.0, "refuted", "no element is more than 1.0e-04 off"),
        ("tolerance_passes", seen(RACING), OPERATOR, 1.0, "confirmed", "2.10e-03 over the runs, and 3.9e-03"),
        ("tolerance_passes", seen({}) | {AS_IT_WAS: FAR}, OPERATOR, 1.0, "refuted", "reaches 5.00e-03"),
        ("text_predicts_the_runs", seen(RACING), OPERATOR, 1.0, "confirmed", "5 of 14 variants differ"),
        ("text_predicts_the_runs", seen({AS_IT_WAS}), OPERATOR, 1.0, "refuted", "all alike in 2 stages"),
        ("text_predicts_the_runs", seen({}), OPERATOR, 1.0, "refuted", "all alike in 64 tokens"),
        ("text_predicts_the_runs", seen(RACING | {"1 stage"}), OPERATOR, 1.0, "refuted", "they differ in 1 stage"),
        ("only_where_the_text_has_it", seen({AS_IT_WAS}), OPERATOR, 1.0, "confirmed", "among the 5 whose"),
        ("only_where_the_text_has_it", seen({"1 stage"}), OPERATOR, 1.0, "refuted", "such a copy in 1 stage"),
        ("only_where_the_text_has_it", seen({}), OPERATOR, 1.0, "undecidable", "no repeats differ"),
        ("guarded_repeats_are_identical", seen(RACING), OPERATOR, 1.0, "confirmed", "the same bits, and within"),
        ("guarded_repeats_are_identical", seen(RACING), {"float16": DIFFER}, 1.0, "refuted", "not so in float16"),
        ("guarded_repeats_are_identical", seen(RACING), {"float16": OFF}, 1.0, "refuted", "0 of 20 runs differ, 2 of"),
        ("guard_costs_nothing", seen(RACING), OPERATOR, 1.02, "confirmed", "1.020 times as long, and up to"),
        ("guard_costs_nothing", seen(RACING), OPERATOR, 1.2, "refuted", "1.200 times as long, more than"),
    ],
)  # fmt: skip
def test_runs_flip_verdicts_and_reasons(texts, claim, runs, operator, slower, wanted, phrase):
    found, why = verdict({claim: evidence.of_runs(texts, runs, operator, slower)[claim]})
    assert (found, phrase in why) == (wanted, True), why


def test_the_answer_follows_the_runs(texts):
    def said(racing):
        runs = seen(racing)
        ledger = labkit.claims("pipeliner_race")
        for claim, one in evidence.of_runs(texts, runs, OPERATOR, 1.0).items():
            ledger.settle(claim, **one)
        weighing = evidence.weigh(texts, runs)
        return evidence.answer(
            {
                "claims": {name: {"verdict": one.verdict} for name, one in ledger.settled.items()},
                "metrics": {"runs": variants.as_json(runs)},
                "verdict": {"cause": weighing.cause if weighing else "none"},
            }
        )

    assert said({}).startswith("Not shown: all 20 runs")
    assert f"It takes {evidence.CAUSE}" in said(RACING)
    assert "does not suffice" not in said(RACING)
    assert "stored by another address" in said(RACING - {ANOTHER_STORE})
    assert "some variants have such a copy" in said(RACING - {"2 stages"})
    assert "none of these" in said(RACING | {"1 stage", "one reader, 4 stages"})


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
