"""A step element by element, for pages and pictures: the error of each as a share of its tolerance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from torch import Tensor

from whywrong.comparing.comparison import WIDE_INTEGERS, distinct_floats
from whywrong.tables import Table, number

WORST_LISTED = 10
"""Elements that are listed."""

PICTURE_CELLS, PICTURE_SIDE = 1 << 16, 512
"""Cells of a picture, and those along one of its sides."""

HISTOGRAM_EDGES = tuple(10.0 ** (k / 2.0) for k in range(-6, 7))
"""Borders of the histogram's bins, in shares of the tolerance; 1 is one of them."""
HISTOGRAM_BINS = ("0", *(f"≤ {float(f'{edge:.1g}'):g}" for edge in HISTOGRAM_EDGES), f"> {HISTOGRAM_EDGES[-1]:g}", "∞")
"""The bins of :attr:`Elements.histogram` in words, and how many of them are within the tolerance."""
BINS_WITHIN_TOLERANCE = HISTOGRAM_EDGES.index(1.0) + 2


class Element(NamedTuple):
    """One element at the index `at`: `exact` is what it was compared with, in float64, the golden or a re-run.

    `error` is |observed - exact|, and `tolerance` its limit, both in the step's unit; `share` is their quotient.
    """

    at: tuple[int, ...]
    observed: float
    golden: float
    exact: float
    error: float
    tolerance: float
    share: float


class Block(NamedTuple):
    """Consecutive elements: their shares of the tolerance, float32 on the CPU, and the worst of them, row by row
    (share, error, place in the block, what it was compared with, tolerance)."""

    share: Tensor
    worst: list[tuple[float, ...]]

    @classmethod
    def of(cls, o: Tensor, exact: Tensor, allowed: Any) -> Block:
        """From what is compared, what it is compared with, and the tolerance, a number or a tensor of that shape."""
        if not (o.is_floating_point() or exact.is_floating_point()):
            o, exact = distinct_floats(o, exact)
        limit = torch.as_tensor(allowed, dtype=torch.float64).to(o.device).expand(o.shape).flatten()
        o, exact = o.double().flatten(), exact.double().flatten()
        same = (o == exact) | (o.isnan() & exact.isnan()) | limit.isinf()
        error = torch.where(same, 0.0, (o - exact).abs())
        share = torch.where(same, 0.0, error / limit).nan_to_num(torch.inf, torch.inf)
        beyond = share.isinf()  # among those the error decides
        key = torch.where(beyond, error.nan_to_num(torch.inf), 0.0) if int(beyond.sum()) >= WORST_LISTED else share
        at = key.topk(min(WORST_LISTED, len(key))).indices
        at = at[share[at] > 0.0]
        rows = torch.stack([share[at], error[at], at.double(), exact[at], limit[at]], 1)
        return cls(share.float().cpu(), [tuple(row) for row in rows.tolist()])


@dataclass(frozen=True, eq=False, repr=False)
class Elements:
    """Every element of a step.

    `observed` and `golden` are the trace's own tensors, of the step's shape; `share`, float32 of that shape, on the
    CPU, has |observed - exact| / tolerance, infinite for NaN or Inf on one side only.
    """

    observed: Tensor
    golden: Tensor
    share: Tensor
    worst: list[Element]
    """The largest shares, of infinite ones the largest errors; none without an error."""

    @classmethod
    def of(cls, observed: Tensor, golden: Tensor, blocks: Sequence[Block]) -> Elements:
        """From blocks that follow each other in row-major order."""
        starts = np.cumsum([0, *(len(block.share) for block in blocks)])
        rows = [(row, start) for block, start in zip(blocks, starts, strict=False) for row in block.worst]
        rows.sort(key=lambda row: [math.inf if math.isnan(x) else x for x in row[0][:2]], reverse=True)
        worst = []
        for (share, error, place, exact, limit), start in rows[:WORST_LISTED]:
            index = tuple(map(int, np.unravel_index(int(place) + int(start), golden.shape)))
            worst.append(Element(index, observed[index].item(), golden[index].item(), exact, error, limit, share))
        return cls(observed, golden, torch.cat([block.share for block in blocks]).view(golden.shape), worst)

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the step, as a matrix at least."""
        return (1,) * (2 - self.share.ndim) + tuple(self.share.shape)

    @property
    def axes(self) -> list[str]:
        """The names of the dimensions of :attr:`shape`."""
        return ["one row", "one column"][: max(0, 2 - self.share.ndim)] + [f"axis {k}" for k in range(self.share.ndim)]

    @property
    def place(self) -> tuple[int, ...]:
        """Of the worst element in :attr:`shape`; the first one without an error."""
        return (*(0,) * (2 - self.share.ndim), *(self.worst[0].at if self.worst else (0,) * self.share.ndim))

    @cached_property
    def histogram(self) -> list[int]:
        """How many have no error, a share up to each of HISTOGRAM_EDGES, more than the last, and one without
        a limit: NaN or Inf on one side only, or any error where none is tolerated."""
        borders = torch.tensor([0.0, *HISTOGRAM_EDGES, torch.finfo(torch.float32).max])
        return torch.bincount(torch.bucketize(self.share.flatten(), borders), minlength=len(HISTOGRAM_BINS)).tolist()

    def table(self) -> Table:
        """A row for each of the :attr:`worst`; with what it was compared with, where that is not the golden."""
        rerun = any(isinstance(e.golden, float) and e.exact != e.golden for e in self.worst)
        compared = ["held to (re-run)"] * rerun
        columns = ("index", "golden", "observed", *compared, "error", "tolerance", "error / tolerance")
        rows = []
        for e in self.worst:
            values = (e.golden, e.observed, *[e.exact] * rerun)
            words = [f"{x:.9g}" if isinstance(x, float) else str(x) for x in values]
            rows.append((", ".join(map(str, e.at)), *words, *map(number, (e.error, e.tolerance, e.share))))
        return Table(columns, rows)

    def reduced(self, cells: int = PICTURE_CELLS, window: Any = ...) -> tuple[list[int], list[np.ndarray]]:
        """How many elements a cell takes along each dimension; and of the worst one in each cell, the share of the
        tolerance, the golden and the observed value, float64.

        `window` indexes the dimensions of :attr:`shape`, and leaves two at least.
        """
        share, golden, observed = (x.reshape(self.shape)[window] for x in (self.share, self.golden, self.observed))
        shape = tuple(share.shape)
        size, grid = [1] * len(shape), list(shape)
        while max(grid) > PICTURE_SIDE or math.prod(grid) > cells:
            size[widest := int(np.argmax(grid))] *= 2
            grid[widest] = -(-shape[widest] // size[widest])
        missing = [(0, g * s - n) for g, s, n in zip(grid, size, shape, strict=True)]
        padded = np.pad(share.numpy(), missing, constant_values=-1.0)
        blocks = sliding_window_view(padded, size)[tuple(slice(None, None, s) for s in size)]
        inside = np.unravel_index(blocks.reshape(*grid, -1).argmax(-1), size)
        at = [start * s + k for start, s, k in zip(np.indices(grid, sparse=True), size, inside, strict=True)]
        place = torch.from_numpy(np.ravel_multi_index(at, shape))
        known = (x.double() if x.dtype in WIDE_INTEGERS else x for x in (share, golden, observed))
        return size, [x.take(place.to(x.device)).double().cpu().numpy() for x in known]
