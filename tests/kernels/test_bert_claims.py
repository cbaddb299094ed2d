"""What the BERT notebook concludes: contrasts of trainings, the truth of every claim, the hidden difference."""

import csv
import functools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

import labkit
from kernels.bert import ablation, blind, claims, experiments, inputs, training
from kernels.bert.ablation import BETTER, DIFFERENCES, MISSING, OPEN, SAME, WORSE, Trainings
from kernels.bert.experiments import EpsilonEffect, Norms
from kernels.bert.inputs import Inputs
from kernels.bert.model import AUTHOR_FIX, BERT, REPORT, Config, MaskedLM, preset
from kernels.bert.reported import LOSSES, OWN, distances
from labkit.session.catalogue import ROOT
from labkit.session.record import stale
from whywrong.errors import UsageError

PLAN = ablation.plan()
SMALL = Config(vocabulary=97, hidden=24, layers=2, heads=4, inner=40, positions=41)


def row(name, seed, loss, **changes):
    made_by = {"sources": {"training": "x"}, "device": "cuda", "gpu": "G", "torch": "2"}
    about = {
        "curve": [9.0, 5.0],
        "tokens": 76_800_000,
        "preset": name,
        "seed": seed,
        "input": {"positions": 0.1 * (1 + seed)},
        "validation_loss": loss,
        "loss_all_steps": loss + 1.0,
        "key": f"{name}{seed}",
    }
    said = {"predictions": [{"rank": 7, "top": [["a", 1.0, 0.5]], "text": "t", "right": ["b", 0.1, 0.2]}] * 21}
    return PLAN.run | made_by | about | said | changes


def trainings(losses=None, scatter=0.001, seeds=6, default=5.0, late=()):
    """Rows of the plan's first part: each configuration's loss, and noise of its own; a spread that seeds share. Those
    in `late` stay on the plateau."""
    rng = np.random.default_rng(0)
    rows = [
        row(
            name,
            seed,
            (losses or {}).get(name, default) + 0.3 * seed + scatter * rng.standard_normal(),
            **({"curve": [9.0, 6.0]} if name in late else {}),
        )
        for name in PLAN.first["presets"]
        for seed in range(seeds)
    ]
    return Trainings.of(rows, PLAN)


@pytest.mark.parametrize(
    ("curve", "left"),
    [([9.0, 5.0, 4.0], 40.0), ([9.0, 6.0, 5.4], 50.0), ([6.0, 5.5], math.inf), ([math.nan, math.nan], math.inf)],
)
def test_when_a_training_leaves_the_plateau(curve, left):
    """Of 5 steps: two stretches of 2, and one of 1; millions of tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ablation, "STRETCHES", 2)
        assert ablation.plateau_left({"curve": curve, "tokens": 5e7, "steps": 5}) == left


def test_a_configuration_is_stalled_where_one_seed_is_late():
    t = trainings(late=["bert"])
    assert t.stalled(("bert", "bert-eps"), ("option_b", "report")) == ["bert"]
    one = [row("bert", 1, 5.0, curve=[9.0] * 30 + [4.0] * 21), row("bert", 2, 5.0, curve=[9.0] * 20 + [4.0] * 31)]
    assert Trainings.of(one, PLAN).stalled(("bert", "bert")) == ["bert"]
    assert Trainings.of(one[1:], PLAN).stalled(("bert", "bert")) == []


def test_a_contrast_is_students_interval_paired_by_seed():
    t = trainings({"option_b": 4.8}, scatter=0.01)
    found = t.gains["option_b", "report"]
    losses = {(r["preset"], r["seed"]): r["validation_loss"] for r in t.rows}
    gains = [losses["report", seed] - losses["option_b", seed] for seed in range(6)]
    assert found.gains == pytest.approx(gains)
    low, high = stats.t.interval(1 - 0.05 / len(PLAN.contrasts), 5, np.mean(gains), stats.sem(gains))
    assert (found.low, found.high) == pytest.approx((low, high))
    assert found.outcome == BETTER
    assert t.gains["option_b_post", "hugging_face"].outcome == SAME


@pytest.mark.parametrize(
    ("loss", "scatter", "seeds", "outcome"),
    [
        (4.8, 0.001, 6, BETTER),
        (5.2, 0.001, 6, WORSE),
        (4.99, 0.001, 6, SAME),
        (4.97, 0.3, 6, OPEN),
        (4.8, 0.001, 2, MISSING),
    ],
)
def test_outcomes_follow_interval_and_margin(loss, scatter, seeds, outcome):
    t = trainings({"option_b": loss}, scatter, seeds)
    assert t.gains["option_b", "report"].outcome == outcome
    assert str(t.gains["option_b", "report"])


def test_an_interval_that_holds_both_0_and_the_margin_is_open():
    of = functools.partial(ablation.Contrast, ("a", "b"), (0.1,), margin=0.05)
    assert [of(low, high).outcome for low, high in ((-0.001, 0.06), (-0.06, 0.001), (-0.06, 0.06))] == [OPEN] * 3
    assert (of(0.001, 0.06).outcome, of(-0.06, -0.001).outcome, of(-0.04, 0.04).outcome) == (BETTER, WORSE, SAME)
    assert of(0.001, 0.04).outcome == SAME


def test_a_gain_is_shown_excluded_or_open_and_so_is_equality():
    of = functools.partial(ablation.Contrast, ("a", "b"), (0.1,), margin=0.05)
    ends = [(0.01, 0.2), (0.01, 0.04), (-0.2, 0.04), (-0.2, -0.1), (-0.01, 0.06)]
    assert [of(*both).gains_enough for both in ends] == [True, False, False, False, None]
    assert [of(*both).equal for both in ends] == [None, True, None, False, None]
    assert ablation.Contrast(("a", "b"), ()).gains_enough is ablation.Contrast(("a", "b"), ()).interval is None
    endless = ablation.Contrast(("a", "b"), (math.inf,), math.nan, math.nan, 0.05)
    assert endless.gains_enough is endless.equal is None


def test_under_the_null_a_family_has_a_false_alarm_in_five_of_a_hundred_at_most():
    """100 families of equal configurations: alarms are below 5% plus four standard deviations of their count."""
    rng = np.random.default_rng(1)
    alarms = 0
    for _ in range(100):
        rows = [row(name, seed, rng.standard_normal()) for name in PLAN.first["presets"] for seed in range(3)]
        found = ablation.contrasts(rows, PLAN)
        alarms += any(one.outcome in (BETTER, WORSE) for one in found.values())
    assert alarms <= 100 * 0.05 + 4 * math.sqrt(100 * 0.05 * 0.95)


def test_rows_of_other_sizes_code_or_devices_are_never_held_against_each_other():
    rows = [row("report", seed, 5.0) for seed in range(3)]
    others = [
        row("option_b", 0, 1.0, **change)
        for change in (
            {"hidden": 8},
            {"device": "cpu"},
            {"sources": {"training": "y"}},
            {"gpu": "H"},
            {"torch": "3"},
        )
    ]
    assert ablation.current([*others, *rows], PLAN) == rows
    pilot = [row("report", seed, 5.0) for seed in PLAN.pilot["seeds"]]
    assert len(Trainings.of([*rows, *pilot], PLAN).rows) == 3


def test_the_plan_is_of_known_presets_and_pilot_seeds_are_not_used_again():
    assert {name for pair in PLAN.contrasts for name in pair} <= set(PLAN.first["presets"])
    assert not set(PLAN.pilot["seeds"]) & {*PLAN.first["seeds"], *PLAN.then["seeds"]}
    assert not set(PLAN.first["presets"]) & set(PLAN.then["presets"])
    runs = [run for part in ablation.PARTS for run in PLAN.runs(part, "cpu")]
    assert len({training.key(run) for run in runs}) == len(runs)
    assert PLAN.run["steps"] * PLAN.run["batch"] * PLAN.run["length"] == pytest.approx(18_750 * 32 * 128, rel=1e-3)
    with pytest.raises(UsageError, match=r"parts: expected some of pilot, first, then.*got 'last'"):
        PLAN.runs("last", "cpu")


def test_the_rows_on_record_are_of_the_training_code_as_it_is_or_named_stale():
    path = ablation.RECORDED_ROWS.relative_to(ROOT).as_posix()
    now = [one["sources"]["training"] == training.code() for one in training.rows(ablation.RECORDED_ROWS)]
    assert all(now) == (path not in stale())


def test_of_the_record_no_training_is_near_the_line_between_late_and_early():
    """So that no verdict depends on where in the training that line is sampled, nor on the loss that counts as left."""
    t = Trainings.of(training.rows(ablation.RECORDED_ROWS), PLAN)
    ends = {name: [ablation.plateau_left(one) for one in t.of_preset(name)] for pair in PLAN.contrasts for name in pair}
    late = set(t.stalled(*PLAN.contrasts))
    assert max(max(ends[name]) for name in ends if name not in late) < 0.3 * 76.8
    assert min(max(ends[name]) for name in late) > 0.55 * 76.8


def test_what_earlier_trainings_decided_those_on_record_do_not_contradict():
    """162 trainings made three times; only contrasts of which no model stalled give verdicts, and of these one alone
    was ever open in one round and decided in another."""
    lines = (ROOT / "data" / "results" / "bert_ablation_earlier.csv").read_text().splitlines()[1:]
    before = [r | {name: float(r[name]) for name in ("made", "seed", "validation_loss")} for r in csv.DictReader(lines)]
    rows = training.rows(ablation.RECORDED_ROWS)
    now = Trainings.of(rows, PLAN)
    judged = [pair for pair in PLAN.contrasts if not now.stalled(pair)]
    assert len(judged) >= 12
    changed, highest = set(), []
    for made in (1.0, 2.0):
        one = [r for r in before if r["made"] == made]
        assert {(r["preset"], r["seed"]) for r in one} == {(r["preset"], r["seed"]) for r in rows}
        found = ablation.contrasts(one, PLAN)
        changed |= {pair for pair in judged if found[pair].outcome != now.gains[pair].outcome}
        assert {found[pair].outcome for pair in changed} <= {ablation.OPEN}
        highest.append(f"{found['report+activation', 'report'].high:.3f}")
    assert changed == {("report+activation", "report")}
    text = " ".join((ROOT / "data" / "claims" / "bert_embeddings.yaml").read_text().split())
    assert f"with up to {' and '.join(highest)} nats of held-out loss" in text


def test_rows_are_kept_once_and_in_order(tmp_path):
    path = tmp_path / "kept.jsonl"
    ablation.keep([row("report", 1, 5.0), row("bert", 0, 5.0)], path)
    ablation.keep([row("report", 0, 5.0), row("bert", 0, 5.0)], path)
    assert [(r["preset"], r["seed"]) for r in training.rows(path)] == [("bert", 0), ("report", 0), ("report", 1)]


# The truth of each claim: an input on which it is confirmed, and one on which it is refuted

LOW, HIGH = 4.8, 5.2
NOTHING, WIDE = trainings(seeds=0), trainings(scatter=0.3)
SINGLES = {f"report+{name}": 4.9 for name in DIFFERENCES}
EXACT = {1e-5: 6e-8, 1e-12: 6e-8}


def settled(function, *given):
    ledger = labkit.claims("bert_embeddings")
    function(ledger, *given)
    return ledger.settled


def by_trainings(t, rounding=EXACT):
    return settled(claims.settle_trainings, t, {"bert": 1e-15}, rounding)


BY_TRAINING = {
    "token_type_needed": [
        ({"report+token_types": LOW}, "confirmed"),
        ({}, "refuted"),
        ({"report+token_types": HIGH}, "refuted"),
    ],
    "attention_dropout_matters": [
        ({"report+attention_dropout": LOW}, "confirmed"),
        ({"report+attention_dropout": HIGH}, "refuted"),
    ],
    "scaling_wrong": [({"report+scaling": LOW}, "confirmed"), ({}, "refuted"), ({"report+scaling": HIGH}, "refuted")],
    "eps_matters": [({"report+eps": LOW}, "confirmed"), ({}, "refuted")],
    "gelu_matters": [
        ({"report+activation": 4.7}, "confirmed"),
        ({"report+activation": 5.3}, "confirmed"),
        ({"report+activation": 4.93}, "refuted"),
    ],
    "embedding_ln_most_important": [
        ({"report+embedding_norm": LOW}, "confirmed"),
        ({}, "refuted"),
        ({"report+embedding_norm": LOW, "report+eps": LOW}, "refuted"),
        ({"report+embedding_norm": LOW, "report+norm": 4.7}, "refuted"),
    ],
    "differences_are_the_cause": [
        (SINGLES | {"option_b": 4.7}, "confirmed"),
        (SINGLES | {"option_b": 4.9}, "refuted"),
        ({"option_b": LOW, "report+norm": LOW}, "refuted"),
        ({"option_b": HIGH}, "refuted"),
    ],
    "post_ln_not_the_cause": [
        ({"hugging_face": LOW, "report+norm": 4.97}, "confirmed"),
        ({"hugging_face": LOW, "report+norm": 4.85}, "refuted"),
        ({"hugging_face": HIGH, "report+norm": LOW}, "undecidable"),
    ],
    "option_b_matches_hf": [
        ({}, "confirmed"),
        ({"option_b": HIGH, "option_b_post": HIGH}, "refuted"),
        ({"option_b": LOW, "option_b_post": HIGH}, "refuted"),
        ({"option_b": HIGH}, "undecidable"),
    ],
}


@pytest.mark.long(cases=3)
@pytest.mark.parametrize(
    ("claim", "losses", "verdict"), [(claim, *case) for claim, cases in BY_TRAINING.items() for case in cases]
)
def test_a_claim_on_trainings_comes_out_as_their_losses_say(claim, losses, verdict):
    assert by_trainings(trainings(losses))[claim].verdict == verdict


@pytest.mark.long(cases=1)
@pytest.mark.parametrize("claim", BY_TRAINING)
def test_without_rows_it_is_untestable_and_with_noise_or_a_plateau_undecidable(claim):
    assert by_trainings(NOTHING)[claim].verdict == "untestable"
    assert by_trainings(trainings(seeds=2))[claim].verdict == "untestable"
    assert by_trainings(WIDE)[claim].verdict == "undecidable"
    for losses, _ in BY_TRAINING[claim]:
        late = by_trainings(trainings(losses, late=PLAN.first["presets"]))[claim]
        assert late.verdict == "undecidable"
        assert late.measured["stalled"]


def test_a_model_that_is_late_withholds_the_verdicts_that_need_it_and_no_other():
    losses = {"report+scaling": LOW, "hugging_face": LOW, "report+norm": 4.97}
    found = by_trainings(trainings(losses, late=["hugging_face", "bert"]))
    assert found["scaling_wrong"].verdict == "confirmed"
    assert found["post_ln_not_the_cause"].verdict == found["option_b_matches_hf"].verdict == "undecidable"


def test_an_epsilon_that_rounds_worse_is_not_cleared_by_trainings_alone():
    assert by_trainings(trainings(), {1e-5: 1e-8, 1e-12: 1e-6})["eps_matters"].verdict == "undecidable"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_training_that_diverged_decides_nothing():
    rows = [
        *trainings().rows,
        row("report+scaling", 6, math.inf),
        row("report+norm", 6, math.inf),
        row("report", 6, 5.0),
    ]
    found = by_trainings(Trainings.of(rows, PLAN))
    assert found["scaling_wrong"].measured["stalled"] == ["report+scaling"]
    undecided = ("scaling_wrong", "post_ln_not_the_cause", "differences_are_the_cause", "embedding_ln_most_important")
    assert {found[claim].verdict for claim in undecided} == {"undecidable"}


def test_what_is_measured_is_the_interval_of_each_contrast():
    t = trainings({"report+eps": 4.7})
    for claim in BY_TRAINING:
        for pair, interval in by_trainings(t)[claim].measured["gains"].items():
            assert interval == t.gains[tuple(pair.split(" over "))].interval


def test_the_verdicts_on_record():
    """Six claims that nothing could refute, and three that the trainings of BERT kept open."""
    found = by_trainings(Trainings.of(training.rows(ablation.RECORDED_ROWS), PLAN))
    refuted = {claim for claim, one in found.items() if one.verdict == "refuted"}
    assert refuted == {"token_type_needed", "attention_dropout_matters", "eps_matters", "gelu_matters"}
    assert {claim for claim, one in found.items() if one.verdict == "confirmed"} == {"scaling_wrong"}
    assert found["embedding_ln_most_important"].measured["open"] == ["scaling"]
    assert found["option_b_matches_hf"].measured["stalled"] == ["option_b", "hugging_face", "option_b_post"]


def sizes(own=0.058, vaswani=(0.74, 0.86), theirs=1.0):
    stds = {"report": (own, own), "vaswani": vaswani, "Hugging Face": (theirs, theirs)}
    return {
        name: {n: Inputs(std, 1.0, 0.0, 0.0) for n, std in zip((1, 15), both, strict=True)}
        for name, both in stds.items()
    }


def lower(**changes):
    losses = LOSSES | {OWN: LOSSES[OWN] | changes}
    return settled(claims.settle_losses, losses, {"all steps": 8.0, "last tenth": 7.0})


def norms(*values):
    return [(Norms(a, a, a), Norms(1.0, 1.0, 1.0), 1.0) for a in values]


def by_gradients(**pairs):
    return settled(claims.settle_gradients, pairs)


def effects(size):
    return settled(claims.settle_epsilon, {"report": EpsilonEffect(size, size, size)})


WITHOUT_TRAINING = {
    "own_input_std": [
        (settled(claims.settle_input_sizes, sizes(), 0.058, 0.5, 1.0), "confirmed"),
        (settled(claims.settle_input_sizes, sizes(), 0.07, 0.5, 1.0), "refuted"),
    ],
    "vaswani_input_std": [
        (settled(claims.settle_input_sizes, sizes(vaswani=(0.54, 0.56)), 0.058, 0.5, 1.0), "confirmed"),
        (settled(claims.settle_input_sizes, sizes(), 0.058, 0.55, 1.0), "refuted"),
        (settled(claims.settle_input_sizes, sizes(vaswani=(0.55, 0.77)), 0.058, 0.5, 1.0), "undecidable"),
    ],
    "hf_input_std": [
        (settled(claims.settle_input_sizes, sizes(), 0.058, 0.5, 0.98), "confirmed"),
        (settled(claims.settle_input_sizes, sizes(theirs=0.8), 0.058, 0.5, 0.98), "refuted"),
        (settled(claims.settle_input_sizes, sizes(), 0.058, 0.5, 0.6), "undecidable"),
        (settled(claims.settle_input_sizes, sizes(), 0.058, 0.5, None), "undecidable"),
    ],
    "token_too_small": [
        (settled(claims.settle_scales, 0.02, 0.54, 27.7, (0.88, 0.71)), "confirmed"),
        (settled(claims.settle_scales, 0.4, 0.54, 27.7, (0.88, 0.71)), "refuted"),
        (settled(claims.settle_scales, 0.02, 0.54, 2.0, (0.88, 0.71)), "refuted"),
    ],
    "position_too_weak": [
        (settled(claims.settle_scales, 0.02, 0.54, 27.7, (0.4, 0.2)), "confirmed"),
        (settled(claims.settle_scales, 0.02, 0.54, 27.7, (0.88, 0.71)), "refuted"),
        (settled(claims.settle_scales, 0.02, 0.54, 27.7, (0.88, 0.3)), "undecidable"),
    ],
    "token_range": [
        (settled(claims.settle_token_range, torch.linspace(-0.03, 0.03, 9)), "confirmed"),
        (settled(claims.settle_token_range, torch.linspace(-0.3, 0.3, 9)), "refuted"),
        (settled(claims.settle_token_range, torch.tensor([0.01] * 99 + [0.1])), "undecidable"),
    ],
    "loss_computed_right": [
        (settled(claims.settle_hypotheses, 0.2, [{"validation_loss": 3.9, "loss_last": 3.8}]), "confirmed"),
        (settled(claims.settle_hypotheses, 2.0, [{"validation_loss": 3.9, "loss_last": 3.8}]), "refuted"),
    ],
    "wrong_patterns": [
        (settled(claims.settle_hypotheses, 0.2, [{"validation_loss": 3.9, "loss_last": 3.8}]), "untestable"),
    ],
    "loss_is_lower": [
        (lower(**{"epoch 3": 4.0, "all steps": 4.0}), "confirmed"),
        (lower(), "refuted"),
        (lower(**{"epoch 3": 4.0}), "undecidable"),
    ],
    "logits_comparable": [
        (settled(claims.settle_logits, [(-9, -5.0, 0.1), (9, 5.0, 0.6)], {"a": (1.0, 0.2)}), "confirmed"),
        (settled(claims.settle_logits, [(-9, -5.0, 0.1), (9, 5.0, 0.1)], {"a": (1.0, 0.2)}), "refuted"),
    ],
    "relu_wrong_for_vaswani": [
        (settled(claims.settle_formula, {"relu": 0.3, "gelu": 0.0}), "confirmed"),
        (settled(claims.settle_formula, {"relu": 0.0, "gelu": 0.3}), "refuted"),
    ],
    "seven_differences_complete": [
        (settled(claims.settle_parameters, {"types": 2, "head": 5}, {"types": 0, "head": 5}), "confirmed"),
        (settled(claims.settle_parameters, {"final norm": 0, "types": 2}, {"final norm": 2, "types": 0}), "confirmed"),
        (settled(claims.settle_parameters, {"types": 2, "head": 5}, {"types": 0, "head": 0}), "refuted"),
    ],
    "eps_changes_gradients": [(effects(1e-3), "confirmed"), (effects(1e-13), "refuted")],
    "small_std_weakens_input_gradients": [
        (by_gradients(m=norms(0.5, 0.9)), "confirmed"),
        (by_gradients(m=norms(5.0, 9.0), n=norms(0.5, 1.1)), "refuted"),
        (by_gradients(m=norms(0.5), n=norms(2.0)), "undecidable"),
    ],
    "small_std_weakens_embedding_gradients": [
        (by_gradients(m=norms(0.5), n=norms(0.9)), "confirmed"),
        (by_gradients(m=norms(1.0), n=norms(1.1)), "refuted"),
        (by_gradients(m=[(Norms(1.0, 1.0, 0.5), Norms(1.0, 1.0, 1.0), 1.0)]), "undecidable"),
    ],
}


@pytest.mark.parametrize("claim", WITHOUT_TRAINING)
def test_each_claim_can_come_out_either_way(claim):
    for found, verdict in WITHOUT_TRAINING[claim]:
        assert found[claim].verdict == verdict
    wanted = {"untestable"} if labkit.claims("bert_embeddings").claims[claim].only else {"confirmed", "refuted"}
    assert wanted <= {verdict for _, verdict in WITHOUT_TRAINING[claim]}


def test_every_claim_of_the_file_is_settled_here_and_each_verdict_with_a_text_is_reached():
    ledger = labkit.claims("bert_embeddings")
    assert {*BY_TRAINING, *WITHOUT_TRAINING} == set(ledger.claims)
    for claim, cases in WITHOUT_TRAINING.items():
        assert {verdict for _, verdict in cases} == set(ledger.claims[claim].texts)
    for claim, cases in BY_TRAINING.items():
        assert {"undecidable", "untestable", *(verdict for _, verdict in cases)} == set(ledger.claims[claim].texts)


def test_the_right_word_is_further_below_the_likeliest_in_the_own_model():
    by_model = {model: (difference, most) for model, _, _, difference, most in distances()}
    assert by_model["Hugging Face"] == (pytest.approx(3.9169), pytest.approx(math.exp(-3.9169)))
    assert by_model[OWN][0] == pytest.approx(7.233)


# The experiments themselves


def test_inputs_are_what_the_formulas_give():
    """Scaled tokens have variance 0.02^2 H; the shares of the parts are those of their variances."""
    torch.manual_seed(0)
    ids = torch.randint(5, 2000, (2, 40))
    config = Config(2000, 64, 1, 4, positions=64)
    found = inputs.measure(MaskedLM(config, AUTHOR_FIX), ids)
    tokens, places = 0.02**2 * 64, float(experiments.scales(MaskedLM(config, AUTHOR_FIX), 40)["positions"]) ** 2
    assert found.std == pytest.approx(math.sqrt(tokens + places), rel=0.05)
    assert found.tokens == pytest.approx(tokens / (tokens + places), rel=0.05)
    assert found.types == 0.0
    assert inputs.measure(MaskedLM(config, BERT), ids).std == pytest.approx(1.0, rel=1e-5)


def test_what_all_positions_have_in_common_is_not_counted_as_varying():
    model = MaskedLM(Config(2000, 64, 1, 4, positions=64), AUTHOR_FIX)
    one, many = (inputs.measure(model, torch.arange(5, 5 + length)[None]) for length in (1, 40))
    assert experiments.varying_share(model, one, 1) == 0.0
    assert 0.0 < experiments.varying_share(model, many, 40) < many.positions / (many.positions + many.tokens)


def test_inputs_of_hugging_faces_model_are_those_of_ours_with_its_weights():
    from kernels.bert import golden

    torch.manual_seed(0)
    theirs = golden.hugging_face(SMALL)
    ours = golden.load(MaskedLM(SMALL), golden.from_hugging_face(golden.parameters(theirs), SMALL))
    ids = torch.randint(5, 97, (2, 9))
    assert inputs.measure(theirs, ids) == inputs.measure(ours, ids)
    there = experiments.input_by_length(theirs, (3, 9), 0)
    assert there == experiments.input_by_length(ours, (3, 9), 0)


def test_gradients_at_the_token_table_are_of_both_ways():
    torch.manual_seed(0)
    model = MaskedLM(SMALL, REPORT).double().eval()
    ids = torch.randint(5, 97, (2, 9))
    labels = experiments.masked_labels(ids, 0.3, 0)
    found = experiments.gradient_norms(model, ids, labels)
    assert found.tokens == pytest.approx(
        float(experiments.all_gradients(model, ids, labels)["embeddings.tokens"].norm())
    )
    assert 0.0 < found.tokens_by_input < found.tokens


def test_an_epsilon_of_the_same_size_changes_nothing_and_a_larger_one_more():
    torch.manual_seed(0)
    model = MaskedLM(SMALL, REPORT).double().eval()
    ids = torch.randint(5, 97, (2, 9))
    labels = experiments.masked_labels(ids, 0.3, 0)
    none, some, more = (experiments.epsilon_effect(model, ids, labels, eps) for eps in (1e-12, 1e-5, 1e-3))
    assert (none.logits, none.gradients) == (0.0, 0.0)
    assert 0.0 < some.gradients < more.gradients
    assert 0.0 < some.logits < more.logits


def test_token_types_are_redundant_where_they_can_be_added_to_another_table_and_only_there():
    torch.manual_seed(0)
    ids = torch.randint(5, 97, (2, 9))
    for name, into in (("bert", "positions"), ("report+token_types", "tokens")):
        assert experiments.types_folded(MaskedLM(SMALL, preset(name)).eval(), ids, into) < 1e-12
    scaled = replace(REPORT, token_types=True, scale_tokens=True)  # where the table is scaled, the sum is another
    assert experiments.types_folded(MaskedLM(SMALL, scaled).eval(), ids, "tokens") > 1e-4


def test_a_difference_that_acts_in_training_alone_contributes_nothing_and_others_do():
    torch.manual_seed(0)
    model = MaskedLM(SMALL).eval()
    ids = torch.randint(5, 97, (2, 9))
    others = {name: preset(f"bert-{name}") for name in ("initial", "attention_dropout", "activation", "head_transform")}
    found = experiments.step_errors(model, others, ids, experiments.masked_labels(ids, 0.3, 0))
    assert not any(found["initial"].values())
    assert not any(found["attention_dropout"].values())
    assert found["activation"]["layers.0.inner"] == 0.0 < found["activation"]["layers.0.active"]
    assert found["head_transform"]["layers.1.output"] == 0.0 < found["head_transform"]["logits"]


@pytest.mark.long
def test_every_hidden_difference_is_named_or_left_with_those_that_it_cannot_be_told_from():
    for name, switches in blind.HYPOTHESES.items():
        left = blind.identify(switches).left
        assert left == (["none", "initial"] if name in ("none", "initial") else [name])
    for switches in blind.OUTSIDE.values():
        assert blind.identify(switches).cause == "none of these"


def test_a_blind_draw_is_from_outside_the_list_one_time_in_five():
    sampled = [blind.hidden("blind", seed)[0] for seed in range(400)]
    outside = sum(name in blind.OUTSIDE for name in sampled)
    assert abs(outside - 80) < 4 * math.sqrt(400 * 0.2 * 0.8)
    assert set(sampled) == {*blind.HYPOTHESES, *blind.OUTSIDE}
    assert blind.hidden("norm", 3) == ("norm", preset("bert-norm"))


def test_each_step_in_words_is_one_of_hugging_faces():
    from kernels.bert import golden

    torch.manual_seed(0)
    ids = torch.randint(5, 97, (2, 9))
    trace = golden.observed(MaskedLM(SMALL), ids, experiments.masked_labels(ids, 0.3, 0))
    words = experiments.step_words(SMALL)
    assert all(name in trace for name in words)
    assert len(set(words.values())) == len(words) == 16
