"""Twelve reference programs, each with an independent port and its defects. `cases()` yields them all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import base
from base import KINDS, PROGRAMS, case, inputs_of, observed_of, precision_of, run_port  # noqa: F401
import part_one  # noqa: F401
import part_two  # noqa: F401
import part_three  # noqa: F401
import part_four  # noqa: F401


def cases(
    programs: list[str] | None = None, clean: bool = True, defects: bool = True, every_variant: bool = False
) -> Iterator[dict[str, Any]]:
    """All cases, clean ones first, program by program."""
    yield from base.cases(programs, clean, defects, every_variant)


if __name__ == "__main__":
    for p in PROGRAMS.values():
        print(p.id, p.name, len(p.defects), "defects", p.variants)
    print(len(PROGRAMS), "programs", sum(len(p.defects) for p in PROGRAMS.values()), "defects")
