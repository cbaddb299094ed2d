"""What the notebook runs beside the sweep: the printed lines, other ways to return, other products, the head, a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from kernels.tinyllm import faulty, golden
from kernels.tinyllm.fault_sets import bits, ending, has_suspected_line
from kernels.tinyllm.faulty import MEMORY, PRINTED, WAYS, Sweep
from kernels.tinyllm.tinyllm import ENGINES, Config, TinyLLM, initial, train
from labkit.session.device import Device

Array = np.ndarray
REPORTED_X = (6.16847e-33, 1.60859e-32)
REPORTED_LOSS = (-0.99, 0.7)
REPORT_LOG = (
    "ff_out.d_data: -0.000100224 3.2093e-05 0.000404273",
    "used h_data to initialize GPU (2048 bytes)",
    "x.d_data: 6.16847e-33 1.60859e-32",
    "Max: 0, Min: 0",
    "predicts <pad>",
)
"""What the report's program printed."""
OPERAND, ROUTINE = "the head's product is given a buffer of zeros", "cuBLAS's products write nothing"
"""The faults outside the list that are faults of a product: of how it is called, and of what computes it."""
SHARED = {
    "each tensor has a buffer of its own": (),
    "only the copy constructor shares a buffer": ("shallow_constructor",),
    "only the assignment shares a buffer": ("shallow_assignment",),
    "both share a buffer": ("shallow_constructor", "shallow_assignment"),
}
"""What the class may have been before the corrections of the report's item 5, when nothing was downloaded."""


class Experiment(NamedTuple):
    """Programs to run, int32 [n, 18], and what is read from their outcomes [n]."""

    rows: Array
    read: Callable[[Array], Any]


def together(p: faulty.Program, device: Device, *experiments: Experiment) -> list[Any]:
    """What each experiment reads, all run at once: a process that starts costs more than many runs."""
    outcomes = faulty.run(p, np.concatenate([experiment.rows for experiment in experiments]), device)
    ends = np.cumsum([len(experiment.rows) for experiment in experiments])
    parts = np.split(outcomes, ends[:-1])
    return [experiment.read(part) for experiment, part in zip(experiments, parts, strict=True)]


def printed_lines(p: faulty.Program) -> Experiment:
    """The printed lines with each way to return, product and kind of memory: {constructor: {way: {ending: runs}}}.

    As printed, the copy constructor allocates before it knows the size ("word for word"); or the line that takes the
    shape was cut from the report ("with its size known").
    """
    omits = {"with its size known": (), "word for word": ("constructor_omits_shape",)}
    cases = list(itertools.product(omits, range(len(WAYS)), ENGINES, MEMORY))
    rows = [faulty.row(*PRINTED, *omits[how], way=way, engine=e, memory=m) for how, way, e, m in cases]

    def read(outcomes: Array) -> dict[str, dict[str, dict[str, int]]]:
        table: dict[str, dict[str, dict[str, int]]] = {how: {way: {} for way in WAYS} for how in omits}
        for (how, way, _, _), outcome in zip(cases, outcomes, strict=True):
            counts, end = table[how][WAYS[way]], ending(outcome, p)
            counts[end] = counts.get(end, 0) + 1
        return table

    return Experiment(np.stack(rows), read)


def total(by_way: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """All runs of one reading of the constructor: how many end in which way."""
    counts: dict[str, int] = {}
    for way in by_way.values():
        for end, count in way.items():
            counts[end] = counts.get(end, 0) + count
    return counts


def lifetimes(p: faulty.Program) -> Experiment:
    """The class before it downloaded anything, in four readings: {reading: {way: (runs with right x, runs)}}.

    Results are returned by value, copied and with the copy left out, in each kind of memory.
    """
    cases = list(itertools.product(SHARED, range(2), MEMORY))
    before = ("no_layer_d2h", "no_other_d2h", "unchecked")
    rows = [faulty.row(*before, *SHARED[reading], way=way, memory=m) for reading, way, m in cases]

    def read(outcomes: Array) -> dict[str, dict[str, list[int]]]:
        right = (outcomes["x_right"] == p.elements) & (outcomes["status"] == faulty.FINISHED)
        shape = (len(SHARED), 2, len(MEMORY))
        counts = right.reshape(shape).sum(-1)
        return {
            reading: {way: [int(counts[i, j]), len(MEMORY)] for j, way in enumerate(WAYS[:2])}
            for i, reading in enumerate(SHARED)
        }

    return Experiment(np.stack(rows), read)


def other_ways(sweep: Sweep) -> Experiment:
    """Sets without the suspected fault whose logits are zero by value, with calls unchecked.

    Reads {memory: [sets, right as out-parameter, right by shared_ptr]}.
    """
    rows, cases = [], []
    for memory in MEMORY:
        zero = faulty.observations(sweep.outcomes[memory], sweep.p)["logits all 0"]
        chosen = sweep.bits[zero & ~has_suspected_line(sweep) & (sweep.bits[:, -1] == 1)]
        cases.append((memory, len(chosen)))
        rows += [faulty.row(*faulty.switches_of(b), way=way, memory=memory) for way in (2, 3) for b in chosen]

    def read(outcomes: Array) -> dict[str, list[int]]:
        counts, right = {}, faulty.right(outcomes, sweep.p)
        for memory, n in cases:
            counts[memory] = [n, int(right[:n].sum()), int(right[n : 2 * n].sum())]
            right = right[2 * n :]
        return counts

    return Experiment(np.array(rows, np.int32).reshape(-1, len(faulty.COLUMNS)), read)


def with_zero_logits(sweep: Sweep, most: int, rng: np.random.Generator) -> Array:
    """Unchecked sets [n, 14] with zero logits where memory is zero: the smallest, and others drawn, `most` in all."""
    zero = faulty.observations(sweep.outcomes["zeros"], sweep.p)["logits all 0"] & (sweep.bits[:, -1] == 1)
    smallest = sweep.at(np.stack([bits(names) for names in faulty.minimal(sweep.bits, zero)]))
    others = rng.permutation(np.setdiff1d(np.flatnonzero(zero), smallest))
    return sweep.bits[np.concatenate([smallest, others])[:most]]


def products(p: faulty.Program, chosen: Array) -> Experiment:
    """Sets [n, 14] with zero logits, and two faults of a product, with each product.

    Reads `sets`, their number; `zero` and `stopped`, how many keep zero logits and how many stop, by product; and how
    each of the faults ends, by product: `routine`, where cuBLAS writes nothing, and `operand`, where the head is given
    the wrong buffer.
    """
    cases = [tuple(faulty.switches_of(row)) for row in chosen]
    faults = [faulty.OUTSIDE.index(name) for name in (ROUTINE, OPERAND)]
    rows = []
    for engine in ENGINES:
        rows += [faulty.row(*names, engine=engine) for names in cases]
        rows += [faulty.row("unchecked", engine=engine, outside=index) for index in faults]

    def read(outcomes: Array) -> dict[str, Any]:
        counts: dict[str, Any] = {"sets": len(cases), "zero": {}, "stopped": {}, "routine": {}, "operand": {}}
        for engine, o in zip(ENGINES, outcomes.reshape(len(ENGINES), -1), strict=True):
            ends = [ending(outcome, p) for outcome in o]
            counts["zero"][engine] = ends[: len(cases)].count("logits all 0")
            counts["stopped"][engine] = int((o["status"][: len(cases)] != faulty.FINISHED).sum())
            counts["routine"][engine], counts["operand"][engine] = ends[len(cases) :]
        return counts

    return Experiment(np.stack(rows), read)


def unchecked_and_checked(names: frozenset[str]) -> Experiment:
    """One set of switches with its calls unchecked and checked, where memory is zero: both outcomes, [2]."""
    without = names - {"unchecked"}
    return Experiment(np.stack([faulty.row(*without, "unchecked"), faulty.row(*without)]), lambda outcomes: outcomes)


def smallest_activations(p: faulty.Program, device: Device) -> dict[str, tuple[float, int, int]]:
    """A float32 forward pass with and without norms and residuals: least activation, how many denormal, how many zero.

    What is zero with reason is left out: attention to later tokens, which is masked.
    """
    smallest = {}
    weights = {name: torch.as_tensor(value, device=device.kind) for name, value in p.weights.items()}
    ids = torch.as_tensor(p.ids[None], dtype=torch.long, device=device.kind)
    for norms, residuals in itertools.product((True, False), repeat=2):
        values = []
        for name, value in golden.forward(weights, ids, ids, p.config, norms=norms, residuals=residuals).items():
            sizes = value.abs()
            if name.endswith(".p"):
                sizes = sizes[..., torch.ones(sizes.shape[-2:], dtype=torch.bool, device=sizes.device).tril()]
            values.append(sizes.reshape(-1))
        every = torch.cat(values)
        denormal = (every > 0) & (every < torch.finfo(torch.float32).tiny)
        case = f"with{'' if norms else 'out'} norms, with{'' if residuals else 'out'} residuals"
        smallest[case] = (float(every.min()), int(denormal.sum()), int((every == 0).sum()))
    return smallest


def zero_gradients(p: faulty.Program, device: Device) -> dict[str, float]:
    """The share of the gradients of q's and k's weights that are exactly zero in float32, by kind of model.

    The loss is a cross-entropy against the tokens themselves. Those of one token alone attend to nothing else, so that
    their q and k have no gradient at all: two tokens are needed.
    """
    shares = {}
    ids = torch.as_tensor(p.ids[None], dtype=torch.long, device=device.kind)
    for norms, residuals in itertools.product((True, False), repeat=2):
        weights = golden.weights(p.weights, torch.float32, device.kind)
        steps = golden.forward(weights, ids, ids, p.config, norms=norms, residuals=residuals)
        qkv = [weights[f"L{i}.qkv.w"] for i in range(p.config.layers)]
        gradients = torch.autograd.grad(steps["loss"].sum(), qkv)
        of_q_and_k = torch.cat([g[:, : 2 * p.config.width].reshape(-1) for g in gradients])
        case = f"with{'' if norms else 'out'} norms, with{'' if residuals else 'out'} residuals"
        shares[case] = float((of_q_and_k == 0).float().mean())
    return shares


def garbage_logits(p: faulty.Program, device: Device) -> dict[str, Array]:
    """Logits that the head makes of the report's two numbers: throughout x, or there alone and zeros elsewhere.

    Each with the norm before the head and without, [tokens, vocabulary]; of the first token alone where the others' x
    is zero.
    """
    throughout = np.resize(np.array(REPORTED_X, np.float32), (len(p.ids), p.config.width))
    alone = np.zeros_like(throughout)
    alone[0, :2] = throughout[0, :2]
    head = torch.as_tensor(p.weights["head.w"], device=device.kind)
    logits = {}
    for name, x, rows in (("throughout", throughout, len(p.ids)), ("only where printed", alone, 1)):
        logits[f"{name}, with a norm"] = _norm_and_head(p, x, device)[:rows]
        logits[f"{name}, without"] = (torch.as_tensor(x, device=device.kind) @ head).cpu().numpy()[:rows]
    return logits


def _norm_and_head(p: faulty.Program, x: Array, device: Device) -> Array:
    """Logits that the norm and the head make of a given x: a model without layers, whose embedding is that x."""
    weights = {name: p.weights[name] for name in ("head.w", "head.b", "lnf.gain", "lnf.shift")}
    model = TinyLLM(replace(p.config, layers=0), device)
    model.write(weights | {"positions": np.asarray(x, np.float32), "table": np.zeros_like(p.weights["table"])})
    model.forward(p.ids[None])
    logits = model.logits()[0]
    model.close()
    return logits


def perturbed(config: Config, rng: np.random.Generator) -> dict[str, Array]:
    """Parameters by name, float32, each moved at random by 0.05, so that biases, gains and shifts matter."""
    weights = initial(config, rng)
    return {name: (v + 0.05 * rng.standard_normal(v.shape)).astype(np.float32) for name, v in weights.items()}


def predictions(model: TinyLLM, text: Array) -> set[int]:
    """The bytes that the model predicts over a batch of `text`."""
    c = model.config
    model.forward(text[: c.sequences * c.context].astype(np.int32).reshape(c.sequences, c.context))
    return {int(byte) for byte in np.unique(model.logits().argmax(-1))}


def loss_by_frequencies(training: Array, validation: Array) -> float:
    """Nats a byte of `validation` where each is predicted by its share of `training`, every byte counted once more."""
    counts = np.bincount(training, minlength=256) + 1.0
    return float(np.log(counts.sum()) - np.log(counts[validation]).mean())


class Trained(NamedTuple):
    """What a training of the correct model gave."""

    config: Config
    count: int
    """Steps."""
    curve: list[tuple[int, float, float]]
    """(step, training loss, validation loss), nats a byte."""
    predicted: set[int]
    logits: Array
    by_frequencies: float
    """The loss of one who knows how often each byte is in the training text."""
    sample: str


def trained(
    full: bool,
    steps: int,
    training: Array,
    validation: Array,
    device: Device,
    rng: Callable[[int], np.random.Generator],
) -> Trained:
    """The correct model, full or small, trained on bytes; 0 steps are 3000 or 100. `rng` makes generators by number."""
    c = Config() if full else Config(context=32, width=48, heads=2, sequences=8)
    count, rate, batches = steps or (3000 if full else 100), 1e-3 if full else 1e-2, 16 if full else 2
    learner = TinyLLM(c, device)
    learner.write(initial(c, rng(8)))
    every = max(1, count // 10)
    curve = train(learner, training, validation, count, rate, rng(9), every=every, looked_at=batches)
    predicted = predictions(learner, validation)
    by_frequencies, logits = loss_by_frequencies(training, validation), learner.logits()
    sample = learner.generate(b"Return the ", 120, rng(10), 0.8).decode(errors="replace")
    learner.close()
    return Trained(c, count, curve, predicted, logits, by_frequencies, sample)


def log(outcome: Any, debug_print: str = "a fixed number") -> list[str]:
    """The lines that the report's program prints, from an outcome, with one of :data:`faulty.DEBUG_PRINTS`."""
    ff = "ff_before" if "before" in debug_print else "ff_after" if "after" in debug_print else "ff_first"
    x = "x" if debug_print == "a fixed number" else "x_by_length"
    ff, x = (" ".join(f"{v:g}" for v in outcome[name]) for name in (ff, x))
    return [
        f"ff_out.d_data: {ff}",
        f"used h_data to initialize GPU ({outcome['traced_bytes']} bytes)" if outcome["traces"] else "(no trace)",
        f"x.d_data: {x}",
        f"Max: {outcome['logits_high']:g}, Min: {outcome['logits_low']:g}",
        "predicts <pad>" if outcome["predicted"] == 0 else f"predicts token {outcome['predicted']}",
    ]


def logs(sweep: Sweep, faults: str, memory: str, debug_print: str) -> list[tuple[str, str, str]]:
    """The report's log, that of the printed lines in memory as it is left, and that of a set of faults."""
    printed, other = (
        sweep.outcomes[m][sweep.at(bits(names)[None])[0]]
        for names, m in ((PRINTED, "as left"), (faults.split(" + "), memory))
    )
    return list(zip(REPORT_LOG, log(printed, debug_print), log(other, debug_print), strict=True))


def on_gpu(p: faulty.Program, device: Device) -> dict[str, list[str]]:
    """compute-sanitizer on some programs, its leak check on a thousand tensors, and what fresh device memory holds."""
    by_length = ("prefer_host", "resize_by_size", "constructor_by_host_size", "assignment_by_host_size", "unchecked")
    cases = {
        "right, memcheck": ((), "memcheck"),
        "right, initcheck": ((), "initcheck"),
        "uploads by h_data.size(), memcheck": (by_length, "memcheck"),
        "uploads by h_data.size(), initcheck": ((*by_length, "h2d_by_host_size"), "initcheck"),
        "size in elements, memcheck": (("size_in_elements", "unchecked"), "memcheck"),
        "shallow copies, memcheck": (("shallow_constructor", "shallow_assignment", "unchecked"), "memcheck"),
    }
    with ThreadPoolExecutor(4) as pool:  # each of them is a process of its own that mostly starts up
        tasks = {
            name: pool.submit(faulty.sanitized, p, faulty.row(*switched, memory="as left"), device, tool)
            for name, (switched, tool) in cases.items()
        }
        leaks, fresh = pool.submit(faulty.leak_check, device), pool.submit(faulty.fresh_memory, device)
        reports = {name: [f"{task.result()[0]} errors", *task.result()[1]] for name, task in tasks.items()}
        reports["a thousand tensors made, copied, moved: leak check"] = leaks.result()
        reports["fresh device memory"] = fresh.result()
    return reports
