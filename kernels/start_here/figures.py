"""The notebook's picture: how far the numbers of a step are off."""

import torch
from matplotlib.figure import Figure

from whywrong.drawing import plots

Tensor = torch.Tensor


def plot_step(name: str, observed: Tensor, golden: Tensor, caption: str) -> Figure:
    """Observed over golden of a step [rows, columns], against the column; against the row where there is one column."""
    ratio = (observed.double() / golden.double()).cpu()
    columns = ratio.shape[1]
    figure, axes = plots.figure()
    if columns > 1:
        axes.plot(ratio.T, "o", ms=2.5, color=plots.BLUE, alpha=0.5)
    else:
        axes.plot(ratio, "o", color=plots.BLUE)
    axes.axhline(1.0, color=plots.GREY, ls="--")
    off = int((ratio.sub(1.0).abs() > 1e-5).sum())
    axes.set_title(f"{name}: {off} of {ratio.numel()} numbers are more than 0.001% off")
    axes.set(xlabel="column (a point for each row)" if columns > 1 else "row", ylabel="observed / golden")
    plots.caption(figure, caption)
    return figure
