"""What settles each claim, and the reason for each verdict, made of what was measured.

Every function gives a :class:`Found`. Where trainings are asked for, one of a small model confirms for its scale, which
the reason names; alone it refutes nothing that might turn with scale.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from kernels.bert import ablation, training
from kernels.bert.ablation import BETTER, MISSING, OPEN, SAME, WORDS, WORSE, Contrast, Pair, Plan, Row
from kernels.bert.experiments import Norms
from labkit.session.claims import Ledger
from labkit.tables import Table

CONFIRMED, REFUTED, UNDECIDABLE, UNTESTABLE = "confirmed", "refuted", "undecidable", "untestable"
ABOUT = 0.1
"""What "about" allows, relative."""
ON_THE_SCALE = 2.0
"""Two standard deviations are on one scale when neither is more than so many times the other."""
REPOSITORY = "the figures of the source's repository, neet/attentif, one training each"
LOSSES: dict[str, dict[str, float]] = {
    "own, as reported": {"epoch 1": 6.965, "epoch 2": 5.535, "epoch 3": 4.918, "all steps": 5.806},
    "Hugging Face": {"epoch 1": 6.765, "epoch 2": 5.799, "epoch 3": 4.754, "all steps": 5.758, "last logged": 4.602},
    "own, repaired": {"epoch 1": 6.012, "epoch 2": 4.577, "epoch 3": 4.197, "all steps": 4.929, "last logged": 4.1},
}
"""Mean training losses in the source's repository; the repaired model's last one is given there as "about 4.1"."""
OWN, THEIRS, REPAIRED = LOSSES
FINAL = ("epoch 3", "all steps", "last logged")
"""What may be called a final loss."""
PREDICTED = {
    "Hugging Face": {"rights": 7.6069, "##s": 7.1869, "groups": 6.8359, "studies": 6.6711, "issues": 6.4997},
    "own": {".": 6.5330, "he": 6.2388, "other": 5.7639, "money": 5.7295, "love": 5.6699},
}
"""The report's five likeliest words for its sentence, with their logits."""
RIGHT_WORD = {"Hugging Face": 3.69, "own": -0.70}
"""The logit of "beings" in either, as the report has it."""
DRAWN = "token embeddings from N(0, 0.02^2), as the report has them"
HANGS = "it depends on the length of the input, which the report does not say: "
SINGLE = ("embedding_norm", "token_types", "scaling", "activation", "attention_dropout", "eps", "norm")
"""The report's seven differences, each corrected by itself."""
LISTED = ("positions", "types", "embedding norm", "final norm")
"""Parts of the models' parameters that one of the seven explains; the final LayerNorm comes with Pre-LN."""
FREQUENCIES = 6.904
"""Nats: the held-out loss of the frequencies of the training text's tokens (`python -m kernels.bert facts`)."""
TRAINED_LENGTH = 128
"""Tokens of an input in the source's trainings."""


class Found(NamedTuple):
    """A truth value or a verdict's word, what was measured, a reason for each verdict, and what was given untested."""

    truth: bool | str
    measured: Any
    because: Mapping[str, str]
    given: str = ""


def _ends(t: Trainings, text: str, *names: str) -> str:
    """`text` with the mean held-out loss of each configuration in its places; nothing where one has none."""
    means = [t.mean(name) for name in names]
    return "" if any(map(math.isnan, means)) else text.format(*(f"{mean:.2f}" for mean in means))


def _said(contrast: Contrast) -> str:
    """A contrast's outcome in words, and where it is not decided, whether it excludes a gain as large as the margin."""
    small = contrast.outcome == OPEN and contrast.high < contrast.margin
    return WORDS[contrast.outcome] + (" (but less of a gain than the margin)" if small else "")


def settle(ledger: Ledger, **found: Found) -> None:
    """Give each claim its verdict."""
    for claim, one in found.items():
        ledger.settle(claim, one.truth, measured=one.measured, because=one.because, given=one.given)


@dataclass(frozen=True)
class Trainings:
    """The rows on record, and every contrast of the plan, on the held-out loss and on the mean loss of all steps."""

    plan: Plan
    rows: Sequence[Row]
    gains: Mapping[Pair, Contrast]
    dynamics: Mapping[Pair, Contrast]

    @classmethod
    def of(cls, rows: Sequence[Row], plan: Plan) -> Trainings:
        """Judge rows by the plan."""
        now = [row for row in ablation.current(rows, plan) if row["seed"] not in plan.pilot["seeds"]]
        return cls(plan, now, ablation.contrasts(now, plan), ablation.contrasts(now, plan, "loss_all_steps"))

    @property
    def scale(self) -> str:
        """What was trained, in words."""
        run = self.plan.run
        tokens = run["steps"] * run["batch"] * run["length"] / 1e6
        return f"{run['layers']} layers of {run['hidden']} columns, {tokens:.3g} million tokens of {run['corpus']!r}"

    @property
    def age(self) -> str:
        """Words to add where the training code has changed since the rows were made."""
        same = all(row["sources"]["training"] == training.code() for row in self.rows)
        return "" if same else " (by an earlier version of the training code)"

    def missing(self, *pairs: Pair) -> list[str]:
        """The configurations of these contrasts that have too few seeds."""
        had = {
            name: len({row["seed"] for row in self.rows if row["preset"] == name}) for pair in pairs for name in pair
        }
        return [f"{name} ({seeds})" for name, seeds in had.items() if seeds < self.plan.least]

    def outcomes(self, *pairs: Pair) -> set[str]:
        """Which outcomes these contrasts have."""
        return {self.gains[pair].outcome for pair in pairs}

    def mean(self, name: str, value: str = "validation_loss") -> float:
        """A configuration's mean over its seeds; NaN where it has none."""
        found = [row[value] for row in self.rows if row["preset"] == name]
        return float(np.mean(found)) if found else float("nan")


def corrected(name: str) -> Pair:
    """The contrast of the report's model with one difference corrected, over it as it is."""
    return f"report+{name}", "report"


def broken(name: str) -> Pair:
    """The contrast of BERT over itself with one difference broken."""
    return "bert", f"bert-{name}"


def _by_training(t: Trainings, pairs: Sequence[Pair], truth: str, because: Mapping[str, str], given: str = "") -> Found:
    """`truth`, unless rows are missing. Measured are the gains' intervals; `because` is completed with their scale."""
    measured = {" over ".join(pair): [t.gains[pair].low, t.gains[pair].high] for pair in pairs}
    lacking = t.missing(*pairs)
    if lacking or MISSING in t.outcomes(*pairs):
        least = f"{t.plan.least} seeds of each configuration"
        reason = f"the planned trainings are not on record yet; wanted {least}, there are: {', '.join(lacking)}"
        known = f"; {because[UNTESTABLE]}" if UNTESTABLE in because else ""
        return Found(UNTESTABLE, None, {UNTESTABLE: reason + known}, given)
    scale = f" [{t.scale}; intervals of gains in nats of held-out loss; margin {t.plan.margin}]"
    return Found(truth, measured, {verdict: text + scale for verdict, text in because.items()}, given)


# The input's size


def own_input_std(by_length: Mapping[int, float], sentence: float, reported: float = 0.059) -> Found:
    """Of the report's model, untrained: by length, for random tokens; `sentence`: for the report's sentence."""
    near, far = _near(by_length, reported)
    text = (
        f"{_by_length(by_length)}, for random tokens; {sentence:.4f} for the report's sentence; the source trained "
        f"with {TRAINED_LENGTH} tokens; within {ABOUT:.0%} of {reported} at {_lengths(near)}; beyond that at "
        f"{_lengths(far)}"
    )
    close = {*(length in near for length in by_length), abs(sentence / reported - 1.0) <= ABOUT}
    truth = UNDECIDABLE if len(close) == 2 else CONFIRMED if close == {True} else REFUTED
    because = {CONFIRMED: "at every length: " + text, REFUTED: "at no length: " + text, UNDECIDABLE: HANGS + text}
    return Found(truth, [*by_length.values(), sentence], because, f"untrained weights, {DRAWN}")


def vaswani_input_std(by_length: Mapping[int, float], tokens: float, reported: float = 0.55) -> Found:
    """Of tokens times sqrt(H) plus sinusoids, by length; `tokens` is that of the scaled tokens alone."""
    near, far = _near(by_length, reported)
    off = min((std / reported - 1.0 for std in by_length.values()), key=abs)
    alone = " The tokens alone, positions left out, have it." if abs(tokens / reported - 1.0) <= ABOUT else ""
    text = (
        f"{_by_length(by_length)}; within {ABOUT:.0%} of {reported} at {_lengths(near)}; beyond that at "
        f"{_lengths(far)}; the closest is off by {off:+.0%}.{alone}"
    )
    truth = CONFIRMED if not far else REFUTED if not near else UNDECIDABLE
    because = {CONFIRMED: "at every length: " + text, REFUTED: "at no length: " + text, UNDECIDABLE: HANGS + text}
    return Found(truth, list(by_length.values()), because, f"untrained weights, {DRAWN}")


def hf_input_std(by_length: Mapping[int, float], trained: float | None, reported: float = 1.0) -> Found:
    """Of Hugging Face's embedding layer by length, untrained; `trained`: of the trained ones, if there are any."""
    _, far = _near(by_length, reported)
    kept = trained is not None and abs(trained / reported - 1.0) <= ABOUT
    later = "trained: not measured yet" if trained is None else f"trained: {trained:.3f} in the small models here"
    text = (
        f"new {_by_length(by_length)}, which is so by definition, since a LayerNorm starts with gains of 1 and shifts "
        f"of 0; {later}"
    )
    because = {
        CONFIRMED: text,
        REFUTED: f"new, not within {ABOUT:.0%} of {reported} at {_lengths(far)}: {_by_length(by_length)}",
        UNDECIDABLE: f"it depends on what training makes of the gains and shifts: {text}",
    }
    return Found(REFUTED if far else CONFIRMED if kept else UNDECIDABLE, list(by_length.values()), because)


def _near(found: Mapping[int, float], reported: float) -> tuple[list[int], list[int]]:
    """The lengths at which it is about what is reported, and the others."""
    near = [length for length, std in found.items() if abs(std / reported - 1.0) <= ABOUT]
    return near, [length for length in found if length not in near]


def _by_length(found: Mapping[int, float]) -> str:
    return ", ".join(f"{std:.4f} ({_lengths([length])})" for length, std in found.items())


def _lengths(found: Sequence[int]) -> str:
    return f"{', '.join(map(str, found))} {'token' if found == [1] else 'tokens'}" if found else "none of these"


def token_too_small(without: Mapping[str, float], scaled: float, factor: float, t: Trainings) -> Found:
    """Standard deviation of tokens over that of positions, without the factor: beside sinusoids as they are
    (`unscaled`), and times 0.1 (`as built`); `scaled`: with it beside sinusoids as they are. Trainings are quoted."""
    level = 1.0 / ON_THE_SCALE
    small = without["unscaled"] < level
    onto = level <= scaled <= ON_THE_SCALE
    text = (
        f"tokens over positions, in standard deviations: {without['unscaled']:.3f} without the factor {factor:.1f} and "
        f"{scaled:.2f} with it, beside sinusoids as they are, of which the report speaks when it gives its reason; "
        f"{without['as built']:.2f} as the model is built, where the sinusoids are multiplied by 0.1: beside these the "
        f"factor would make tokens {10.0 * scaled:.0f} times the positions, so that they cannot be meant. On one scale "
        f"means here: within a factor of {ON_THE_SCALE:g}; too small means: by more than that factor"
        + _ends(t, "; trained beside sinusoids as they are, held-out loss: {} with the factor, {} without it",
                "report+scaling", "report+position_factor")
    )  # fmt: skip
    because = {CONFIRMED: text, REFUTED: "not too small without the factor, or not on one scale with it: " + text}
    return Found(small and onto, [without["unscaled"], scaled], because, DRAWN)


# The loss, and logits


def statistics(found: Mapping[str, Mapping[str, float]], names: Sequence[str]) -> Table:
    """A row a statistic of the loss, a column a training."""
    return Table(("mean training loss", *found), [(name, *(one.get(name) for one in found.values())) for name in names])


def loss_is_lower(losses: Mapping[str, Mapping[str, float]], live: Mapping[str, Mapping[str, float]]) -> Found:
    """Both trainings by one statistic at a time. `live`: real runs, their mean of `all steps` and `last tenth`."""
    own, theirs = losses[OWN], losses[THEIRS]
    both = [name for name in FINAL if name in own and name in theirs]
    lower = [name for name in both if own[name] < theirs[name]]
    pairs = "; ".join(f"{name}: own {own[name]:.3f}, Hugging Face {theirs[name]:.3f}" for name in both)
    here = "; ".join(f"{name} {one['all steps']:.2f} and {one['last tenth']:.2f}" for name, one in live.items())
    text = (
        f"{pairs}. The report's 4.9 is the mean of an epoch, its 5.8 the mean of all steps. How far two such means are "
        f"apart in one and the same run here (all steps, last tenth): {here}"
    )
    truth = CONFIRMED if len(lower) == len(both) else UNDECIDABLE if lower else REFUTED
    because = {
        CONFIRMED: f"lower by each final statistic that both have{_otherwise(own, theirs, lower=False)}. {text}",
        REFUTED: f"higher by each final statistic that both have{_otherwise(own, theirs, lower=True)}, and with less "
        f"dropout, which by itself would make a training loss lower. {text}",
        UNDECIDABLE: f"it depends on the final statistic: lower by {', '.join(lower)} alone. {text}",
    }
    return Found(truth, {name: round(own[name] - theirs[name], 3) for name in both}, because, REPOSITORY)


def _otherwise(own: Mapping[str, float], theirs: Mapping[str, float], lower: bool) -> str:
    """The earlier statistics by which the own model's loss was the lower or the higher one, in brackets."""
    earlier = [name for name in own if name in theirs and name not in FINAL and (own[name] < theirs[name]) == lower]
    word = "lower" if lower else "higher"
    return "".join(f" (in {name} it was the {word} one, {own[name]} to {theirs[name]})" for name in earlier)


def logits_comparable(
    shifted: Sequence[tuple[float, float, float]], models: Mapping[str, tuple[float, float]]
) -> Found:
    """`shifted`: of copies of one model whose logits are moved by a constant, that constant, the right word's logit and
    its probability. `models`: of different models, the right word's logit and probability."""
    _, logits, shares = zip(*shifted, strict=True)
    same = max(shares) - min(shares) <= 1e-6 * max(shares)
    signs = {logit > 0.0 for logit in logits}
    by_logit, by_share = (sorted(models, key=lambda name: models[name][at], reverse=True) for at in (0, 1))
    moved = ", ".join(f"{one:+g}" for one, *_ in shifted)
    text = (
        f"the same model with all its logits moved by {moved} gives the right word logits of "
        f"{', '.join(f'{one:.2f}' for one in logits)} and a probability of {min(shares):.3e} to {max(shares):.3e}"
    )
    alike = "" if by_logit == by_share else "not "
    order = f"of {len(models)} models here the order by logit is {alike}that by probability"
    below = "; ".join(
        f"{name} {one:.2f}, so a probability of {most:.2g} at most" for name, _, _, one, most in distances()
    )
    below = f"the report's figures do tell how far the right word is below the likeliest: {below}"
    return Found(
        not (same and len(signs) == 2), [min(logits), max(logits)],
        {REFUTED: f"{text}: high or low, positive or negative, it does not by itself say how likely the word is; "
         f"{order}; {below}",
         CONFIRMED: f"{text}: the probability goes with the logit; {order}; {below}"},
    )  # fmt: skip


def distances() -> list[tuple[str, float, float, float, float]]:
    """Of the report's two models: the likeliest word's logit, the right word's, how far that is below, and the largest
    probability that it can then have."""
    found = []
    for model, words in PREDICTED.items():
        best, right = max(words.values()), RIGHT_WORD[model]
        found.append((model, best, right, best - right, math.exp(right - best)))
    return found


# What stands in a paper or in a count


def relu_wrong_for_vaswani(distance: Mapping[str, float]) -> Found:
    """How far a feed-forward layer with either activation is from max(0, x W1 + b1) W2 + b2, relative RMS."""
    text = f"distance from max(0, x W1 + b1) W2 + b2: ReLU {distance['relu']:.1e}, GELU {distance['gelu']:.1e}"
    return Found(distance["gelu"] < distance["relu"], distance, {CONFIRMED: text, REFUTED: text + "; that is ReLU"},
                 "that formula, from Vaswani et al. 2017, section 3.3, equation 2")  # fmt: skip


def seven_differences_complete(bert: Mapping[str, int], report: Mapping[str, int]) -> Found:
    """Parameters of both models by part."""
    apart = {part: bert[part] - report[part] for part in bert if bert[part] != report[part]}
    others = {part: size for part, size in apart.items() if part not in LISTED}
    all_of_it = f"{sum(apart.values()):,} parameters apart"
    listed = ", ".join(f"{part} {size:+,}" for part, size in apart.items())
    return Found(
        not others, sum(others.values()),
        {CONFIRMED: f"{all_of_it}, all in parts that the list names: {listed}",
         REFUTED: f"{all_of_it}: {listed}; the list does not name {' and '.join(others)}"},
    )  # fmt: skip


# The epsilon, and gradients


def eps_changes_gradients(relative: Mapping[str, float], rounding: float) -> Found:
    """How far all gradients are apart with 1e-5 and 1e-12, in float64; `rounding` is what float64 may be off."""
    text = ", ".join(f"{name} {one:.1e}" for name, one in relative.items())
    text = f"norm of the difference over norm of the gradient, same weights: {text}"
    because = {
        CONFIRMED: f"{text}; rounding in float64 explains {rounding:.0e}",
        REFUTED: f"{text}; rounding in float64, {rounding:.0e}, explains all of it",
    }
    return Found(any(one > rounding for one in relative.values()), relative, because)


def weaker(ratios: Sequence[float]) -> str:
    """`weaker` where all ratios are below 1, `stronger` where all are above, else `neither`."""
    return "weaker" if max(ratios) < 1.0 else "stronger" if min(ratios) > 1.0 else "neither"


def small_std_weakens(pairs: Mapping[str, Sequence[tuple[Norms, Norms]]], *fields: str) -> Found:
    """Of models with small embeddings, by name: norms without and with the embedding LayerNorm, a pair a draw; which of
    them are meant, in `fields`. The words may mean each model and each field."""
    ratios = {
        f"{model}, {field.replace('_', ' ')}": [getattr(a, field) / getattr(b, field) for a, b in found]
        for model, found in pairs.items()
        for field in fields
    }
    ways = {name: weaker(found) for name, found in ratios.items()}
    text = "; ".join(
        f"{name}, {len(found)} draws: {min(found):#.3g} to {max(found):#.3g} times, {ways[name]}"
        for name, found in ratios.items()
    )
    text = f"without the LayerNorm over with it, smallest and largest: {text}; at initial weights"
    only = {way == "weaker" for way in ways.values()}
    truth = UNDECIDABLE if len(only) == 2 else CONFIRMED if only == {True} else REFUTED
    because = {CONFIRMED: text, REFUTED: "weaker in neither model: " + text,
               UNDECIDABLE: "it depends on which gradient of which model is meant: " + text}  # fmt: skip
    return Found(truth, {name: [min(found), max(found)] for name, found in ratios.items()}, because)


def eps_matters(t: Trainings, logits: Mapping[str, float], rounding: Mapping[float, float]) -> Found:
    """`logits`: relative change of the logits by model; `rounding`: what a float32 LayerNorm is off, by epsilon."""
    pairs = [corrected("eps"), broken("eps")]
    found = t.outcomes(*pairs)
    text = f"logits change by {', '.join(f'{one:.1e} ({name})' for name, one in logits.items())}; "
    text += "a float32 LayerNorm is off by " + " and ".join(f"{one:.1e} with {eps:g}" for eps, one in rounding.items())
    stable = max(rounding.values()) <= 2.0 * min(rounding.values())
    truth = CONFIRMED if BETTER in found else REFUTED if found == {SAME} and stable else UNDECIDABLE
    because = {
        CONFIRMED: f"with 1e-12 the held-out loss of one model at least is lower; {text}",
        REFUTED: f"neither stability nor training gains by it: {text}",
        UNDECIDABLE: f"the trainings do not settle it: {_both(t, pairs)}; {text}",
        UNTESTABLE: text,
    }
    return _by_training(t, pairs, truth, because)


# What was trained


def _both(t: Trainings, pairs: Sequence[Pair]) -> str:
    """The outcomes of what BERT has in either model."""
    in_report, in_bert = (_said(t.gains[pair]) for pair in pairs)
    return f"having it is {in_report} in the report's model, and in BERT {in_bert}"


def token_type_needed(t: Trainings, folded: Mapping[str, float], allowed: float) -> Found:
    """`folded`: how far, in log probability, a model without token types is from one with them, once their first row is
    added to another table; `allowed` is what float64 may be off."""
    pairs = [corrected("token_types"), broken("token_types")]
    found, redundant = t.outcomes(*pairs), max(folded.values()) <= allowed
    where = " and ".join(f"{one:.0e} ({name})" for name, one in folded.items())
    text = (
        f"{'no' if redundant else 'a'} loss of what can be computed, at any size: with the type's row added to another "
        f"table, a model without types is off by {where} in log probability"
    )
    truth = CONFIRMED if BETTER in found else REFUTED if found == {SAME} and redundant else UNDECIDABLE
    because = {
        CONFIRMED: f"with token types the held-out loss of one model at least is lower; there is {text}",
        REFUTED: f"{text}; and trained without them it loses nothing beyond the margin",
        UNDECIDABLE: f"the trainings do not settle it: {_both(t, pairs)}; there is {text}",
        UNTESTABLE: text,
    }
    return _by_training(t, pairs, truth, because)


def embedding_ln_most_important(t: Trainings) -> Found:
    """What correcting it alone gains, over what each of the other six gains alone."""
    others = [(f"report+{SINGLE[0]}", f"report+{name}") for name in SINGLE[1:]]
    pairs = [corrected(SINGLE[0]), *others]
    rivals = [worse for better, worse in others if t.gains[better, worse].outcome != BETTER]
    first = t.outcomes(*pairs) == {BETTER}
    because = {
        CONFIRMED: "corrected alone it gains, and more than each of the other six does alone",
        UNDECIDABLE: "that it gains most is not shown at this scale, which cannot refute it: "
        + (f"it is not shown to gain more than {', '.join(rivals)}" if rivals else "no gain of its own is shown")
        + ". It is corrected without the dropout that the report lists with it",
        UNTESTABLE: "the source's own repair, with which the model has 'rights' first for the report's sentence, has "
        "no LayerNorm on the embeddings",
    }
    return _by_training(t, pairs, CONFIRMED if first else UNDECIDABLE, because)


def differences_are_the_cause(t: Trainings) -> Found:
    """What correcting them together gains, over the model as it is and over each one corrected alone.

    Option B corrects all but Pre-LN; the author's repair, those of items 3 to 5.
    """
    singles = [("option_b", f"report+{name}") for name in SINGLE]
    pairs = [("option_b", "report"), ("author_fix", "report"), *singles]
    together, repair, *alone = (t.gains[pair].outcome for pair in pairs)
    own, repaired = LOSSES[OWN]["epoch 3"], LOSSES[REPAIRED]["epoch 3"]
    source = (
        f"the source's own repair, four changes at once from items 3, 4 and 5 of the list, took the last epoch's "
        f"training loss from {own} to {repaired}, and put 'rights' first and 'beings' third"
    )
    ranks = {name: median_rank(t.rows, name) for name in ("report", "author_fix", "option_b")}
    seen = ", ".join(f"{name} {rank:g}" for name, rank in ranks.items() if rank is not None)
    seen = f"; the right word's median rank over the held-out sentences: {seen}" if seen else ""
    each = "; ".join(
        f"{words} over {', '.join(worse for (_, worse), one in zip(singles, alone, strict=True) if one == outcome)}"
        for outcome, words in WORDS.items()
        if outcome in alone
    )
    trained = (
        f"at this scale option B, which corrects all but Pre-LN at once, is {WORDS[together]} over the report's model, "
        f"and the author's repair {WORDS[repair]}; against each one corrected alone, option B is {each}"
    )
    because = {
        CONFIRMED: f"corrected together they gain, and more than any one alone: {trained}; {source}{seen}",
        UNDECIDABLE: "whether several of them together are the cause or one alone, and which, is not shown: "
        + trained + _ends(t, "; mean held-out losses: {} of the report's model, {} repaired, {} with the repair's "
                          "scaling alone", "report", "author_fix", "report+scaling")
        + f"; a small model alone does not refute it; {source}{seen}",
        UNTESTABLE: f"{source}, which is one training, without a second seed",
    }  # fmt: skip
    truth = CONFIRMED if together == BETTER and set(alone) == {BETTER} else UNDECIDABLE
    return _by_training(t, pairs, truth, because, REPOSITORY)


def scaling_wrong(t: Trainings) -> Found:
    """Tokens times sqrt(H) and sinusoids as they are, over neither; and sinusoids as they are, alone."""
    pairs = [corrected("scaling"), corrected("position_factor")]
    both, factor = (t.gains[pair].outcome for pair in pairs)
    paper = "Vaswani et al. do as the report says"
    trained = (
        f"the two changes together are {WORDS[both]} at this scale, and the positions' factor alone {WORDS[factor]}"
        + _ends(t, " (held-out loss of the tokens' factor alone, outside the contrasts: {}; of the report's model: {})",
                "report+scale_tokens", "report")
    )  # fmt: skip
    because = {
        CONFIRMED: f"{paper}, and so scaled the model trains to a lower held-out loss: {trained}",
        UNDECIDABLE: f"{paper}; {trained}: whether each is wrong by itself, or both together, makes a difference",
        UNTESTABLE: f"{paper}, which does not show that it is wrong to do otherwise",
    }
    truth = CONFIRMED if both == BETTER and factor in (BETTER, SAME) else UNDECIDABLE
    return _by_training(t, pairs, truth, because, "Vaswani et al. 2017, sections 3.4 and 3.5, as read")


def position_too_weak(t: Trainings, shares: Mapping[str, float], factor: float = 0.1) -> Found:
    """`shares`: the positions' share in the variance of the report's model's input, by when and how it is taken."""
    pairs = [corrected("position_factor")]
    (found,) = t.outcomes(*pairs)
    text = f"times {factor} the positions have of the input's variance: " + ", ".join(
        f"{share:.0%} ({how})" for how, share in shares.items()
    )
    weak, strong = max(shares.values()) < 0.5, min(shares.values()) >= 0.5
    truth = CONFIRMED if weak and found == BETTER else REFUTED if strong and found in (SAME, WORSE) else UNDECIDABLE
    because = {
        CONFIRMED: f"{text}; and trained with a factor of 1 the held-out loss is lower",
        REFUTED: f"{text}: by each they outweigh the tokens; and trained with a factor of 1 nothing is gained",
        UNDECIDABLE: f"{text}; a factor of 1 alone is {WORDS[found]} in trainings, and makes the positions so large "
        "beside the tokens that this does not tell whether 0.1 is enough",
        UNTESTABLE: text,
    }
    return _by_training(t, pairs, truth, because)


def gelu_matters(t: Trainings) -> Found:
    """GELU over ReLU in both models: the held-out loss, and the mean of all steps' losses, which the curve encloses."""
    pairs = [corrected("activation"), broken("activation")]
    every = [found[pair] for found in (t.gains, t.dynamics) for pair in pairs]
    great = any(one.beyond(t.plan.great) for one in every)
    curves = "; ".join(str(t.dynamics[pair]) for pair in pairs)
    because = {
        CONFIRMED: f"a change beyond {t.plan.great} nats, which 'greatly' is taken to mean; over all steps: {curves}",
        UNDECIDABLE: f"no change beyond {t.plan.great} nats, which 'greatly' is taken to mean, is shown at this scale, "
        f"and this scale alone cannot refute it; over all steps: {curves}",
    }
    return _by_training(t, pairs, CONFIRMED if great else UNDECIDABLE, because)


def attention_dropout_matters(t: Trainings) -> Found:
    """With it over without it, in both models."""
    pairs = [corrected("attention_dropout"), broken("attention_dropout")]
    in_report, in_bert = (t.gains[pair].outcome for pair in pairs)
    because = {
        CONFIRMED: "with it the held-out loss of one model at least is lower, and of none higher",
        UNDECIDABLE: f"{_both(t, pairs)}. A "
        "regularisation may pay at another size of model or text, so this scale alone cannot refute it",
    }
    truth = CONFIRMED if BETTER in (in_report, in_bert) and WORSE not in (in_report, in_bert) else UNDECIDABLE
    return _by_training(t, pairs, truth, because)


def post_ln_not_the_cause(t: Trainings, kept: str) -> Found:
    """`kept`: where the source's repaired model has its LayerNorms, `pre` or `post`."""
    pairs = [corrected("norm"), broken("norm"), ("hugging_face", "report")]
    norm, in_bert, gap = (t.gains[pair] for pair in pairs)
    small = gap.outcome == BETTER and norm.high < gap.low / 2.0
    source = (
        f"the source's repaired model is {kept.capitalize()}-LN, and has 'rights' first and 'beings' third: one "
        "training and one sentence, which do not show what Post-LN alone would gain"
    )
    because = {
        CONFIRMED: "Hugging Face's model has the lower held-out loss, and Post-LN alone closes less than half of the "
        "distance, by the intervals of both",
        UNDECIDABLE: f"Post-LN alone is {WORDS[norm.outcome]} in the report's model, and over Pre-LN in BERT "
        f"{WORDS[in_bert.outcome]}; "
        + (
            "at this scale Hugging Face's model has the higher held-out loss, so that the quality problem is not there"
            if gap.outcome == WORSE
            else "that it closes less than half of a distance to Hugging Face's model is not shown at this scale"
        )
        + ", which cannot refute the claim",
        UNTESTABLE: source,
    }
    return _by_training(t, pairs, CONFIRMED if small else UNDECIDABLE, because)


def option_b_matches_hf(t: Trainings) -> Found:
    """Option B without and with its optional Post-LN, over Hugging Face's model."""
    pairs = [("option_b", "hugging_face"), ("option_b_post", "hugging_face")]
    because = {
        CONFIRMED: "with and without its optional last step the held-out loss is Hugging Face's, within the margin",
        UNDECIDABLE: "equality is not shown at this scale for both readings of option B, and this scale alone cannot "
        "refute it",
    }
    return _by_training(t, pairs, CONFIRMED if t.outcomes(*pairs) == {SAME} else UNDECIDABLE, because)


# What the trained models predict, and the answer


def median_rank(rows: Sequence[Row], name: str) -> float | None:
    """The right word's median rank over the held-out sentences and all seeds of a configuration."""
    ranks = held_out_ranks(rows, name)
    return float(np.median(ranks)) if ranks else None


def first_ranks(rows: Sequence[Row], name: str) -> list[int]:
    """The right word's rank in the report's sentence, for each seed."""
    return [row["predictions"][0]["rank"] for row in rows if row["preset"] == name]


def held_out_ranks(rows: Sequence[Row], name: str) -> list[int]:
    """The right word's rank in each held-out sentence, which follow the report's, and for each seed."""
    found = [one["rank"] for row in rows if row["preset"] == name for one in row["predictions"][1:]]
    return [rank for rank in found if rank is not None]


_OWN, _BERT = "the report's model, corrected, repaired", "BERT, a difference built in; Hugging Face's"
_BETWEEN = "in between: option B, Vaswani et al."
FAMILIES = {
    "report": _OWN, "author_fix": _OWN, "bert": _BERT, "hugging_face": _BERT, "option_b": _BETWEEN,
    "option_b_post": _BETWEEN, "vaswani": _BETWEEN,
}  # fmt: skip
"""What a configuration starts from."""
LEFT = 5.5
"""Nats: a training loss at which a fall from the plateau near 6 has begun; chosen after the curves were seen."""


def family(row: Row) -> str:
    """One of :data:`FAMILIES`, by the name of the row's preset."""
    return FAMILIES[re.split("[+-]", row["preset"])[0]]


STRETCHES = 50
"""Whole stretches of a training's curve, each the mean of as many steps, in its row; what is left over is one more."""


def tokens_seen(row: Row) -> np.ndarray:
    """Millions of tokens that a training has seen at the end of each stretch of its curve."""
    every = max(1, row["steps"] // STRETCHES)
    ends = np.minimum(every * np.arange(1, len(row["curve"]) + 1), row["steps"])
    return ends / row["steps"] * row["tokens"] / 1e6


def left(rows: Sequence[Row]) -> str:
    """Millions of tokens after which the training loss is below :data:`LEFT`: the first seed's to the last one's."""
    after = []
    for row in rows:
        below = np.flatnonzero(np.array(row["curve"]) < LEFT)
        after.append(tokens_seen(row)[below[0]] if len(below) else math.inf)
    reached = [f"{one:.0f}" for one in sorted(after) if math.isfinite(one)]
    never = after.count(math.inf)
    span = " to ".join(dict.fromkeys((reached[0], reached[-1]))) if reached else ""
    return ", ".join(filter(None, (span, f"{never} never" if never else "")))


def shares(rows: Sequence[Row]) -> str:
    """The positions' share in the variance of the trained inputs, the smallest to the largest of the seeds."""
    found = sorted(row["input"]["positions"] for row in rows)
    return " to ".join(dict.fromkeys(f"{one:.2g}" for one in (found[0], found[-1])))


def state(t: Trainings) -> str:
    """How much of the plan is on record, what is not, and how wide that leaves an interval."""
    parts = (t.plan.first, t.plan.then)
    planned = {(name, seed) for part in parts for name in part["presets"] for seed in part["seeds"]}
    made = {(row["preset"], row["seed"]) for row in t.rows}
    none = sorted({name for name, _ in planned} - {name for name, _ in made})
    some = [f"{name} with seed {seed}" for name, seed in sorted(planned - made) if name not in none]
    seeds = min(len(contrast.gains) for contrast in t.gains.values())
    text = f"{len(planned & made)} of {len(planned)} planned trainings are on record{t.age}"
    if seeds > 1:
        half = stats.t.isf((1.0 - t.plan.level) / (2 * len(t.gains)), seeds - 1) / math.sqrt(seeds)
        text += f"; with {seeds} seeds an interval reaches {half:.1f} standard deviations of the gains to either side"
    return text + (f"; not made yet: {', '.join([*none, *some])}" if none or some else "")


def configurations(t: Trainings) -> Table:
    """A row a configuration, the lowest held-out loss first: means over seeds, each with Student's 95% interval."""
    rows = []
    for name in sorted({row["preset"] for row in t.rows}, key=t.mean):
        own = [row for row in t.rows if row["preset"] == name]
        losses, top1 = ([row[value] for row in own] for value in ("validation_loss", "top1"))
        rows.append(
            (name, len(own), *_mean_of(losses), math.exp(t.mean(name)), *_mean_of(top1), shares(own), left(own))
        )
    after = f"below {LEFT} nats after, M tokens"
    return Table(
        ("configuration", "seeds", "held-out loss", "95%", "perplexity", "top-1", "95%", "positions' share", after),
        rows, "means over seeds; an interval holds for its row alone",
    )  # fmt: skip


def _mean_of(values: Sequence[float]) -> tuple[float, str]:
    mean = float(np.mean(values))
    if len(values) < 2:
        return mean, ""
    half = float(stats.t.isf(0.025, len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values)))
    return mean, f"± {half:.2g}"


def apart(t: Trainings) -> str:
    """How far our BERT and Hugging Face's end apart, seed by seed: two implementations of one model."""
    losses = {(row["preset"], row["seed"]): row["validation_loss"] for row in t.rows}
    found = [
        f"{losses['bert', seed] - loss:+.3f}"
        for (name, seed), loss in losses.items()
        if name == training.HUGGING_FACE and ("bert", seed) in losses
    ]
    return f"bert over hugging_face, held-out loss by seed: {', '.join(found) or 'not on record'}"


def predictions(rows: Sequence[Row]) -> Table:
    """A row a configuration, the lowest held-out loss first: the report's sentence by its first seed, the held-out ones
    by all its seeds."""
    made: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row["seed"]):
        made.setdefault(row["preset"], []).append(row)
    table = []
    for name, own in sorted(made.items(), key=lambda one: np.mean([row["validation_loss"] for row in one[1]])):
        words = "  ".join(word for word, *_ in own[0]["predictions"][0]["top"])
        ranks = held_out_ranks(rows, name)
        five = float(np.mean([rank <= 5 for rank in ranks])) if ranks else None
        each = ", ".join(map(str, first_ranks(own, name)))
        table.append((name, words, each, median_rank(rows, name), five))
    return Table(
        ("model", "five likeliest words", "ranks of 'beings'", "held out: median rank", "in first five"), table,
        "The report's sentence, words by the first seed, ranks by each; twenty held-out ones by all seeds",
    )  # fmt: skip


def answer(t: Trainings) -> str:
    """The answer in a sentence or two, from the source's figures and the rows on record."""
    own, theirs = LOSSES[OWN], LOSSES[THEIRS]
    both = [name for name in FINAL if name in own and name in theirs]
    higher = all(own[name] > theirs[name] for name in both)
    text = (
        "The loss is not lower: 4.9 is a mean of the last epoch and 5.8 one of all steps; by the same statistic the "
        "own model's loss is the higher one (one training each, and that model has less dropout, which lowers a "
        "training loss)."
        if higher
        else "By the same statistic the own model's loss is not always the higher one."
    )
    if t.missing(*(corrected(name) for name in SINGLE)):
        return (
            text
            + " Which of seven differences cost it its predictions is open until the trainings on a GPU are on record."
        )
    after = [left([row for row in t.rows if row["preset"] == name]) for name in (training.HUGGING_FACE, "report")]
    theirs, ours, gain = t.mean(training.HUGGING_FACE), t.mean("report"), t.gains[training.HUGGING_FACE, "report"]
    text += (
        f" In small models trained alike Hugging Face's ends at {theirs:.2f} nats on held-out text and the report's at "
        f"{ours:.2f}; {_decided(gain)}. The former's training loss is below {LEFT} nats after {after[0]} of "
        f"{t.rows[0]['tokens'] / 1e6:.0f} million tokens, the report's after {after[1]}."
    )
    single = {name: t.gains[corrected(name)] for name in SINGLE}
    said = []
    for words, outcome in (
        ("shown to gain", BETTER),
        ("shown to lose", WORSE),
        ("inside the margin", SAME),
        ("open", OPEN),
    ):
        names = [f"{name} {round(one.mean, 2) + 0.0:+.2f}" for name, one in single.items() if one.outcome == outcome]
        if names or outcome == BETTER:
            said.append(f"{words}: {', '.join(names) or 'none'}")
    text += f" Of the seven differences, each corrected alone there, in nats: {'; '.join(said)}."
    ranks = {name: first_ranks(t.rows, name) for name in ("report", training.HUGGING_FACE)}
    if not all(ranks.values()):
        return text
    own, other = (" to ".join(map(str, sorted({min(found), max(found)}))) for found in ranks.values())
    gone = "" if max(ranks["report"]) > min(ranks[training.HUGGING_FACE]) else ": the symptom does not appear there"
    return text + f" The word that the report misses has rank {own} in its model there, {other} in the other{gone}."


def _decided(contrast: Contrast) -> str:
    """What the plan's test says of a difference that was named."""
    if contrast.outcome == SAME:
        return "by the plan's test that is no difference of interest"
    if contrast.outcome in (BETTER, WORSE):
        return "by the plan's test the difference is real"
    return f"the plan's test, with {len(contrast.gains)} seeds, cannot say whether this difference is real"


def recorded_answers() -> dict[str, str]:
    """The notebook's answer from the trainings on record, as README and notebook have it."""
    return {"bert_embeddings": answer(Trainings.of(training.rows(ablation.KEPT), ablation.plan()))}
