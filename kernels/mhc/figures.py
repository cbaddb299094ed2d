"""The pictures of the notebook dalpha_atomics: sums in many orders, one column at a time, likelihoods, speed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, NullFormatter

from kernels.mhc.bench import UNITS
from kernels.mhc.experiments import in_words, right_columns
from kernels.mhc.likelihood import Comparison
from labkit.session.wording import digits
from whywrong.drawing import plots

Row = Mapping[str, str]
SCHEDULE, ATOMIC = "traffic lower bound", "atomic_add"
FIXED = ("two-stage", "flagged", "float64", "torch.dot")
"""Sums in a fixed order, as the benchmark names them."""
PLAIN = {"facecolor": "white", "lw": 0, "pad": 0.6}
"""Behind a number, so that no line runs through it."""


def draw_orders(axes: Axes, errors: np.ndarray, missing: float) -> None:
    """The share of orders in which the sum is off by so much at most; a line at what is missing."""
    sizes = np.sort(np.maximum(np.abs(errors), 1e-9))
    axes.step(sizes, np.arange(1, len(sizes) + 1) / len(sizes), where="post", color=plots.BLUE)
    axes.plot(sizes[-1], 1.0, "o", color=plots.BLUE, ms=5)
    words = f"farthest of {len(sizes)} orders: {digits(sizes[-1])}"
    axes.annotate(words, (sizes[-1], 1.0), (6, -12), textcoords="offset points", color=plots.BLUE, fontsize=9)
    axes.axvline(max(missing, 1e-9), color=plots.RED, ls="--", lw=1.4)
    axes.text(missing / 1.15, 0.1, f"missing: {digits(missing)}", color=plots.RED, ha="right", fontsize=9)
    axes.set(
        xscale="log", ylim=(0.0, 1.08), xlabel="|sum - exact sum| of the correct products", ylabel="share of orders"
    )
    axes.set_xlim(max(1e-9, sizes[0] / 3.0), 3.0 * max(missing, sizes[-1]))
    enough = "No order of additions makes up for" if sizes[-1] < missing else "The order of additions can explain"
    axes.set_title(f"{enough} what is missing")


NODES = {
    "x": (0.0, 2.0), "dx_in": (0.0, 0.0), "dpre": (1.3, 1.0), "pre": (1.3, 2.6), "g_pre": (2.8, 1.0),
    "dalpha": (4.6, 2.4), "db": (4.6, 1.45), "dphi": (4.6, 0.5), "dx": (4.6, -0.45), "mix_pre": (2.8, 2.6),
}  # fmt: skip
"""Where each step stands in the graph of who uses dh_pre2."""
SHOWN = {"g_pre": "dh_pre2", "mix_pre": "h_pre1_hmix", "dalpha": "dalpha_pre", "db": "db, first n"}


def draw_users(axes: Axes, users: Sequence[str], wrong: Collection[str]) -> None:
    """A graph of what dh_pre2 is made of, and of the gradients that use it; those in `wrong` are orange."""
    fed = [("x", "dpre"), ("dx_in", "dpre"), ("dpre", "g_pre"), ("pre", "g_pre"), ("mix_pre", "dalpha")]
    for start, end in [*fed, *(("g_pre", user) for user in users)]:
        beside = 5.0 + 3.0 * len(SHOWN.get(end, end))  # points, so that the head is not under the box
        arrow = {"arrowstyle": "-|>", "color": plots.GREY, "shrinkA": 0, "shrinkB": beside}
        axes.annotate("", NODES[end], NODES[start], arrowprops=arrow)
    for name, place in NODES.items():
        colour = plots.RED if name in wrong else plots.BLUE
        box = {"boxstyle": "round", "facecolor": "white", "edgecolor": colour, "lw": 1.6 + (name in wrong)}
        axes.text(*place, SHOWN.get(name, name), ha="center", va="center", fontsize=9, color=colour, bbox=box)
    axes.set(xlim=(-0.5, 5.3), ylim=(-0.9, 3.1))
    axes.axis("off")
    axes.set_title(f"dh_pre2 goes into {len(users)} gradients, not into one" if len(users) > 1 else "One user")


def draw_columns(axes: Axes, response: np.ndarray) -> None:
    """dpre over its right value for each column of dx_in alone: a point a column and stream."""
    right, d = right_columns(response), len(response)
    wrong = np.setdiff1d(np.arange(d), right)
    axes.axhline(1.0, color=plots.GREY, ls="--", lw=1.2)
    low, high = min(0.0, float(response.min())), max(1.0, float(response.max()))
    room = high - low
    left_out = wrong.size and not response[wrong].any()
    for columns, colour, words in (
        (right, plots.BLUE, "right"),
        (wrong, plots.RED, "left out" if left_out else "wrong"),
    ):
        if columns.size:
            axes.plot(columns, response[columns], ".", color=colour, ms=5)
            level = float(np.median(response[columns])) + 0.08 * room
            place = f"{words}: column{'s' * (columns.size > 1)} {_short(in_words(columns))}"
            axes.text(columns[0], level, place, color=colour, fontsize=9)
    if wrong.size:
        axes.text(d, 1.0 + 0.08 * room, "what a correct kernel gives", color=plots.GREY, ha="right", fontsize=9)
    axes.set(xlim=(-0.01 * d, 1.01 * d), ylim=(low - 0.12 * room, high + 0.3 * room))
    axes.set(xlabel="the one column of dx_in that is not zero", ylabel="dpre over its right value")
    axes.xaxis.set_major_locator(MaxNLocator(9, steps=[1, 2, 4, 8, 10], integer=True))
    if (response == np.where(np.arange(d) < right.size, 1.0, 0.0)[:, None]).all() and wrong.size:
        title = f"The kernel adds up {right.size} of {d} columns and leaves out the rest"
    else:
        title = f"dpre is right at {right.size} of {d} columns"
    axes.set_title(title)


def _short(words: str) -> str:
    return words if len(words) < 40 else f"{words[:36]} ..."


def draw_likelihoods(axes: Axes, comparison: Comparison, given: str, most: int = 12) -> None:
    """The likeliest explanation's likelihood over each other one's, with its interval, the likeliest of them first."""
    names = sorted(comparison.ratio, key=lambda name: comparison.ratio[name])[-most:]
    for row, name in enumerate(names):
        colour = plots.BLUE if name in comparison.left else plots.RED
        axes.plot([comparison.low[name], comparison.high[name]], [row, row], color=colour, lw=3.0)
        axes.plot(comparison.ratio[name], row, "o", color=colour, ms=5)
        beside = {"transform": axes.get_yaxis_transform(), "va": "center", "fontsize": 8}
        axes.text(1.01, row, digits(comparison.ratio[name]), **beside)
    axes.axvline(comparison.needed, color=plots.GREY, ls="--", lw=1.2)
    words = f"refuted from {digits(comparison.needed)} times on"
    axes.text(comparison.needed * 1.1, -0.8, words, color=plots.GREY, fontsize=8)
    axes.set(xscale="log", xlim=(1.0, 3.0 * max([comparison.needed, *comparison.high.values()])))
    axes.set_yticks(range(len(names)), [f"{name} (given)" if name == given else name for name in names], fontsize=8)
    axes.set_ylim(len(names) - 0.4, -1.2)
    axes.set_xlabel(f"likelihood of the likeliest ({comparison.best}), over this one's")
    total = len(comparison.share)
    axes.set_title(f"The report's ratio leaves {len(comparison.left)} of {total} explanations")


def draw_speed(axes: Axes, rows: Sequence[Row], size: str, mode: str) -> None:
    """Times of a call at `size` over the compulsory lower bound, a dot a provider, and our schedule's lower bound."""
    times = {
        row["kernel_provider"].replace("transformer_engine", "TE"): float(row["y_value_50"])
        for row in rows
        if (row["x_value"], row["kernel_operation_mode"], row["metric_name"]) == (size, mode, "time")
    }
    units, compulsory = UNITS[mode]
    schedule = units / compulsory
    lower_bound = times[SCHEDULE] / schedule
    shown = dict(sorted((item for item in times.items() if "lower bound" not in item[0]), key=lambda item: item[1]))
    over = [took / lower_bound for took in shown.values()]
    axes.hlines(range(len(shown)), 1.0, over, color=plots.GREY, lw=0.6)
    axes.plot(over, range(len(shown)), "o", color=plots.BLUE, ms=6)
    for y, (took, ratio) in enumerate(zip(shown.values(), over, strict=True)):
        axes.text(ratio * 1.08, y, f"{took:,.0f} \u00b5s", va="center", fontsize=8, bbox=PLAIN)
    axes.axvline(1.0, color=plots.GREY, ls="--", lw=1.2, label="compulsory lower bound")
    axes.axvline(schedule, color=plots.RED, ls=":", lw=1.6, label="our schedule's lower bound")
    axes.legend(loc="upper right", fontsize=8)
    axes.set(xscale="log", xlim=(0.95, 2.0 * max(over)))
    ticks = [tick for tick in (1, 2, 5, 10, 20) if tick <= 2.0 * max(over)]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_yticks(range(len(shown)), shown, fontsize=8)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlabel(f"time over the compulsory lower bound, {lower_bound:,.0f} \u00b5s")
    words = "Forward" if mode == "forward" else "Forward and backward"
    axes.set_title(f"{words}: ours takes {digits(times['ours'] / lower_bound)} times the compulsory lower bound")


def best_sums(rows: Sequence[Row]) -> dict[str, dict[int, float]]:
    """Each way's best time in a CUDA graph, and the lower bound, by the number of products."""
    best: dict[str, dict[int, float]] = {}
    for row in rows:
        if row["metric_name"] == "time_in_graph" or row["kernel_provider"] == SCHEDULE:
            series = best.setdefault(row["kernel_provider"].split(",")[0], {})
            count = int(row["x_value"])
            series[count] = min(float(row["y_value_50"]), series.get(count, np.inf))
    return best


def draw_sums(axes: Axes, best: Mapping[str, Mapping[int, float]]) -> None:
    """Times of dalpha's sum alone in fixed orders, from :func:`best_sums`, over that by atomics."""
    counts = sorted(best[ATOMIC])
    over = {name: [best[name][count] / best[ATOMIC][count] for count in counts] for name in FIXED}
    plots.lines(axes, counts, over)
    axes.axhline(1.0, color=plots.GREY, ls="--", lw=1.2, label="atomics")
    axes.set(yscale="linear", ylim=(0.0, 1.1 * max(map(max, over.values()))))
    axes.set(xlabel="products", ylabel="time over that of atomics")
    worst = max(min(ratios) for ratios in zip(*over.values(), strict=True))
    slower = "never slower than" if worst <= 1.0 else f"at most {digits(worst, 3)} times as slow as"
    axes.set_title(f"The best fixed order is {slower} atomics")
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
