"""Checkpoints by torch.distributed.checkpoint, written beside the training and moved into place whole.

A checkpoint is a folder `step_0000100`. It is written under a name that starts with a dot, and renamed by rank 0 once
every rank's part and the index are there; what starts with a dot is never loaded, and is removed when a run starts. It
holds the parameters, AdamW's state, the state of torch's random numbers (every rank has the same), and where the data
is. Saving copies the state to the CPU, which is all that training waits for, and writes it in a thread.
"""

from __future__ import annotations

import os
import re
import shutil
import time
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from labkit.errors import UsageError

NAME = re.compile(r"^step_(\d+)$")
HIDDEN = ".step_"
warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is meant


def complete(folder: Path) -> dict[int, Path]:
    """The checkpoints of a run that are whole, by step."""
    if not folder.is_dir():
        return {}
    found = {int(match[1]): path for path in folder.iterdir() if (match := NAME.match(path.name))}
    return dict(sorted(found.items()))


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder, keep
        self.pause = 0.0
        """Seconds for which the last save held up training."""
        self._saving: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1)
        # what the thread says to the other ranks must not meet what training says
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None

    def begin(self) -> None:
        """Make the folder, and remove what an earlier run left half written. For the run that trains there alone."""
        if _rank() == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            for left in self.folder.glob(f"{HIDDEN}*"):
                shutil.rmtree(left)
        _barrier()

    def save(self, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer, extra: dict[str, Any]) -> None:
        """Begin to save the state after `step` steps; `extra` is small and plain. An earlier save is finished first."""
        began = time.perf_counter()
        self.finish()
        target = self.folder / f"step_{step:07d}"
        hidden = self.folder / f"{HIDDEN}{step:07d}"
        state = _state(model, optimizer, extra)
        written: Any = dcp.async_save(state, checkpoint_id=hidden, process_group=self._group)
        self._saving = self._thread.submit(self._place, written, hidden, target)
        self.pause = time.perf_counter() - began

    def _place(self, written: Future[Any], hidden: Path, target: Path) -> None:
        """Rank 0 writes the index when every rank has written its part, so what it has is whole."""
        written.result()
        if _rank() != 0:
            return
        for path in hidden.iterdir():
            _synchronise(path)
        if target.exists():
            shutil.rmtree(target)
        hidden.rename(target)
        _synchronise(self.folder)
        for old in list(complete(self.folder).values())[: -self.keep]:
            gone = old.with_name(f".{old.name}")  # never half a checkpoint under a whole one's name
            old.rename(gone)
            shutil.rmtree(gone)

    def finish(self) -> None:
        """Wait until the save that is under way, if any, is in place."""
        if self._saving is not None:
            self._saving.result()
            self._saving = None
            _barrier()

    def load(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, extra: dict[str, Any]) -> int:
        """Load the newest checkpoint into model, optimizer and `extra`; the steps made so far, 0 where there is none.

        Raises UsageError where it does not fit the model, or a file of it is not whole.
        """
        found = complete(self.folder)
        if not found:
            return 0
        step, path = max(found.items())
        state = _state(model, optimizer, extra)
        try:
            dcp.load(state, checkpoint_id=path)
        except (CheckpointException, Exception) as error:  # the first is no Exception
            if cut := _cut(path):
                right = "the checkpoint whole, or its folder removed, to go on from the one before"
                raise UsageError(f"{path / cut}: is cut off, unreadable or not there; wanted {right}") from None
            why = (str(error).splitlines() or [type(error).__name__])[-1][:160]
            raise UsageError(f"{path}: does not fit this configuration ({why}); wanted another folder") from None
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        extra.update(state["extra"])
        torch.set_rng_state(extra["rng"])
        return step


def _cut(path: Path) -> str:
    """The file of a checkpoint, by its index or the index itself, that lacks a byte; empty where each is whole."""
    try:
        index = dcp.FileSystemReader(path).read_metadata()
    except Exception:  # whatever it is made of
        return ".metadata"
    ends: dict[str, int] = {}
    for part in (index.storage_data or {}).values():
        ends[part.relative_path] = max(ends.get(part.relative_path, 0), part.offset + part.length)
    short = (n for n, end in ends.items() if not (path / n).is_file() or (path / n).stat().st_size < end)
    return next(short, "")


def _state(model: torch.nn.Module, optimizer: torch.optim.Optimizer, extra: dict[str, Any]) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "extra": extra | {"rng": torch.get_rng_state()}}


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def _synchronise(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
