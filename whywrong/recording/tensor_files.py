"""One file of tensors, of which nothing is run: what is no tensor, and what no honest file holds, is one line."""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whywrong.comparing.comparison import as_tensor
from whywrong.errors import UsageError, first_line

MOST_STEPS, DEEPEST = 100_000, 100
"""Steps that a dump may have, and containers in each other that a file may have."""

FREE_BYTES = 1 << 28
"""Bytes from which a tensor may not be larger than its file: by strides of 0, a small file could ask for any memory."""


class Inert:
    """Stands for whatever a pickle would make of a class or function that is not a tensor's; it keeps nothing."""

    def __new__(cls, *_: Any, **__: Any) -> Inert:
        """Whatever the file has as arguments."""
        return object.__new__(cls)

    def __setstate__(self, _: Any) -> None: ...

    def __setitem__(self, *_: Any) -> None: ...


def natural(name: str) -> list[Any]:
    """A key that sorts names as people do: step2 before step10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def load_file(path: Path, read: Callable[[], Any] | None = None, name: str = "") -> Any:
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
    except Exception as error:
        if isinstance(error, pickle.UnpicklingError) and not read:  # torch's words tell how to run what the file has
            expected = "expected tensors alone, by name or in a list, as a module's state_dict()"
            raise UsageError(f"{path}: {expected}, got what torch.load(weights_only=True) refuses") from None
        raise UsageError(f"{path}: {name}is cut, damaged or of another kind ({first_line(error)})") from None


def load_checkpoint(path: Path) -> Any:
    """The same of a torch.save file that holds objects beside its tensors: each is :class:`Inert`, and none is run."""
    unknown = load_file(path, lambda: torch.serialization.get_unsafe_globals_in_checkpoint(path))
    with torch.serialization.safe_globals([(Inert, name) for name in unknown]):
        return load_file(path)


def flattened(loaded: Any, path: Path, others: list[str] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Tensors, arrays and numbers in nested dicts, lists and tuples, by name and in their own order.

    The names of what is none are appended to `others`. Raises UsageError where `others` is None and something is
    neither a tensor nor a text, and for more than MOST_STEPS or DEEPEST.
    """
    left, most, count = [("", loaded, 0)], max(path.stat().st_size, FREE_BYTES), 0
    while left:
        name, value, depth = left.pop()
        count += 1
        where = f"{path}: {name:.60}: " if name else f"{path}: "
        if isinstance(value, (Tensor, np.ndarray)):
            tensor = as_tensor(str(path), value)
            if tensor.nbytes > most:
                raise UsageError(f"{where}expected no more bytes than its file has, got {tensor.nbytes}")
            yield name or "tensor", tensor
        elif isinstance(value, (bool, int, float)):
            yield name or "number", torch.tensor(value)
        elif isinstance(value, (Mapping, list, tuple)):
            if depth == DEEPEST or max(len(value), count) > MOST_STEPS:
                raise UsageError(f"{where}expected {MOST_STEPS} tensors at most, in {DEEPEST} containers at most")
            pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
            left += reversed([(f"{name}.{key}" if name else str(key), item, depth + 1) for key, item in pairs])
        elif others is not None:
            others.append(name)
        elif value is not None and not isinstance(value, (str, bytes)):
            raise UsageError(f"{where}expected tensors, by name or in a list, got a {type(value).__name__}")


def only(path: Path, loaded: Any = None) -> Tensor:
    """The first tensor of what a file of one tensor holds."""
    return next(iter(named_once(flattened(load_file(path) if loaded is None else loaded, path), path).values()))


def named_once(tensors: Iterator[tuple[str, Tensor]], path: Path) -> dict[str, Tensor]:
    """The tensors by name. Raises UsageError for two of one name, and for none."""
    steps: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if name in steps:
            raise UsageError(f"{path}: expected one tensor of a name, got two tensors of the name {name!r}")
        steps[name] = tensor
    if not steps:
        raise UsageError(f"{path}: expected tensors, got a file that holds no tensor")
    return steps
