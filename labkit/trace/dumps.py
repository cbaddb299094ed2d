"""Traces on disk, read a step at a time: safetensors, .npy, .npz, .pt, and folders of .npy or .pt with metadata.json.

Metadata, all optional: ``order`` (the steps' names in order), ``precision`` (see :class:`labkit.Precision`), and
``steps``: for a step its ``inputs`` (names) and ``K`` (the length of its sums). In a safetensors file they are strings,
JSON but for plain texts; in metadata.json as they are. Anything else is free text, which is shown to the reader and
changes nothing.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from labkit.errors import UsageError
from labkit.numerics.precision import Precision, from_json

Tensor = torch.Tensor
SUFFIXES = (".safetensors", ".npy", ".npz", ".pt", ".pth")
READ = ("order", "steps", "precision")
"""Metadata that is read; what else there is, is shown."""


@dataclass
class Dump:
    """A trace that stays on disk: the steps' names in order, the metadata, and `read(name)` for one tensor."""

    path: Path
    names: list[str]
    read: Callable[[str], Tensor]
    about: dict[str, Any] = field(default_factory=dict)
    ordered: bool = True
    """Whether the order of the names is known to be that of the program."""

    @property
    def precision(self) -> Precision | None:
        """What the file promises; None where it says nothing. Raises UsageError for what is no Precision."""
        said = self.about.get("precision")
        if said is None:
            return None
        try:
            return from_json(said if isinstance(said, str) else json.dumps(said))
        except UsageError as error:
            raise UsageError(f"{self.path}: metadata {error}") from None

    @property
    def texts(self) -> dict[str, str]:
        """Free text of the file."""
        steps = self.about.get("steps", {})
        others = sorted({str(key) for said in steps.values() for key in said if key not in _SAID})
        texts = {"steps": f"{', '.join(others)}: not read"} if others else {}
        return texts | {key: str(value) for key, value in self.about.items() if key not in READ}

    def said(self, name: str) -> dict[str, Any]:
        """What the metadata says of one step; empty where it says nothing."""
        steps = self.about.get("steps")
        found = steps.get(name) if isinstance(steps, dict) else None
        return found if isinstance(found, dict) else {}

    def inputs(self, name: str) -> list[str] | None:
        """The names of a step's inputs, as the metadata has them; None where they have none."""
        given = self.said(name).get("inputs")
        return [str(x) for x in given] if isinstance(given, list) else None

    def length(self, name: str) -> int | None:
        """The length of a step's sums, as the metadata has it."""
        k = self.said(name).get("K")
        return k if isinstance(k, int) and not isinstance(k, bool) and 0 < k < 1 << 63 else None

    def __getitem__(self, name: str) -> Tensor:
        return self.read(name)

    def __contains__(self, name: object) -> bool:
        return name in self.names


def natural(name: str) -> list[Any]:
    """A key that sorts names as people do: step2 before step10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def open_dump(path: Path) -> Dump:
    """Open a trace without reading it. Raises UsageError for what is not there or is no trace."""
    if path.is_dir():
        return _folder(path)
    wanted = f"wanted a file ({', '.join(SUFFIXES)}) or a folder of them"
    if not path.exists():
        raise UsageError(f"{path}: is not there; {wanted}")
    if not path.is_file():
        raise UsageError(f"{path}: is no regular file; {wanted}")
    if path.suffix == ".safetensors":
        return _safetensors(path)
    if path.suffix == ".npz":
        archive = _load(path)
        return _in_order(path, list(archive.files), lambda name: _tensor(path, archive[name]), {}, known=True)
    if path.suffix in SUFFIXES:
        named = _flattened(_load(path), path)
        return Dump(path, list(named), lambda name: named[name])
    raise UsageError(f"{path}: is of no kind that is known; {wanted}")


def _safetensors(path: Path) -> Dump:
    from safetensors import SafetensorError, safe_open

    try:
        file = safe_open(path, "pt")  # stays open: tensors are pages of the file, read when they are looked at
        names, about = list(file.keys()), dict(file.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{path}: is not a safetensors file ({error})") from None
    about = {key: _json(path, key, value) for key, value in about.items()}
    return _in_order(path, names, file.get_tensor, about)


def _folder(path: Path) -> Dump:
    files: dict[str, Path] = {}
    for file in sorted(path.iterdir()):
        if file.suffix in (".npy", ".pt", ".pth"):
            if file.stem in files:
                raise UsageError(f"{path}: has {files[file.stem].name} and {file.name}; wanted one file a step")
            files[file.stem] = file
    others = sorted(p for p in path.iterdir() if p.suffix in (".safetensors", ".npz"))
    if not files and len(others) == 1:
        return open_dump(others[0])
    if not files or others:
        raise UsageError(f"{path}: wanted one tensor a file, .npy or .pt, or a single file of all; has {len(others)}")
    about: dict[str, Any] = {}
    if (path / "metadata.json").exists():
        try:
            about = json.loads((path / "metadata.json").read_text(encoding="utf-8"))
        except (ValueError, RecursionError, OSError) as error:
            raise UsageError(f"{path / 'metadata.json'}: is not JSON ({str(error)[:60]})") from None
        if not isinstance(about, dict):
            raise UsageError(f"{path / 'metadata.json'}: is {type(about).__name__}; wanted an object")
    about = {key: _json(path, key, value) for key, value in about.items()}

    def read(name: str) -> Tensor:
        loaded = _load(files[name])
        return loaded if isinstance(loaded, Tensor) else _tensor(files[name], loaded)

    return _in_order(path, list(files), read, about)


def _in_order(
    path: Path, names: list[str], read: Callable[[str], Tensor], about: dict[str, Any], *, known: bool = False
) -> Dump:
    """The order that is told; else that of numbers that lead or end the names; else the file's own, if it has one."""
    told = about.get("order")
    if isinstance(told, list):
        if unknown := [str(x) for x in told if x not in names]:
            raise UsageError(f"{path}: order names {unknown[0]!r}, which is no step; wanted names of its steps")
        given = list(dict.fromkeys(told))
        return Dump(path, given + sorted(set(names) - set(given), key=natural), read, about, set(given) == set(names))
    if known:
        return Dump(path, names, read, about)
    names = sorted(names, key=natural)
    for pattern in (r"^\D{0,5}(\d+)", r"(\d+)$"):
        places = [int(found[1]) if (found := re.search(pattern, name)) else -1 for name in names]
        if min(places) >= 0 and len(set(places)) == len(places):
            return Dump(path, [name for _, name in sorted(zip(places, names, strict=True))], read, about)
    return Dump(path, names, read, about, ordered=False)


def _load(path: Path) -> Any:
    if not path.is_file():
        raise UsageError(f"{path}: is no regular file; wanted one that can be read again")
    try:
        if path.suffix in (".npy", ".npz"):
            return np.load(path, mmap_mode="r" if path.suffix == ".npy" else None, allow_pickle=False)
        mapped = zipfile.is_zipfile(path)  # what torch wrote before 1.6 cannot be read a tensor at a time
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:
        raise UsageError(f"{path}: cannot be read ({(str(error).splitlines() or ['empty'])[0][:120]})") from None


def _tensor(path: Path, value: Any) -> Tensor:
    """An array as a tensor that shares its memory where it can."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "fiub":
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # nothing is written to it
            native = value if value.dtype.isnative else value.astype(value.dtype.newbyteorder("="))
            return torch.from_numpy(native if min(native.strides, default=0) >= 0 else native.copy())
    kind = getattr(value, "dtype", type(value).__name__)
    raise UsageError(f"{path}: holds {kind}; wanted real numbers or whole ones")


def _flattened(loaded: Any, path: Path, prefix: str = "") -> dict[str, Tensor]:
    """Tensors, arrays and numbers in nested dicts, lists and tuples, by name and in their own order."""
    if isinstance(loaded, Tensor):
        return {prefix or "tensor": loaded.detach()}
    if isinstance(loaded, np.ndarray):
        return {prefix or "tensor": _tensor(path, loaded)}
    if isinstance(loaded, (bool, int, float)):
        return {prefix or "number": torch.tensor(loaded)}
    if loaded is None or isinstance(loaded, (str, bytes)):
        return {}
    if not isinstance(loaded, (Mapping, list, tuple)):
        raise UsageError(f"{path}: {prefix or 'it'} is {type(loaded).__name__}; wanted tensors, by name or in a list")
    found: dict[str, Tensor] = {}
    for key, value in loaded.items() if isinstance(loaded, Mapping) else enumerate(loaded):
        for name, tensor in _flattened(value, path, f"{prefix}.{key}" if prefix else str(key)).items():
            if name in found:
                raise UsageError(f"{path}: has two tensors of the name {name!r}; wanted one of each")
            found[name] = tensor
    if not found and not prefix:
        raise UsageError(f"{path}: holds no tensor")
    return found


def _json(path: Path, key: str, value: Any) -> Any:
    """What is read is JSON of the right kind; any other text stays text."""
    if key not in READ:
        return value
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        found = None
    wanted = {"order": list, "steps": dict, "precision": dict}[key]
    if not isinstance(found, wanted):
        raise UsageError(f"{path}: metadata {key!r} is not right; wanted JSON, a {wanted.__name__}")
    for name, said in found.items() if key == "steps" else ():
        wrong = [f for f, kind in _SAID.items() if isinstance(said, dict) and not isinstance(said.get(f, kind()), kind)]
        if not isinstance(said, dict) or wrong:
            field = f"{name!r}: {wrong[0]}" if wrong else repr(name)
            raise UsageError(f"{path}: metadata 'steps', {field} is not right; wanted {_WANTED}")
    if key == "order" and not all(isinstance(x, str) for x in found):
        raise UsageError(f"{path}: metadata 'order' is not right; wanted a list of names")
    return found


_SAID = {"inputs": list, "K": int}
_WANTED = "inputs (a list of names) and K (an integer)"
