"""The thin helper of the workbook: compare, localise, weigh hypotheses, settle claims, record. Knows no kernel.

Everything public is imported on first use, so that ``import labkit`` and the command line stay quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from labkit.causes.hypotheses import Weighing as Weighing
    from labkit.causes.hypotheses import weigh as weigh
    from labkit.numerics.bounds import Bound as Bound
    from labkit.numerics.compare import Comparison as Comparison
    from labkit.numerics.compare import compare as compare
    from labkit.numerics.precision import Precision as Precision
    from labkit.numerics.structure import Structure as Structure
    from labkit.numerics.structure import structure as structure
    from labkit.session.claims import Ledger as Ledger
    from labkit.session.claims import claims as claims
    from labkit.session.lab import Lab as Lab
    from labkit.session.lab import start as start
    from labkit.tables import Table as Table
    from labkit.trace.capture import capture as capture
    from labkit.trace.findings import Localisation as Localisation
    from labkit.trace.golden import Golden as Golden
    from labkit.trace.golden import golden as golden
    from labkit.trace.localise import localise as localise
    from labkit.trace.recorder import step as step
    from labkit.trace.repetition import Repetition as Repetition
    from labkit.trace.repetition import poisoned as poisoned
    from labkit.trace.repetition import repeat as repeat
    from labkit.trace.replayed import bounded as bounded
    from labkit.trace.steps import Step as Step
    from labkit.trace.steps import Trace as Trace

_HOME = {
    "causes.hypotheses": ("Weighing", "weigh"),
    "numerics.bounds": ("Bound",),
    "numerics.compare": ("Comparison", "compare"),
    "numerics.precision": ("Precision",),
    "numerics.structure": ("Structure", "structure"),
    "session.claims": ("Ledger", "claims"),
    "session.lab": ("Lab", "start"),
    "tables": ("Table",),
    "trace.capture": ("capture",),
    "trace.findings": ("Localisation",),
    "trace.golden": ("Golden", "golden"),
    "trace.localise": ("localise",),
    "trace.recorder": ("step",),
    "trace.replayed": ("bounded",),
    "trace.repetition": ("Repetition", "poisoned", "repeat"),
    "trace.steps": ("Step", "Trace"),
}
_MODULE = {name: module for module, names in _HOME.items() for name in names}
__all__ = sorted(_MODULE)


def __getattr__(name: str) -> Any:
    if name not in _MODULE:
        raise AttributeError(f"labkit has no {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"labkit.{_MODULE[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
