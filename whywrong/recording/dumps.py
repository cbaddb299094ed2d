"""Traces on disk, read a step at a time: safetensors, .npy, .npz, .pt, and folders of .npy or .pt with metadata.json.

Metadata, all optional: ``order`` (the steps' names in order), ``precision`` (see :class:`whywrong.Precision`), and
``steps``: for a step its ``inputs`` (names) and ``K`` (the length of its sums). In a safetensors file they are strings,
JSON but for plain texts; in metadata.json as they are. Anything else is free text, which is shown to the reader and
changes nothing.
"""

from __future__ import annotations

import json
import pickle
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whywrong.comparing.comparison import as_tensor
from whywrong.errors import UsageError, first_line
from whywrong.recording.steps import Trace, metadata

SUFFIXES = (".safetensors", ".npy", ".npz", ".pt", ".pth", ".bin")


def natural(name: str) -> list[Any]:
    """A key that sorts names as people do: step2 before step10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def open_dump(path: Path) -> Trace:
    """Open a trace without reading it. Raises UsageError for what is not there or is no trace."""
    if path.is_dir():
        return _folder(path)
    expected = f"{path}: expected a file ({', '.join(SUFFIXES)}) or a folder of them, got"
    if not path.is_file():
        raise UsageError(f"{expected} {'no regular file' if path.exists() else 'a path that is not there'}")
    if path.suffix == ".safetensors":
        return _safetensors(path)
    if path.suffix == ".npz":
        archive = _load(path)
        about = {"order": list(archive.files)}
        return _in_order(path, archive.files, lambda n: _load(path, lambda: as_tensor(n, archive[n]), f"{n} "), about)
    if path.suffix in SUFFIXES:
        tensors: dict[str, Tensor] = {}
        for name, tensor in _flattened(_load(path), path):
            if name in tensors:
                raise UsageError(f"{path}: expected one tensor of a name, got two tensors of the name {name!r}")
            tensors[name] = tensor
        if not tensors:
            raise UsageError(f"{path}: expected tensors, got a file that holds no tensor")
        return Trace.lazy({name: partial(tensors.get, name) for name in tensors}, {}, str(path), True)
    raise UsageError(f"{expected} {path.suffix or 'no suffix'}")


def _safetensors(path: Path) -> Trace:
    from safetensors import SafetensorError, safe_open

    try:
        file = safe_open(path, "pt")  # stays open: tensors are pages of the file, read when they are looked at
        names, about = list(file.keys()), dict(file.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{path}: is cut, damaged or no safetensors file ({error})") from None
    return _in_order(path, names, file.get_tensor, metadata(about, f"{path}: "))


def _folder(path: Path) -> Trace:
    tensors = sorted(file for file in path.iterdir() if file.suffix in (".npy", ".pt", ".pth"))
    files = {file.stem: file for file in tensors}
    if twice := [file for file in tensors if files[file.stem] != file]:
        raise UsageError(f"{path}: expected one file a step, got {twice[0].name} and {files[twice[0].stem].name}")
    if inner := [p.name for p in path.iterdir() if p.is_dir() and not p.name.startswith(".")]:
        raise UsageError(f"{path}: expected one tensor a file, and no folder of others, got a folder {inner[0]!r}")
    others = sorted(p for p in path.iterdir() if p.suffix in (".safetensors", ".npz"))
    if not files and len(others) == 1:
        return open_dump(others[0])
    if not files or others:
        raise UsageError(f"{path}: expected one tensor a file, .npy or .pt, or a single file of all, got {len(others)}")
    beside = path / "metadata.json"
    about = _load(beside, lambda: json.loads(beside.read_text(encoding="utf-8"))) if beside.exists() else {}
    if not isinstance(about, dict):
        raise UsageError(f"{beside}: expected an object, got a {type(about).__name__}")
    about = metadata(about, f"{path}: ")
    return _in_order(path, list(files), lambda name: as_tensor(str(files[name]), _load(files[name])), about)


def _in_order(path: Path, names: list[str], read: Callable[[str], Tensor], about: dict[str, Any]) -> Trace:
    """The steps in the order that `about` declares; else in that of numbers that lead or end the names."""

    def lazily(order: list[str], ordered: bool = True) -> Trace:
        return Trace.lazy({name: partial(read, name) for name in order}, about, str(path), ordered)

    if "order" in about:
        declared = list(dict.fromkeys(about["order"]))
        if unknown := [x for x in declared if x not in names]:
            raise UsageError(f"{path}: order: expected names of its steps, got {unknown[0]!r}, which is no step")
        return lazily(declared + sorted(set(names) - set(declared), key=natural), set(declared) == set(names))
    names = sorted(names, key=natural)
    for pattern in (r"^\D{0,5}(\d+)", r"(\d+)$"):
        places = [int(match[1]) if (match := re.search(pattern, name)) else -1 for name in names]
        if min(places) >= 0 and len(set(places)) == len(places):
            return lazily([name for _, name in sorted(zip(places, names, strict=True))])
    return lazily(names, False)


def _load(path: Path, read: Callable[[], Any] | None = None, name: str = "") -> Any:
    """What a file holds, or what `read` takes from it, called `name`. Raises UsageError for what cannot be read."""
    if not path.is_file():
        raise UsageError(f"{path}: expected a file that can be read again, got no regular file")
    try:
        if read:
            return read()
        if path.suffix in (".npy", ".npz"):
            # pages of the file, which torch takes for memory that may be written to
            return np.load(path, mmap_mode="c" if path.suffix == ".npy" else None, allow_pickle=False)
        # what torch wrote before 1.6 is no archive, and cannot be read a tensor at a time
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError:  # torch's own words are a page long, and tell how to run what the file has
        expected = "expected tensors alone, by name or in a list, as a module's state_dict()"
        raise UsageError(f"{path}: {expected}, got what torch.load(weights_only=True) refuses") from None
    except Exception as error:
        raise UsageError(f"{path}: {name}is cut, damaged or of another kind ({first_line(error)})") from None


def _flattened(loaded: Any, path: Path, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Tensors, arrays and numbers in nested dicts, lists and tuples, by name and in their own order."""
    if isinstance(loaded, (Tensor, np.ndarray)):
        yield prefix or "tensor", as_tensor(str(path), loaded)
    elif isinstance(loaded, (bool, int, float)):
        yield prefix or "number", torch.tensor(loaded)
    elif isinstance(loaded, (Mapping, list, tuple)):
        for key, value in loaded.items() if isinstance(loaded, Mapping) else enumerate(loaded):
            yield from _flattened(value, path, f"{prefix}.{key}" if prefix else str(key))
    elif loaded is not None and not isinstance(loaded, (str, bytes)):
        where = f"{path}: {prefix}: " if prefix else f"{path}: "
        raise UsageError(f"{where}expected tensors, by name or in a list, got a {type(loaded).__name__}")
