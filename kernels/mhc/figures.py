"""The notebook's pictures: the symptom, what one column at a time tells, ratios and likelihoods, speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter

from kernels.mhc.bench import UNITS
from kernels.mhc.evidence import PARTS, RATIO, REPORTED
from kernels.mhc.likelihood import Comparison, Ratios
from labkit import plots

Row = Mapping[str, str]
SCHEDULE, ATOMIC = "traffic floor", "atomic_add"
SUMS = (ATOMIC, "two-stage", "flagged", "float64", "torch.dot", SCHEDULE)


def draw_errors(axes: Axes, found: Sequence[float], exact: Sequence[float]) -> None:
    """Relative error of each part of dalpha, the report's and ours; what agrees in all digits stands at the left."""
    least = 1e-8
    series = {
        "the report": ([abs(wrong / right - 1.0) for right, wrong in REPORTED.values()], plots.ORANGE, "s"),
        "the kernel built again": ([abs(a / b - 1.0) for a, b in zip(found, exact, strict=True)], plots.BLUE, "o"),
    }
    for place, (label, (errors, colour, mark)) in enumerate(series.items()):
        at = np.arange(len(PARTS)) + 0.16 * (2 * place - 1)
        axes.plot(np.maximum(errors, least), at, mark, color=colour, label=label, ms=7)
    axes.set_xscale("log")
    axes.set_xlim(least / 2.0, 10.0)
    axes.set_yticks(range(len(PARTS)), PARTS)
    axes.set_ylim(len(PARTS) - 0.4, -0.6)
    axes.set_xlabel(f"relative error (at {least:g}: that or less)")
    axes.legend(loc="center", bbox_to_anchor=(0.62, 0.45))


def draw_response(axes: Axes, found: np.ndarray, answered: str) -> None:
    """What dpre answers to each column of dx_in alone: a point a column and stream."""
    columns = np.arange(len(found))
    axes.axhline(1.0, color=plots.GREY, ls="--", lw=1.2, label="right")
    for stream in range(found.shape[1]):
        axes.plot(columns, found[:, stream], ".", color=plots.BLUE, ms=4, label="kernel" if stream == 0 else None)
    axes.set_xlabel("the one column of dx_in that is not zero")
    axes.set_ylabel("dpre, of its right value")
    low, high = min(0.0, float(found.min())), max(1.0, float(found.max()))
    axes.set_ylim(low - 0.15 * (high - low), high + 0.3 * (high - low))
    axes.set_title(f"columns to which dpre answers as it should: {answered}")
    axes.legend(ncols=2, loc="upper right", fontsize=8)


def draw_ratios(axes: Axes, found: Mapping[str, Ratios], given: str, most: float = 3.0) -> None:
    """A row a fault, a dot a draw: the ratio of the wrong to the right dalpha_pre, and the report's as a line."""
    for row, (name, one) in enumerate(found.items()):
        colour = plots.GREEN if name == given else plots.BLUE
        lift = np.linspace(-0.28, 0.28, len(one.drawn))
        axes.plot(np.clip(one.drawn, -most, most), row + lift, ".", color=colour, ms=2.5)
    axes.axvline(RATIO, color="black", lw=1.2)
    axes.set_yticks(range(len(found)), found, fontsize=8)
    axes.set_ylim(len(found) - 0.4, -0.6)
    axes.set_xlabel(f"ratio over draws (beyond {most:g}: at {most:g})")


def draw_likelihoods(axes: Axes, names: Sequence[str], comparison: Comparison) -> None:
    """The likeliest fault's likelihood over each one's, with its interval; broken lines at 1 and at what refutes."""
    for row, name in enumerate(names):
        if name == comparison.best:
            axes.text(1.3, row, "the likeliest", va="center", fontsize=8)
            continue
        refuted = name not in comparison.left
        colour = plots.RED if refuted else plots.BLUE
        axes.plot([comparison.low[name], comparison.high[name]], [row, row], color=colour, lw=3.0)
        axes.plot(comparison.ratio[name], row, "o", color=colour, ms=5)
    for edge in (1.0, comparison.needed):
        axes.axvline(edge, color=plots.GREY, ls="--", lw=1.0)
    axes.set_xscale("log")
    axes.set_xlim(0.5, 10.0 * max([comparison.needed, *comparison.high.values()]))
    axes.set_yticks([])
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlabel("likelihood of the likeliest, over this one's")


def draw_shares(axes: Axes, counts: Sequence[int], shares: Mapping[str, Sequence[float]]) -> None:
    """Each fault's share of the likelihood (a probability, if all are equally probable before), by tests reported."""
    plots.lines(axes, counts, shares)
    axes.set_xscale("log")
    axes.set_yscale("linear")
    axes.axhline(0.95, color=plots.GREY, ls="--", lw=1.0)
    axes.set_ylim(0.0, 1.05)
    axes.set_xlabel("tests with inputs of their own that are reported")
    axes.set_ylabel("share of the likelihood")
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))


def draw_speed(axes: Axes, rows: Sequence[Row], size: str, mode: str) -> None:
    """Times of a call at `size`, as bars that start at the compulsory floor; a broken line at our schedule's floor."""
    times = {
        row["kernel_provider"].replace("transformer_engine", "TE"): float(row["y_value_50"])
        for row in rows
        if (row["x_value"], row["kernel_operation_mode"], row["metric_name"]) == (size, mode, "time")
    }
    schedule = times[SCHEDULE]
    units, compulsory = UNITS[mode]
    floor = schedule * compulsory / units
    shown = {name: took for name, took in times.items() if "floor" not in name}
    axes.barh(range(len(shown)), [took - floor for took in shown.values()], left=floor, color=plots.BLUE, height=0.6)
    for y, took in enumerate(shown.values()):
        axes.text(took * 1.05, y, f"{took:.0f}", va="center", fontsize=8)
    axes.axvline(schedule, color=plots.RED, ls="--", lw=1.2)
    axes.set_xscale("log")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlim(floor, 2.5 * max(shown.values()))
    axes.set_yticks(range(len(shown)), shown, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(f"us a call; floors: compulsory {floor:.0f}, our schedule's {schedule:.0f}")
    axes.set_title("forward and backward" if mode == "full" else mode)


def best_sums(rows: Sequence[Row]) -> dict[str, dict[int, float]]:
    """Each way's best time in a CUDA graph, and the floor, by the number of products."""
    best: dict[str, dict[int, float]] = {}
    for row in rows:
        if row["metric_name"] == "time_in_graph" or row["kernel_provider"] == SCHEDULE:
            series = best.setdefault(row["kernel_provider"].split(",")[0], {})
            count = int(row["x_value"])
            series[count] = min(float(row["y_value_50"]), series.get(count, np.inf))
    return best


def draw_sums(axes: Axes, rows: Sequence[Row]) -> None:
    """dalpha's sum alone: atomics beside fixed orders."""
    best = best_sums(rows)
    counts = sorted(best[ATOMIC])
    plots.lines(axes, counts, {name: [best[name][count] for count in counts] for name in SUMS})
    axes.set_ylim(bottom=1.0)
    axes.set_xlabel("products")
    axes.set_ylabel("us, in a CUDA graph")
    axes.set_title("dalpha's sum alone")
    axes.legend(fontsize=7, loc="upper left")
