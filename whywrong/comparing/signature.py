"""What the error of a wrong step looks like, in a sentence: a hypothesis, found before any search for a cause."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations

import torch
from torch import Tensor

from whywrong.tables import digits

SHARE_EXPLAINED = 0.9
"""Share of an error that a signature has to account for, or of a box's elements that are wrong: the rest is chance."""
SHARE_OF_A_BLOCK = 0.5
"""Share of all elements from which a box is no block: nearly everything is wrong then."""


def signature(observed: Tensor, expected: Tensor, allowed: Tensor | float) -> str:
    """How `observed` differs from `expected`, both of one shape, where that is simple; else nothing.

    `allowed` is what an element may be off. A sentence on all elements leaves none off by more than twice that (an
    offset is itself taken from rounded numbers), and takes away nearly all of the error; one on places (rows, a block,
    the diagonal) holds of the elements that are off by more. There is none where no element is.
    """
    if not observed.is_floating_point() or observed.numel() < 4:
        return ""
    o, e = observed.double(), expected.double()
    limit = torch.as_tensor(allowed, dtype=torch.float64, device=o.device).expand(o.shape)
    wrong = ~((o - e).abs() <= limit)
    return (next(_of_all_elements(o, e, limit), "") or next(_of_places(o, wrong), "")) if bool(wrong.any()) else ""


def _of_all_elements(o: Tensor, e: Tensor, limit: Tensor) -> Iterator[str]:
    def alike(guess: Tensor) -> bool:
        left = (o - guess).abs()
        return bool((left <= 2.0 * limit).all()) and float(left.norm()) <= (1.0 - SHARE_EXPLAINED) * float(
            (o - e).norm()
        )

    if bool(o.isfinite().all() & e.isfinite().all()):
        offset = float((o - e).median())
        if offset and alike(e + offset):
            yield f"every element is {digits(abs(offset))} too {'large' if offset > 0.0 else 'small'}"
        factor = float((o * e).sum() / e.square().sum().clamp(min=1e-300))
        if factor not in (0.0, 1.0) and alike(factor * e):
            yield f"every element is {factor:.6g} times what it should be"
    for k in (k for k, size in enumerate(o.shape) if size > 2):
        for by, edge in ((1, 0), (-1, -1)):
            shifted = e.roll(by, k)
            shifted.select(k, edge).copy_(o.select(k, edge))  # a shift by one brings in nothing there
            if alike(shifted):
                yield f"what belongs at each place stands one place {'later' if by > 0 else 'earlier'} in dimension {k}"
    for i, j in combinations(range(o.ndim), 2):
        if 1 < o.shape[i] == o.shape[j] and alike(e.transpose(i, j)):
            yield f"it is transposed in dimensions {i} and {j}"


def along_each(mask: Tensor) -> list[Tensor]:
    """The places along each dimension at which anything is true."""
    return [mask.movedim(k, 0).reshape(size, -1).any(1).nonzero().flatten() for k, size in enumerate(mask.shape)]


def _of_places(o: Tensor, wrong: Tensor) -> Iterator[str]:
    count = int(wrong.sum())
    if o.ndim >= 2 and o.shape[-1] == o.shape[-2] > 2:
        diagonal = torch.eye(o.shape[-1], dtype=torch.bool, device=o.device).expand(o.shape)
        if not bool((wrong & diagonal).any()) and count >= SHARE_EXPLAINED * int((~diagonal).sum()):
            yield "all is wrong but the diagonal"
    spans = [(int(places[0]), int(places[-1]), size) for places, size in zip(along_each(wrong), o.shape, strict=True)]
    box = math.prod(high - low + 1 for low, high, _ in spans)
    state = "zero" if bool((o[wrong] == 0.0).all()) else "wrong"
    if count > 1 and box <= SHARE_OF_A_BLOCK * o.numel() and count >= SHARE_EXPLAINED * box:
        several = [(k, low, high) for k, (low, high, size) in enumerate(spans) if high - low + 1 < size]
        parts = (f"{low}{f' to {high}' if high > low else ''} of dimension {k}" for k, low, high in several)
        yield f"what is {state} is a block: {', '.join(parts)}"
    elif state == "zero":
        yield "what is wrong is zero"
