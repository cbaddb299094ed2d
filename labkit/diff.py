"""`labkit diff`: a golden trace and one or more observed ones, step by step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from labkit import judge, precision
from labkit.compare import compare
from labkit.dumps import Dump
from labkit.judge import Input, Judgement, finite
from labkit.replay import replay
from labkit.tables import Table, number

NOT_SEPARATED = "not separated"


@dataclass
class Diff:
    """What :func:`diff` found for one observed trace."""

    steps: dict[str, Judgement | None] = field(default_factory=dict)
    """None for a step that the observed has not."""
    unexpected: list[str] = field(default_factory=list)

    @property
    def first(self) -> str | None:
        """The first divergent step, or None."""
        return next((name for name, j in self.steps.items() if j is None or j.wrong), None)


def diff(observed: Dump, golden: Dump) -> Diff:
    """Judge every step of the golden. Reads a step and its inputs at a time."""
    result = Diff(unexpected=[name for name in observed.names if name not in golden])
    state = _State(observed, golden)
    for name in golden.names:
        if name not in observed:
            result.steps[name] = None
            state.wrong.add(name)
            continue
        found = _step(name, state)
        result.steps[name] = found
        if found.wrong or any(x in state.wrong for x in state.inputs(name)):
            state.wrong.add(name)
    return result


class _State:
    def __init__(self, observed: Dump, golden: Dump) -> None:
        self.observed, self.golden = observed, golden
        self.wrong: set[str] = set()
        self.background: list[tuple[float, float]] = []

    def inputs(self, name: str) -> list[str]:
        given = self.golden.step(name).get("inputs") or self.observed.step(name).get("inputs") or []
        return [str(x) for x in given] if isinstance(given, list) else []

    def complete(self, name: str) -> bool:
        said = [d.step(name).get("inputs_complete") for d in (self.golden, self.observed)]
        return False not in said


def _step(name: str, state: _State) -> Judgement:
    o, g = state.observed.read(name), state.golden.read(name)
    if o.shape != g.shape:
        total = compare(o, g)
        return Judgement(name, total, wrong=True, reasons=[f"shape {tuple(o.shape)}, golden {tuple(g.shape)}"])
    exact_golden = g.dtype == torch.float64 or not g.is_floating_point()
    promised = precision.of_step(name, o, state.observed, state.golden)
    g64, o64 = g.double(), o.double()
    op = judge.any_op(state.golden.step(name).get("op"), state.observed.step(name).get("op"))
    words = op or name
    o64 = _masked_alike(o64, g64)
    names = state.inputs(name)
    there = [x for x in names if x in state.golden and x in state.observed]
    inputs = [Input(x, state.observed.read(x).double(), state.golden.read(x).double(), x in state.wrong) for x in there]
    inputs = [x for x in inputs if x.observed.shape == x.golden.shape]
    k = state.golden.step(name).get("K") or state.observed.step(name).get("K")
    if promised.stored == "integer" and bool((finite(g64) == finite(g64).round()).all()):
        return _integers(name, o, g, op, inputs, state)
    recent = state.background[-4:]
    background = (max((r for r, _ in recent), default=0.0), max((a for _, a in recent), default=0.0))
    allowed = judge.unreplayed(g64, words, int(k) if k else None, inputs, background, promised, exact_golden)
    total, below, reasons = judge.hold(o64, g64, allowed)
    relative = total.rms_ratio
    found = Judgement(name, total, structure=below)
    way = None
    if names and len(inputs) == len(names) and state.complete(name):
        unit = 2.0**-53 if exact_golden else 2.0**-24
        way = replay(op, [x.golden for x in inputs], g64, unit)
    if way is not None:
        value, own_allowed = judge.replayed(way, [x.observed for x in inputs], promised, exact_golden)
        found.own, found.structure, reasons = judge.hold(o64, value, own_allowed)
        found.inherited = compare(value, g64, math.inf).rms_ratio
    found.reasons = reasons
    found.wrong = bool(reasons)
    if found.own is None and any(x.wrong for x in inputs):
        found.wrong = False  # it inherits; whether it adds anything is not separated
        if reasons:
            found.reasons = ["diverges after a wrong input; own and inherited not separated"]
    if not found.wrong and math.isfinite(relative):
        state.background.append((relative, total.mean_abs))
    return found


def _masked_alike(o: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """A mask may be -Inf or a number that no softmax can tell from it: what is below -10^4 on both sides is alike."""
    alike = (o <= -1e4) & (g <= -1e4) & (o.isinf() != g.isinf())
    return torch.where(alike, g, o)


def _integers(name: str, o: torch.Tensor, g: torch.Tensor, op: str, inputs: Sequence[Input], state: _State) -> Judgement:
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
            found.reasons = [] if found.own.ok else [judge._first_reason(found.own)]
            return found
    share = float((d != 0).double().mean())
    if any(x.wrong for x in inputs):
        return found
    ties = _ties(o, g, inputs)
    if float(d.abs().max()) <= 1.0 and (ties if ties is not None else share <= 1e-2):
        return found
    found.wrong, found.reasons = True, [judge._first_reason(total)]
    return found


def _ties(o: torch.Tensor, g: torch.Tensor, inputs: Sequence[Input]) -> bool | None:
    """Whether every integer that differs was rounded from a tie, to float32's precision; None where that is not known."""
    values = [x for x in inputs if x.golden.shape == g.shape]
    for x in values:
        for s in inputs:
            if s is x or s.golden.numel() > x.golden.numel():
                continue
            for scale, other in ((s.golden, s.observed), (s.golden.unsqueeze(-1), s.observed.unsqueeze(-1))):
                try:
                    exact, seen = x.golden / scale, x.observed / other
                except RuntimeError:
                    continue
                if exact.shape != g.shape:
                    continue
                low, high = float(g.min()), float(g.max())
                if float((exact.round().clamp(low, high) == g).double().mean()) < 0.98:
                    continue
                moved = o.double() != g.double()
                near = ((exact + 0.5) - (exact + 0.5).round()).abs() <= 1e-5 * exact.abs().clamp(min=1.0) + (exact - seen).abs()
                return bool(near[moved].all())
    return None


def as_json(found: Diff) -> dict[str, Any]:
    """The first observed's steps as `labkit diff --json` prints them."""
    steps: dict[str, Any] = {}
    for name, j in found.steps.items():
        if j is None:
            steps[name] = {"ok": False, "missing": True, "own": NOT_SEPARATED, "inherited": NOT_SEPARATED}
            continue
        steps[name] = comparison_json(j.total) | {
            "ok": not j.wrong,
            "own": NOT_SEPARATED if j.own is None else comparison_json(j.own),
            "inherited": NOT_SEPARATED if j.inherited is None else plain(j.inherited),
            "reasons": j.reasons,
        }
    return steps


def comparison_json(c: Any) -> dict[str, Any]:
    """The fields of a Comparison, NaN and Inf as words."""
    return {item.name: plain(getattr(c, item.name)) for item in fields(c)}


def plain(value: Any) -> Any:
    """JSON has neither NaN nor Inf."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


def table(found: Diff) -> Table:
    """A row a step."""
    rows = []
    for name, j in found.steps.items():
        mark = "  <- first" if name == found.first else ""
        if j is None:
            rows.append((name, "", "", "", "missing in the observed" + mark))
            continue
        own = NOT_SEPARATED if j.own is None else number(j.own.bound_used)
        words = "; ".join(j.reasons) or "ok"
        rows.append((name, number(j.total.max_abs), number(j.total.rms_ratio), own, words + mark))
    return Table(("step", "largest |o - g|", "rms", "own, of bound", "finding"), rows)


__all__ = ["Diff", "as_json", "diff", "finite", "table"]
