"""The notebook's pictures: how many causes are left in each setting, and which."""

import numpy as np
import pandas
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from kernels.sweep_atlas.experiments import DISTINGUISHED, RULED_OUT, SILENT
from whywrong.drawing import plots

COLOURS = {RULED_OUT: "#dddddd", DISTINGUISHED: plots.BLUE, SILENT: plots.ORANGE}


def plot_counts(maps: dict[str, pandas.DataFrame], down: str, across: str, caption: str) -> Figure:
    """A map of counts [down, across] beside another, on one scale; a cross where there was nothing to explain."""
    figure, axes = plots.figure(1, len(maps), height=2.9)
    most = max(np.nanmax(counts.to_numpy()) for counts in maps.values())
    for ax, (title, counts) in zip(np.atleast_1d(axes), maps.items(), strict=True):
        values = counts.to_numpy()
        ax.imshow(values, cmap="Blues", vmin=0, vmax=1.3 * most, aspect="auto")
        for (i, j), value in np.ndenumerate(values):
            text = "×" if np.isnan(value) else f"{value:.0f}"
            ax.text(j, i, text, ha="center", va="center", color="white" if value > 0.75 * most else "black")
        ax.set(title=title, xlabel=across, ylabel=down)
        ax.set_xticks(range(values.shape[1]), counts.columns)
        ax.set_yticks(range(values.shape[0]), counts.index)
    plots.caption(figure, caption)
    return figure


def plot_causes(matrix: pandas.DataFrame, runs: pandas.DataFrame, down: str, across: str, caption: str) -> Figure:
    """A row a cause, a column a setting: ruled out, distinguished, or not; white where it is no candidate."""
    codes = {verdict: number for number, verdict in enumerate(COLOURS)}
    values = np.array([[codes.get(verdict, np.nan) for verdict in row] for row in matrix.to_numpy()], float)
    figure, axes = plots.figure(height=1.5 + 0.22 * len(matrix))
    axes.imshow(values, cmap=ListedColormap(list(COLOURS.values())), vmin=0, vmax=len(COLOURS) - 1, aspect="auto")
    settings = runs[runs["ok"]]
    axes.set_yticks(range(len(matrix)), matrix.index, fontsize=8)
    axes.set_xticks(range(len(settings)), settings["down"])
    edges = np.flatnonzero(settings["across"].to_numpy()[1:] != settings["across"].to_numpy()[:-1]) + 0.5
    for edge in edges:
        axes.axvline(edge, color="black", lw=1)
    middles = settings.reset_index(drop=True).reset_index().groupby("across")["index"].mean()
    for value, middle in middles.items():
        axes.annotate(
            f"{across} {value}",
            (middle, 1.0),
            (0, 4),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha="center",
            fontsize=8,
        )
    axes.set(xlabel=down)
    axes.set_xticks(np.arange(len(settings)) + 0.5, minor=True)
    axes.set_yticks(np.arange(len(matrix)) + 0.5, minor=True)
    axes.grid(which="minor", color="white", lw=1.5)
    axes.tick_params(which="both", length=0)
    patches = [Patch(color=colour, label=verdict) for verdict, colour in COLOURS.items()]
    figure.legend(handles=patches, loc="outside upper center", ncols=len(patches), fontsize=8)
    plots.caption(figure, caption)
    return figure
