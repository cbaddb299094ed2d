"""Why a kernel's or a model's numbers are wrong: record a reference, find the first wrong step, find its cause.

    golden = whywrong.golden(reference, *inputs)        # run once in float64, every operation recorded
    print(whywrong.localise(observed, golden))          # which step is wrong by itself, and which inherits
    print(whywrong.explain(observed, golden))           # the mutation of the reference that gives these numbers

Everything public is imported on first use, so that ``import whywrong`` and the command line stay quick.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from whywrong.errors import needs

if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
"""Where whywrong is imported before torch, threads that wait for each other spin shortly, then sleep. As they come they
spin for milliseconds: beside two busy processes on two cores `localise` took 13 to 25 s by that, and not 6."""

_NAMES = {
    "checking.findings": ("Finding", "Localisation"),
    "checking.graft": ("Graft", "graft"),
    "checking.localise": ("localise",),
    "checking.repetition": ("Repeated", "Repetition", "poisoned", "repeat"),
    "checking.with_program": ("bounded",),
    "comparing.bounds": ("Bound",),
    "comparing.comparison": ("Comparison", "compare"),
    "comparing.elements": ("Element", "Elements"),
    "comparing.precision": ("Precision",),
    "comparing.structure": ("Structure", "structure"),
    "errors": ("UsageError",),
    "explaining.assertion": ("assert_close",),
    "explaining.hypotheses": ("Fit", "Weighing", "weigh"),
    "explaining.search": ("Cause", "Explanation", "explain"),
    "fuzzing.fuzz": ("Failure", "FuzzReport", "fuzz"),
    "recording.capture": ("capture",),
    "recording.golden": ("Golden", "golden", "load"),
    "recording.naming": ("Partner", "Proposal", "propose_names"),
    "recording.recorder": ("step",),
    "reporting.fuzzed": ("fuzzed",),
    "recording.steps": ("Step", "Steps", "Trace"),
    "reporting.weights": ("Weights", "weights"),
    "tables": ("Table",),
}
_MODULE = {name: module for module, names in _NAMES.items() for name in names}
__all__ = sorted(_MODULE)


def __getattr__(name: str) -> Any:
    if name not in _MODULE:
        raise AttributeError(f"whywrong has no {name!r}; it has {', '.join(__all__)}")
    with needs(f"whywrong.{name}"):
        return getattr(import_module(f"whywrong.{_MODULE[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
