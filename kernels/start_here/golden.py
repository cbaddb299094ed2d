"""The reference of start_here, plain PyTorch in five named steps; :func:`whywrong.golden` records it in float64."""

import torch

from whywrong import step

Tensor = torch.Tensor
EPS = 1e-5


def probabilities(x: Tensor, gain: Tensor) -> Tensor:
    """Softmax of each row of x [rows, columns] over its root mean square, times gain [columns]: y [rows, columns]."""
    mean_square = step("mean_square", x.square().mean(-1, keepdim=True))
    scaled = step("scaled", x / (mean_square + EPS).sqrt() * gain)
    largest = step("largest", scaled.amax(-1, keepdim=True))
    total = step("total", (scaled - largest).exp().sum(-1, keepdim=True))
    return step("y", (scaled - largest).exp() / total)
