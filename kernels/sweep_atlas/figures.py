"""The notebook's pictures: the error of each fault over D, and where each fault is right and wrong."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap

from kernels.sweep_atlas.claims import TILE
from kernels.sweep_atlas.experiments import worst, wrong
from whywrong.drawing import plots

FLOOR = 1e-3
"""Where an error of zero is drawn."""


def draw_cliff(axes: Axes, points: pandas.DataFrame, n: int, tokens: int) -> None:
    """The error of dalpha_pre over its tolerance against D: tiles in blue, the report's in orange, others in grey."""
    errors = worst(points).loc[n, tokens].clip(lower=FLOOR)
    for name in errors:
        is_tile = name.startswith("first tile")
        colour = plots.RED if name == TILE else plots.BLUE if is_tile else plots.GREY
        weight = 2.4 if name == TILE else 1.2 if is_tile else 0.8
        axes.plot(errors.index, errors[name], ".-", color=colour, lw=weight, ms=3 + weight, zorder=weight)
        if is_tile:
            width = int(name.split()[3])
            at = errors.index[errors.index > width].min()
            label = (at, errors[name].get(at, FLOOR))
            box = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
            offset = {"xytext": (3, -24), "textcoords": "offset points"}
            axes.annotate(f"{width}", label, **offset, color=colour, fontsize=9, bbox=box, zorder=9)
    axes.axhline(1.0, color="black", ls="--", lw=1.0)
    axes.text(errors.index.max(), 1.3, "tolerance", ha="right", fontsize=8)
    ticks = [8, 16, 32, 64, 128]
    axes.set(xscale="log", yscale="log", xlabel="columns D", ylabel="error of dalpha_pre / tolerance")
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_title("A tile that is too narrow is exact up to its width, and wrong one column later")


def draw_patterns(axes: Axes | Sequence[Axes], points: pandas.DataFrame, order: Sequence[str]) -> None:
    """Four panels, one for each n and number of tokens: a row a fault, a column a width, orange where it is wrong."""
    pattern, axes = wrong(points).loc[list(order)], np.atleast_1d(axes)
    for ax, (n, tokens) in zip(axes, dict.fromkeys(key[:2] for key in pattern), strict=True):
        part = pattern[n][tokens]
        ax.imshow(part.to_numpy(float), ListedColormap([plots.BLUE, plots.ORANGE]), vmin=0, vmax=1, aspect="auto")
        ax.set_title(f"n = {n}, tokens: {tokens}", fontsize=9)
        shown = [i for i, d in enumerate(part.columns) if d in (8, 16, 32, 64, 128)]
        ax.set_xticks(shown, [str(part.columns[i]) for i in shown], fontsize=8)
        ax.set_yticks(np.arange(len(part) + 1) - 0.5, minor=True)
        ax.grid(which="minor", color="white", lw=1.5)
        ax.tick_params(which="both", length=0)
        ax.set(xlabel="D", yticks=[])
    axes[0].set_yticks(range(len(pattern)), pattern.index, fontsize=8)
