"""What is found of a step of a trace, and what is known when a step is judged."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch

from labkit import precision
from labkit.handed_on import Input
from labkit.magnitude import finite, unmasked
from labkit.numerics.compare import Comparison
from labkit.numerics.structure import Structure
from labkit.samples import SOFTMAX
from labkit.trace.dumps import Dump

Tensor = torch.Tensor
INHERITED = "diverges, inherited only"
UNKNOWN_ORIGIN = "diverges after a wrong input; own and inherited not separated"
MOST_ELEMENTS = 1 << 20
"""Of a step, and of each step that it may be made of, up to which what it is made of is searched."""
COLUMNS = ", columns "
"""How the name of some columns of a step goes on."""
MOST_SLICES = 8
"""Into how many slices of columns a step is cut at most."""
NEAREST = 16
"""How many steps before it, and at the beginning, it may be made of."""


@dataclass
class Judgement:
    """What was found of one step."""

    name: str
    total: Comparison
    own: Comparison | None = None
    """Against the step replayed on the observed inputs; None where it is not separated."""
    inherited: float | None = None
    listed: bool = False
    """Whether the step's text says its operation: one of the closed list, or a formula. One that was only found in the
    golden's numbers has an :attr:`own` too, which decides whether it is wrong, but is reported as not separated."""
    structure: Structure | None = None
    wrong: bool = False
    """Whether the step adds an error: of its own, or of unknown origin."""
    tied: bool = False
    """Whether it chose otherwise among equals, so that what is made of its choice is not the golden's."""
    reasons: list[str] = field(default_factory=list)

    @property
    def separated(self) -> bool:
        """Whether own and inherited errors are told apart, and said."""
        return self.own is not None and self.listed

    @property
    def diverges(self) -> bool:
        """The step is wrong, or differs from the golden by more than it may because an input was wrong."""
        return self.wrong or bool(self.reasons)


class State:
    """Two traces, and what has been found of their steps so far."""

    def __init__(self, observed: Dump, golden: Dump) -> None:
        self.observed, self.golden = observed, golden
        self.order = golden.names
        """In which steps are judged."""
        self.wrong: set[str] = set()
        self.background: list[tuple[float, ...]] = []
        self.units: dict[str, float] = {}
        """The round-off of each step so far, as it was promised to be stored."""
        self.deduced: dict[str, list[str]] = {}
        """What steps were found to be made of, where nobody tells their order."""
        self._kept: dict[str, Tensor | None] = {}
        self._indices: dict[str, Tensor | None] = {}
        self._made: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {}
        """By a name of its own: the step that something is made of, and how."""
        self.flipped: dict[torch.Size, Tensor] = {}
        """By shape: where a right step so far is zero on one side alone, as a ReLU of what is nearly zero may be. What
        is masked by it later, as its gradient is, may be anything there."""

    def chosen(self, name: str, g: Tensor) -> list[str]:
        """What a step of indices along g's rows stands for, under names of its own: one where the index is, and one in
        the rows that have an index at all."""
        if name not in self._indices:
            value = self.golden.read(name)
            index = None if value.is_floating_point() or not value.numel() else value
            alike = index is not None and self.observed.read(name).shape == index.shape
            self._indices[name] = index if alike else None
        index = self._indices[name]
        if index is None or g.ndim < 2 or index.shape != g.shape[:-1] or int(index.max()) >= g.shape[-1]:
            return []
        columns = torch.arange(g.shape[-1])
        made: dict[str, Callable[[Tensor], Tensor]] = {
            f"{name}, one-hot": lambda x: (x.unsqueeze(-1) == columns).double()
        }
        if bool((index < 0).any()):
            made[f"{name}, given"] = lambda x: (x.unsqueeze(-1) >= 0).double()
        self._made |= {one: (name, way) for one, way in made.items()}
        return list(made)

    def softened(self, name: str, g: Tensor) -> list[str]:
        """The softmax of a step of g's shape, under a name of its own, where a step of indices that was
        :meth:`chosen` goes with its rows: a loss makes one on its way, of the rows that have an index."""
        value = self.golden.read(name)
        if value.shape != g.shape or g.ndim < 2 or not value.is_floating_point():
            return []
        index = next((x for x in self._indices.values() if x is not None and x.shape == g.shape[:-1]), None)
        if index is None:
            return []
        given = (index >= 0).unsqueeze(-1).double()
        self._made[name + SOFTMAX] = name, lambda x: torch.softmax(x, -1) * given
        return [name + SOFTMAX]

    def sliced(self, name: str, g: Tensor) -> list[str]:
        """A step's columns as a step of g's shape may be made of, under names of their own: as many as there are in a
        row of g, from each multiple of that, and the last ones."""
        value = self.golden.read(name)
        width = g[0].numel() if g.ndim > 1 and len(g) > 1 else 0
        few = value.ndim == 2 and width < value.shape[-1] <= MOST_SLICES * width and len(value) == len(g)
        if not few or not value.is_floating_point():
            return []
        shape, last = g.shape, value.shape[-1] - width
        starts = sorted({*range(0, last + 1, width), last})
        made = {f"{name}{COLUMNS}{at} to {at + width}": at for at in starts}
        self._made |= {
            one: (name, lambda x, at=at: x[:, at : at + width].reshape(shape))  # type: ignore[misc]
            for one, at in made.items()
        }
        return list(made)

    def recorded(self, name: str) -> bool:
        """Whether a step, or that of which it is a part, is in the golden."""
        return name in self.golden or COLUMNS in name

    def searched(self, name: str) -> Tensor | None:
        """The golden's step in float64 if an untold step may be made of it, the last ones kept."""
        if name in self._made:
            return self.input(name).golden
        if name not in self._kept:
            value = self.golden.read(name)
            numbers = value.dtype != torch.bool and not value.is_complex()
            kept = numbers and value.numel() <= MOST_ELEMENTS
            while len(self._kept) > 4 * NEAREST:
                self._kept.pop(next(iter(self._kept)))
            other = self.observed.read(name)
            alike = kept and other.shape == value.shape and not other.is_complex()
            self._kept[name] = self.both(name)[1] if alike else None
        return self._kept[name]

    def inputs(self, name: str) -> list[str]:
        """The names of a step's inputs, as the metadata has them."""
        given = self.golden.step(name).get("inputs") or self.observed.step(name).get("inputs") or []
        return [str(x) for x in given] if isinstance(given, list) else []

    def length(self, name: str) -> int | None:
        """The length of a step's sums, as the metadata has it; None where it has no number from 1."""
        said = (str(one.step(name).get("K")) for one in (self.golden, self.observed))
        return next((int(text) for text in said if text.isdigit() and int(text) > 0), None)

    def cut_to(self, name: str) -> float:
        """The round-off of a step's type where that is narrower than float32 and the step was computed, else 0.

        A kernel may have gone on with what it had before it stored that; what was given to it has no such before.
        """
        if name in self._made:
            base = self._made[name][0]
            if COLUMNS in name:
                return self.cut_to(base)
            if not name.endswith(SOFTMAX):
                return 0.0
            largest = float(finite(self.both(base)[0]).abs().max())  # of the exponent, and what a softmax takes
            return precision.UNIT["float32"] * (8.0 + largest) + self.cut_to(base) * largest
        value, exact = self.observed.read(name), self.golden.read(name)
        unit = max(self.units.get(name, 0.0), precision.UNIT.get(precision.dtype_name(value.dtype), 0.0))
        if unit <= precision.UNIT["float32"] or precision.of_8_bits(value):  # codes are what a kernel goes on with
            return 0.0
        if value.shape == exact.shape and torch.equal(value.double(), exact.double()):
            return 0.0
        return unit if self.inputs(name) or self.computed(name) else 0.0

    @cached_property
    def ordered(self) -> bool:
        """Whether the golden's order is the program's: it is told, or each name holds its place."""
        if self.golden.about.get("order") or self.observed.about.get("order"):
            return True
        places = {x: int(found[0]) if (found := re.findall(r"\d+", x)) else -1 for x in self.golden.names}
        if any(a > b for a, b in itertools.pairwise([0, *places.values()])):
            return False
        alike = (list(group) for _, group in itertools.groupby(places, key=places.__getitem__))
        return all(len(group) == 1 or sum(map(self._was_made, group)) <= 1 for group in alike)

    def _was_made(self, name: str) -> bool:
        return name in self.observed and self.computed(name)

    def computed(self, name: str) -> bool:
        """Whether the two sides of a step differ, as what was given to both programs does not."""
        value = self.observed.read(name)
        return not torch.equal(self.golden.read(name).to(value.dtype), value)

    def earlier(self, name: str) -> list[str]:
        """The steps before `name` that both traces have."""
        return [x for x in self.order[: self.order.index(name)] if x in self.observed]

    def before(self, name: str) -> Iterator[Input]:
        """Every step before `name`, for one whose inputs are not told; one at a time."""
        return (self.input(x) for x in self.earlier(name))

    def input(self, name: str) -> Input:
        """Both sides of one step, in float64, or of what is made of one."""
        if name in self._made:
            base, way = self._made[name]
            o, g = self._read(base)
            return Input(name, way(o), way(g), base in self.wrong)
        return Input(name, *self.both(name), name in self.wrong)

    def _read(self, name: str) -> tuple[Tensor, Tensor]:
        """Both sides as what is made of them takes them: indices as they are."""
        value = self.golden.read(name)
        return self.both(name) if value.is_floating_point() else (self.observed.read(name), value)

    def both(self, name: str) -> tuple[Tensor, Tensor]:
        """The observed's step and the golden's in float64, with -Inf where both hold a mask."""
        o, g = self.observed.read(name).double(), self.golden.read(name).double()
        return unmasked(o, g) if o.shape == g.shape else (o, g)

    def complete(self, name: str, *, said: bool = False) -> bool:
        """Whether neither trace says that an input is not recorded; where it must be `said`, one says that none is."""
        words = [d.step(name).get("inputs_complete") for d in (self.golden, self.observed)]
        return False not in words and (True in words or not said)


def first_reason(found: Comparison) -> str:
    """What is said of a comparison that is not ok: how many elements, and where first."""
    if found.observed_nan > found.golden_nan:
        return f"{found.observed_nan - found.golden_nan} NaN where the golden has none, first at {found.first_index}"
    if found.observed_inf > found.golden_inf:
        return f"{found.observed_inf - found.golden_inf} Inf where the golden has none, first at {found.first_index}"
    share = "beyond any bound" if math.isinf(found.bound_used) else f"up to {found.bound_used:.3g} times the bound"
    return f"{found.mismatches} of {found.count} elements {share}, first at {found.first_index}"
