"""Eight reference programs, each with an independent port and ten defects. `cases()` yields them all."""

from benchmark import base
from benchmark.heldout_9a import part_one, part_three, part_two  # noqa: F401

PROGRAMS = base.members(__name__)
