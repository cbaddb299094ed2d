"""Programs sampled at random, to be identified from what they print. What identifies them does not import this."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kernels.tinyllm import faulty

NEEDS = {
    "d2h downloads half of the bytes": ("prefer_host",),
    "the debug print uploads the host vector": ("zero_host",),
    "the move of heads writes nothing": (),
    "device to device copies run backwards": (),
    "the last layer's result is not assigned": (),
    "the head's product is given a buffer of zeros": (),
    "cuBLAS's products write nothing": (),
    "h2d starts one element late": (),
    "the norm before the head is left out": (),
}
"""The faults outside the list of switches, each with what else has to be set for it to do anything."""


@dataclass(frozen=True)
class UnknownProgram:
    """A program, and the truth about it."""

    bits: np.ndarray
    outside: str

    @property
    def outside_the_list(self) -> bool:
        """Whether one of its faults is none of the switches."""
        return self.outside != faulty.OUTSIDE[0]

    @property
    def truth(self) -> str:
        """Its faults in words; that its calls are unchecked is known and left out."""
        listed = faulty.in_words(faulty.switches_of(self.bits) - {"unchecked"})
        return self.outside if self.outside_the_list else listed

    def rows(self) -> np.ndarray:
        """The program in each kind of memory, int32 [4, 18]."""
        names = faulty.switches_of(self.bits)
        outside = faulty.OUTSIDE.index(self.outside)
        return np.stack([faulty.row(*names, outside=outside, memory=memory) for memory in faulty.MEMORY])


def sample(seed: int, share_outside: float = 0.2) -> UnknownProgram:
    """One to five switches that matter, or, with a chance of `share_outside`, a fault that is none of them.

    No call is checked.
    """
    rng = np.random.default_rng([seed, 17])
    if rng.random() < share_outside:
        outside = str(rng.choice(list(NEEDS)))
        return UnknownProgram(faulty.row(*NEEDS[outside], "unchecked")[: len(faulty.NAMES)], outside)
    every = faulty.sets()
    every = every[every[:, -1] == 1]
    return UnknownProgram(rng.choice(every[every[:, :-1].sum(1) == rng.integers(1, 6)]), faulty.OUTSIDE[0])
