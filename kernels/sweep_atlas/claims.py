"""What is measured for each claim of notebook sweep_atlas, and its truth; the words are in data/claims."""

from __future__ import annotations

import pandas

from kernels.sweep_atlas import experiments
from labkit import Ledger

TILE = "first tile of 32 columns only"
"""The fault that the report's author had, by their repository."""


def settle(ledger: Ledger, points: pandas.DataFrame) -> None:
    """Settle all claims on the points of a sweep; those that need several sizes are undecidable on fewer."""
    pattern = experiments.wrong(points)
    faults, settings = pattern.shape
    rivals = pattern.drop(index=TILE)
    fewest = min(int((rivals[setting] == pattern.loc[TILE, setting]).sum()) for setting in pattern)
    ledger.settle("one_setting", fewest == 0, settings=settings, fewest=fewest, faults=faults)

    usual = pattern.T.groupby(level="d").any().T
    edges = [name for name in usual if not usual.loc[TILE, name]]
    swept = usual.shape[1] > 1
    own = {"largest_right": max(edges, default=None), "smallest_wrong": min(set(usual) - {*edges}, default=None)}
    apart = TILE in experiments.alone(usual)
    ledger.settle("sweep_of_d", apart if swept else None, widths=usual.shape[1], **own)

    by_d, by_all = experiments.alone(usual), experiments.alone(pattern)
    more = sorted({*by_all} - {*by_d})
    several = len({key[:2] for key in pattern}) > 1
    counts = {"by_d": len(by_d), "by_all": len(by_all), "faults": faults, "more": more}
    ledger.settle("sizes_of_one", bool(more) if several else None, **counts)

    groups = [group for group in experiments.alike(pattern) if len(group) > 1]
    silent = [str(name) for name, row in pattern.iterrows() if not row.any()]
    ledger.settle("alike", bool(groups) if swept and several else None, groups=groups, silent=silent)
