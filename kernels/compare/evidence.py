"""The verdicts of the self-test: what was measured, and a reason for each outcome."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kernels.compare.calibration import BEYOND, Tally, shown
from kernels.compare.measured import Passed, Speed
from kernels.compare.trials import OURS, SCORES, Score, Trial, as_good, called_wrong, detection, score
from labkit import Ledger, Table
from labkit.session.catalogue import ROOT
from labkit.session.record import recorded

HOSTS = ROOT / "data" / "results" / "compare_hosts.csv"
"""The first case of every record of `labkit bench compare`, none left out: us of a pair of 1 GiB each."""

HELD = 3.25
"""GiB beside such a pair that the claim gives; nothing in this workbook says where the figure is from."""

SPEED = ("assert_close_memory", "assert_close_traffic", "one_pass_at_read_speed", "ten_times_assert_close")
"""The claims that need a GPU."""


THOUSAND = 1000
"""The claim says over a thousand clean products: of different bits."""


def products(ledger: Ledger, tallies: Sequence[Tally]) -> None:
    """Settle what many clean products say."""
    cases, different = sum(t.cases for t in tallies), sum(t.different for t in tallies)
    alarms = sum(t.elementwise + t.structure for t in tallies)
    used = {length: max(t.used[length] for t in tallies) for length in shown([*tallies[0].used])}
    most = ", ".join(f"{share:.3g} at K = {length:,}" for length, share in used.items())
    counted = f"{cases} products with {different} different results"
    ledger.settle(
        "no_clean_product_is_called_wrong",
        "refuted" if alarms else "confirmed" if different > THOUSAND else "undecidable",
        measured=alarms,
        because={
            "confirmed": f"no alarm on {counted}, by either instrument; of a bound at most {most} was used",
            "refuted": f"{alarms} alarms on {counted}",
            "undecidable": f"no alarm on {counted}: too few for the claim, which says over a thousand",
        },
    )
    missed = [sum(each) for each in zip(*(t.missed for t in tallies), strict=True)]
    words = "; ".join(f"at {times:g} bounds {n} of {cases} missed" for times, n in zip(BEYOND, missed, strict=True))
    ledger.settle(
        "every_element_beyond_is_caught",
        missed[-1] == 0,
        measured=missed[-1],
        because={
            "confirmed": f"one element of each product, at a drawn place: {words}",
            "refuted": f"one element of each product, at a drawn place, is not always reported: {words}",
        },
        given="the rule is |observed - golden| > bound, so that a program without faults cannot miss one; what was "
        "tried is the program",
    )


def global_checks(ledger: Ledger, found: dict[str, Passed]) -> None:
    """Settle what the cosine and the global relative metric pass."""
    for claim, name, given in (
        (
            "dead_row_passes",
            "dead row",
            "it follows by arithmetic from the row's share p of the sum of squares, about 1 in 2048: the cosine is the "
            "root of 1 - p, the metric p / (2 - p)",
        ),
        (
            "flipped_row_passes",
            "flipped row",
            "it follows by arithmetic from the row's share p of the sum of squares: the cosine is 1 - 2 p, the metric "
            "2 p, within 1e-3 for rows of p up to 1 in 2000",
        ),
        (
            "scale_passes",
            "4% scale",
            "it follows by arithmetic, whatever the tensor is: a scale leaves the cosine at 1, and the metric is "
            "0.04^2 / (1 + 1.04^2)",
        ),
    ):
        passed = found[name]
        ledger.settle(
            claim,
            passed.passed == passed.tried,
            measured=[passed.cosine, passed.metric],
            because={"confirmed": str(passed), "refuted": f"not always: {passed}"},
            given=given,
        )


def other_checks(ledger: Ledger, blind: bool, fixed: dict[str, float]) -> None:
    """Settle what norms and fixed tolerances do."""
    ledger.settle(
        "l1_norm_is_blind_to_layout",
        blind,
        because={
            "confirmed": "a matrix and its transpose differ, and their norms agree to six digits",
            "refuted": "the norms of a matrix and its transpose differ within six digits",
        },
        given="it follows by arithmetic: both sum the same magnitudes, in another order",
    )
    right, off, wide = (fixed[name] for name in ("right, K = 65536", "1% off, K = 1", "1% off, K = 1, factors up to 2"))
    larger = f"with the same factors doubled it is {wide:.2e}, {'within' if wide <= 1e-2 else 'beyond'} it"
    ledger.settle(
        "fixed_tolerance_flakes",
        right > 1e-4,
        measured=right,
        because={
            "confirmed": f"the largest error of a right product is {right:.2e}, above 1e-4",
            "refuted": f"the largest error of a right product is {right:.2e}, not above 1e-4",
        },
    )
    ledger.settle(
        "fixed_tolerance_sleeps",
        off <= 1e-2,
        measured=off,
        because={
            "confirmed": f"the largest error of a product that is 1% off is {off:.2e}, within 1e-2; {larger}",
            "refuted": f"the largest error of a product that is 1% off is {off:.2e}, beyond 1e-2; {larger}",
        },
        given="it follows by arithmetic from factors below 1, as the claim has them: 1% of their product is below 1e-2",
    )


def localising(ledger: Ledger, whole: Score, tenfold: Score, theirs: Score, tried: str) -> None:
    """Settle what planted faults and clean runs say: ours on whole faults and tenfold ones, and assert_close."""
    share = f"{whole.right_step} of {whole.faults} whole faults at their step, {whole.found} at some step, at {tried}"
    ledger.settle(
        "every_fault_is_found",
        whole.right_step == whole.faults,
        measured=whole.right_step / whole.faults,
        because={"confirmed": share, "refuted": f"only {share}"},
    )
    share = f"{tenfold.right_step} of {tenfold.faults} at their step"
    tenfold_is = "at ten times the strength at which a test that knows the shape sees half"
    ledger.settle(
        "ten_times_the_smallest_is_found",
        tenfold.right_step == tenfold.faults,
        measured=tenfold.right_step / tenfold.faults,
        because={
            "confirmed": f"all {share}, {tenfold_is}",
            "refuted": f"only {share}, {tenfold_is}: to look for every shape at once costs sensitivity",
        },
    )
    ledger.settle(
        "no_clean_run_is_called_wrong",
        whole.false_alarms == 0,
        measured=whole.false_alarms,
        because={
            "confirmed": f"none of {whole.clean}",
            "refuted": f"{whole.false_alarms} of {whole.clean}",
        },
    )
    wolf = theirs.false_alarms / theirs.clean
    words = f"{theirs.false_alarms} of {theirs.clean} clean runs"
    ledger.settle(
        "assert_close_cries_wolf",
        wolf > 0.25,
        measured=wolf,
        because={"confirmed": f"{words}, more than a quarter", "refuted": f"{words}, no more than a quarter"},
    )


def speed(ledger: Ledger, s: Speed) -> None:
    """Settle what was timed on a GPU."""
    words = f"{s.assert_close_memory:.3g} GiB at its peak beyond the pair"
    ledger.settle(
        "assert_close_memory",
        abs(s.assert_close_memory - HELD) <= 0.1 * HELD,
        measured=s.assert_close_memory,
        because={"confirmed": words, "refuted": f"{words}, not what the claim says within a tenth"},
    )
    ratio = s.assert_close / s.read
    words = f"{s.assert_close:.0f} us against {s.read:.0f} us to read both"
    ledger.settle(
        "assert_close_traffic",
        ratio >= 10.0,
        measured=ratio,
        because={"confirmed": words, "refuted": f"{words}: less than ten times"},
    )
    share, memory = s.read / s.kernels, s.ours_memory * 1024
    words = f"kernels {s.kernels:.0f} us, a read of both {s.read:.0f} us, {memory:.2g} MiB beside the pair"
    ledger.settle(
        "one_pass_at_read_speed",
        share >= 0.92 and memory <= 16.0,
        measured=share,
        because={"confirmed": words, "refuted": f"{words}: below 92%, or more than 16 MiB"},
    )
    ratio = s.assert_close / s.ours
    words = f"{s.ours:.0f} us against {s.assert_close:.0f} us; {on_record()}"
    ledger.settle(
        "ten_times_assert_close",
        ratio >= 10.0,
        measured=ratio,
        because={"confirmed": words, "refuted": f"{words}: less than ten times here"},
    )


def _records(path: Path = HOSTS) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def on_record() -> str:
    """How many times as fast as assert_close a whole call was in the records, in words."""
    ratios = [float(row["torch.testing.assert_close"]) / float(row["ours: labkit.compare"]) for row in _records()]
    return (
        f"in the {len(ratios)} records of the benchmark the ratio is {min(ratios):.3g} to {max(ratios):.3g}; "
        f"ten is reached by {sum(ratio >= 10.0 for ratio in ratios)} of them"
    )


def hosts_table() -> Table:
    """Every record: a whole call depends on its host, the kernels do not."""
    rows = _records()
    names = list(rows[0])
    return Table(names, [[row[name] for name in names] for row in rows], title="us, a pair of 1 GiB each, every record")


def metrics(done: Sequence[Trial], strengths: Mapping[str, float]) -> dict[str, Any]:
    """What the answer needs of the trials, and of the strengths that whole faults have."""
    ours, alone = (score([t for t in done if t.strength is None], judge) for judge in OURS)
    judge = next(iter(OURS))
    return {
        "whole_named": [ours.right_step, ours.faults],
        "whole_strengths": [min(strengths.values()), max(strengths.values())],
        "detection": detection(done, judge),
        "clean": ours.clean,
        "clean_called_wrong": ours.false_alarms,
        "clean_called_wrong_by_steps_alone": alone.false_alarms,
        "checks": len(SCORES),
        "checks_as_good": as_good(done, judge),
    }


def answer(metrics: Mapping[str, Any]) -> str:
    """The notebook's answer, from the metrics of its result."""
    weakest, strongest = metrics["whole_strengths"]
    named, faults = metrics["whole_named"]
    wrong, alone, clean = metrics["clean_called_wrong"], metrics["clean_called_wrong_by_steps_alone"], metrics["clean"]
    missed = 1.0 - dict(map(tuple, metrics["detection"]))[10.0]
    rivals = " and ".join(metrics["checks_as_good"])
    return (
        f"Against a recorded golden reference, ours names the step of {named} of {faults} whole faults and calls "
        f"{wrong} of {clean} right runs wrong. These faults are large: from {_rough(weakest)} to {_rough(strongest)} "
        "times the strength at which a test that knows the shape of the fault sees half. Scaled down to ten times that "
        f"strength, {100.0 * missed:.0f}% are missed. Against the reference's numbers alone ours calls {alone} of "
        f"{clean} right runs wrong. Of the {metrics['checks']} checks in common use "
        f"{rivals or 'none'} does as well at any tolerance, over whole and scaled faults together."
    )


def _rough(number: float) -> str:
    """One digit of a number, in words that a sentence can hold."""
    digit = float(f"{number:.0e}")
    return next((f"{digit / unit:g} {word}" for word, unit in UNITS.items() if digit >= unit), f"{digit:,.0f}")


UNITS = {"billion": 1e9, "million": 1e6}


def two_ways(done: Sequence[Trial]) -> str:
    """What the recorded program is worth to right runs, in words."""
    (judge, other), lines = OURS, []
    for way, name in (("With the recorded program", judge), ("Against the numbers alone", other)):
        said, named = score(done, name), called_wrong(done, name)
        lines.append(f"{way} ours calls {said.false_alarms} of {said.clean} right runs wrong{': ' * bool(named)}")
        lines[-1] += "; ".join(named)
    return "\n".join(lines)


def recorded_answers() -> dict[str, str]:
    """The notebook's answer from its record on a CPU, as README and notebook have it; none without a record."""
    kept = recorded("comparison_selftest", "cpu")
    return {"comparison_selftest": answer(kept.result["metrics"])} if kept else {}
