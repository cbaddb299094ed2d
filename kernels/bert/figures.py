"""The notebook's pictures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from kernels.bert import evidence
from kernels.bert.ablation import BETTER, MISSING, OPEN, SAME, WORDS, WORSE, Contrast, Row
from kernels.bert.evidence import LOSSES, OWN, PREDICTED, REPAIRED, RIGHT_WORD, THEIRS
from kernels.bert.inputs import Inputs
from labkit import plots

COLOURS = {OWN: plots.RED, THEIRS: plots.BLUE, REPAIRED: plots.GREEN}


def symptom() -> Figure:
    """What the report shows: either model's five likeliest words, and the two losses among those on record."""
    figure, (left, right) = plots.figure(1, 2, width=9.5, height=3.4)
    best = {model: max(top.values()) for model, top in PREDICTED.items()}
    words = [(model, word, best[model] - logit) for model, top in PREDICTED.items() for word, logit in top.items()]
    words += [(model, "beings (right)", best[model] - logit) for model, logit in RIGHT_WORD.items()]
    words.sort(key=lambda one: one[0])
    colours = [plots.BLUE if model == "Hugging Face" else plots.RED for model, *_ in words]
    bars = left.barh(range(len(words)), [below for *_, below in words], color=colours, height=0.7)
    left.bar_label(bars, fmt="%.2f", fontsize=7, padding=2)
    left.set_yticks(range(len(words)), [f"{model}: {word}" for model, word, _ in words], fontsize=7)
    left.invert_yaxis()
    left.set_xlim(0.0, 1.12 * max(below for *_, below in words))
    left.set_xlabel("how far the logit is below the model's highest")
    left.set_title("All human [MASK] are born free and equal ...")
    for name, found in LOSSES.items():
        epochs = [found[f"epoch {k}"] for k in (1, 2, 3)]
        right.plot((1, 2, 3), epochs, "o-", color=COLOURS[name], label=name)
        right.axhline(found["all steps"], color=COLOURS[name], ls="--", lw=0.9)
    last, steps = LOSSES[OWN]["epoch 3"], LOSSES[THEIRS]["all steps"]
    right.annotate(
        f"{last:.2f}, own, epoch 3:\nthe report's 4.9", (3.0, last), (3.25, last - 0.08), fontsize=7, va="top",
        arrowprops={"arrowstyle": "->", "color": "0.5"},
    )  # fmt: skip
    right.text(3.25, steps - 0.04, f"{steps:.2f}, Hugging Face,\nall steps: the report's 5.8", fontsize=7, va="top")
    right.set_xlim(0.9, 4.9)
    right.set_xticks((1, 2, 3))
    right.set_xlabel("epoch")
    right.set_ylabel("mean training loss, nats")
    right.set_title("points: one epoch; broken lines: all steps")
    figure.legend(loc="outside upper right", ncols=3, fontsize=8)
    plots.caption(figure, "left: the report's figures; right: those of its source's repository, one training each")
    return figure


def inputs(stds: Mapping[str, Mapping[int, Inputs]], reported: Mapping[str, float], test: int, caption: str) -> Figure:
    """Standard deviation of the encoder's input by length, and the parts' shares at the test sentence's length."""
    figure, (left, right) = plots.figure(1, 2, width=9.5, height=3.3)
    lengths = list(next(iter(stds.values())))
    plots.lines(left, lengths, {name: [found[n].std for n in lengths] for name, found in stds.items()})
    for name, value in reported.items():
        line = left.lines[list(stds).index(name)]
        left.axhspan(value * 0.9, value * 1.1, color=line.get_color(), alpha=0.2, lw=0)
    left.set_xticks(lengths, list(map(str, lengths)), fontsize=7)
    left.minorticks_off()
    ticks = (0.05, 0.1, 0.2, 0.5, 1.0)
    left.set_yticks(ticks, list(map(str, ticks)))
    left.set_xlabel("tokens of the input")
    left.set_ylabel("standard deviation")
    left.set_title("what the first layer gets; bands: reported, within 10%")
    below = np.zeros(len(stds))
    for part, colour in (("tokens", plots.BLUE), ("positions", plots.ORANGE), ("types", plots.GREY)):
        share = np.array([getattr(found[test], part) for found in stds.values()])
        right.bar(range(len(stds)), share, bottom=below, color=colour, label=part, width=0.6)
        below += share
    right.set_xticks(range(len(stds)), list(stds), fontsize=8)
    right.set_ylabel("share of the variance")
    right.set_title(f"{test} tokens: parts of the sum, before any LayerNorm")
    left.legend(fontsize=7, loc="center right")
    figure.legend(*right.get_legend_handles_labels(), loc="outside upper right", ncols=3, fontsize=8)
    plots.caption(figure, caption)
    return figure


def errors(found: Mapping[str, Mapping[str, float]], caption: str) -> Figure:
    """How far each step is off when one difference alone is there, and when all are: a map of differences by steps."""
    figure, axes = plots.figure(width=9.5, height=0.28 * len(found) + 1.7)
    names = [step for step in next(iter(found.values())) if all(step in one for one in found.values())]
    grid = np.array([[one[step] for step in names] for one in found.values()])
    image = plots.error_map(axes, grid, "error of each step; yellow: 1 or more, darkest: 1e-5 or less", 1.0, 1e-5)
    axes.set_yticks(range(len(found)), list(found), fontsize=7)
    axes.set_xticks(range(len(names)), names, rotation=70, ha="right", fontsize=7)
    figure.colorbar(image, ax=axes, shrink=0.8, pad=0.01, label="relative RMS error")
    plots.caption(figure, caption)
    return figure


def curves(rows: Sequence[Row], caption: str) -> Figure:
    """The training loss of live runs, a line a run, with the mean of all steps and of the last tenth."""
    figure, axes = plots.figure(width=8.0, height=3.2)
    names = list(dict.fromkeys(row["preset"] for row in rows))
    colours = dict(zip(names, (plots.RED, plots.BLUE, plots.GREEN), strict=False))
    first = min(row["seed"] for row in rows)
    for row in rows:
        x = np.linspace(0.0, row["steps"], len(row["curve"]) + 1)[1:]
        axes.plot(x, row["curve"], color=colours[row["preset"]], lw=1.6 if row["seed"] == first else 0.7)
    for k, (name, colour) in enumerate(colours.items()):
        mean = float(np.mean([row["loss_all_steps"] for row in rows if row["preset"] == name]))
        axes.axhline(mean, color=colour, ls=(6.0 * k, (5.0, 13.0)), lw=1.4)  # dashes that leave room for the others'
        axes.plot([], [], color=colour, label=name)
    axes.set_xlabel("step")
    axes.set_ylabel("training loss, nats")
    axes.set_title("a line a run, thick: the first seed; broken lines: mean of all steps and seeds")
    axes.legend(fontsize=8)
    plots.caption(figure, caption)
    return figure


def recorded(rows: Sequence[Row], named: Sequence[str], frequencies: float, caption: str) -> Figure:
    """The recorded trainings, coloured by family: the training loss against tokens seen, a line a run, and the held-out
    loss against the positions' share in the variance of the trained input, a point a run.

    The configurations in `named` have a thick line for the mean of their seeds, and their name in both pictures;
    `frequencies` is the loss of one who knows how frequent tokens are and nothing else.
    """
    figure, (left, right) = plots.figure(1, 2, width=9.5, height=4.2)
    families = list(dict.fromkeys(evidence.FAMILIES.values()))
    colours = dict(zip(families, (plots.BLUE, plots.ORANGE, plots.GREEN), strict=True))
    pale = {name: 0.5 + 0.5 * np.array(to_rgb(colour)) for name, colour in colours.items()}
    tokens = evidence.tokens_seen(rows[0])
    for row in rows:
        left.plot(tokens, row["curve"], color=pale[evidence.family(row)], lw=0.5, aa=False)
        colour = colours[evidence.family(row)]
        right.plot(row["input"]["positions"], row["validation_loss"], "o", color=colour, ms=3, aa=False)
    ends: dict[str, float] = {}
    for name in named:
        own = [row for row in rows if row["preset"] == name]
        if own:
            mean = np.mean([row["curve"] for row in own], 0)
            left.plot(tokens, mean, color=colours[evidence.family(own[0])], lw=2.2)
            ends[name] = mean[-1]
            share, loss = np.mean([(row["input"]["positions"], row["validation_loss"]) for row in own], 0)
            side, right_of = ("left", 5) if share < 0.3 else ("right", -5) if share > 0.7 else ("center", 0)
            right.annotate(
                name, (share, loss), (right_of, 6 + 5 * (not right_of)), textcoords="offset points", fontsize=7, ha=side
            )
    free = -math.inf
    for name, end in sorted(ends.items(), key=lambda one: one[1]):
        free = max(end, free + APART)
        left.text(tokens[-1] * 1.01, free, name, fontsize=7, va="center")
    for axes in (left, right):
        axes.axhline(frequencies, color="0.5", ls="--", lw=0.9)
    right.text(0.5, frequencies + 0.05, "tokens' frequencies alone", fontsize=7, ha="center", color="0.4")
    for name, colour in colours.items():
        left.plot([], [], color=colour, label=name)
    left.set_xlim(0.0, tokens[-1] * 1.5)
    left.set_xlabel("tokens, millions")
    left.set_ylabel("training loss, nats")
    left.set_title("thin: a run; thick: mean of the seeds")
    right.set_xlabel("positions' share in the trained input's variance")
    right.set_ylabel("held-out loss, nats")
    right.set_title("a point a run, at its end")
    figure.legend(*left.get_legend_handles_labels(), loc="outside upper right", ncols=3, fontsize=7)
    plots.caption(figure, caption)
    return figure


APART = 0.16
"""Nats between two names in a picture of curves, so that they can be read."""
WIDE = 1.0
"""Nats: contrasts whose intervals reach further have a panel of their own."""


def gains(found: Mapping[Any, Contrast], margin: float, caption: str) -> Figure:
    """What one configuration gains over another, with its interval; the margin is shaded. Those that reach beyond
    :data:`WIDE` have a panel with a scale of its own."""
    known = [one for one in found.values() if one.outcome != MISSING]
    colours = {BETTER: plots.BLUE, WORSE: plots.RED, SAME: plots.GREEN, OPEN: plots.GREY}
    wide = [max(abs(one.low), abs(one.high)) > WIDE for one in known]
    panels = [
        part for part in ([o for o, w in zip(known, wide, strict=True) if w is kind] for kind in (False, True)) if part
    ]
    figure, axes = plots.figure(len(panels), 1, width=8.5, height=0.2 * len(known) + 1.0 + 0.5 * len(panels))
    for panel, part in zip(np.atleast_1d(axes), panels, strict=True):
        panel.axvspan(-margin, margin, color=plots.ORANGE, alpha=0.3, lw=0)
        panel.axvline(0.0, color="0.5", lw=0.8)
        for y, one in enumerate(part):
            panel.plot([one.low, one.high], [y, y], color=colours[one.outcome], lw=2.0)
            panel.plot(one.mean, y, "o", color=colours[one.outcome], ms=4)
        panel.set_yticks(range(len(part)), [" over ".join(one.pair) for one in part], fontsize=7)
        panel.set_ylim(len(part) - 0.5, -0.5)
        panel.set_xlabel("gain in held-out loss, nats")
    np.atleast_1d(axes)[0].get_gridspec().set_height_ratios([len(part) for part in panels])
    for outcome in dict.fromkeys(one.outcome for one in known):
        panel.plot([], [], "o-", color=colours[outcome], label=WORDS[outcome])
    panel.axvspan(0.0, 0.0, color=plots.ORANGE, alpha=0.3, lw=0, label=f"margin, {margin} nats")
    figure.legend(loc="outside upper right", ncols=5, fontsize=8)
    bars = f"bars: Student's intervals that hold for all {len(found)} contrasts together; each panel has its own scale"
    plots.caption(figure, f"{bars}; {caption}")
    return figure
