"""The notebook's pictures."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from IPython.display import display
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import NullFormatter, ScalarFormatter

from kernels.attention.calls import Call, diagnosis
from kernels.attention.survey import Fate, Likelihood, fitting
from labkit import plots

INSIDE = {Fate.WRONG: "inside its operands", Fate.READS_OUTSIDE: "reads outside", Fate.WRITES_OUTSIDE: "writes outside"}


def show(figure: Figure, alt: str) -> None:
    """Show a figure with a text for those who cannot see it."""
    figure.set_facecolor("white")
    display(figure, metadata={"image/png": {"alt": alt}})
    plt.close(figure)


def products(right: np.ndarray, wrong: np.ndarray, title: str, largest: float = 30.0) -> Figure:
    """One head's right product, the wrong one, and |wrong - right|: [n, m] each. Black is an exact zero, red a NaN."""
    figure, axes = plots.figure(1, 3, width=9.0, height=2.9)
    both = np.concatenate([right.ravel(), wrong[np.isfinite(wrong)]])
    low, high = np.quantile(both, [0.001, 0.999])  # a stray number outside an operand would hide all others
    scale = {"vmin": float(low), "vmax": float(high), "interpolation": "nearest", "aspect": "auto"}
    colours = plt.get_cmap("viridis", 16).copy()
    colours.set_bad(plots.RED)
    for axis, values, name in ((axes[0], right, "right product"), (axes[1], wrong, title)):
        image = axis.imshow(values, cmap=colours, **scale)
        axis.set_title(name)
        axis.set_xlabel("key")
    axes[0].set_ylabel("query")
    figure.colorbar(image, ax=axes[:2], label="score")
    difference = abs(wrong.astype(np.float64) - right)
    image = plots.error_map(axes[2], difference, "|wrong - right|", largest, smallest=1e-2)
    zero = np.ma.masked_where(~(difference < 1e-4), np.ones_like(difference))
    axes[2].imshow(zero, cmap="gray", vmin=1.0, vmax=2.0, interpolation="nearest", aspect="auto")
    axes[2].set_xlabel("key (black: right, to rounding)")
    figure.colorbar(image, ax=axes[2], label="difference")
    return figure


def _row(item: Likelihood, diagnosed: set[Call]) -> str:
    if diagnosed & set(item.outcome.calls):
        return "the report's diagnosis"
    kind = "in blocks" if all(call.block for call in item.outcome.calls) else "one call"
    return f"{kind}, {INSIDE[item.outcome.fate]}"


def groups(
    judged: Sequence[Likelihood], right: float, level: float, reported: tuple[float, float], block: int
) -> Figure:
    """Every wrong outcome a dot at its mean largest difference, in rows by kind; the right call as a mark by itself.

    `right` is the right call's largest difference.
    """
    diagnosed = set(diagnosis(block).values())
    kinds = [f"{kind}, {where}" for where in INSIDE.values() for kind in ("one call", "in blocks")]
    rows: dict[str, list[Likelihood]] = {name: [] for name in ("the report's diagnosis", *kinds)}
    for item in judged:
        rows[_row(item, diagnosed)].append(item)
    rows = {name: items for name, items in rows.items() if items}
    figure, axis = plots.figure(width=8.8, height=4.6)
    axis.set_xscale("log")
    axis.axvspan(*reported, color=plots.ORANGE, alpha=0.35, lw=0)
    left, largest = 2.0, 100.0
    for y, items in enumerate(rows.values(), start=1):
        shown = [item for item in items if np.isfinite(item.mean) and item.mean < largest]
        mark, size = ("D", 7) if y == 1 else ("o", 4)
        for x, lift, fits in _stacked(shown, level):
            colour = plots.BLUE if fits else plots.GREY
            axis.plot(x, y + (0.0 if y == 1 else lift), mark, color=colour, ms=size, mec="white", mew=0.4)
        if beyond := len(items) - len(shown):
            axis.plot(largest * 0.96, y, marker=">", color=plots.GREY, ms=6)
            axis.text(largest * 0.89, y, f"{beyond} larger, or not finite", va="center", ha="right", fontsize=8)
    axis.plot(left * 1.03, 0, marker="<", color=plots.GREEN, ms=9, ls="")
    axis.text(left * 1.08, 0, f"{right:.0e}, far to the left: rounding alone", va="center", fontsize=8)
    counts = [f"{name} ({len(items)})" for name, items in rows.items()]
    axis.set_yticks(range(len(rows) + 1), ["the right call", *counts], fontsize=8)
    axis.set_ylim(len(rows) + 0.45, -0.6)
    axis.set_xlim(left, largest)
    axis.xaxis.set_major_formatter(ScalarFormatter())
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set_xticks([2, 5, 10, 20, 50, 100])
    axis.set_xlabel("largest |Q K^T - right| in a head, mean over draws")
    handles = [
        Patch(color=plots.ORANGE, alpha=0.35, label=f"orange: reported, {reported[0]} to {reported[1]}"),
        Line2D([], [], marker="o", ls="", color=plots.BLUE, label=f"blue: fits at a level of {level:g}"),
        Line2D([], [], marker="o", ls="", color=plots.GREY, label="grey: ruled out"),
        Line2D([], [], marker="D", ls="", color="black", mfc="none", label="diamond: the report's diagnosis"),
    ]
    figure.legend(
        handles=handles, loc="outside upper center", ncols=4, fontsize=8, handletextpad=0.4, columnspacing=1.2
    )
    return figure


def _stacked(items: Sequence[Likelihood], level: float) -> list[tuple[float, float, bool]]:
    """Each outcome's mean, how far it is put beside others of nearly the same mean, and whether it fits."""
    places: dict[int, int] = {}
    found = []
    for item in sorted(items, key=lambda i: i.mean):
        place = round(np.log10(item.mean) / 0.03)
        places[place] = places.get(place, 0) + 1
        found.append((item.mean, 0.4 - 0.085 * ((places[place] - 1) % 10), item.chance >= level))
    return found


def against_level(judged: Sequence[Likelihood], level: float, heads: Sequence[int] = (12, 6, 3)) -> Figure:
    """How many outcomes fit against the level, for a range read off all heads and off fewer."""
    levels = np.logspace(-4, -0.3, 60)
    figure, axis = plots.figure(width=7.5, height=3.0)
    for number, colour, dash in zip(heads, (plots.BLUE, plots.GREEN, plots.PURPLE), ("-", "--", "-."), strict=True):
        counts = [len(fitting(judged, value, number)) for value in levels]
        axis.plot(levels, counts, color=colour, ls=dash, drawstyle="steps-post", label=f"range read off {number} heads")
    axis.axvline(level, color=plots.RED, ls=":", label=f"level of this run, {level:g}")
    axis.set_xscale("log")
    axis.set_ylim(0, None)
    axis.set_xlabel("level: how often the true call would be ruled out")
    axis.set_ylabel("outcomes that fit")
    figure.legend(loc="outside right upper", fontsize=8)
    return figure


def speed(table: Sequence[dict[str, str]], sizes: int = 5) -> Figure:
    """Times in a CUDA graph of each provider at the first `sizes` sizes of a benchmark, and the floors."""
    rows = [row for row in table if row["kernel_name"] == "attention_qk"]
    shown = list(dict.fromkeys(row["x_value"] for row in rows))[:sizes]
    figure, axes = plots.figure(1, len(shown), width=12, height=3.4)
    for axis, size in zip(axes, shown, strict=True):
        here = [row for row in rows if row["x_value"] == size]
        floors = {r["kernel_provider"]: float(r["y_value_50"]) for r in here if "floor" in r["kernel_provider"]}
        timed = {r["kernel_provider"]: float(r["y_value_50"]) for r in here if r["metric_name"] == "time_in_graph"}
        plots.bars(axis, timed, "us, in a CUDA graph", floors)
        axis.set_title(size)
        axis.tick_params(labelleft=axis is axes[0])
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=2, fontsize=8)
    return figure
