"""Fourteen reference programs, each with an independent port and its defects. `cases()` yields them all."""

from benchmark import base
from benchmark.heldout_4 import part_four, part_one, part_three, part_two  # noqa: F401

PROGRAMS = base.members(__name__)
