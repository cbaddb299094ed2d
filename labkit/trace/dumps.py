"""Traces on disk, read a step at a time: safetensors files, folders of .npy or .pt dumps, single tensors."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from labkit.errors import UsageError
from labkit.trace.steps import Trace

LOOKED = 1 << 14
"""Elements of a step that are looked at for how many digits they hold."""
SUFFIXES = (".safetensors", ".npy", ".pt", ".pth")


@dataclass
class Dump:
    """A trace that stays on disk: the steps' names in order, the metadata, and `read(name)` for one tensor."""

    path: Path
    names: list[str]
    read: Callable[[str], torch.Tensor]
    about: dict[str, Any] = field(default_factory=dict)
    """Metadata by key, JSON where it is JSON: order, steps, compute, storage_dtype, dtype_note."""

    def step(self, name: str) -> dict[str, Any]:
        """What the metadata says of one step; empty where it says nothing."""
        steps = self.about.get("steps")
        found = steps.get(name) if isinstance(steps, dict) else None
        return found if isinstance(found, dict) else {}

    @cached_property
    def narrow(self) -> torch.dtype | None:
        """bfloat16 or float16 where all that is looked at of wider steps holds no more digits; None where one does."""
        looked = [self.read(name).flatten()[:LOOKED] for name in self.names[:: max(1, len(self.names) // 8)]]
        wider = [x for x in looked if x.dtype in (torch.float32, torch.float64) and bool((x != x.round()).any())]
        for dtype in (torch.bfloat16, torch.float16) if len(wider) > 2 else ():
            if all(torch.equal(x.to(dtype).to(x.dtype), x) for x in wider):
                return dtype
        return None

    @cached_property
    def narrowest(self) -> str | None:
        """``bfloat16`` or ``float16`` where a step is stored in it, the one of fewer digits; None where none is."""
        kinds = {self.read(name).dtype for name in self.names}
        return next((str(one)[6:] for one in (torch.bfloat16, torch.float16) if one in kinds), None)

    def renamed(self, name: str) -> Dump:
        """This trace of one step under another name: single tensors are compared whatever they are called."""
        (only,) = self.names
        return Dump(self.path, [name], lambda _: self.read(only), self.about)

    def __contains__(self, name: object) -> bool:
        return name in self.names


def natural(name: str) -> list[Any]:
    """A key that sorts names as people do: step2 before step10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def open_dump(path: Path) -> Dump:
    """Open a trace without reading it. Raises UsageError for what is not there or is no trace."""
    if path.is_dir():
        return _folder(path)
    if not path.exists():
        raise UsageError(f"{path}: is not there; wanted a file ({', '.join(SUFFIXES)}) or a folder of them")
    if path.suffix == ".safetensors":
        return _safetensors(path)
    if path.suffix in SUFFIXES:
        loaded = _load(path)
        if isinstance(loaded, dict):
            named = _flattened(loaded, path)
            return Dump(path, sorted(named, key=natural), lambda name: named[name])
        return Dump(path, ["tensor"], lambda name: loaded)
    raise UsageError(f"{path}: is of no kind that is known; wanted {', '.join(SUFFIXES)} or a folder of them")


def of_trace(trace: Trace, name: str = "trace") -> Dump:
    """A trace in memory, as one on disk would be read."""
    steps = {s.name: s.about | ({"inputs": list(s.inputs)} if s.inputs else {}) for s in trace}

    def read(step: str) -> torch.Tensor:
        value = trace[step]
        return value.detach().cpu() if isinstance(value, torch.Tensor) else torch.from_numpy(np.array(value))

    return Dump(Path(name), trace.names, read, trace.about | {"steps": steps})


def _safetensors(path: Path) -> Dump:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            names, about = list(file.keys()), dict(file.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{path}: is not a safetensors file ({error})") from None
    about = {key: _json(value) if key in ("order", "steps") else value for key, value in about.items()}

    def read(name: str) -> torch.Tensor:
        with safe_open(path, "pt") as file:
            return file.get_tensor(name)

    return Dump(path, _ordered(names, about.get("order")), read, about)


def _folder(path: Path) -> Dump:
    files = {p.stem: p for p in sorted(path.iterdir()) if p.suffix in (".npy", ".pt", ".pth")}
    if not files:
        only = sorted(path.glob("*.safetensors"))
        if len(only) == 1:
            return _safetensors(only[0])
        raise UsageError(f"{path}: holds no .npy and no .pt; wanted a folder with one tensor a file")
    about = {}
    if (path / "metadata.json").exists():
        about = {k: _json(v) for k, v in json.loads((path / "metadata.json").read_text(encoding="utf-8")).items()}

    def read(name: str) -> torch.Tensor:
        value = _load(files[name])
        if not isinstance(value, torch.Tensor):
            raise UsageError(f"{files[name]}: holds {type(value).__name__}; wanted one tensor a file")
        return value

    return Dump(path, _ordered(list(files), about.get("order")), read, about)


def _load(path: Path) -> Any:
    try:
        if path.suffix == ".npy":
            array = np.load(path, mmap_mode="r", allow_pickle=False)
            return torch.from_numpy(np.array(array))
        mapped = zipfile.is_zipfile(path)  # what torch wrote before 1.6 cannot be read a tensor at a time
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:
        raise UsageError(f"{path}: cannot be read ({str(error).splitlines()[0]})") from None


def _flattened(loaded: dict[Any, Any], path: Path, prefix: str = "") -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for key, value in loaded.items():
        if isinstance(value, torch.Tensor):
            found[f"{prefix}{key}"] = value
        elif isinstance(value, dict):
            found |= _flattened(value, path, f"{prefix}{key}.")
    if not found and not prefix:
        raise UsageError(f"{path}: holds no tensor")
    return found


def _ordered(names: list[str], order: Any) -> list[str]:
    """The order that is given, as far as it goes; then the others, as people sort."""
    given = [name for name in order if name in names] if isinstance(order, list) else []
    given = list(dict.fromkeys(given))
    return given + sorted(set(names) - set(given), key=natural)


def _json(text: Any) -> Any:
    try:
        return json.loads(text) if isinstance(text, str) else text
    except json.JSONDecodeError:
        return None
