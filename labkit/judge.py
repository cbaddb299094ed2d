"""One step of a trace: whether it is wrong by itself, inherits, or cannot be told apart."""

from __future__ import annotations

import ast
import enum
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from labkit import precision, words
from labkit.allowance import Allowed, roundings, unreplayed
from labkit.blocks import spread_over
from labkit.errors import UsageError
from labkit.formula import formula, named
from labkit.found import Found
from labkit.handed_on import Input
from labkit.inference import inferred
from labkit.integers import WIDEST_CODE, codes, integers
from labkit.judgement import INHERITED, MOST_ELEMENTS, NEAREST, UNKNOWN_ORIGIN, Judgement, State, first_reason
from labkit.magnitude import finite, spread
from labkit.numerics.bounds import Bound
from labkit.numerics.compare import Comparison, compare
from labkit.numerics.structure import Structure, structure
from labkit.precision import Precision
from labkit.promises import juxtaposed
from labkit.replay import replay
from labkit.replay_bounds import by_formula, replayed
from labkit.samples import SOFTMAX
from labkit.widened import misfitting, quantised, scaled, unrecorded

Tensor = torch.Tensor
FEWER_DIGITS = "every number is one of a 16-bit type's, where float32 is promised"
MOST_MAKINGS = 4
"""Readings of a golden that are tried on an observed step before it counts as wrong."""


class Origin(enum.Enum):
    """How it is known what a step does."""

    TEXT = "its text is one of the closed list, or a formula"
    NAME = "its text or name is a common one, whose meaning gives the golden's numbers"
    NUMBERS = "it was found in the golden's numbers, its inputs too where they are not told"


@dataclass
class _Step:
    """What is known of a step that has real numbers, before it is judged."""

    name: str
    op: str
    observed: Tensor
    golden: Tensor
    """Both in float64, with -Inf where both hold a mask."""
    inputs: list[Input]
    known: bool
    """Whether the inputs are told, all of them."""
    sure: bool
    """Whether nothing else can have gone into it."""
    background: tuple[float, ...]
    promised: Precision
    state: State

    @cached_property
    def text(self) -> str:
        """The words that say how it magnifies errors: its text without the names of its inputs, or its name."""
        told = self.state.inputs(self.name)
        text = words.without_names(self.op, told) or self.name
        if words.LOGIT_GRADIENT.search(self.name):
            text += " dlogits"  # whatever its text says, there are exponentials in it
        if juxtaposed(self.op, told or self.state.golden.names):  # a product, which its text says in no such word
            text += " averaged" if "softmax" in self.op else " matmul"
        return text

    def allowed(self, inputs: Sequence[Input]) -> Allowed:
        """What it may differ from the golden, if not replayed."""
        length = self.state.length(self.name)
        allowed = unreplayed(self.golden, self.text, length, inputs, self.background, self.promised, complete=self.sure)
        flipped = self.state.flipped.get(self.golden.shape)
        return allowed if flipped is None else replace(allowed, bound=allowed.bound.masked_fill(flipped, math.inf))


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
    told = state.inputs(name)
    inputs = [state.input(x) for x in told if x in state.golden and x in state.observed]
    inputs = [x for x in inputs if x.observed.shape == x.golden.shape]
    complete = len(inputs) == len(told) and state.complete(name)
    op = max((str(one.step(name).get("op") or "") for one in (state.golden, state.observed)), key=len)
    o64, g64 = state.both(name)
    if _whole(o64, g64, f"{name} {op}", promised, state):
        return integers(name, o, g, op, inputs, state, stochastic=promised.stochastic)
    copied = any(x.golden.shape == g.shape and torch.equal(x.golden, g64) for x in inputs)
    sure = complete and (copied or state.complete(name, said=True))
    one = _Step(name, op, o64, g64, inputs, bool(told) and complete, sure, _background(g, state), promised, state)
    found = _judged(one)
    if not found.wrong:
        _remember(one, found.total)
    return found


def _judged(one: _Step) -> Judgement:
    """Held to the golden, and to what is found that it does of its inputs."""
    allowed = one.allowed(one.inputs)
    copied = next((x for x in one.inputs if torch.equal(x.golden, one.golden)), None)
    if copied is not None and words.QUANTISED.search(one.text) and one.promised.stored != "integer":
        scales = (spread_over(x.golden, one.golden) for x in one.inputs if x is not copied)
        scale = next((x for x in scales if x is not None), None)
        allowed = allowed if scale is None else quantised(allowed, scale)
    total, below, reasons = _hold(one.observed, one.golden, allowed)
    found = Judgement(one.name, total, structure=below)
    inputs, reasons = _by_makings(one, found, reasons)
    found.reasons, found.wrong = reasons, bool(reasons)
    if any(x.wrong for x in inputs) and (found.own is None or not reasons):
        unspoiled = [Input(x.name, x.golden, x.golden, False) for x in inputs]
        strict = replace(one, background=(0.0, 0.0, 0.0, 0.0), sure=True).allowed(unspoiled)
        found.wrong = False  # where own and inherited are not separated, whether it adds anything cannot be told
        said = INHERITED if found.separated else UNKNOWN_ORIGIN
        found.reasons = [said] if _hold(one.observed, one.golden, strict)[2] else []
    return found


def _by_makings(one: _Step, found: Judgement, unexplained: list[str]) -> tuple[Sequence[Input], list[str]]:
    """The inputs and the reasons by what the step is found to do, into `found` too; `unexplained` are those against
    the golden."""
    inputs, reasons, promised = one.inputs, unexplained, one.promised
    for what, origin in _makings(one):
        if found.own is not None and what.fitted:
            continue  # a number that was fitted explains less than a reading without one
        made = [one.state.input(x) for x in what.names]
        if origin is Origin.NUMBERS and what.way is not None and what.way.product:
            o, against = one.state.observed.read(one.name), one.state.golden.read(one.name).dtype
            promised = precision.of_step(one.name, o, one.state.observed, one.state.golden, against, is_product=True)
            allowed = replace(one, promised=promised).allowed(one.inputs if one.known else ())
            found.total, _, unexplained = _hold(one.observed, one.golden, allowed)
        value, allowed = _replayed(what, origin, made, promised, one)
        exact = what.of([x.golden for x in made])
        if origin is Origin.NUMBERS:
            allowed = unrecorded(allowed, exact if one.known else value, exact, f"{one.name} {one.op}", promised)
        if what.fitted:
            allowed = scaled(allowed, value, one.background[0])
        own, below, own_reasons = _hold(one.observed, value, allowed, by_element=True)
        unspoiled = bool(own_reasons) and not any(x.wrong for x in made)
        if unspoiled and not (again := _hold(one.observed, exact, allowed, by_element=True))[2]:
            value, (own, below, own_reasons) = exact, again  # it was made of its inputs before they were stored
        if (
            not own_reasons
            and origin is not Origin.NUMBERS
            and precision.fewer_digits(one.name, one.observed, value, one.state.observed, one.state.golden)
        ):
            own_reasons = [FEWER_DIGITS]
        if found.own is not None and own_reasons:
            continue  # the golden can be read in several ways; it is right if one of them gives the observed
        found.own, found.structure, found.listed = own, below, origin is Origin.TEXT
        found.inherited = compare(value, one.golden, math.inf).rms_ratio
        inputs = made
        # A running error bound takes all roundings to fall one way: where nothing is inherited the golden tells more,
        # but for a difference of what no step holds, whose cancellation only the formula knows of.
        recorded = all(map(one.state.recorded, what.names))
        telling = not found.listed and found.inherited <= promised.compute and recorded
        reasons = own_reasons or (unexplained if telling else [])
        if not own_reasons:
            break
    return inputs, reasons


def _remember(one: _Step, total: Comparison) -> None:
    """What a right step tells of those after it: where comparisons fell the other way, and how large the noise is."""
    state, g = one.state, one.golden
    flips = (one.observed == 0.0) != (g == 0.0)
    if bool(flips.any()):
        state.flipped[g.shape] = state.flipped.get(g.shape, flips) | flips
    if math.isfinite(total.rms_ratio):
        size = float(finite(g).pow(2).mean().sqrt())
        condition = size / max(spread(finite(g)), 1e-300)
        state.background.append((total.rms_ratio, 0.5 * total.max_abs, size, condition, float(g.numel())))


def _whole(o: Tensor, g: Tensor, text: str, promised: Precision, state: State) -> bool:
    """Whether a step is judged as integers: by its type, or because its real numbers are codes."""
    if codes(g) and codes(o):
        return True
    if promised.stored != "integer" or not bool((finite(g) == finite(g).round()).all()):
        return False
    if words.INDEX.search(text):
        return True
    # Sums of codes, some of which fell to the other side of a tie, are off like real numbers.
    return float(finite(g).abs().max()) <= WIDEST_CODE or all(one[0] == 0.0 for one in state.background)


def _background(g: Tensor, state: State) -> tuple[float, ...]:
    """The largest relative and absolute error, size and condition of the steps before."""
    noisy = [one for one in state.background if one[0] > 0.0]  # inputs and weights say nothing of the noise
    recent = state.background[-4:] + noisy[-4:]
    alike = [one for one in state.background if one[4] == g.numel()]  # a mean may be taken from what came long before
    return tuple(max((one[i] for one in (recent if i < 3 else recent + alike)), default=0.0) for i in range(4))


def _makings(one: _Step) -> Iterator[tuple[Found, Origin]]:
    """What a step may do, of which inputs, the likeliest first."""
    op, g = one.op, one.golden
    unit, grid = roundings(g, one.promised)
    inputs = one.inputs if one.known else []
    real = [x for x in inputs if one.state.golden.read(x.name).is_floating_point()]
    for given in (inputs, real if len(real) < len(inputs) else []):  # indices may only select
        told, exact = [x.name for x in given], [x.golden for x in given]
        if not exact:
            continue
        product = len(given) == 2 and juxtaposed(op, told) and "softmax" not in op
        if (way := replay(f"{op} matmul" if product else op, exact, g, unit)) is not None:
            yield Found(told, way), Origin.TEXT
            return
        if (written := formula(op, told, exact, g, unit, grid)) is not None:
            yield Found(told, written=written), Origin.TEXT
            return
        copy = any(torch.equal(x, g) for x in exact)  # rounded, a tanh of small numbers is one of them too
        if not copy and (written := named(op, exact, g, unit, grid)) is not None:
            yield Found(told, written=written), Origin.NAME
            return
    seen = set()
    for found in itertools.islice(_inferred(one, [x.name for x in inputs], unit, grid), MOST_MAKINGS):
        if (key := (*found.names, found.written and ast.dump(found.written.tree))) not in seen:
            seen.add(key)
            yield found, Origin.NUMBERS


def _replayed(
    what: Found, origin: Origin, inputs: Sequence[Input], promised: Precision, one: _Step
) -> tuple[Tensor, Allowed]:
    """What was found, of the observed inputs, and what the step may be off from that."""
    seen, narrow = [x.observed for x in inputs], [one.state.cut_to(x) for x in what.names]
    if what.way is not None:
        way = replace(what.way, transformed=1.0) if words.UNTRANSFORMED.search(one.op) else what.way
        return replayed(way, seen, promised, one.op.count(";") + 1, narrow)
    assert what.written is not None
    together = [x.endswith(SOFTMAX) for x in what.names]
    value, allowed = by_formula(what.written, seen, narrow, promised, origin is Origin.NUMBERS, together)
    if promised.golden is not None:
        allowed = misfitting(allowed, what.written.misfit([x.golden for x in inputs], one.golden))
    return value, allowed


def _inferred(one: _Step, told: Sequence[str], unit: float, grid: Tensor) -> Iterator[Found]:
    """What an untold step is made of, if the golden's numbers tell; of its own inputs where these are all told."""
    name, g, state = one.name, one.golden, one.state
    if not state.golden.read(name).is_floating_point() or g.numel() > MOST_ELEMENTS:
        return iter(())
    if not state.computed(name):
        return iter(())
    sources = list(told or state.deduced.get(name, ()))
    if not sources and state.ordered:
        earlier = state.earlier(name)
        sources = [*reversed(earlier[-NEAREST:]), *earlier[:-NEAREST][:NEAREST]]
        sources.sort(key=lambda x: words.stem(x) != words.stem(name))  # what it was before, if it is kept up to date
    chosen = {x: state.chosen(x, g) for x in sources}
    parts = {part: state.input(part).golden for x in sources for part in state.sliced(x, g)}
    sources = [part for x in sources for part in (x, *chosen[x], *state.softened(x, g))]
    given = {x: t for x in sources if (t := state.searched(x)) is not None}
    return inferred(g, given, unit, grid, parts)


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
        reasons.append(first_reason(found))
    if not below.ok:
        worst = below.worst
        place = "" if worst.at is None else f" {worst.at}"
        reasons.append(
            f"systematic: {worst.name}{place} off by {worst.value:.3g}, {worst.share:.3g} times what is allowed"
        )
    return found, below, reasons
