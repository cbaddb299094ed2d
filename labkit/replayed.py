"""What a replayed operation is: what it gives, and what its error bound needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

Tensor = torch.Tensor
Function = Callable[..., Tensor]


@dataclass(frozen=True)
class Replay:
    """A replayed operation: `run(*inputs)` in float64, and what its error bound needs."""

    run: Function
    magnitude: Function | None
    """sum|a||b| of a product on given inputs; None where nothing is summed."""
    squares: Function | None
    """sum (ab)^2 likewise."""
    length: int
    softmax: bool
    product: bool
    transformed: float = 1.0
    """How many times the rounding errors of a usual algorithm exceed those of the sum as it is written."""
