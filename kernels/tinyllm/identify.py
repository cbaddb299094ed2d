"""Which sets of faults print what an unknown program printed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import whywrong
from kernels.tinyllm import faulty
from kernels.tinyllm.faulty import MEMORY, UNSTEADY, Sweep

Array = np.ndarray
NOTHING = whywrong.Bound(math.inf, "another value when run again")


def identify(s: Sweep, observed: Mapping[str, Any]) -> whywrong.Weighing:
    """Which sets of switches, calls unchecked, print in every kind of memory what an unknown program printed.

    `observed[memory]` is one outcome. The hypotheses are all sets of the sweep; all counts and sizes are compared, once
    for sets that are alike in all of them. Where a program prints something else when it is run again, a set is not
    tested, and nothing is learnt of that program.
    """
    unchecked = np.flatnonzero(s.bits[:, -1] == 1)
    names = [faulty.in_words(faulty.switches_of(s.bits[i]) - {"unchecked"}) for i in unchecked]
    table = {memory: _counts(s.outcomes[memory][unchecked]) for memory in MEMORY}
    known = {memory: s.outcomes[memory][unchecked]["status"] != UNSTEADY for memory in MEMORY}
    _, first, alike = np.unique(np.concatenate(list(table.values()), 1), axis=0, return_index=True, return_inverse=True)

    def counterfactual(i: int) -> Callable[[str], Any]:
        return lambda memory: (table[memory][i], None if known[memory][i] else NOTHING)

    settings = {memory: memory for memory in MEMORY if observed[memory]["status"] != UNSTEADY}
    hypotheses = {names[i]: counterfactual(i) for i in first}
    weighing = whywrong.weigh(
        lambda memory: _counts(np.atleast_1d(observed[memory]))[0], hypotheses, settings=settings, thorough=False
    )
    fits = {name: weighing.fits[names[i]] for name, i in zip(names, first[alike], strict=True)}
    return whywrong.Weighing(weighing.settings, fits)


def wrongly_identified(truth: str, weighing: whywrong.Weighing) -> bool:
    """Whether another set than the true one was identified, or the true one, being in the list, was ruled out."""
    identified = weighing.cause in weighing.fits and weighing.cause != truth
    return identified or truth in weighing.refuted


def outcome_in_words(weighing: whywrong.Weighing) -> str:
    """`identified`, `undecidable` or `none of these`."""
    return weighing.cause if weighing.cause in ("undecidable", "none of these") else "identified"


def _counts(o: Array) -> Array:
    """The whole numbers of outcomes, float64 [n, fields]."""
    names = [name for name in o.dtype.names or () if o.dtype[name].kind == "i"]
    return np.stack([o[name].astype(np.float64) for name in names], axis=1)
