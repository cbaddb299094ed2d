"""What a replayed operation is: what it gives, and what its error bound needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

Tensor = torch.Tensor
Function = Callable[..., Tensor]


@dataclass(frozen=True)
class Weighed:
    """Rows that softmax weights add up, of scores that are products themselves."""

    weights: Tensor
    """[.., queries, keys]"""
    values: Tensor
    """[.., keys, width]"""
    scores: Tensor
    """Likewise, -Inf where masked."""
    score_sizes: Tensor
    """sum|a||b| of each score."""
    score_squares: Tensor
    """sum (ab)^2 likewise."""
    score_length: int
    back: Function
    """From [.., queries, width] to the step's shape."""

    def summed(self, weights: Tensor | None = None) -> Tensor:
        """The values by these weights, or by its own."""
        return self.back((self.weights if weights is None else weights) @ self.values)

    def magnitude(self, relative: Tensor | float = 1.0) -> Tensor:
        """sum |w v|, each weight `relative` times as large."""
        return self.back((self.weights * relative) @ self.values.abs())

    def squares(self, relative: Tensor | float = 1.0) -> Tensor:
        """sum (w v)^2 likewise."""
        return self.back((self.weights * relative).square() @ self.values.square())


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
    factor: float = 1.0
    """By which a product is multiplied."""
    weighed: Callable[..., Weighed] | None = None
    """What is added up, where the weights are a softmax of products within the step."""
