"""An assertion for anyone's pytest: what was observed against a golden, within derived bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from numbers import Number
from typing import Any

from numpy import generic, ndarray
from torch import Tensor

from whywrong.checking.alignment import renamed
from whywrong.checking.findings import SHORT_TABLE, Finding, Localisation
from whywrong.checking.localise import TRACE_FALSE_POSITIVES, localise
from whywrong.comparing.comparison import as_tensor
from whywrong.comparing.precision import INTEGERS, UNIT_ROUNDOFF, Precision, name_of
from whywrong.errors import UsageError
from whywrong.explaining.search import explain
from whywrong.recording.golden import Golden
from whywrong.recording.steps import OUTPUT, Trace, as_trace
from whywrong.recording.watching import parts_of, tensors_of
from whywrong.tables import EVERY_ROW, printable, to_stderr
from whywrong.torch_private import tree_map_only

SECONDS = 5.0
"""How long a failing test may look for the cause."""

TENSOR = "a tensor"
NOTHING = "nothing"


def assert_close(
    observed: Any,
    golden: Any,
    *,
    precision: Precision | None = None,
    names: Mapping[str, str] | None = None,
    progress: Callable[[str], None] = to_stderr,
    false_alarm: float = TRACE_FALSE_POSITIVES,
) -> None:
    """Raise AssertionError unless `observed` is the golden within what the declared precision allows.

    `golden` is what :func:`whywrong.golden` recorded (best: then each step is re-run on what was observed before it), a
    Trace or a dict of arrays by the names of steps, or a result alone: a tensor, an array, or a tuple of them.
    `observed` is the same of the implementation; a result alone is compared with the golden's ``output``. The other
    arguments are those of :func:`whywrong.localise`. The message gives the verdict, what was assumed, the first step
    that is wrong, and its worst elements.

    As in torch.testing, structures must agree: no result is missing or additional, dicts have the same keys, and what
    is no number is equal (a recorded golden has numbers alone); a list may be a tuple. Only a Trace may have more steps
    than the golden. Intermediate steps may be missing, and a result that is there as a step of another name. A dtype
    must be of the golden's kind, floating-point or whole numbers, and at least as wide as the declared storage, or else
    as the golden's dtype: of a recorded golden the narrowest that was given to the reference. A golden of float64 says
    nothing of an implementation's dtype.

    Raises UsageError as :func:`whywrong.localise` does.
    """
    __tracebackhide__ = True
    steps, reference = _steps(observed, isinstance(golden, Golden)), _steps(golden)
    options: dict[str, Any] = {"precision": precision, "names": names, "progress": progress}
    try:
        report = localise(steps, reference, false_alarm=false_alarm, **options)
    except UsageError:
        if difference := _difference(steps, observed, golden, names):
            raise AssertionError(difference) from None
        raise
    difference, name = _difference(steps, observed, golden, names), report.first or next(iter(report.unchecked), None)
    if difference and (report.first is None or report.findings[report.first].total is None):  # no number is wrong
        raise AssertionError(difference)
    dtypes = _dtypes(report, steps, golden, names)
    if name is not None:
        words = [difference] * bool(difference) + [_message(report, report.findings[name]), *dtypes]
        if isinstance(golden, Golden):
            found = explain(steps, golden, report=report, seconds=SECONDS, **options)
            found.about = [line for line in found.about if line not in "\n".join(words)]
            words.append(repr(found))
        raise AssertionError("\n".join(words))
    if dtypes:
        raise AssertionError("\n".join([*dtypes, report.assumed]))


def _steps(given: Any, recorded: bool = False) -> Any:
    """A result alone as steps, by the names that :func:`whywrong.golden` gives a result and its parts.

    A number that is no tensor is one too, unless the golden is `recorded`, which has no such steps.
    """
    if isinstance(given, (Trace, Mapping, Golden)):
        return given
    if callable(given):
        called = getattr(given, "__name__", type(given).__name__)
        raise UsageError(f"expected numbers, or what whywrong.golden recorded of {called}, got {called} itself")
    numbers = (ndarray, generic) if recorded else (ndarray, generic, Number)
    return dict(tensors_of(OUTPUT, tree_map_only(numbers, partial(as_tensor, OUTPUT), given)))


def _renamed(steps: Any, golden: Golden | Trace, names: Mapping[str, str] | None) -> Trace:
    return renamed(as_trace("observed", steps), golden, dict(names or {}))


def _difference(steps: Any, observed: Any, golden: Any, names: Mapping[str, str] | None) -> str:
    """In a line the first part that only one side has, or that is something else; empty where there is none.

    Empty also for what :func:`localise` refuses: steps by names of which the golden has none, and no tensor at all.
    """
    if isinstance(observed, Trace | Golden) or isinstance(golden, Trace) or not steps:
        return ""
    if not isinstance(golden, Golden):
        there, wanted = (dict(_outline(OUTPUT, side)) for side in (observed, golden))
        if isinstance(observed, Mapping) and isinstance(golden, Mapping):
            there = dict(_outline("", dict(_items(_renamed(steps, as_trace("golden", golden), names)))))
            wanted = dict(_outline("", golden))
    else:
        trace = _renamed(steps, golden, names)
        there = {name: TENSOR for name, value in _items(trace) if isinstance(value, Tensor | ndarray | generic)}
        known = there.keys() & {*golden.steps, *golden.operations}
        given = {golden.steps[name] for name in known if name in golden.steps}
        results = [name for name in golden.results if name in known or golden.steps[name] not in given]
        wanted = dict.fromkeys([*known, *results], TENSOR)
    if isinstance(observed, Mapping) and there.keys().isdisjoint(wanted.keys() - {""}):
        return ""
    for name in dict.fromkeys([*wanted, *there]):
        expected, got = wanted.get(name, NOTHING), there.get(name, NOTHING)
        if expected != got:
            return f"{name or 'observed'}: expected {expected}, got {got}"
    return ""


def _items(trace: Trace) -> Iterator[tuple[str, Any]]:
    return ((name, trace[name]) for name in trace.names)


def _outline(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """What a result is made of, by the names of its parts: containers, tensors, and anything else as it is printed."""
    parts = parts_of(value)
    if isinstance(value, (tuple, list)):
        yield name, f"a sequence of {len(value)}"
    elif isinstance(value, dict) or parts:
        yield name, "a dict" if isinstance(value, dict) else f"a {type(value).__name__}"
    else:
        yield name, TENSOR if isinstance(value, (Tensor, ndarray, Number)) else f"{value!r:.60}"
    for key, part in parts.items():
        yield from _outline(f"{name}.{key}" if name else str(key), part)


def _dtypes(report: Localisation, steps: Any, golden: Any, names: Mapping[str, str] | None) -> list[str]:
    """In a line the first step whose dtype is of another kind than the golden's, or narrower than it may be."""
    reference = golden if isinstance(golden, Golden) else as_trace("golden", _steps(golden))
    trace = _renamed(steps, reference, names)
    for name in (name for name in trace.names if name in report.findings and name in reference):
        dtype, exact = trace.read(name).dtype, as_tensor(name, reference[name]).dtype
        given, real = report.precision.of(name).storage, exact.is_floating_point
        given = given if not report.guessed and (real or given in INTEGERS) else None
        wanted = given or (isinstance(golden, Golden) and real and golden.narrowest) or name_of(exact)
        is_float = wanted in UNIT_ROUNDOFF
        narrower = UNIT_ROUNDOFF.get(name_of(dtype), 0.0) > UNIT_ROUNDOFF.get(wanted, 1.0) and wanted != "float64"
        if is_float != dtype.is_floating_point or (is_float and narrower):
            how = f"precision=whywrong.Precision(storage={name_of(dtype)!r})"
            return [f"{name}: expected {wanted}, got {name_of(dtype)}; where that is meant, declare it: {how}"]
    return []


def _message(report: Localisation, first: Finding) -> str:
    """The verdict; the precision that was assumed; own against inherited errors; the worst elements."""
    lines = [f"{report.verdict} ({first.words})", report.assumed, *report.notes]
    if first.own is not None:
        few = report.inherited if len(report.inherited) <= SHORT_TABLE else [f"{len(report.inherited)} steps"]
        lines += [f"own errors: {', '.join(report.own)}; inherited only: {', '.join(few) or 'none'}"]
    lines += first.touched
    elements = report.detailed.findings[first.name].elements
    lines += [f"the worst elements of {first.name}:", str(elements.table())] if elements is not None else []
    return "\n".join([printable("\n".join(lines))] + [str(report.table())] * EVERY_ROW.get())
