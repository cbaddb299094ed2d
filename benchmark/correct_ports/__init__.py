"""Fourteen reference programs, each with an independent port that is right. `cases()` yields their runs."""

from benchmark import base
from benchmark.correct_ports import part_one, part_two  # noqa: F401

PROGRAMS = base.members(__name__)
