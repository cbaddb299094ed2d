"""One step of a trace: whether it is wrong by itself, inherits, or cannot be told apart."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from labkit import precision
from labkit import words as wording
from labkit.allowance import Allowed, by_formula, replayed, storage, unrecorded, unreplayed
from labkit.compare import Comparison, compare
from labkit.dumps import Dump
from labkit.errors import UsageError
from labkit.formula import formula, named
from labkit.handed_on import Input
from labkit.inference import Found, infer
from labkit.magnitude import MASKED, finite, spread
from labkit.precision import Precision
from labkit.replay import replay
from labkit.structure import Structure, structure
from labkit.tolerance import Bound

Tensor = torch.Tensor
MOST_ELEMENTS = 1 << 20
"""Of a step, and of each step that it may be made of, up to which what it is made of is searched."""
NEAREST = 16
"""How many steps before it, and at the beginning, it may be made of."""
WIDEST_CODE = 255
"""The largest number that is taken for a code, which a tie may move by one; larger ones are sums or indices."""


INHERITED = "diverges, inherited only"
UNKNOWN_ORIGIN = "diverges after a wrong input; own and inherited not separated"


@dataclass
class Judgement:
    """What was found of one step."""

    name: str
    total: Comparison
    own: Comparison | None = None
    """Against the step replayed on the observed inputs; None where it is not separated."""
    inherited: float | None = None
    listed: bool = True
    """Whether the step's operation is one of the closed list, or a formula: what :attr:`own` of any other is worth is
    known here, since its name gave the golden's numbers, but it is reported as not separated."""
    structure: Structure | None = None
    wrong: bool = False
    """Whether the step adds an error: of its own, or of unknown origin."""
    tied: bool = False
    """Whether it chose otherwise among equals, so that what is made of its choice is not the golden's."""
    reasons: list[str] = field(default_factory=list)

    @property
    def diverges(self) -> bool:
        """The step is wrong, or differs from the golden by more than it may because an input was wrong."""
        return self.wrong or bool(self.reasons)


class State:
    """Two traces, and what has been found of their steps so far."""

    def __init__(self, observed: Dump, golden: Dump) -> None:
        self.observed, self.golden = observed, golden
        self.wrong: set[str] = set()
        self.background: list[tuple[float, ...]] = []
        self.units: dict[str, float] = {}
        """The round-off of each step so far, as it was promised to be stored."""
        self._kept: dict[str, Tensor | None] = {}
        self.flipped: dict[torch.Size, Tensor] = {}
        """By shape: where a right step so far is zero on one side alone, as a ReLU of what is nearly zero may be. What
        is masked by it later, as its gradient is, may be anything there."""

    def searched(self, name: str) -> Tensor | None:
        """The golden's step in float64 if an untold step may be made of it, the last ones kept."""
        if name not in self._kept:
            value = self.golden.read(name)
            kept = value.is_floating_point() and value.numel() <= MOST_ELEMENTS
            while len(self._kept) > 4 * NEAREST:
                self._kept.pop(next(iter(self._kept)))
            alike = kept and self.observed.read(name).shape == value.shape
            self._kept[name] = value.double() if alike else None
        return self._kept[name]

    def inputs(self, name: str) -> list[str]:
        """The names of a step's inputs, as the metadata has them."""
        given = self.golden.step(name).get("inputs") or self.observed.step(name).get("inputs") or []
        return [str(x) for x in given] if isinstance(given, list) else []

    def cut(self, name: str) -> bool:
        """Whether a step was computed and has lost digits on the way into its trace."""
        value, exact = self.observed.read(name), self.golden.read(name)
        if value.shape == exact.shape and torch.equal(value.double(), exact.double()):
            return False
        return bool(self.inputs(name)) or self.computed(name)

    @cached_property
    def ordered(self) -> bool:
        """Whether the golden's order is the program's: it is told, or each name holds its place."""
        if self.golden.about.get("order") or self.observed.about.get("order"):
            return True
        places = [int(found[0]) if (found := re.findall(r"\d+", name)) else -1 for name in self.golden.names]
        return all(a < b for a, b in itertools.pairwise([-1, *places]))

    def computed(self, name: str) -> bool:
        """Whether the two sides of a step differ, as what was given to both programs does not."""
        value = self.observed.read(name)
        return not torch.equal(self.golden.read(name).to(value.dtype), value)

    def before(self, name: str) -> Iterator[Input]:
        """Every step before `name`, for one whose inputs are not told; one at a time."""
        earlier = self.golden.names[: self.golden.names.index(name)]
        return (self.input(x) for x in earlier if x in self.observed)

    def input(self, name: str) -> Input:
        """Both sides of one step, in float64."""
        return Input(name, self.observed.read(name).double(), self.golden.read(name).double(), name in self.wrong)

    def complete(self, name: str) -> bool:
        """Whether neither trace says that an input is not recorded."""
        said = [d.step(name).get("inputs_complete") for d in (self.golden, self.observed)]
        return False not in said


def step(name: str, state: State) -> Judgement:
    """Judge one step that both traces have. Raises UsageError for what cannot be compared."""
    o, g = state.observed.read(name), state.golden.read(name)
    if o.shape != g.shape:
        total = compare(o, g)
        return Judgement(name, total, wrong=True, reasons=[f"shape {tuple(o.shape)}, golden {tuple(g.shape)}"])
    for side, t in ((state.observed, o), (state.golden, g)):
        if t.is_complex():
            raise UsageError(f"{side.path}: step {name!r} is {t.dtype}; wanted real numbers")
    if not o.numel():
        return Judgement(name, compare(o.double(), g.double()))
    promised = precision.of_step(name, o, state.observed, state.golden, g.dtype)
    state.units[name] = promised.unit
    g64, o64 = g.double(), o.double()
    op = str(state.golden.step(name).get("op") or state.observed.step(name).get("op") or "")
    words = _operation(op, state.inputs(name)) or name
    if wording.LOGIT_GRADIENT.search(name):
        words += " dlogits"  # whatever its text says, there are exponentials in it
    if precision.juxtaposed(op, state.inputs(name)):  # a product, which its text says in no such word
        words += " averaged" if "softmax" in op else " matmul"
    o64 = _masked_alike(o64, g64)
    names = state.inputs(name)
    there = [x for x in names if x in state.golden and x in state.observed]
    inputs = [state.input(x) for x in there]
    inputs = [x for x in inputs if x.observed.shape == x.golden.shape]
    k = _length(state.golden.step(name).get("K")) or _length(state.observed.step(name).get("K"))
    counted = promised.stored == "integer" and bool((finite(g64) == finite(g64).round()).all())
    sums = float(finite(g64).abs().max()) > WIDEST_CODE and any(one[0] > 0.0 for one in state.background)
    if not counted and _codes(g64) and _codes(o64):
        counted, sums = True, False
    if counted and not sums:  # sums of codes, some of which fell to the other side of a tie, are off like real numbers
        return _integers(name, o, g, op, inputs, state)
    noisy = [one for one in state.background if one[0] > 0.0]  # inputs and weights say nothing of the noise
    recent = state.background[-4:] + noisy[-4:]
    alike = [one for one in state.background if one[4] == g.numel()]  # a mean may be taken from what came long before
    background = tuple(max((one[i] for one in (recent if i < 3 else recent + alike)), default=0.0) for i in range(4))
    complete = len(inputs) == len(names) and state.complete(name)
    allowed = unreplayed(g64, words, k, inputs, background, promised, complete=complete)
    if g.shape in state.flipped:
        allowed = replace(allowed, bound=allowed.bound.masked_fill(state.flipped[g.shape], math.inf))
    total, below, reasons = _hold(o64, g64, allowed)
    relative = total.rms_ratio
    found = Judgement(name, total, structure=below)
    way = written = None
    if names and complete:
        unit = 2.0**-53 if promised.golden is None else max(torch.finfo(promised.golden).eps, 2.0**-24)
        exact = [x.golden for x in inputs]
        way = replay(op, exact, g64, unit)
        if way is None:
            grid = storage(g64, promised) if promised.unit > precision.UNIT["float16"] else torch.zeros_like(g64)
            written = formula(op, names, exact, g64, unit, grid)
            if written is None:
                written, found.listed = named(op, exact, g64, unit, grid), False
    told = names
    guessed = None if way or written else _inferred(name, g, g64, names, complete, promised, state)
    if guessed:
        way, written, found.listed = guessed.way, guessed.written, False
        told, names = names, guessed.names
        if way is not None and way.product:
            promised = precision.of_step(name, o, state.observed, state.golden, g.dtype, is_product=True)
        inputs = [state.input(x) for x in names]
    if way is not None or written is not None:
        narrow = _narrow(names, state)
        if way is not None:
            value, own_allowed = replayed(way, [x.observed for x in inputs], promised, op.count(";") + 1, narrow)
        else:
            assert written is not None
            value, own_allowed = by_formula(
                written, [x.observed for x in inputs], narrow, promised, guessed is not None
            )
        if guessed:
            known = bool(told) and complete
            own_allowed = unrecorded(own_allowed, value if not known else g64, g64, f"{name} {op}", promised)
        found.own, found.structure, own_reasons = _hold(o64, value, own_allowed, by_element=True)
        found.inherited = compare(value, g64, math.inf).rms_ratio
        # A running error bound takes all roundings to fall one way: where nothing is inherited the golden tells more.
        reasons = own_reasons or (reasons if not found.listed and found.inherited <= promised.compute else [])
    found.reasons, found.wrong = reasons, bool(reasons)
    if any(x.wrong for x in inputs) and (found.own is None or not reasons):
        unspoiled = [Input(x.name, x.golden, x.golden, False) for x in inputs]
        strict = unreplayed(g64, words, k, unspoiled, (0.0, 0.0, 0.0, 0.0), promised)
        found.wrong = False  # where own and inherited are not separated, whether it adds anything cannot be told
        words = INHERITED if found.own is not None else UNKNOWN_ORIGIN
        found.reasons = [words] if _hold(o64, g64, strict)[2] else []
    if not found.wrong and bool((flips := (o64 == 0.0) != (g64 == 0.0)).any()):
        state.flipped[g.shape] = state.flipped.get(g.shape, flips) | flips
    if not found.wrong and math.isfinite(relative):
        size = float(finite(g64).pow(2).mean().sqrt())
        condition = size / max(spread(finite(g64)), 1e-300)
        state.background.append((relative, 0.5 * total.max_abs, size, condition, float(g.numel())))
    return found


def _inferred(
    name: str, g: Tensor, g64: Tensor, names: Sequence[str], complete: bool, promised: Precision, state: State
) -> Found | None:
    """What an untold step is made of, if the golden's numbers tell; of its own inputs where these are all there."""
    if not g.dtype.is_floating_point or g.numel() > MOST_ELEMENTS or not (state.ordered or (names and complete)):
        return None
    if not state.computed(name):
        return None
    if names and complete:
        sources = list(names)
    else:
        earlier = [x for x in state.golden.names[: state.golden.names.index(name)] if x in state.observed]
        sources = [*reversed(earlier[-NEAREST:]), *earlier[:-NEAREST][:NEAREST]]
    given = {x: t for x in sources if (t := state.searched(x)) is not None}
    unit = 2.0**-53 if promised.golden is None else max(torch.finfo(promised.golden).eps, 2.0**-24)
    grid = storage(g64, promised) if promised.unit > precision.UNIT["float16"] else torch.zeros_like(g64)
    return infer(g64, given, unit, grid)


def _codes(x: Tensor) -> bool:
    """Whether real numbers are codes, as zero points often are kept: whole, small, and of more than a mask's values."""
    whole = bool((x == x.round()).all()) and float(x.abs().max()) <= WIDEST_CODE
    return whole and x.numel() >= 16 and len(x.unique()) > 3


def _narrow(names: Sequence[str], state: State) -> list[float]:
    """The round-off of each input's type where that is narrower than float32 and the input was computed: a kernel may
    have gone on with what it had before it stored it. What was given to the program has no such before."""
    units = [
        max(state.units.get(name, 0.0), precision.UNIT.get(precision.dtype_name(state.observed.read(name).dtype), 0.0))
        for name in names
    ]
    return [
        unit if unit > precision.UNIT["float32"] and state.cut(name) else 0.0
        for name, unit in zip(names, units, strict=True)
    ]


def _operation(op: str, inputs: Sequence[str]) -> str:
    """The text of an operation without the names of its inputs: `lse - mean(logits)` takes no logarithm."""
    for name in sorted({part for one in inputs for part in (one, re.split(r"[./:]", one)[-1])}, key=len, reverse=True):
        if name:
            op = re.sub(rf"(?<![A-Za-z0-9_]){re.escape(name)}(?![A-Za-z0-9_])", "x", op)
    return op


def _length(k: object) -> int | None:
    """A reduction length as metadata has it; None for what is no number from 1."""
    text = str(k)
    return int(text) if text.isdigit() and int(text) > 0 else None


def _masked_alike(o: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """A mask may be -Inf or a number that no softmax can tell from it: what is below MASKED on both sides is alike."""
    alike = (o <= MASKED) & (g <= MASKED) & (o.isinf() != g.isinf())
    return torch.where(alike, g, o)


def _integers(name: str, o: torch.Tensor, g: torch.Tensor, op: str, inputs: Sequence[Input], state: State) -> Judgement:
    total = compare(o, g)
    found = Judgement(name, total)
    if total.ok:
        return found
    d = (o.to(torch.int64) - g.to(torch.int64)).double()
    if inputs and len(inputs) == len(state.inputs(name)) and state.complete(name):
        way = replay(op, [x.golden for x in inputs], g.double(), 0.0)
        if way is not None:
            found.own = compare(o.double(), way.run(*[x.observed for x in inputs]), 0.0)
            found.wrong = not found.own.ok
            found.reasons = [] if found.own.ok else [_first_reason(found.own)]
            return found
    share = float((d != 0).double().mean())
    if any(x.wrong for x in inputs):
        return found
    if _chosen_alike(o.to(torch.int64), g.to(torch.int64), inputs or state.before(name)):
        found.tied = True
        return found
    ties = _ties(o, g, inputs)
    packed = bool(re.search(r"pack|int4|nibble", f"{name} {op}", re.IGNORECASE))
    level = torch.isin(d.abs(), torch.tensor([0.0, 1.0, 15.0, 16.0, 17.0] if packed else [0.0, 1.0], dtype=d.dtype))
    size = float(g.double().pow(2).mean().sqrt())
    noise = max((one[0] for one in state.background[-4:]), default=0.0)
    if ties or (ties is None and bool(level.all()) and share <= max(1e-2, 4.0 * noise * size)):
        state.background.append((total.rms_ratio, 0.5 * total.max_abs, size, 1.0, float(g.numel())))
        return found
    found.wrong, found.reasons = True, [_first_reason(total)]
    return found


def _chosen_alike(o: Tensor, g: Tensor, inputs: Iterable[Input]) -> bool:
    """Whether both sides are indices of an input's largest elements, in its rows: equal ones in any order.

    That they are is read off the golden; an observed choice counts by the observed's own numbers.
    """
    for x in inputs:
        one = g.ndim == x.golden.ndim - 1  # of each row
        at, other = (g.unsqueeze(-1), o.unsqueeze(-1)) if one else (g, o)
        columns = x.golden.shape[-1] if x.golden.ndim else 0
        if columns < 2 or x.golden.shape[:-1] != at.shape[:-1] or at.shape[-1] > columns:
            continue
        if x.observed.shape == x.golden.shape and _within(at, columns) and _largest(at, x.golden):
            row = other.sort(-1).values
            different = bool((row[..., 1:] != row[..., :-1]).all())
            return different and _within(other, columns) and _largest(other, x.observed)
    return False


def _largest(at: Tensor, x: Tensor) -> bool:
    """Whether `at` picks the largest of each row, to float32's precision."""
    best = x.topk(at.shape[-1], -1).values
    return bool(((x.gather(-1, at) - best).abs() <= 4.0 * precision.UNIT["float32"] * best.abs()).all())


def _within(at: Tensor, columns: int) -> bool:
    return bool((at >= 0).all()) and bool((at < columns).all())


def _ties(o: torch.Tensor, g: torch.Tensor, inputs: Sequence[Input]) -> bool | None:
    """Whether every integer that differs was rounded from a tie, to float32's precision; None where that is not
    known."""
    for given in (x for x in inputs if x.golden.numel() == g.numel()):
        x = replace(given, golden=given.golden.reshape(g.shape), observed=given.observed.reshape(g.shape))
        for s in inputs:
            if s is given or s.golden.numel() > x.golden.numel():
                continue
            scale, other = _spread_over(s.golden, x.golden), _spread_over(s.observed, x.observed)
            if scale is None or other is None:
                continue
            exact, seen = x.golden / scale, x.observed / other
            low, high = float(g.min()), float(g.max())
            points = [(torch.zeros_like(exact), torch.zeros_like(exact))]  # what may be added to the codes
            for z in (one for one in inputs if one is not given and one is not s):
                point, theirs = _spread_over(z.golden, x.golden), _spread_over(z.observed, x.observed)
                points += [(point, theirs)] if point is not None and theirs is not None else []
            for point, theirs in points:
                if float(((exact.round() + point).clamp(low, high) == g).double().mean()) < 0.98:
                    continue
                moved = (o.double() - theirs) - (g.double() - point)
                near = ((exact + 0.5) - (exact + 0.5).round()).abs() <= 1e-5 * exact.abs().clamp(min=1.0) + (
                    exact - seen
                ).abs()
                return bool(((o == g) | (moved == 0.0) | (near & (moved.abs() == 1.0))).all())
    return None


def _spread_over(s: Tensor, x: Tensor) -> Tensor | None:
    """s in x's shape: as it broadcasts, as a row's, or as a group's along one axis; None where it is none of these."""
    for candidate in (s, s.unsqueeze(-1)):
        try:
            return candidate.broadcast_to(x.shape)
        except RuntimeError:
            continue
    kept = [size for size in s.shape if size != 1]
    for axis, size in enumerate(x.shape):
        for groups in (v for v in s.shape if v > 1 and size % v == 0):
            shape = (*x.shape[:axis], groups, *x.shape[axis + 1 :])
            if [v for v in shape if v != 1] == kept:
                return s.reshape(shape).repeat_interleave(size // groups, axis)
    return None


def _hold(
    o: Tensor, against: Tensor, allowed: Allowed, *, by_element: bool = False
) -> tuple[Comparison, Structure, list[str]]:
    """Both instruments on one step: element by element, and structure below that."""
    found = compare(o, against, Bound(torch.where(against.isfinite(), allowed.bound, 0.0), allowed.why))
    residual = torch.where(
        allowed.bound.isinf(), math.nan, o.double() - against
    )  # where anything goes, nothing is tested
    below = structure(residual, finite(against), allowed.noise, allowed.shared, allowed.overall, by_element=by_element)
    reasons = []
    if not found.ok:
        reasons.append(_first_reason(found))
    if not below.ok:
        worst = below.worst
        place = "" if worst.at is None else f" {worst.at}"
        reasons.append(
            f"systematic: {worst.name}{place} off by {worst.value:.3g}, {worst.share:.3g} times what is allowed"
        )
    return found, below, reasons


def _first_reason(found: Comparison) -> str:
    if found.observed_nan > found.golden_nan:
        return f"{found.observed_nan - found.golden_nan} NaN where the golden has none, first at {found.first_index}"
    if found.observed_inf > found.golden_inf:
        return f"{found.observed_inf - found.golden_inf} Inf where the golden has none, first at {found.first_index}"
    share = "beyond any bound" if math.isinf(found.bound_used) else f"up to {found.bound_used:.3g} times the bound"
    return f"{found.mismatches} of {found.count} elements {share}, first at {found.first_index}"
