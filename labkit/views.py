"""How a step may be laid out to broadcast to another one's shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from labkit.blocks import cuts

Tensor = torch.Tensor
View = Callable[[Tensor], Tensor]


def views_of(shape: torch.Size, target: torch.Size) -> Iterator[View]:
    """Ways to broadcast to `target`: as it is, by leading dimensions, by channel, a number for a block, and a table of
    positions, perhaps with half of the columns, as those of a rotary embedding."""
    yield lambda x: x
    missing = len(target) - len(shape)
    if missing > 0 and tuple(target[: len(shape)]) == tuple(shape):
        yield lambda x: x.reshape(*shape, *(1,) * missing)
    if len(shape) == 1 and len(target) > 2 and target[1] == shape[0]:
        yield lambda x: x.reshape(1, shape[0], *(1,) * (len(target) - 2))
    if missing == 0 and shape != target:
        yield from (one.spread for one in cuts(target, shape))
    yield from tables(shape, target)


def tables(shape: torch.Size, target: torch.Size) -> Iterator[View]:
    """Ways in which a table [positions, columns] goes with all heads, each column once or twice."""
    if len(shape) != 2 or len(target) < 2 or not shape[1] or target[-1] not in (shape[1], 2 * shape[1]):
        return
    for axis in range(len(target) - 1):
        if target[axis] != shape[0]:
            continue
        laid = (shape[0], *(1,) * (len(target) - 2 - axis), target[-1])
        if shape[1] == target[-1]:
            if len(laid) > 2:
                yield lambda x, laid=laid: x.reshape(laid)  # type: ignore[misc]
        else:
            yield lambda x, laid=laid: torch.cat((x, x), -1).reshape(laid)  # type: ignore[misc]
            yield lambda x, laid=laid: x.repeat_interleave(2, -1).reshape(laid)  # type: ignore[misc]
