"""Faulty and correct ports of reference programs, by authors who did not know the tool that they measure.

`heldout_1` to `heldout_9b` are ten sets of programs with defects, in the order of their making; `correct_ports` has
correct ports alone. ``python -m benchmark score TOOL`` scores a tool; README.md describes the sets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path

from benchmark.base import Program

HERE = Path(__file__).parent
SETS = (*(f"heldout_{k}" for k in range(1, 9)), "heldout_9a", "heldout_9b", "correct_ports")


def programs(names: Iterable[str] = ()) -> Iterator[Program]:
    """The programs of the sets, or those with the ids, that are named; of all sets where none is. Raises ValueError."""
    found = {name: list(import_module(f"benchmark.{name}").PROGRAMS.values()) for name in SETS}
    by_id = {program.id: [program] for several in found.values() for program in several}
    for name in names or SETS:
        if name not in found and name not in by_id:
            raise ValueError(f"{name}: expected a set ({', '.join(SETS)}) or a program's id, as q01")
        yield from found.get(name) or by_id[name]
