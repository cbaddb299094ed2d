"""What is run and counted: the printed lines, the sweep in numbers that a record keeps, experiments beside it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from kernels.tinyllm import faulty, golden
from kernels.tinyllm.faulty import NAMES, PRINTED, WORLDS, Sweep, words
from kernels.tinyllm.tinyllm import ENGINES, TinyLLM
from labkit.session.device import Device

Array = np.ndarray
Facts = dict[str, Any]
OBSERVATIONS = ("ff_out right", "trace", "x near 1e-32", "logits all 0", "only <pad>")
"""What the report saw of one run, in the order of the program; the loss is another matter, see :func:`loss`."""
UNPRINTED = ("assignment_by_host_size", "assignment_omits_shape", "shallow_assignment", "no_other_d2h", "zero_host")
"""Switches in lines that the report does not print. The others are printed, set or not set."""
ACCUSED = NAMES.index("resize_by_size")
REPORTED_X = (6.16847e-33, 1.60859e-32)
OPERAND, ROUTINE = "the head's product is given a buffer of zeros", "cuBLAS's products write nothing"
"""The faults outside the list that are faults of a product: of how it is called, and of what computes it."""


def bits(names: Sequence[str] | frozenset[str]) -> Array:
    """One set as a row of switches."""
    return np.array([name in names for name in NAMES], np.int32)


def ending(o: Any, p: faulty.Program) -> str:
    """One outcome in a word or three."""
    one = np.atleast_1d(o)
    if faulty.right(one, p)[0]:
        return "right"
    if one["status"][0] != faulty.FINISHED:
        return faulty.ENDS[one["status"][0]]
    return "logits all 0" if faulty.observations(one, p)["logits all 0"][0] else "wrong"


class Experiment(NamedTuple):
    """Programs to run, and what is read from their outcomes."""

    rows: Array
    read: Callable[[Array], Any]


def together(p: faulty.Program, device: Device, *experiments: Experiment) -> list[Any]:
    """What each experiment reads, all run at once: a process that starts costs more than many runs."""
    found = faulty.run(p, np.concatenate([one.rows for one in experiments]), device)
    ends = np.cumsum([len(one.rows) for one in experiments])
    return [one.read(part) for one, part in zip(experiments, np.split(found, ends[:-1]), strict=True)]


# The main experiment: the lines as they are printed.


def printed_lines(p: faulty.Program) -> Experiment:
    """The printed lines in both readings of the copy constructor, each way, product and kind of memory: how they end.

    As printed, the copy constructor does not take `size` before it allocates ("literal"), or that line was cut ("cut").
    """
    cases = list(itertools.product(("cut", "literal"), range(len(faulty.WAYS)), ENGINES, WORLDS))
    omits = {"cut": (), "literal": ("constructor_omits_shape",)}
    rows = [faulty.row(*PRINTED, *omits[how], way=way, engine=e, world=world) for how, way, e, world in cases]

    def read(o: Array) -> Facts:
        found: Facts = {}
        for (how, way, _, world), outcome in zip(cases, o, strict=True):
            ends = found.setdefault(how, {}).setdefault(faulty.WAYS[way], {}).setdefault(world, {})
            ends[ending(outcome, p)] = ends.get(ending(outcome, p), 0) + 1
        return found

    return Experiment(np.stack(rows), read)


def tally(ends: Mapping[str, Any]) -> dict[str, int]:
    """All runs of one reading of the constructor: how many end in which way."""
    total: dict[str, int] = {}
    for by_world in ends.values():
        for counts in by_world.values():
            for end, count in counts.items():
                total[end] = total.get(end, 0) + count
    return total


# What the sweep holds, per kind of memory.


def facts(s: Sweep) -> Facts:
    """Everything that is counted over the sets of switches, for each kind of memory on its own, ready for JSON.

    The sets listed by name are the printed lines and, of all kinds of memory, the smallest with all-zero logits, the
    smallest that show the most, and the smallest of these that keep every printed line.
    """
    keeps = _keeps(s)
    listed = [frozenset(PRINTED)]
    for world in WORLDS:
        seen = faulty.observations(s.outcomes[world], s.p)
        shown = np.sum([seen[name] for name in OBSERVATIONS], axis=0)
        for which in (seen["logits all 0"], shown == shown.max(), keeps & (shown == shown[keeps].max())):
            listed += faulty.minimal(s.bits, which)
    listed = sorted(dict.fromkeys(listed[1:]), key=lambda one: (len(one), words(one)))
    return {
        "sets": len(s.bits),
        "worlds": {world: _facts(s, world, [frozenset(PRINTED), *listed]) for world in WORLDS},
    }


def _keeps(s: Sweep) -> Array:
    """The sets that keep every line that is printed."""
    at = [i for i, name in enumerate(NAMES) if name not in UNPRINTED]
    return (s.bits[:, at] == bits(PRINTED)[at]).all(1)


def _facts(s: Sweep, world: str, names: Sequence[frozenset[str]]) -> Facts:
    o, p = s.outcomes[world], s.p
    seen = faulty.observations(o, p)
    right = faulty.right(o, p)
    cured = right[s.at(faulty.corrected(s.bits))]
    accused = faulty.corrected(s.bits)[:, ACCUSED] != s.bits[:, ACCUSED]
    shown = np.sum([seen[name] for name in OBSERVATIONS], axis=0)
    zero, most, stops = seen["logits all 0"], shown == shown.max(), np.isin(o["status"], faulty.STOPS)
    keeps, ran = _keeps(s), o["status"] == faulty.FINISHED

    def count(which: Array) -> list[int]:
        return [int(which.sum()), int((which & accused).sum()), int((which & cured).sum())]

    def listed(names: frozenset[str]) -> Facts:
        i = s.at(bits(names)[None])[0]
        return {
            "shows": [bool(seen[name][i]) for name in OBSERVATIONS], "cured": bool(cured[i]), "keeps": bool(keeps[i]),
            "wrong first": _first_wrong(o[i], p), "prints": _prints(o[i], p),
        }  # fmt: skip

    best = int(shown[keeps].max())
    return {
        "ends": {end: int((o["status"] == i).sum()) for i, end in enumerate(faulty.ENDS)},
        "smallest that stop": [words(one) for one in faulty.minimal(s.bits, stops)],
        "right": int(right.sum()),
        "shown": {name: int(seen[name].sum()) for name in OBSERVATIONS},
        "zero within": int((zero & (s.bits[:, NAMES.index("size_in_elements")] == 0)).sum()),
        "wrong": count(ran & ~right), "zero": count(zero), "most": [int(shown.max()), *count(most)],
        "printed": {
            "sets": int(keeps.sum()), "wrong": count(keeps & ran & ~right), "zero": count(keeps & zero),
            "most": [best, *count(keeps & (shown == best))],
        },
        "zero without": {
            name: int((zero & right[s.at(faulty.without(s.bits, name))]).sum())
            for name in NAMES if name != "constructor_omits_shape"
        },
        "smallest": {words(one): listed(one) for one in names},
        "further": {
            name: [ending(o[i], p), ending(o[s.at(faulty.corrected(s.bits[[i]]))[0]], p)]
            for name, i in _further(s).items()
        },
        "silent": _silent(s, world), "liars": _liars(s, world),
    }  # fmt: skip


def _further(s: Sweep) -> dict[str, int]:
    """The printed code with one line otherwise: the switch that is turned, and where the set stands."""
    turned = {}
    for name in NAMES:
        if name not in (*PRINTED, "constructor_omits_shape"):
            turned[name] = int(s.at(bits({*PRINTED, name})[None])[0])  # type: ignore[arg-type]
    return turned


def _first_wrong(o: Any, p: faulty.Program) -> str:
    if o["ff_right"] != p.elements:
        return "ff_out"
    return "x" if o["x_right"] != p.elements else "logits" if o["logits_right"] != p.logits else "none"


def _prints(o: Any, p: faulty.Program) -> list[str]:
    """What the report did not print: ff_out's host vector after its download, x on the device, failed calls."""
    n = p.elements
    there = "right" if o["x_right"] == n else "zeros" if o["x_zero"] == n else "not written" if o["x_nan"] else "wrong"
    host = f"{o['host_size']} floats, {o['host_right']} right"
    return [host, "cannot be read" if o["x_failed"] else there, str(o["failed_calls"])]


def _silent(s: Sweep, world: str) -> list[str]:
    """The smallest sets that run to their end with wrong numbers though h2d failed unseen."""
    o = s.outcomes[world]
    found = (o["status"] == faulty.FINISHED) & (o["failed_h2d"] > 0) & ~faulty.right(o, s.p)
    return [words(one) for one in faulty.minimal(s.bits, found)]


def _liars(s: Sweep, world: str) -> Facts:
    """Sets that print the trace of x's bytes: all, where the assignment's own upload failed, where values were lost.

    An upload that fails and is not h2d's is a copy's; where the constructor's cannot fail it is the assignment's.
    Values are lost where no call failed, the first layer's result is right and the last x is not.
    """
    o = s.outcomes[world]
    seen = faulty.observations(o, s.p)
    trace = seen["trace"] & (o["status"] == faulty.FINISHED)
    constructor = s.bits[:, NAMES.index("constructor_by_host_size")] == 1
    failed = trace & ~constructor & (o["failed_uploads"] > o["failed_h2d"])
    lost = trace & seen["ff_out right"] & (o["failed_calls"] == 0) & (o["x_right"] != s.p.elements)
    smallest = [faulty.minimal(s.bits, which)[:1] for which in (failed, lost)]
    return {
        "trace": int(trace.sum()), "its upload failed": int(failed.sum()), "values lost": int(lost.sum()),
        "smallest": [words(one) for found in smallest for one in found],
    }  # fmt: skip


# Experiments beside the sweep.


def with_zero_logits(s: Sweep, most: int, rng: np.random.Generator) -> Array:
    """Unchecked sets [n, 14] with zero logits where memory is zero: the smallest, and others drawn, `most` in all."""
    zero = faulty.observations(s.outcomes["zeros"], s.p)["logits all 0"] & (s.bits[:, -1] == 1)
    smallest = s.at(np.stack([bits(one) for one in faulty.minimal(s.bits, zero)]))
    others = rng.permutation(np.setdiff1d(np.flatnonzero(zero), smallest))
    return s.bits[np.concatenate([smallest, others])[:most]]


def products(p: faulty.Program, chosen: Array) -> Experiment:
    """Sets with zero logits, and a fault of a product's routine and of its call: how they end with each product."""
    cases = [(*faulty.named(one),) for one in chosen]
    faults = [faulty.OUTSIDE.index(name) for name in (ROUTINE, OPERAND)]
    rows = []
    for engine in ENGINES:
        rows += [faulty.row(*names, engine=engine) for names in cases]
        rows += [faulty.row("unchecked", engine=engine, outside=index) for index in faults]

    def read(found: Array) -> Facts:
        told: Facts = {"sets": len(cases), "engines": {}, "faults": {ROUTINE: {}, OPERAND: {}}}
        for engine, o in zip(ENGINES, found.reshape(len(ENGINES), -1), strict=True):
            ends = [ending(one, p) for one in o]
            stopped = np.flatnonzero(o["status"][: len(cases)] != faulty.FINISHED)
            smallest = faulty.minimal(chosen[stopped], np.ones(len(stopped), bool))
            told["engines"][engine] = {
                "zero": ends[: len(cases)].count("logits all 0"),
                "stopped": len(stopped),
                "smallest that stop": [words(one) for one in smallest],
            }
            for fault, end in zip(told["faults"], ends[len(cases) :], strict=True):
                told["faults"][fault][engine] = end
        return told

    return Experiment(np.stack(rows), read)


def checked_too(name: str) -> Experiment:
    """The set of that name with its calls unchecked and checked, where memory is zero: both outcomes."""
    names = set(name.split(" + ")) - {"unchecked"}
    return Experiment(np.stack([faulty.row(*names, "unchecked"), faulty.row(*names)]), tuple)


def smallest_activations(p: faulty.Program, device: Device) -> dict[str, tuple[float, int, int]]:
    """A float32 forward pass with and without norms and residuals: least activation, how many denormal, how many zero.

    What is zero with reason is left out: attention to later tokens, which is masked.
    """
    found = {}
    weights = {name: torch.as_tensor(value, device=device.kind) for name, value in p.weights.items()}
    ids = torch.as_tensor(p.ids[None], dtype=torch.long, device=device.kind)
    for norms in (True, False):
        for residuals in (True, False):
            values = []
            for name, value in golden.forward(weights, ids, ids, p.config, norms=norms, residuals=residuals).items():
                seen = value.abs()
                if name.endswith(".p"):
                    seen = seen[..., torch.ones(seen.shape[-2:], dtype=torch.bool, device=seen.device).tril()]
                values.append(seen.reshape(-1))
            whole = torch.cat(values)
            low = (whole > 0) & (whole < torch.finfo(torch.float32).tiny)
            case = f"with{'' if norms else 'out'} norms, with{'' if residuals else 'out'} residuals"
            found[case] = (float(whole.min()), int(low.sum()), int((whole == 0).sum()))
    return found


def other_ways(s: Sweep) -> Experiment:
    """Sets without the accused fault whose logits are zero by value: all, right as out-parameter, right by shared_ptr.

    For each kind of memory, with calls unchecked.
    """
    accused = faulty.corrected(s.bits)[:, ACCUSED] != s.bits[:, ACCUSED]
    rows, cases = [], []
    for world in WORLDS:
        zero = faulty.observations(s.outcomes[world], s.p)["logits all 0"] & ~accused & (s.bits[:, -1] == 1)
        cases.append((world, int(zero.sum())))
        rows += [faulty.row(*faulty.named(one), way=way, world=world) for way in (2, 3) for one in s.bits[zero]]

    def read(o: Array) -> dict[str, list[int]]:
        found, right = {}, faulty.right(o, s.p)
        for world, n in cases:
            found[world] = [n, int(right[:n].sum()), int(right[n : 2 * n].sum())]
            right = right[2 * n :]
        return found

    return Experiment(np.array(rows, np.int32).reshape(-1, len(faulty.COLUMNS)), read)


def guesses(model: TinyLLM, text: Array) -> set[int]:
    """The bytes that the model predicts over a batch of `text`."""
    c = model.config
    model.forward(text[: c.sequences * c.context].astype(np.int32).reshape(c.sequences, c.context))
    return {int(byte) for byte in np.unique(model.logits().argmax(-1))}


def garbage_logits(p: faulty.Program, device: Device) -> dict[str, Array]:
    """Logits that the head makes of the report's two numbers: throughout x, or there alone and zeros elsewhere."""
    rows, width = len(p.ids), p.config.width
    throughout = np.resize(np.array(REPORTED_X, np.float32), (rows, width))
    alone = np.zeros_like(throughout)
    alone[0, :2] = throughout[0, :2]
    head = torch.as_tensor(p.weights["head.w"], device=device.kind)
    found = {}
    for name, x in (("throughout", throughout), ("only where printed", alone)):
        found[f"{name}, with a norm"] = _tail(p, x, device)
        found[f"{name}, without"] = (torch.as_tensor(x, device=device.kind) @ head).cpu().numpy()
        if name.startswith("only"):  # the other tokens' x is zero
            found = {case: value[:1] if case.startswith("only") else value for case, value in found.items()}
    return found


def _tail(p: faulty.Program, x: Array, device: Device) -> Array:
    """Logits that the norm and the head make of a given x: a model without layers, whose embedding is that x."""
    kept = {name: p.weights[name] for name in ("head.w", "head.b", "lnf.gain", "lnf.shift")}
    model = TinyLLM(replace(p.config, layers=0), device)
    model.write(kept | {"positions": np.asarray(x, np.float32), "table": np.zeros_like(p.weights["table"])})
    model.forward(p.ids[None])
    logits = model.logits()[0]
    model.close()
    return logits


def losses(s: Sweep) -> Array:
    """The cross-entropies of all runs that end with whole and finite logits."""
    whole = [
        o["loss"][(o["status"] == faulty.FINISHED) & (o["logits_read"] == s.p.logits)] for o in s.outcomes.values()
    ]
    joined = np.concatenate(whole)
    return joined[np.isfinite(joined)]


def log(o: Any) -> list[str]:
    """The lines that the report's program prints, from an outcome."""
    ff, x = (" ".join(f"{v:g}" for v in o[name]) for name in ("ff_first", "x"))
    trace = f"used h_data to initialize GPU ({o['traced_bytes']} bytes)" if o["traces"] else "(no trace of an upload)"
    return [f"ff_out.d_data: {ff}", trace, f"x.d_data: {x}", f"Max: {o['logits_high']:g}, Min: {o['logits_low']:g}",
            "predicts <pad>" if o["predicted"] == 0 else f"predicts token {o['predicted']}"]  # fmt: skip


REPORT_LOG = ("ff_out.d_data: -0.000100224 3.2093e-05 0.000404273", "used h_data to initialize GPU (2048 bytes)",
              "x.d_data: 6.16847e-33 1.60859e-32", "Max: 0, Min: 0", "predicts <pad>")  # fmt: skip
"""The same lines as the report has them."""


def trial() -> str:
    """The lines under trial, from faulty_tensor.cuh."""
    source = (faulty.FOLDER / "faulty_tensor.cuh").read_text(encoding="utf-8")
    return source.split("// [the lines under trial\n")[1].split("    // the lines under trial]")[0].rstrip()


def on_gpu(p: faulty.Program, device: Device) -> dict[str, list[str]]:
    """compute-sanitizer on some programs, its leak check on a thousand tensors, and what fresh device memory holds."""
    loose = ("prefer_host", "resize_by_size", "constructor_by_host_size", "assignment_by_host_size", "unchecked")
    cases = {
        "right, memcheck": ((), "memcheck"),
        "right, initcheck": ((), "initcheck"),
        "uploads by h_data.size(), memcheck": (loose, "memcheck"),
        "uploads by h_data.size(), initcheck": ((*loose, "h2d_by_host_size"), "initcheck"),
        "size in elements, memcheck": (("size_in_elements", "unchecked"), "memcheck"),
        "shallow copies, memcheck": (("shallow_constructor", "shallow_assignment", "unchecked"), "memcheck"),
    }
    with ThreadPoolExecutor(8) as pool:  # each of them is a process of its own that mostly starts up
        tasks = {
            name: pool.submit(faulty.sanitized, p, faulty.row(*switched, world="as left"), device, tool)
            for name, (switched, tool) in cases.items()
        }
        leaks, fresh = pool.submit(faulty.leak_check, device), pool.submit(faulty.fresh_memory, device)
        told = {name: [f"{task.result()[0]} errors", *task.result()[1]] for name, task in tasks.items()}
        told["a thousand tensors made, copied, moved: leak check"] = leaks.result()
        told["fresh device memory"] = fresh.result()
    return told
