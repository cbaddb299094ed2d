"""Named steps in order: what an implementation gave, or a golden that no program makes again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from labkit.errors import UsageError
from labkit.numerics.bounds import Bound
from labkit.numerics.compare import as_tensor
from labkit.numerics.precision import Precision, from_json


@dataclass(frozen=True)
class Step:
    """One intermediate tensor. `bound`, of a golden or a counterfactual, is what an implementation may be off there."""

    name: str
    value: Any
    bound: Bound | None = None


class Trace:
    """Steps in the order in which they were computed; `about` is a file's metadata, strings all."""

    def __init__(self, steps: Mapping[str, Any] | None = None, about: Mapping[str, str] | None = None) -> None:
        self._steps: dict[str, Step] = {}
        self.about = dict(about or {})
        for name, value in (steps or {}).items():
            self.add(name, value)

    def add(self, name: str, value: Any, bound: Bound | None = None) -> Any:
        """Append a step and return its value. Raises ValueError for a name that is already there."""
        if name in self._steps:
            raise ValueError(f"trace: step {name!r} is already there")
        self._steps[name] = Step(name, value, bound)
        return value

    @property
    def names(self) -> list[str]:
        """The steps' names, in order."""
        return list(self._steps)

    @property
    def precision(self) -> Precision | None:
        """What `about` promises; None where it says nothing."""
        return from_json(self.about["precision"]) if "precision" in self.about else None

    def step(self, name: str) -> Step:
        """The whole step; its value alone is ``trace[name]``."""
        return self._steps[name]

    def __getitem__(self, name: str) -> Any:
        return self._steps[name].value

    def __contains__(self, name: object) -> bool:
        return name in self._steps

    def __iter__(self) -> Iterator[Step]:
        return iter(self._steps.values())

    def save(self, path: Path | str) -> Path:
        """Write one safetensors file: a tensor a step, `about` and the `order` as metadata. Bounds are not kept.

        Raises UsageError for a step that is no array, and for metadata that are no strings.
        """
        if wrong := {key: value for key, value in self.about.items() if not isinstance(value, str)}:
            raise UsageError(f"about: {wrong} is not right; wanted strings")
        tensors = {step.name: as_tensor(f"step {step.name!r}", step.value).cpu() for step in self}
        return write_safetensors(Path(path), tensors, {**self.about, "order": json.dumps(self.names)})

    @classmethod
    def load(cls, path: Path | str) -> Trace:
        """Read what :meth:`save`, or any other program, wrote. Raises UsageError for what is no trace."""
        from labkit.trace.dumps import open_dump

        dump = open_dump(Path(path))
        return cls({name: dump.read(name) for name in dump.names}, dump.about)


def write_safetensors(path: Path, tensors: Mapping[str, torch.Tensor], about: Mapping[str, str]) -> Path:
    """Write beside the name first, then move into place, so that no half of a file is ever found there."""
    from safetensors.torch import save_file

    temporary = path.with_name(f".{path.name}.part")
    whole = {name: t.clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}  # no shared memory
    save_file(whole, temporary, dict(about))
    temporary.replace(path)
    return path
