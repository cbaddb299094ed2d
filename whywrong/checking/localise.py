"""The first divergent step, and for each step its own error and the error that it inherits.

With a recorded golden, every step's part of the program is re-run in float64 on the observed steps before it. Observed
minus re-run is the step's own error; re-run minus golden is what it inherits. Without a program only observed minus
golden is known, and it is compared with the errors of the steps before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from whywrong.checking.alignment import NARROW_NAMES, common_steps, name_hints, renamed
from whywrong.checking.findings import Localisation
from whywrong.checking.ranks import by_rank
from whywrong.checking.updates import earlier, hidden
from whywrong.checking.with_program import Rerun
from whywrong.checking.without_program import Values
from whywrong.comparing.precision import UNIT_ROUNDOFF, Precision, guess, representable
from whywrong.errors import UsageError, did_you_mean
from whywrong.process_state import SMALL, few_threads
from whywrong.recording.golden import GRADIENT, Golden
from whywrong.recording.steps import DIFFERS, Trace, as_trace
from whywrong.tables import to_stderr

TRACE_FALSE_POSITIVES = 1e-3
"""The probability that a correct trace is flagged anywhere: all steps share it, and both instruments."""

UNCAPTURED = "whywrong.assert_close(result, golden) checks the result as it is then"
"""What to do where capture changes what runs, as it does where torch.compile fuses operations."""

WIDENED = "float64 of float32 numbers is taken as stored in float32 (else declare storage=float64,accumulate=float64)"
"""The note for a dump of float32 numbers as float64, where nothing was declared."""


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
    """Compare each observed step with the golden's, within the error that the declared precision allows.

    observed: a Trace or a dict of arrays by name, real or whole numbers of any dtype, each of its golden step's shape.
    golden: what :func:`whywrong.golden` recorded, which separates own from inherited errors; or steps alone.
    precision: what the implementation declares. Without one it is what the observed file declares, else a guess from
    the dtypes, and the result says so.
    names: golden names mapped to observed ones, where they differ. Where no name is shared, a prefix that the names of
    one side have is removed, and a note says so.
    progress: is called with a line before a re-run of more than 10 s; by default it goes to standard error.
    elements: each finding keeps error / tolerance of every element, 4 bytes each; without,
    :attr:`Localisation.detailed` computes them by checking once more.
    false_alarm: the probability that a correct trace is flagged, above 0 and below 1. For N traces, divide it by N.

    A missing step, a different shape and a NaN on one side only are divergences, not exceptions. Several threads may
    call it at once. The simulated runs use torch's global random numbers, whose state is restored afterwards.

    Raises UsageError for arguments of another kind, for a name that neither has, and for an observed without a single
    step of the golden.
    """
    _check_arguments(observed, precision, names, false_alarm)
    options: dict[str, Any] = {"precision": precision, "names": names, "progress": progress, "false_alarm": false_alarm}
    again = None if elements else partial(localise, observed, golden, elements=True, **options)
    golden = golden if isinstance(golden, Golden) else as_trace("golden", golden)
    trace = renamed(as_trace("observed", observed), golden, dict(names or {}))
    golden, steps = common_steps(golden, trace)
    known = {*golden.names, *getattr(golden, "operations", ())}
    declared = precision or trace.precision
    rules, notes = (declared, []) if declared else _guessed(steps)
    if unknown := [name for name in rules.steps if name not in known and name not in trace]:
        hint = did_you_mean(unknown[0], [*known, *trace.names])
        raise UsageError(f"precision: steps names {unknown[0]!r}; {hint}expected a step's name")
    result = Localisation(rules, declared is None, again=again)
    result.unexpected = [name for name in trace.names if name not in known and "/" not in name]
    largest = max(steps.read(name).numel() for name in steps.names)
    chance = false_alarm / (2.0 * len(steps.names))
    with few_threads(largest):
        if isinstance(golden, Golden):  # on a CPU an operation on few elements takes less than a launch on a GPU
            golden = golden.to("cpu") if largest < SMALL or _beyond(golden, steps) else golden
            result.notes, result.inputs = list(golden.notes), {*golden.inputs}
            result.lines = {name: golden.program.nodes[i].site for name, i in golden.steps.items()}
            result.findings = Rerun(golden, steps, rules, declared is None, chance, progress, elements).check()
        else:
            result.ordered = golden.ordered or len(steps.names) == 1
            result.findings = Values(golden, steps, rules, chance, result.ordered, elements).check()
            result.notes = _dtype_notes(result)
        result.notes += hidden(golden, steps, earlier(golden, steps.names))
        result.findings = by_rank(golden, steps, result.findings)
        result.notes += [trace.note] * bool(trace.note) + notes + _narrower(steps, result)
        if (effect := trace.texts.get("observer", "")).startswith(DIFFERS):
            result.notes.append(f"what was captured is not what runs uncaptured: {effect}; {UNCAPTURED}")
    gradients = {name for name in result.findings if name.startswith(GRADIENT)}
    if gradients and gradients.isdisjoint(steps.names):
        result.findings = {name: finding for name, finding in result.findings.items() if name not in gradients}
        result.notes.append("gradients: none observed")
    result.notes += name_hints(golden, trace, result.unexpected)
    return result


def _beyond(golden: Golden, steps: Trace) -> bool:
    """Whether an observed whole number is beyond all that the golden has there: as a place outside of a tensor it would
    end CUDA, and on a CPU it raises."""
    pairs = [(steps.read(name), golden[name]) for name in steps.names if name in golden.names]
    whole = [pair for pair in pairs if not any(x.is_floating_point() or not x.numel() for x in pair)]
    ends = [[(int(x.long().min()), int(x.long().max())) for x in pair] for pair in whole]
    return any(low < least or high > most for (low, high), (least, most) in ends)


def _check_arguments(observed: Any, precision: Any, names: Any, false_alarm: Any) -> None:
    if isinstance(observed, Golden) or "program" in getattr(observed, "about", ()):
        where = getattr(observed, "source", "") or "observed"
        expected = "expected the steps of an implementation, as of whywrong.capture"
        raise UsageError(f"{where}: {expected}, got a recorded golden")
    if precision is not None and not isinstance(precision, Precision):
        raise UsageError(f"precision: expected whywrong.Precision(storage=...), got {precision!r:.60}")
    if not isinstance(names or {}, Mapping):
        raise UsageError(f"names: expected the golden's names mapped to the observed's, got {names!r:.60}")
    if not (isinstance(false_alarm, float) and 0.0 < false_alarm < 1.0):
        raise UsageError(f"false_alarm: expected a probability, above 0 and below 1, got {false_alarm!r}")


def _guessed(steps: Trace) -> tuple[Precision, list[str]]:
    """The precision of steps of which nothing was declared, and a note where it is not that of their dtypes."""
    rules = guess([steps.read(name).dtype for name in steps.names])
    if rules.accumulate == "float64" and _all_float32(steps):
        return Precision(storage="float32"), [WIDENED]
    return rules, []


def _all_float32(steps: Trace) -> bool:
    """Whether all tensors have float32 numbers alone, and one at least has more digits than float16 holds.

    Of the numbers that a float64 program computes one in 2^29 is a float32 number: a single step tells the two apart.
    """

    def all_are(dtype: str) -> bool:
        return all(representable(x.double(), dtype) for x in map(steps.read, steps.names) if x.is_floating_point())

    return all_are("float32") and not all_are("float16")


def _dtype_notes(result: Localisation) -> list[str]:
    """Without a program: in how many steps the golden is the narrower side, and where the two first differ at all."""
    totals = [(name, finding.total) for name, finding in result.findings.items() if finding.total]
    less = sum(UNIT_ROUNDOFF.get(t.golden_dtype, 0.0) > UNIT_ROUNDOFF.get(t.observed_dtype, 1.0) for _, t in totals)
    notes = [f"in {less} steps the golden is narrower than the observed: its rounding is allowed"] * (less > 0)
    differs = (name for name, t in totals if t.observed_dtype == t.golden_dtype and t.max_abs > 0.0)
    if result.ordered and (name := next(differs, None)) is not None and name != result.first:
        notes.append(f"the first step that is not equal to the golden's is {name}; it may be so by rounding")
    return notes


def _narrower(steps: Trace, result: Localisation) -> list[str]:
    """The type that was not declared, where most divergent steps have only numbers of it."""
    divergent = [(name, finding.total) for name, finding in result.findings.items() if finding.diverges]
    dtypes = {n: t.observed_dtype for n, t in divergent if t and t.observed_dtype in UNIT_ROUNDOFF and t.count > 1}
    units = {name: UNIT_ROUNDOFF.get(result.precision.of(name).storage or own, 1.0) for name, own in dtypes.items()}
    for dtype in NARROW_NAMES:
        wider = (name for name, unit in units.items() if unit < UNIT_ROUNDOFF[dtype])
        fits = [name for name in wider if _all_of(dtype, steps.read(name).reshape(-1)[:SMALL].double())]
        if 2 * len(fits) > len(units):
            how = f"--precision storage={dtype} (or whywrong.Precision(storage={dtype!r}))"
            return [f"this looks like {dtype}: declare it with {how}"]
    return []


def _all_of(dtype: str, x: torch.Tensor) -> bool:
    """Whether x has only numbers of a format, and these use its last digit, as a half of what is rounded to it does.

    Numbers that need fewer digits, such as powers of two, are in every format.
    """
    some = x[x.isfinite() & (x != 0.0)]
    last = (torch.frexp(some).mantissa / UNIT_ROUNDOFF[dtype]) % 2.0 != 0.0
    return representable(x, dtype) and len(some) > 2 and float(last.double().mean()) > 0.25
