"""Launch a compiled Triton kernel directly: Triton's own search for its compiled form takes longer than a small one."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

Compiled = dict[Any, tuple[Any, tuple[Any, ...]]]
"""Compiled kernels, and the constants that follow their arguments, by what they were compiled for."""


def aligned(*tensors: torch.Tensor) -> tuple[bool, ...]:
    """Whether each tensor begins at a multiple of 16 bytes: Triton compiles for that."""
    return tuple([tensor.data_ptr() % 16 == 0 for tensor in tensors])


@lru_cache(maxsize=1024)
def specialised(*integers: int) -> tuple[tuple[bool, bool, bool], ...]:
    """All that compiled code depends on of each integer argument: that it is 1, a multiple of 16, within 32 bits.

    Triton compiles 1 as a constant, assumes that a multiple of 16 is one, and passes an integer beyond int32 as int64.
    A key that holds this, and not the value, stays the same for most lengths, so that a table of compiled kernels stays
    small in a process that meets a new length in every call.
    """
    return tuple([(value == 1, value % 16 == 0, -(2**31) <= value < 2**31) for value in integers])


def launch(
    compiled: Compiled, key: Any, kernel: Any, grid: tuple[int, int, int], *arguments: Any, **constants: Any
) -> None:
    """`kernel[grid](*arguments, **constants)`; `constants` are its constexprs, which come last, and Triton's options.

    `key` holds all that the compiled form depends on: the device, the `constants`, the types of `arguments`,
    :func:`aligned` of the tensors and :func:`specialised` of the integers (for an argument in the kernel's
    `do_not_specialize`, only whether it is within 32 bits). The value of a float and the grid are not compiled for.
    """
    known = compiled.get((kernel.__name__, key))
    if known is not None:
        known[0][grid](*arguments, *known[1])
    elif (form := kernel[grid](*arguments, **constants)) is not None:  # None under the interpreter
        compiled[kernel.__name__, key] = form, tuple(constants[name] for name in kernel.arg_names[len(arguments) :])
