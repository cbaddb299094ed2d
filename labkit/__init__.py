"""The thin helper of the workbook: compare, localise, weigh hypotheses, settle claims, record. Knows no kernel.

Everything public is imported on first use, so that ``import labkit`` and the command line stay quick.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from labkit.errors import extra

if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
"""Where labkit is imported before torch, threads that wait for each other spin shortly, then sleep. As they come they
spin for milliseconds: beside two busy processes on two cores `localise` took 13 to 25 s by that, and not 6."""

_HOME = {
    "causes.explain": ("Cause", "Explanation", "explain"),
    "causes.hunt": ("Hunt", "hunt"),
    "causes.hypotheses": ("Weighing", "weigh"),
    "numerics.bounds": ("Bound",),
    "numerics.compare": ("Comparison", "compare"),
    "numerics.precision": ("Precision",),
    "numerics.structure": ("Structure", "structure"),
    "session.claims": ("Ledger", "claims"),
    "session.lab": ("Lab", "start"),
    "source": ("show_source",),
    "tables": ("Table",),
    "trace.assertion": ("assert_close",),
    "trace.capture": ("capture",),
    "trace.findings": ("Localisation",),
    "trace.golden": ("Golden", "golden"),
    "trace.localise": ("localise",),
    "trace.naming": ("Proposal", "propose_names"),
    "trace.recorder": ("step",),
    "trace.judge_rerun": ("bounded",),
    "trace.repetition": ("Repetition", "poisoned", "repeat"),
    "trace.steps": ("Step", "Trace"),
}
_MODULE = {name: module for module, names in _HOME.items() for name in names}
__all__ = sorted(_MODULE)


def __getattr__(name: str) -> Any:
    if name not in _MODULE:
        raise AttributeError(f"labkit has no {name!r}; it has {', '.join(__all__)}")
    with extra(f"labkit.{name}"):
        return getattr(import_module(f"labkit.{_MODULE[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
