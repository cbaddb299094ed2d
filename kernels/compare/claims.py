"""What is measured for each claim of notebook comparison_selftest, and its truth. The words are in data/claims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kernels.compare import correct_programs
from kernels.compare.blind_spots import LARGEST_TOLERANCE, SMALLEST_TOLERANCE, Passes
from kernels.compare.calibration import ERROR_FACTORS, Tally, alarms, missed
from kernels.compare.checks import CHECKS, LABKIT, REFERENCES, STORED
from kernels.compare.speed import Speed, recorded_ratios
from kernels.compare.trials import (
    Trial,
    as_good_as_labkit,
    at_full_strength,
    detection,
    flagged,
    interval_by_fault,
    score,
    sizes_and_draws,
    without_false_positives,
)
from labkit import Ledger

SPEED = ("assert_close_memory", "assert_close_traffic", "one_pass_at_read_speed", "ten_times_assert_close")
"""The claims that need a GPU."""
CLAIMED_GIB = 3.25
"""GiB beside such a pair that the claim gives; nothing in this workbook says where the figure is from."""
FEWEST = 1000
"""The claim says over a thousand correct products: of different bits."""
QUARTER = 0.25


def settle_global_checks(ledger: Ledger, dead: Passes, flipped: Passes, scaled: Passes) -> None:
    """Settle what the cosine and the global relative metric pass."""
    claims = ("dead_row_passes", "flipped_row_passes", "scale_passes")
    for claim, passes in zip(claims, (dead, flipped, scaled), strict=True):
        ledger.settle(claim, passes.passed == passes.tried, **asdict(passes))


def settle_norms(ledger: Ledger, norms: tuple[str, str]) -> None:
    """Settle what equality of L1 norms shows, from those of a matrix and of its transpose."""
    norm, of_transpose = norms
    ledger.settle("l1_norm_is_blind_to_layout", norm == of_transpose, norm=norm, of_transpose=of_transpose)


def settle_fixed_tolerances(ledger: Ledger, terms: int, right: float, scaled: float, doubled: float) -> None:
    """Settle what fixed tolerances do, from largest errors.

    `right` is that of a correct product of so many terms, `scaled` that of one which is 1% off, and `doubled` the same
    with factors twice as large.
    """
    small, large = SMALLEST_TOLERANCE, LARGEST_TOLERANCE
    ledger.settle("fixed_tolerance_flakes", right > small, error=right, terms=terms, tolerance=small)
    ledger.settle("fixed_tolerance_sleeps", scaled <= large, error=scaled, doubled=doubled, tolerance=large)


def settle_products(ledger: Ledger, tallies: Sequence[Tally]) -> None:
    """Settle what many correct products show, and one element of each that is set off."""
    cases, different = sum(t.cases for t in tallies), sum(t.different for t in tallies)
    truth = False if alarms(tallies) else True if different > FEWEST else None
    largest = max(share for t in tallies for share in t.used.values())
    counts = {"cases": cases, "different": different, "largest": largest}
    ledger.settle("no_clean_product_is_called_wrong", truth, accused=alarms(tallies), **counts)
    misses = missed(tallies)
    ledger.settle(
        "every_element_beyond_is_caught",
        misses[ERROR_FACTORS[-1]] == 0,
        cases=cases,
        times=[f"{times:g}" for times in misses],
        missed=list(misses.values()),
    )


def settle_localising(ledger: Ledger, done: Sequence[Trial]) -> None:
    """Settle what planted faults and correct runs show of whywrong.localise, and the correct runs of assert_close."""
    at_once = score(at_full_strength(done), LABKIT)
    sizes, draws = sizes_and_draws(done)
    counts = {"right_step": at_once.right_step, "reported": at_once.reported, "faults": at_once.faults}
    right = at_once.right_step == at_once.faults
    ledger.settle("every_fault_is_found", right, sizes=sizes, draws=draws, **counts)
    tenfold = score([t for t in done if t.strength == 10.0], LABKIT)
    right = tenfold.right_step == tenfold.faults
    counted = {"right_step": tenfold.right_step, "faults": tenfold.faults}
    interval = interval_by_fault([t for t in done if t.strength == 10.0], LABKIT)
    ledger.settle("ten_times_the_smallest_is_found", right, interval=interval, **counted)
    names = flagged(done, LABKIT)
    ledger.settle("no_clean_run_is_called_wrong", not names, accused=at_once.flagged, clean=at_once.clean, names=names)
    stored, rerun = (score(at_full_strength(done), "torch.testing.assert_close", which).flagged for which in REFERENCES)
    ledger.settle(
        "assert_close_cries_wolf",
        stored > QUARTER * at_once.clean,
        accused=stored,
        accused_rerun=rerun,
        clean=at_once.clean,
    )


def settle_correct_programs(ledger: Ledger, record: Mapping[str, Any], stated: float = correct_programs.STATED) -> None:
    """Settle how often fresh correct programs are flagged, from the record of many."""
    rates = [{"storage": storage} | rate for storage, rate in correct_programs.flagged(record).items()]
    beyond = [rate["storage"] for rate in rates if rate["interval"][0] > stated]
    undecided = [rate["storage"] for rate in rates if rate["interval"][0] <= stated < rate["interval"][1]]
    measured = {"rates": rates, "all": record["accused"], "date": record["date"], "open": undecided}
    truth = False if beyond else None if undecided else True
    ledger.settle("right_programs_are_accused_as_stated", truth, stated=stated, **measured)


def settle_speed(ledger: Ledger, speed: Speed) -> None:
    """Settle :data:`SPEED` from what was timed on a GPU."""
    gib = speed.assert_close_memory
    ledger.settle("assert_close_memory", abs(gib - CLAIMED_GIB) <= 0.1 * CLAIMED_GIB, gib=gib, claimed=CLAIMED_GIB)
    ratio = speed.assert_close / speed.read
    ledger.settle("assert_close_traffic", ratio >= 10.0, us=speed.assert_close, read=speed.read, ratio=ratio)
    share, mib = speed.read / speed.kernels, 1024 * speed.labkit_memory
    fast = share >= 0.92 and mib <= 16.0
    ledger.settle("one_pass_at_read_speed", fast, us=speed.kernels, read=speed.read, share=share, mib=mib)
    ratio, recorded = speed.assert_close / speed.labkit, recorded_ratios()
    ledger.settle(
        "ten_times_assert_close",
        min(ratio, *recorded) >= 10.0,
        us=speed.labkit,
        assert_close=speed.assert_close,
        ratio=ratio,
        records=len(recorded),
        recorded=[min(recorded), max(recorded)],
        reached=sum(each >= 10.0 for each in recorded),
    )


def metrics(done: Sequence[Trial], strengths: Mapping[str, float], record: Mapping[str, Any]) -> dict[str, Any]:
    """What the notebook's answer and README need: of the trials, of the strengths that whole faults have, of rates."""
    own = score(at_full_strength(done), LABKIT)
    at_strength = dict(detection(done, LABKIT))
    at_ten = score([t for t in done if t.strength == 10.0], LABKIT)
    return {
        "whole_named": [own.right_step, own.faults],
        "whole_strengths": [min(strengths.values()), max(strengths.values())],
        "detection": list(at_strength.items()),
        "identified_at_ten": at_strength[10.0],
        "of_faults_at_ten": [at_ten.right_step, at_ten.faults],
        "clean": own.clean,
        "clean_called_wrong": own.flagged,
        "clean_called_wrong_by_steps_alone": score(at_full_strength(done), LABKIT, STORED).flagged,
        "checks": len(CHECKS),
        "checks_as_good": as_good_as_labkit(done),
        "identified_without_accusing": {which: without_false_positives(done, which) for which in REFERENCES},
        "accused": {name: rate["count"] / rate["of"] for name, rate in correct_programs.flagged(record).items()},
    }
