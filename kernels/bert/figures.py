"""The notebook's pictures, one message each, which the title says; and its table of speed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from kernels.bert.ablation import DIFFERENCES, PLATEAU, WORDS, WORSE, Trainings, corrected, tokens_seen
from kernels.bert.inputs import Inputs
from kernels.bert.reported import LOSSES, OWN, THEIRS
from labkit import bench
from labkit.session.catalogue import ROOT
from labkit.session.record import stale
from whywrong import Table
from whywrong.drawing import plots
from whywrong.tables import digits

APART = 0.2
"""Nats between two names in a picture of curves, so that they can be read."""


def plot_losses() -> Figure:
    """Mean training loss of the source's trainings: by epoch, and of all steps; the report's two numbers circled."""
    figure, axes = plots.figure(width=8.0, height=3.4)
    for name, colour in ((OWN, plots.RED), (THEIRS, plots.BLUE)):
        epochs = [LOSSES[name][f"epoch {k}"] for k in (1, 2, 3)]
        axes.plot((1, 2, 3), epochs, "o-", color=colour)
        axes.plot((1.0, 3.2), [LOSSES[name]["all steps"]] * 2, color=colour, ls="--", lw=0.9)
        axes.text(0.94, epochs[0], name, color=colour, fontsize=8, ha="right", va="center")
    ends = [(OWN, "all steps", 3.2, 0.09), (THEIRS, "all steps", 3.2, -0.09)]
    ends += [(OWN, "epoch 3", 3.0, 0.0), (THEIRS, "epoch 3", 3.0, -0.1)]
    for name, statistic, x, up in ends:
        y, colour = LOSSES[name][statistic], plots.RED if name == OWN else plots.BLUE
        words = "last epoch" if statistic == "epoch 3" else statistic
        axes.text(3.3, y + up, f"{y:.2f}: {name}, {words}", fontsize=8, va="center", color=colour)
        if (name == OWN) == (statistic == "epoch 3"):
            axes.plot(x, y, "o", ms=13, mfc="none", mec="black", mew=1.2)
    axes.set(xlim=(0.35, 4.5), ylim=(4.4, 7.2), xticks=(1, 2, 3), xlabel="epoch (broken lines: mean of all steps)")
    axes.set(ylabel="mean training loss, nats")
    axes.set_title("The report compares the two circled numbers: they are different statistics")
    plots.caption(figure, "figures of the source's repository, one training each")
    return figure


def plot_errors(
    errors: Mapping[str, Mapping[str, float]], steps: Mapping[str, str], title: str, caption: str
) -> Figure:
    """Relative RMS error of each step as a colour and, from 1%, a number: a row a difference, a line above the last.

    `steps`: those shown, and labels.
    """
    figure, axes = plots.figure(width=9.0, height=0.27 * len(errors) + 1.9)
    grid = np.array([[by_step.get(step, np.nan) for step in steps] for by_step in errors.values()])
    grid = np.nan_to_num(grid, nan=1.0)
    image = plots.error_map(axes, grid, title, 10.0, 1e-5)
    for (row, column), error in np.ndenumerate(grid):
        if error >= 0.01:
            axes.text(column, row, digits(error), fontsize=7, ha="center", va="center")
    axes.axhline(len(errors) - 1.5, color="white", lw=4)
    axes.set_yticks(range(len(errors)), list(errors), fontsize=8)
    axes.set_xticks(range(len(steps)), list(steps.values()), rotation=40, ha="right", fontsize=8)
    figure.colorbar(image, ax=axes, shrink=0.9, pad=0.01, label="relative RMS error")
    plots.caption(figure, f"{caption}; errors below 0.01 have no number")
    return figure


def plot_input_std(inputs: Mapping[str, Mapping[int, Inputs]], reported: Mapping[str, float], caption: str) -> Figure:
    """Standard deviation of the encoder's input by length, a line a model; bands: `reported`, within 10%."""
    figure, axes = plots.figure(width=8.0, height=3.8)
    lengths = list(next(iter(inputs.values())))
    std = {name: [by[n].std for n in lengths] for name, by in inputs.items()}
    plots.lines(axes, lengths, std)
    for line, (name, value) in zip(axes.lines, reported.items(), strict=True):
        colour = line.get_color()
        axes.axhspan(value * 0.9, value * 1.1, color=colour, alpha=0.2, lw=0)
        axes.text(lengths[0] * 0.8, std[name][0], name, color=colour, fontsize=8, va="center", ha="right")
        axes.text(lengths[-1] * 1.3, value, f"reported: {value}", color=colour, fontsize=8, va="center")
    axes.set_xlim(lengths[0] * 0.2, lengths[-1] * 6)
    axes.set_xticks(lengths, list(map(str, lengths)), fontsize=8)
    axes.minorticks_off()
    ticks = (0.05, 0.1, 0.2, 0.5, 1.0)
    axes.set_yticks(ticks, list(map(str, ticks)))
    axes.set(xlabel="tokens of the input", ylabel="standard deviation")
    missed = [name for name, value in reported.items() if not any(abs(s / value - 1.0) <= 0.1 for s in std[name])]
    axes.set_title(f"{len(missed)} of {len(reported)} reported sizes is missed at every length (bands: within 10%)")
    plots.caption(figure, caption)
    return figure


def plot_gains(t: Trainings, caption: str) -> Figure:
    """What each of the seven differences gains when it alone is corrected, and the author's repair, with intervals."""
    rows = {name: t.gains[corrected(name)] for name in DIFFERENCES} | {
        "author's repair": t.gains["author_fix", "report"]
    }
    rows = dict(sorted(rows.items(), key=lambda row: -row[1].mean))
    words = {True: ("shown", plots.BLUE), False: ("excluded", plots.RED), None: ("open", plots.GREY)}
    figure, axes = plots.figure(width=8.0, height=3.4)
    axes.axvspan(-t.plan.margin, t.plan.margin, color=plots.ORANGE, alpha=0.25, lw=0)
    axes.axvline(0.0, color="0.5", lw=0.8)
    for y, contrast in enumerate(rows.values()):
        verdict, colour = words[contrast.gains_enough]
        verdict += f": {WORDS[WORSE]}" * (contrast.outcome == WORSE)
        axes.plot([contrast.low, contrast.high], [y, y], color=colour, lw=2.2)
        axes.plot(contrast.mean, y, "o", color=colour, ms=5)
        axes.text(max(contrast.high, t.plan.margin) + 0.012, y, verdict, color=colour, fontsize=8, va="center")
    axes.set_yticks(range(len(rows)), list(rows), fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(right=max(contrast.high for contrast in rows.values()) + 0.12)
    count = sum(contrast.gains_enough is True for name, contrast in rows.items() if name in DIFFERENCES)
    axes.set_title(
        f"{count} of {len(DIFFERENCES)} differences gain when corrected alone (band: margin of {t.plan.margin} nats)"
    )
    axes.set_xlabel("gain in held-out loss over the report's model, nats")
    plots.caption(figure, caption)
    return figure


def plot_plateaus(t: Trainings, panels: Mapping[str, Sequence[str]], caption: str) -> Figure:
    """Training loss against tokens, the mean over seeds of each configuration: `panels` has titles and what is in them.

    Red-orange where :meth:`Trainings.stalled`, else blue; the report's model, in every panel, is black. A thin line
    leads from a curve's end to its name.
    """
    figure, row = plots.figure(1, len(panels), width=10.5, height=3.4)
    names = list(dict.fromkeys(name for some in panels.values() for name in some))
    stalled, seen = t.stalled(*[(name, name) for name in names]), tokens_seen(t.rows[0])
    last = seen[-1]
    for axes, (title, some) in zip(row, panels.items(), strict=True):
        free = -math.inf
        curves = {name: np.mean([line["curve"] for line in t.of_preset(name)], 0) for name in some}
        for name, curve in sorted(curves.items(), key=lambda item: item[1][-1]):
            free = max(curve[-1], free + APART)
            colour = "black" if name == "report" else plots.RED if name in stalled else plots.BLUE
            axes.plot(seen, curve, color=colour, lw=1.3)
            axes.plot([last * 1.01, last * 1.1], [curve[-1], free], color="0.7", lw=0.6)
            axes.text(last * 1.12, free, name, color=colour, fontsize=8, va="center")
        axes.axhline(PLATEAU, xmax=1 / 1.85, color="0.5", ls="--", lw=0.9)
        ticks = [*range(0, math.ceil(last * 0.9), 20), last]
        axes.set_xticks(ticks, [f"{tick:.0f}" for tick in ticks])
        axes.set(xlim=(0.0, last * 1.85), ylim=(3.3, 7.2), xlabel="tokens, millions", title=title)
    row[0].set_ylabel("training loss, nats")
    row[1].text(last, PLATEAU + 0.06, "above: the plateau", fontsize=7, ha="right", color="0.4")
    where = "stay on a plateau for more than half of the training (red-orange)"
    figure.suptitle(f"{len(stalled)} of {len(names)} models {where}", fontsize=10, x=0.01, ha="left")
    plots.caption(figure, caption)
    return figure


def embedding_times(path: Path) -> Table:
    """Microseconds of the fused embedding and its baselines, forward / forward and backward, from a benchmark's CSV: a
    row a case, a column a provider. In a CUDA graph, but for the traffic lower bound."""
    rows = bench.read(path)
    cases: dict[str, dict[str, list[str]]] = {}
    for row in rows:
        metric = "time" if row["kernel_provider"] == "traffic lower bound" else "time_in_graph"
        if row["kernel_name"] == "bert_embedding" and row["metric_name"] == metric:
            providers = cases.setdefault(row["x_value"], {})
            providers.setdefault(row["kernel_provider"], []).append(f"{float(row['y_value_50']):.0f}")
    title = f"recorded on {bench.recorded_on(rows)}{age(path)}"
    names = list(next(iter(cases.values())))  # in other cases they were timed in another order
    shown = [(case, *(" / ".join(providers[name]) for name in names)) for case, providers in cases.items()]
    return Table(("batch x length, ids, type", *names), shown, title=title)


def age(path: Path) -> str:
    """Words for a caption, where a record was made by code that has changed since."""
    return ", kernels changed since" if str(path.relative_to(ROOT)) in stale() else ""
