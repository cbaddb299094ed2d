"""Pictures of where a trace leaves its golden."""

from __future__ import annotations

import math
import re
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.figure import Figure

from labkit.plots import BLUE, ORANGE, RED, caption, error_map, figure
from labkit.trace.diff import Report, open_golden
from labkit.trace.dumps import open_dump
from labkit.trace.localise import renamed

MOST_SIDE = 512
MOST_STEPS = 4
MOST = 1e3
"""The longest bar."""


def pictures(found: Report, golden: Path, directory: Path) -> list[Path]:
    """Write steps.png, the error of every step, and a map of the error for the first few divergent ones."""
    directory.mkdir(parents=True, exist_ok=True)
    reference, observed = open_golden(golden), open_dump(Path(found.run))
    observed = renamed(observed, reference, found.names)
    findings = found.shown.findings
    drawn = {"steps.png": _steps(found)}
    wrong = [name for name, f in findings.items() if f.diverges and f.total is not None and f.total.count > 0]
    for i, name in enumerate(wrong[:MOST_STEPS], 1):
        difference = (observed[name].double() - reference[name].double()).abs()
        drawn[f"{i}-{re.sub(r'[^A-Za-z0-9._-]', '_', name)}.png"] = _map(name, difference)  # two names may give one
    for name, fig in drawn.items():
        fig.savefig(directory / name)
        plt.close(fig)
    return [directory / name for name in drawn]


def _steps(found: Report) -> Figure:
    """A bar for each step's own error and one for what it inherits, or for the whole; none for an exact zero."""
    steps = {name: f for name, f in found.shown.findings.items() if f.total is not None}
    fig, axes = figure(height=1.4 + 0.2 * len(steps))
    places, separated = np.arange(len(steps)), any(f.separated for f in steps.values())
    sizes: dict[str, tuple[str, list[float | None]]] = {
        "own": (RED, [f.own.rms_ratio if f.own is not None else math.nan for f in steps.values()]),
        "inherited": (ORANGE, [f.inherited if f.own is not None else math.nan for f in steps.values()]),
        "whole": (BLUE, [f.total.rms_ratio if f.total and f.own is None else math.nan for f in steps.values()]),
    }
    for k, (name, (colour, values)) in enumerate(sizes.items()):
        drawn = [min(v, MOST) if v is not None and v > 0.0 else math.nan for v in values]
        if np.isfinite(drawn).any():
            axes.barh(places + (0.2 * (2 * k - 1) if k < 2 else 0.0), drawn, 0.38, color=colour, label=name)
    axes.set_xscale("log")
    axes.set_yticks(places, [f"{n}  (diverges)" if f.diverges else n for n, f in steps.items()], fontsize=6)
    axes.invert_yaxis()
    axes.set_xlabel("RMS of the error over RMS of the golden")
    axes.set_title(found.shown.verdict)
    axes.legend(loc="lower right", fontsize=7)
    caption(
        fig, "no bar: exactly equal" if separated else "no bar: exactly equal; own and inherited are not told apart"
    )
    return fig


def _map(name: str, difference: torch.Tensor) -> Figure:
    """Rows by the last dimension, at most MOST_SIDE a side, by maxima; what is not finite is red."""
    rows = torch.where(difference.isfinite(), difference, torch.inf).reshape(-1, *difference.shape[-1:] or (1,))
    sides = [min(MOST_SIDE, n) for n in rows.shape]
    image = torch.nn.functional.adaptive_max_pool2d(rows[None], sides)[0].numpy()
    image = np.where(np.isinf(image), np.nan, image)
    largest = float(np.nanmax(image, initial=0.0)) or 1.0
    fig, axes = figure(width=6.0, height=3.5)
    picture = error_map(
        axes, image, f"{name} {tuple(difference.shape)}: |observed - golden|", largest, max(largest * 1e-8, 1e-300)
    )
    for ticks, cells, size in zip((axes.set_yticks, axes.set_xticks), sides, rows.shape, strict=True):
        shown = np.unique(np.linspace(0, cells - 1, 5).round().astype(int))
        ticks(shown, [str(k * size // cells) for k in shown], fontsize=7)
    axes.set_xlabel(f"index in the last dimension, of {rows.shape[1]}")
    axes.set_ylabel(f"row, of {rows.shape[0]}")
    fig.colorbar(picture, ax=axes)
    caption(fig, "NaN and Inf on one side only: red; larger tensors by the maximum of each cell")
    return fig
