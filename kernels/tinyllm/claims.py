"""What is measured for each claim of notebook d2h_sizing, and its truth. The words are in data/claims."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from kernels.tinyllm import faulty
from kernels.tinyllm.fault_sets import ending, in_words
from kernels.tinyllm.faulty import Program
from labkit import Ledger

Array = np.ndarray


def some(which: Collection[Any], of: Collection[Any]) -> bool | None:
    """True where all cases show it, False where none does, None where some do: the words do not say which is meant."""
    return None if 0 < len(which) < len(of) else bool(which)


def settle_round_trip(ledger: Ledger, host: Array, back: Array, values: Array) -> None:
    """The suspected line alone: `values` on the device, `host` the host vector after d2h(), `back` what h2d() brought.

    `values` and `back` are float32 [rows, columns], `host` [numbers].
    """
    n = values.size
    padded = np.resize(np.append(host, np.full(4 * n, np.nan, np.float32)), 4 * n).reshape(4, n)
    quarters = [int((quarter == values.reshape(-1)).sum()) for quarter in padded]
    zeros, others = int((host[n:] == 0).sum()), max(0, len(host) - n)
    four_times = len(host) == 4 * n and quarters == [n, 0, 0, 0]
    ledger.settle(
        "first_quarter_only", four_times, numbers=len(host), values=n, quarters=quarters, zeros=zeros, others=others
    )
    arrived, zero = int((back == values).sum()), int((back == 0).sum())
    ledger.settle("resize_zeroes_data", 2 * zero > n, values=n, arrived=arrived, zero=zero)


def settle_fix(ledger: Ledger, fits: Mapping[str, Mapping[str, Any]], printed: Mapping[str, int], sets: int) -> None:
    """The correction. `fits` of :func:`fits_by_print`, `printed`: the printed lines' runs by ending; of `sets` in all.

    How likely each set is nobody knows, so that only all or none of them decides.
    """
    counts = fits["any of these"]
    decided = counts["sets"] > 0 and counts["cured"] in (0, counts["sets"])
    by_print = {name: [count["sets"], count["cured"]] for name, count in fits.items() if name != "any of these"}
    ledger.settle(
        "fix_resolves_90",
        counts["cured"] > 0 if decided else None,
        right=printed.get("right", 0),
        runs=sum(printed.values()),
        of=sets,
        fitting=counts["sets"],
        memory=[memory for memory, count in counts["memory"].items() if count],
        **{name: counts[name] for name in ("cured", "kept", "kept_cured")},
        by_print=by_print,
    )


def settle_preference(ledger: Ledger, fitting: int, without: int) -> None:
    """Whether a set fits that copies as correction 1 had it: `without` of the `fitting` sets lack prefer_host."""
    ledger.settle("correction_1_kept", without > 0, fitting=fitting, without=without)


def settle_trace(ledger: Ledger, traces: Mapping[str, Any]) -> None:
    """Whether the printed trace proves the transfer: `traces` of :func:`kernels.tinyllm.fault_sets.false_traces`."""
    false = sum(traces["failed"]) + sum(traces["lost"]) > 0
    ledger.settle("trace_proves_transfer", not false if sum(traces["printing"]) else "untestable", **traces)


def settle_loss(ledger: Ledger, losses: Array, reported: Sequence[float], vocabulary: int) -> None:
    """The `reported` losses, from the least, against the cross-entropies of all runs, [runs].

    A cross-entropy is log sum exp(logits) minus one of the logits, so it is never negative.
    """
    least, even = float(losses.min()), float(np.log(vocabulary))
    truth = reported[0] >= min(0.0, least)
    ledger.settle("loss_is_cross_entropy", truth, least=least, runs=len(losses), reported=reported[0], even=even)


def settle_x(ledger: Ledger, printed: Sequence[float], logits: Mapping[str, Array]) -> None:
    """The numbers `printed` of x, and the `logits` that the head makes of such an x, by case."""
    stored = [float(np.float32(v)) for v in printed]
    least = float(np.finfo(np.float32).smallest_subnormal)
    ledger.settle("x_is_zero", all(v == 0 for v in stored), stored=stored, least=least)
    zero = [case for case, value in logits.items() if (value == 0).all()]
    largest = {case: float(np.abs(value).max()) for case, value in logits.items()}
    ledger.settle("garbage_is_zero", some(zero, logits), zero=zero, largest=largest)


MANY = 0.01
"""The share of gradients that are exactly zero from which on they count as underflowing."""


def settle_underflow(
    ledger: Ledger, activations: Mapping[str, tuple[float, int, int]], gradients: Mapping[str, float]
) -> None:
    """Small weights, by kind of model: the least activation, how many are denormal, how many zero; zero gradients."""
    passes = [case for case, (_, denormal, zeros) in activations.items() if denormal or zeros]
    under = [case for case in activations if case in passes or gradients[case] > MANY]
    least = {case: smallest for case, (smallest, _, _) in activations.items()}
    normal = float(np.finfo(np.float32).tiny)
    most = max(gradients.values())
    measured = {"under": under, "passes": passes, "least": least, "normal": normal, "most": most}
    ledger.settle("small_init_underflows", some(under, activations), **measured, zero_gradients=dict(gradients))


def settle_returns(ledger: Ledger, lifetimes: Mapping[str, Any], ways: Mapping[str, Sequence[int]]) -> None:
    """Returning: `lifetimes` of the class before its corrections, `ways` by kind of memory: sets, right, right."""
    runs = max(n for by in lifetimes.values() for _, n in by.values())
    right = {reading: [n for n, _ in by.values()] for reading, by in lifetimes.items()}  # copied, copy left out
    kept = [reading for reading, counts in right.items() if min(counts) == runs]
    at_return = [reading for reading, (copied, elided) in right.items() if copied < elided == runs]
    lost = [reading for reading in right if reading not in kept + at_return]
    truth = some(at_return + lost, right)
    ledger.settle("lifetime_frees_data", truth, right=right, runs=runs, kept=kept, at_return=at_return, lost=lost)
    sets, out, shared = (list(counts) for counts in zip(*ways.values(), strict=True))
    ledger.settle("out_parameter_avoids_it", sum(out + shared) > 0, sets=sets, out=out, shared=shared)


def settle_products(ledger: Ledger, counts: Mapping[str, Any]) -> None:
    """Whether zeros that stay with the product on the host distinguish a fault of the product: :func:`products`."""
    stay = {name: {counts[name]["cublas"], counts[name]["host"]} == {"logits all 0"} for name in ("routine", "operand")}
    lost = any(counts["zero"][name] + counts["stopped"][name] < counts["sets"] for name in counts["zero"])
    truth = False if stay["routine"] else None if stay["operand"] or lost else True
    ledger.settle("not_the_matmul", truth, **counts, stays=stay["operand"])


def settle_errors(ledger: Ledger, names: Collection[str], outcomes: Array, p: Program) -> None:
    """One set of faults in which h2d() fails, its `outcomes` [2] with calls unchecked and checked."""
    unchecked, checked = outcomes
    hidden = unchecked["status"] == faulty.FINISHED and unchecked["failed_h2d"] > 0 and ending(unchecked, p) != "right"
    ledger.settle(
        "unchecked_errors_hide",
        bool(hidden and checked["status"] == faulty.REPORTED),
        faults=in_words(set(names) - {"unchecked"}),
        failed=int(unchecked["failed_h2d"]),
        unchecked=ending(unchecked, p),
        checked=faulty.ENDS[checked["status"]],
        error=int(checked["first_error"]),
    )


def settle_training(
    ledger: Ledger,
    curve: Sequence[tuple[int, float, float]],
    logits: Array,
    predicted: set[int],
    vocabulary: int,
    frequencies: float,
) -> None:
    """A training curve (step, training loss, validation loss), the last logits, the tokens predicted; 0 is <pad>.

    `frequencies`: the validation loss of a model that knows how often each byte stands, and nothing else.
    """
    first, last, even = curve[0][2], curve[-1][2], float(np.log(vocabulary))
    largest, others = float(np.abs(logits).max()), len(predicted - {0})
    learns = largest > 0 and others > 0 and last < min(first, even)
    measured = {"first": first, "last": last, "even": even, "frequencies": frequencies}
    ledger.settle("fixed_model_learns", learns, **measured, largest=largest, others=others)
