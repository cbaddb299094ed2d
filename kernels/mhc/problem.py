"""Sizes, constants and inputs of one hyper-connection."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from whywrong.errors import UsageError

STREAMS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Constants:
    """What is not learned: epsilon of the norm, epsilon of the coefficients, and how often Sinkhorn normalises."""

    norm_eps: float = 1e-6
    hc_eps: float = 1e-6
    iterations: int = 20

    def __post_init__(self) -> None:
        if self.iterations < 1:
            raise UsageError(f"iterations: expected 1 at least, got {self.iterations}")
        for name in ("norm_eps", "hc_eps"):
            if not getattr(self, name) >= 0.0:
                raise UsageError(f"{name}: expected a number from 0, got {getattr(self, name)}")


@dataclass(frozen=True)
class Inputs:
    """One hyper-connection's inputs, on the CPU: x [T, n, D] of any float type, all else float32.

    phi [n D, n^2 + 2 n], b [n^2 + 2 n], alpha [3]; y [T, D] stands for what the wrapped layer gives, and is of x's
    type, as are the gradients that come from above: dout [T, n, D] and dx_in [T, D].
    """

    x: torch.Tensor
    phi: torch.Tensor
    b: torch.Tensor
    alpha: torch.Tensor
    y: torch.Tensor
    dout: torch.Tensor
    dx_in: torch.Tensor

    @property
    def sizes(self) -> tuple[int, int, int]:
        """T, n, D."""
        t, n, d = self.x.shape
        return t, n, d

    def to(self, device: str) -> Inputs:
        """The same numbers on a device."""
        return Inputs(*(getattr(self, name).to(device) for name in self.__dataclass_fields__))

    def double(self) -> Inputs:
        """The same numbers in float64: what the golden starts from."""
        return Inputs(*(getattr(self, name).double() for name in self.__dataclass_fields__))


def sample(tokens: int, n: int, d: int, rng: np.random.Generator, dtype: torch.dtype = torch.float32) -> Inputs:
    """Standard normal x, y and gradients; phi of variance 1 / (n D), so that the projection is of order one."""
    width = n * n + 2 * n

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal(shape, dtype=np.float32) * np.float32(scale))

    return Inputs(
        normal(tokens, n, d).to(dtype),
        normal(n * d, width, scale=(n * d) ** -0.5),
        normal(width, scale=0.5),
        torch.tensor([0.9, 1.1, 0.7]),
        normal(tokens, d).to(dtype),
        normal(tokens, n, d).to(dtype),
        normal(tokens, d).to(dtype),
    )
