"""Products of codes, each times the scale of its block, as kernels for quantised numbers take them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch

from labkit.blocks import spread_over
from labkit.replayed import Replay
from labkit.samples import Sources

Tensor = torch.Tensor
MOST_SOURCES = 8
"""Steps that a product with scales is looked for among."""
SHARED = 2
"""Elements that share a scale, at least."""
ROUNDINGS = 16.0
"""How many of the golden's round-offs, relative to the sum of magnitudes, a product may be off."""


def scaled_products(sources: Sources, g: Tensor, unit: float) -> Iterator[tuple[list[str], Replay]]:
    """g [M, N] as (s x) (t z) or (s x) (t z)^T with a scale s, t, or both, of a row, a column, a block, or all."""
    if g.ndim != 2 or len(sources) > MOST_SOURCES:
        return
    matrices = {name: x for name, x in sources.items() if x.ndim == 2 and bool(x.isfinite().all())}
    for (a, x), (b, z) in itertools.permutations(matrices.items(), 2):
        for turned in (False, True):
            if x.shape[0] != g.shape[0] or (z.mT if turned else z).shape != (x.shape[1], g.shape[1]):
                continue
            for s, t in itertools.product(_scales(x, sources), _scales(z, sources)):
                if s is None and t is None:
                    continue
                names = [a, *([s] if s else []), b, *([t] if t else [])]
                way = _product([bool(s), bool(t)], turned, x.shape[1])
                given = [sources[one] for one in names]
                assert way.magnitude is not None
                off = (way.run(*given) - g).abs()
                if bool((off <= ROUNDINGS * x.shape[1] ** 0.5 * unit * way.magnitude(*given)).all()):
                    yield names, way


def _scales(x: Tensor, sources: Sources) -> list[str | None]:
    few = [name for name, s in sources.items() if SHARED * s.numel() <= x.numel() and spread_over(s, x) is not None]
    return [None, *few]


def _product(has_scale: Sequence[bool], turned: bool, length: int) -> Replay:
    def factors(xs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        left, found = list(xs), []
        for scale in has_scale:
            x = left.pop(0)
            spread = spread_over(left.pop(0), x) if scale else None
            found.append(x if spread is None else x * spread)
        return found[0], found[1].mT if turned else found[1]

    def run(*xs: Tensor) -> Tensor:
        x, z = factors(xs)
        return x @ z

    def magnitude(*xs: Tensor) -> Tensor:
        x, z = factors(xs)
        return x.abs() @ z.abs()

    def squares(*xs: Tensor) -> Tensor:
        x, z = factors(xs)
        return x.square() @ z.square()

    return Replay(run, magnitude, squares, length, False, True)
