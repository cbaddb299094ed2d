"""Kernels in files of their own, as a reader's are: the one under suspicion, and the one with a line written anew."""

import importlib.util
import inspect
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import torch

from kernels.start_here.faulty import FAULTS
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
    return _loaded(folder, "suspect", SUSPECT.format(fault=fault, seed=seed))


def repaired(folder: Path, fault: str, line: str) -> Kernel:
    """The kernel with that fault, in whose part `line` stands in place of the marked line, as far to the right.

    Raises UsageError for a line that is not Python, and for a fault that is not one of FAULTS.
    """
    if fault not in FAULTS:
        raise UsageError(f"fault: expected one of {', '.join(FAULTS)}, got {fault!r}")
    wrong = FAULTS[fault]
    lines = textwrap.dedent(inspect.getsource(wrong.function.fn)).splitlines()
    (at,) = [i for i, text in enumerate(lines) if wrong.mark in text]
    lines[at] = lines[at][: len(lines[at]) - len(lines[at].lstrip())] + line.strip()
    part = "\n".join(lines) + "\n"
    try:
        compile(part, "repair.py", "exec")
    except SyntaxError as error:
        raise UsageError(f"line: expected a line of Python, got {line.strip()!r} ({error.msg})") from None
    return _loaded(folder, "repaired", REPAIR.format(part=part, name=wrong.part, function=wrong.function.__name__))


def _loaded(folder: Path, name: str, source: str) -> Kernel:
    """The function `name` of a file of that name, written to `folder`."""
    path = folder / f"{name}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source.lstrip(), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec
    assert spec.loader
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)  # type: ignore[no-any-return]
