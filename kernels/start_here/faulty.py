"""Faults as people make them, each in a part of the kernel, and which of them a seed draws.

A fault changes one thing of the part in kernel.py that it stands for. FAIR has the kinds, in the words of
:func:`whywrong.explain`, by which each may rightly be called; they were written down before anything was explained.
"""

import random
from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.start_here.kernel import CORRECT_PARTS, Parts, run
from whywrong.errors import UsageError

Tensor = torch.Tensor
NONE, BLIND = "none", "blind"


@triton.jit
def padded_mean(x_ptr, columns, BLOCK: tl.constexpr):
    """Divides by the columns of all tiles, which are more than those of the row."""
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + column, mask=column < columns, other=0.0)
        squares += x * x
    return tl.sum(squares, 0) / (tl.cdiv(columns, BLOCK) * BLOCK)


@triton.jit
def forgotten_tail(x_ptr, columns, BLOCK: tl.constexpr):
    """Adds up full tiles only: what is left over in the last one is not among them."""
    squares = tl.zeros([BLOCK], tl.float32)
    for tile in range(columns // BLOCK):
        column = tile * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + column, mask=column < columns, other=0.0)
        squares += x * x
    return tl.sum(squares, 0) / columns


@triton.jit
def eps_outside(x, gain_ptr, column, columns, mean_square, eps):
    """Adds eps to the root, not to what the root is taken of."""
    gain = tl.load(gain_ptr + column, mask=column < columns, other=0.0)
    return x / (tl.sqrt_rn(mean_square) + eps) * gain


@triton.jit
def neighbour_gain(x, gain_ptr, column, columns, mean_square, eps):
    """Takes the gain of the next column, and none for the last."""
    gain = tl.load(gain_ptr + column + 1, mask=column + 1 < columns, other=0.0)
    return x / tl.sqrt_rn(mean_square + eps) * gain


@triton.jit
def first_tile(scaled_ptr, columns, BLOCK: tl.constexpr):
    """Looks for the largest number in the first tile only."""
    found = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, BLOCK, BLOCK):
        column = start + tl.arange(0, BLOCK)
        found = tl.maximum(found, tl.load(scaled_ptr + column, mask=column < columns, other=float("-inf")))
    return tl.max(found, 0)


@triton.jit
def power_of_two(z):
    """2 to the power of z, which is faster, without the factor log2(e) that makes it e to the power of z."""
    return tl.exp2(z)


@triton.jit
def unmasked_tail(scaled_ptr, largest, columns, BLOCK: tl.constexpr, EXPONENTIAL: tl.constexpr):
    """Reads 0 beyond the end of the row, where minus infinity adds nothing to the sum."""
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        z = tl.load(scaled_ptr + column, mask=column < columns, other=0.0)
        sums += EXPONENTIAL(z - largest)
    return tl.sum(sums, 0)


class Fault(NamedTuple):
    """One thing that is wrong: the part of the kernel, what stands in its place, the line, and the step it spoils."""

    part: str
    function: Callable[..., object]
    mark: str
    """What the line has on which the fault stands; the right function's own differs."""
    right: str
    """What the right function has there."""
    first: str
    fair: frozenset[str]


def _fault(part: str, function: Callable[..., object], mark: str, right: str, first: str, *fair: str) -> Fault:
    return Fault(part, function, mark, right, first, frozenset(fair))


FAULTS = {
    "padded_mean": _fault("MEAN_SQUARE", padded_mean, "tl.cdiv", "/ columns", "mean_square", "scale", "factor"),
    "forgotten_tail": _fault(
        "MEAN_SQUARE", forgotten_tail, "columns // BLOCK", "range(0, columns, BLOCK)", "mean_square", "truncate"
    ),
    "eps_outside": _fault("SCALED", eps_outside, "+ eps", "+ eps", "scaled", "eps"),
    "neighbour_gain": _fault("SCALED", neighbour_gain, "column + 1", "gain_ptr + column", "scaled", "shift"),
    "first_tile": _fault("LARGEST", first_tile, "in range(0, BLOCK", "in range(0, columns", "largest", "truncate"),
    "power_of_two": _fault("EXPONENTIAL", power_of_two, "tl.exp2", "tl.exp", "total", "function", "scale", "factor"),
    "unmasked_tail": _fault("TOTAL", unmasked_tail, "other=0.0", "other=float", "total", "mask"),
}


def chosen(fault: str, seed: int) -> str:
    """The name of a fault: `fault` itself, or with ``blind`` one of FAULTS that `seed` draws.

    FAULTS are shuffled anew for every seven seeds, so that seeds 0 to 6 hide each of the seven once.

    Raises UsageError for what is neither of these, nor ``none``.
    """
    if fault not in (BLIND, NONE, *FAULTS):
        raise UsageError(f"fault: expected one of {', '.join((BLIND, NONE, *FAULTS))}, got {fault!r}")
    if fault != BLIND:
        return fault
    again, place = divmod(seed, len(FAULTS))
    return random.Random(again).sample(list(FAULTS), len(FAULTS))[place]


def parts(name: str) -> Parts:
    """The kernel's parts with the fault of that name, or with none."""
    return CORRECT_PARTS if name == NONE else CORRECT_PARTS._replace(**{FAULTS[name].part: FAULTS[name].function})


def kernel(name: str) -> Callable[[Tensor, Tensor], dict[str, Tensor]]:
    """x, gain -> each step, by the kernel with the fault of that name."""

    def kernel_under_suspicion(x: Tensor, gain: Tensor) -> dict[str, Tensor]:
        return run(x, gain, parts(name))

    kernel_under_suspicion.__qualname__ = "suspect"  # a fuzzing's report shows it, and shall not show the name
    return kernel_under_suspicion
