"""`whywrong diff --html`: what was found as one page that needs nothing else, for a pull request or a colleague."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import torch

from whywrong.comparing.elements import BINS_WITHIN_TOLERANCE, HISTOGRAM_BINS, PICTURE_CELLS, Elements
from whywrong.drawing.plots import SHARES
from whywrong.files import write_text, writing
from whywrong.reporting.diff import EQUAL, WHOLE, Report
from whywrong.tables import printable

MOST_CELLS = 3 << 17
"""Cells of all pictures together: each takes 8 characters of the page."""

PAGES = Path(__file__).parent / "pages"


def page(found: Report, path: Path) -> Path:
    """Write the page. Its pictures show :attr:`Report.run`; large steps are reduced, the worst element of a cell kept.

    Raises UsageError for a file that cannot be written.
    """
    shown = found.shown.detailed
    pictures = {k: f.elements for k, f in enumerate(shown.findings.values()) if f.elements and f.elements.share.numel()}
    cells = _cells({k: one.share.numel() for k, one in pictures.items()})
    made = jinja2.Environment(loader=jinja2.FileSystemLoader(PAGES), undefined=jinja2.StrictUndefined, autoescape=True)
    made.trim_blocks, made.filters["printable"] = True, printable
    made.globals |= {
        "equal": EQUAL,
        "bins": HISTOGRAM_BINS,
        "colours": SHARES,
        "within": BINS_WITHIN_TOLERANCE,
        "zip": zip,
        "log1p": math.log1p,
    }
    lines = [*shown.notes, *([] if any(f.separated for f in shown.findings.values()) else [WHOLE])]
    data = {k: _picture(one, cells[k]) for k, one in pictures.items()}
    values = {"found": found, "shown": shown, "lines": lines, "pictures": pictures, "data": data}
    with writing(path, "--html"):
        write_text(path, made.get_template("diff.html").render(values))
    return path


def _cells(sizes: Mapping[int, int]) -> dict[int, int]:
    """Cells for each step's picture: what small steps leave goes to the others."""
    found, left = {}, MOST_CELLS
    for before, (k, size) in enumerate(sorted(sizes.items(), key=lambda item: item[1])):
        found[k] = max(1, min(size, PICTURE_CELLS, left // (len(sizes) - before)))
        left -= found[k]
    return found


def _picture(elements: Elements, cells: int) -> dict[str, Any]:
    """What the page's script draws: three arrays of bfloat16, which holds NaN, Inf and three digits of any number."""
    size, arrays = elements.reduced(cells)
    most = torch.finfo(torch.bfloat16).max
    finite = [torch.from_numpy(np.where(np.isfinite(x), x.clip(-most, most), x)) for x in arrays]
    words = [base64.b64encode(x.bfloat16().view(torch.int16).numpy().tobytes()).decode() for x in finite]
    drawn: dict[str, Any] = {"shape": elements.shape, "size": size, "grid": arrays[0].shape, "axes": elements.axes}
    drawn |= {"place": [i // k for i, k in zip(elements.place, size, strict=True)], "marked": bool(elements.worst)}
    return drawn | dict(zip(("share", "golden", "observed"), words, strict=True))
