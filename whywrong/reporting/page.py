"""`whywrong diff --html`: a report as one self-contained page, for a pull request or a colleague."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import torch

from whywrong.comparing.elements import BINS_WITHIN_TOLERANCE, HISTOGRAM_BINS, PICTURE_CELLS, Elements
from whywrong.drawing.plots import SHARES
from whywrong.explaining.explanation import Explanation
from whywrong.files import write_text, writing
from whywrong.reporting.diff import ALL_EQUAL, NOT_SEPARATED_NOTE, Report
from whywrong.tables import printable

MOST_CELLS = 3 << 17
"""Cells of all pictures together; each takes 8 characters of the page."""

PAGES = Path(__file__).parent / "pages"


def page(report: Report, path: Path, why: Explanation | None = None) -> Path:
    """Write the page. Its pictures show :attr:`Report.run`; large steps are reduced, the worst element of a cell kept.

    `why` is what :func:`whywrong.explain` gives, and is shown below the verdict.
    Raises UsageError for a file that cannot be written.
    """
    shown = report.shown.detailed
    pictures = {k: f.elements for k, f in enumerate(shown.findings.values()) if f.elements and f.elements.share.numel()}
    cells = _cells({k: elements.share.numel() for k, elements in pictures.items()})
    loader = jinja2.FileSystemLoader(PAGES)
    environment = jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined, autoescape=True)
    environment.trim_blocks, environment.filters["printable"] = True, printable
    environment.globals |= {
        "equal": ALL_EQUAL,
        "bins": HISTOGRAM_BINS,
        "colours": SHARES,
        "within": BINS_WITHIN_TOLERANCE,
        "zip": zip,
        "log1p": math.log1p,
    }
    lines = [*shown.notes, *([] if any(f.separated for f in shown.findings.values()) else [NOT_SEPARATED_NOTE])]
    data = {k: _picture(elements, cells[k]) for k, elements in pictures.items()}
    values = {"report": report, "shown": shown, "lines": lines, "pictures": pictures, "data": data}
    values |= {"why": why._repr_html_() if why else "", "date": date.today()}
    values["places"] = {name: k for k, name in enumerate(shown.findings)}
    with writing(path, "--html"):
        write_text(path, environment.get_template("diff.html").render(values))
    return path


def _cells(sizes: Mapping[int, int]) -> dict[int, int]:
    """Cells for each step's picture: cells that small steps do not need go to the others."""
    cells, left = {}, MOST_CELLS
    for before, (k, size) in enumerate(sorted(sizes.items(), key=lambda item: item[1])):
        cells[k] = max(1, min(size, PICTURE_CELLS, left // (len(sizes) - before)))
        left -= cells[k]
    return cells


def _picture(elements: Elements, cells: int) -> dict[str, Any]:
    """The data of the page's script: three arrays of bfloat16, which has NaN, Inf and three digits of any number."""
    size, arrays = elements.reduced(cells)
    most = torch.finfo(torch.bfloat16).max
    finite = [torch.from_numpy(np.where(np.isfinite(x), x.clip(-most, most), x)) for x in arrays]
    words = [base64.b64encode(x.bfloat16().view(torch.int16).numpy().tobytes()).decode() for x in finite]
    picture: dict[str, Any] = {"shape": elements.shape, "size": size, "grid": arrays[0].shape, "axes": elements.axes}
    picture |= {"place": [i // k for i, k in zip(elements.place, size, strict=True)], "marked": bool(elements.worst)}
    return picture | dict(zip(("share", "golden", "observed"), words, strict=True))
