"""Normalisations of images [N, C, ..]: by the batch, by groups of channels, or by statistics that are given."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch

from labkit.named import EPSILONS
from labkit.replayed import Replay
from labkit.samples import Sources

Tensor = torch.Tensor
Standard = Callable[[Tensor], tuple[Tensor, Tensor]]
ROUNDINGS = 256.0
"""How many of the golden's round-offs, relative to its size, a step may be off from what is found."""
OPERATIONS = 16
"""Roundings of one element of a normalisation, besides those of the sums in its means."""


def normalised(sources: Sources, g: Tensor, unit: float) -> Iterator[tuple[list[str], Replay]]:
    """g as w (x - mean) / sqrt(variance + eps) + b, with a w and a b for each channel, read off the golden.

    Where there is one image, any group would do: then w and b are those of steps, or 1 and 0.
    """
    for name, x in _stretched(sources, g, unit):
        known = [y for y in sources.values() if y.shape == (g.shape[1],)]
        for axes, eps in itertools.product(_groups(g.shape), map(float, EPSILONS)):
            one = _standard(axes, eps)
            w, b = _line(one(x)[0], g)
            if not _near(_channel(w, g) * one(x)[0] + _channel(b, g), g, unit):
                continue
            told = all(
                any(bool(((one - y).abs() <= ROUNDINGS * unit * (w.abs() + one.abs())).all()) for y in (usual, *known))
                for one, usual in ((w, torch.ones_like(w)), (b, torch.zeros_like(b)))
            )
            if told or (len(g) > 1 and axes != 0):
                summed = g[0].numel() // axes if axes else g.numel() // g.shape[1]
                yield [name], _replay(one, w, b, summed)
                break


def by_statistics(sources: Sources, g: Tensor, unit: float) -> Iterator[tuple[list[str], str]]:
    """g as (x - mean) / sqrt(variance + eps), perhaps w times that, plus b, all four of them steps with a number a
    channel: the names, and the text of the formula."""
    for name, x in _stretched(sources, g, unit):
        slope, start = _line(x, g)
        few = {other: y for other, y in sources.items() if y.shape == slope.shape}
        for v, gain in itertools.product(few, [None, *few]):
            if v == gain or bool((few[v] < 0.0).any()):
                continue
            for eps in EPSILONS:
                if not _near((few[gain] if gain else 1.0) * torch.rsqrt(few[v] + float(eps)), slope, unit):
                    continue
                for mean, shift in itertools.product(few, [None, *few]):
                    if _near((few[shift] if shift else 0.0) - few[mean] * slope, start, unit):
                        names = [name, mean, v, *([gain] if gain else []), *([shift] if shift else [])]
                        text = f"(a-b)*rsqrt(c+{eps})" + ("*d" if gain else "")
                        yield names, text + (f"+{'e' if gain else 'd'}" if shift else "")


def _stretched(sources: Sources, g: Tensor, unit: float) -> Iterator[tuple[str, Tensor]]:
    """The steps of g's shape of which its first channel is a multiple, plus a number."""
    if g.ndim < 3 or not bool(g.isfinite().all()) or g[0, 0].numel() < 4:
        return
    for name, x in sources.items():
        if x.shape == g.shape and bool(x.isfinite().all()):
            slope, start = _line(x[:1, :1], g[:1, :1])
            if _near(slope * x[0, 0] + start, g[0, 0], unit):
                yield name, x


def _line(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Slope and start, a number a channel, of the line through g over x."""
    along = (0, *range(2, g.ndim))
    left, up = x - x.mean(along, keepdim=True), g - g.mean(along, keepdim=True)
    slope = (left * up).sum(along) / left.square().sum(along).clamp(min=1e-300)
    return slope, g.mean(along) - slope * x.mean(along)


def _near(value: Tensor, g: Tensor, unit: float) -> bool:
    return bool(((value - g).abs() <= ROUNDINGS * unit * (g.abs() + g.abs().mean())).all())


def _channel(w: Tensor, like: Tensor) -> Tensor:
    return w.reshape(1, -1, *(1,) * (like.ndim - 2))


def _groups(shape: torch.Size) -> Iterator[int]:
    """Into how many groups channels may be cut; 0 for statistics of each channel over the batch."""
    yield from (n for n in range(1, shape[1] + 1) if shape[1] % n == 0)
    yield 0


def _standard(groups: int, eps: float) -> Standard:
    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        """What is left of x without its mean, over its deviation, and how large x was over that."""
        cut = x.reshape(len(x), groups, -1) if groups else x.transpose(0, 1).reshape(1, x.shape[1], -1)
        mean = cut.mean(-1, keepdim=True)
        deviation = ((cut - mean).square().mean(-1, keepdim=True) + eps).sqrt()
        parts = ((cut - mean) / deviation, (cut.abs() + mean.abs()) / deviation)
        if groups:
            return parts[0].reshape(x.shape), parts[1].reshape(x.shape)
        turned = x.transpose(0, 1).shape
        return parts[0].reshape(turned).transpose(0, 1), parts[1].reshape(turned).transpose(0, 1)

    return run


def _replay(one: Standard, w: Tensor, b: Tensor, summed: int) -> Replay:
    def run(*xs: Tensor) -> Tensor:
        return _channel(w, xs[0]) * one(xs[0])[0] + _channel(b, xs[0])

    def magnitude(*xs: Tensor) -> Tensor:
        return _channel(w.abs(), xs[0]) * one(xs[0])[1] + _channel(b.abs(), xs[0])

    return Replay(run, magnitude, None, OPERATIONS + summed, False, False)
