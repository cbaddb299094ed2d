"""One step of a trace: whether it is wrong by itself, inherits, or cannot be told apart."""

from __future__ import annotations

import ast
import enum
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from labkit import precision, words
from labkit.allowance import Allowed, by_formula, replayed, roundings, unreplayed
from labkit.blocks import spread_over
from labkit.compare import Comparison, compare
from labkit.errors import UsageError
from labkit.formula import formula, named
from labkit.handed_on import Input
from labkit.inference import Found, inferred
from labkit.integers import WIDEST_CODE, codes, integers
from labkit.judgement import INHERITED, MOST_ELEMENTS, NEAREST, UNKNOWN_ORIGIN, Judgement, State, first_reason
from labkit.magnitude import finite, spread
from labkit.precision import Precision
from labkit.promises import juxtaposed
from labkit.replay import replay
from labkit.samples import SOFTMAX
from labkit.structure import Structure, structure
from labkit.tolerance import Bound
from labkit.widened import misfitting, quantised, scaled, unrecorded

Tensor = torch.Tensor
MOST_MAKINGS = 4
"""Readings of a golden that are tried on an observed step before it counts as wrong."""


class Origin(enum.Enum):
    """How it is known what a step does."""

    TEXT = "its text is one of the closed list, or a formula"
    NAME = "its text or name is a common one, whose meaning gives the golden's numbers"
    NUMBERS = "it was found in the golden's numbers, its inputs too where they are not told"


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
    op = str(state.golden.step(name).get("op") or state.observed.step(name).get("op") or "")
    o64, g64 = state.both(name)
    if _whole(o64, g64, f"{name} {op}", promised, state):
        return integers(name, o, g, op, inputs, state, stochastic=promised.stochastic)

    text = _text(name, op, told, state.golden.names)
    k = _length(state.golden.step(name).get("K")) or _length(state.observed.step(name).get("K"))
    copied = next((x for x in inputs if x.golden.shape == g.shape and torch.equal(x.golden, g64)), None)
    sure = complete and (copied is not None or state.complete(name, said=True))
    background = _background(g, state)
    allowed = unreplayed(g64, text, k, inputs, background, promised, complete=sure)
    if copied is not None and words.QUANTISED.search(text) and promised.stored != "integer":
        scales = (spread_over(x.golden, g64) for x in inputs if x is not copied)
        scale = next((one for one in scales if one is not None), None)
        allowed = allowed if scale is None else quantised(allowed, scale)
    if g.shape in state.flipped:
        allowed = replace(allowed, bound=allowed.bound.masked_fill(state.flipped[g.shape], math.inf))
    total, below, unexplained = _hold(o64, g64, allowed)
    relative, reasons = total.rms_ratio, unexplained
    found = Judgement(name, total, structure=below)
    known = bool(told) and complete
    for what, origin in _makings(name, op, g64, inputs if known else None, promised, state):
        made = [state.input(one) for one in what.names]
        if origin is Origin.NUMBERS and what.way is not None and what.way.product:
            promised = precision.of_step(name, o, state.observed, state.golden, g.dtype, is_product=True)
            allowed = unreplayed(g64, text, k, inputs if known else (), background, promised, complete=sure)
            found.total, _, unexplained = _hold(o64, g64, allowed)
        value, own_allowed = _replayed(what, origin, made, op, promised, g64, state)
        if origin is Origin.NUMBERS:
            own_allowed = unrecorded(own_allowed, g64 if known else value, g64, f"{name} {op}", promised)
        if what.fitted:
            own_allowed = scaled(own_allowed, value, background[0])
        own, own_below, own_reasons = _hold(o64, value, own_allowed, by_element=True)
        if found.own is not None and own_reasons:
            continue  # the golden can be read in several ways; it is right if one of them gives the observed
        found.own, found.structure, found.listed = own, own_below, origin is Origin.TEXT
        found.inherited = compare(value, g64, math.inf).rms_ratio
        inputs = made
        # A running error bound takes all roundings to fall one way: where nothing is inherited the golden tells more,
        # but for a difference of what no step holds, whose cancellation only the formula knows of.
        telling = (
            not found.listed and found.inherited <= promised.compute and all(x in state.golden for x in what.names)
        )
        reasons = own_reasons or (unexplained if telling else [])
        if not own_reasons:
            break
    found.reasons, found.wrong = reasons, bool(reasons)
    if any(x.wrong for x in inputs) and (found.own is None or not reasons):
        unspoiled = [Input(x.name, x.golden, x.golden, False) for x in inputs]
        strict = unreplayed(g64, text, k, unspoiled, (0.0, 0.0, 0.0, 0.0), promised)
        found.wrong = False  # where own and inherited are not separated, whether it adds anything cannot be told
        said = INHERITED if found.separated else UNKNOWN_ORIGIN
        found.reasons = [said] if _hold(o64, g64, strict)[2] else []
    if not found.wrong:
        flips = (o64 == 0.0) != (g64 == 0.0)
        if bool(flips.any()):
            state.flipped[g.shape] = state.flipped.get(g.shape, flips) | flips
        if math.isfinite(relative):
            size = float(finite(g64).pow(2).mean().sqrt())
            condition = size / max(spread(finite(g64)), 1e-300)
            state.background.append((relative, 0.5 * total.max_abs, size, condition, float(g.numel())))
    return found


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


def _text(name: str, op: str, inputs: Sequence[str], names: Sequence[str]) -> str:
    """The words that say how a step magnifies errors: its text without the names of its inputs, or its name."""
    text = _operation(op, inputs) or name
    if words.LOGIT_GRADIENT.search(name):
        text += " dlogits"  # whatever its text says, there are exponentials in it
    if juxtaposed(op, list(inputs or names)):  # a product, which its text says in no such word
        text += " averaged" if "softmax" in op else " matmul"
    return text


def _background(g: Tensor, state: State) -> tuple[float, ...]:
    """The largest relative and absolute error, size and condition of the steps before."""
    noisy = [one for one in state.background if one[0] > 0.0]  # inputs and weights say nothing of the noise
    recent = state.background[-4:] + noisy[-4:]
    alike = [one for one in state.background if one[4] == g.numel()]  # a mean may be taken from what came long before
    return tuple(max((one[i] for one in (recent if i < 3 else recent + alike)), default=0.0) for i in range(4))


def _makings(
    name: str, op: str, g64: Tensor, inputs: Sequence[Input] | None, promised: Precision, state: State
) -> Iterator[tuple[Found, Origin]]:
    """What a step may do, of which inputs, the likeliest first; `inputs` is None where they are not all told."""
    unit, grid = roundings(g64, promised)
    real = [x for x in inputs or () if state.golden.read(x.name).is_floating_point()]
    for given in (list(inputs or ()), real if len(real) < len(inputs or ()) else []):  # indices may only select
        told, exact = [x.name for x in given], [x.golden for x in given]
        if not exact:
            continue
        if (way := replay(op, exact, g64, unit)) is not None:
            yield Found(told, way), Origin.TEXT
            return
        if (written := formula(op, told, exact, g64, unit, grid)) is not None:
            yield Found(told, written=written), Origin.TEXT
            return
        copy = any(torch.equal(x, g64) for x in exact)  # rounded, a tanh of small numbers is one of them too
        if not copy and (written := named(op, exact, g64, unit, grid)) is not None:
            yield Found(told, written=written), Origin.NAME
            return
    found = _inferred(name, g64, [x.name for x in inputs or ()], unit, grid, state)
    seen = set()
    for one in itertools.islice(found, MOST_MAKINGS):
        if (key := (*one.names, one.written and ast.dump(one.written.tree))) not in seen:
            seen.add(key)
            yield one, Origin.NUMBERS


def _replayed(
    what: Found, origin: Origin, inputs: Sequence[Input], op: str, promised: Precision, g64: Tensor, state: State
) -> tuple[Tensor, Allowed]:
    """What was found, of the observed inputs, and what the step may be off from that."""
    seen, narrow = [x.observed for x in inputs], [state.cut_to(x) for x in what.names]
    if what.way is not None:
        way = replace(what.way, transformed=1.0) if words.UNTRANSFORMED.search(op) else what.way
        return replayed(way, seen, promised, op.count(";") + 1, narrow)
    assert what.written is not None
    together = [x.endswith(SOFTMAX) for x in what.names]
    value, allowed = by_formula(what.written, seen, narrow, promised, origin is Origin.NUMBERS, together)
    if promised.golden is not None:
        allowed = misfitting(allowed, what.written.misfit([x.golden for x in inputs], g64))
    return value, allowed


def _inferred(name: str, g: Tensor, told: Sequence[str], unit: float, grid: Tensor, state: State) -> Iterator[Found]:
    """What an untold step is made of, if the golden's numbers tell; of its own inputs where these are all told."""
    if not state.golden.read(name).is_floating_point() or g.numel() > MOST_ELEMENTS:
        return iter(())
    if not state.computed(name):
        return iter(())
    sources = list(told or state.deduced.get(name, ()))
    if not sources and state.ordered:
        earlier = state.earlier(name)
        sources = [*reversed(earlier[-NEAREST:]), *earlier[:-NEAREST][:NEAREST]]
    chosen = {x: state.chosen(x, g) for x in sources}
    sources = [part for x in sources for part in (x, *chosen[x], *state.softened(x, g))]
    given = {x: t for x in sources if (t := state.searched(x)) is not None}
    return inferred(g, given, unit, grid)


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
