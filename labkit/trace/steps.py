"""Named steps in order: the golden's with bounds and a way to replay each, the observed's with values alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from labkit.errors import UsageError
from labkit.numerics.bounds import Bound

DETAILS = {"op": str, "inputs_complete": bool, "K": int, "dtype": str}
"""What a file may say of a step beside its inputs, and the type of each."""


@dataclass(frozen=True)
class Step:
    """One intermediate tensor.

    `inputs` names the steps that it is computed from. On a golden step, `bound` is what the whole chain up to here
    may be off in the implementation's precision, and `replay(*inputs)` recomputes the step in float64 from other
    inputs and returns it with the bound of the step by itself: that is what tells own from inherited error.
    """

    name: str
    value: Any
    inputs: tuple[str, ...] = ()
    bound: Bound | None = None
    replay: Callable[..., tuple[Any, Bound]] | None = None
    about: dict[str, Any] = field(default_factory=dict)
    """What a file keeps beside it: ``op``, ``inputs_complete``, ``K``, ``dtype``."""


class Trace:
    """Steps in the order in which they were computed; `about` is what a file says of all (compute, storage_dtype)."""

    def __init__(self, steps: dict[str, Any] | None = None, about: dict[str, str] | None = None) -> None:
        self._steps: dict[str, Step] = {}
        self.about = dict(about or {})
        for name, value in (steps or {}).items():
            self.add(name, value)

    def add(
        self,
        name: str,
        value: Any,
        inputs: tuple[str, ...] = (),
        bound: Bound | None = None,
        replay: Callable[..., tuple[Any, Bound]] | None = None,
        about: dict[str, Any] | None = None,
    ) -> Any:
        """Append a step and return its value. Raises ValueError for a name that is already there."""
        if name in self._steps:
            raise ValueError(f"trace: step {name!r} is already there")
        self._steps[name] = Step(name, value, inputs, bound, replay, dict(about or {}))
        return value

    @property
    def names(self) -> list[str]:
        """The steps' names, in order."""
        return list(self._steps)

    def step(self, name: str) -> Step:
        """The whole step; its value alone is ``trace[name]``."""
        return self._steps[name]

    def __getitem__(self, name: str) -> Any:
        return self._steps[name].value

    def __contains__(self, name: object) -> bool:
        return name in self._steps

    def __iter__(self) -> Iterator[Step]:
        return iter(self._steps.values())

    def __len__(self) -> int:
        return len(self._steps)

    def save(self, path: Path | str) -> Path:
        """Write one safetensors file: a tensor a step, `order`, `steps` and `about` as metadata, strings all.

        Bounds and replays are functions of the golden and are not kept. Written beside its name first, then moved
        into place. Raises UsageError for a step that is no array and for metadata of the wrong kind.
        """
        from safetensors.torch import save_file

        path = Path(path)
        tensors, steps = {}, {}
        for step in self:
            tensors[step.name] = _storable(step.name, step.value)
            for key, value in step.about.items():
                if key not in DETAILS or not isinstance(value, DETAILS[key]):
                    wanted = ", ".join(f"{k}: {v.__name__}" for k, v in DETAILS.items())
                    raise UsageError(f"about: {key}={value!r} of step {step.name!r} is not right; wanted {wanted}")
            steps[step.name] = step.about | ({"inputs": list(step.inputs)} if step.inputs else {})
        if wrong := {k: v for k, v in self.about.items() if not isinstance(v, str)}:
            raise UsageError(f"about: {wrong} is not right; wanted strings")
        metadata = self.about | {"order": json.dumps(self.names), "steps": json.dumps(steps)}
        temporary = path.with_name(f".{path.name}.part")
        save_file(tensors, temporary, metadata)
        temporary.replace(path)
        return path

    @classmethod
    def load(cls, path: Path | str) -> Trace:
        """Read what :meth:`save`, or any other program, wrote. Raises UsageError for what is no such file."""
        from labkit.trace.dumps import open_dump

        dump = open_dump(Path(path))
        trace = cls(about={k: v for k, v in dump.about.items() if isinstance(v, str)})
        for name in dump.names:
            said = dump.step(name)
            inputs = tuple(str(x) for x in said.get("inputs") or ())
            about = {k: v for k, v in said.items() if k in DETAILS and isinstance(v, DETAILS[k])}
            trace.add(name, dump.read(name), inputs, about=about)
        return trace


def _storable(name: str, value: Any) -> torch.Tensor:
    """A copy in memory of its own: safetensors takes no two names of one storage."""
    try:
        tensor = value if isinstance(value, torch.Tensor) else torch.from_numpy(np.asarray(value))
    except TypeError:
        kind = type(value).__name__
        raise UsageError(f"step {name!r}: {kind} cannot be stored; wanted a tensor or an array") from None
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
