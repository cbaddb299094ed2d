"""The report's program with any set of faults in its Tensor, run for real, and which of its observations each shows."""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from kernels.native import build
from kernels.tinyllm import golden
from kernels.tinyllm.tinyllm import ENGINES, FOLDER, HOST, Config, initial
from labkit.session.device import Device
from whywrong import Precision, bounded
from whywrong.errors import UsageError

Array = np.ndarray
SWITCHES = {
    "size_in_elements": "`size` counts elements, where every use of it counts bytes",
    "resize_by_size": "d2h: h_data.resize(size), the suspected line",
    "h2d_by_host_size": "h2d uploads h_data.size() * sizeof(float) bytes instead of `size`",
    "constructor_by_host_size": "the copy constructor uploads h_data.size() * sizeof(float) bytes instead of `size`",
    "assignment_by_host_size": "the assignment uploads h_data.size() * sizeof(float) bytes instead of `size`",
    "constructor_omits_shape": "the copy constructor allocates before it takes the shape and `size`",
    "assignment_omits_shape": "the assignment allocates before it takes the shape and `size`",
    "shallow_constructor": "the copy constructor takes the other's device buffer: two owners",
    "shallow_assignment": "the assignment takes the other's device buffer: two owners",
    "no_layer_d2h": "a layer's result is not downloaded before it is returned",
    "no_other_d2h": "the embedding and the logits are not downloaded before they are returned",
    "prefer_host": "copies upload the host vector where there is one, else they copy the device buffer",
    "zero_host": "the constructor fills the host vector with zeros",
    "unchecked": "what CUDA calls return is not looked at",
}
"""Switches of two values, in the order of faulty::Switches. With none of them set the program is right."""
NAMES = list(SWITCHES)
PRINTED = ("resize_by_size", "prefer_host", "unchecked")
"""What the report's code does, as far as it is printed: the suspected line, uploads first, no call checked."""
WAYS = ("by value, copied", "by value, elided", "out-parameter", "shared_ptr")
MEMORY = ("NaN", "zeros", "the report's numbers", "as left")
"""What memory holds before anything is written to it. The report's two numbers stand in buffers of x's size, with zeros
in all others; "as left" is real memory: zeros, as a new process finds them, and then what the program left there."""
OUTSIDE = (
    "none",
    "d2h downloads half of the bytes",
    "the debug print uploads the host vector",
    "the move of heads writes nothing",
    "device to device copies run backwards",
    "the last layer's result is not assigned",
    "the head's product is given a buffer of zeros",
    "cuBLAS's products write nothing",
    "h2d starts one element late",
    "the norm before the head is left out",
)
"""Faults that are none of the switches, in the order of faulty::Outside."""
COLUMNS = (*NAMES, "way", "outside", "engine", "memory")
OBSERVATIONS = ("ff_out right", "trace", "x near 1e-32", "logits all 0", "only <pad>")
"""What the report saw of one run, in the order of the program; the loss is another matter."""
DEBUG_PRINTS = {
    "a fixed number": "ff_out and x",
    "h_data.size() of x": "x; of ff_out a fixed number",
    "h_data.size(), ff_out before d2h()": "both",
    "h_data.size(), ff_out after d2h()": "both",
}
"""How many numbers a debug print copies from the device, and of which tensors; the report does not show its prints."""
_COUNTS = (
    "ff_failed",
    "x_failed",
    "ff_right",
    "x_right",
    "host_size",
    "host_right",
    "host_zero",
    "x_zero",
    "x_nan",
    "logits_read",
    "logits_right",
    "logits_zero",
    "logits_nan",
    "predicted",
    "embedded_host",
    "ff_host",
    "x_host",
    "logits_host",
    "logits_made",
    "logits_there",
)
OUTCOME = np.dtype(
    [(name, np.int32) for name in ("status", "failed_calls", "failed_uploads", "failed_h2d", "first_error", "traces")]
    + [("traced_bytes", np.int64)]
    + [(name, np.int32) for name in _COUNTS]
    + [("ff_first", np.float32, 3), ("x", np.float32, 2)]
    + [(name, np.float32) for name in ("logits_low", "logits_high", "loss")]
    + [("ff_before", np.float32, 3), ("ff_after", np.float32, 3), ("x_by_length", np.float32, 2)],
    align=True,
)
"""faulty::Outcome."""
FINISHED, REPORTED, ILLEGAL, THREW, LOST, UNSTEADY = range(6)
ENDS = (
    "runs to its end",
    "a checked call stops it",
    "a kernel is given no memory",
    "an exception",
    "the process dies",
    "otherwise when run again",
)
"""How a program ends. One whose second run differs has no outcome. On a GPU there are such: those seen so far write
beyond their buffers. On the host runtime every run is as in a new process; there a test changes what lies beside the
buffers, which changes how such programs end, and no other."""
STOPS = (REPORTED, ILLEGAL, THREW, LOST)


@dataclass(frozen=True)
class Program:
    """The report's program: two tokens, uniform weights, and the golden of what it prints with its bounds."""

    config: Config
    weights: dict[str, Array]
    ids: Array
    golden: dict[str, Array]
    allowed: dict[str, Array]
    idle: dict[Device, list[subprocess.Popen[str]]] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Processes that have this program and wait for sets of switches: on a GPU, starting one takes seconds."""

    @property
    def elements(self) -> int:
        """Of x and of ff_out."""
        return len(self.ids) * self.config.width

    @property
    def logits(self) -> int:
        """Elements of the logits."""
        return len(self.ids) * self.config.vocabulary


def prepare(device: Device) -> None:
    """Begin to build what the notebook needs, both libraries at a time; who needs one waits for it in :func:`build`."""
    pool = ThreadPoolExecutor(2)
    for name in ("faulty.cu", "api.cu"):
        pool.submit(build, FOLDER / name, HOST, device)


def program(
    scale: float, rng: np.random.Generator, width: int = 256, vocabulary: int = 128, tokens: int = 2
) -> Program:
    """Weights uniform in +-scale, no biases, as the report's."""
    config = Config(vocabulary=vocabulary, context=tokens, width=width, layers=3, heads=4, sequences=1)
    config.check()
    weights = initial(config, rng)
    for name, value in weights.items():
        if value.ndim == 2:
            weights[name] = rng.uniform(-scale, scale, value.shape).astype(np.float32)
    ids = rng.integers(1, vocabulary, tokens).astype(np.int32)
    trace = bounded(golden.reference(weights, ids[None], ids[None], config, gradients=False), precision=Precision())
    shown = {"ff_out": "L0.out", "x": "L2.out", "logits": "logits"}
    exact = {name: np.asarray(trace[step]).reshape(-1) for name, step in shown.items()}
    bounds = {name: np.asarray(trace.step(step).bound.absolute).reshape(-1) for name, step in shown.items()}
    return Program(config, weights, ids, exact, bounds)


def row(*names: str, way: int = 0, outside: int = 0, engine: str = "cublas", memory: str = "zeros") -> Array:
    """One program, int32 [18]: these switches are set. Raises UsageError for a switch that there is not."""
    for name in names:
        if name not in SWITCHES:
            raise UsageError(f"switch: expected one of {', '.join(SWITCHES)}, got {name!r}")
    return np.array([*(name in names for name in NAMES), way, outside, ENGINES[engine], MEMORY.index(memory)], np.int32)


def canonical(bits: Array) -> Array:
    """The same programs [n, 14] without the switches that change nothing beside the others.

    Uploads by the host vector's size differ from others only where that size can be wrong, and those in copies only
    where copies upload; where the device buffer is shared, nothing is allocated.
    """
    bits, at = np.array(bits, np.int32), NAMES.index
    wrong_size = bits[:, at("size_in_elements")] | bits[:, at("resize_by_size")]
    for name in ("h2d", "constructor", "assignment"):
        bits[:, at(f"{name}_by_host_size")] &= wrong_size
    for name in ("constructor", "assignment"):
        bits[:, at(f"{name}_by_host_size")] &= bits[:, at("prefer_host")]
        bits[:, at(f"{name}_omits_shape")] &= 1 - bits[:, at(f"shallow_{name}")]
    return bits


def sets() -> Array:
    """Every set of switches that differs from all others, int32 [n, 14], without constructor_omits_shape.

    That one gives the first layer no memory, whatever else is set: see :func:`printed`.
    """
    free = [(0,) if name == "constructor_omits_shape" else (0, 1) for name in NAMES]
    return np.unique(canonical(np.array(list(itertools.product(*free)))), axis=0)


def code(bits: Array) -> Array:
    """A number for each set, which identifies it; :func:`sets` are sorted by it."""
    return canonical(bits) @ (1 << np.arange(len(NAMES))[::-1])


def switches_of(bits: Array) -> frozenset[str]:
    """The switches of one set."""
    return frozenset(name for name, on in zip(NAMES, bits, strict=True) if on)


def in_words(names: Iterable[str]) -> str:
    """A set in words."""
    return " + ".join(sorted(names)) or "no fault"


def run(p: Program, rows: Array, device: Device, processes: int | None = None) -> Array:
    """An outcome [OUTCOME] for each program, in so many processes; one that dies is begun again after it.

    None: on a CPU 2 to 8, as many as torch has threads; on a GPU one, since a GPU runs the kernels of one process at a
    time (1536 programs take 1.5 s in one process, 3.3 s in eight). Those that live wait for the next call, which takes
    them up.
    """
    processes = processes or (1 if device.is_cuda else min(8, max(2, torch.get_num_threads())))
    parts = np.array_split(np.asarray(rows, np.int32), max(1, min(processes, len(rows))))
    with tempfile.TemporaryDirectory() as folder:
        workers = [_Worker(Path(folder) / str(i), p, part, device) for i, part in enumerate(parts)]
        while sum(worker.advance() for worker in workers) < len(workers):  # each of them is to advance
            time.sleep(0.01)
        return np.concatenate([worker.outcomes() for worker in workers])


@dataclass(frozen=True)
class Sweep:
    """Every set of switches in each kind of memory, results returned by value with a copy.

    `bits` is [sets, 14], `outcomes[memory]` [sets].
    """

    p: Program
    bits: Array
    outcomes: Mapping[str, Array]

    def at(self, bits: Array) -> Array:
        """Where these sets stand."""
        return np.searchsorted(code(self.bits), code(bits))


def sweep(p: Program, device: Device, others: Array) -> tuple[Sweep, Array]:
    """Every set in each kind of memory, with its calls unchecked and checked; and the outcomes of `others`, programs.

    Only unchecked programs are run. A checked one is the same up to the first call that fails, which stops it. On a
    GPU all are run twice, the second time in the reverse order.
    """
    bits = sets()
    unchecked = bits[bits[:, -1] == 1]
    rows = [np.pad(unchecked, ((0, 0), (0, 4))) for _ in MEMORY]
    for i, part in enumerate(rows):
        part[:, COLUMNS.index("memory")] = i
    every = np.concatenate([*rows, others])
    run_once = run(p, every, device)
    if device.is_cuda:
        run_once = steady(run_once, run(p, every[::-1], device)[::-1])
    at = np.searchsorted(code(unchecked), code(np.column_stack([bits[:, :-1], np.ones(len(bits), int)])))
    outcomes = {}
    for i, memory in enumerate(MEMORY):
        o = outcomes[memory] = run_once[i * len(unchecked) : (i + 1) * len(unchecked)][at]
        stopped = (bits[:, -1] == 0) & (o["failed_calls"] > 0) & (o["status"] != UNSTEADY)
        o["status"] = np.where(stopped, REPORTED, o["status"])
    return Sweep(p, bits, outcomes), run_once[len(MEMORY) * len(unchecked) :]


def steady(first: Array, again: Array) -> Array:
    """The first outcomes [OUTCOME]; where the second ones differ the status is UNSTEADY."""
    differs = np.zeros(len(first), bool)
    for name in first.dtype.names or ():
        a, b = (o[name].reshape(len(o), -1) for o in (first, again))
        differs |= ~((a == b) | ((a != a) & (b != b))).all(1)
    outcomes = first.copy()
    outcomes["status"][differs] = UNSTEADY
    return outcomes


def _request(p: Program, device: Device) -> dict[str, object]:
    """What worker.py reads."""
    c = p.config
    layers = (f"L{i}.{n}.w" for i in range(c.layers) for n in ("qkv", "o", "up", "down"))
    flat = [p.weights[name].reshape(-1) for name in ("table", "positions", *layers, "head.w")]
    return {
        "library": str(build(FOLDER / "faulty.cu", HOST, device)),
        "on_host": not device.is_cuda,
        "outcome_size": OUTCOME.itemsize,
        "ids": p.ids,
        "weights": np.concatenate(flat),
        "golden": np.concatenate(list(p.golden.values())).astype(np.float32),
        "allowed": np.concatenate(list(p.allowed.values())).astype(np.float32),
        "sizes": np.array([len(p.ids), c.vocabulary, c.width, c.heads]),
    }


def round_trip(
    names: Sequence[str], values: Array, known: Array, device: Device, source: Path = FOLDER / "faulty.cu"
) -> tuple[Array, Array]:
    """The printed d2h and h2d alone, with these switches: the host vector after d2h, the device's values after h2d.

    `values` are on the device before d2h, `known` before h2d; both float32 [rows, columns].
    """
    library = ctypes.CDLL(str(build(source, HOST, device)))
    switches, host, back = row(*names), np.full(8 * values.size, np.nan, np.float32), np.full_like(values, np.nan)
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in (switches, values, known, host, back)]
    room = ctypes.c_size_t(host.size)
    length = library.faulty_round_trip(pointers[0], *values.shape, *pointers[1:4], room, pointers[4])
    return host[:length], back


def _sanitizer() -> str:
    program = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if not program:
        raise UsageError("compute-sanitizer: not on the PATH; expected the CUDA toolkit's")
    return program


def sanitized(p: Program, row: Array, device: Device, tool: str, *options: str) -> tuple[int, list[str]]:
    """Errors that compute-sanitizer's `tool` counts in one run (-1: none counted), and the lines that name them.

    Raises UsageError where it is not installed.
    """
    device.needs_cuda("compute-sanitizer", "the host runtime has guards of its own")
    program = _sanitizer()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "0"
        command = [program, "--tool", tool, *options, *_command(p, device, out)]
        done = subprocess.run(command, input=_task(row[None], out), capture_output=True, text=True, check=False)
    lines = [line.removeprefix("=========").strip() for line in done.stdout.splitlines() if line.startswith("=====")]
    summary = next((line for line in lines if "SUMMARY" in line and "not printed" not in line), "")
    count = [int(word) for word in summary.split() if word.isdigit()]
    reports = [line for line in lines if any(word in line for word in ("Invalid", "Uninit", "error", "Leaked", "hit "))]
    return (count[0] if count else -1), [*dict.fromkeys(reports), summary][:8]


def _command(p: Program, device: Device, out: Path) -> list[str]:
    """What starts a process of worker.py with this program."""
    program = out.with_suffix(".program.npz")
    np.savez(program, **_request(p, device))  # type: ignore[arg-type]
    return [sys.executable, str(FOLDER / "worker.py"), str(program)]


def _task(rows: Array, out: Path) -> str:
    """The line that has worker.py run these programs and add their outcomes to `out`."""
    switches = out.with_suffix(".npy")
    np.save(switches, rows)
    return json.dumps([str(switches), str(out)]) + "\n"


class _Worker:
    """Rows of one worker process, another one after each row that it did not survive."""

    def __init__(self, out: Path, p: Program, rows: Array, device: Device) -> None:
        self.out, self.p, self.rows, self.device = out, p, rows, device
        self.idle = p.idle.setdefault(device, [])
        self.out.touch()
        self.process: subprocess.Popen[str] | None = None
        self.finished = False

    def done(self) -> int:
        return self.out.stat().st_size // OUTCOME.itemsize

    def advance(self) -> bool:
        """Begin, or begin again, if need be. True once every row has its outcome."""
        if self.process and not self.finished:
            status = self.process.poll()
            if self.out.stat().st_size > len(self.rows) * OUTCOME.itemsize:  # it says so, and waits for more
                self.idle.append(self.process)
            elif status is None:
                return False
            elif status == 2:
                text = self.process.communicate()[1]
                raise RuntimeError(f"the program under investigation could not start: {text.strip()}")
            elif status != 3:  # died within a row
                lost = np.zeros(1, OUTCOME)
                lost["status"] = LOST
                with self.out.open("ab") as file:
                    file.write(lost.tobytes())
        if self.done() >= len(self.rows):
            self.finished = True
        else:
            self.begin()
        return self.finished

    def begin(self) -> None:
        """Give what is left to a process that waits, or to a new one."""
        waiting = [process for process in self.idle if process.poll() is None]
        self.idle[:] = waiting[1:]
        self.process = waiting[0] if waiting else self.started()
        assert self.process.stdin
        print(_task(self.rows[self.done() :], self.out), end="", file=self.process.stdin, flush=True)

    def started(self) -> subprocess.Popen[str]:
        environment, pipe = os.environ | {"OMP_NUM_THREADS": "1"}, subprocess.PIPE
        command = _command(self.p, self.device, self.out)
        return subprocess.Popen(command, stdin=pipe, stderr=pipe, text=True, env=environment)

    def outcomes(self) -> Array:
        return np.fromfile(self.out, OUTCOME, len(self.rows))


def observations(o: Array, p: Program, debug_print: str = "a fixed number") -> dict[str, Array]:
    """Which of the report's observations each outcome [n] shows, bool [n] each, with one of :data:`DEBUG_PRINTS`.

    The trace is of as many bytes as x has: 2048 in the report, and here with its sizes. Of x the report printed two
    numbers; near 1e-32 is not 0 and below 1e-28. It does not say which layer's ff_out it printed; the first's is taken:
    all of it must be right, or the three numbers that a print by the host vector's length shows. A program whose second
    run differs shows nothing.
    """
    n, ran = p.elements, o["status"] == FINISHED
    x = o["x" if debug_print == "a fixed number" else "x_by_length"]
    right_ff_out = (o["ff_right"] == n) & (o["ff_failed"] == 0)
    if "ff_out" in debug_print:
        three = o["ff_before" if "before" in debug_print else "ff_after"]
        right_ff_out = (np.abs(three - p.golden["ff_out"][:3]) <= p.allowed["ff_out"][:3]).all(-1)
    seen = {
        "ff_out right": right_ff_out,
        "trace": (o["traces"] > 0) & (o["traced_bytes"] == 4 * n),
        "x near 1e-32": ran & ((x != 0) & (np.abs(x) < 1e-28)).all(-1),
        "logits all 0": ran & (o["logits_read"] == p.logits) & (o["logits_zero"] == p.logits),
        "only <pad>": ran & (o["predicted"] == 0),
    }
    return {name: shown & (o["status"] != UNSTEADY) for name, shown in seen.items()}


def right(o: Array, p: Program) -> Array:
    """Whether an outcome is that of a correct program: it ends, and x and the logits are within their bounds."""
    return (o["status"] == FINISHED) & (o["x_right"] == p.elements) & (o["logits_right"] == p.logits)


def minimal(bits: Array, shows: Array) -> list[frozenset[str]]:
    """The smallest sets of switches that show it: none of their subsets does."""
    smallest: list[frozenset[str]] = []
    for names in sorted((switches_of(row) for row in bits[shows]), key=lambda names: (len(names), sorted(names))):
        if not any(smaller <= names for smaller in smallest):
            smallest.append(names)
    return smallest


def corrected(bits: Array) -> Array:
    """These sets with the report's correction: the host vector has the right length, in d2h and in h2d.

    resize_by_size is right where `size` counts elements, and wrong where it counts bytes.
    """
    fixed = np.array(bits)
    fixed[:, NAMES.index("resize_by_size")] = fixed[:, NAMES.index("size_in_elements")]
    fixed[:, NAMES.index("h2d_by_host_size")] = 0
    return canonical(fixed)


def without(bits: Array, name: str) -> Array:
    """These sets with one switch put right."""
    fixed = np.array(bits)
    fixed[:, NAMES.index(name)] = 0
    return canonical(fixed)


def leak_check(device: Device) -> list[str]:
    """compute-sanitizer's leak check of the right Tensor: a thousand of them made, copied and moved."""
    device.needs_cuda("compute-sanitizer", "the host runtime counts what is live")
    code = (
        "import ctypes, sys; l = ctypes.CDLL(sys.argv[1]); l.tinyllm_tensor_scenario.restype = ctypes.c_char_p; "
        "print(l.tinyllm_tensor_scenario(b'thousand').decode()); l.tinyllm_reset()"
    )
    program = _sanitizer()
    library = str(build(FOLDER / "api.cu", HOST, device))
    command = [program, "--tool", "memcheck", "--leak-check", "full", sys.executable, "-c", code, library]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return [line.removeprefix("=========").strip() for line in done.stdout.splitlines() if "COMPUTE" not in line][-4:]


def fresh_memory(device: Device, sizes: Sequence[int] = (2048, 1 << 20, 1 << 28)) -> list[str]:
    """What a new process finds in memory that it was just given: zeros, or what was there before."""
    library = str(build(FOLDER / "faulty.cu", HOST, device))
    code = (
        "import ctypes, sys, numpy as np; l = ctypes.CDLL(sys.argv[1])\n"
        "def look(size, when):\n"
        "    a = np.full(size // 4, 7.0, np.float32)\n"
        "    l.faulty_fresh(ctypes.c_void_p(a.ctypes.data), ctypes.c_size_t(a.size))\n"
        "    print(f'{size} bytes, {when}: {int((a == 0).sum())} of {a.size} floats are zero')\n"
        "for size in map(int, sys.argv[2:]):\n"
        "    look(size, 'the first')\n"
        "    for keep, when in ((0, 'after others, all freed'), (1, 'after others, a buffer still held')):\n"
        "        l.faulty_fill(ctypes.c_size_t(size), 1, 63, keep)\n"
        "        look(size, when)\n"
        "    l.faulty_fill(ctypes.c_size_t(size), 1, 63, 0)\n"
    )
    command = [sys.executable, "-c", code, library, *map(str, sizes)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
