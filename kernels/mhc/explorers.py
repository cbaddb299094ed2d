"""The report's kernel with a tile of any width: which columns it adds up, and how far off its three sums then are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from kernels.mhc import counterfactual, faulty
from kernels.mhc.experiments import PARTS, in_words
from kernels.mhc.faulty import Access, Problem
from kernels.mhc.problem import Constants
from labkit.session.wording import digits
from whywrong.drawing import plots

STREAMS, BITS = 4, 24
"""Residual streams; and the columns that one sum can name: the bits of a float32's significand."""
CONTROLS = {"tile": [8, 16, 32, 64, 128], "columns": (8, 128), "tokens": (1, 12), "seed": (0, 20)}
"""What can be turned, and how far."""
ALT = (
    "Left: the columns that the kernel adds up in each stream, blue, and those that it leaves out, orange. Middle: the "
    "error of each token's and stream's term of dalpha_pre. Right: the errors of the three gradients over their "
    "tolerance, on a logarithmic axis with a line at 1."
)


def columns_read(tile: int, columns: int, device: str = "cpu") -> np.ndarray:
    """Which columns the real kernel adds up with this tile, bool [streams, columns].

    dx_in is one everywhere. Token t's x is 2^c in its own 24 columns and zero elsewhere, so that no sum is rounded and
    the binary digits of dpre name the columns that were added.
    """
    tokens = -(-columns // BITS)
    problem = Problem.sample(tokens, STREAMS, columns, 0, Constants(), device)
    powers = torch.zeros(tokens, tokens * BITS, dtype=torch.float64)
    powers.view(tokens, tokens, BITS).diagonal().copy_((2.0 ** torch.arange(BITS))[:, None])
    x = powers[:, None, :columns].expand(tokens, STREAMS, columns).contiguous().to(problem.x)
    problem = replace(problem, x=x, dx_in=torch.ones_like(problem.dx_in))
    sums = faulty.backward(problem, Access(tile=tile))["dpre"].cpu().numpy().astype(np.int64)  # [tokens, streams]
    return (sums.T[..., None] >> np.arange(BITS) & 1).reshape(STREAMS, -1)[:, :columns] == 1


def tiles(tile: int = 32, columns: int = 128, tokens: int = 6, seed: int = 0, device: str = "cpu") -> Figure:
    """The real kernel with a tile of `tile` columns of the `columns` that x and dx_in have, by two experiments.

    The columns that it adds up, by :func:`columns_read`; and on sampled inputs of so many tokens the error of each term
    of dalpha_pre, and of the three parts of dalpha over the largest rounding error allowed.
    """
    read = columns_read(tile, columns, device)
    problem = Problem.sample(tokens, STREAMS, columns, seed, Constants(), device)
    observed, exact = faulty.backward(problem, Access(tile=tile)), counterfactual.backward(problem)
    terms = [(trace["g_pre"].double() * trace["mix_pre"].double()).cpu().numpy() for trace in (observed, exact)]
    error = (observed["dalpha"].double() - exact["dalpha"]).abs().cpu().numpy()
    shares = error / exact.step("dalpha").bound.absolute.cpu().numpy()

    figure, axes = plots.figure(1, 3, width=11.0, height=3.0)
    axes[0].imshow(read, ListedColormap([plots.ORANGE, plots.BLUE]), vmin=0, vmax=1, aspect="auto")
    missing = in_words(np.flatnonzero(~read.any(0)))
    axes[0].set(title=f"tile of {tile}: columns left out: {missing}", xlabel="column", ylabel="stream")
    axes[0].set_yticks(range(STREAMS))
    image = plots.error_map(axes[1], abs(terms[0] - terms[1]), "terms of dalpha_pre: |kernel - exact|", 10.0, 1e-8)
    axes[1].set(xlabel="stream", ylabel="token", xticks=range(STREAMS), yticks=range(tokens))
    figure.colorbar(image, ax=axes[1])
    values = {part: float(share) or 1e-4 for part, share in zip(PARTS, shares, strict=True)}
    plots.bars(axes[2], values, "error / tolerance", {"the tolerance": 1.0})
    wrong = [part for part, share in values.items() if share > 1.0]
    axes[2].set_title(f"wrong: {', '.join(wrong) or 'none'}")
    off = digits(100.0 * error[0] / abs(float(exact["dalpha"][0])))
    plots.caption(
        figure,
        f"{tokens} tokens, {STREAMS} streams, D = {columns}; dalpha_pre is {off}% off; broken line: the "
        "tolerance; an error of zero is sampled at 0.0001",
    )
    return figure
