"""What is left of a wrong step's error: how much, in bits, and in which region."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from whywrong.comparing.regions import Region, bits_of_subset, tightest

Tensor = torch.Tensor

FARTHEST = 1e9
"""How far off, in tolerances, what cannot be compared counts as."""
QUIETEST = 1.0 / 16.0
"""Standard deviation, in tolerances, below which noise is not believed to be known."""


class Residual:
    """An observed step against the reference's, element by element.

    `allowed` is what each element may be off, above 0, None for whole numbers, of which each is right or wrong;
    `noise` the standard deviation of a correct one's error. `inputs` has for dimensions the whole numbers that a
    program was given for their slices.
    """

    def __init__(
        self,
        observed: Tensor,
        reference: Tensor,
        allowed: Tensor | None,
        noise: Tensor | float,
        inputs: Mapping[int, Sequence[tuple[str, Tensor]]],
    ) -> None:
        self.observed, self.reference, self.allowed, self.inputs = observed, reference, allowed, inputs
        self.noise = torch.as_tensor(noise, dtype=torch.float64)
        relative = self.noise / allowed if allowed is not None else torch.ones(())
        self._noise = relative.nan_to_num(QUIETEST, QUIETEST, QUIETEST).clamp(min=QUIETEST)
        self._values = len(observed.unique()) if allowed is None else 0
        self._finite = allowed is not None and not bool((observed - allowed).isnan().any() | observed.isinf().any())
        self.off = self.distance(reference)
        self.wrong = self.off > 1.0
        self._any_wrong = bool(self.wrong.any())
        self.bits = self.cost(self.off)
        self.half = (self.bits + self.cost(self.off.masked_fill(self.wrong, 0.0))) / 2.0
        """Bits of which a half of what wrong elements take is left."""

    def of(self, change: Callable[[Tensor], Tensor]) -> Residual:
        """The same of what `change` makes of each tensor: a part of it, or the same elsewhere."""
        o, v, noise = map(change, (self.observed, self.reference, self.noise.expand(self.observed.shape)))
        return Residual(o, v, change(self.allowed) if self.allowed is not None else None, noise, {})

    def distance(self, value: Tensor) -> Tensor:
        """How far a value of this shape is from what was observed, in tolerances; NaN is at NaN's place."""
        o = self.observed
        if self.allowed is None or not value.is_floating_point():
            return (value != o).double() * FARTHEST
        z = ((value - o).abs() / self.allowed).clamp_(max=FARTHEST)
        if self._finite:
            return z.nan_to_num_(FARTHEST)
        return torch.where((value == o) | (value.isnan() & o.isnan()), 0.0, z.nan_to_num(FARTHEST, FARTHEST, FARTHEST))

    def cost(self, off: Tensor) -> float:
        """What it takes to say, in bits, by how much elements are `off`: nothing of one that is off by noise."""
        return self.costs(off[None])[0]

    def costs(self, off: Tensor) -> list[float]:
        """The same of several, along the first dimension."""
        n = off[0].numel()
        several = off.reshape(len(off), n)
        if self.allowed is None:
            wrong = (several > 1.0).sum(1).tolist()
            return [k * math.log2(max(2, self._values)) + bits_of_subset(n, k) for k in wrong]
        noise = self._noise.flatten()
        return ((several / noise).square_().add_(1.0).log2_().sum(1) / 2.0).tolist()

    def improves(self, off: Tensor, explained: float) -> bool:
        """Whether a value that is `off` leaves less than a half, or explains all that is wrong, as in a region."""
        return self.cost(off) < self.half or (self._any_wrong and not bool((self.wrong & ~(off <= explained)).any()))

    def left(self, off: Tensor, explained: float) -> tuple[Tensor, Region] | None:
        """How far off all is if the observed is a value in a region and the reference elsewhere, and that region.

        `off` is the value's :meth:`distance`. None where it is more than `explained` tolerances for a wrong element.
        """
        fits = off <= explained
        if not self._any_wrong or bool((self.wrong & ~fits).any()):
            return None
        region = tightest(self.wrong, ~fits & ~self.wrong, self.inputs)
        return torch.where(region.mask, off, self.off), region

    @property
    def everywhere(self) -> bool:
        """Whether most elements are off by more than a correct one's error, of which 0.67 of its deviation is usual."""
        return float((self.off / self._noise).median()) > 1.0
