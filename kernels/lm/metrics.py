"""metrics.jsonl: a line a step, and what is in it.

| field | unit, and what it is |
|---|---|
| `step` | steps made, from 1 |
| `loss` | nats a token, mean over the global batch, before the update |
| `grad_norm` | of all gradients together, before clipping |
| `lr` | the rate of this step's update |
| `tokens`, `tokens_per_second` | of all ranks; a second of the wall clock, from the end of the step before |
| `flops_per_second`, `flops_formula` | by `model.flops_per_token` without recomputation, and its name |
| `flops_per_second_lingua` | by Lingua's formula, attention recomputed |
| `memory_active_gib`, `memory_reserved_gib` | peaks of torch's allocator since the step before; null on a CPU |
| `power_watts` | of this rank's GPU by NVML; null on a CPU or without NVML's bindings |
| `seconds` | of the step: `data`, `forward_backward`, `update`, `checkpoint` (before it), `all`; without validation. \
`data` is the host's time, which passes while a GPU still computes the step before |
| `epoch`, `place`, `batch_crc` | where in the data the step began, and what this rank saw |
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from whywrong.errors import UsageError

FILE, VALIDATION = "metrics.jsonl", "validation.jsonl"
FORMULA = "6 (N - V D) + 3 x 4 L S D / 2"


class Log:
    """The file of one run; lines after `step` are of steps that are made again, and are cut off."""

    def __init__(self, path: Path, step: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = before(path, step + 1)
        if len(kept) != step:
            raise UsageError(f"{path}: has {len(kept)} of the {step} steps before the checkpoint; expected all of them")
        part = path.with_suffix(".part")
        part.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        part.replace(path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, line: dict[str, Any]) -> None:
        """Append a line in one write, and leave it with the operating system: a killed run has it."""
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def whole(path: Path) -> list[str]:
    """The lines of a file that are whole, none where there is no file: a run that was killed may have left half of
    one."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8", errors="replace")
    return [line[:-1] for line in text.splitlines(keepends=True) if line.endswith("\n")]


def before(path: Path, step: int) -> list[str]:
    """The whole lines of steps before `step`. UsageError for a line that is none."""
    found = []
    for number, line in enumerate(whole(path), 1):
        try:
            found += [line] if json.loads(line)["step"] < step else []
        except (ValueError, KeyError, TypeError, RecursionError):
            raise UsageError(f"{path}, line {number}: is no line of a step; expected it as it was written") from None
    return found


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl. UsageError for what is none."""
    if not path.is_file():
        raise UsageError(f"{path}: is not there; expected a metrics.jsonl")
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            entry = None
        if not isinstance(entry, dict):
            raise UsageError(f"{path}, line {number}: is no JSON object; expected a line a step")
        found.append(entry)
    if not found:
        raise UsageError(f"{path}: is empty; expected a line a step")
    return found


def memory(device: torch.device) -> dict[str, float | None]:
    """Peaks since the last call, in GiB."""
    if device.type != "cuda":
        return {"memory_active_gib": None, "memory_reserved_gib": None}
    stats = torch.cuda.memory_stats(device)
    torch.cuda.reset_peak_memory_stats(device)
    return {
        "memory_active_gib": stats["active_bytes.all.peak"] / 2**30,
        "memory_reserved_gib": stats["reserved_bytes.all.peak"] / 2**30,
    }


def power(device: torch.device) -> float | None:
    """Watts of the GPU, by NVML; None on a CPU and where NVML's Python bindings are not installed."""
    if device.type != "cuda":
        return None
    try:
        return torch.cuda.power_draw(device) / 1e3
    except (ModuleNotFoundError, RuntimeError, OSError):
        return None


class Board:
    """TensorBoard's view of the same lines, where it is asked for."""

    def __init__(self, folder: Path | None) -> None:
        self._writer: Any = None
        if folder is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(os.fspath(folder))

    def write(self, line: dict[str, Any]) -> None:
        """The numbers of a line as scalars."""
        for name, value in line.items() if self._writer else ():
            if isinstance(value, (int, float)) and name != "step":
                self._writer.add_scalar(name, value, line["step"])

    def close(self) -> None:
        """Write what is left."""
        if self._writer:
            self._writer.close()
