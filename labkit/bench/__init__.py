"""Timing that refuses to time what was not checked first, with the lower bound beside it.

The names that a kernel's bench.py and a notebook use stand here.
"""

from labkit.bench.timing import Case, Provider, bench, case_of, cuda_times, extra_memory, read, recorded_on, table

__all__ = ["Case", "Provider", "bench", "case_of", "cuda_times", "extra_memory", "read", "recorded_on", "table"]
