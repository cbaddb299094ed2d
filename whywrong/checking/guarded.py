"""Memory between guard zones, which shows what is written outside of what a kernel was given or has allocated."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from whywrong.checking.repetition import poisoned
from whywrong.comparing.bits import same_bits
from whywrong.torch_private import TorchDispatchMode

GUARD_ELEMENTS = 1 << 12
"""Elements of the guard zones on both sides of what a kernel is given and of what it allocates."""

_FACTORIES = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "zeros", "zeros_like", "full"}


def memory_of(x: Tensor) -> Tensor:
    """All of the memory that `x` is part of."""
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage())


class Memory:
    """The memory of inputs between guard zones, by where it was; `start` is how it is before each call."""

    def __init__(self, tensors: dict[Any, Tensor], out: Collection[Any]) -> None:
        self._tensors, self._out = tensors, out
        self._at = {name: x.untyped_storage().data_ptr() for name, x in self._tensors.items()}
        self._memory = {self._at[name]: _guarded(x) for name, x in self._tensors.items()}
        for name in out:
            with poisoned():
                views = self.views(self._memory)
                views[name].copy_(torch.empty_like(views[name]))
        self.start = {place: x.clone() for place, x in self._memory.items()}

    def views(self, of: Mapping[int, Tensor]) -> dict[Any, Tensor]:
        """The inputs in such memory."""
        return {
            n: of[self._at[n]].as_strided(x.shape, x.stride(), x.storage_offset() + GUARD_ELEMENTS)
            for n, x in self._tensors.items()
        }

    def others(self) -> dict[int, Tensor]:
        """Other values in the same place, which no result takes for the same, be it without mean and scale."""
        found = {place: x.clone() for place, x in self.start.items()}
        for place in {self._at[n] for n, x in self._tensors.items() if n not in self._out and x.is_floating_point()}:
            x = found[place]
            x.copy_(x.double().square() + 1 + torch.arange(len(x), device=x.device) % 3)
        return found

    def copies(self, start: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """The memory that the kernel is given, as at the start."""
        for place, x in self._memory.items():
            x.copy_(start[place])
        return self._memory

    def whole(self, start: Mapping[int, Tensor]) -> bool:
        """Whether all of it, guard zones too, is as it was."""
        return all(same_bits(x, start[place]) for place, x in self._memory.items())

    def has(self, x: Tensor) -> bool:
        """Whether a result lies in it."""
        return x.untyped_storage().data_ptr() in {ours.untyped_storage().data_ptr() for ours in self._memory.values()}


class Allocations(TorchDispatchMode):
    """Guard zones around what is allocated."""

    edges: tuple[Tensor, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether they are as they were."""
        return all(same_bits(edge, _edge(edge[:1])) for edge in self.edges)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ not in _FACTORIES or not made.numel() or 0 in made.stride() or made.is_meta:
            return made
        memory = _guarded(made)
        self.edges += (memory[:GUARD_ELEMENTS], memory[-GUARD_ELEMENTS:])
        return memory.as_strided(made.shape, made.stride(), GUARD_ELEMENTS)


def _edge(x: Tensor) -> Tensor:
    return x.new_full((GUARD_ELEMENTS,), math.nan if x.is_floating_point() else int(x.long().min()))


def _guarded(x: Tensor) -> Tensor:
    """A copy of all of the memory that `x` is part of, between guard zones: NaN, or the smallest number in it."""
    memory = memory_of(x)
    return torch.cat([_edge(memory), memory, _edge(memory)])
