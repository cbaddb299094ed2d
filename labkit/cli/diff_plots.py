"""Pictures of where a trace leaves its golden."""

from __future__ import annotations

import math
import re
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.figure import Figure

from labkit.plots import BLUE, RED, caption, error_map, figure
from labkit.trace.diff import Report, open_golden
from labkit.trace.dumps import open_dump

MOST_SIDE = 512
MOST_STEPS = 4


def pictures(found: Report, golden: Path, directory: Path) -> list[Path]:
    """Write steps.png, the error of every step, and a map of the error for the first few divergent ones."""
    directory.mkdir(parents=True, exist_ok=True)
    reference, observed = open_golden(golden), open_dump(Path(found.run))
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
    steps = {name: f for name, f in found.shown.findings.items() if f.total is not None}
    ratios = [f.total.rms_ratio for f in steps.values() if f.total is not None]
    values = [1e3 if math.isnan(ratio) else min(max(ratio, 1e-18), 1e3) for ratio in ratios]
    fig, axes = figure(height=1.2 + 0.16 * len(steps))
    axes.barh(range(len(steps)), values, color=[RED if f.diverges else BLUE for f in steps.values()], height=0.7)
    axes.set_xscale("log")
    axes.set_yticks(range(len(steps)), list(steps), fontsize=6)
    axes.invert_yaxis()
    axes.set_xlabel("RMS of the difference over RMS of the golden")
    axes.set_title(found.shown.verdict)
    caption(fig, "red: diverges; blue: within its bound")
    return fig


def _map(name: str, difference: torch.Tensor) -> Figure:
    """Rows by the last dimension, at most MOST_SIDE a side, by maxima; what is not finite is red."""
    rows = torch.where(difference.isfinite(), difference, torch.inf).reshape(-1, *difference.shape[-1:] or (1,))
    sides = [min(MOST_SIDE, n) for n in rows.shape]
    image = torch.nn.functional.adaptive_max_pool2d(rows[None], sides)[0].numpy()
    image = np.where(np.isinf(image), np.nan, image)
    largest = float(np.nanmax(image, initial=0.0)) or 1.0
    fig, axes = figure(width=6.0, height=3.5)
    picture = error_map(axes, image, f"{name}: |observed - golden|", largest, max(largest * 1e-8, 1e-300))
    axes.set_xlabel("last dimension")
    axes.set_ylabel("all others")
    fig.colorbar(picture, ax=axes)
    caption(fig, "NaN and Inf on one side only: red; larger tensors by the maximum of each cell")
    return fig
