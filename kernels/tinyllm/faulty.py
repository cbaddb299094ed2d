"""Every set of the report's possible faults, run for real, and which of its observations each reproduces."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from kernels.tinyllm import golden
from kernels.tinyllm.tinyllm import ENGINES, FOLDER, HOST, Config, initial
from labkit import Precision, bounded
from labkit.bench.native import build
from labkit.errors import UsageError
from labkit.session.device import Device

Array = np.ndarray
SWITCHES = {
    "size_in_elements": "`size` counts elements where its uses count bytes",
    "resize_by_size": "d2h: h_data.resize(size), the accused line",
    "h2d_by_host_size": "h2d copies h_data.size() * 4 bytes",
    "copy_by_host_size": "copies upload h_data.size() * 4 bytes",
    "constructor_omits": "the copy constructor allocates before it knows the size",
    "assignment_omits": "the assignment allocates before it knows the size",
    "no_d2h": "a layer does not d2h its result before the return",
    "layers_only": "only layers do: embedding and logits leave without d2h",
    "prefer_host": "copies take the host's data first",
    "zero_host": "the host vector starts as zeros",
    "unchecked": "CUDA errors are not looked at",
}
"""Two-valued switches, in the order of faulty::Switches, which has `way` after them. None of them set is right."""
WAYS = ("by value, copied", "by value, elided", "out-parameter", "shared_ptr")
MIXED = "the report's numbers in x, zeros elsewhere"
FRESH = {"NaN": 0, "zeros": 1, "the report's numbers": 2, MIXED: 3}
"""What memory that nobody wrote holds, on the host runtime: of each buffer that is given out. On a GPU (all but the
last of them) it is written before each run where the run's buffers will lie; what a run itself leaves there stays."""
FILLED = {"NaN": (np.nan, np.nan), "zeros": (0.0, 0.0), "the report's numbers": (6.16847e-33, 1.60859e-32)}
BLOCKS = 12
"""Filled on a GPU, of the largest size and again of the least: more than a run ever holds."""
_COUNTS = (
    "ff_failed", "x_failed", "ff_right", "x_right", "host_size", "host_zero", "x_zero", "x_nan",
    "logits_read", "logits_right", "logits_zero", "logits_nan", "strays", "predicted",
)  # fmt: skip
OUTCOME = np.dtype(
    [(name, np.int32) for name in ("status", "failed_calls", "first_error", "traces")]
    + [("traced_bytes", np.int64)]
    + [(name, np.int32) for name in _COUNTS]
    + [(name, np.float32, 2) for name in ("ff_first", "ff_last", "x")]
    + [(name, np.float32) for name in ("logits_low", "logits_high", "loss")],
    align=True,
)
"""faulty::Outcome."""
FINISHED, REPORTED, ILLEGAL, THREW, LOST = range(5)


@dataclass(frozen=True)
class Program:
    """The report's program: two tokens, uniform weights, and the golden of what it prints with its bounds."""

    config: Config
    weights: dict[str, Array]
    ids: Array
    golden: dict[str, Array]
    allowed: dict[str, Array]

    @property
    def elements(self) -> int:
        """Of x and of ff_out."""
        return len(self.ids) * self.config.width

    @property
    def logits(self) -> int:
        """Elements of the logits."""
        return len(self.ids) * self.config.vocabulary


def prepare(device: Device) -> None:
    """Build what the notebook needs, both libraries at a time; nothing is done where they are built."""
    with ThreadPoolExecutor(2) as pool:
        for made in [pool.submit(build, FOLDER / name, HOST, device) for name in ("api.cu", "faulty.cu")]:
            made.result()


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
    trace = bounded(golden.reference(weights, ids[None], ids[None], config), Precision())
    shown = {"ff_out": "L0.out", "x": "L2.out", "logits": "logits"}
    exact = {name: np.asarray(trace[step]).reshape(-1) for name, step in shown.items()}
    bounds = {name: np.asarray(trace.step(step).bound.absolute).reshape(-1) for name, step in shown.items()}
    return Program(config, weights, ids, exact, bounds)


def combinations(ways: Sequence[int] = (0, 1, 2, 3)) -> Array:
    """Every set of switches, int32 [sets, 12], the last column the way."""
    return np.array([(*row, way) for way in ways for row in itertools.product((0, 1), repeat=len(SWITCHES))], np.int32)


def switches(*names: str, way: int = 0) -> Array:
    """One row, with these set. Raises UsageError for another name."""
    for name in names:
        if name not in SWITCHES:
            raise UsageError(f"switch: {name!r} is not right; wanted one of {', '.join(SWITCHES)}")
    return np.array([*(int(name in names) for name in SWITCHES), way], np.int32)


def worlds(device: Device) -> tuple[str, ...]:
    """What memory that nobody wrote is made to hold here, one kind at a time; the last is nearest to the report."""
    return tuple(FILLED) if device.is_cuda else ("NaN", "zeros", MIXED)


def run(
    p: Program, rows: Array, device: Device, *, engine: str = "cublas", fresh: str | None = None,
    no_launch: bool = False, jobs: int = 2,
) -> Array:  # fmt: skip
    """An outcome [OUTCOME] for each row of switches, in processes of their own; one that dies is begun again after it.

    `no_launch`: kernels are built for another GPU (sm_75), so that none ever runs. `fresh` is the last of worlds() by
    default. `strays` of an outcome counts buffers that lay where a GPU's memory had not been filled.

    Raises UsageError for a `fresh` that the device cannot have.
    """
    fresh, known = fresh or worlds(device)[-1], FILLED if device.is_cuda else FRESH
    if fresh not in known:
        raise UsageError(f"fresh: {fresh!r} is not right; wanted one of {', '.join(known)}")
    request = _request(p, device, engine, fresh, no_launch)
    parts = np.array_split(np.asarray(rows, np.int32), max(1, min(jobs, len(rows))))
    with tempfile.TemporaryDirectory() as folder:
        tasks = [_Task(Path(folder), i, request | {"switches": part}) for i, part in enumerate(parts)]
        while sum(task.advance() for task in tasks) < len(tasks):  # each of them is to advance
            next(task for task in tasks if not task.finished).wait()
        return np.concatenate([task.outcomes() for task in tasks])


def foreign(capability: tuple[int, int]) -> str:
    """An architecture whose machine code no GPU of this compute capability can run: code keeps to its major number."""
    return "sm_80" if capability[0] == 7 else "sm_75"


def _request(p: Program, device: Device, engine: str, fresh: str, no_launch: bool) -> dict[str, object]:
    """What worker.py reads."""
    elsewhere = foreign(torch.cuda.get_device_capability()) if no_launch and device.is_cuda else None
    library = build(FOLDER / "faulty.cu", HOST, device, elsewhere)
    c = p.config
    layers = (f"L{i}.{n}.w" for i in range(c.layers) for n in ("qkv", "o", "up", "down"))
    flat = [p.weights[name].reshape(-1) for name in ("table", "positions", *layers, "head.w")]
    return {
        "library": str(library), "on_host": not device.is_cuda, "fresh": FRESH[fresh], "no_launch": no_launch,
        "ids": p.ids, "weights": np.concatenate(flat),
        "golden": np.concatenate(list(p.golden.values())).astype(np.float32),
        "allowed": np.concatenate(list(p.allowed.values())).astype(np.float32),
        "sizes": np.array([len(p.ids), c.vocabulary, c.width, c.heads]), "engine": ENGINES[engine],
        "filled_blocks": BLOCKS if device.is_cuda else 0, "filled_with": np.array(FILLED.get(fresh, (0.0, 0.0))),
    }  # fmt: skip


def _sanitizer() -> str:
    found = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if not found:
        raise UsageError("compute-sanitizer: not on the PATH; wanted the CUDA toolkit's")
    return found


def sanitized(p: Program, row: Array, device: Device, tool: str, *options: str) -> tuple[int, list[str]]:
    """Errors that compute-sanitizer's `tool` counts in one run (-1: none counted), and the lines that name them.

    Raises UsageError where it is not installed.
    """
    device.needs_cuda("compute-sanitizer", "the host runtime has guards of its own")
    program = _sanitizer()
    with tempfile.TemporaryDirectory() as folder:
        request, out = Path(folder) / "request.npz", Path(folder) / "out.raw"
        asked = _request(p, device, "kernel", worlds(device)[-1], False) | {"switches": row[None], "filled_blocks": 0}
        np.savez(request, **asked)  # type: ignore[arg-type]
        worker = [sys.executable, str(FOLDER / "worker.py"), str(request), str(out), "0"]
        done = subprocess.run([program, "--tool", tool, *options, *worker], capture_output=True, text=True, check=False)
    lines = [line.removeprefix("=========").strip() for line in done.stdout.splitlines() if line.startswith("=====")]
    summary = next((line for line in lines if "SUMMARY" in line and "not printed" not in line), "")
    count = [int(word) for word in summary.split() if word.isdigit()]
    told = [line for line in lines if any(word in line for word in ("Invalid", "Uninit", "error", "Leaked", "hit "))]
    return (count[0] if count else -1), [*dict.fromkeys(told), summary][:8]


class _Task:
    """Rows of one worker, which is begun again after each row that it did not survive."""

    def __init__(self, folder: Path, index: int, request: Mapping[str, object]) -> None:
        self.rows = len(request["switches"])  # type: ignore[arg-type]
        self.request, self.out = folder / f"{index}.npz", folder / f"{index}.raw"
        np.savez(self.request, **request)  # type: ignore[arg-type]
        self.out.touch()
        self.process: subprocess.Popen[str] | None = None
        self.finished = False

    def done(self) -> int:
        return self.out.stat().st_size // OUTCOME.itemsize

    def advance(self) -> bool:
        """Begin, or begin again, if need be. True once every row has its outcome."""
        if self.finished:
            return True
        if self.process is not None:
            if self.process.poll() is None:
                return False
            text = self.process.stderr.read() if self.process.stderr else ""
            if self.process.returncode == 2:
                raise RuntimeError(f"the program under investigation could not start: {text.strip()}")
            if self.process.returncode not in (0, 3):  # died within a row
                lost = np.zeros(1, OUTCOME)
                lost["status"] = LOST
                with self.out.open("ab") as file:
                    file.write(lost.tobytes())
        if self.done() >= self.rows:
            self.finished = True
            return True
        command = [sys.executable, str(FOLDER / "worker.py"), str(self.request), str(self.out), str(self.done())]
        environment = {"OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | environment)
        return False

    def wait(self) -> None:
        if self.process:
            self.process.wait()

    def outcomes(self) -> Array:
        return np.fromfile(self.out, OUTCOME)


def observations(o: Array, p: Program, traced: int = 2048) -> dict[str, Array]:
    """Which of the report's observations each outcome shows.

    Of x the report printed two numbers; near 1e-32 is not 0 and below 1e-28. It does not say which layer's ff_out it
    printed; the first's is taken.
    """
    n, ran = p.elements, o["status"] == FINISHED
    zero = ran & (o["logits_read"] == p.logits) & (o["logits_zero"] == p.logits)
    return {
        "ff_out right": (o["ff_right"] == n) & (o["ff_failed"] == 0),
        "trace, 2048 bytes": (o["traces"] > 0) & (o["traced_bytes"] == traced),
        "x[0:2] near 1e-32": ran & _tiny(o["x"]).all(-1),
        "logits all 0": zero,
        "only <pad>": ran & (o["predicted"] == 0),
        "loss in [-0.99, 0.7]": ran & (o["logits_read"] == p.logits) & (o["loss"] >= -0.99) & (o["loss"] <= 0.7),
    }


def _tiny(values: Array) -> Array:
    return (values != 0) & (np.abs(values) < 1e-28)


def right(o: Array, p: Program) -> Array:
    """Whether an outcome is that of a right program: it ends, and ff_out, x and the logits are within their bounds."""
    return (o["status"] == FINISHED) & (o["x_right"] == p.elements) & (o["logits_right"] == p.logits)


def minimal(rows: Array, shows: Array) -> list[frozenset[str]]:
    """The smallest sets of switches that show it: none of their subsets does. `rows` are all sets of one way."""
    names = list(SWITCHES)
    sets = sorted(
        (frozenset(name for name, on in zip(names, row[:-1], strict=True) if on) for row in rows[shows]), key=len
    )
    found: list[frozenset[str]] = []
    for one in sets:
        if not any(small <= one for small in found):
            found.append(one)
    return found


def corrected(rows: Array, switch: str) -> Array:
    """These rows with one switch put right.

    resize_by_size is right where `size` counts elements, and wrong where it counts bytes.
    """
    fixed, names = rows.copy(), list(SWITCHES)
    fixed[:, names.index(switch)] = fixed[:, names.index("size_in_elements")] if switch == "resize_by_size" else 0
    return fixed


def has(rows: Array, switch: str) -> Array:
    """Whether each row has this fault."""
    return (rows != corrected(rows, switch)).any(1)


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
        "import ctypes, sys, numpy as np; l = ctypes.CDLL(sys.argv[1]); one = np.ones(2, np.float32)\n"
        "def look(size, when):\n"
        "    a = np.full(size // 4, 7.0, np.float32)\n"
        "    l.faulty_fresh(ctypes.c_void_p(a.ctypes.data), ctypes.c_size_t(a.size))\n"
        "    print(f'{size} bytes, {when}: {int((a == 0).sum())} of {a.size} floats are zero')\n"
        "for size in map(int, sys.argv[2:]):\n"
        "    look(size, 'the first')\n"
        "    for keep, when in ((0, 'after ones, all was freed'), (1, 'after ones, a buffer still held')):\n"
        "        l.faulty_fill(ctypes.c_size_t(size), 1, ctypes.c_void_p(one.ctypes.data), keep)\n"
        "        look(size, when)\n"
        "    l.faulty_fill(ctypes.c_size_t(size), 1, ctypes.c_void_p(one.ctypes.data), 0)\n"
    )
    command = [sys.executable, "-c", code, library, *map(str, sizes)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
