"""Pictures of where a trace leaves its golden."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import torch

from labkit.plots import BLUE, RED, caption, error_map, figure
from labkit.trace.diff import Report, open_golden
from labkit.trace.dumps import open_dump

MOST_SIDE = 512
MOST_STEPS = 4


def pictures(found: Report, golden: Path, directory: Path) -> list[Path]:
    """Write steps.png, the error of every step, and a map of the error for the first few divergent ones."""
    directory.mkdir(parents=True, exist_ok=True)
    reference, observed = open_golden(golden), open_dump(Path(found.run))
    steps = found.shown.findings
    drawn = [_steps(found, directory)]
    wrong = [name for name, f in steps.items() if f.diverges and f.total is not None and f.total.count > 0]
    for name in wrong[:MOST_STEPS]:
        path = directory / f"{len(drawn)}-{re.sub(r'[^A-Za-z0-9._-]', '_', name)}.png"  # two names may give one
        drawn.append(_map(name, reference[name], observed[name], path))
    return drawn


def _steps(found: Report, directory: Path) -> Path:
    steps = {n: f.total for n, f in found.shown.findings.items() if f.total is not None}
    fig, axes = figure(width=8.0, height=1.2 + 0.16 * len(steps))
    tiny = 1e-18
    ratios = [total.rms_ratio for total in steps.values()]
    values = [1e3 if math.isnan(ratio) else min(max(ratio, tiny), 1e3) for ratio in ratios]
    colours = [RED if found.shown.findings[name].diverges else BLUE for name in steps]
    axes.barh(range(len(steps)), values, color=colours, height=0.7, left=0.0)
    axes.set_xscale("log")
    axes.set_yticks(range(len(steps)), list(steps), fontsize=6)
    axes.invert_yaxis()
    axes.set_xlabel("RMS of the difference over RMS of the golden")
    axes.set_title(found.shown.verdict)
    caption(fig, "red: diverges; blue: within its bound")
    return _save(fig, directory / "steps.png")


def _map(name: str, golden: torch.Tensor, observed: torch.Tensor, path: Path) -> Path:
    difference = (observed.double() - golden.double()).abs()
    rows = difference.reshape(-1, difference.shape[-1]) if difference.ndim else difference.reshape(1, 1)
    image = _shrunk(rows)
    finite = image[np.isfinite(image)]
    largest = float(finite.max()) if finite.size else 1.0
    fig, axes = figure(width=6.0, height=3.5)
    picture = error_map(axes, image, f"{name}: |observed - golden|", largest or 1.0, max(largest * 1e-8, 1e-300))
    axes.set_xlabel("last dimension")
    axes.set_ylabel("all others")
    fig.colorbar(picture, ax=axes)
    caption(fig, "NaN and Inf on one side only: red; larger tensors by the maximum of each cell")
    return _save(fig, path)


def _shrunk(rows: torch.Tensor) -> np.ndarray:
    """At most MOST_SIDE a side, by maxima; what is not finite stays so."""
    wide = torch.where(rows.isfinite(), rows, torch.inf)
    sides = [min(MOST_SIDE, n) for n in wide.shape]
    small = torch.nn.functional.adaptive_max_pool2d(wide[None], sides)[0].numpy()
    return np.where(np.isinf(small), np.nan, small)


def _save(fig: object, path: Path) -> Path:
    import matplotlib.pyplot as plt

    fig.savefig(path)  # type: ignore[attr-defined]
    plt.close(fig)  # type: ignore[arg-type]
    return path
