"""Launch a kernel without asking Triton which of its compiled forms it is: that takes longer than a small one runs."""

from __future__ import annotations

from typing import Any

import torch

Compiled = dict[Any, tuple[Any, tuple[Any, ...]]]
"""Kernels, and the constants that follow their arguments, by what they were compiled for."""


def aligned(*tensors: torch.Tensor) -> tuple[bool, ...]:
    """Whether each begins at a multiple of 16 bytes: Triton compiles for that."""
    return tuple([tensor.data_ptr() % 16 == 0 for tensor in tensors])


def launch(
    compiled: Compiled, kind: Any, kernel: Any, grid: tuple[int, int, int], *arguments: Any, **constants: Any
) -> None:
    """`kernel[grid](*arguments, **constants)`; `constants` are its constexprs, which come last, and Triton's options.

    `kind` holds all that the compiled form depends on, so that equal kinds mean equal `constants`, types and
    :func:`aligned` of `arguments`, and integers that are alike: 1, a multiple of 16, beyond 32 bits.
    """
    known = compiled.get((kernel.__name__, kind))
    if known is not None:
        known[0][grid](*arguments, *known[1])
    elif (made := kernel[grid](*arguments, **constants)) is not None:  # as it is under the interpreter
        compiled[kernel.__name__, kind] = made, tuple(constants[name] for name in kernel.arg_names[len(arguments) :])
