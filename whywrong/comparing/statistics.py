"""What one pass over two tensors gathers, how they are cut into pieces, and how what was gathered is combined."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

Piece = tuple[int, list[torch.Tensor]]
"""The place of its first element, and what there is of each tensor."""

Statistics = namedtuple(
    "Statistics",
    "mismatches first worst one_sided worst_observed worst_golden one_sided_observed one_sided_golden "
    "max_abs max_rel max_ulp used sum_abs sum_dd sum_gg sum_dg "
    "observed_nan golden_nan observed_inf golden_inf observed_zero golden_zero",
)
"""Numbers of d = observed - golden where both are finite. Places are row-major, -1 for none.

`one_sided` is the first mismatch that is not finite on both sides, `used` the largest share of its bound.
"""

STATISTICS_FIELDS = Statistics._fields
_MAXIMA = [name in ("max_abs", "max_rel", "max_ulp", "used") for name in STATISTICS_FIELDS]


def combine(parts: Any) -> Statistics:
    """Statistics of the whole from those of its parts, an array or a sequence of them; always the same bits."""
    table = np.asarray(parts, np.float64)
    column = dict(zip(STATISTICS_FIELDS, table.T, strict=True))
    combined = dict(zip(STATISTICS_FIELDS, np.where(_MAXIMA, table.max(0), table.sum(0)).tolist(), strict=True))
    for name, candidates in (("first", True), ("worst", column["max_abs"] == combined["max_abs"]), ("one_sided", True)):
        row = np.where((column[name] >= 0.0) & candidates, column[name], np.inf).argmin()
        keys = (key for key in (name, f"{name}_observed", f"{name}_golden") if key in combined)
        combined |= {key: float(column[key][row]) for key in keys}
    return Statistics(**combined)


def pieces(piece: Piece, most: int) -> Iterator[Piece]:
    """Row-major runs of at most `most` elements."""
    start, tensors = piece
    count, rows = tensors[0].numel(), len(tensors[0]) if tensors[0].ndim else 0
    if count <= most:
        yield piece
    elif rows == 1:
        yield from pieces((start, [t[0] for t in tensors]), most)
    else:
        several = max(1, most * rows // count)
        for i in range(0, rows, several):
            yield from pieces((start + i * (count // rows), [t[i : i + several] for t in tensors]), most)
