"""Every kernel of the workbook that can be called, correct and faulty, as a list of cases; and what fuzzing them found.

    python -m tools.fuzz_kernels OUT.csv --draws N [--device cpu|cuda] [--seconds S] [--jobs N] [--explain]
        [--only NAME ..]

writes a row as each case ends. Cases run in `--jobs` processes; one that dies, or takes far longer than `--seconds`, is
a row with the reason, and its process is begun again.
"""

import argparse
import csv
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from labkit.session.device import choose

ASKED = sys.argv[sys.argv.index("--device") + 1] if __name__ == "__main__" and "--device" in sys.argv else "auto"
DEVICE = choose(ASKED)  # before any kernel is imported

import numpy as np  # noqa: E402
import torch  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

import whywrong  # noqa: E402
from kernels.attention import attention, calls, elementwise, fused, problem, scores  # noqa: E402
from kernels.attention import faulty as attention_faults  # noqa: E402
from kernels.attention import golden as attention_golden  # noqa: E402
from kernels.bert import embedding  # noqa: E402
from kernels.bert.model import cross_entropy  # noqa: E402
from kernels.compare import faulty as planted  # noqa: E402
from kernels.compare import nondeterminism, systems  # noqa: E402
from kernels.lm import model as lm  # noqa: E402
from kernels.mhc import counterfactual, launch, mhc, verification  # noqa: E402
from kernels.mhc import faulty as mhc_faults  # noqa: E402
from kernels.mhc import golden as mhc_golden  # noqa: E402
from kernels.mhc.problem import Constants, Inputs, sample  # noqa: E402
from kernels.mhc.race import variants  # noqa: E402
from kernels.mhc.reductions import sums  # noqa: E402
from kernels.start_here import faulty as start_faults  # noqa: E402
from kernels.start_here import golden as start_golden  # noqa: E402
from kernels.start_here import kernel as start_kernel  # noqa: E402
from kernels.tinyllm import faulty as tensor_faults  # noqa: E402
from kernels.tinyllm import golden as tinyllm_golden  # noqa: E402
from kernels.tinyllm import tinyllm  # noqa: E402
from tools import llm_kernels as llm  # noqa: E402

Tensor = torch.Tensor
TRITON, CUDA, BLAS, TORCH = "Triton", "CUDA C++", "BLAS", "torch"
BOTH, CUDA_ALONE = "both", "cuda"
PLAIN, EAGER = whywrong.Precision(), whywrong.Precision(eager=True)
SPLIT = whywrong.Precision(products="tf32x3", flush=True)
"""Of a number near the smallest normal one, tensor cores lose the low part."""
FLUSHED = {"atomic_add": whywrong.Precision(flush=True)}
"""Adding to memory atomically flushes subnormal numbers to zero (PTX ISA, atom and red with .add.f32)."""
C = Constants()
LENGTHS = st.sampled_from([1, 2, 3, 5, 7, 8, 9, 16, 17, 31, 33, 37, 64, 65])
SEEDS = st.integers(0, 99)


class Case(NamedTuple):
    """A kernel, what it is held to, and, of a faulty one, the devices on which its fault exists and why not on both.

    `interpreted` is the most elements of its inputs where Triton's interpreter runs it, which takes some ms a program.
    """

    name: str
    language: str
    kernel: Callable[..., Any]
    reference: Callable[..., Any]
    inputs: Any
    precision: whywrong.Precision = PLAIN
    how: dict[str, Any] = {}  # noqa: RUF012
    faulty: bool = False
    exists: str = BOTH
    why: str = ""
    interpreted: int = 1 << 9

    @property
    def runs_here(self) -> bool:
        """Whether there is anything to see of it on this device."""
        return self.exists in (BOTH, DEVICE.kind)

    def fuzz(self, examples: int, seconds: float = float("inf"), most: int = 1 << 14) -> whywrong.FuzzReport:
        """On this device."""
        if isinstance(self.inputs, st.SearchStrategy):  # which has sizes of its own
            most = 1 << 14
        elif self.language == TRITON and not DEVICE.is_cuda:
            most = min(most, self.interpreted)
        how = {"most": most, "examples": examples, "seconds": seconds} | self.how
        return whywrong.fuzz(self.kernel, self.reference, there(self.inputs), precision=self.precision, **how)


def there(inputs):
    """The inputs on the device where kernels run."""
    if isinstance(inputs, st.SearchStrategy):
        return inputs.map(there)
    return {name: x.to(DEVICE.kind) if isinstance(x, Tensor) else x for name, x in inputs.items()}


def randn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def leaves(**given):
    return {name: x.detach().clone().requires_grad_(x.is_floating_point()) for name, x in given.items()}


def gradients(out, above, given):
    wanted = {name: x for name, x in given.items() if x.requires_grad}
    found = torch.autograd.grad(out, list(wanted.values()), above)
    return {"out": out.detach()} | {f"d {name}": x for name, x in zip(wanted, found, strict=True)}


# attention

QK = {"q": randn(2, 5, 7), "k": randn(2, 6, 7)}
QKV = QK | {"v": randn(2, 6, 7)}
ROWS = {"x": randn(3, 5, 7)}


def by_blas(call, q, k):
    inputs = problem.Inputs(*(x.cpu().contiguous().numpy() for x in (q, k, k)))
    return torch.from_numpy(np.array(attention_faults.scores(call, inputs, q.device.type))).to(q.device)


def pipeline(q, k, v):
    inputs = problem.Inputs(*(x.cpu().contiguous().numpy() for x in (q, k, v)))
    return attention.attention(inputs, q.device.type)["pv"].reshape(*q.shape[:2], v.shape[2])


def mixed(q, k, v):
    return attention_golden.steps(q, k, v)["pv"]


def product(q, k):
    return q @ k.mT


DIAGONAL = {"values": ["counting", "normal"]}
ATTENTION = [
    Case("scale", TRITON, elementwise.scale, lambda x, factor: x * factor, ROWS | {"factor": 0.125}),
    Case("softmax", TRITON, elementwise.softmax, lambda x: torch.softmax(x, -1), ROWS),
    Case("scores", TRITON, scores.scores, product, QK, SPLIT),
    Case("fused attention", TRITON, fused.attention, mixed, QKV, SPLIT),
    Case("attention's pipeline", TRITON, pipeline, mixed, QKV),
    Case("product by BLAS", BLAS, partial(by_blas, calls.Call()), product, QK),
    Case("product by BLAS in blocks", BLAS, partial(by_blas, calls.blocked(32)), product, QK),
] + [
    Case(f"product by BLAS: {name}", BLAS, partial(by_blas, call), product, QK, how=DIAGONAL, faulty=True)
    for name, call in calls.diagnosis(32).items()
]

# bert

TABLES = {"tokens": (7, "hidden"), "positions": (11, "hidden"), "kinds": (2, "hidden")}
TABLES |= {"gain": ("hidden",), "shift": ("hidden",)}
EMBED = {
    "ids": torch.tensor([[0, 6, 3], [1, 2, 5]]), "types": torch.tensor([[0, 1, 1], [0, 0, 1]]),
    "tokens": randn(7, 9), "positions": randn(11, 9), "kinds": randn(2, 9), "gain": randn(9), "shift": randn(9),
}  # fmt: skip
FIXED = {"ids": ("rows", 5), "types": ("rows", 5)} | TABLES
CLASSES_OF_11 = {"sizes": {"logits": ("n", 11)}}
LABELLED = {"logits": randn(6, 11), "labels": torch.tensor([0, 3, 9, 1, 2, 4])}


def embed(ids, types, tokens, positions, kinds, gain, shift):
    x = tokens[ids] + positions[: ids.shape[1]] + kinds[types]
    return torch.nn.functional.layer_norm(x, x.shape[-1:], gain, shift, 1e-12)


def embed_backward(of, above, **given):
    given = leaves(**given)
    return gradients(of(**given), above, given)


BERT = [
    Case("embedding", TRITON, embedding.embed, embed, EMBED, how={"sizes": FIXED}, interpreted=1 << 8),
    Case(
        "embedding's backward", TRITON, partial(embed_backward, embedding.embed), partial(embed_backward, embed),
        EMBED | {"above": randn(2, 3, 9)}, how={"sizes": FIXED | {"above": ("rows", 5, "hidden")}}, interpreted=1 << 8,
    ),
    Case("masked cross entropy", TORCH, cross_entropy, cross_entropy, LABELLED, EAGER, CLASSES_OF_11),
]  # fmt: skip

# mhc

STREAMS = {"x": randn(5, 4, 7), "y": randn(5, 7), "post": randn(5, 4), "p": randn(5, 4, 4)}
OF_STREAMS: dict[str, Any] = {"sizes": {"x": ("T", 4, "D"), "y": ("T", "D"), "post": ("T", 4), "p": ("T", 4, 4)}}
OF_STREAMS |= {"layouts": ["contiguous", "offset"]}  # inside the operator, which makes its operands contiguous
DECLARED = verification.DECLARED[torch.float32]
FLOAT_EPS = float(np.float32(C.hc_eps))


def connection(tokens, n, d, seed):
    found = sample(tokens, n, d, np.random.default_rng(seed))
    return {name: getattr(found, name) for name in Inputs.__dataclass_fields__}


def connected(x, phi, b, alpha, y, dout, dx_in):
    s = launch.forward(x, phi, b, alpha, C)
    dy, dpost, dp = launch.expand_backward(x, y, s["post"], dout)
    kept = {name: s[name] for name in mhc.SAVED}
    found = launch.backward(x, phi, b, alpha, kept, dx_in, dpost, dp, dout, C)
    return s | {"out": launch.expand(x, y, s["post"], s["p"]), "dy": dy, "dpost": dpost, "dp": dp} | found


def exact_connected(x, phi, b, alpha, y, dout, dx_in):
    s = mhc_golden.forward(x, phi, b, alpha, y, C)
    found = s | mhc_golden.backward(Inputs(x, phi, b, alpha, y, dout, dx_in), s, C)
    return {name: value for name, value in found.items() if name != "y"}


def expand(x, y, post, p):
    return launch.expand(x, y, post, p)


def twice(v):
    return 2 * v


def operator(x, phi, b, alpha, dout, **_):
    given = leaves(x=x, phi=phi, b=b, alpha=alpha)
    return gradients(mhc.hyper_connection(given["x"], twice, *list(given.values())[1:], C), dout, given)


def exact_operator(x, phi, b, alpha, dout, **_):
    given = leaves(x=x, phi=phi, b=b, alpha=alpha)
    return gradients(mhc_golden.forward(**given, y=twice, c=C)["out"], dout, given)


def pre_problem(tokens, d, seed):
    p = mhc_faults.Problem.sample(tokens, 4, d, seed, C, "cpu")
    return {name: getattr(p, name) for name in p.__dataclass_fields__ if name != "eps"}


def pre_backward(**given):
    return counterfactual.steps(mhc_faults.Problem(**given, eps=FLOAT_EPS))


def pre_backward_by_atomics(name, **given):
    p = mhc_faults.Problem(**given, eps=FLOAT_EPS)
    access = mhc_faults.rivals(*p.x.shape[1:]).get(name, mhc_faults.CORRECT_ACCESS)
    return {step.name: step.value for step in mhc_faults.backward(p, access) if step.name not in given}


def projection(name, x, phi):
    variant = variants.VARIANTS[name]
    run, out = variants.prepare_launch(variant, x.contiguous(), phi.contiguous())
    run()
    m, low = phi.shape[1], variant.padded
    return out[:, :m] + out[:, low : low + m]


def product(x, phi):
    return x @ phi


def projected(tokens, k, seed):
    return dict(zip(("x", "phi"), variants.random_inputs(tokens, k, 4, torch.bfloat16, seed, DEVICE.kind), strict=True))


def dot(a, b):
    return (a * b).sum().reshape(1)


CONNECTIONS = st.builds(connection, LENGTHS, st.sampled_from([1, 2, 4]), LENGTHS, SEEDS)
PROBLEMS = st.builds(pre_problem, LENGTHS, st.sampled_from([1, 2, 9, 17, 33, 65, 97, 129]), SEEDS)
PIPELINED = st.builds(projected, st.sampled_from([64, 1000, 16384]), st.sampled_from([512, 2048, 16384]), SEEDS)
RACE = {"precision": whywrong.Precision(products="bfloat16x2"), "exists": CUDA_ALONE}
RACE |= {
    "how": {"most": 1 << 26},
    "why": "the compiler's pipeline, which the interpreter has not; its bfloat16 products are wrong",
}
MHC = [
    Case("hyper-connection and its backward", TRITON, connected, exact_connected, CONNECTIONS, DECLARED),
    Case("hyper-connection by autograd", TRITON, operator, exact_operator, CONNECTIONS, DECLARED),
    Case("expand", TRITON, expand, mhc_golden.expand, STREAMS, how=OF_STREAMS),
    Case("pre backward by atomic additions", TRITON, partial(pre_backward_by_atomics, ""), pre_backward, PROBLEMS),
    Case("projection, guarded", TRITON, partial(projection, "guarded, 4 stages"), product, PIPELINED, **RACE),
    Case(
        "projection as it was", TRITON, partial(projection, variants.AS_IT_WAS), product, PIPELINED, faulty=True,
        **RACE,
    ),
] + [
    Case(f"pre backward: {name}", TRITON, partial(pre_backward_by_atomics, name), pre_backward, PROBLEMS, faulty=True)
    for name in mhc_faults.rivals(4, 64)
] + [
    Case(
        f"sum by {way}", TRITON, partial(sums.total, way), dot, {"a": randn(7), "b": randn(7)}, FLUSHED.get(way, PLAIN)
    )
    for way in sums.WAYS
]  # fmt: skip

# tinyllm


def batch(sequences, tokens, width, vocabulary, seed):
    rng = np.random.default_rng(seed)
    config = tinyllm.Config(vocabulary, tokens, 2 * width, 1, 2, sequences)
    ids = torch.from_numpy(rng.integers(0, vocabulary, (2, sequences, tokens)))
    weights = {name: torch.from_numpy(x) for name, x in tinyllm.initial(config, rng, 0.3).items()}
    return {"tokens": ids[0], "targets": ids[1]} | weights


def sizes_of(tokens, table, positions):
    return tinyllm.Config(*table.shape[:1], len(positions), table.shape[1], 1, 2, len(tokens))


def tinyllm_steps(engine, tokens, targets, **weights):
    config = sizes_of(tokens, weights["table"], weights["positions"])
    model = tinyllm.TinyLLM(config, DEVICE, engine)
    model.write({name: x.cpu().numpy() for name, x in weights.items()})
    trace = model.trace(tokens.cpu().numpy(), targets.cpu().numpy())
    model.close()
    return {step.name: torch.as_tensor(step.value).to(tokens.device) for step in trace}


def tinyllm_exact(tokens, targets, **weights):
    config = sizes_of(tokens, weights["table"], weights["positions"])
    return tinyllm_golden.everything(leaves(**weights), tokens, targets, config)


def there_and_back(tokens, targets, **weights):
    model = tinyllm.TinyLLM(sizes_of(tokens, weights["table"], weights["positions"]), DEVICE)
    model.write({name: x.cpu().numpy() for name, x in weights.items()})
    found = {f"back {name}": torch.as_tensor(x).to(tokens.device) for name, x in model.parameters().items()}
    model.close()
    return found


def as_they_were(tokens, targets, **weights):
    return {f"back {name}": x * 1.0 for name, x in weights.items()}


def faulty_round_trip(names, values, known):
    given = [x.cpu().contiguous().numpy() for x in (values, known)]
    host, back = tensor_faults.round_trip(names, *given, DEVICE)
    return {"host": torch.from_numpy(host).to(values.device), "back": torch.from_numpy(back).to(values.device)}


def copied(values, known):
    return {"host": values.flatten() * 1.0, "back": values * 1.0}


MATRICES = {"values": randn(5, 7), "known": randn(5, 7)}
LONGER = st.sampled_from([1, 2, 3, 5, 8, 9, 17])
BATCHES = st.builds(batch, st.sampled_from([1, 2, 3]), LONGER, LONGER, st.sampled_from([1, 2, 7, 11]), SEEDS)
TINYLLM = [
    Case(f"TinyLLM and its gradients by {engine}", CUDA, partial(tinyllm_steps, engine), tinyllm_exact, BATCHES)
    for engine in ("cublas", "kernel")
] + [
    Case("TinyLLM's Tensor, there and back", CUDA, there_and_back, as_they_were, BATCHES),
    Case("report's Tensor, no switch set", CUDA, partial(faulty_round_trip, ()), copied, MATRICES),
] + [
    Case(f"report's Tensor: {' and '.join(on)}", CUDA, partial(faulty_round_trip, on), copied, MATRICES, faulty=True)
    for on in (("resize_by_size",), ("size_in_elements",))
]  # fmt: skip

# lm


def norm(x, gain):
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain


def turned(x, cos, sin):
    cos, sin = (t.repeat_interleave(2, -1)[:, None] for t in (cos, sin))
    other = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    return x * cos + other * sin


def one_hot(ids, table):
    sizes = SimpleNamespace(vocabulary=table.shape[0], dim=table.shape[1])
    return torch.func.functional_call(lm.Embedding(sizes), {"table": table}, (ids, table.dtype))


def head(x, gain, table, labels):
    sizes = SimpleNamespace(vocabulary=table.shape[0], dim=table.shape[1], eps=1e-5)
    return torch.func.functional_call(lm.Head(sizes), {"norm": gain, "output": table}, (x, labels))


def losses(x, gain, table, labels):
    wide = norm(x, gain)
    logits = torch.log_softmax(wide @ table.T, -1)
    return -logits.gather(-1, labels[..., None])[..., 0]


LM = [
    Case("rms norm", TORCH, partial(lm.rms_norm, eps=1e-5), norm, {"x": randn(3, 7), "gain": randn(7)}, EAGER),
    Case(
        "rotary positions", TORCH, lm.rotated, turned,
        {"x": randn(2, 3, 4, 6), "cos": randn(3, 3), "sin": randn(3, 3)}, EAGER,
        {"sizes": {"x": ("b", "s", 4, 6), "cos": ("s", 3), "sin": ("s", 3)}},
    ),
    Case(
        "embedding by one-hot rows", TORCH, one_hot, lambda ids, table: table[ids],
        {"ids": torch.tensor([[0, 6, 3], [1, 2, 5]]), "table": randn(7, 5)}, EAGER, {"sizes": {"table": (7, "d")}},
    ),
    Case(
        "head and its losses", TORCH, head, losses,
        {"x": randn(2, 3, 5), "gain": randn(5), "table": randn(7, 5), "labels": torch.tensor([[0, 6, 3], [1, 2, 5]])},
        EAGER, {"sizes": {"table": (7, "d")}},
    ),
]  # fmt: skip

# start_here

RMS = {"x": randn(3, 40), "gain": randn(40)}
START = [Case("start_here's kernel", TRITON, start_kernel.probabilities, start_golden.probabilities, RMS)] + [
    Case(f"start_here: {name}", TRITON, start_faults.kernel(name), start_golden.probabilities, RMS, faulty=True)
    for name in start_faults.FAULTS
]

# compare

SYSTEMS = {name: systems.inputs(name, systems.SIZES[0], torch.Generator().manual_seed(0)) for name in systems.SYSTEMS}
CLASSES = {"cross_entropy": {"w": (116, "d")}}
PLANTED = {"refuses": (ValueError, IndexError)}  # at fixed places, which small inputs have not


class Given(np.random.Generator):
    """Draws orders and lost updates at random, and as its numbers those that it is given."""

    def __init__(self, terms):
        super().__init__(np.random.PCG64())
        self.terms = terms

    def standard_normal(self, *_args, **_kwargs):
        return self.terms


def of_terms(make, terms):
    return make(Given(terms.cpu().contiguous().numpy()))[0]().to(terms.device)


def planted_in(fault, **x):
    def at(name, value, steps):
        return fault.change(value, steps) if name == fault.step else value

    return systems.SYSTEMS[fault.system](at, **x)


TERMS = {"terms": randn(9, 7)}
COMPARE = [
    Case(f"{name} in torch", TORCH, run, run, SYSTEMS[name], EAGER, {"sizes": CLASSES.get(name)})
    for name, run in systems.SYSTEMS.items()
] + [
    Case(
        f"{fault.system}: {fault.name}", TORCH, partial(planted_in, fault), systems.SYSTEMS[fault.system],
        SYSTEMS[fault.system], EAGER, PLANTED | {"sizes": CLASSES.get(fault.system)}, faulty=True,
    )
    for fault in planted.FAULTS
] + [
    Case(f"sums: {name}", TORCH, partial(of_terms, make), lambda terms: terms.sum(0), TERMS, faulty=wrong)
    for name, make, wrong in (
        ("atomic additions", nondeterminism.atomic_additions, False),
        ("a lost update", nondeterminism.lost_update, True),
        ("an unwritten tail", nondeterminism.unwritten_tail, True),
    )
]  # fmt: skip

# kernels as a language model writes them

LLM = [
    Case(f"model's: {name}", TRITON, *case, how={"sizes": llm.SIZES.get(name)}, faulty=table is not llm.RIGHT)
    for table in (llm.RIGHT, llm.FAULTY, llm.STATEFUL)
    for name, case in table.items()
]

CASES = {case.name: case for case in (*ATTENTION, *BERT, *MHC, *TINYLLM, *LM, *START, *COMPARE, *LLM)}
COLUMNS = (
    "name", "kernel", "language", "fault_exists_on", "why_there", "device", "draws", "refused", "discarded", "seconds",
    "outcome", "as_expected", "words", "smallest_input", "cause",
)  # fmt: skip


def row(case: Case, outcome: str, **more: Any) -> dict[str, Any]:
    """One row; whether the outcome is as expected follows."""
    exists = case.exists if case.faulty else ""
    expected = outcome == (("falls" if case.faulty else "stands") if case.runs_here else "not run")
    kind = "faulty" if case.faulty else "right"
    found = {"name": case.name, "kernel": kind, "language": case.language, "fault_exists_on": exists}
    found |= {"why_there": case.why, "device": DEVICE.name, "outcome": outcome}
    return found | {"as_expected": "yes" if expected else "no"} | more


def result(case: Case, draws: int, seconds: float, explain: bool) -> dict[str, Any]:
    """The row of a case that is fuzzed here and now."""
    if not case.runs_here:
        return row(case, "not run", words=case.why)
    start = time.monotonic()
    try:
        found = case.fuzz(draws, seconds)
        if DEVICE.is_cuda:
            torch.cuda.synchronize()
    except Exception as why:
        words = f"{type(why).__name__}: {(str(why).splitlines() or [''])[0]}"
        return row(case, "fuzz failed", seconds=round(time.monotonic() - start, 1), words=words)
    counts = {"draws": found.examples, "refused": found.refused, "discarded": found.discarded}
    counts["seconds"] = round(time.monotonic() - start, 1)
    if found.failure is None:
        return row(case, "stands" if found.examples else "nothing was tried", **counts)
    cause = ""
    if explain and found.failure.localisation is not None:
        try:
            why = found.failure.explain(10.0)
            cause = "; ".join([why.verdict, *(one.says for one in why.causes[:3])])
        except Exception as error:
            cause = f"{type(error).__name__}: {error}"
    return row(case, "falls", **counts, words=found.failure.words, smallest_input=smallest(found), cause=cause)


def smallest(found: whywrong.FuzzReport) -> str:
    """The text that makes each input of the failure; of what a strategy sampled, its shape."""
    texts = [f"{name}: {made}" for name, made in found.made.items()]
    shapes = (line.strip() for line in repr(found.failure).splitlines()[1:])
    return "; ".join([*texts, *(line for line in shapes if line.partition(":")[0] not in map(str, found.made))])


def worker(draws: int, seconds: float, explain: bool) -> None:
    """Answer each name on standard input with its row on standard output, where no kernel may print."""
    answers, sys.stdout = sys.stdout, sys.stderr
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        found = result(CASES[json.loads(line)], draws, seconds, explain)
        last = found["outcome"] == "fuzz failed" or "CUDA" in found.get("words", "") + found.get("cause", "")
        print(json.dumps([found, last]), file=answers, flush=True)
        if last:
            os._exit(0)  # what a ruined context would do to the next case is not that case's fault


def manage(
    names: "queue.Queue[str]", command: list[str], limit: float, write: Callable[[dict[str, Any]], None]
) -> None:
    """Hand names to a process, which is begun again whenever it has ended."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    process = None
    while not names.empty():
        with suppress(queue.Empty):
            name = names.get_nowait()
            if process is None:
                process = subprocess.Popen(command, **pipes)
                process.stdout.readline()  # imports take as long as they take
            start = time.monotonic()
            late = threading.Timer(limit, process.kill)
            late.start()
            process.stdin.write(json.dumps(name) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
            late.cancel()
            found, last = json.loads(answer) if answer else ({}, True)
            if last:
                process.wait()
            over = time.monotonic() - start >= limit
            died = f"stopped after {limit:.0f} s" if over else f"the process ended with {process.returncode}"
            write(found or row(CASES[name], "fuzz failed", words=died))
            process = None if last else process
    if process is not None:
        process.stdin.close()
        process.wait()


def main() -> int:
    """Fuzz the cases that are asked for; 1 if an outcome is not as expected."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--draws", type=int, default=50)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="NAME")
    parser.add_argument("--explain", action="store_true")
    parser.add_argument("--worker", action="store_true")
    given = parser.parse_args()
    if given.worker:
        worker(given.draws, given.seconds, given.explain)
        return 0
    names: queue.Queue[str] = queue.Queue()
    for name in given.only:
        names.put(name)
    command = [
        sys.executable,
        "-m",
        "tools.fuzz_kernels",
        "--worker",
        "--device",
        DEVICE.kind,
        "--draws",
        str(given.draws),
    ]
    command += ["--seconds", str(given.seconds), *["--explain"] * given.explain]
    os.environ |= {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    unexpected: list[str] = []
    lock = threading.Lock()
    with given.out.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        table.writeheader()

        def write(found: dict[str, Any]) -> None:
            with lock:
                table.writerow(found)
                file.flush()
                if found["as_expected"] == "no":
                    unexpected.append(found["name"])
                    print(f"{found['name']}: {found['outcome']}: {found.get('words', '')}", flush=True)

        limit = 3 * given.seconds + 120
        managers = [threading.Thread(target=manage, args=(names, command, limit, write)) for _ in range(given.jobs)]
        for manager in managers:
            manager.start()
        for manager in managers:
            manager.join()
    return int(bool(unexpected))


if __name__ == "__main__":
    sys.exit(main())
