"""From what was measured to a verdict and its reason: one function a claim, with a reason for each outcome.

Each returns what `labkit.Ledger.settle` takes. The experiments themselves are in `experiments.py`; nothing here runs
a kernel, so that a test can hand in outcomes that no run gave and read what would be said of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kernels.attention.experiments import Counted, Final, Turned
from kernels.attention.problem import REPORT
from labkit.session.record import recorded

Verdict = dict[str, Any]
HEADS = REPORT.heads


def _verdict(
    truth: bool | str, measured: Any, confirmed: str, refuted: str, undecidable: str = "", given: str = ""
) -> Verdict:
    because = {"confirmed": confirmed, "refuted": refuted}
    return {
        "truth": truth,
        "measured": measured,
        "because": because | ({"undecidable": undecidable} if undecidable else {}),
        "given": given,
    }


def _names(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def follows(fitting: int) -> str:
    """What the number of fitting outcomes at a level says of the cause."""
    if not fitting:
        return "none of these calls: another call, fewer heads read, or an accident rarer than the level"
    return "one outcome" if fitting == 1 else f"undecidable: {fitting} different outcomes fit"


NOT_ON_RECORD = "the faulty call is not on record: calls written from the report's description stand in for it"


def unscaled_range(counted: Mapping[str, Counted], level: float) -> Verdict:
    """`counted`: the calls of the kind that the report describes, by name."""
    name = max(counted, key=lambda one: counted[one].share)
    best = counted[name]
    heads = (
        f"{name}: {best.share:.0%} of single heads fall into the range, and all {HEADS} of a draw in {best.hits} of "
        f"{best.draws} draws; the smallest and the largest of {HEADS} are typically {best.typical[0]:.1f} and "
        f"{best.typical[1]:.1f}"
    )
    truth = "refuted" if best.share < 0.5 else "confirmed" if best.chance >= level else "undecidable"
    rare = (
        f"In {best.chance:.1%} of draws the range of {HEADS} heads holds as few of the call's heads as the reported one"
    )
    return _verdict(
        truth,
        list(best.typical),
        f"{heads}. {rare}, not below the level {level:g}",
        f"{heads}. Under no call of the kind described does the typical head fall into the range",
        f"{heads}. Single heads agree with the report. {rare}, more seldom than the level {level:g}",
        given=NOT_ON_RECORD,
    )


def scaled_range(ratios: tuple[float, float], again: float) -> Verdict:
    """`ratios`: the least and the largest that the printed ranges allow; `again`: with a rebuilt wrong product."""
    root = REPORT.d_k**0.5
    allowed = f"the printed figures allow ratios from {ratios[0]:.2f} to {ratios[1]:.2f}; re-run it is {again:.3f}"
    return _verdict(
        ratios[0] <= root <= ratios[1] and abs(again / root - 1.0) < 1e-3,
        list(ratios),
        f"{allowed}, and sqrt(d_k) = {root:g} agrees with both",
        f"{allowed}, and sqrt(d_k) = {root:g} does not agree with both",
    )


def scaling_is_right(errors: Mapping[str, float], passes: Mapping[str, bool]) -> Verdict:
    """`errors`: by product, the share of its own bound; `passes`: wrong scalings that the final check would take."""
    worst = max(errors.values())
    taken = [name for name, ok in passes.items() if ok]
    alone = f"on right and wrong products the rebuilt step uses {worst:.0%} of what its two roundings allow"
    return _verdict(
        "refuted" if worst > 1.0 else "undecidable" if taken else "confirmed",
        worst,
        f"{alone}; and with the right product each of {len(passes)} wrong scalings fails the report's own check, which "
        "was passed after the repair",
        f"{alone}: it adds an error of its own",
        f"{alone}, but with the right product the report's check takes these wrong scalings too: {_names(taken)}",
        given="the report's scaling kernel is not printed: ours stands in for it; that the repair left it alone, and "
        "that the final check was passed, is taken as told",
    )


def ratio_confirms_scaling(shown: Mapping[str, float], level: float) -> Verdict:
    """`shown`: for each wrong scaling, the share of heads in the one range that fall into the other one as well."""
    hidden = [name for name, share in shown.items() if share**HEADS >= level]
    seen = [name for name in shown if name not in hidden]
    return _verdict(
        not hidden,
        len(hidden),
        f"each wrong scaling that was tried would have shown other figures: {_names(seen)}",
        f"these wrong scalings can give figures inside both printed ranges, so the ratio does not rule them out: "
        f"{_names(hidden)}. At the level {level:g} it rules out: {_names(seen)}",
    )


def symptom_names_parameter(outcomes: int, calls: int, level: float) -> Verdict:
    """`outcomes` of the survey that fit, and the `calls` that give them."""
    return _verdict(
        "confirmed" if outcomes == 1 else "refuted" if outcomes else "undecidable",
        outcomes,
        f"one listed outcome fits at the level {level:g}",
        f"{outcomes} outcomes of {calls} calls, different in what they compute, fit at the level {level:g}",
        f"no listed call fits at the level {level:g}, so the size points at none of them",
    )


def dims_reversed(found: Turned, level: float) -> Verdict:
    """Whether the exchange of dimensions made the difference."""
    either = bool(found.fit_turned), bool(found.fit_straight)
    truth = "undecidable" if either[0] == either[1] else "confirmed" if either[0] else "refuted"
    pairs = (
        f"to exchange m and n changes {found.changed_at_equal} of the {found.pairs} calls that run at "
        f"N = M = {REPORT.n}, and what {found.changed_at_unequal} of them give at 37 x 53 x 29; in blocks of 48, "
        f"which do not divide {REPORT.n}, {found.ragged_fit} of {found.ragged} outcomes of the exchange fit, alone or "
        "with one other change"
    )
    return _verdict(
        truth,
        [found.fit_turned, found.fit_straight],
        f"only calls with exchanged dimensions fit the reported range at the level {level:g}; {pairs}",
        f"calls fit the reported range at the level {level:g}, and none of them with exchanged dimensions; {pairs}",
        f"of the outcomes that fit at the level {level:g}, {found.fit_turned} hold a call with the exchange and "
        f"{found.fit_straight} one without it (one can hold both): the figures cannot tell which it was; {pairs}"
        if any(either)
        else f"no listed call fits at the level {level:g}, with the exchange or without it; {pairs}",
    )


def q_leading_dimension(chances: Mapping[str, float], others: int, level: float) -> Verdict:
    """`chances`: by what lies behind Q, `Counted.chance`; `others`: other outcomes that fit."""
    fit = [name for name, chance in chances.items() if chance >= level]
    rest = [name for name in chances if name not in fit]
    return _verdict(
        "refuted" if not fit else "undecidable" if others else "confirmed",
        max(chances.values()),
        f"the call reads past the end of Q; with {_names(fit)} behind Q the range fits, and it fits no other outcome",
        f"the call reads past the end of Q; the range rules it out at the level {level:g} with each of these behind "
        f"it: {_names(rest)}",
        f"the call reads past the end of Q. The range fits with this behind Q: {_names(fit)}; it does not fit with "
        f"these: {_names(rest)}. {others} other outcomes fit as well: the figures do not name this one",
        given="what lay behind Q in memory; its place before K is that of operands allocated in the order Q, K",
    )


def diagnosis_as_a_whole(
    chances: Mapping[str, float], ends: Mapping[str, float], best: tuple[str, float], others: int, level: float
) -> Verdict:
    """The report's diagnosis by form: `Counted.chance`, and the probability of the two ends as printed.

    `best` is the other outcome that the survey found likeliest, and its probability of the two ends; `others` how many
    other outcomes fit.
    """
    form = max(chances, key=lambda name: chances[name])
    own = (
        f"{form}: in {chances[form]:.1%} of draws the range of {HEADS} heads holds as few of the call's heads as the "
        "reported one"
    )
    rival = (
        f"the probability that {HEADS} heads print both ends of the reported range is {ends[form]:.1g} under it, and "
        f"{best[1]:.1g} under the one of the others that the survey found likeliest ({best[0]})"
    )
    fits = chances[form] >= level
    return _verdict(
        "refuted" if not fits else "undecidable" if others else "confirmed",
        chances[form],
        f"{own}, not below the level {level:g}, and every other listed outcome is ruled out",
        f"{own} at best, below the level {level:g}",
        f"{own}, not below the level {level:g}, and {others} other outcomes fit too; {rival}: it is one cause of many",
        given=NOT_ON_RECORD,
    )


def blocking_wrong(blocked: int, single: int, level: float) -> Verdict:
    """`blocked` and `single`: fitting outcomes that a call in wrong blocks gives, and that one without blocks gives."""
    return _verdict(
        "undecidable" if bool(blocked) == bool(single) else "confirmed" if blocked else "refuted",
        [blocked, single],
        f"{blocked} outcomes fit at the level {level:g}: wrong blocks give all of them, calls without blocks none",
        f"{single} outcomes fit at the level {level:g}: calls without blocks give all of them, wrong blocks none",
        f"of the outcomes that fit at the level {level:g}, wrong blocks give {blocked} and calls without blocks "
        f"{single} (both can give one): the figures cannot tell whether the blocks were at fault"
        if blocked
        else f"neither wrong blocks nor wrong calls without blocks fit at the level {level:g}",
    )


def blocking_unnecessary(shares: Mapping[str, float]) -> Verdict:
    """`shares`: by size, the largest share of any step's bound without blocks."""
    worst = max(shares, key=lambda size: shares[size])
    return _verdict(
        shares[worst] <= 1.0,
        shares[worst],
        f"one call a head, without blocks, stays within the bounds of every step at {len(shares)} sizes",
        f"without blocks a step goes beyond its bound at {worst}",
    )


def blocking_by_itself(shares: Mapping[str, float]) -> Verdict:
    """`shares`: by size and block, the share of the product's bound that right blocks use."""
    worst = max(shares, key=lambda size: shares[size])
    return _verdict(
        shares[worst] > 1.0,
        shares[worst],
        f"right blocks go beyond the product's bound at {worst}",
        f"right blocks use at most {shares[worst]:.0%} of the product's bound, at {len(shares)} sizes of scores and "
        "blocks, ragged edges included",
    )


def fixed_call_row_major(order: Mapping[str, bool], shares: Mapping[str, float]) -> Verdict:
    """`order`: by size, whether every index-coded score is in its place; `shares` of the bounds on random inputs."""
    wrong = [size for size, ok in order.items() if not ok] + [size for size, share in shares.items() if share > 1.0]
    return _verdict(
        not wrong,
        max(shares.values()),
        "with index-coded inputs every score is the element of K that it should be, at N = M, N < M and N > M; on "
        f"uniform inputs every step is within its bound at {len(shares)} sizes",
        f"wrong at {_names(wrong)}",
    )


def geam_transpose(moved: Mapping[str, bool]) -> Verdict:
    """`moved`: by size, whether K^T is K bit by bit."""
    wrong = [size for size, ok in moved.items() if not ok]
    return _verdict(
        not wrong, len(moved), f"bit for bit at {len(moved)} sizes: {'; '.join(moved)}", f"differs at {_names(wrong)}"
    )


def final_through_files(found: Final) -> Verdict:
    """Of the order of 1e-5: a single-digit multiple of it, or less; and the report's check takes every step."""
    largest = max(found.in_files.values())
    failed = [step for step, ok in found.passes.items() if not ok]
    figures = ", ".join(f"{step} {value:.2g}" for step, value in found.in_files.items())
    nearest = "hold" if largest < 10**-4.5 else "not hold"
    reading = f"Of the order of 1e-5 means below ten times it here; as the nearest power of ten it would {nearest}"
    return _verdict(
        largest < 1e-4 and not failed,
        largest,
        f"read from text the largest differences are {figures}, and the script's check takes every step. {reading}",
        f"read from text the largest differences are {figures}; the script's check fails for {_names(failed)}. "
        f"{reading}",
    )


def final_is_float_rounding(found: Final) -> Verdict:
    """In keeping with float32: within what two float32 sums of d_k products may differ by."""
    parts = (
        f"the largest difference through files uses {found.of_bound:.0%} of what two float32 sums may be apart; "
        f"in memory it is {found.in_memory['qk']:.1g}, and six digits of text alone make {found.text:.1g}"
    )
    return _verdict(
        found.of_bound <= 1.0,
        found.of_bound,
        f"{parts}: its size is in keeping with float32, whichever part of it the text made",
        f"{parts}: it is more than float32 accounts for",
    )


def final_in_memory(apart: Mapping[str, float], other: float) -> Verdict:
    """`apart`: by step, the largest difference of the loop over heads from NumPy; `other`: that of a batch."""
    largest = max(apart.values())
    words = f"largest difference of any step from NumPy in float32, the loop over heads: {largest:.2g}"
    return _verdict(
        largest <= 2e-5,
        largest,
        f"{words}; by one strided batch, which cuBLAS computes in another order, it is {other:.2g}",
        f"{words}, above 2e-5",
    )


def check_is_absolute(taken: Mapping[float, bool]) -> Verdict:
    """`taken`: by how much all scores are shifted, whether the check still passes."""
    most = max((shift for shift, ok in taken.items() if ok), default=0.0)
    return _verdict(
        most <= 1e-5,
        most,
        f"the largest shift of all scores that passes is {most:g}",
        f"a shift of all scores by {most:g} passes: the check's own rtol adds 1e-5 of the value to atol",
    )


def batched_is_faster(loop: Sequence[float], batched: Sequence[float]) -> Verdict:
    """Microseconds, quantiles 0.5, 0.2 and 0.8, of the loop over heads and of the pointer-array batch."""
    figures = (
        f"loop {loop[0]:.0f} us ({loop[1]:.0f} to {loop[2]:.0f}), pointer-array batch {batched[0]:.1f} us "
        f"({batched[1]:.1f} to {batched[2]:.1f}), as called from Python, the middle 60% in brackets"
    )
    truth = "confirmed" if batched[2] < loop[1] else "refuted" if batched[1] > loop[2] else "undecidable"
    return _verdict(
        truth,
        loop[0] / batched[0],
        f"{figures}: the batch is faster",
        f"{figures}: the batch is slower",
        f"{figures}: the times overlap",
    )


def holds_at_scale(shares: Mapping[str, float]) -> Verdict:
    """`shares`: by size, the largest share of any step's bound."""
    worst = max(shares, key=lambda size: shares[size])
    return _verdict(
        shares[worst] <= 1.0,
        shares[worst],
        f"every step is within its bound at {'; '.join(shares)}",
        f"a step goes beyond its bound at {worst}",
    )


def answer(metrics: Mapping[str, Any]) -> str:
    """The notebook's answer, from the metrics of its result."""
    level, fitting = metrics["level"], metrics["outcomes_that_fit"]
    rate = f"a test that would rule out the true call in {100.0 * level:g}% of cases"
    as_much = metrics["unrelated_chance"] >= level
    unrelated = "two products of unrelated inputs differ by as much, and " if as_much else ""
    if not fitting:
        chance = f"{metrics['best_chance']:.1g}"
        return f"None of the listed calls: each fails {rate} (the likeliest at {chance})."
    if fitting == 1:
        return f"One listed call passes {rate}: {metrics['likeliest']}."
    diagnosis = "the report's diagnosis among them" if metrics["diagnosis_fits"] else "but not the report's diagnosis"
    return (
        f"Undecidable: {unrelated}{fitting} different wrong products, {diagnosis}, pass {rate}. "
        "A few runs at unequal sizes would have told what the call computed."
    )


def recorded_answers() -> dict[str, str]:
    """The notebook's answer from its record, as README and notebook have it; none without a record."""
    kept = recorded("attention_matmul", "cpu")
    return {"attention_matmul": answer(kept.result["metrics"])} if kept else {}
