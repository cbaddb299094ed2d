"""Pictures of where a trace differs from its golden."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from whywrong.drawing.explorer import Picture
from whywrong.drawing.plots import ORANGE, RED, caption, figure
from whywrong.reporting.diff import Report

MOST_STEPS = 4
"""Divergent steps with an error map."""
LONGEST_BAR = 1e3
"""The relative error at which a bar ends."""


def pictures(report: Report, directory: Path) -> list[Path]:
    """Write steps.png, the error of every step, and the error maps of the first MOST_STEPS divergent ones."""
    paths = [directory / "steps.png"]
    _steps(report).savefig(paths[0])
    wrong = [(name, f.elements) for name, f in report.shown.detailed.findings.items() if f.diverges and f.elements]
    for i, (name, elements) in enumerate(wrong[:MOST_STEPS], 1):
        paths.append(directory / f"{i}-{re.sub(r'[^A-Za-z0-9._-]', '_', name)}.png")  # two names may give one file name
        paths[-1].write_bytes(Picture(elements).draw())
    return paths


def _steps(report: Report) -> Figure:
    """A bar for each step's own error and one for its inherited error; none for an exact zero."""
    steps = {name: f for name, f in report.shown.findings.items() if f.total is not None}
    fig, axes = figure(height=1.4 + 0.2 * len(steps))
    own = [getattr(f.own or f.total, "rms_ratio", None) for f in steps.values()]
    inherited = [f.inherited if f.own is not None else None for f in steps.values()]
    kinds = (own, RED, "own, or the total where the two are not separated"), (inherited, ORANGE, "inherited")
    for k, (sizes, colour, label) in enumerate(kinds):
        lengths = [min(size, LONGEST_BAR) if size and size > 0.0 else math.nan for size in sizes]
        axes.barh(np.arange(len(steps)) + 0.4 * k - 0.2, lengths, 0.38, color=colour, label=label)
    axes.set_yticks(range(len(steps)), [f"{n}  (diverges)" if f.diverges else n for n, f in steps.items()], fontsize=6)
    axes.set(xscale="log", xlabel="RMS of the error over RMS of the golden", title=report.shown.verdict)
    axes.set_ylim(len(steps) - 0.4, -0.6)
    fig.legend(loc="outside lower right", ncols=2, fontsize=7)
    caption(fig, "no bar: exactly equal")
    return fig
