"""The first divergent step, and for each step its own error against the error that it inherits.

Against a recorded golden every step's part of the program is re-run in float64 on what was observed before it. What
is left is the step's own error, and how far the re-run is from the golden is what it inherits. Against steps without a
program only the whole error is seen, and it is held to what steps before were off.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from functools import partial
from statistics import multimode
from typing import Any

import torch

from whywrong.checking.findings import Localisation
from whywrong.checking.with_program import Rerun
from whywrong.checking.without_program import Values
from whywrong.comparing.comparison import as_tensor
from whywrong.comparing.precision import UNIT_ROUNDOFF, Precision, guess, representable, stored
from whywrong.errors import UsageError, did_you_mean
from whywrong.process_state import temporarily
from whywrong.recording.golden import GRADIENT, Golden
from whywrong.recording.steps import Trace, as_trace
from whywrong.tables import to_stderr

TRACE_FALSE_POSITIVES = 1e-3
"""The probability that a correct trace is flagged anywhere: all steps share it, and both instruments."""

NARROW_NAMES = ("float8_e5m2", "float8_e4m3fn", "bfloat16", "float16", "float32")
"""Types that data may be found to have, the narrowest first: those after it hold most of its numbers too."""

WIDENED = "float64 of float32 numbers is taken as stored in float32 (else declare storage=float64,accumulate=float64)"
"""What is said of a dump of float32 numbers as float64, where nothing was declared."""

SMALL = 1 << 17
"""Elements below which an operation takes less time than it takes to wake a second thread, or to launch a kernel."""


def localise(
    observed: Any,
    golden: Any,
    *,
    precision: Precision | None = None,
    names: Mapping[str, str] | None = None,
    progress: Callable[[str], None] = to_stderr,
    elements: bool = False,
    false_alarm: float = TRACE_FALSE_POSITIVES,
) -> Localisation:
    """Hold each observed step against the golden's, within what the declared precision allows.

    `observed` is a Trace or a dict of arrays by name; `golden` is what :func:`whywrong.golden` recorded, or steps
    alone. `precision` is what the implementation declared; without one it is what the observed file declares, else a
    guess from the dtypes, and the result says so. A missing step, a different shape and a NaN on one side only are
    divergences, not exceptions. `names` maps the golden's steps to the observed's where they are called differently;
    where no name is shared, a prefix that the names of one side have is found, and a note says so.
    `progress` is called with a line before a re-run that takes long; by default it goes to standard error. With
    `elements` each finding keeps the share of the tolerance of every element, 4 bytes each; without,
    :attr:`Localisation.detailed` gets them, in the same time once more.
    `false_alarm` is the probability that a correct trace is flagged: who checks N traces divides it by N.

    Raises UsageError for arguments of another kind, for a name that neither has, and for an observed without a single
    step of the golden.
    """
    where = getattr(observed, "source", "") or "observed"
    if isinstance(observed, Golden) or "program" in getattr(observed, "about", ()):
        wanted = "expected the steps of an implementation, as of whywrong.capture"
        raise UsageError(f"{where}: is a recorded golden in the place of the observed; {wanted}")
    if precision is not None and not isinstance(precision, Precision):
        raise UsageError(f"precision: expected whywrong.Precision(storage=...), got {precision!r:.60}")
    if not isinstance(names or {}, Mapping):
        raise UsageError(f"names: expected the golden's names mapped to the observed's, got {names!r:.60}")
    if not (isinstance(false_alarm, float) and 0.0 < false_alarm < 1.0):
        raise UsageError(f"false_alarm: expected a probability, above 0 and below 1, got {false_alarm!r}")
    again = partial(
        localise,
        observed,
        golden,
        precision=precision,
        names=names,
        progress=progress,
        elements=True,
        false_alarm=false_alarm,
    )
    golden = golden if isinstance(golden, Golden) else as_trace("golden", golden)
    there = renamed(as_trace("observed", observed), golden, dict(names or {}))
    steps = [name for name in golden.names if name in there] + _operations(golden, there)
    if not steps:
        sides = [", ".join(one.names[:3] + ["..."] * (len(one.names) > 3)) or "none" for one in (there, golden)]
        wanted = "expected the same names, or --names (names=), which whywrong.propose_names proposes"
        have = f"it has {sides[0]}; the golden {sides[1]}"
        raise UsageError(f"{where}: shares no step with the golden ({have}); {wanted}")
    seen = there.named({name: name for name in steps})
    precision = precision or there.precision
    rules = precision or guess([seen.read(name).dtype for name in steps])
    dumped_wide = precision is None and rules.accumulate == "float64" and _all_float32(seen)
    rules = Precision(storage="float32") if dumped_wide else rules
    ours = {*golden.names, *getattr(golden, "operations", ())}
    if unknown := [name for name in rules.steps if name not in ours and name not in there]:
        hint = did_you_mean(unknown[0], [*ours, *there.names])
        raise UsageError(f"precision: steps names {unknown[0]!r}; {hint}expected a step's name")
    result = Localisation(rules, precision is None, again=None if elements else again)
    result.unexpected = [name for name in there.names if name not in ours and "/" not in name]
    chance = false_alarm / (2.0 * len(steps))
    largest = max(seen.read(name).numel() for name in steps)
    if largest < SMALL and isinstance(golden, Golden):
        golden = golden.to("cpu")  # there, an operation on few elements takes less than a launch
    with few_threads(largest):
        _check(golden, seen, chance, progress, elements, result)
        result.notes += [there.note] * bool(there.note) + [WIDENED] * dumped_wide + _narrower(seen, rules, result)
    if (left := {name for name in result.findings if name.startswith(GRADIENT)}) and left.isdisjoint(steps):
        result.findings = {name: one for name, one in result.findings.items() if name not in left}
        result.notes.append("gradients: none observed")
    missing = [name for name in golden.names if name not in there]
    of_shape = {tuple(as_tensor(name, golden[name]).shape): name for name in reversed(missing)}
    for name in result.unexpected:
        hint = did_you_mean(name, missing)
        of_shape = {shape: other for shape, other in of_shape.items() if f" {other}?" not in hint}
        with suppress(UsageError):  # of a text, which has no shape
            if not hint and (other := of_shape.pop(tuple(there.read(name).shape), None)):
                hint = f"is it perhaps {other}, of its shape? "
        if hint:
            result.notes.append(f"{name} is not in the golden; {hint}(names= maps the golden's steps to others)")
    return result


def few_threads(elements: int) -> AbstractContextManager[None]:
    """One thread for small tensors: several would wait for each other longer than they work."""
    return temporarily(torch.get_num_threads, torch.set_num_threads, 1 if elements < SMALL else torch.get_num_threads())


def _check(golden: Any, seen: Trace, chance: float, progress: Any, elements: bool, result: Localisation) -> None:
    if isinstance(golden, Golden):
        result.notes = list(golden.notes)
        result.findings = Rerun(golden, seen, result.precision, result.guessed, chance, progress, elements).check()
        return
    result.ordered = golden.ordered or len(seen.names) == 1
    result.findings = Values(golden, seen, result.precision, chance, result.ordered, elements).check()
    totals = [(name, found.total) for name, found in result.findings.items() if found.total]
    less = sum(UNIT_ROUNDOFF.get(t.golden_dtype, 0.0) > UNIT_ROUNDOFF.get(t.observed_dtype, 1.0) for _, t in totals)
    result.notes += [f"in {less} steps the golden is narrower than the observed: its rounding is allowed"] * (less > 0)
    differs = (name for name, t in totals if t.observed_dtype == t.golden_dtype and t.max_abs > 0.0)
    if result.ordered and (name := next(differs, None)) is not None and name != result.first:
        result.notes.append(f"the first step that is not equal to the golden's is {name}; it may be so by rounding")


def _all_float32(seen: Trace) -> bool:
    """Whether all tensors have float32 numbers alone, and one at least has more digits than float16 holds.

    Of the numbers that a float64 program computes one in 2^29 is a float32 number: a single step tells the two apart.
    """

    def all_are(kind: str) -> bool:
        return all(representable(x.double(), kind) for x in map(seen.read, seen.names) if x.is_floating_point())

    return all_are("float32") and not all_are("float16")


def _narrower(seen: Trace, rules: Precision, result: Localisation) -> list[str]:
    """The type that was not declared, where most of what diverges has nothing but numbers of it."""
    steps = [(name, found.total) for name, found in result.findings.items() if found.diverges and found.total]
    floats = {name: t.observed_dtype for name, t in steps if t.observed_dtype in UNIT_ROUNDOFF and t.count > 1}
    promised = {name: UNIT_ROUNDOFF.get(rules.of(name).storage or own, 1.0) for name, own in floats.items()}
    for kind in NARROW_NAMES:
        wider = (name for name, unit in promised.items() if unit < UNIT_ROUNDOFF[kind])
        fits = [name for name in wider if _all_of(kind, seen.read(name).reshape(-1)[:SMALL].double())]
        if 2 * len(fits) > len(promised):
            how = f"--precision storage={kind} (or whywrong.Precision(storage={kind!r}))"
            return [f"this looks like {kind}: declare it with {how}"]
    return []


def _all_of(kind: str, x: torch.Tensor) -> bool:
    """Whether x has nothing but numbers of a format, and more than NaN, 0 and 1, which all of them have."""
    return representable(x, kind) and len(x[x.isfinite()].abs().unique()) > 2


def renamed(observed: Trace, golden: Golden | Trace, names: dict[str, str]) -> Trace:
    """The observed by the golden's names. Raises UsageError for a name that neither has, or that is there twice."""
    if not names and not any(name in golden for name in observed.names):
        observed = _by_prefix(observed, golden)
    for ours, theirs in names.items():
        if ours not in golden or theirs not in observed:
            side, name, known = ("golden", ours, golden) if ours not in golden else ("observed", theirs, observed)
            hint = did_you_mean(name, known.names)
            wanted = "expected golden names mapped to observed ones"
            raise UsageError(f"names: the {side} has no step {name!r}; {hint}{wanted}")
        if (ours in observed and ours not in names.values()) or list(names.values()).count(theirs) > 1:
            raise UsageError(f"names: {ours!r} and {theirs!r} are both there; expected one observed step for each")
    back = {theirs: ours for ours, theirs in names.items()}
    for name, later in ((name, f"{name}#2") for name in getattr(golden, "inputs", ())):
        if name in observed and later in golden and later not in observed:
            x, before = observed.read(name), golden[name]
            if not any(torch.equal(x.double(), stored(before.double(), kind)) for kind in (*NARROW_NAMES, "float64")):
                back.setdefault(name, later)  # an update under the name of what it was, as a dump keeps it
    return observed.named({name: back.get(name, name) for name in observed.names})


def _by_prefix(observed: Trace, golden: Golden | Trace) -> Trace:
    """The observed by the golden's names, where those of one side have a prefix, as in a container or a wrapper.

    It is as it was where there is none, where several would do for as many names, and where most names have none.
    """
    off = [(o.removesuffix(g), o, g) for o in observed.names for g in golden.names if o.endswith(f".{g}")]
    on = [(g.removesuffix(o), o, g) for o in observed.names for g in golden.names if g.endswith(f".{o}")]
    most = multimode(prefix for prefix, *_ in off or on)
    new = {o: g for prefix, o, g in off or on if [prefix] == most}
    new = new if 2 * len(new) >= min(len(observed.names), len(golden.names)) else {}
    note = f"names: {len(new)} of the observed are taken with{'out' * bool(off)} {''.join(most)!r} before them"
    return observed.named({name: new.get(name, name) for name in observed.names}, note * bool(new))


def _operations(golden: Golden | Trace, there: Trace) -> list[str]:
    """Single operations that both have: as many of a kind in a place, of equal shapes, else none of that kind."""
    if not isinstance(golden, Golden):
        return []

    def count(names: Iterable[str]) -> Counter[str]:
        return Counter(name.split("#")[0] for name in names)

    nodes, taken = golden.program.nodes, set(golden.steps.values())
    both = {name: i for name, i in golden.operations.items() if name in there}
    ours, theirs = count(golden.operations), count(there.names)
    alike = count(name for name, i in both.items() if tuple(there.read(name).shape) == nodes[i].shape)
    kinds = {kind for kind in alike if ours[kind] == theirs[kind] == alike[kind]}
    return [name for name, i in both.items() if i not in taken and name.split("#")[0] in kinds]
