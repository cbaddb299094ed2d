"""Which sets of faults print what an unknown program printed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

import labkit
from kernels.tinyllm import faulty
from kernels.tinyllm.faulty import WORLDS, Sweep

Array = np.ndarray


def identify(s: Sweep, observed: Mapping[str, Any]) -> labkit.Weighing:
    """Which sets of switches, calls unchecked, print in every kind of memory what an unknown program printed.

    `observed[world]` is one outcome. The hypotheses are all sets of the sweep; all counts and sizes are compared.
    """
    loose = np.flatnonzero(s.bits[:, -1] == 1)
    names = [faulty.words(faulty.named(s.bits[i]) - {"unchecked"}) for i in loose]
    table = {world: _counts(s.outcomes[world][loose]) for world in WORLDS}
    hypotheses = {name: (lambda world, i=i: table[world][i]) for i, name in enumerate(names)}
    return labkit.weigh(
        lambda world: _counts(np.atleast_1d(observed[world]))[0], hypotheses, {w: w for w in WORLDS}, thorough=False
    )


def _counts(o: Array) -> Array:
    """The whole numbers of outcomes, float64 [n, fields]."""
    names = [n for n in o.dtype.names or () if o.dtype[n].kind == "i" and n != "strays"]
    return np.stack([o[name].astype(np.float64) for name in names], axis=1)
