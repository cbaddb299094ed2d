"""One step of a trace: whether it is wrong by itself, inherits, or cannot be told apart."""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Sequence
from dataclasses import replace

import torch

from labkit import precision, words
from labkit.allowance import Allowed, by_formula, replayed, roundings, unreplayed
from labkit.compare import Comparison, compare
from labkit.errors import UsageError
from labkit.formula import formula, named
from labkit.handed_on import Input
from labkit.inference import Found, infer
from labkit.integers import WIDEST_CODE, codes, integers, spread_over
from labkit.judgement import INHERITED, MOST_ELEMENTS, NEAREST, UNKNOWN_ORIGIN, Judgement, State, first_reason
from labkit.magnitude import MASKED, finite, spread
from labkit.precision import Precision
from labkit.replay import replay
from labkit.structure import Structure, structure
from labkit.tolerance import Bound
from labkit.widened import quantised, scaled, unrecorded

Tensor = torch.Tensor


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
    g64 = g.double()
    o64 = _masked_alike(o.double(), g64)
    if _whole(o64, g64, promised, state):
        return integers(name, o, g, op, inputs, state)

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
    total, below, reasons = _hold(o64, g64, allowed)
    relative = total.rms_ratio
    found = Judgement(name, total, structure=below)
    known = bool(told) and complete
    made = _made(name, op, g, inputs if known else None, promised, state)
    if made is not None:
        what, origin = made
        guessed = origin is Origin.NUMBERS
        found.listed = origin is Origin.TEXT
        if guessed:
            inputs = [state.input(x) for x in what.names]
        inputs = [x for x in inputs if x.name in what.names]
        seen, narrow = [x.observed for x in inputs], [state.cut_to(x) for x in what.names]
        if what.way is not None:
            if guessed and what.way.product:
                promised = precision.of_step(name, o, state.observed, state.golden, g.dtype, is_product=True)
            value, own_allowed = replayed(what.way, seen, promised, op.count(";") + 1, narrow)
        else:
            assert what.written is not None
            value, own_allowed = by_formula(what.written, seen, narrow, promised, guessed)
        if guessed:
            own_allowed = unrecorded(own_allowed, g64 if known else value, g64, f"{name} {op}", promised)
        if what.fitted:
            own_allowed = scaled(own_allowed, value, background[0])
        found.own, found.structure, own_reasons = _hold(o64, value, own_allowed, by_element=True)
        found.inherited = compare(value, g64, math.inf).rms_ratio
        # A running error bound takes all roundings to fall one way: where nothing is inherited the golden tells more.
        reasons = own_reasons or (reasons if not found.listed and found.inherited <= promised.compute else [])
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


def _whole(o: Tensor, g: Tensor, promised: Precision, state: State) -> bool:
    """Whether a step is judged as integers: by its type, or because its real numbers are codes."""
    if codes(g) and codes(o):
        return True
    if promised.stored != "integer" or not bool((finite(g) == finite(g).round()).all()):
        return False
    # Sums of codes, some of which fell to the other side of a tie, are off like real numbers.
    return float(finite(g).abs().max()) <= WIDEST_CODE or all(one[0] == 0.0 for one in state.background)


def _text(name: str, op: str, inputs: Sequence[str], names: Sequence[str]) -> str:
    """The words that say how a step magnifies errors: its text without the names of its inputs, or its name."""
    text = _operation(op, inputs) or name
    if words.LOGIT_GRADIENT.search(name):
        text += " dlogits"  # whatever its text says, there are exponentials in it
    if precision.juxtaposed(op, list(inputs or names)):  # a product, which its text says in no such word
        text += " averaged" if "softmax" in op else " matmul"
    return text


def _background(g: Tensor, state: State) -> tuple[float, ...]:
    """The largest relative and absolute error, size and condition of the steps before."""
    noisy = [one for one in state.background if one[0] > 0.0]  # inputs and weights say nothing of the noise
    recent = state.background[-4:] + noisy[-4:]
    alike = [one for one in state.background if one[4] == g.numel()]  # a mean may be taken from what came long before
    return tuple(max((one[i] for one in (recent if i < 3 else recent + alike)), default=0.0) for i in range(4))


def _made(
    name: str, op: str, g: Tensor, inputs: Sequence[Input] | None, promised: Precision, state: State
) -> tuple[Found, Origin] | None:
    """What a step does, of which inputs; `inputs` is None where they are not all told."""
    g64 = g.double()
    unit, grid = roundings(g64, promised)
    real = [x for x in inputs or () if state.golden.read(x.name).is_floating_point()]
    for given in (list(inputs or ()), real if len(real) < len(inputs or ()) else []):  # indices may only select
        told, exact = [x.name for x in given], [x.golden for x in given]
        if not exact:
            continue
        if (way := replay(op, exact, g64, unit)) is not None:
            return Found(told, way), Origin.TEXT
        if (written := formula(op, told, exact, g64, unit, grid)) is not None:
            return Found(told, written=written), Origin.TEXT
        if (written := named(op, exact, g64, unit, grid)) is not None:
            return Found(told, written=written), Origin.NAME
    found = _inferred(name, g, [x.name for x in inputs or ()], unit, grid, state)
    return None if found is None else (found, Origin.NUMBERS)


def _inferred(name: str, g: Tensor, told: Sequence[str], unit: float, grid: Tensor, state: State) -> Found | None:
    """What an untold step is made of, if the golden's numbers tell; of its own inputs where these are all told."""
    if not g.dtype.is_floating_point or g.numel() > MOST_ELEMENTS:
        return None
    if not state.computed(name):
        return None
    sources = list(told or state.deduced.get(name, ()))
    if not sources and state.ordered:
        earlier = state.earlier(name)
        sources = [*reversed(earlier[-NEAREST:]), *earlier[:-NEAREST][:NEAREST]]
    sources = [part for x in sources for part in (x, *state.chosen(x, g))]
    given = {x: t for x in sources if (t := state.searched(x)) is not None}
    return infer(g.double(), given, unit, grid)


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


def _masked_alike(o: Tensor, g: Tensor) -> Tensor:
    """A mask may be -Inf or a number that no softmax can tell from it: what is below MASKED on both sides is alike."""
    alike = (o <= MASKED) & (g <= MASKED) & (o.isinf() != g.isinf())
    return torch.where(alike, g, o)


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
