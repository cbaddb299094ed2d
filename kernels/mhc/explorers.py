"""The report's kernel with a tile of any width: which columns it adds up, and how far off its three sums then are."""

from __future__ import annotations

import numpy as np
import torch
from matplotlib.figure import Figure

from kernels.mhc import counterfactual, faulty
from kernels.mhc.experiments import PARTS, one_column_at_a_time
from kernels.mhc.faulty import Access, Problem
from kernels.mhc.problem import Constants
from labkit import plots
from labkit.session.wording import digits

WIDTHS = (8, 16, 32, 64, 128)
CONTROLS = {"tile": list(WIDTHS), "columns": (8, 128), "tokens": (1, 8), "seed": (0, 20)}
"""What can be turned, and how far."""
ALT = (
    "A map of the columns that the kernel adds up for each stream, blue, and those it leaves out, orange; beside it "
    "a map of the errors of the three scalar gradients over what rounding allows, a row a tile width."
)


def tiles(tile: int = 32, columns: int = 128, tokens: int = 4, seed: int = 0, device: str = "cpu") -> Figure:
    """The real kernel with a tile of `tile` columns, where `x` and `dx_in` have `columns`, by two experiments.

    On the left each column of dx_in stands alone: is dpre right, exactly? On the right the errors of dalpha's three
    parts, over the largest rounding error allowed, on drawn inputs of so many tokens, with every tile width.
    """

    def kernel(width: int) -> faulty.Kernel:
        return lambda p: faulty.backward(p, Access(tile=width))

    response = one_column_at_a_time(kernel(tile), 4, columns, seed, device)
    problem = Problem.draw(tokens, 4, columns, seed, Constants(), device)
    exact = counterfactual.backward(problem)
    golden, allowed = exact["dalpha"].double().cpu(), exact.step("dalpha").bound.absolute.cpu()
    dalpha = torch.stack([faulty.backward(problem, Access(tile=width))["dalpha"].double().cpu() for width in WIDTHS])
    share = ((dalpha - golden).abs() / allowed).numpy()

    figure, axes = plots.figure(1, 2, width=11.0, height=3.2)
    read = response.T == 1.0
    axes[0].imshow(read, cmap=plots.ListedColormap([plots.ORANGE, plots.BLUE]), vmin=0, vmax=1, aspect="auto")
    return figure
