"""A few elements or rows of a step, and what the steps that it may be made of have there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from labkit.blocks import cuts
from labkit.views import tables

Tensor = torch.Tensor
Sources = Mapping[str, Tensor]
Laid = tuple[list[str], Tensor, Tensor]
SAMPLES, ROWS = 48, 2
SOFTMAX = ", softmax"
"""How the name of a softmax ends that no step holds."""


def elements(sources: Sources, g: Tensor) -> Laid:
    """Names, what each source has [names, samples] where `g` has [samples], none of which is zero."""
    usable = torch.nonzero(g.isfinite().flatten() & (g != 0.0).flatten()).flatten()
    if not len(usable):
        return [], torch.empty(0), torch.empty(0)
    return _picked(sources, g, usable[torch.randint(len(usable), (SAMPLES,), generator=_generator())])


def spread_elements(sources: Sources, g: Tensor) -> Laid:
    """Likewise, of more samples, each once: of all elements and of the largest ones."""
    usable = torch.nonzero(g.isfinite().flatten()).flatten()
    shuffled = usable[torch.randperm(len(usable), generator=_generator())[: 4 * SAMPLES]]
    largest = usable[g.flatten()[usable].abs().topk(min(SAMPLES, len(usable))).indices]
    return _picked(sources, g, torch.cat((shuffled, largest)).unique())


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _picked(sources: Sources, g: Tensor, at: Tensor) -> Laid:
    places = torch.unravel_index(at, g.shape)
    return _laid_out(sources, g, lambda x: x.expand(g.shape)[places], g[places])


def rows(sources: Sources, g: Tensor) -> Laid:
    """Names, what each source has [names, rows, columns] where `g` has [rows, columns]."""
    if g.ndim < 2 or g.shape[-1] < 4:
        return [], torch.empty(0), torch.empty(0)

    def pick(x: Tensor) -> Tensor:
        whole = x.expand(g.shape).reshape(-1, g.shape[-1])
        return whole[:: max(1, len(whole) // ROWS)][:ROWS]

    return _laid_out(sources, g, pick, pick(g))


def _fitting(pick: Callable[[Tensor], Tensor], x: Tensor) -> Tensor | None:
    try:
        row = pick(x)
    except RuntimeError:
        return None
    return row if bool(row.isfinite().all()) else None


def _laid_out(sources: Sources, g: Tensor, pick: Callable[[Tensor], Tensor], y: Tensor) -> Laid:
    names, rows = [], []
    for name, x in sources.items():
        ways = [x]
        if 0 < x.ndim < g.ndim:
            ways.append(x.reshape(*x.shape, *(1,) * (g.ndim - x.ndim)))
        if x.ndim == 1 and g.ndim > 2:  # a number a channel
            ways.append(x.reshape(1, -1, *(1,) * (g.ndim - 2)))
        if x.ndim == g.ndim and x.shape != g.shape:
            ways.extend(one.spread(x) for one in cuts(g.shape, x.shape))
        fitting = [row for row in map(partial(_fitting, pick), ways) if row is not None][:1]
        fitting += [row for view in tables(x.shape, g.shape) if (row := _fitting(pick, view(x))) is not None]
        names.extend([name] * len(fitting))
        rows.extend(fitting)
    return names, torch.stack(rows) if rows else torch.empty(0), y
