"""The thin helper of the workbook: compare, localise, weigh hypotheses, settle claims, record. Knows no kernel.

Everything public is imported on first use, so that ``import labkit`` and the command line stay quick.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from labkit.capture import capture as capture
    from labkit.claims import Ledger as Ledger
    from labkit.claims import claims as claims
    from labkit.compare import Comparison as Comparison
    from labkit.compare import compare as compare
    from labkit.hypotheses import Weighing as Weighing
    from labkit.hypotheses import weigh as weigh
    from labkit.lab import Lab as Lab
    from labkit.lab import start as start
    from labkit.localise import Localisation as Localisation
    from labkit.localise import localise as localise
    from labkit.repetition import Repetition as Repetition
    from labkit.repetition import poisoned as poisoned
    from labkit.repetition import repeat as repeat
    from labkit.structure import Structure as Structure
    from labkit.structure import structure as structure
    from labkit.tables import Table as Table
    from labkit.tolerance import Bound as Bound
    from labkit.trace import Step as Step
    from labkit.trace import Trace as Trace

_HOME = {
    "Bound": "tolerance",
    "Comparison": "compare",
    "Lab": "lab",
    "Ledger": "claims",
    "Localisation": "localise",
    "Step": "trace",
    "Table": "tables",
    "Trace": "trace",
    "Weighing": "hypotheses",
    "Repetition": "repetition",
    "Structure": "structure",
    "capture": "capture",
    "claims": "claims",
    "compare": "compare",
    "localise": "localise",
    "poisoned": "repetition",
    "repeat": "repetition",
    "start": "lab",
    "structure": "structure",
    "weigh": "hypotheses",
}
__all__ = sorted(_HOME)


class _Package(ModuleType):
    """`labkit.compare` is the function, although the import of its module would put the module there."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"labkit has no {name!r}; it has {', '.join(__all__)}")
        value = getattr(import_module(f"labkit.{_HOME[name]}"), name)
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *__all__]


sys.modules[__name__].__class__ = _Package
