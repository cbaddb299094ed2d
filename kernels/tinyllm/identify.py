"""Which sets of faults print what an unknown program printed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

import labkit
from kernels.tinyllm import faulty
from kernels.tinyllm.faulty import UNSTEADY, WORLDS, Sweep

Array = np.ndarray
NOTHING = labkit.Bound(math.inf, "another value when run again")


def identify(s: Sweep, observed: Mapping[str, Any]) -> labkit.Weighing:
    """Which sets of switches, calls unchecked, print in every kind of memory what an unknown program printed.

    `observed[world]` is one outcome. The hypotheses are all sets of the sweep; all counts and sizes are compared, once
    for sets that are alike in all of them. Where a program prints something else when it is run again, a set is not
    tested, and nothing is learnt of that program.
    """
    loose = np.flatnonzero(s.bits[:, -1] == 1)
    names = [faulty.words(faulty.named(s.bits[i]) - {"unchecked"}) for i in loose]
    table = {world: _counts(s.outcomes[world][loose]) for world in WORLDS}
    known = {world: s.outcomes[world][loose]["status"] != UNSTEADY for world in WORLDS}
    _, first, alike = np.unique(np.concatenate(list(table.values()), 1), axis=0, return_index=True, return_inverse=True)
    hypotheses = {names[i]: (lambda world, i=i: (table[world][i], None if known[world][i] else NOTHING)) for i in first}
    settings = {world: world for world in WORLDS if observed[world]["status"] != UNSTEADY}
    found = labkit.weigh(lambda world: _counts(np.atleast_1d(observed[world]))[0], hypotheses, settings, thorough=False)
    fits = {name: found.fits[names[i]] for name, i in zip(names, first[alike], strict=True)}
    return labkit.Weighing(found.settings, fits)


def _counts(o: Array) -> Array:
    """The whole numbers of outcomes, float64 [n, fields]."""
    names = [n for n in o.dtype.names or () if o.dtype[n].kind == "i"]
    return np.stack([o[name].astype(np.float64) for name in names], axis=1)
