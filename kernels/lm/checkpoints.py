"""Checkpoints by torch.distributed.checkpoint, written beside the training and moved into place whole.

A checkpoint is a folder `step_0000100`. It is written under a name that starts with a dot, and renamed by rank 0 once
every rank's part and the index are there; what starts with a dot is never loaded, and is removed when a run starts. It
holds the parameters, AdamW's state, the state of torch's random numbers (every rank has the same), and where the data
is. Saving copies the state to the CPU, which is all that training waits for, and writes it in a thread.

A checkpoint is data. Its index is a pickle and so are its small entries, which could run any code where they are read
as torch.distributed.checkpoint reads them; here they are read by unpicklers that know the format's own types alone.
The file SHA256SUMS (`sha256sum -c` reads it) tells what was damaged later.
"""

from __future__ import annotations

import hashlib
import io
import os
import pathlib
import pickle
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
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from whywrong.errors import UsageError

NAME = re.compile(r"^step_(\d+)$")
HIDDEN = ".step_"
INDEX, SUMS = ".metadata", "SHA256SUMS"
TYPES = {
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
}
"""All that an index is made of, with torch's types of elements and the path that it was written to."""
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
        sums = "".join(f"{_sha256(path)}  {path.name}\n" for path in sorted(hidden.iterdir()))
        (hidden / SUMS).write_text(sums, encoding="utf-8")
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

        Raises UsageError where it does not fit the model, or a file of it is damaged.
        """
        found = complete(self.folder)
        if not found:
            return 0
        step, path = max(found.items())
        if why := flaw(path):
            right = "the checkpoint whole, or its folder removed, to go on from the one before"
            raise UsageError(f"{path / why}; expected {right}")
        state = _state(model, optimizer, extra)
        try:
            dcp.load(state, storage_reader=_Reader(path), planner=_Planner())
        except (CheckpointException, Exception) as error:  # the first is no Exception
            why = (str(error).splitlines() or [type(error).__name__])[-1][:160]
            raise UsageError(f"{path}: does not fit this configuration ({why}); expected another folder") from None
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        extra.update(state["extra"])
        torch.set_rng_state(extra["rng"])
        return step


def flaw(path: Path) -> str:
    """The file of a checkpoint that is damaged, or holds more than data, and what is wrong; empty where all is well."""
    try:
        sums = (path / SUMS).read_text(encoding="utf-8") if (path / SUMS).exists() else ""
        for digest, name in (line.split("  ") for line in sums.splitlines()):
            if _sha256(path / Path(name).name) != digest:
                return f"{Path(name).name}: is not as it was written"
    except (OSError, ValueError):
        return f"{SUMS}: is damaged, or a file that it names is not there"
    try:
        index = _Reader(path).read_metadata()
        parts = [(entry.fqn, part, path / part.relative_path) for entry, part in index.storage_data.items()]
        small = {name for name, one in index.state_dict_metadata.items() if isinstance(one, BytesStorageMetadata)}
    except Exception:  # whatever it is made of
        return f"{INDEX}: is cut off, unreadable or not there, or holds more than the index of a checkpoint"
    for name, part, file in parts:
        try:
            if file.stat().st_size < part.offset + part.length:
                return f"{file.name}: is cut off"
            if name in small:
                with file.open("rb") as stream:
                    stream.seek(part.offset)
                    torch.load(io.BytesIO(stream.read(part.length)), weights_only=True)
        except OSError:
            return f"{file.name}: is unreadable or not there"
        except Exception:  # an unpickler's refusals have many types
            return f"{file.name}: is damaged, or holds more than numbers and texts"
    return ""


class _Index(pickle.Unpickler):
    """Reads an index. Whatever it names beside the format's own types is refused, not imported."""

    def find_class(self, module: str, name: str) -> Any:
        """The type of that name."""
        if module.split(".")[0] == "pathlib" and name == "PosixPath":  # its module differs between Pythons
            return pathlib.PurePosixPath
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        if name not in TYPES.get(module, ()):
            raise pickle.UnpicklingError("the index of a checkpoint does not need this")
        return super().find_class(module, name)


class _Reader(FileSystemReader):
    """Reads a checkpoint's index as data."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """The index. Raises UnpicklingError where it holds more, or names a file that is not beside it."""
        with (Path(self.path) / INDEX).open("rb") as file:
            index = _Index(file).load()
        if not all(Path(part.relative_path).name == part.relative_path for part in index.storage_data.values()):
            raise pickle.UnpicklingError("a part of a checkpoint lies beside its index")
        index.storage_meta = StorageMeta(load_id=self.load_id)
        return index


class _Planner(DefaultLoadPlanner):
    """Takes the small entries of a checkpoint, numbers and texts, as data."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put an entry into its place, written anew from what was read of it safely."""
        plain = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
