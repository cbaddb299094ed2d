"""Choices that could go either way: which of equal numbers comes first, and on which side of a kink a number is.

A correct program may choose otherwise. What the reference would give then is computed with numbers that are moved: the
argument of each operation that puts numbers in order, by some round-offs, so that equal ones come in the order of their
places, in the reverse order, or in any; and of a gradient the program's inputs, by much less than a round-off, so that
a derivative is that of one side or the other, as of abs at 0, of a maximum of equal numbers, of clamp at its bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from whywrong.recording.operations import ORDERS
from whywrong.recording.program import INPUT, Node, Program, call

RUNS = 24
"""How often it is chosen: in the order of places, in the reverse one, and then at random."""

ORDER_MOVE, INPUT_MOVE, ZERO_MOVE = 8.0, 2.0**-12, 1e-30
"""How far numbers are moved, in units of a round-off; and a zero."""


def either_way(program: Program, target: int, unit: float, gradient: bool) -> Iterator[Tensor]:
    """What an operation gives where its ties fall otherwise, RUNS times; nothing where there can be none.

    `unit` is the round-off of the program's numbers; of a `gradient` the inputs are moved too.
    """
    order = program.cone([target], ())
    given = {k: program.values[k] for k in order if program.nodes[k].func == INPUT}
    if not gradient and not any(program.nodes[k].op in ORDERS for k in order):
        return
    device = next((x.device for x in program.values.values() if isinstance(x, Tensor)), torch.device("cpu"))
    noise = torch.Generator(device).manual_seed(0)
    for run in range(RUNS):

        def rule(node: Node, args: Any, kwargs: dict[str, Any], run: int = run) -> Any:
            out = call(node, args, kwargs, device)
            if node.op not in ORDERS:
                return out
            moved = call(node, [_moved(args[0], run, ORDER_MOVE * unit, noise), *args[1:]], kwargs, device)
            return (
                [out[0], moved[1]] if isinstance(out, (tuple, list)) else moved if not out.is_floating_point() else out
            )

        inputs = {k: _moved(x, run, INPUT_MOVE * unit, noise) for k, x in given.items()} if gradient else {}
        yield program.run(order, inputs, (target,), rule=rule)[target]


def _moved(x: Any, run: int, by: float, noise: torch.Generator) -> Any:
    """A tensor of real numbers, each a little larger or smaller: the more the later it stands, or the less."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    if run > 1:
        share = torch.rand(x.shape, generator=noise, dtype=x.dtype, device=x.device) * 2.0 - 1.0
    else:
        share = torch.linspace(-1.0, 1.0, x.numel(), dtype=x.dtype, device=x.device).view(x.shape) * (1 - 2 * run)
    return x + share * (by * x.abs()).clamp(min=ZERO_MOVE)
