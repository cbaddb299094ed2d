"""What a step was found to be in the golden's numbers, and the texts that give all of a golden."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from labkit.formula import Formula, of_letters
from labkit.replayed import Replay
from labkit.samples import SOFTMAX, Sources

Tensor = torch.Tensor

ROUNDINGS = 256.0
"""How many of the golden's round-offs a sample, or a sum, may be off where a candidate is suggested; whether one holds
is decided on the whole step."""
SOFTENED = 16.0
"""How many round-offs two softmaxes of the same numbers may be apart, each in a golden's precision."""


@dataclass(frozen=True)
class Found:
    """What a step was found to be, of which inputs."""

    names: list[str]
    way: Replay | None = None
    written: Formula | None = None
    fitted: bool = False
    """Whether the formula has a constant that was fitted, and so may be a number of the data."""

    def of(self, inputs: Sequence[Tensor]) -> Tensor:
        """What it gives of these, in float64."""
        if self.way is not None:
            return self.way.run(*inputs)
        assert self.written is not None
        return self.written.value(inputs, [torch.zeros_like(x) for x in inputs], 0.0)[0]


def formula_of(
    text: str, names: Sequence[str], sources: Sources, g: Tensor, unit: float, grid: Tensor
) -> Formula | None:
    """`text` of these sources, if it gives all of g."""
    softened = any(name.endswith(SOFTMAX) for name in names)
    return of_letters(text, [sources[one] for one in names], g, SOFTENED * unit if softened else unit, grid)
