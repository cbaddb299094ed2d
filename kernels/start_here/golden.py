"""The reference of start_here, plain PyTorch in five named steps; :func:`whywrong.golden` records it in float64."""

from collections.abc import Callable

import torch

from whywrong import step

Tensor = torch.Tensor
EPS = 1e-5


def mean_of_squares(x: Tensor) -> Tensor:
    """Of each row: [rows, 1]."""
    return x.square().mean(-1, keepdim=True)


def probabilities(x: Tensor, gain: Tensor, mean_square_of: Callable[[Tensor], Tensor] = mean_of_squares) -> Tensor:
    """Softmax of each row of x [rows, columns] over its root mean square, times gain [columns]: y [rows, columns].

    Another `mean_square_of` is a hypothesis of what a kernel computes in place of the mean of squares.
    """
    mean_square = step("mean_square", mean_square_of(x))
    scaled = step("scaled", x / (mean_square + EPS).sqrt() * gain)
    largest = step("largest", scaled.amax(-1, keepdim=True))
    total = step("total", (scaled - largest).exp().sum(-1, keepdim=True))
    return step("y", (scaled - largest).exp() / total)
