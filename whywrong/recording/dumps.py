"""Traces on disk, read a step at a time: safetensors, .npy, .npz, .pt, and folders of .npy or .pt with metadata.json;
what other tools write (:mod:`whywrong.recording.foreign`); and folders of one for each rank.

Metadata, all optional: ``order`` (the steps' names in order), ``precision`` (see :class:`whywrong.Precision`), and
``steps``: for a step its ``inputs`` (names) and ``K`` (the length of its sums). In a safetensors file they are strings,
JSON but for plain texts; in metadata.json as they are. Anything else is free text, which is shown to the reader and
changes nothing.
"""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from whywrong.comparing.comparison import as_tensor
from whywrong.errors import UsageError, first_line
from whywrong.recording.foreign import as_read, joined, open_foreign, refuse_log
from whywrong.recording.shards import Part
from whywrong.recording.steps import Trace, metadata
from whywrong.recording.tensor_files import MOST_STEPS, flattened, named_once, natural
from whywrong.recording.tensor_files import load_file as _load

SUFFIXES = (".safetensors", ".npy", ".npz", ".pt", ".pth", ".bin")


def open_dump(path: Path, dims: Mapping[str, str] | None = None) -> Trace:
    """Open a trace without reading it. Raises UsageError for what is not there or is no trace.

    `dims` says for steps of which each rank holds a part how they are put together: :mod:`whywrong.recording.shards`.
    """
    try:
        trace = _opened(path.parent if path.name in ("dump.json", ".metadata") else path, dims or {})
    except (OSError, RecursionError) as error:  # folders in folders, or links in a circle
        raise UsageError(f"{path}: cannot be read ({first_line(error)})") from None
    _check_count(path, trace.names)
    return trace


def _check_count(path: Path, names: list[str]) -> None:
    if len(names) > MOST_STEPS:
        raise UsageError(f"{path}: expected {MOST_STEPS} steps at most, got {len(names)}")


def _opened(path: Path, dims: Mapping[str, str]) -> Trace:
    if path.is_dir():
        return _folder(path, dims)
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
        tensors = named_once(flattened(_load(path), path), path)
        return Trace.lazy({name: partial(tensors.get, name) for name in tensors}, {}, str(path), True)
    refuse_log(path)
    raise UsageError(f"{expected} {path.suffix or 'no suffix'}")


def _safetensors(path: Path) -> Trace:
    from safetensors import SafetensorError, safe_open

    try:
        file = safe_open(path, "pt")  # stays open: tensors are pages of the file, read when they are looked at
        names, about = list(file.keys()), dict(file.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{path}: is cut, damaged or no safetensors file ({error})") from None
    return _in_order(path, names, file.get_tensor, metadata(about, f"{path}: "))


def _folder(path: Path, dims: Mapping[str, str]) -> Trace:
    entries = {entry.name: entry.is_dir() for entry in os.scandir(path)}
    if trace := open_foreign(path, entries, dims):
        return trace
    tensors = sorted(path / name for name in entries if name.endswith((".npy", ".pt", ".pth")))
    files = {file.stem: file for file in tensors}
    if twice := [file for file in tensors if files[file.stem] != file]:
        raise UsageError(f"{path}: expected one file a step, got {twice[0].name} and {files[twice[0].stem].name}")
    if inner := [name for name, is_folder in entries.items() if is_folder and not name.startswith(".")]:
        if not files and (trace := _ranks(path, inner, dims)):
            return trace
        raise UsageError(f"{path}: expected one tensor a file, and no folder of others, got a folder {min(inner)!r}")
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


def _ranks(path: Path, folders: list[str], dims: Mapping[str, str]) -> Trace | None:
    """Of a folder of a rank each the steps put together; the only folder of a step or a process as it is; else None."""
    if len(folders) == 1 and re.fullmatch(r"(step|iter_|proc)\d+", folders[0]):
        return open_dump(path / folders[0], dims)
    matches = [re.fullmatch(r"(?:mp_)?rank_?(\d+)(?:_(\d+))?", name) for name in sorted(folders, key=natural)]
    if not all(matches):
        return None
    places = {match[0]: (int(match[1]), int(match[2] or 0)) for match in matches if match}
    tp, pp = (1 + max(numbers) for numbers in zip(*places.values(), strict=True))
    parts, others, ordered = defaultdict[str, list[Part]](list), list[str](), True
    for name, (i, j) in places.items():
        trace = open_dump(path / name, dims)
        others += trace.texts.values()
        ordered = ordered and trace.ordered
        axes = {"tp": (i, tp), "pp": (j, pp)} if name.startswith("mp_") else {}
        for step in trace.names:
            parts[step].append(Part(i * pp + j, partial(trace.read, step), axes))
    return as_read(path, joined(path, parts, dims), others, ordered)


def _in_order(path: Path, names: list[str], read: Callable[[str], Tensor], about: dict[str, Any]) -> Trace:
    """The steps in the order that `about` declares; else in that of numbers that lead or end the names."""

    _check_count(path, names)  # before they are sorted

    def lazily(order: list[str], ordered: bool = True) -> Trace:
        return Trace.lazy({name: partial(read, name) for name in order}, about, str(path), ordered)

    if "order" in about:
        declared = list(dict.fromkeys(about["order"]))
        known = set(names)
        if unknown := [x for x in declared if x not in known]:
            raise UsageError(f"{path}: order: expected names of its steps, got {unknown[0]!r}, which is no step")
        return lazily(declared + sorted(known - set(declared), key=natural), set(declared) == known)
    names = sorted(names, key=natural)
    for pattern in (r"^\D{0,5}(\d+)", r"(\d+)$"):
        places = [int(match[1]) if (match := re.search(pattern, name)) else -1 for name in names]
        if min(places) >= 0 and len(set(places)) == len(places):
            return lazily([name for _, name in sorted(zip(places, names, strict=True))])
    return lazily(names, False)
