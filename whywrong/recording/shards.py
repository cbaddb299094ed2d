"""A step of which each rank holds a part, and how it is put together: "b s/sp h/tp".

A word for each dimension, with the axes that split it, the outermost first: ``s/cp/sp``; ``s/cp:zigzag`` is split into
twice as many pieces as cp has ranks, of which a rank holds one from each end. ``+tp`` after the dimensions: each rank
of tp holds a summand. On an axis that is not there all ranks hold the same. SGLang's notation is read too:
``s[cp:zigzag] h[tp]``, and ``h[tp:partial]`` for a summand.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from whywrong.errors import UsageError

RANKS = "ranks"
"""The name under which the ranks of each axis are declared, the slowest first: "dp=2 tp=4"."""

_DIMENSION = re.compile(r"(\w+|\([\w*]+\)|(?=\+))(?:\[([^\]]+)\]|([/+][\w/:+]+))?")
_QUALIFIERS = ("natural", "sharded", "zigzag", "partial")


class Split(NamedTuple):
    """A dimension that an axis splits; `how`, in order, in a zigzag, or not at all: the ranks hold summands."""

    dimension: int
    axis: str
    how: str


class Part(NamedTuple):
    """What a rank, counted over all, holds of a step; `axes` maps each axis to its rank there and how many it has."""

    rank: int
    read: Callable[[], Tensor]
    axes: Mapping[str, tuple[int, int]]
    dims: str = ""


def parse_dims(name: str, text: str) -> tuple[int | None, list[Split]]:
    """The number of dimensions, and how they are split, the outermost first. Raises UsageError, which names `name`."""
    splits, count = [], 0
    for word in text.split("#")[0].split():
        if not (match := _DIMENSION.fullmatch(word)):
            example = "expected a word a dimension with the axes that split it, such as 'b s/sp h/tp'"
            raise UsageError(f"dims: {name}: {example}, got {word!r}")
        count += bool(match[1])
        axes = match[2].split(",") if match[2] else re.findall(r"[/+][^/+]+", match[3] or "")
        for axis, _, qualifiers in (axis.strip().partition(":") for axis in axes):
            how = "partial" if axis.startswith("+") else qualifiers or "natural"
            if how not in _QUALIFIERS:
                raise UsageError(f"dims: {name}: expected one of {', '.join(_QUALIFIERS)}, got {how!r}")
            splits.append(Split(count - 1, axis.strip("/+"), how))
    if len({split.axis for split in splits}) < len(splits):
        raise UsageError(f"dims: {name}: expected each axis once, got {text!r}")
    return count or None, splits


def check_patterns(dims: Mapping[str, str], names: Collection[str]) -> None:
    """Raise UsageError for a pattern of `dims` that none of the steps' names matches."""
    for pattern in dims.keys() - {RANKS}:
        if not any(fnmatchcase(name, pattern) for name in names):
            steps = ", ".join(list(names)[:8]) + ", ..." * (len(names) > 8)
            raise UsageError(f"dims: {pattern}: expected the name of a step or a pattern of some, got none of {steps}")


@dataclass
class Shards:
    """The parts of one step; called, it gives the step as a tensor. `declared` dims come before those of the file."""

    name: str
    parts: Sequence[Part]
    declared: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def dims(self) -> str:
        """How the parts are put together, "" where nothing says it."""
        declared = (dims for pattern, dims in self.declared.items() if fnmatchcase(self.name, pattern))
        return next(declared, self.parts[0].dims)

    @cached_property
    def splits(self) -> list[Split]:
        """The axes that split the step, the outermost of each dimension first."""
        return parse_dims(self.name, self.dims)[1]

    @cached_property
    def places(self) -> list[dict[str, tuple[int, int]]]:
        """For each part its rank on each axis that has several, and how many there are."""
        if any(part.axes for part in self.parts) or len(self.parts) == 1:
            return [{axis: at for axis, at in part.axes.items() if at[1] > 1} for part in self.parts]
        axes, numbers = [split.axis for split in self.splits], [part.rank for part in self.parts]
        if not re.fullmatch(r"(\s*\w+=\d{1,9})*\s*", declared := self.declared.get(RANKS, "")):
            raise UsageError(f"dims: {RANKS}: expected axes with their sizes, such as 'dp=2 tp=4', got {declared!r}")
        sizes = {axis: int(size) for axis, size in re.findall(r"(\w+)=(\d+)", declared)}
        if not sizes and len(axes) < 2:  # those of a stage of a pipeline are numbered from it on
            sizes, numbers = {axes[0] if axes else RANKS: len(numbers)}, [rank - min(numbers) for rank in numbers]
        if not max(numbers) < prod(sizes.values()) < 1 << 62:
            held = ", ".join(str(part.rank) for part in self.parts)
            expected = f"expected all, or --dims '{RANKS}: dp=2 tp=4', the slowest axis first"
            raise UsageError(f"{self.name}: the ranks {held} hold it; {expected}")
        places = np.transpose(np.unravel_index(numbers, tuple(sizes.values()))).tolist()
        return [{axis: (i, sizes[axis]) for axis, i in zip(sizes, place, strict=True)} for place in places]

    @property
    def axes(self) -> dict[str, int]:
        """The axes that have several ranks, and how many."""
        return {axis: size for place in self.places for axis, (_, size) in place.items()}

    @property
    def alike(self) -> list[list[int]]:
        """Parts that are to be the same, by their numbers; for each place one list."""
        groups = defaultdict(list)
        for k, place in enumerate(self.places):
            groups[tuple(place.get(split.axis) for split in self.splits)].append(k)
        return list(groups.values())

    def label(self, k: int, other: int | None = None) -> str:
        """A part in words, by the axes that split the step, or by those on which it differs from another."""
        place, axes = self.places[k], [split.axis for split in self.splits if split.how != "partial"]
        if other is not None:
            axes = [axis for axis in place if place[axis] != self.places[other].get(axis)]
        names = [f"rank {place[axis][0]} of {axis}" for axis in axes if axis in place and axis != RANKS]
        return " and ".join(names[:2]) or f"rank {self.parts[k].rank}"

    def __call__(self) -> Tensor:
        """The step. Raises UsageError for parts that do not fit, that are missing, or of which nothing is known."""
        values = [part.read() for part in self.parts]
        if not self.dims:
            if all(values[0].shape == x.shape and torch.equal(values[0], x) for x in values[1:]):
                return values[0]
            expected = f"expected --dims '{self.name}: b s h/tp', or as it is split"
            raise UsageError(f"{self.name}: {len(values)} ranks hold different values; {expected}")
        count = parse_dims(self.name, self.dims)[0]
        if wrong := [list(x.shape) for x in values if x.ndim != count]:
            raise UsageError(f"{self.name}: expected {count} dimensions ({self.dims}), got {wrong[0]}")
        try:
            return self._joined(dict(enumerate(values)), self.splits)
        except RuntimeError:
            shapes = ", ".join(str(list(x.shape)) for x in values)
            raise UsageError(f"{self.name}: expected parts that fit ({self.dims}), got {shapes:.200}") from None

    def owners(self) -> Tensor:
        """For each element of the step which part it is from, int16, of the step's shape."""
        parts = {k: torch.full(part.read().shape, k, dtype=torch.int16) for k, part in enumerate(self.parts)}
        return self._joined(parts, [split for split in self.splits if split.how != "partial"])

    def _joined(self, parts: dict[int, Tensor], splits: Sequence[Split]) -> Tensor:
        if not splits:
            return next(iter(parts.values()))
        (dimension, axis, how), *rest = splits
        size = max(self.places[k].get(axis, (0, 1))[1] for k in parts)
        pieces = []
        for i in range(size):
            held = {k: x for k, x in parts.items() if self.places[k].get(axis, (0, 1))[0] == i}
            if not held:
                raise UsageError(f"{self.name}: rank {i} of {axis} is missing; expected all {size}")
            pieces.append(self._joined(held, rest))
        if how == "partial":
            if any(x.shape != pieces[0].shape for x in pieces):
                raise RuntimeError("summands of other shapes")
            return sum(pieces[1:], pieces[0].double()).to(pieces[0].dtype)
        if how == "zigzag" and size > 1:
            halves = [x.tensor_split(2, dimension) for x in pieces]
            pieces = [*(first for first, _ in halves), *(second for _, second in reversed(halves))]
        return torch.cat(pieces, dimension)
