"""What is measured for each claim of notebook start_here, and its truth; the words are in data/claims."""

from collections.abc import Mapping
from typing import NamedTuple

from kernels.start_here.faulty import FAULTS, NONE
from labkit import Ledger
from whywrong import Explanation, FuzzReport, Localisation


class Found(NamedTuple):
    """The end of a search as `lab.finish` records it, in place of a weighing."""

    cause: str | None
    left: list[str]
    refuted: dict[str, str]


def found(why: Explanation) -> Found:
    """What the search says of its first wrong step: the cause, or its verdict where it has none; None if none is."""
    says = [cause.says for cause in why.causes]
    cause = None if why.step is None else says[0] if why.verdict == "cause" else why.verdict
    return Found(cause, says, {})


def settle_first_step(ledger: Ledger, report: Localisation, name: str) -> None:
    """Is the first wrong step the one that the fault of that name was put into?"""
    wanted = None if name == NONE else FAULTS[name].first
    ledger.settle("first_step", report.first == wanted, first=report.first, wanted=wanted)


def settle_cause(ledger: Ledger, why: Explanation, name: str) -> None:
    """Is the fault called by a kind that is fair? Undecidable where several causes are left, or none."""
    kinds = sorted({cause.kind for cause in why.causes})
    if name == NONE:
        truth = why.step is None
    elif why.verdict == "cause":
        truth = set(kinds) <= FAULTS[name].fair
    else:
        truth = None
    says = [cause.says for cause in why.causes]
    ledger.settle("cause", truth, kinds=kinds, says=says, verdict=why.verdict, tried=why.tried)


def settle_smallest(ledger: Ledger, fuzzed: FuzzReport, name: str) -> None:
    """Is there an input on which the kernel fails, if it has a fault, and none if it has not?"""
    shape = list(fuzzed.failure.inputs["x"].shape) if fuzzed.failure else []
    ledger.settle("smallest", (fuzzed.failure is not None) == (name != NONE), shape=shape, tried=fuzzed.examples)


def settle_correct_kernel(ledger: Ledger, reports: Mapping[int, Localisation], fuzzed: FuzzReport) -> None:
    """Is no step of the correct kernel wrong, at each number of columns, and on no input that was sampled?"""
    wrong = [f"{columns} columns" for columns, report in reports.items() if report.first is not None]
    wrong += [str(fuzzed.failure.words)] if fuzzed.failure else []
    widths = list(map(str, reports))
    ledger.settle("right_kernel", not wrong, wrong=wrong, widths=widths, tried=fuzzed.examples)
