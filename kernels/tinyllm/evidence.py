"""Each claim's verdict and its reason, made of what was measured; tables of both devices; the answer in a sentence.

A function that judges a claim returns what `ledger.settle` takes: truth, measured, because, and given where something
is. The texts of all outcomes are made from the same numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import labkit
from kernels.tinyllm import faulty
from kernels.tinyllm.counts import (
    OBSERVATIONS,
    OPERAND,
    REPORT_LOG,
    ROUTINE,
    UNPRINTED,
    Facts,
    bits,
    ending,
    log,
    tally,
)
from kernels.tinyllm.faulty import WORLDS
from kernels.tinyllm.tinyllm import Config
from labkit.session.device import Device
from labkit.session.record import Record, recorded

Array = np.ndarray
SHARE = 0.9
"""The chance that the report gives its correction."""


def sides(here: Facts, device: Device) -> dict[str, Facts]:
    """The facts of this run, and of the other device's as recorded: CPU first. Empty where there is no such record."""
    other = recorded("d2h_sizing", "cpu" if device.is_cuda else "cuda")
    gpu = device.name if device.is_cuda else other.result["device"]["name"] if other else "a GPU"
    there = from_record(other)
    return {"CPU": there if device.is_cuda else here, gpu.split()[-1]: here if device.is_cuda else there}


def from_record(record: Record | None) -> Facts:
    """The facts of a record; empty for none, and for one that is older than the facts."""
    return (record.result["metrics"].get("facts") or {}) if record else {}


def side_by_side(both: Mapping[str, Facts], name: str, show: Callable[[Facts], Any]) -> labkit.Table:
    """A row a kind of memory, a column a device: `show(facts of that memory)`, with `name` as the title."""
    rows = [
        (world, *(show(side["worlds"][world]) if side else "not recorded yet" for side in both.values()))
        for world in WORLDS
    ]
    return labkit.Table(("memory before it is written", *both), rows, title=name)


def count_table(both: Mapping[str, Facts]) -> labkit.Table:
    """How the sets end, a column a device, a row a count, each kind of memory on its own."""
    rows: list[tuple[Any, ...]] = []
    for world in WORLDS:
        sides_ = [_ends(side["worlds"][world]) if side else {} for side in both.values()]
        for what in next(one for one in sides_ if one):
            rows.append((world, what, *(one.get(what, "not recorded yet") for one in sides_)))
    total = next(side["sets"] for side in both.values() if side)
    return labkit.Table(("memory", f"of {total} sets", *both), rows)


def _ends(one: Facts) -> dict[str, Any]:
    (zero, accused, cured), (shown, most, most_accused, most_cured) = one["zero"], one["most"]
    return {
        "right": one["right"],
        "do not run to their end": sum(n for end, n in one["ends"].items() if end != faulty.ENDS[faulty.FINISHED]),
        "logits all 0 (with the accused line; cured)": f"{zero} ({accused}; {cured})",
        "of these, write within their buffers": one.get("zero within", "not recorded yet"),
        "show the most (with the accused line; cured)": (
            f"{shown} of {len(OBSERVATIONS)} observations: {most} ({most_accused}; {most_cured})"
        ),
    }


def switch_rows() -> list[tuple[str, str, str]]:
    """The switches of the sweep, what each does, and whether the report prints the line."""
    how = dict.fromkeys(UNPRINTED, "not printed") | dict.fromkeys(faulty.PRINTED, "printed, set")
    return [
        (name, what, how.get(name, "printed, not set"))
        for name, what in faulty.SWITCHES.items()
        if name != "constructor_omits_shape"
    ]


def logs(s: faulty.Sweep, here: Facts) -> list[tuple[str, str, str]]:
    """The report's log, that of the printed lines in real memory, and that of a set that shows the most."""
    every = [
        (sum(one["shows"]), name, world) for world in WORLDS for name, one in here["worlds"][world]["smallest"].items()
    ]
    _, name, world = max(every, key=lambda one: one[0])
    here_, there = (
        log(s.outcomes[where][s.at(bits(names)[None])[0]])
        for names, where in ((faulty.PRINTED, "as left"), (tuple(name.split(" + ")), world))
    )
    lines = list(zip(REPORT_LOG, here_, there, strict=True))
    return [*lines, ("", "memory: as left", f"{name}; memory: {world}")]


def further_table(here: Facts) -> labkit.Table:
    """The printed code with one line otherwise: how it ends, and with the correction besides, where that differs."""
    rows = []
    for name in here["worlds"]["zeros"]["further"]:
        cells = [here["worlds"][world]["further"][name] for world in WORLDS]
        line = "not printed" if name in UNPRINTED else "printed otherwise"
        shown = (end if end == fixed else f"{end}; corrected: {fixed}" for end, fixed in cells)
        rows.append((name, line, *shown))
    return labkit.Table(("one line otherwise", "in the report", *WORLDS), rows, wrap=30)


def weighed(here: Facts) -> labkit.Weighing:
    """The smallest sets in each kind of memory, held against each observation of the report.

    Those with all-zero logits, those that show the most of what was seen, with the printed lines kept and without, and
    the printed code itself. A set that shows all that was seen is among them if there is any.
    """
    shows = {
        f"{name} (memory: {world})": dict(zip(OBSERVATIONS, one["shows"], strict=True))
        for world in WORLDS
        for name, one in here["worlds"][world]["smallest"].items()
    }
    hypotheses = {name: (lambda seen, of=of: np.array([float(of[seen])])) for name, of in shows.items()}
    return labkit.weigh(lambda _: np.ones(1), hypotheses, {name: name for name in OBSERVATIONS}, thorough=False)


def left(here: Facts) -> list[tuple[str, str, Facts]]:
    """The sets of :func:`weighed` that show everything: set, kind of memory, what is known of it."""
    return [
        (name, world, one)
        for world in WORLDS
        for name, one in here["worlds"][world]["smallest"].items()
        if all(one["shows"])
    ]


LEFT_COLUMNS = (
    "shows all that was seen", "memory", "keeps every printed line", "cured by the correction",
    "not printed: ff_out.h_data after d2h", "not printed: x.d_data", "not printed: failed calls",
)  # fmt: skip


def left_rows(here: Facts) -> list[tuple[str, ...]]:
    """The sets that are left, whether the correction cures them, and what other prints had shown."""
    yes = {True: "yes", False: "no"}
    return [(name, world, yes[one["keeps"]], yes[one["cured"]], *one["prints"]) for name, world, one in left(here)]


def first_wrong(here: Facts) -> str:
    """The first of ff_out, x and logits that is wrong in the sets that are left; several where the sets differ."""
    found = {one["wrong first"] for _, _, one in left(here)}
    return " or ".join(name for name in ("ff_out", "x", "logits") if name in found) or "none"


# An unknown program, a trained model, and times.


def told(weighing: labkit.Weighing) -> str:
    """What the prints of an unknown program say, in words."""
    if weighing.cause != "undecidable":
        return weighing.cause
    if weighing.left:
        return f"undecidable: {weighing.left[0]}, or another"
    return f"undecidable: {len(weighing.untested)} candidates print otherwise when run again, or the program does"


def named_wrongly(truth: str, weighing: labkit.Weighing) -> bool:
    """Whether another set than the true one was named, or the true one, being in the list, was ruled out."""
    named = weighing.cause in weighing.fits and weighing.cause != truth
    return named or truth in weighing.refuted


def worst(found: labkit.Localisation) -> str:
    """How many steps and gradients of a model are within their bounds, and which comes closest to its own."""
    own = {f.name: f.own.bound_used for f in found.findings.values() if f.own is not None}
    name = max(own, key=lambda one: own[one])
    good = len(found.findings) - len(found.divergent)
    counted = f"{good} of {len(found.findings)} steps and gradients are within their bounds"
    return f"{counted}; the worst, {name}, has an error of {own[name]:.2f} of its bound"


def quality(sample: str, text: bytes, steps: int, nats: float) -> str:
    """Generated text, and what it is: how many of its words occur in the text that was learnt from."""
    known = set(re.findall(rb"[A-Za-z]{3,}", text))
    words = [word.encode() for word in re.findall(r"[A-Za-z]{3,}", sample)]
    share = (
        f"{sum(word in known for word in words)} of its {len(words)} words of three letters or more occur in the text"
    )
    return f"After {steps} steps, at {nats:.2f} nats a byte, the model writes this ({share}):\n    {sample!r}"


def speeds(times: Sequence[Mapping[str, str]]) -> list[tuple[Any, ...]]:
    """Rows of the benchmark's file: what, provider, time, rate, and how many times the first peer's rate that is."""
    taken = {
        (row["kernel_operation_mode"], row["kernel_provider"]): float(row["y_value_50"])
        for row in times
        if row["metric_name"] == "time" and not row["kernel_provider"].startswith("traffic")
    }
    tokens = Config().sequences * Config().context
    rows = []
    for (mode, provider), us in taken.items():
        step = "step" in mode
        rate = f"{tokens / us:.2f} million tokens/s" if step else f"{2**28 / us / 1e3:.1f} GB/s"
        rows.append((mode, provider, us, rate, taken[mode, "torch eager" if step else "torch, pinned"] / us))
    return rows


# The claims, one function each.


def first_quarter_only(host: Array, values: Array) -> dict[str, Any]:
    """`host` is the host vector after the printed d2h, `values` what the tensor held."""
    n, times = values.size, len(host) / values.size
    padded = np.resize(np.append(host, np.full(4 * n, np.nan, np.float32)), 4 * n).reshape(4, n)
    quarters = [int(v) for v in (padded == values.reshape(-1)).sum(1)]
    zeros = int((host[n:] == 0).sum())
    told = (
        f"after d2h the host vector holds {len(host)} floats for {n} values, {times:g} times as many; its quarters "
        f"hold {', '.join(map(str, quarters))} of the values, and of the {max(0, len(host) - n)} other floats {zeros} "
        "are zero"
    )
    return {
        "truth": times == 4 and quarters == [n, 0, 0, 0],
        "measured": {"times as long": times, "values in each quarter": quarters, "zeros behind": zeros},
        "because": {
            "confirmed": f"{told}: the first quarter alone has them",
            "refuted": f"{told}: not the first quarter alone of a vector four times too long",
        },
    }


def resize_zeroes_data(back: Array, values: Array, known: Array) -> dict[str, Any]:
    """`back`: the device after the printed h2d; `known`: the device before it; `values`: what d2h had read."""
    n, arrived = values.size, int((back == values).sum())
    zeros, kept = int((back == 0).sum()), int((back == known).sum())
    told = f"of the {n} values that h2d as printed uploads, {arrived} arrive, {zeros} are zero, {kept} are as before"
    return {
        "truth": 2 * zeros > n,
        "measured": {"arrive": arrived, "of": n, "zero": zeros},
        "because": {"confirmed": f"{told}: most are zero", "refuted": f"{told}: most are not zero"},
    }


def fix_counts(here: Facts) -> dict[tuple[str, str], str]:
    """How many sets the correction makes right, by kind of memory and group of sets, in words.

    Groups are the sets with wrong logits, with zero logits, and those that show the most of what was seen; of all sets,
    and of those that keep the printed lines.
    """
    groups = {"wrong": "wrong", "zero": "logits all 0", "most": "show the most"}
    return {
        (world, f"{keeps}: {words}"): f"{part[group][-1]} of {part[group][-3]}"
        for world, one in here["worlds"].items()
        for keeps, part in (("all sets", one), ("every printed line kept", one["printed"]))
        for group, words in groups.items()
    }


def everything(here: Facts) -> tuple[int, int, int, int]:
    """Sets that show all that was seen, how many the correction cures; the same of those with every printed line.

    Over all kinds of memory: a set that shows it in two of them counts twice.
    """
    found = []
    for part in (here["worlds"].values(), [one["printed"] for one in here["worlds"].values()]):
        whole = [one["most"] for one in part if one["most"][0] == len(OBSERVATIONS)]
        found += [sum(most[1] for most in whole), sum(most[3] for most in whole)]
    return found[0], found[1], found[2], found[3]


def fix_resolves(here: Facts) -> dict[str, Any]:
    """The report gives its correction 90%. How likely each set is nobody knows: only all or none of them decides."""
    shown, cured, kept, kept_cured = everything(here)
    runs = tally(here["printed"]["cut"])
    told = (
        f"as printed, {runs.get('right', 0)} of {sum(runs.values())} runs are right with the accused line in place; "
        f"of the sets of faults {shown} show all that the report saw, and the correction makes {cured} of these right; "
        f"of these sets {kept} keep every printed line, and it makes {kept_cured} of those right"
    )
    decided = shown and cured in (0, shown)
    return {
        "truth": ("confirmed" if cured else "refuted") if decided else "undecidable",
        "measured": {"show everything": shown, "cured": cured, "every line kept": kept, "cured of those": kept_cured},
        "because": {
            "confirmed": f"{told}: all, so that the correction helps whichever set it was",
            "refuted": f"{told}: none, so that the correction does not help whichever set it was",
            "undecidable": f"{told}. A count of sets is no chance: how likely each was is not known, and so 90% is "
            "neither shown nor excluded. One run of the corrected program would have told",
        },
        "given": "the program has one of the sets of faults in the list" if decided else "",
    }


def trace_proves_transfer(here: Facts) -> dict[str, Any]:
    """Sets that print the trace though its upload failed, or though x then holds other values than the layer's."""
    liars = {world: one["liars"] for world, one in here["worlds"].items()}
    counted = {world: [one[k] for k in ("its upload failed", "values lost", "trace")] for world, one in liars.items()}
    trace = sum(one[-1] for one in counted.values())
    told = "; ".join(f"memory {world}: {failed} and {lost} of {n}" for world, (failed, lost, n) in counted.items())
    named = " and ".join(next((one["smallest"] for one in liars.values() if one["smallest"]), []))
    lying = any(failed + lost for failed, lost, _ in counted.values())
    return {
        "truth": "untestable" if not trace else "refuted" if lying else "confirmed",
        "measured": counted,
        "because": {
            "confirmed": f"in none of the sets that print the line its upload failed or values were lost ({told})",
            "refuted": "sets that print the line though its own upload failed, and though values were lost while no "
            f"call failed: {told}; the smallest: {named}",
            "untestable": "no set prints the line",
        },
    }


def x_is_zero(printed: Sequence[float], memory: Sequence[str]) -> dict[str, Any]:
    """The printed numbers against float32; `memory`: what fresh and reused memory was seen to hold."""
    info = np.finfo(np.float32)
    stored = [float(np.float32(v)) for v in printed]
    told = (
        f"{' and '.join(f'{v:.3g}' for v in printed)} are printed; float32 goes down to {info.tiny:.1e}, denormal to "
    )
    told += f"{info.smallest_subnormal:.1e}"
    seen = f". Device memory here: {'; '.join(memory)}" if memory else ""
    return {
        "truth": all(v == 0 for v in stored),
        "measured": stored,
        "because": {
            "confirmed": f"{told}: as float32 they are zero{seen}",
            "refuted": f"{told}: they are small numbers and not zero, and of the other elements nothing is printed. "
            f"That x is garbage or was never written is possible; that it is completely zero is not{seen}",
        },
    }


def garbage_is_zero(logits: Mapping[str, Array]) -> dict[str, Any]:
    """Logits that the head makes of such an x, by case."""
    zero = [case for case, value in logits.items() if (value == 0).all()]
    largest = {case: float(np.abs(value).max()) for case, value in logits.items()}
    told = "largest logit: " + "; ".join(f"{case} {value:.1e}" for case, value in largest.items())
    return {
        "truth": "confirmed" if len(zero) == len(logits) else "undecidable" if zero else "refuted",
        "measured": largest,
        "because": {
            "confirmed": f"all logits are exactly 0 in every case ({told})",
            "undecidable": f"all logits are exactly 0 in some cases alone: {' and '.join(zero)} ({told})",
            "refuted": f"the logits are exactly 0 in no case ({told}). A print with six decimals shows 0.000000 for "
            "such numbers, but the report's shows 0 beside 6.16847e-33",
        },
        "given": "the largest and the smallest are of all tokens' logits; those of a token whose x is 0 are 0",
    }


def loss(reported: Sequence[float], seen: Array, vocabulary: int) -> dict[str, Any]:
    """A cross-entropy is log sum exp(logits) minus one of the logits, so it is never negative."""
    least = float(seen.min())
    told = f"the least of {len(seen)} cross-entropies here is {least:.3g}, and of zero logits it is ln {vocabulary} = "
    told += f"{np.log(vocabulary):.3f}"
    return {
        "truth": reported[0] >= min(0.0, least),
        "measured": least,
        "because": {
            "confirmed": f"{told}; the reported {reported[0]:g} is within what one can be",
            "refuted": f"{told}; minus the logarithm of a probability is never negative, and {reported[0]:g} is",
        },
    }


def unchecked_errors_hide(name: str, unchecked: Any, checked: Any, p: faulty.Program) -> dict[str, Any]:
    """A set in which h2d fails, run with its calls unchecked and checked; `name` says which."""
    end, stop = ending(unchecked, p), faulty.ENDS[checked["status"]]
    hidden = unchecked["status"] == faulty.FINISHED and unchecked["failed_h2d"] > 0 and end != "right"
    told = f"{name}: {unchecked['failed_h2d']} calls of h2d fail; unchecked, it ends: {end}; checked: {stop}"
    return {
        "truth": bool(hidden and checked["status"] == faulty.REPORTED),
        "measured": [int(unchecked["failed_h2d"]), stop],
        "because": {
            "confirmed": f"{told} (error {checked['first_error']})",
            "refuted": f"no set was found that is wrong in silence where h2d fails, and stops once checked ({told})",
        },
    }


def not_the_matmul(told: Facts) -> dict[str, Any]:
    """Whether zeros that stay with the product on the host tell a fault of the product from another."""
    n, engines, faults = told["sets"], told["engines"], told["faults"]
    lost = [name for name, one in engines.items() if one["zero"] + one["stopped"] < n]
    stays = {name: {ends["cublas"], ends["host"]} == {"logits all 0"} for name, ends in faults.items()}
    both = (
        f"of {n} sets with zero logits, {engines['kernel']['zero']} keep them with our kernel and "
        f"{engines['host']['zero']} on the host; {engines['kernel']['stopped']} and {engines['host']['stopped']} stop. "
        f"A cuBLAS that writes nothing: {faults[ROUTINE]['cublas']}; on the host: {faults[ROUTINE]['host']}. "
        f"A head that multiplies the wrong operand: {faults[OPERAND]['cublas']}; on the host: {faults[OPERAND]['host']}"
    )
    truth = "refuted" if stays[ROUTINE] else "undecidable" if stays[OPERAND] or lost else "confirmed"
    unclear = "they do not clear what it is called with" if stays[OPERAND] else "with another product some do not stay"
    return {
        "truth": truth,
        "measured": told,
        "because": {
            "confirmed": f"{both}. Zeros stay where the product is right, and go where it is wrong",
            "undecidable": f"{both}. So zeros that stay clear the routine that multiplies, if that is what is meant; "
            f"{unclear}",
            "refuted": f"{both}. So zeros stay although the fault is in the routine that multiplies",
        },
    }


def small_init(by_case: Mapping[str, tuple[float, int, int]]) -> dict[str, Any]:
    """Least activation, how many are below the least normal float32, and how many are zero, for each kind of model."""
    told = "; ".join(f"{case}: least {v:.1e}, {low} denormal, {zero} zero" for case, (v, low, zero) in by_case.items())
    under = [case for case, (_, low, zero) in by_case.items() if low or zero]
    return {
        "truth": "confirmed" if len(under) == len(by_case) else "undecidable" if under else "refuted",
        "measured": {case: least for case, (least, _, _) in by_case.items()},
        "because": {
            "confirmed": f"every kind of model underflows in a forward pass ({told})",
            "undecidable": f"some kinds of model underflow in a forward pass, the report's may be another ({told})",
            "refuted": f"no kind of model underflows in a float32 forward pass ({told})",
        },
    }


def lifetime(found: Facts) -> dict[str, Any]:
    """Runs of the printed lines that return by value, copied and elided."""
    ends = tally({way: found["cut"][way] for way in faulty.WAYS[:2]})
    told = f"by value, copied and elided, {ends.get('right', 0)} of {sum(ends.values())} runs have right x and logits"
    return {
        "truth": set(ends) != {"right"},
        "measured": ends,
        "because": {
            "confirmed": f"{told}: in the others the caller does not hold what the layer made",
            "refuted": f"{told}: the destructor frees the callee's buffer, and the caller's copy has its own",
        },
        "given": "the copy constructor takes the shape before it allocates, and the assignment, which is not printed, "
        "allocates and copies as it does",
    }


def out_parameter(found: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """The counts of :func:`counts.other_ways`: sets, right as out-parameter, right by shared_ptr; by kind of memory."""
    told = "; ".join(f"memory {world}: {out} and {shared} of {n}" for world, (n, out, shared) in found.items())
    told = f"sets without the accused fault, zero by value, that are right as out-parameter and by shared_ptr: {told}"
    return {
        "truth": any(out + shared for _, out, shared in found.values()),
        "measured": {world: list(counts) for world, counts in found.items()},
        "because": {"confirmed": f"{told}. So one or both help some", "refuted": f"{told}. So neither helps any"},
    }


def learns(
    curve: Sequence[tuple[int, float, float]], logits: Array, guessed: set[int], vocabulary: int
) -> dict[str, Any]:
    """A training curve (step, training, validation loss), the last logits, and the tokens predicted; 0 is <pad>."""
    first, last, even = curve[0][2], curve[-1][2], float(np.log(vocabulary))
    largest = float(np.abs(logits).max())
    told = (
        f"validation goes from {first:.2f} to {last:.2f} nats a byte (ln {vocabulary} = {even:.2f}), logits reach "
        f"{largest:.3g}; tokens other than <pad> that are predicted: {len(guessed - {0})}"
    )
    return {
        "truth": bool(largest > 0 and guessed - {0} and last < min(first, even)),
        "measured": [first, last],
        "because": {"confirmed": f"{told}: it learns", "refuted": f"{told}: it does not learn"},
    }


# The answer.


def answer(records: Mapping[str, Facts]) -> str:
    """The answer to the notebook's question from each device's facts, by its name; empty ones are not recorded yet."""
    there = {name: one for name, one in records.items() if one}
    missing = [f"The {name} has not run this version yet." for name in records if name not in there]
    if not there:
        return " ".join(missing)

    def each(say: Callable[[Facts], str]) -> str:
        """A phrase of each device's facts; once if all say the same."""
        said = {name: say(one) for name, one in there.items()}
        if len(set(said.values())) == 1:
            said = {" and ".join(said): next(iter(said.values()))}
        return "; ".join(f"{words} ({name})" for name, words in said.items())

    causes = {weighed(one).cause for one in there.values()}
    cause = causes.pop() if len(causes) == 1 else "not the same on both devices"
    alone = all(set(tally(one["printed"]["cut"])) == {"right"} for one in there.values())
    parts = [
        f"{cause[0].upper()}{cause[1:]}.",
        f"The accused resize alone changes {'no logit' if alone else 'logits'}: with every line as printed, and the "
        f"copy constructor taken to set its size, logits are right in {each(lambda one: _right(one, 'cut'))}. "
        "Word for word that constructor allocates nothing, and logits are right in "
        f"{each(lambda one: _right(one, 'literal'))}.",
        f"With further faults, {each(_everything)}.",
    ]
    if any(left(one) for one in there.values()):
        parts.append(f"Of the smallest sets that show it all, {each(_smallest)}.")
    if cause == "undecidable":
        parts.append("A count of sets is no chance: one run of the corrected program would have told.")
    return " ".join(parts + missing)


def _right(one: Facts, reading: str) -> str:
    ends = tally(one["printed"][reading])
    return f"{ends.get('right', 0)} of {sum(ends.values())} runs"


def _everything(one: Facts) -> str:
    """How many sets show it all, and what the correction does to them."""
    shown, cured, kept, kept_cured = everything(one)
    where = [world for world in WORLDS if one["worlds"][world]["most"][0] == len(OBSERVATIONS)]
    return (
        f"{shown} of {one['sets']} sets show all that the report saw (fresh memory: {', '.join(where) or 'any'}); the "
        f"correction makes {cured} of them right, and {kept_cured} of the {kept} that keep every printed line"
    )


def _smallest(one: Facts) -> str:
    """What the smallest of the sets that are left have in common, in numbers; the rest of them hold a smaller one."""
    found = {frozenset(name.split(" + ")): fact for name, _, fact in left(one)}
    small = {names: fact for names, fact in found.items() if not any(other < names for other in found)}
    shared = sum("shallow_assignment" in names for names in small)
    cured = sum(fact["cured"] for fact in small.values())
    both = sum(fact["cured"] for names, fact in small.items() if "shallow_assignment" in names)
    return (
        f"{shared} of {len(small)} have an assignment that shares the device buffer, and the correction makes {cured} "
        f"right, {both or 'none'} of them with such an assignment"
    )


def recorded_answers() -> dict[str, str]:
    """The notebook's answer from the records of both devices, as README and notebook have it."""
    gpu = recorded("d2h_sizing", "cuda")
    name = gpu.result["device"]["name"].split()[-1] if gpu else "GPU"
    return {"d2h_sizing": answer({"CPU": from_record(recorded("d2h_sizing", "cpu")), name: from_record(gpu)})}
