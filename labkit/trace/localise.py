"""The first divergent step, and for each step its own error against the error that it inherits.

Against a recorded golden every step's part of the program is run again in float64 on what was observed before it. What
is left is the step's own error, and how far the replay is from the golden is what it inherits. Against steps without a
program only the whole error is seen, and it is held to what steps before were off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from labkit.errors import UsageError, did_you_mean
from labkit.numerics.compare import as_tensor
from labkit.numerics.precision import UNIT_ROUNDOFF, Precision, guess, representable
from labkit.trace.dumps import Dump
from labkit.trace.findings import Localisation
from labkit.trace.golden import Golden
from labkit.trace.replayed import Replayed
from labkit.trace.steps import Trace
from labkit.trace.unreplayed import judge

FALSE_ALARM = 1e-3
"""The probability that a right trace is called wrong anywhere: all steps share it, and both instruments."""

NARROW = ("float8_e5m2", "float8_e4m3fn", "bfloat16", "float16")
"""Types that data may be found to have, the narrowest first: those after it hold most of its numbers too."""

SMALL = 1 << 17
"""Elements below which an operation takes less time than it takes to wake a second thread, or to launch a kernel."""


def localise(
    observed: Any,
    golden: Golden | Trace | Dump,
    precision: Precision | None = None,
    names: Mapping[str, str] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Localisation:
    """Hold each observed step against the golden's, within what the promised precision allows.

    `observed` is a Trace, a dict of arrays, or a dump from a file; `golden` is what :func:`labkit.golden` recorded, or
    steps alone. `precision` is what the implementation promised; without one it is what the observed file promises,
    else a guess from the dtypes, and the result says so. A missing step, a different shape and a NaN on one side only
    are divergences, not exceptions. `names` maps the golden's steps to the observed's where they are called
    differently. `say` hears beforehand of a replay that takes long.

    Raises UsageError for a name that neither has, and for an observed without a single step of the golden.
    """
    seen = Observed(observed, golden, dict(names or {}))
    precision = precision or getattr(observed, "precision", None)
    rules = precision or guess([seen.read(name).dtype for name in seen.steps])
    known = {*golden.names, *getattr(golden, "operations", ()), *seen.names}
    if unknown := [name for name in rules.steps if name not in known]:
        raise UsageError(
            f"precision: steps names {unknown[0]!r}; {did_you_mean(unknown[0], known)}wanted a step's name"
        )
    result = Localisation(rules, precision is None, unexpected=seen.unexpected)
    chance = FALSE_ALARM / (2.0 * max(1, len(seen.steps)))
    largest = max(seen.read(name).numel() for name in seen.steps)
    if largest < SMALL and isinstance(golden, Golden):
        golden = golden.to("cpu")  # there, an operation on few elements takes less than a launch
    with few_threads(largest):
        _judge(golden, seen, rules, chance, say, result)
        result.notes += _narrower(seen, rules, result)
    return result


@contextmanager
def few_threads(elements: int) -> Iterator[None]:
    """One thread for small tensors: several would wait for each other longer than they work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if elements < SMALL else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _judge(golden: Any, seen: Observed, rules: Precision, chance: float, say: Any, result: Localisation) -> None:
    if isinstance(golden, Golden):
        result.notes = list(golden.notes)
        result.findings = Replayed(golden, seen, rules, chance, say).judge()
        return
    result.ordered = getattr(golden, "ordered", True) or len(seen.steps) == 1
    if result.guessed:  # nobody said that a step is one kernel
        rules = result.precision = replace(rules, eager=True)
    result.findings = judge(golden, seen, rules, chance, result.ordered)
    totals = ((name, found.total) for name, found in result.findings.items() if found.total)
    differs = (name for name, t in totals if t.observed_dtype == t.golden_dtype and t.max_abs > 0.0)
    if result.ordered and (name := next(differs, None)) is not None and name != result.first:
        result.notes.append(f"the first step that is not equal to the golden's is {name}; it may be so by rounding")


def _narrower(seen: Observed, rules: Precision, result: Localisation) -> list[str]:
    """The type that was not promised, where most of what diverges has nothing but numbers of it."""
    steps = [(name, found.total) for name, found in result.findings.items() if found.diverges and found.total]
    floats = [(name, t.observed_dtype) for name, t in steps if t.observed_dtype in UNIT_ROUNDOFF and t.count > 1]
    for kind in NARROW if floats else ():
        promised = [UNIT_ROUNDOFF.get(rules.of(name).storage or own, 1.0) for name, own in floats]
        fits = [
            unit < UNIT_ROUNDOFF[kind] and representable(seen.read(name).reshape(-1)[:SMALL].double(), kind)
            for (name, _), unit in zip(floats, promised, strict=True)
        ]
        if 2 * sum(fits) > len(fits):
            how = f"--precision storage={kind} (or labkit.Precision(storage={kind!r}))"
            return [f"this looks like {kind}: promise it with {how}"]
    return []


class Observed:
    """The observed steps that the golden has too, by the golden's names; `unexpected` are the others."""

    def __init__(self, observed: Any, golden: Any, names: dict[str, str]) -> None:
        self._source = observed
        there = list(observed.names) if hasattr(observed, "names") else list(observed)
        for ours, theirs in names.items():
            if ours not in golden or theirs not in there:
                side, name = ("golden", ours) if ours not in golden else ("observed", theirs)
                raise UsageError(f"names: the {side} has no step {name!r}; wanted golden names mapped to observed ones")
        back = {theirs: ours for ours, theirs in names.items()}
        self._theirs = {back.get(name, name): name for name in there}
        operations = _operations(golden, self._theirs, self.read) if isinstance(golden, Golden) else []
        self.steps = [name for name in golden.names if name in self._theirs] + operations
        known = set(golden.names) | set(getattr(golden, "operations", ()))
        self.unexpected = [name for name in self._theirs if name not in known and "/" not in name]
        if not self.steps:
            raise UsageError("observed: shares no step with the golden; wanted the same names")

    @property
    def names(self) -> list[str]:
        """All that was observed, by the golden's names."""
        return list(self._theirs)

    def __contains__(self, name: str) -> bool:
        return name in self._theirs

    def read(self, name: str) -> torch.Tensor:
        """An observed step as it was stored. Raises UsageError for what is no tensor of real or whole numbers."""
        theirs = self._theirs[name]
        value = self._source.read(theirs) if hasattr(self._source, "read") else self._source[theirs]
        return as_tensor(f"step {name!r}", value)


def _operations(golden: Golden, there: Mapping[str, str], read: Callable[[str], torch.Tensor]) -> list[str]:
    """Single operations that both have: as many of a kind in a place, of equal shapes, else none of that kind."""
    ours: dict[str, list[str]] = {}
    theirs: dict[str, list[str]] = {}
    for name in golden.operations:
        ours.setdefault(name.split("#")[0], []).append(name)
    for name in there:
        theirs.setdefault(name.split("#")[0], []).append(name)
    taken = set(golden.steps.values())
    found: list[str] = []
    for kind, names in ours.items():
        shapes = [golden.program.nodes[golden.operations[name]].shape for name in names]
        if sorted(theirs.get(kind, ())) == sorted(names) and all(
            tuple(read(name).shape) == shape for name, shape in zip(names, shapes, strict=True)
        ):
            found += [name for name in names if golden.operations[name] not in taken]
    return found
