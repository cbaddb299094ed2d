"""What is measured for each claim of notebook speed, and its truth; the words are in data/claims."""

from collections.abc import Sequence

from kernels.speed.records import Case
from labkit import Ledger


def settle_all(ledger: Ledger, cases: Sequence[Case]) -> None:
    """Settle whether ours is the fastest in each case, and whether all that was timed had been checked."""
    slower = {f"{case.benchmark} at {case.size}": case.slower_by for case in cases if case.slower_by >= 1.0}
    worst = max((case.slower_by for case in cases), default=0.0)
    ledger.settle("ours_is_fastest", not slower, cases=len(cases), slower=len(slower), worst=worst, which=list(slower))
    timed = [(case, provider) for case in cases for provider in case.ours]
    unchecked = [f"{case.benchmark}: {name}" for case, name in timed if name not in case.errors]
    wrong = [f"{case.benchmark}: {name}" for case, name in timed if case.errors.get(name, 0.0) > 1.0]
    ledger.settle("timed_is_checked", not wrong, timed=len(timed), wrong=wrong, unchecked=len(unchecked))
