"""What the notebook runs: searches for files, evaluations with each fix, training loops, a preflight, small trainings
on a CPU, and the report's run again on a GPU.
"""

from __future__ import annotations

import re
import secrets as random
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

from kernels.corpus import corpus
from kernels.lm import checkpoints, faulty, jsonl, metrics, preflight, training
from kernels.lm import config as configs
from kernels.lm.config import Config
from kernels.lm.report import as_the_report, sample
from labkit.session.catalogue import ROOT
from labkit.session.secrets import secrets
from whywrong.errors import UsageError

LONG = 200
"""Steps of a small run above which it shows its progress."""
FILE_FOUND = "a file is found"
WRITTEN = f"{faulty.RESULTS} is written"
STAND_IN = "- **Wandb APIキー**: 設定済み (`'WANDB_API_KEY': '{}'`)"
"""The report's line on its key, without the key."""
EVALUATION = """
import sys
from pathlib import Path
from kernels.lm import faulty
_, section, root, out, *sources = sys.argv
faulty.evaluate(faulty.merge_settings(section), Path(root), sources, Path(out))
"""
"""The program of an evaluation that is a job of its own."""


# The error and the fixes


class Search(NamedTuple):
    """A folder: whether it holds a validation file, and how the searches for validation and training files end."""

    folder: str
    has_validation_file: bool
    for_validation: str
    for_training: str

    @property
    def trained(self) -> bool:
        """Whether a training can have run on this folder."""
        return self.for_training == FILE_FOUND


def end_of_search(folder: Path, pattern: str) -> str:
    """How Lingua's search for the file of one rank ends: a file is found, or the exception."""
    try:
        faulty.distribute_chunks(folder, 0, 1, pattern)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return FILE_FOUND


def training_data(folder: Path) -> tuple[Path, list[str]]:
    """A new root with one source of training text, as the report's run had it: its chunk, no validation file."""
    source = folder / "data" / "source"
    source.mkdir(parents=True, exist_ok=True)
    (source / "source.chunk.00.jsonl").write_text('{"text": "training"}\n')
    return folder / "data", ["source"]


def search_folders(folder: Path, named: Mapping[str, Sequence[str]]) -> list[Search]:
    """Search folders that hold a training file, and the files of `named` beside it; an `empty` one has no line.

    Then one that is not there, and one that the operating system refuses to list.
    """
    searches = []
    for name, files in named.items():
        root, (source,) = training_data(folder / name.replace(" ", "_"))
        for file in files:
            (root / source / file).write_text("" if file.startswith("empty") else '{"text": "held out"}\n')
        has_validation_file = any(file.endswith(".val.jsonl") for file in files)
        searches.append(_search(name, root / source, has_validation_file))
    searches.append(_search("no such folder", folder / "nowhere", False))
    root, (source,) = training_data(folder / "unreadable")
    (root / source / "a.val.jsonl").write_text('{"text": "held out"}\n')
    with faulty.unreadable(root / source):
        return [*searches, _search("cannot be listed", root / source, True)]


def _search(name: str, folder: Path, has_validation_file: bool) -> Search:
    ends = [end_of_search(folder, pattern) for pattern in (faulty.VALIDATION_FILES, faulty.TRAINING_FILES)]
    return Search(name, has_validation_file, *ends)


def try_fixes(folder: Path, checks: Mapping[str, faulty.Find] = faulty.ZERO_CHECKS) -> dict[str, str]:
    """How Lingua's evaluation ends with each fix that the report proposes, and with variants that it may have meant."""
    root, sources = training_data(folder)
    section = yaml.safe_load(faulty.SHOWN)
    commented = {key: value for key, value in section.items() if key != "validation"}

    def end(name: str, settings: dict[str, Any], find: faulty.Find = faulty.find_chunks) -> str:
        try:
            faulty.evaluate(faulty.merge_settings(yaml.safe_dump(settings)), root, sources, folder / "out" / name, find)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return WRITTEN

    ends = {"as the report ran it": end("as_is", section), "validation commented out": end("commented", commented)}
    ends["validation: null"] = end("null", commented | {"validation": None})
    for name, find in checks.items():
        ends[f"check for zero: {name}"] = end(name.replace(" ", "_"), section, find)
    held_out = root / "validation"
    held_out.mkdir(exist_ok=True)
    (held_out / "a.val.jsonl").write_text('{"text": "held out"}\n')
    ends["files in data/validation"] = end("folder", section)
    as_source = {"max_steps": 100, "root_dir": str(root), "sources": ["validation"]}
    ends["files in data/validation, named as a source"] = end("named", section | {"validation": as_source})
    (root / sources[0] / "a.val.jsonl").write_text('{"text": "held out"}\n')
    ends["a file in the training's own folder"] = end("own", section)
    return ends


@dataclass(frozen=True)
class LoopRun:
    """A start of Lingua's training loop: the steps that were asked for, the first and last of those that it made.

    `saved` are the steps of its checkpoints, `evaluations` how each evaluation ended, `ended` how the loop itself did.
    """

    steps: int
    first: int
    last: int
    saved: list[int]
    evaluations: list[str]
    ended: str

    @property
    def results(self) -> int:
        """The number of evaluations that wrote their results."""
        return self.evaluations.count(WRITTEN)


def run_loop(
    folder: Path, steps: int, every: int, async_eval_gpus: int | None = None, section: str = faulty.SHOWN
) -> LoopRun:
    """Start Lingua's loop in `folder`, from its last checkpoint on where there is one, without validation files.

    There is a checkpoint and an evaluation after `every` steps. With `async_eval_gpus` the evaluation is another
    process. A step is counted, not computed.
    """
    root, sources = training_data(folder)
    checkpoints_folder = folder / "checkpoints"
    checkpoints_folder.mkdir(exist_ok=True)
    first = max((int(path.name) for path in checkpoints_folder.iterdir()), default=0)
    made, ends = [first], []

    def save(step: int) -> None:
        (checkpoints_folder / f"{step:010d}").mkdir()

    def evaluate(step: int) -> None:
        try:
            faulty.evaluate(faulty.merge_settings(section), root, sources, folder / "evals" / f"{step:010d}")
            ends.append(WRITTEN)
        except Exception as error:
            ends.append(f"{type(error).__name__}: {error}")
            raise

    def submit(step: int) -> None:
        out = folder / "evals" / f"{step:010d}"
        command = [sys.executable, "-c", EVALUATION, section, str(root), str(out), *sources]
        job = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)  # its error stays there
        ends.append(job.stderr.splitlines()[-1] if job.returncode else WRITTEN)

    try:
        faulty.train(steps, every, made.append, save, evaluate, submit, async_eval_gpus, first)
        ended = "normally"
    except Exception as error:
        ended = f"{type(error).__name__}: {error}"
    saved = sorted(step for path in checkpoints_folder.iterdir() if (step := int(path.name)) > first)
    return LoopRun(steps, first + 1, made[-1], saved, ends, ended)


def check_before_training(folder: Path, text: Path) -> tuple[list[str], float]:
    """What our preflight finds in the report's configuration, given the training files of `text` alone; its seconds."""
    bare = folder / "training_only"
    bare.mkdir(parents=True, exist_ok=True)
    for path in text.glob(faulty.TRAINING_FILES):
        (bare / path.name).write_bytes(path.read_bytes())
    began = time.perf_counter()
    _, findings = preflight.check(as_the_report(folder / "run", bare))
    return [str(finding).replace(str(bare), "training_only") for finding in findings], time.perf_counter() - began


def scan_for_secrets() -> dict[str, Any]:
    """What the scanner finds in the report's line on the key: with a stand-in of a key's form, and as it is here.

    A list of (line, kind) each.
    """
    keys = {"as first written": random.token_hex(20), "as it is here": "<redacted>"}
    return {name: secrets(STAND_IN.format(key)) for name, key in keys.items()}


def tokens_per_word(text: bytes) -> float:
    """Tokens that debug.yaml's tokenizer makes of a word of a text, a word being a run of letters and digits."""
    return len(jsonl.encode(text.decode("utf-8", errors="replace"))) / len(re.findall(rb"\w+", text))


# Trainings


def small_run(folder: Path, text: Path, steps: int, seed: int = 0, **optimizer: Any) -> Config:
    """The configuration of a tiny model on a CPU, in float32, with at most 119 steps dumped."""
    raw = {
        "folder": str(folder),
        "data": {"folder": str(text), "batch": 8, "length": 64},
        "evaluation": "none",
        "validation": {"folder": str(text), "batches": 20},
        "steps": max(steps, 21),
        "seed": seed,
        "device": "cpu",
        "precision": "float32",
        "compile": False,
        "checkpoints": {"every": max(1, steps // 2)},
        "model": {"dim": 64, "layers": 2, "heads": 2, "hidden": 128},
        "dumps": {"every": max(1, steps // 60)},
        "optimizer": {"rate": 4e-3, "warmup": 20, "clip": 0.0} | optimizer,
    }
    config, wrong = configs.parse(raw)
    if config is None or wrong:
        raise UsageError("; ".join(map(str, wrong)))
    return config


def train(config: Config) -> list[float]:
    """Make a run, or finish it from its last checkpoint; the losses of all its steps, in nats per byte.

    On one thread: its products are too small to share.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [line["loss"] for line in metrics.read(training.train(config, progress=config.last > LONG))]
    finally:
        torch.set_num_threads(threads)


def held_out_bits(config: Config) -> float:
    """Bits per byte of held-out text, the last that the run wrote."""
    lines = metrics.read(Path(config.folder) / metrics.VALIDATION)
    return float(lines[-1]["bits_per_byte"])


def drop_last_checkpoint(config: Config) -> int:
    """Throw away a run's last checkpoint, as if it had been killed before; the step of the one that is left."""
    *_, (left, _), (_, last) = sorted(checkpoints.complete(Path(config.folder) / "checkpoints").items())
    shutil.rmtree(last)
    return left


def first_difference(run: Path, other: Path) -> tuple[int, str] | None:
    """The first step, and the first tensor of it, in which two runs' folders of dumps differ in any bit."""
    from whywrong.recording.dumps import open_dump

    ours, theirs = open_dump(run), open_dump(other)
    for name in ours.names:
        if name in theirs and not torch.equal(ours.read(name), theirs.read(name)):
            step, _, tensor = name.partition(".")
            return int(step), tensor
    return None


def repeat_on_gpu(folder: Path, steps: int, lines_folder: Path) -> dict[str, Any]:
    """The report's run again on a GPU, on Python's documentation: its lines and medians over them.

    Its metrics.jsonl is copied into `lines_folder`. Seconds, bytes (tokens) and FLOP/s are medians after 20 steps.
    """
    text = sample(folder / "whole", 1 << 30)
    raw = as_the_report(folder / "h200", text) | {"device": "cuda", "evaluation": "none", "steps": 4000, "stop": steps}
    raw |= {"validation": {"folder": str(text), "batches": 8}, "checkpoints": {"every": max(1, steps // 2), "keep": 1}}
    config, wrong = preflight.check(raw)
    if config is None or wrong:
        raise UsageError("; ".join(map(str, wrong)))
    path = training.train(config, progress=True)
    lines = metrics.read(path)
    lines_folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(path, lines_folder / metrics.FILE)
    quiet = [line for line in lines[20:] if line["seconds"]["checkpoint"] == 0.0] or lines[-1:]

    def median(of: Any) -> float:
        values = sorted(of(line) for line in quiet)
        return float(values[len(values) // 2])

    capacity = torch.cuda.get_device_properties(0).total_memory / 2**30
    return {
        "lines": [
            {key: line[key] for key in ("step", "loss", "grad_norm", "lr")}
            for line in lines
            if line["step"] % 10 in (0, 1)
        ],
        "first_loss": lines[0]["loss"],
        "tokens_per_second": median(lambda n: n["tokens_per_second"]),
        "step_seconds": median(lambda n: n["seconds"]["all"]),
        "data_seconds": median(lambda n: n["seconds"]["data"]),
        "flops_per_second": median(lambda n: n["flops_per_second"]),
        "flops_per_second_lingua": median(lambda n: n["flops_per_second_lingua"]),
        "power_watts": median(lambda n: n["power_watts"] or 0.0),
        "memory_share": max(n["memory_active_gib"] for n in lines) / capacity,
        "memory_active_gib": max(n["memory_active_gib"] for n in lines),
        "capacity_gib": capacity,
        "checkpoint_pause": max(n["seconds"]["checkpoint"] for n in lines),
        "bits_per_byte": held_out_bits(config),
        "text": corpus().facts,
        "gpu": torch.cuda.get_device_name(),
    }
