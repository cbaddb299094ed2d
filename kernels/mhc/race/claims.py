"""What is measured for each claim of notebook pipeliner_race, and its truth. The words are in data/claims."""

from __future__ import annotations

from collections.abc import Mapping

from kernels.mhc.race.emitted import STEPS, Emitted
from kernels.mhc.race.variants import AS_IT_WAS, Seen
from labkit import Ledger

TOLERANCE = 2.0**-8
"""Relative RMS error that a check of a result allows which is stored as bfloat16."""
LAYER_TOKENS = 1024
"""Tokens over which :func:`~kernels.mhc.race.variants.observe` takes the RMS error of the layer's input."""
SLOWER = 1.05
"""The guard costs nothing that shows while the guarded kernel takes at most this many times as long."""

BY_TEXT = ("text_has_the_overwrite", "needs_both", "own_kernels_are_free")
"""The claims that the compiled text settles, on any machine."""
BY_RUNS = (
    "repeats_differ",
    "beyond_rounding",
    "tolerance_passes",
    "only_where_the_text_has_it",
    "text_predicts_the_runs",
)
"""The claims that follow from the runs of the variants, which a record keeps."""


def settle_by_text(ledger: Ledger, texts: Mapping[str, Emitted], own: Mapping[str, Emitted], triton: str) -> None:
    """Settle :data:`BY_TEXT` from the compiled `texts` of the variants and of the operator's `own` kernels."""
    was, one_reader, guarded = (texts[name] for name in (AS_IT_WAS, "one reader, 4 stages", "guarded, 4 stages"))
    first = None
    if was.overwrites:
        copy = was.overwrites[0]
        first = {"step": copy.step, "slot": copy.slot, "read_by": copy.read_by, "buffers": was.buffers[copy.buffer]}
    ledger.settle("text_has_the_overwrite", first is not None, first=first, pending=was.pending, triton=triton)
    counts = [len(text.overwrites) for text in (was, one_reader, guarded)]
    names = ("as_it_was", "one_reader", "waited_for")
    right = counts[0] > 0 and counts[1:] == [0, 0]
    ledger.settle("needs_both", right, steps=STEPS, **dict(zip(names, counts, strict=True)))
    overwriting = [name for name, text in own.items() if text.overwrites]
    ledger.settle("own_kernels_are_free", not overwriting, kernels=len(own), overwriting=overwriting)


def settle_by_runs(ledger: Ledger, texts: Mapping[str, Emitted], seen: Mapping[str, Seen]) -> None:
    """Settle :data:`BY_RUNS` from what repeated runs of the variants gave on a GPU."""
    was = seen[AS_IT_WAS]
    differ = [name for name in seen if seen[name].differ]
    overwriting = [name for name in seen if texts[name].overwrites]
    unforeseen = [name for name in differ if name not in overwriting]
    spared = [name for name in overwriting if name not in differ]
    counts = {"times": was.times, "differ": len(differ), "variants": len(seen), "unforeseen": unforeseen}
    ledger.settle("repeats_differ", was.differ > 0, differ=was.differ, times=was.times)
    ledger.settle("beyond_rounding", was.error > was.bound, error=was.error, bound=was.bound)
    passes = was.rms[1] <= TOLERANCE
    ledger.settle("tolerance_passes", passes, rms=was.rms, tolerance=TOLERANCE, tokens=LAYER_TOKENS)
    necessary = not unforeseen if differ else None
    ledger.settle("only_where_the_text_has_it", necessary, overwriting=len(overwriting), **counts)
    ledger.settle("text_predicts_the_runs", differ == overwriting != [], spared=spared, **counts)


def settle_guard(ledger: Ledger, operator: Mapping[str, Seen], slower: float) -> None:
    """Settle the claims on the guard: `operator` by type of x, `slower` the guarded time over the unguarded."""
    unlike = [name for name, runs in operator.items() if runs.differ or runs.error > runs.bound]
    ledger.settle(
        "guarded_repeats_are_identical",
        not unlike,
        unlike=unlike,
        types=list(operator),
        differ=[runs.differ for runs in operator.values()],
        times=min(runs.times for runs in operator.values()),
        error_of_bound=max(runs.error / runs.bound for runs in operator.values()),
    )
    ledger.settle("guard_costs_nothing", slower <= SLOWER, slower=slower, allowed=SLOWER)
