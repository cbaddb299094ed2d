"""An assertion for anyone's pytest: what was observed against a golden, within derived bounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from numbers import Number
from typing import Any

from numpy import generic, ndarray

from whywrong.checking.findings import Finding, Localisation
from whywrong.checking.localise import TRACE_FALSE_POSITIVES, localise
from whywrong.comparing.comparison import as_tensor
from whywrong.comparing.precision import Precision
from whywrong.explaining.search import explain
from whywrong.recording.golden import Golden
from whywrong.recording.steps import Trace
from whywrong.recording.watching import OUTPUT, tensors_of
from whywrong.tables import printable, to_stderr
from whywrong.torch_private import tree_map_only

SECONDS = 5.0
"""How long a failing test may look for the cause."""


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

    Raises UsageError as :func:`whywrong.localise` does.
    """
    __tracebackhide__ = True
    steps = _steps(observed)
    report = localise(
        steps, _steps(golden), precision=precision, names=names, progress=progress, false_alarm=false_alarm
    )
    if (name := report.first or next(iter(report.unchecked), None)) is not None:
        words = _message(report, report.findings[name])
        why = partial(explain, steps, golden, precision=precision, names=names, progress=progress, report=report)
        if isinstance(golden, Golden):
            found = why(seconds=SECONDS)
            found.about = [line for line in found.about if line not in words]
            words = f"{words}\n{found}"
        raise AssertionError(words)


def _steps(given: Any) -> Any:
    """A result alone as steps, by the names that :func:`whywrong.golden` gives a result and its parts."""
    if isinstance(given, (Trace, Mapping, Golden)):
        return given
    return dict(tensors_of(OUTPUT, tree_map_only((ndarray, generic, Number), partial(as_tensor, OUTPUT), given)))


def _message(report: Localisation, first: Finding) -> str:
    """The verdict; the precision that was assumed; own against inherited errors; the worst elements."""
    lines = [f"{report.verdict} ({first.words})", report.assumed, *report.notes]
    if first.own is not None:
        lines += [f"own errors: {', '.join(report.own)}; inherited only: {', '.join(report.inherited) or 'none'}"]
    lines += first.touched
    elements = report.detailed.findings[first.name].elements
    lines += [f"the worst elements of {first.name}:", str(elements.table())] if elements is not None else []
    return printable("\n".join(lines))
