"""The figures of the notebook: the way that data take, the smallest sets against the observations, training curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.patches import FancyArrowPatch, Rectangle

from kernels.tinyllm.counts import OBSERVATIONS, Facts
from kernels.tinyllm.faulty import PRINTED, WORLDS, words
from labkit import plots

Curve = Sequence[tuple[int, float, float]]


def draw_path(axes: Any) -> None:
    """Two tensors with a host vector and a device buffer each, and the copies between them, as the loop makes them."""
    places = {"ff_out (the layer's)": 0.0, "layer_out (the caller's)": 3.6, "x": 7.2}
    for name, left in places.items():
        axes.text(left + 0.9, 2.95, name, ha="center", fontsize=8, weight="bold", color=plots.GREY)
        for bottom, label, colour in (
            (1.9, "h_data\nhost vector", plots.BLUE),
            (0.2, "d_data\ndevice buffer", plots.GREEN),
        ):
            axes.add_patch(Rectangle((left, bottom), 1.8, 0.75, fc=colour, alpha=0.25, ec=colour))
            axes.text(left + 0.9, bottom + 0.375, label, ha="center", va="center", fontsize=7.5, color=plots.GREY)
    arrows = (
        ((0.9, 0.95), (0.9, 1.9), "1  d2h(): resize(size),\n    then `size` bytes", (1.0, 1.42), plots.RED),
        ((1.8, 2.27), (3.6, 2.27), "2  copy constructor\n    copies h_data", (1.85, 2.52), plots.GREY),
        ((4.5, 1.9), (4.5, 0.95), "    and uploads\n    `size` bytes", (4.5, 1.42), plots.GREY),
        ((5.4, 2.27), (7.2, 2.27), "3  assignment\n    copies h_data", (5.45, 2.52), plots.ORANGE),
        ((7.7, 1.9), (7.7, 0.95), "uploads: trace", (6.45, 1.42), plots.ORANGE),
        ((8.5, 1.9), (8.5, 0.95), "4  x.h2d():\n    `size` bytes", (8.6, 1.42), plots.GREY),
        ((9.0, 0.57), (10.6, 0.57), "5  the next layer,\n    or the head", (9.1, 0.1), plots.GREY),
    )
    for start, end, text, at, colour in arrows:
        axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=11, color=colour, lw=1.3))
        axes.text(*at, text, fontsize=7, color=colour, va="center")
    axes.set_xlim(-0.2, 10.9)
    axes.set_ylim(-0.15, 3.2)
    axes.axis("off")


def draw_matrix(axes: Any, facts: Facts, title: str) -> None:
    """The smallest sets against the observations, for each kind of memory, and whether the correction cures."""
    names = list(facts["worlds"][WORLDS[0]]["smallest"])
    columns = [*OBSERVATIONS, "cured"]
    for j, world in enumerate(WORLDS):
        left = j * (len(columns) + 1)
        for y, name in enumerate(names):
            one = facts["worlds"][world]["smallest"][name]
            for i, on in enumerate((*one["shows"], one["cured"])):
                colour = plots.GREEN if i == len(OBSERVATIONS) else plots.BLUE
                fill = colour if on else "none"
                axes.add_patch(Rectangle((left + i + 0.08, y + 0.1), 0.84, 0.8, fc=fill, ec=colour, lw=0.6))
            if all(one["shows"]):
                width = len(OBSERVATIONS) + 0.04
                axes.add_patch(Rectangle((left - 0.02, y + 0.02), width, 0.96, fc="none", ec=plots.RED, lw=1.6))
        axes.text(left + 3, -0.25, f"memory: {world}", ha="center", fontsize=7.5, color=plots.GREY)
    ticks = [j * (len(columns) + 1) + i + 0.5 for j in range(len(WORLDS)) for i in range(len(columns))]
    axes.set_xticks(ticks, columns * len(WORLDS), rotation=90, fontsize=6.5)
    axes.set_yticks(np.arange(len(names)) + 0.5, [_folded(name) for name in names], fontsize=6.5)
    axes.set_xlim(-0.3, len(WORLDS) * (len(columns) + 1) - 0.7)
    axes.set_ylim(len(names), -0.7)
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.set_title(title, fontsize=9)


def _folded(name: str) -> str:
    """A long set on two lines, and which one is the report's own."""
    if name == words(PRINTED):
        return f"{name}\n(the lines as printed)"
    parts = name.split(" + ")
    if len(parts) < 4:
        return name
    return " + ".join(parts[: len(parts) // 2]) + "\n+ " + " + ".join(parts[len(parts) // 2 :])


def draw_curve(axes: Any, curves: Mapping[str, Curve], vocabulary: int) -> None:
    """Validation and training loss against steps."""
    for (name, curve), colour in zip(curves.items(), (plots.BLUE, plots.ORANGE), strict=False):
        at = [max(1, point[0]) for point in curve]
        axes.plot(at, [point[2] for point in curve], color=colour, marker="o", ms=3, label=f"validation, {name}")
        axes.plot(at, [point[1] for point in curve], color=colour, ls=":", label=f"training, {name}")
    axes.axhline(np.log(vocabulary), color=plots.GREY, ls="--", lw=1, label=f"ln {vocabulary}: knowing nothing")
    axes.set_xscale("log")
    axes.set_xlabel("step")
    axes.set_ylabel("nats a byte")
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
