"""The notebook's picture: how far a step is off, and for how many columns."""

from collections.abc import Callable, Sequence

import torch
from matplotlib.figure import Figure

from kernels.start_here import golden
from whywrong import golden as record
from whywrong.drawing import plots

Tensor = torch.Tensor
COLUMNS = (*range(1, 9), *range(10, 31, 2), 31, 32, 33, *range(36, 61, 3), 63, 64, 65, *range(70, 95, 4), 96, 97, 100)
"""Widths at which the kernel is run: multiples of 32, their neighbours, and some between."""


def farthest(observed: Tensor, right: Tensor) -> Tensor:
    """The largest |observed - right| of each row, relative to the row's largest number: [rows]."""
    size = right.abs().amax(-1).clamp_min(1e-30)
    return ((observed.double() - right).abs().amax(-1) / size).cpu()


def plot_step(
    name: str, kernel: Callable[..., dict[str, Tensor]], x: Tensor, gain: Tensor, caption: str,
    widths: Sequence[int] = COLUMNS,
) -> Figure:  # fmt: skip
    """The relative error of a step by row, at the width of x, and the largest of any row by the number of columns."""
    figure, (left, right) = plots.figure(1, 2, width=8.5, height=3.0)
    rows = farthest(kernel(x, gain)[name], record(golden.probabilities, x=x, gain=gain)[name])
    left.bar(range(len(rows)), rows.clamp_min(1e-9), color=plots.BLUE)
    left.set(yscale="log", ylim=(1e-9, 1e2), ylabel="relative error")
    left.set_xlabel("row of x, from the smallest numbers to the largest")
    left.set_title(f"{name} by row, at {x.shape[1]} columns")
    some = x[[0, len(x) // 2, -1]]
    errors = []
    for width in (shown := [w for w in widths if w <= x.shape[1]]):
        part = {"x": some[:, :width], "gain": gain[:width]}
        errors.append(float(farthest(kernel(**part)[name], record(golden.probabilities, **part)[name]).max()))
    right.plot(shown, torch.tensor(errors).clamp_min(1e-9), "o", ms=3.5, color=plots.BLUE)
    for width in range(32, x.shape[1] + 1, 32):
        right.axvline(width, color=plots.GREY, lw=0.8, ls=":")
    right.set(yscale="log", ylim=(1e-9, 1e2), xlabel="number of columns (dotted: a multiple of 32)")
    right.set_title(f"{name}, largest of three rows")
    for axes in (left, right):
        axes.axhline(1e-6, color=plots.GREY, ls="--")
    right.text(2, 3e-7, "rounding", fontsize=8, va="top", color=plots.GREY)
    plots.caption(figure, caption)
    return figure
