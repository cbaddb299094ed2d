"""Which sets of faults show what the report saw, which of them its correction cures, and counts of all sets.

A set *shows* the report's observations with one of :data:`faulty.DEBUG_PRINTS` in one kind of memory. It is *cured* if
x and the logits are right there once the correction is made.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

import whywrong
from kernels.tinyllm import faulty
from kernels.tinyllm.faulty import DEBUG_PRINTS, MEMORY, NAMES, OBSERVATIONS, PRINTED, Sweep, in_words

Array = np.ndarray
UNPRINTED = ("assignment_by_host_size", "assignment_omits_shape", "shallow_assignment", "no_other_d2h", "zero_host")
"""Switches in lines that the report does not print. The others are printed, set or not set."""
SUSPECTED_LINE = NAMES.index("resize_by_size")


def bits(names: Collection[str]) -> Array:
    """One set as a row of switches, int32 [14]."""
    return np.array([name in names for name in NAMES], np.int32)


def ending(o: Any, p: faulty.Program) -> str:
    """How one outcome ends: `right`, `logits all 0`, `wrong`, or what stopped it."""
    outcome = np.atleast_1d(o)
    if faulty.right(outcome, p)[0]:
        return "right"
    if outcome["status"][0] != faulty.FINISHED:
        return faulty.ENDS[outcome["status"][0]]
    return "logits all 0" if faulty.observations(outcome, p)["logits all 0"][0] else "wrong"


def has_suspected_line(sweep: Sweep) -> Array:
    """The sets, bool [sets], whose d2h() gives the host vector a wrong length."""
    return faulty.corrected(sweep.bits)[:, SUSPECTED_LINE] != sweep.bits[:, SUSPECTED_LINE]


def keep_printed_lines(sweep: Sweep) -> Array:
    """The sets, bool [sets], that keep every line that the report prints."""
    printed = [i for i, name in enumerate(NAMES) if name not in UNPRINTED]
    return (sweep.bits[:, printed] == bits(PRINTED)[printed]).all(1)


def cured(sweep: Sweep, memory: str) -> Array:
    """The sets, bool [sets], that are right in this memory once the report's correction is made."""
    return faulty.right(sweep.outcomes[memory], sweep.p)[sweep.at(faulty.corrected(sweep.bits))]


def show_everything(sweep: Sweep, debug_print: str, memory: str) -> Array:
    """The sets, bool [sets], that show all five of the report's observations."""
    return np.logical_and.reduce(list(faulty.observations(sweep.outcomes[memory], sweep.p, debug_print).values()))


def fits_without(sweep: Sweep, name: str) -> int:
    """How many sets without this switch show everything, with any debug print and in any kind of memory."""
    shown = np.logical_or.reduce([show_everything(sweep, debug, m) for debug in DEBUG_PRINTS for m in MEMORY])
    return int((shown & (sweep.bits[:, NAMES.index(name)] == 0)).sum())


def fits_by_print(sweep: Sweep) -> dict[str, dict[str, Any]]:
    """How many sets show everything, for each debug print, and for any of them.

    Of these, `cured` are cured; `kept` keep every printed line, and `kept_cured` of those are cured. `memory`: how many
    show it in each kind of memory.
    """
    kept = keep_printed_lines(sweep)
    shown = {name: {m: show_everything(sweep, name, m) for m in MEMORY} for name in DEBUG_PRINTS}
    shown["any of these"] = {m: np.logical_or.reduce([by[m] for by in shown.values()]) for m in MEMORY}
    counts = {}
    for name, by_memory in shown.items():
        sets = np.logical_or.reduce(list(by_memory.values()))
        right = np.logical_or.reduce([by_memory[m] & cured(sweep, m) for m in MEMORY])
        counts[name] = {
            "sets": int(sets.sum()),
            "cured": int(right.sum()),
            "kept": int((sets & kept).sum()),
            "kept_cured": int((right & kept).sum()),
            "memory": {m: int(by_memory[m].sum()) for m in MEMORY},
        }
    return counts


def candidates(sweep: Sweep) -> list[dict[str, Any]]:
    """The printed lines, and the smallest sets that show everything with some debug print in some kind of memory.

    Smallest of all sets, and of those that keep every printed line. Each with its `faults`, the `memory`, what it shows
    (`shows[debug_print][observation]`), whether it is `cured` and is `kept`, how many sets that show everything
    `contain` it, and what three prints would have shown that the report does not have (`prints`).
    """
    kept = keep_printed_lines(sweep)
    pairs = {(frozenset(PRINTED), MEMORY[2]): None}
    for memory in MEMORY:
        for debug_print in DEBUG_PRINTS:
            shows = show_everything(sweep, debug_print, memory)
            for which in (shows, shows & kept):
                pairs |= dict.fromkeys((names, memory) for names in faulty.minimal(sweep.bits, which))
    return [_candidate(sweep, names, memory) for names, memory in sorted(pairs, key=_printed_first)]


def _printed_first(pair: tuple[frozenset[str], str]) -> tuple[bool, int, list[str]]:
    return pair[0] != frozenset(PRINTED), len(pair[0]), sorted(pair[0])


def _candidate(sweep: Sweep, names: frozenset[str], memory: str) -> dict[str, Any]:
    row = bits(names)
    at = sweep.at(row[None])[0]
    outcome = sweep.outcomes[memory][[at]]
    seen = {name: faulty.observations(outcome, sweep.p, name) for name in DEBUG_PRINTS}
    fits = np.logical_or.reduce([show_everything(sweep, name, memory) for name in DEBUG_PRINTS])
    return {
        "faults": in_words(names),
        "memory": memory,
        "shows": {name: {what: bool(shown[0]) for what, shown in by.items()} for name, by in seen.items()},
        "cured": bool(cured(sweep, memory)[at]),
        "kept": bool(keep_printed_lines(sweep)[at]),
        "contain": int((fits & ((sweep.bits & row) == row).all(1)).sum()),
        "first_wrong": _first_wrong(outcome[0], sweep.p),
        "prints": _not_printed(outcome[0], sweep.p),
    }


def weigh_candidates(rows: list[dict[str, Any]]) -> whywrong.Weighing:
    """Each of the :func:`candidates` with each debug print as a hypothesis, each observation as an experiment."""
    hypotheses = {
        f"{row['faults']}; prints: {name}; memory: {row['memory']}": lambda what, shown=shown: np.array(
            [int(shown[what])]
        )
        for row in rows
        for name, shown in row["shows"].items()
    }
    return whywrong.weigh(
        lambda _: np.array([1]), hypotheses, settings={what: what for what in OBSERVATIONS}, thorough=False
    )


def show_all(row: Mapping[str, Any], debug_print: str) -> bool:
    """Whether one of the :func:`candidates` shows everything with this debug print."""
    return all(row["shows"][debug_print].values())


def first_that_fits(rows: list[dict[str, Any]]) -> tuple[dict[str, Any], str]:
    """The first of the candidates that shows everything, and with which debug print; else the printed lines."""
    fits = ((row, name) for row in rows for name in DEBUG_PRINTS if show_all(row, name))
    return next(fits, (rows[0], next(iter(DEBUG_PRINTS))))


def first_wrong(rows: list[dict[str, Any]]) -> str:
    """The first of ff_out, x and logits that is wrong in the candidates that show everything."""
    wrong = {row["first_wrong"] for row in rows if any(show_all(row, name) for name in DEBUG_PRINTS)}
    return " or ".join(name for name in ("ff_out", "x", "logits") if name in wrong) or "none"


def _first_wrong(o: Any, p: faulty.Program) -> str:
    if o["ff_right"] != p.elements:
        return "ff_out"
    return "x" if o["x_right"] != p.elements else "logits" if o["logits_right"] != p.logits else "none"


def _not_printed(o: Any, p: faulty.Program) -> list[str]:
    """ff_out's host vector after its download, x on the device, and how many calls failed."""
    n = p.elements
    there = "right" if o["x_right"] == n else "zeros" if o["x_zero"] == n else "not written" if o["x_nan"] else "wrong"
    host = f"{o['host_size']} numbers, {o['host_right']} right"
    return [host, "cannot be read" if o["x_failed"] else there, str(o["failed_calls"])]


def one_fault_beside(sweep: Sweep) -> list[tuple[str, ...]]:
    """The printed lines with one switch turned: switch, what it does, whether the report prints its line, two endings.

    The endings are those of the set and of the corrected set, for each kind of memory where these differ.
    """
    rows = []
    for name, what in faulty.SWITCHES.items():
        if name in (*PRINTED, "constructor_omits_shape"):
            continue
        row = bits({*PRINTED, name})[None]
        ends = []
        for at in (sweep.at(row)[0], sweep.at(faulty.corrected(row))[0]):
            by_memory = {memory: ending(o[at], sweep.p) for memory, o in sweep.outcomes.items()}
            groups = {end: [m for m in MEMORY if by_memory[m] == end] for end in by_memory.values()}
            ends.append("; ".join(f"{e} ({', '.join(m)})" if len(groups) > 1 else e for e, m in groups.items()))
        line = "not printed" if name in UNPRINTED else "printed otherwise"
        rows.append((name, what, line, ends[0], "the same" if ends[0] == ends[1] else ends[1]))
    return rows


def counts_by_memory(sweep: Sweep) -> dict[str, dict[str, Any]]:
    """For each kind of memory how many sets are `right`, and how many there are of each of the `ends`.

    `zero`: how many have zero logits, how many of these have the suspected line, and how many are cured.
    """
    counts = {}
    for memory, o in sweep.outcomes.items():
        zero = faulty.observations(o, sweep.p)["logits all 0"]
        counts[memory] = {
            "right": int(faulty.right(o, sweep.p).sum()),
            "ends": {end: int((o["status"] == i).sum()) for i, end in enumerate(faulty.ENDS)},
            "zero": [
                int(which.sum()) for which in (zero, zero & has_suspected_line(sweep), zero & cured(sweep, memory))
            ],
        }
    return counts


def silent_failures(sweep: Sweep, memory: str = "zeros") -> list[frozenset[str]]:
    """The smallest sets that run to their end with wrong numbers though h2d failed; the printed lines if none does."""
    o = sweep.outcomes[memory]
    silent = (o["status"] == faulty.FINISHED) & (o["failed_h2d"] > 0) & ~faulty.right(o, sweep.p)
    return faulty.minimal(sweep.bits, silent) or [frozenset(PRINTED)]


def false_traces(sweep: Sweep) -> dict[str, Any]:
    """Sets that print the trace of x's bytes, in each kind of memory.

    `printing`: all of them; `failed`: those whose own upload failed; `lost`: those whose values were lost; `smallest`:
    one of either. An upload that fails and is not h2d's is a copy's; where the constructor's cannot fail it is the
    assignment's. Values are lost where no call failed, the first layer's result is right and the last x is not.
    """
    counts: dict[str, Any] = {"printing": [], "failed": [], "lost": []}
    smallest: list[frozenset[str]] = []
    for o in sweep.outcomes.values():
        seen = faulty.observations(o, sweep.p)
        trace = seen["trace"] & (o["status"] == faulty.FINISHED)
        constructor = sweep.bits[:, NAMES.index("constructor_by_host_size")] == 1
        failed = trace & ~constructor & (o["failed_uploads"] > o["failed_h2d"])
        lost = trace & seen["ff_out right"] & (o["failed_calls"] == 0) & (o["x_right"] != sweep.p.elements)
        for name, which in {"printing": trace, "failed": failed, "lost": lost}.items():
            counts[name].append(int(which.sum()))
        smallest = smallest or [names for which in (failed, lost) for names in faulty.minimal(sweep.bits, which)[:1]]
    return counts | {"smallest": [in_words(names) for names in smallest]}


def losses(sweep: Sweep) -> Array:
    """The cross-entropies of all runs that end with whole and finite logits, [runs]."""
    whole = [
        o["loss"][(o["status"] == faulty.FINISHED) & (o["logits_read"] == sweep.p.logits)]
        for o in sweep.outcomes.values()
    ]
    joined = np.concatenate(whole)
    return joined[np.isfinite(joined)]
