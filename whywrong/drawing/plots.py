"""Figures in one style: units on axes, a line for the bound or the lower bound, a caption that says what ran where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from IPython.display import display
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

BLUE, ORANGE, GREEN, RED, PURPLE, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#777777"
"""Okabe and Ito's colours, which print and which colour-blind readers can tell apart."""
COLOURS = (BLUE, ORANGE, GREEN, RED, PURPLE, GREY)
SHARES = ((-3.0, "#eef4f9"), (-1.0, "#9ecae1"), (0.0, BLUE), (0.0, ORANGE), (1.0, RED), (3.0, "#5a1a00"))
"""The decimal logarithm of an error over its tolerance, and its colour, which changes its hue at the tolerance."""


def figure(rows: int = 1, columns: int = 1, *, width: float = 8.0, height: float = 3.0) -> tuple[Figure, Any]:
    """A figure in the workbook's style and its axes, as `plt.subplots` gives them.

    `width` and `height` are in inches. The style is set in matplotlib's `rcParams`, for the whole process, and
    stays: what is added to the figure later, as a legend, has it too.
    """
    plt.rc("figure", dpi=90)
    plt.rc("font", size=9)
    plt.rc("axes", titlesize=10, titlelocation="left")
    plt.rc("axes.spines", top=False, right=False)
    plt.rc("legend", frameon=False)
    return plt.subplots(rows, columns, figsize=(width, height), layout="constrained")


def caption(target: Figure, text: str) -> None:
    """What ran where, at the foot of the figure."""
    target.supxlabel(text, fontsize=7, color=GREY, x=0.01, ha="left")


def show(target: Figure, alt: str) -> None:
    """Show a figure in a notebook, with a text for those who cannot see it."""
    display(target, metadata={"image/png": {"alt": alt}})
    plt.close(target)


def error_map(axes: Axes, difference: np.ndarray, title: str, largest: float, smallest: float = 1e-7) -> Any:
    """|observed - golden| of one matrix on a logarithmic scale shared by `smallest` and `largest`; NaN in red.

    Axes are row (down) and column (right).
    """
    colours = plt.get_cmap("viridis", 16).with_extremes(bad=RED)  # few colours: a small picture
    shown = np.maximum(difference, smallest)
    scale = LogNorm(smallest, max(largest, 10.0 * smallest))
    image = axes.imshow(shown, norm=scale, cmap=colours, interpolation="nearest", aspect="auto")
    axes.set(title=title, xticks=[], yticks=[])
    return image


def bars(axes: Axes, values: Mapping[str, float], unit: str, lower_bounds: Mapping[str, float]) -> None:
    """Horizontal bars on a logarithmic axis, each with its value; a dashed line for each lower bound."""
    lengths, everything = list(values.values()), [*values.values(), *lower_bounds.values()]
    rectangles = axes.barh(list(values), lengths, color=BLUE, height=0.6)
    words = [f"{v:.0f}" if v >= 100.0 else f"{v:.3g}" for v in lengths]
    plain = {"facecolor": axes.get_facecolor(), "lw": 0, "pad": 0.6}  # no dashed line runs through a number
    axes.bar_label(rectangles, words, padding=3, fontsize=7, bbox=plain, zorder=3)
    lowest = 10.0 ** np.floor(np.log10(min(everything) / 2.0))
    axes.set(xscale="log", xlabel=unit, xlim=(lowest, max(everything) * 4.0))
    axes.xaxis.set_major_locator(LogLocator(10.0, numticks=5))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="y", labelsize=7)
    axes.invert_yaxis()
    styles = zip(lower_bounds.items(), (RED, GREEN, PURPLE), ("--", ":", "-."), strict=False)
    for (label, value), colour, style in styles:
        axes.axvline(value, color=colour, ls=style, lw=1.2, label=label)


def lines(axes: Axes, x: Sequence[float], series: Mapping[str, Sequence[float]]) -> None:
    """Curves on two logarithmic axes, six of them distinguished by colour, mark and dash."""
    axes.set_prop_cycle(color=COLOURS, marker=list("os^vdx"), linestyle=["-", "--", "-.", ":", "-", "--"])
    for name, values in series.items():
        axes.plot(x, values, ms=3.5, lw=1.2, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.grid(alpha=0.25, lw=0.5)
