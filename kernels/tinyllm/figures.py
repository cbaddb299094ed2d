"""The figures of the notebook: the way that data take, which sets of faults fit, training curves."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.patches import Rectangle

from kernels.tinyllm.fault_sets import show_all
from kernels.tinyllm.faulty import DEBUG_PRINTS, PRINTED, in_words
from whywrong.drawing import plots

Curve = Sequence[tuple[int, float, float]]


def draw_strip(axes: Any, host: np.ndarray, values: np.ndarray) -> None:
    """The host vector after d2h() as a strip of numbers, and how far each upload reads in it.

    `host` [numbers] is h_data, `values` [rows, columns] what the device held; blue: right, white: zero.
    """
    n, length = values.size, len(host)
    right = host == np.resize(values.reshape(-1), length)
    kinds = np.where(right & (np.arange(length) < n), 1, np.where(host == 0, 0, 2))
    edges = [0, *(np.flatnonzero(np.diff(kinds)) + 1), length]
    for start, end in itertools.pairwise(edges):
        kind = kinds[start]
        colour, word = ((("white", "zero"), (plots.BLUE, "right"), (plots.ORANGE, "other")))[kind]
        axes.add_patch(Rectangle((start, 0), end - start, 1, fc=colour, ec="black", lw=1.0))
        text = f"{end - start} {word}"
        axes.text((start + end) / 2, 0.5, text, ha="center", va="center", color="white" if kind == 1 else "black")
    uploads = (
        (n, f"h2d() as printed: `size` = {4 * n} bytes, {n} numbers", plots.BLUE),
        (length, f"h_data.size() * 4 = {4 * length} bytes: rejected, the buffer has {4 * n}", plots.RED),
    )
    for y, (end, words, colour) in enumerate(uploads):
        axes.annotate("", (end, -0.4 - y), (0, -0.4 - y), arrowprops={"arrowstyle": "|-|", "color": colour})
        axes.text(0.012 * length, -0.8 - y, words, color=colour, va="center", fontsize=8.5)
    axes.set(xlim=(-10, max(length, n) + 10), ylim=(-2.1, 1.15))
    axes.axis("off")


def draw_candidates(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """A row a set of faults, a column a debug print: whether it shows all that the report saw; whether it is cured.

    `rows` as :func:`kernels.tinyllm.fault_sets.candidates` gives them, in one kind of memory.
    """
    marks = {True: "yes", False: "no"}
    columns = [*DEBUG_PRINTS, "keeps every printed line", "right once corrected"]
    for y, row in enumerate(rows):
        values = [*(show_all(row, name) for name in DEBUG_PRINTS), row["kept"], row["cured"]]
        for x, value in enumerate(values):
            colour = plots.BLUE if x < len(DEBUG_PRINTS) else plots.GREY if x == len(DEBUG_PRINTS) else plots.GREEN
            left = x + 0.25 * (x >= len(DEBUG_PRINTS))
            box = Rectangle((left + 0.05, y + 0.1), 0.9, 0.8, fc=colour if value else "none", ec=colour, lw=0.8)
            axes.add_patch(box)
            text = {"color": "white" if value else plots.GREY, "ha": "center", "va": "center", "fontsize": 7}
            axes.text(left + 0.5, y + 0.5, marks[value], **text)
    axes.text(len(DEBUG_PRINTS) / 2, -0.15, "shows all that the report saw, if a debug print copies", **_HEAD)
    at = [x + 0.5 + 0.25 * (x >= len(DEBUG_PRINTS)) for x in range(len(columns))]
    breaks = {", ": ",\n", "() of": "()\nof", "ff_out ": "ff_out\n", "every ": "every\n", "once ": "once\n"}
    for old, new in breaks.items():
        columns = [name.replace(old, new) for name in columns]
    axes.set_xticks(at, columns, fontsize=7)
    axes.set_yticks(np.arange(len(rows)) + 0.5, [_label(row["faults"]) for row in rows], fontsize=7.5)
    axes.set_xlim(-0.1, len(columns) + 0.35)
    axes.set_ylim(len(rows), -0.6)
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)


_HEAD: Any = {"ha": "center", "fontsize": 8, "color": plots.GREY}


def _label(faults: str) -> str:
    """A set of faults beside the lines as printed: its switches, without two that all candidates have."""
    names = [name for name in faults.split(" + ") if name not in ("prefer_host", "unchecked")]
    if faults == in_words(PRINTED):
        return "the lines as printed"
    return " + ".join(names[:2]) + ("\n+ " + " + ".join(names[2:]) if names[2:] else "")


def says_of_curves(curves: Mapping[str, Curve], frequencies: float) -> str:
    """What the curves show: which end below three quarters of the loss that byte frequencies give."""
    learned = [name for name, curve in curves.items() if curve[-1][2] < 0.75 * frequencies]
    if learned:
        only = "" if len(learned) == len(curves) else f": {' and '.join(learned)} only"
        return f"Validation loss falls far below that of byte frequencies{only}"
    return "Validation loss falls from that of an even guess to about that of byte frequencies"


def draw_curve(axes: Any, curves: Mapping[str, Curve], vocabulary: int, frequencies: float) -> None:
    """Validation loss against steps, without the untrained model's; a curve has (step, training loss, validation loss).

    `frequencies` is the loss of a model that knows how often each byte stands, and nothing else.
    """
    starts, ends = zip(*((curve[1][0], curve[-1][0]) for curve in curves.values()), strict=True)
    for (name, curve), colour in zip(curves.items(), (plots.BLUE, plots.ORANGE), strict=False):
        at, losses = zip(*((step, held) for step, _, held in curve if step > 0), strict=True)
        axes.plot(at, losses, color=colour, marker="o", ms=3)
        place: Any = {"textcoords": "offset points", "va": "top"}
        axes.annotate(name, (at[-1], losses[-1]), (6, -3), color=colour, **place)
    axes.set_xscale("log")
    axes.set(xlabel="step", ylabel="validation loss (nats per byte)", ylim=(0, np.log(vocabulary) + 0.6))
    axes.set_xlim(0.8 * min(starts), 8 * max(ends))
    levels = (f"ln {vocabulary}: every byte as likely", np.log(vocabulary)), ("byte frequencies", frequencies)
    for words, level in levels:
        axes.axhline(level, color=plots.GREY, ls="--", lw=1)
        at_right: Any = {"xycoords": axes.get_yaxis_transform(), "textcoords": "offset points", "ha": "right"}
        axes.annotate(words, (1.0, level), (0, 3), color=plots.GREY, fontsize=8, **at_right)
