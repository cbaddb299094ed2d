"""The thin helper of notebooks and batches: parameters, the device of kernels, the ledger of claims, records of runs.

The library that checks numbers is :mod:`whywrong`. Everything public is imported on first use, so that the command line
stays quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from labkit.requirements import needs

_MODULE = {
    "Lab": "session.lab",
    "Ledger": "session.claims",
    "claims": "session.claims",
    "show_source": "source",
    "start": "session.lab",
}
__all__ = sorted(_MODULE)


def __getattr__(name: str) -> Any:
    if name not in _MODULE:
        raise AttributeError(f"labkit has no {name!r}; it has {', '.join(__all__)}")
    with needs(f"labkit.{name}"):
        return getattr(import_module(f"labkit.{_MODULE[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
