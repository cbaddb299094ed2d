"""The notebook's pictures: one message each, which the title says."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from kernels.bert.ablation import BETTER, DIFFERENCES, OPEN, PLATEAU, SAME, WORDS, WORSE, Trainings, corrected
from kernels.bert.ablation import tokens_seen as millions
from kernels.bert.inputs import Inputs
from kernels.bert.reported import LOSSES, OWN, THEIRS
from labkit import plots

FREQUENCIES = 6.904
"""Nats: the held-out loss of the frequencies of the training text's tokens (`python -m kernels.bert facts`)."""
APART = 0.17
"""Nats between two names in a picture of curves, so that they can be read."""


def show(figure: Figure, alt: str) -> None:
    """Display a figure with a text for those who do not see it."""
    import matplotlib.pyplot as plt
    from IPython.display import display

    display(figure, metadata={"image/png": {"alt": alt}})
    plt.close(figure)


def plot_losses() -> Figure:
    """Mean training loss of the source's trainings: by epoch, and of all steps; the report's two numbers circled."""
    figure, axes = plots.figure(width=8.0, height=3.2)
    for name, colour in ((OWN, plots.RED), (THEIRS, plots.BLUE)):
        epochs = [LOSSES[name][f"epoch {k}"] for k in (1, 2, 3)]
        axes.plot((1, 2, 3), epochs, "o-", color=colour)
        axes.axhline(LOSSES[name]["all steps"], xmax=0.72, color=colour, ls="--", lw=0.9)
        axes.text(1.06, epochs[0] + 0.05, name, color=colour, fontsize=8)
    last, steps, other = LOSSES[OWN]["epoch 3"], LOSSES[THEIRS]["all steps"], LOSSES[THEIRS]["epoch 3"]
    for x, y in ((3.0, last), (3.15, steps)):
        axes.plot(x, y, "o", ms=13, mfc="none", mec="black", mew=1.2)
    axes.text(3.25, last + 0.05, f"{last:.1f}: own, last epoch", fontsize=8, va="bottom", color=plots.RED)
    axes.text(3.25, other - 0.05, f"{other:.1f}: Hugging Face, last epoch", fontsize=8, va="top", color=plots.BLUE)
    axes.text(3.25, steps, f"{steps:.1f}: Hugging Face, all steps", fontsize=8, va="center", color=plots.BLUE)
    axes.set(xlim=(0.9, 4.4), xticks=(1, 2, 3), xlabel="epoch (broken lines: mean of all steps)")
    axes.set(
        ylabel="mean training loss, nats", title="The report compares the two circled numbers: not the same statistic"
    )
    plots.caption(figure, "figures of the source's repository, one training each")
    return figure


def plot_errors(
    errors: Mapping[str, Mapping[str, float]], steps: Mapping[str, str], title: str, caption: str
) -> Figure:
    """Relative RMS error of each step, a row a difference; `steps` are those shown, and their labels."""
    figure, axes = plots.figure(width=9.0, height=0.27 * len(errors) + 1.9)
    grid = np.array([[by_step.get(step, np.nan) for step in steps] for by_step in errors.values()])
    image = plots.error_map(axes, np.nan_to_num(grid, nan=1.0), title, 1.0, 1e-5)
    axes.set_yticks(range(len(errors)), list(errors), fontsize=8)
    axes.set_xticks(range(len(steps)), list(steps.values()), rotation=40, ha="right", fontsize=8)
    figure.colorbar(image, ax=axes, shrink=0.9, pad=0.01, label="relative RMS error")
    plots.caption(figure, caption)
    return figure


def plot_input_std(inputs: Mapping[str, Mapping[int, Inputs]], reported: Mapping[str, float], caption: str) -> Figure:
    """Standard deviation of the encoder's input by length, a line a model; bands: `reported`, within 10%."""
    figure, axes = plots.figure(width=8.0, height=3.2)
    lengths = list(next(iter(inputs.values())))
    plots.lines(axes, lengths, {name: [by[n].std for n in lengths] for name, by in inputs.items()})
    for line, (name, value) in zip(axes.lines, reported.items(), strict=True):
        axes.axhspan(value * 0.9, value * 1.1, color=line.get_color(), alpha=0.2, lw=0)
        text = f"{name}, reported: {value}"
        axes.text(lengths[-1] * 1.15, line.get_ydata()[-1], text, color=line.get_color(), fontsize=8, va="center")
    axes.set_xlim(lengths[0] * 0.85, lengths[-1] * 12)
    axes.set_xticks(lengths, list(map(str, lengths)), fontsize=8)
    axes.minorticks_off()
    ticks = (0.05, 0.1, 0.2, 0.5, 1.0)
    axes.set_yticks(ticks, list(map(str, ticks)))
    axes.set(xlabel="tokens of the input", ylabel="standard deviation")
    axes.set_title("One of the three reported sizes (bands: within 10%) is missed at every length")
    plots.caption(figure, caption)
    return figure


def plot_gains(t: Trainings, caption: str) -> Figure:
    """What each of the seven differences gains when it alone is corrected, and the author's repair, with intervals."""
    rows = {name: t.gains[corrected(name)] for name in DIFFERENCES} | {
        "author's repair": t.gains["author_fix", "report"]
    }
    rows = dict(sorted(rows.items(), key=lambda row: -row[1].mean))
    colours = {BETTER: plots.BLUE, WORSE: plots.RED, SAME: plots.GREEN, OPEN: plots.GREY}
    figure, axes = plots.figure(width=8.0, height=3.4)
    axes.axvspan(-t.plan.margin, t.plan.margin, color=plots.ORANGE, alpha=0.25, lw=0)
    axes.axvline(0.0, color="0.5", lw=0.8)
    for y, contrast in enumerate(rows.values()):
        axes.plot([contrast.low, contrast.high], [y, y], color=colours[contrast.outcome], lw=2.2)
        axes.plot(contrast.mean, y, "o", color=colours[contrast.outcome], ms=5)
        axes.text(contrast.high + 0.012, y, WORDS[contrast.outcome], fontsize=8, va="center")
    axes.set_yticks(range(len(rows)), list(rows), fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(right=max(contrast.high for contrast in rows.values()) + 0.12)
    count = sum(contrast.outcome == BETTER for name, contrast in rows.items() if name in DIFFERENCES)
    axes.set_title(
        f"{count} of {len(DIFFERENCES)} differences gain when corrected alone (band: margin of {t.plan.margin} nats)"
    )
    axes.set_xlabel("gain in held-out loss over the report's model, nats")
    plots.caption(figure, caption)
    return figure


def plot_plateaus(t: Trainings, names: Sequence[str], caption: str) -> Figure:
    """Training loss against tokens, the mean over seeds of each configuration, red where :meth:`Trainings.stalled`."""
    figure, axes = plots.figure(width=8.0, height=3.8)
    ends = {}
    for name in names:
        rows = t.of_preset(name)
        curve = np.mean([row["curve"] for row in rows], 0)
        colour = plots.RED if t.stalled((name, name)) else plots.BLUE
        axes.plot(millions(rows[0]), curve, color=colour, lw=1.4)
        ends[name] = (curve[-1], colour)
    last, free = millions(t.rows[0])[-1], -math.inf
    for name, (end, colour) in sorted(ends.items(), key=lambda item: item[1][0]):
        free = max(end, free + APART)
        axes.text(last * 1.01, free, name, color=colour, fontsize=8, va="center")
    for level, words in ((FREQUENCIES, "frequencies of tokens alone"), (PLATEAU, "below: left the plateau")):
        axes.axhline(level, color="0.5", ls="--", lw=0.9)
        axes.text(last * 1.5, level + 0.05, words, fontsize=7, ha="right", color="0.4")
    axes.set(xlim=(0.0, last * 1.5), xlabel="tokens, millions", ylabel="training loss, nats")
    axes.set_title("At one learning rate, BERT's kin stay on a plateau for most of the training (red)")
    plots.caption(figure, caption)
    return figure
