"""The verdicts of the self-test: what was measured, and a reason for each outcome."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from kernels.compare.calibration import Tally
from kernels.compare.measured import Speed
from kernels.compare.trials import Score
from labkit import Ledger, Table
from labkit.session.catalogue import ROOT

HOSTS = ROOT / "data" / "results" / "compare_hosts.csv"
"""The first case of every record of `labkit bench compare`, none left out: us of a pair of 1 GiB each."""

SPEED = ("assert_close_memory", "assert_close_traffic", "one_pass_at_read_speed", "ten_times_assert_close")
"""The claims that need a GPU."""


def products(ledger: Ledger, tallies: Sequence[Tally]) -> None:
    """Settle what many clean products say."""
    cases, longest = sum(t.cases for t in tallies), max(t.share for t in tallies)
    alarms, missed = sum(t.elementwise + t.structure for t in tallies), sum(t.missed for t in tallies)
    ledger.settle(
        "no_clean_product_is_called_wrong",
        alarms == 0,
        measured=alarms,
        because={
            "confirmed": f"none of {cases} products, by either instrument; at most {longest:.3g} of a bound was used",
            "refuted": f"{alarms} alarms on {cases} products",
        },
    )
    ledger.settle(
        "every_element_beyond_is_caught",
        missed == 0,
        measured=missed,
        because={
            "confirmed": f"one element in each of {cases} products was set so, and every one was reported",
            "refuted": f"{missed} of {cases} such elements were not reported",
        },
    )


def global_checks(ledger: Ledger, found: dict[str, tuple[float, float, bool]]) -> None:
    """Settle what the cosine and the global relative metric pass."""
    for claim, name in (
        ("dead_row_passes", "dead row"),
        ("flipped_row_passes", "flipped row"),
        ("scale_passes", "4% scale"),
    ):
        cosine, metric, ours = found[name]
        words = (
            f"cosine {cosine:.5f}, relative metric {metric:.2e}; labkit.compare {'reports' if ours else 'misses'} it"
        )
        ledger.settle(
            claim,
            cosine >= 0.99 and metric <= 1e-3,
            measured=[cosine, metric],
            because={"confirmed": f"both pass it: {words}", "refuted": f"not both pass it: {words}"},
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
    )
    right, off = fixed["right, K = 65536"], fixed["1% off, K = 1"]
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
            "confirmed": f"the largest error of a product that is 1% off is {off:.2e}, within 1e-2",
            "refuted": f"the largest error of a product that is 1% off is {off:.2e}, beyond 1e-2",
        },
    )


def localising(ledger: Ledger, whole: Score, tenfold: Score, theirs: Score) -> None:
    """Settle what planted faults and clean runs say: ours on whole faults and tenfold ones, and assert_close."""
    share = f"{whole.right_step} of {whole.faults} whole faults at their step, {whole.found} at some step"
    ledger.settle(
        "every_fault_is_found",
        whole.right_step == whole.faults,
        measured=whole.right_step / whole.faults,
        because={"confirmed": share, "refuted": f"only {share}"},
    )
    share = f"{tenfold.right_step} of {tenfold.faults} at their step: to look for every shape at once costs sensitivity"
    ledger.settle(
        "ten_times_the_smallest_is_found",
        tenfold.right_step == tenfold.faults,
        measured=tenfold.right_step / tenfold.faults,
        because={"confirmed": f"all {tenfold.faults} at their step", "refuted": f"only {share}"},
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
    ledger.settle(
        "assert_close_memory",
        abs(s.assert_close_memory - 3.25) <= 0.325,
        measured=s.assert_close_memory,
        because={
            "confirmed": f"{s.assert_close_memory:.3g} GiB at its peak beyond the pair",
            "refuted": f"{s.assert_close_memory:.3g} GiB at its peak beyond the pair, not 3.25 within a tenth",
        },
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
    words = f"{s.ours:.0f} us against {s.assert_close:.0f} us; {hosts()}"
    ledger.settle(
        "ten_times_assert_close",
        ratio >= 10.0,
        measured=ratio,
        because={"confirmed": words, "refuted": f"{words}: less than ten times here"},
    )


def _records(path: Path = HOSTS) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def hosts() -> str:
    """The best and the worst whole call on record, in words."""
    times = [float(row["ours: labkit.compare"]) for row in _records()]
    return f"on the {len(times)} hosts on record {min(times):.0f} to {max(times):.0f} us a call"


def hosts_table() -> Table:
    """Every record: a whole call depends on its host, the kernels do not."""
    rows = _records()
    names = list(rows[0])
    return Table(names, [[row[name] for name in names] for row in rows], title="us, a pair of 1 GiB each, every record")
