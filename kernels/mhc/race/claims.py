"""What is measured for each claim of notebook pipeliner_race, and its truth. The words are in data/claims."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from scipy.stats import beta

from kernels.mhc.race.emitted import STEPS, Emitted
from kernels.mhc.race.explanations import CHANCE
from kernels.mhc.race.spare_buffer import Pair, chance_without_effect, differing, pairs_from_json
from kernels.mhc.race.variants import AS_IT_WAS, Repeats, from_json
from labkit import Ledger
from labkit.session.record import Record

TOLERANCE = 2.0**-8
"""Relative RMS error that a check of a result allows which is stored as bfloat16."""
LAYER_TOKENS = 1024
"""Tokens over which :func:`~kernels.mhc.race.variants.repeat_variant` takes the RMS error of the layer's input."""
SLOWER = 1.05
"""The guard costs nothing that shows while the guarded kernel takes at most this many times as long."""

BY_TEXT = ("text_has_the_overwrite", "needs_both", "spare_buffer_changes_nothing_else", "own_kernels_are_free")
"""The claims that the compiled text settles, on any machine."""
BY_RUNS = (
    "repeats_differ",
    "beyond_rounding",
    "tolerance_passes",
    "only_where_the_text_has_it",
    "text_predicts_the_runs",
)
"""The claims that follow from the runs of the variants, which a record keeps."""
GUARD = ("guarded_repeats_are_identical", "guard_costs_nothing")
"""The claims on the guard, which need a GPU."""
_NUMBER = re.compile(r"0x[0-9a-f]+")


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


def settle_by_runs(ledger: Ledger, texts: Mapping[str, Emitted], repeats: Mapping[str, Repeats]) -> None:
    """Settle :data:`BY_RUNS` from what repeated runs of the variants gave on a GPU."""
    was = repeats[AS_IT_WAS]
    differ = [name for name in repeats if repeats[name].differ]
    overwriting = [name for name in repeats if texts[name].overwrites]
    unforeseen = [name for name in differ if name not in overwriting]
    spared = [name for name in overwriting if name not in differ]
    counts = {"times": was.times, "differ": len(differ), "variants": len(repeats), "unforeseen": unforeseen}
    ledger.settle("repeats_differ", was.differ > 0, differ=was.differ, times=was.times)
    ledger.settle("beyond_rounding", was.error > was.bound, error=was.error, bound=was.bound)
    passes = was.rms[1] <= TOLERANCE
    ledger.settle("tolerance_passes", passes, rms=was.rms, tolerance=TOLERANCE, tokens=LAYER_TOKENS)
    necessary = not unforeseen if differ else None
    limit = 1.0 - 0.05 ** (1.0 / was.times)
    ledger.settle("only_where_the_text_has_it", necessary, overwriting=len(overwriting), limit=limit, **counts)
    ledger.settle("text_predicts_the_runs", differ == overwriting != [], spared=spared, **counts)


def settle_spare_text(ledger: Ledger, texts: Mapping[str, Pair], code: Mapping[str, Pair]) -> None:
    """Settle whether the spare buffer removes the overwrite and nothing else.

    `texts` holds what :func:`~kernels.mhc.race.emitted.read` finds in both texts of each kernel, `code` their machine
    instructions.
    """
    overwrites = [[len(text.overwrites) for text in pair] for pair in texts.values()]
    lines = [line for pair in code.values() if len(pair.unused) == len(pair.used) for line in differing(pair)]
    constants = all(_NUMBER.sub("", a) == _NUMBER.sub("", b) for a, b in lines)
    same_length = all(len(pair.unused) == len(pair.used) for pair in code.values())
    ledger.settle(
        "spare_buffer_changes_nothing_else",
        same_length and constants and all(unused and not used for unused, used in overwrites),
        unused=[unused for unused, _ in overwrites],
        used=[used for _, used in overwrites],
        instructions=sum(len(pair.unused) for pair in code.values()),
        differing=len(lines),
        same_length=same_length,
        constants=constants,
        steps=STEPS,
    )


def settle_spare_runs(ledger: Ledger, repeats: Mapping[str, Pair], in_turn: bool = True) -> None:
    """Settle whether the overwrite is what makes runs differ, from the runs of both texts of each kernel on a GPU.

    Confirmed where no run differs or is wrong with the buffer used, and that has a chance below CHANCE if its use made
    no difference; refuted where one differs; undecidable otherwise; untestable without runs. `decide` are the kernels
    whose runs differ with the buffer unused; the others decide nothing. `limit` is the largest share of runs of these
    that may differ with the buffer used, at 95% confidence, where none did.
    """
    runs = [pair.used.times for pair in repeats.values()]
    decide = {name: pair.used.times for name, pair in repeats.items() if pair.unused.uncommon}
    unused, used = ([pair[side].uncommon for pair in repeats.values()] for side in (0, 1))
    chance = chance_without_effect(repeats)
    error = max((pair.used.error / pair.used.bound for pair in repeats.values()), default=0.0)
    truth = False if any(used) else (True if chance < CHANCE and error <= 1.0 else None)
    ledger.settle(
        "spare_buffer_is_clean",
        truth if repeats else "untestable",
        unused=unused,
        used=used,
        times=sum(runs),
        chance=chance,
        decide=list(decide),
        quiet=[name for name in repeats if name not in decide],
        limit=1.0 - 0.05 ** (1.0 / sum(decide.values())) if decide else 1.0,
        least=max((smallest_share(pair.unused.uncommon, pair.unused.times) for pair in repeats.values()), default=0.0),
        in_turn=in_turn,
        error_of_bound=error,
    )


def smallest_share(differ: int, times: int) -> float:
    """The smallest share of runs that differ, at 95% confidence (Clopper and Pearson, one-sided), where so many did."""
    return float(beta.ppf(0.05, differ, times - differ + 1)) if differ else 0.0


def settle_guard(ledger: Ledger, operator: Mapping[str, Repeats], slower: float) -> None:
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


def settle_from_record(ledger: Ledger, record: Record | None, texts: Mapping[str, Emitted]) -> None:
    """Settle what needs a GPU: claims on the variants' runs from the recorded runs, those on the guard as recorded."""
    if record is None:
        for claim in (*BY_RUNS, *GUARD):
            ledger.settle_from(claim, None, needs="a GPU")
        settle_spare_runs(ledger, {})
        return
    metrics = record.result["metrics"]
    settle_by_runs(ledger, texts, from_json(metrics["runs"]))
    spare_repeats = pairs_from_json(metrics.get("spare_buffer", {}))  # not in records from before this experiment
    settle_spare_runs(ledger, spare_repeats, metrics.get("in_turn", False))
    for claim in (*BY_RUNS, *(["spare_buffer_is_clean"] if spare_repeats else [])):
        ledger.settled[claim] = replace(ledger.settled[claim], source=record.where)
    for claim in GUARD:
        ledger.settle_from(claim, record, needs="a GPU")
