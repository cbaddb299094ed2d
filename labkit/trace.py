"""Named steps in order: the golden's with bounds and a way to replay each, the observed's with values alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from labkit.tolerance import Bound


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


class Trace:
    """Steps in the order in which they were computed."""

    def __init__(self, steps: dict[str, Any] | None = None) -> None:
        self._steps: dict[str, Step] = {}
        for name, value in (steps or {}).items():
            self.add(name, value)

    def add(
        self,
        name: str,
        value: Any,
        inputs: tuple[str, ...] = (),
        bound: Bound | None = None,
        replay: Callable[..., tuple[Any, Bound]] | None = None,
    ) -> Any:
        """Append a step and return its value. Raises ValueError for a name that is already there."""
        if name in self._steps:
            raise ValueError(f"trace: step {name!r} is already there")
        self._steps[name] = Step(name, value, inputs, bound, replay)
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
