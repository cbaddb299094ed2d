"""Named steps in order: what an implementation gave, or a golden that no program makes again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from whywrong.comparing.bounds import Bound
from whywrong.comparing.comparison import ArrayLike, as_tensor
from whywrong.comparing.precision import Precision, from_fields
from whywrong.errors import UsageError
from whywrong.files import complete_file

Read = Callable[[], Any]
OUTPUT = "output"
"""The name of a reference's result; the parts of a function's dict have names of their own."""
NO_EFFECT, DIFFERS = "none", "differs when nothing is captured: "
"""What a capture's `observer` says where a run without it gives the same bits, and where not, before what differs."""

ABOUT = {"order": list, "steps": dict, "precision": dict}
"""Metadata that are read, and what their JSON is; what else there is, is shown."""

ABOUT_STEP = ("inputs", "K")
"""What metadata may say of a step: the names of its inputs, and the length of its sums."""


@dataclass(frozen=True)
class Step:
    """One intermediate tensor: its name, and its `value`, a tensor or an array of any shape.

    `bound`, of a golden or a counterfactual, is what an implementation may be off there.
    """

    name: str
    value: Any
    bound: Bound | None = None


class Trace:
    """Steps in the order in which they were computed, in memory or in a file, which is read a step at a time.

    ``trace[name]`` is a step's value as it was added, of any shape and dtype; :meth:`read` gives it as a tensor.
    `about` is a file's metadata, `source` the file, and `ordered` says whether the order is known to be the program's;
    `note` says how the steps were named.
    """

    def __init__(self, steps: Mapping[str, ArrayLike] | None = None, about: Mapping[str, Any] | None = None) -> None:
        self._steps: dict[str, tuple[Read, Bound | None]] = {}
        self.about, self.source, self.ordered, self.note = metadata(about or {}), "", True, ""
        for name, value in (steps or {}).items():
            self.add(name, value)

    def __repr__(self) -> str:
        return f"trace: {len(self.names)} steps: {', '.join(self.names[:6])}{', ...' * (len(self.names) > 6)}"

    def add(self, name: str, value: Any, bound: Bound | None = None) -> Any:
        """Append a step and return its value. Raises ValueError for a name that is already there."""
        if name in self:
            raise ValueError(f"trace: step {name!r} is already there")
        self._steps[name] = (lambda: value), bound
        return value

    @classmethod
    def lazy(cls, steps: Mapping[str, Read], about: Mapping[str, Any], source: str, ordered: bool) -> Trace:
        """Steps that are read when they are looked at, each by a function of its own."""
        trace = cls({}, about)
        trace._steps = {name: (read, None) for name, read in steps.items()}
        trace.source, trace.ordered = source, ordered
        return trace

    def named(self, names: Mapping[str, str], note: str = "") -> Trace:
        """The steps that `names` maps to others, by these, in its order; `note` says why."""
        trace = self.lazy({}, self.about, self.source, self.ordered)
        trace._steps, trace.note = {new: self._steps[old] for old, new in names.items()}, note or self.note
        return trace

    @property
    def names(self) -> list[str]:
        """The steps' names, in order."""
        return list(self._steps)

    @property
    def precision(self) -> Precision | None:
        """What `about` declares; None where it declares nothing. Raises UsageError for what is no Precision."""
        try:
            return from_fields(self.about["precision"]) if "precision" in self.about else None
        except UsageError as error:
            raise UsageError(f"{self.source}: metadata {error}" if self.source else str(error)) from None

    @property
    def texts(self) -> dict[str, str]:
        """Free text of the file, but not that the observer changed nothing."""
        steps = self.about.get("steps", {})
        others = sorted({str(key) for about in steps.values() for key in about if key not in ABOUT_STEP})
        texts = {"steps": f"{', '.join(others)}: not read"} if others else {}
        said = {key: str(value) for key, value in self.about.items() if key not in ABOUT}
        return texts | {key: text for key, text in said.items() if (key, text) != ("observer", NO_EFFECT)}

    def step_metadata(self, name: str) -> Mapping[str, Any]:
        """What the metadata says of one step, by :data:`ABOUT_STEP`; empty where it says nothing."""
        return self.about.get("steps", {}).get(name, {})

    def step(self, name: str) -> Step:
        """The whole step; its value alone is ``trace[name]``."""
        return Step(name, self[name], self._steps[name][1])

    def reader(self, name: str) -> Read:
        """What gives a step's value when it is called: of a step in shards, what knows them too."""
        return self._steps[name][0]

    def read(self, name: str) -> torch.Tensor:
        """A step as a tensor. Raises UsageError for what is none of real or whole numbers."""
        return as_tensor(f"step {name!r}", self[name])

    def __getitem__(self, name: str) -> Any:
        return self._steps[name][0]()

    def __contains__(self, name: object) -> bool:
        return name in self._steps

    def __iter__(self) -> Iterator[Step]:
        return map(self.step, self._steps)

    def save(self, path: Path | str) -> Path:
        """Write one safetensors file: a tensor a step, `about` and the `order` as metadata. Bounds are not kept.

        Raises UsageError for a step that is no array, and for metadata that are neither strings nor read.
        """
        about = {key: json.dumps(value) if key in ABOUT else value for key, value in self.about.items()}
        if wrong := {key: value for key, value in about.items() if not isinstance(value, str)}:
            raise UsageError(f"about: expected strings, got {wrong}")
        tensors = {name: self.read(name).cpu() for name in self.names}
        return write_safetensors(path, tensors, {**about, "order": json.dumps(self.names)})


def metadata(about: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """What is read, which may be JSON, as what it says; any other text as it is. Raises UsageError for anything else.

    `where` is what an error begins with.
    """
    parsed: dict[str, Any] = dict(about)
    for key in parsed.keys() & ABOUT.keys():
        with suppress(ValueError, RecursionError):
            parsed[key] = json.loads(parsed[key]) if isinstance(parsed[key], str) else parsed[key]
        if not isinstance(parsed[key], ABOUT[key]):
            raise UsageError(f"{where}metadata {key!r}: expected JSON, a {ABOUT[key].__name__}")
    if not all(isinstance(name, str) for name in parsed.get("order", ())):
        raise UsageError(f"{where}metadata 'order': expected a list of names")
    for name, fields in parsed.get("steps", {}).items():
        length, inputs = (fields.get("K", 1), fields.get("inputs", [])) if isinstance(fields, dict) else (0, [])
        valid = type(length) is int and 0 < length < 1 << 62 and isinstance(inputs, list)
        if not valid or not all(isinstance(item, str) for item in inputs):
            expected = "inputs (a list of names) and K (the length of its sums)"
            raise UsageError(f"{where}metadata 'steps', {name!r}: expected {expected}, got {str(fields)[:60]}")
    return parsed


Steps = Trace | Mapping[str, ArrayLike] | torch.Tensor | np.ndarray
"""What a trace may be given as: a Trace, arrays by the names of steps, in order, or the output alone."""


def as_trace(what: str, steps: Steps) -> Trace:
    """A trace, a mapping of arrays as one, or one array, which is the output.

    Raises UsageError, which calls it `what`, for anything else.
    """
    if isinstance(steps, Trace):
        return steps
    if isinstance(steps, (torch.Tensor, np.ndarray)):
        return Trace({OUTPUT: steps})
    if not isinstance(steps, Mapping) or not all(isinstance(name, str) for name in steps):
        kind = type(steps).__name__
        raise UsageError(f"{what}: expected a Trace, a dict of arrays by the names of steps, or an array, got a {kind}")
    return Trace(steps)


def write_safetensors(path: Path | str, tensors: Mapping[str, torch.Tensor], about: Mapping[str, str]) -> Path:
    """Write one file, whole or not at all. Raises UsageError where that cannot be done."""
    if not str(path).endswith(".safetensors"):
        raise UsageError(f"path: expected a name that ends in .safetensors, got {str(path)!r}")
    path = Path(path)
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    contiguous = {
        name: t.clone(memory_format=torch.contiguous_format) for name, t in tensors.items()
    }  # no shared memory
    try:
        with complete_file(path) as temporary:
            save_file(contiguous, temporary, dict(about))
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{path}: cannot be written ({error}); expected a file in a folder that is there") from None
    return path
