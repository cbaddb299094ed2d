"""What is measured for each claim of notebook bert_embeddings, and its truth. The words are in data/claims."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kernels.bert.ablation import DIFFERENCES, Pair, Trainings, corrected
from kernels.bert.experiments import EpsilonEffect, Norms, scales, trained_input_std
from kernels.bert.inputs import Inputs, measure
from kernels.bert.model import MaskedLM
from kernels.bert.reported import FINAL, LOSSES, OWN, REPAIRED, THEIRS, distances
from labkit import Ledger

ABOUT = 0.1
"""What "about" allows, relative."""
SAME_SCALE = 2.0
"""Two standard deviations are on one scale when neither is more than this many times the other."""
STABLE = 2.0
"""A LayerNorm is as stable as another when its float32 rounding error is at most this many times the other's."""
FLOAT64 = 1e6 * 2.0**-53
"""A relative difference that a million roundings in float64 explain."""
LISTED = ("positions", "types", "embedding norm", "final norm")
"""Parts of the parameters that one of the seven differences explains; the final LayerNorm comes with Pre-LN."""
RIVALS: dict[str, Pair] = {name: (f"report+{DIFFERENCES[0]}", f"report+{name}") for name in DIFFERENCES[1:]}
"""The embedding LayerNorm corrected, over each other difference corrected."""
TOGETHER: dict[str, Pair] = {name: ("option_b", f"report+{name}") for name in DIFFERENCES}
"""All differences but Pre-LN corrected, over each difference corrected alone."""


def agreement(truths: Sequence[bool | None]) -> bool | None:
    """What several readings of a claim agree on; None where they do not."""
    return truths[0] if len(set(truths)) == 1 else None


def every(truths: Sequence[bool | None]) -> bool | None:
    """Whether all parts of a claim hold: False where one does not, else None where one is not known."""
    return False if False in truths else None if None in truths else True


def about(value: float, reported: float) -> bool:
    """Whether a value is within :data:`ABOUT` of what is reported."""
    return abs(value / reported - 1.0) <= ABOUT


# The loss, logits, counts


def settle_losses(ledger: Ledger, losses: Mapping[str, Mapping[str, float]], live: Mapping[str, float]) -> None:
    """`losses`: by model and statistic, nats. `live`: of one real training, `all steps` and `last tenth`."""
    own, theirs = losses[OWN], losses[THEIRS]
    final = {name: [own[name], theirs[name]] for name in FINAL if name in own and name in theirs}
    lower = [name for name, (ours, other) in final.items() if ours < other]
    truth = agreement([ours < other for ours, other in final.values()])
    ledger.settle("loss_is_lower", truth, final=final, lower=lower, live=dict(live))


def settle_logits(
    ledger: Ledger, shifted: Sequence[tuple[float, float, float]], models: Mapping[str, tuple[float, float]]
) -> None:
    """`shifted`: of one model whose logits are moved by a constant, that constant, the right word's logit and its
    probability. `models`: of several models, the right word's logit and probability."""
    moved, logits, probabilities = zip(*shifted, strict=True)
    same = max(probabilities) - min(probabilities) <= 1e-6 * max(probabilities)
    orders = [sorted(models, key=lambda name: models[name][i], reverse=True) for i in (0, 1)]
    ledger.settle(
        "logits_comparable",
        not (same and min(logits) < 0.0 < max(logits)),
        moved=moved,
        logits=logits,
        probability=probabilities[0],
        models=len(models),
        same_order=orders[0] == orders[1],
        below={model: difference for model, _, _, difference, _ in distances()},
    )


def settle_parameters(ledger: Ledger, bert: Mapping[str, int], report: Mapping[str, int]) -> None:
    """Parameters of both models by part."""
    parts = {part: bert[part] - report[part] for part in bert if bert[part] != report[part]}
    unlisted = {part: size for part, size in parts.items() if part not in LISTED}
    total = sum(parts.values())
    ledger.settle("seven_differences_complete", not unlisted, total=total, parts=parts, unlisted=unlisted)


def settle_formula(ledger: Ledger, distance: Mapping[str, float]) -> None:
    """Relative distance of a feed-forward layer with `relu` and with `gelu` from max(0, x W1 + b1) W2 + b2."""
    ledger.settle("relu_wrong_for_vaswani", distance["gelu"] < distance["relu"], **distance)


# The size of the input


def settle_inputs(
    ledger: Ledger,
    own: MaskedLM,
    inputs: Mapping[str, Mapping[int, Inputs]],
    shares: Sequence[float],
    t: Trainings,
    sentence: torch.Tensor,
) -> None:
    """The three functions below, of the report's new model `own`; `sentence` has the ids [1, S] of the report's."""
    scale, factor = scales(own, sentence.shape[1]), own.config.hidden**0.5
    trained = trained_input_std(t.of_preset("hugging_face"))
    settle_input_sizes(ledger, inputs, measure(own, sentence).std, factor * scale["tokens"], trained)
    alone = t.gains["report+position_factor", "report"].interval
    settle_scales(ledger, scale["tokens"], scale["positions"], factor, shares, alone)
    settle_token_range(ledger, own.embeddings.tokens.detach())


def settle_input_sizes(
    ledger: Ledger, inputs: Mapping[str, Mapping[int, Inputs]], sentence: float, tokens: float, trained: float | None
) -> None:
    """`inputs`: of new models, by model and length. Standard deviations: `sentence` of the own model's input for the
    report's sentence, `tokens` of the scaled tokens alone, `trained` of Hugging Face's input after training."""
    std = {name: {length: made.std for length, made in lengths.items()} for name, lengths in inputs.items()}
    reported = {name: ledger.claims[name].reported for name in ("own_input_std", "vaswani_input_std", "hf_input_std")}
    own, vaswani, theirs = (list(std[name].values()) for name in ("report", "vaswani", "Hugging Face"))
    truth = about(sentence, reported["own_input_std"])
    far = [length for length, value in std["report"].items() if not about(value, reported["own_input_std"])]
    ledger.settle("own_input_std", truth, sentence=sentence, lengths=list(std["report"]), std=own, far=far)
    near = [about(value, reported["vaswani_input_std"]) for value in vaswani]
    alone = about(tokens, reported["vaswani_input_std"])
    ledger.settle("vaswani_input_std", agreement(near), std=vaswani, tokens=tokens, alone=alone)
    new = all(about(value, reported["hf_input_std"]) for value in theirs)
    later = trained is not None and about(trained, reported["hf_input_std"])
    ledger.settle("hf_input_std", False if not new else True if later else None, std=theirs, trained=trained)


def settle_scales(
    ledger: Ledger,
    tokens: float,
    positions: float,
    factor: float,
    shares: Sequence[float],
    alone: Sequence[float] | None = None,
) -> None:
    """Standard deviations of new token embeddings and of sinusoids as they are; `factor` is sqrt(hidden_size).
    `shares`: of the positions times 0.1 in the input's variance, as they are and without what they have in common.
    `alone`: the interval of the gain in held-out loss, in nats, where the factor 0.1 alone is corrected."""
    without = tokens / positions
    small, alike = without < 1.0 / SAME_SCALE, 1.0 / SAME_SCALE <= factor * without <= SAME_SCALE
    ratios = {"without": without, "scaled": factor * without, "factor": factor, "allowed": SAME_SCALE}
    ledger.settle("token_too_small", small and alike, as_built=10.0 * without, **ratios)
    weak = agreement([share < 0.5 for share in shares])
    ledger.settle("position_too_weak", weak, share=shares[0], varying=shares[1], ratio=0.1 / without, alone=alone)


def settle_token_range(ledger: Ledger, tokens: Any, range_of: float = 0.04) -> None:
    """`tokens`: new token embeddings [vocabulary, hidden], a tensor; whether they lie within `range_of` of 0."""
    inside, largest = float((tokens.abs() <= range_of).double().mean()), float(tokens.abs().max())
    truth = True if largest <= range_of else None if inside >= 0.95 else False
    ledger.settle("token_range", truth, inside=inside, largest=largest, stated=range_of)


def settle_hypotheses(ledger: Ledger, loss: float, trained: Sequence[Mapping[str, Any]]) -> None:
    """`loss`: the loss step's own error, times the tolerance. `trained`: rows of the report's small models."""
    ledger.settle("loss_computed_right", loss <= 1.0, error=loss)
    gaps = [row["validation_loss"] - row["loss_last"] for row in trained]
    ledger.settle("wrong_patterns", "untestable", gaps=gaps, rows=len(gaps))


# The epsilon, and gradients


def settle_epsilon(ledger: Ledger, effects: Mapping[str, EpsilonEffect]) -> None:
    """`effects`: of 1e-5 in the place of 1e-12, by preset, in float64."""
    gradients = [effect.gradients for effect in effects.values()]
    ledger.settle("eps_changes_gradients", max(gradients) > FLOAT64, gradients=gradients, rounding=FLOAT64)


def settle_gradients(ledger: Ledger, draws: Mapping[str, Sequence[tuple[Norms, Norms, float]]]) -> None:
    """`draws`: of models by name, what :func:`~kernels.bert.experiments.norms_without_and_with` gives."""
    fields = ("input", "tokens", "tokens_by_input")
    ratios = {
        field: {name: [getattr(a, field) / getattr(b, field) for a, b, _ in each] for name, each in draws.items()}
        for field in fields
    }
    ends = {field: {name: [min(r), max(r)] for name, r in by.items()} for field, by in ratios.items()}
    weaker = {field: {name: high < 1.0 for name, (_, high) in by.items()} for field, by in ends.items()}
    truth = agreement(list(weaker["input"].values()))
    ledger.settle("small_std_weakens_input_gradients", truth, ratio=ends["input"])
    both = {field: ends[field] for field in fields[1:]}
    truth = agreement([way for field in fields[1:] for way in weaker[field].values()])
    ledger.settle("small_std_weakens_embedding_gradients", truth, **both)


# What was trained


def settle_trainings(
    ledger: Ledger, t: Trainings, folded: Mapping[str, float], rounding: Mapping[float, float]
) -> None:
    """The claims on what a difference costs. `folded`: change of a log probability where a model without token types
    has their first row in another table; `rounding`: relative error of a float32 LayerNorm, by epsilon."""

    def settle(claim: str, pairs: Sequence[Pair], truth: Callable[[], bool | None], **measured: Any) -> None:
        lacking, stalled = t.missing(*pairs), t.stalled(*pairs)
        gains = {" over ".join(pair): t.gains[pair].interval for pair in pairs}
        verdict = "untestable" if lacking else None if stalled else truth()
        gain, state = t.gains[pairs[0]].interval, {"lacking": lacking, "stalled": stalled, "margin": t.plan.margin}
        ledger.settle(claim, verdict, gain=gain, gains=gains, **state, **t.conditions(), **measured)

    def gains(pair: Pair) -> bool | None:
        return t.gains[pair].gains_enough

    first = corrected(DIFFERENCES[0])
    leads = {name: gains(pair) for name, pair in RIVALS.items()}
    settle(
        "embedding_ln_most_important",
        [first, *RIVALS.values()],
        lambda: every([gains(first), *leads.values()]),
        gains_alone=gains(first),
        behind=[name for name, lead in leads.items() if lead is True],
        open=[name for name, lead in leads.items() if lead is None],
        level=[name for name, lead in leads.items() if lead is False],
        leads={name: t.gains[pair].interval for name, pair in RIVALS.items()},
    )
    all_at_once = [("option_b", "report"), *TOGETHER.values()]
    settle(
        "differences_are_the_cause",
        all_at_once,
        lambda: every([gains(pair) for pair in all_at_once]),
        enough=[name for name, pair in TOGETHER.items() if gains(pair) is False],
        repair=t.gains["author_fix", "report"].interval,
        scaling=t.gains[corrected("scaling")].interval,
        repaired=[LOSSES[name]["epoch 3"] for name in (OWN, REPAIRED)],
    )
    halves = t.stalled(corrected("position_factor"))
    settle("scaling_wrong", [corrected("scaling")], lambda: gains(corrected("scaling")), halves=halves)
    settle("token_type_needed", [corrected("token_types")], lambda: gains(corrected("token_types")), folded=folded)
    settle("attention_dropout_matters", [corrected("attention_dropout")], lambda: gains(corrected("attention_dropout")))
    settle("eps_matters", [corrected("eps")], lambda: epsilon_matters(t, rounding), rounding=list(rounding.values()))
    gelu = corrected("activation")
    readings = {"the loss of all steps": t.dynamics[gelu], "the held-out loss": t.gains[gelu]}
    excluded = [name for name, contrast in readings.items() if contrast.within(t.plan.great)]
    curve = t.dynamics[gelu].interval
    settle("gelu_matters", [gelu], lambda: greatly(t, gelu), curve=curve, great=t.plan.great, excluded=excluded)
    norm, distance = corrected("norm"), ("hugging_face", "report")
    settle("post_ln_not_the_cause", [norm, distance], lambda: too_little(t, norm, distance))
    both = [("option_b", "hugging_face"), ("option_b_post", "hugging_face")]
    settle("option_b_matches_hf", both, lambda: agreement([t.gains[pair].equal for pair in both]))


def epsilon_matters(t: Trainings, rounding: Mapping[float, float]) -> bool | None:
    """Whether training gains by 1e-12; False where it does not and a LayerNorm is as stable with either epsilon."""
    gain, stable = t.gains[corrected("eps")].gains_enough, max(rounding.values()) <= STABLE * min(rounding.values())
    return None if gain is False and not stable else gain


def greatly(t: Trainings, pair: Pair) -> bool | None:
    """Whether a change of the held-out loss, or of the mean loss of all steps, is beyond the plan's `great`; False
    where both are within it."""
    both = [contrasts[pair] for contrasts in (t.gains, t.dynamics)]
    if any(contrast.beyond(t.plan.great) for contrast in both):
        return True
    return False if all(contrast.within(t.plan.great) for contrast in both) else None


def too_little(t: Trainings, change: Pair, distance: Pair) -> bool | None:
    """Whether a change closes less than half of a distance; None where there is no distance, or neither is shown."""
    part, whole = t.gains[change], t.gains[distance]
    if not whole.gains_enough:
        return None
    return True if part.high < whole.low / 2.0 else False if part.low > whole.high / 2.0 else None
