"""Attention in one step, softmax(q k^T) v, as a replay.

Queries, keys and values are [.., heads, tokens, width], [.., tokens, heads, width], or one query a head without its
dimension; a group of query heads may share keys. Scale, mask and range of keys are taken from the text, or tried.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from labkit.products import for_heads
from labkit.replayed import Function, Replay, Weighed

Tensor = torch.Tensor
MOST_MULTIPLICATIONS = 4e9
"""Of one attention that is tried."""


@dataclass(frozen=True)
class _Layout:
    """How tensors become [.., heads, tokens, width]."""

    swapped: bool
    """Whether tokens come before heads."""
    single: bool
    """Whether the query has no dimension of tokens."""

    def laid(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.swapped:
            k, v = k.transpose(-2, -3), v.transpose(-2, -3)
        if self.single:
            q = q.unsqueeze(-2)
        elif self.swapped:
            q = q.transpose(-2, -3)
        if q.ndim > 2 and k.ndim > 2 and q.shape[-3] != k.shape[-3]:
            k, v = for_heads(k, q.shape[-3]), for_heads(v, q.shape[-3])
        return q, k, v


def attentions(text: str, inputs: Sequence[Tensor], golden: Tensor) -> Iterator[Replay]:
    """What a text may mean of three inputs, the query, the keys and the values, and of a mask that is added."""
    real = [x for x in inputs if x.ndim >= 2]
    if len(real) < 3 or len(inputs) > 4:
        return
    mask = 3 if len(inputs) == 4 else None
    for layout in _layouts(*(x.shape for x in inputs[:3])):
        length = inputs[1].shape[-3 if layout.swapped else -2]
        for hidden, scale in itertools.product(_masks(text), _scales(text, inputs[0].shape[-1])):
            for swapped in (layout.swapped, not layout.swapped):
                yield _replay(layout, hidden, scale, mask, length, golden.shape, swapped)


def unnamed(sources: Mapping[str, Tensor], golden: Tensor) -> Iterator[list[str]]:
    """Three sources of which `golden` may be the attention, by their shapes and by names that end in q, k and v."""
    parts: dict[str, list[str]] = {"q": [], "k": [], "v": []}
    for name, x in sources.items():
        found = re.search(r"(?:^|[^a-z])(q|k|v)(?![a-z])|(quer|key|val)", re.split(r"[/.:]", name.lower())[-1])
        if found and x.ndim >= 2:
            parts[(found.group(1) or found.group(2))[0]].append(name)
    for q, k, v in itertools.product(*(one[:4] for one in parts.values())):
        if sources[v].numel() and golden.shape[-1] in (sources[v].shape[-1], golden[..., 0, :].numel()):
            yield [q, k, v]


def _layouts(q: torch.Size, k: torch.Size, v: torch.Size) -> Iterator[_Layout]:
    if k[:-1] != v[:-1] or q[-1] != k[-1]:
        return
    for swapped, single in itertools.product((False, True), (False, True)):
        layout = _Layout(swapped, single)
        try:
            a, b, _ = layout.laid(*(torch.empty(size, device="meta") for size in (q, k, v)))
            lead = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        except (RuntimeError, IndexError, ZeroDivisionError):
            continue
        if lead == a.shape[:-2] and a.numel() * b.shape[-2] <= MOST_MULTIPLICATIONS:
            yield layout


def _masks(text: str) -> list[Function]:
    """Of queries [Sq, 1] and keys [1, Sk]: what is hidden, the likeliest first."""
    first, last = 0, None
    if found := re.search(r"(\d+) ?(:|\.\.|to) ?(\d+)", text):
        first, last = int(found.group(1)), int(found.group(3)) + (found.group(2) == "..")
    elif found := re.search(r"(?:keys?|len\w*) ?(?:<|up to) ?(\d+)", text):
        last = int(found.group(1))
    window = int(found.group(1)) if (found := re.search(r"window\D{0,4}(\d+)", text)) else None

    def outside(q: Tensor, k: Tensor) -> Tensor:
        return (k < first) | (k >= (k.numel() if last is None else last)) | (q < 0)

    def causal(q: Tensor, k: Tensor) -> Tensor:
        """The last query sees all keys."""
        seen = q + (k.numel() - q.numel())
        late = k > seen
        return outside(q, k) | (late if window is None else late | (k <= seen - window))

    return [causal, outside] if "causal" in text or window else [outside, causal]


def _scales(text: str, width: int) -> list[float]:
    found = re.search(r"scale\w* ?=? ?(\d*\.\d+(?:e-?\d+)?)", text)
    return [float(found.group(1))] if found else [1.0 / math.sqrt(width), 1.0]


def _replay(
    layout: _Layout, hidden: Function, scale: float, mask: int | None, length: int, shape: torch.Size, swapped: bool
) -> Replay:
    def back(out: Tensor) -> Tensor:
        """Of [.., heads, tokens, width], as the step has it."""
        return (out.transpose(-2, -3) if swapped and out.ndim > 2 else out).reshape(shape)

    def weighed(*xs: Tensor) -> Weighed:
        q, k, v = layout.laid(*xs[:3])
        rows, columns = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])[None, :]
        scores = scale * (q @ k.mT)
        scores = (scores if mask is None else scores + xs[mask]).masked_fill(hidden(rows, columns), -math.inf)
        sizes, squares = abs(scale) * (q.abs() @ k.abs().mT), scale**2 * (q.square() @ k.square().mT)
        return Weighed(torch.softmax(scores, -1), v, scores, sizes, squares, q.shape[-1], back)

    return Replay(
        lambda *xs: weighed(*xs).summed(),
        lambda *xs: weighed(*xs).magnitude(),
        lambda *xs: weighed(*xs).squares(),
        length, False, True, weighed=weighed,
    )  # fmt: skip
