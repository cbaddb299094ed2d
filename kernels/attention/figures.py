"""The notebook's pictures."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, ScalarFormatter

from kernels.attention.calls import Call
from kernels.attention.survey import Likelihood
from whywrong.drawing import plots


def products(right: np.ndarray, wrong: np.ndarray, title: str, name: str, largest: float = 30.0) -> Figure:
    """One head's correct product, the wrong one, and |wrong - right|: [n, m] each. Black is right, red a NaN."""
    figure, axes = plots.figure(1, 3, width=9.0, height=3.2)
    figure.suptitle(title, x=0.01, ha="left")
    both = np.concatenate([right.ravel(), wrong[np.isfinite(wrong)]])
    low, high = np.quantile(both, [0.001, 0.999])  # a stray number outside an operand would hide all others
    scale = {"vmin": float(low), "vmax": float(high), "interpolation": "nearest", "aspect": "auto"}
    colours = plots.plt.get_cmap("viridis", 16).copy()
    colours.set_bad(plots.RED)
    for axis, values, label in ((axes[0], right, "correct product"), (axes[1], wrong, name)):
        image = axis.imshow(values, cmap=colours, **scale)
        axis.set_title(label)
        axis.set_xlabel("key")
    axes[0].set_ylabel("query")
    figure.colorbar(image, ax=axes[:2], label="score")
    difference = abs(wrong.astype(np.float64) - right)
    image = plots.error_map(axes[2], difference, "|wrong - right|", largest, smallest=1e-3)
    zero = np.ma.masked_where(~(difference < 1e-4), np.ones_like(difference))
    axes[2].imshow(zero, cmap="gray", vmin=1.0, vmax=2.0, interpolation="nearest", aspect="auto")
    axes[2].set_xlabel("key (black: right, to rounding)")
    figure.colorbar(image, ax=axes[2], label="difference")
    return figure


def strip(width: int, right: int, wrong: int, picked: int = 6, rows: int = 12) -> Figure:
    """Q in memory, row after row of `width` numbers, and the first numbers that one score takes.

    Above with the leading dimension of a correct call, where the row of one query is read, below with `wrong` numbers
    from one to the next: `right` and `wrong` are what lies between two numbers that are read.
    """
    figure, axes = plots.figure(2, 1, width=9.0, height=3.0)
    for axis, step, words in zip(axes, (right, wrong), ("right: the numbers of query 0", "wrong"), strict=True):
        for row in range(rows):
            axis.axvspan(row * width, (row + 1) * width, color=plots.GREY, alpha=0.12 + 0.13 * (row % 2), lw=0)
            axis.text((row + 0.5) * width, -0.62, f"query {row}", ha="center", va="top", fontsize=8)
        places = [i * step for i in range(width) if i * step < rows * width]
        axis.vlines(places, 0.0, 1.0, color=plots.BLUE if step == right else plots.RED, lw=1.2)
        queries = sorted({place // width for place in places})[:picked]
        taken = f"numbers 0, {step}, {2 * step}, {3 * step}, ... of Q"
        if step != right:
            words = f"wrong: the first number of queries {', '.join(map(str, queries))}, ..."
        axis.set_title(f"{taken}; {words}", fontsize=10)
        axis.set(xlim=(-5, rows * width), ylim=(-0.5, 1.1), yticks=[], xticks=[])
    return figure


def differences(
    likelihoods: Sequence[Likelihood], level: float, reported: tuple[float, float], calls: set[Call]
) -> Figure:
    """Each wrong product as a line from its smallest to its largest of twelve heads, in the order of its mean.

    Those that fit are blue, the report's range is a band; `calls`, the report's diagnosis, are black.
    """
    figure, axis = plots.figure(width=8.4, height=4.2)
    drawn = sorted((item for item in likelihoods if item.mean < 60.0), key=lambda item: item.mean)  # no NaN among them
    axis.axvspan(*reported, color=plots.ORANGE, alpha=0.35, lw=0, zorder=0)
    for height, item in enumerate(drawn):
        ends = [float(np.median(end)) for end in (item.differences.min(1), item.differences.max(1))]
        diagnosed = bool(calls & set(item.outcome.calls))
        colour = "black" if diagnosed else plots.BLUE if item.chance >= level else plots.GREY
        axis.hlines(height, *ends, color=colour, lw=3.0 if diagnosed else 1.4, zorder=3 if diagnosed else 2)
        if diagnosed:
            axis.annotate("the report's diagnosis", (ends[1], height), (14.0, height), fontsize=9, va="center",
                          arrowprops={"arrowstyle": "-", "lw": 0.8})  # fmt: skip
    fits = sum(item.chance >= level for item in likelihoods)
    top = len(drawn)
    axis.text(reported[1] * 1.02, top * 0.97, f"the report's range, {reported[0]} to {reported[1]}", fontsize=9)
    axis.text(17.0, top * 0.18, f"blue: {fits} fit\ngrey: {len(likelihoods) - fits} are ruled out", fontsize=9)
    axis.set(xscale="log", ylim=(-2.0, top * 1.03), ylabel="wrong products, by size of error", yticks=[])
    axis.xaxis.set_major_formatter(ScalarFormatter())
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set_xticks([5, 8, 10, 15, 20, 30, 50])
    beyond = len(likelihoods) - len(drawn)
    axis.set_xlabel(f"smallest to largest of 12 heads, of the largest |Q K^T - right| ({beyond} more lie beyond)")
    axis.set_title(f"{fits} of {len(likelihoods)} different wrong products pass for the report's")
    return figure


def speed(table: Sequence[dict[str, str]], sizes: int = 5) -> Figure:
    """Times in a CUDA graph of each provider at the first `sizes` sizes of a benchmark, and the lower bounds."""
    rows = [row for row in table if row["kernel_name"] == "attention_qk"]
    shown = list(dict.fromkeys(row["x_value"] for row in rows))[:sizes]
    figure, axes = plots.figure(1, len(shown), width=12, height=3.4)
    for axis, size in zip(axes, shown, strict=True):
        here = [row for row in rows if row["x_value"] == size]
        lower_bounds = {
            r["kernel_provider"]: float(r["y_value_50"]) for r in here if "lower bound" in r["kernel_provider"]
        }
        timed = {r["kernel_provider"]: float(r["y_value_50"]) for r in here if r["metric_name"] == "time_in_graph"}
        plots.bars(axis, timed, "\u00b5s, in a CUDA graph", lower_bounds)
        axis.set_title(size)
        axis.tick_params(labelleft=axis is axes[0])
    low, high = zip(*(axis.get_xlim() for axis in axes), strict=True)
    for axis in axes:  # the same length is the same time in each panel
        axis.set_xlim(min(low), max(high))
    figure.suptitle("One batch of all heads takes less time than a loop over them", x=0.01, ha="left")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=2, fontsize=8)
    return figure
