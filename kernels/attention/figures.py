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


def differences(
    likelihoods: Sequence[Likelihood], level: float, reported: tuple[float, float], calls: set[Call]
) -> Figure:
    """Wrong outcomes counted by their mean largest difference; those that fit in blue, the report's range as a band.

    A mark stands over the outcomes that `calls`, the report's diagnosis, give.
    """
    figure, axis = plots.figure(width=8.4, height=3.6)
    left, right = 2.0, 100.0
    fits = [item.mean for item in likelihoods if item.chance >= level]
    others = [item.mean for item in likelihoods if item.chance < level and item.mean < right]  # no NaN among them
    edges = np.geomspace(left, right, 48)
    heights, *_ = axis.hist([fits, others], edges, stacked=True, color=[plots.BLUE, plots.GREY])
    top = float(np.max(heights))
    axis.axvspan(*reported, color=plots.ORANGE, alpha=0.35, lw=0, zorder=0)
    axis.text(reported[1] * 1.02, top * 1.18, f"the report's range, {reported[0]} to {reported[1]}", fontsize=9)
    if fits:
        axis.text(reported[1] * 1.05, top * 0.75, f"{len(fits)} fit", color=plots.BLUE, fontsize=9)
    beyond = len(likelihoods) - len(fits) - len(others)
    words = f"{len(likelihoods) - len(fits)} ruled out ({beyond} not drawn: larger, or not finite)"
    axis.text(right, top * 0.55, words, color=plots.GREY, ha="right", fontsize=9)
    diagnosed = [i.mean for i in likelihoods if calls & set(i.outcome.calls) and left < i.mean < right]
    axis.plot(diagnosed, [top * 1.05] * len(diagnosed), "v", color="black", ms=7)
    for mean in diagnosed[:1]:
        axis.text(mean * 0.94, top * 1.05, "the report's diagnosis", ha="right", va="center", fontsize=9)
    axis.set(xscale="log", xlim=(left, right), ylim=(0.0, top * 1.3), ylabel="wrong products")
    axis.xaxis.set_major_formatter(ScalarFormatter())
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set_xticks([2, 5, 10, 20, 50, 100])
    axis.set_xlabel("largest |Q K^T - right| in a head, mean over draws")
    axis.set_title(f"{len(fits)} of {len(likelihoods)} different wrong products pass for the report's")
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
