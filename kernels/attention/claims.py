"""What is measured for each claim of notebook attention_matmul, and its truth. The words are in data/claims.

Errors are multiples of the tolerance, unless a name says otherwise; `level` is the rate at which the test of a reported
range rules out the true call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kernels.attention.experiments import Counted, Exchange, Final
from kernels.attention.problem import REPORT
from kernels.attention.survey import Likelihood
from labkit import Ledger

HEADS = REPORT.heads
MOST_IN_MEMORY = 2e-5
"""In memory, "about 1e-5" means at most this."""
Truth = bool | str | None


def settle_ranges(
    ledger: Ledger, rebuilt: Mapping[str, Counted], allowed: Sequence[float], ratio: float, level: float
) -> None:
    """The printed ranges: `rebuilt` calls by name, the least and largest ratio `allowed`, and the re-run `ratio`."""
    call = max(rebuilt, key=lambda name: rebuilt[name].share)
    best = rebuilt[call]
    ledger.settle(
        "unscaled_range",
        "untestable" if best.chance >= level else False,
        call=call,
        share=best.share,
        hits=best.hits,
        draws=best.draws,
        ends=best.typical,
        chance=best.chance,
        level=level,
    )
    root = REPORT.d_k**0.5
    agrees = allowed[0] <= root <= allowed[1] and abs(ratio / root - 1.0) < 1e-3
    ledger.settle("scaled_range", agrees, allowed=allowed, ratio=ratio, root=root)


def settle_scaling(
    ledger: Ledger, errors: Mapping[str, float], shown: Mapping[str, float], passes: Mapping[str, bool], level: float
) -> None:
    """The scaling step: its `errors` by product; of wrong scalings the share of heads that would have `shown` the
    printed figures, and whether each `passes` the report's last check with the correct product.
    """
    worst, accepted = max(errors.values()), [name for name, ok in passes.items() if ok]
    truth: Truth = False if worst > 1.0 else None if accepted else True
    ledger.settle("scaling_is_right", truth, error=worst, scalings=len(passes), accepted=accepted)
    hidden = [name for name, share in shown.items() if share**HEADS >= level]
    excluded = [name for name in shown if name not in hidden]
    ledger.settle("ratio_confirms_scaling", not hidden, hidden=hidden, excluded=excluded, level=level)


def settle_symptom(ledger: Ledger, fits: Sequence[Likelihood], by_statistic: Mapping[str, int], level: float) -> None:
    """What the range says of the cause: the outcomes that fit, and how many do `by_statistic`."""
    truth: Truth = None if not fits else len(fits) == 1
    calls = sum(len(item.outcome.calls) for item in fits)
    name = fits[0].name if fits else ""
    measured = {"fits": len(fits), "calls": calls, "call": name, "by_statistic": list(by_statistic.values())}
    ledger.settle("symptom_names_parameter", truth, **measured, level=level)
    blocked = sum(any(call.block for call in item.outcome.calls) for item in fits)
    single = sum(any(not call.block for call in item.outcome.calls) for item in fits)
    ledger.settle("blocking_wrong", either(blocked, single), blocked=blocked, single=single, level=level)


def either(first: int, second: int) -> bool | None:
    """True where only the first kind fits, False where only the second does, None where both or neither."""
    return None if bool(first) == bool(second) else bool(first)


def settle_diagnosis(
    ledger: Ledger,
    exchange: Exchange,
    behind: Mapping[str, Counted],
    forms: Mapping[str, Likelihood],
    chances: Mapping[str, float],
    rival: Likelihood,
    others: Mapping[str, int],
    level: float,
) -> None:
    """The report's diagnosis, part by part and as a whole.

    `behind`: the call with Q's leading dimension alone, by what lies behind Q in memory. `forms` of the whole
    diagnosis, with their `chances` as counted; `rival` is the likeliest of the other outcomes. `others` counts the
    outcomes that fit besides "q_leading_dimension" and besides "diagnosis".
    """
    ledger.settle(
        "dims_reversed",
        either(exchange.fit_exchanged, exchange.fit_straight),
        exchanged=exchange.fit_exchanged,
        straight=exchange.fit_straight,
        pairs=exchange.pairs,
        changed_at_equal=exchange.changed_at_equal,
        changed_at_unequal=exchange.changed_at_unequal,
        ragged=exchange.ragged,
        ragged_fit=exchange.ragged_fit,
        level=level,
    )
    fit = [name for name, counted in behind.items() if counted.chance >= level]
    shares = {name: counted.share for name, counted in behind.items()}
    excluded = [name for name in behind if name not in fit]
    alone = others["q_leading_dimension"]
    truth: Truth = False if not fit else None if alone else True
    ledger.settle("q_leading_dimension", truth, fit=fit, excluded=excluded, others=alone, shares=shares, level=level)
    form = max(chances, key=lambda name: chances[name])
    truth = False if chances[form] < level else None if others["diagnosis"] else True
    ledger.settle(
        "diagnosis_as_a_whole",
        truth,
        form=form,
        chance=chances[form],
        ends=forms[form].ends,
        rival=rival.name,
        rival_ends=rival.ends,
        others=others["diagnosis"],
        level=level,
    )


def settle_repair(
    ledger: Ledger, errors: Mapping[str, float], blocks: Mapping[str, float], in_order: Mapping[str, bool]
) -> None:
    """The repaired call: largest `errors` of any step and of right `blocks`, by size; whether scores are `in_order`."""
    worst, wrong = max(errors.values()), [size for size, error in errors.items() if error > 1.0]
    ledger.settle("blocking_unnecessary", not wrong, error=worst, sizes=len(errors), wrong=wrong)
    beyond = [size for size, error in blocks.items() if error > 1.0]
    ledger.settle("blocking_by_itself", bool(beyond), error=max(blocks.values()), sizes=len(blocks), beyond=beyond)
    wrong = [size for size, ok in in_order.items() if not ok] + wrong
    ledger.settle("fixed_call_row_major", not wrong, error=worst, sizes=len(errors), wrong=wrong)


def settle_checks(ledger: Ledger, final: Final, shifts: Mapping[float, bool], early: Mapping[str, str]) -> None:
    """The report's own check after the repair, and the `shifts` of all scores that it accepts.

    `early`: how its first comparison of Q ends, by the shape of the test's Q: the right one first, then the wrong one.
    """
    right, wrong, column = early.values()
    truth = wrong.startswith("ValueError") and right == "agrees"
    ledger.settle("shape_error", truth, shapes=list(early), right=right, wrong=wrong, column=column)
    largest, failed = max(final.in_files.values()), [step for step, ok in final.passes.items() if not ok]
    nearest = largest < 10**-4.5
    ok = largest < 1e-4 and not failed
    ledger.settle("final_through_files", ok, difference=largest, failed=failed, nearest=nearest)
    parts = {"in_memory": final.in_memory["qk"], "text": final.text, "error": final.of_bound}
    ledger.settle("final_is_float_rounding", final.of_bound <= 1.0, **parts)
    most = max((shift for shift, ok in shifts.items() if ok), default=0.0)
    ledger.settle("check_is_absolute", most <= 1e-5, shift=most)


def settle_on_gpu(ledger: Ledger, equal: Mapping[str, bool], final: Final, batch: float) -> None:
    """cuBLAS: whether K^T is `equal` bit for bit, by size; the `final` check; the difference of a strided `batch`."""
    differs = [size for size, ok in equal.items() if not ok]
    ledger.settle("geam_transpose", not differs, sizes=len(equal), differs=differs)
    largest = max(final.in_memory.values())
    measured = {"difference": largest, "batch": batch, "allowed": MOST_IN_MEMORY}
    ledger.settle("final_in_memory", largest <= MOST_IN_MEMORY, **measured)


def settle_at_scale(
    ledger: Ledger, loop: Sequence[float], batched: Sequence[float], errors: Mapping[str, float]
) -> None:
    """Microseconds, quantiles 0.5, 0.2 and 0.8, of the loop and of the pointer-array batch; `errors` by size."""
    truth: Truth = True if batched[2] < loop[1] else False if batched[1] > loop[2] else None
    ledger.settle("batched_is_faster", truth, loop=loop, batched=batched, ratio=loop[0] / batched[0])
    wrong = [size for size, error in errors.items() if error > 1.0]
    measured = {"error": max(errors.values()), "sizes": list(errors), "wrong": wrong}
    ledger.settle("holds_at_scale", not wrong, **measured)
