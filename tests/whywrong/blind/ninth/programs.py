"""Fourteen reference programs, each with an independent port that is right. `cases()` yields their runs."""

from __future__ import annotations

from base import KINDS, PROGRAMS, case, cases, inputs_of, observed_of, precision_of, run_port  # noqa: F401
import part_one  # noqa: F401
import part_two  # noqa: F401
