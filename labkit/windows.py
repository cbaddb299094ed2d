"""Windows of images laid out as columns (im2col), and columns added up into images (col2im), as replays.

Images are [batch, channel, height, width]. Columns are [batch, channel x window, place], as torch.nn.functional.unfold
has them, or with the place before the window, the batch perhaps joined to it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from labkit.replayed import Function, Replay

Tensor = torch.Tensor
STRIDES, PADS = (1, 2), (0, 1, 2, 3)


@dataclass(frozen=True)
class _Columns:
    """How windows are laid out."""

    shape: torch.Size
    channels_first: bool

    def of(self, x: Tensor) -> Tensor:
        """From [batch, channel x window, place]."""
        return (x if self.channels_first else x.mT).reshape(self.shape)

    def back(self, x: Tensor, batch: int, places: int) -> Tensor:
        """To that."""
        return x if self.channels_first else x.reshape(batch, places, -1).mT


def windows(inputs: Sequence[Tensor], golden: Tensor) -> Iterator[Replay]:
    """What gives a golden of this shape from one input: columns of images, or images of columns."""
    if len(inputs) != 1:
        return
    x = inputs[0]
    if x.ndim == 4 and golden.ndim in (2, 3):
        for columns, settings in _settings(x.shape, golden.shape):
            yield Replay(_laid_out(columns, settings), None, None, 0, False, False)
    elif golden.ndim == 4 and x.ndim in (2, 3):
        for columns, settings in _settings(golden.shape, x.shape):
            run = _added_up(columns, settings, golden.shape)
            yield Replay(
                run, lambda v, run=run: run(v.abs()), lambda v, run=run: run(v.square()),
                math.prod(settings["kernel_size"]), False, False,
            )  # fmt: skip


def _laid_out(columns: _Columns, settings: dict[str, tuple[int, int]]) -> Function:
    return lambda x: columns.of(functional.unfold(x, **settings))


def _added_up(columns: _Columns, settings: dict[str, tuple[int, int]], shape: torch.Size) -> Function:
    places = math.prod(_places(shape, settings))
    return lambda x: functional.fold(columns.back(x, shape[0], places), shape[2:], **settings)


def _places(image: torch.Size, settings: dict[str, tuple[int, int]]) -> list[int]:
    """How many windows there are, downwards and across."""
    each = zip(image[2:], *(settings[one] for one in ("kernel_size", "stride", "padding")), strict=True)
    return [(size + 2 * pad - k) // stride + 1 for size, k, stride, pad in each]


def _settings(image: torch.Size, columns: torch.Size) -> Iterator[tuple[_Columns, dict[str, tuple[int, int]]]]:
    """Layouts, windows, strides and pads that turn such images into such columns, square windows first."""
    batch, channels = image[:2]
    layouts = [(columns[-1], False)] if len(columns) == 2 else [(columns[-2], True), (columns[-1], False)]
    for rows, first in layouts:
        if not batch or not channels or rows % channels or (len(columns) == 3 and columns[0] != batch):
            continue
        area = rows // channels
        places = math.prod(columns) // max(1, batch * rows)
        kernels = [(k, area // k) for k in range(1, area + 1) if area % k == 0]
        kernels.sort(key=lambda one: abs(one[0] - one[1]))
        for kernel, stride, pad in itertools.product(kernels, STRIDES, PADS):
            if area == 1 and (stride, pad) == (1, 0):
                continue  # the same numbers in another order
            settings = {"kernel_size": kernel, "stride": (stride, stride), "padding": (pad, pad)}
            if max(pad - k // 2 for k in kernel) <= 0 and math.prod(_places(image, settings)) == places > 0:
                yield _Columns(columns, first), settings
