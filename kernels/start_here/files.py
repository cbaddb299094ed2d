"""Kernels in files of their own, as a reader's are: the one under suspicion, and the one with a line written anew."""

import inspect
import textwrap
from collections.abc import Callable
from pathlib import Path

import torch

from kernels.start_here.faulty import FAULTS
from kernels.written import load, with_line
from whywrong.errors import UsageError

Tensor = torch.Tensor
Kernel = Callable[[Tensor, Tensor], dict[str, Tensor]]

SUSPECT = '''
"""The kernel under suspicion; what is in it is not shown here."""

from kernels.start_here import faulty


def suspect(x, gain):
    return faulty.kernel(faulty.chosen({fault!r}, {seed}))(x, gain)
'''
REPAIR = '''
"""The kernel in which one line of a faulty part is written anew."""

import triton
import triton.language as tl

from kernels.start_here.kernel import CORRECT_PARTS, run


{part}

def repaired(x, gain):
    return run(x, gain, CORRECT_PARTS._replace({name}={function}))
'''


def suspect(folder: Path, fault: str, seed: int) -> Kernel:
    """x [rows, columns] and gain [columns], float32 -> each step, by the kernel with the fault that `seed` draws."""
    return load(folder, "suspect", SUSPECT.format(fault=fault, seed=seed).lstrip(), "suspect")  # type: ignore[no-any-return]


def repaired(folder: Path, fault: str, line: str) -> Kernel:
    """The kernel with that fault, in whose part `line` stands in place of the marked line, as far to the right.

    Raises UsageError for a line that is not Python, and for a fault that is not one of FAULTS.
    """
    if fault not in FAULTS:
        raise UsageError(f"fault: expected one of {', '.join(FAULTS)}, got {fault!r}")
    wrong = FAULTS[fault]
    part = with_line(textwrap.dedent(inspect.getsource(wrong.function.fn)), wrong.mark, line)
    source = REPAIR.format(part=part, name=wrong.part, function=wrong.function.__name__)
    return load(folder, "repaired", source.lstrip(), "repaired")  # type: ignore[no-any-return]
