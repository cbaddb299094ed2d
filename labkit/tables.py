"""A small table that prints as text and shows as HTML."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


def number(value: Any) -> str:
    """A value as a table shows it: three significant digits for a float, nothing for None."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, (list, tuple)):
        return " to ".join(number(item) for item in value) if len(value) == 2 else ", ".join(map(number, value))
    return str(value)


@dataclass(repr=False)
class Table:
    """Rows under named columns. `str()` gives aligned text, `wrap` the widest that a text column may grow."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]] = ()
    title: str = ""
    wrap: int = 72

    def __str__(self) -> str:
        cells = [[textwrap.wrap(number(cell), self.wrap) or [""] for cell in row] for row in self.rows]
        widths = [
            max([len(column), *(len(line) for row in cells for line in row[i])])
            for i, column in enumerate(self.columns)
        ]
        lines = [self.title] if self.title else []
        lines.append(_line(self.columns, widths))
        lines.append("  ".join("-" * width for width in widths))
        for row in cells:
            for i in range(max(len(cell) for cell in row)):
                lines.append(_line([cell[i] if i < len(cell) else "" for cell in row], widths))
        return "\n".join(lines)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        def cells(values: Iterable[Any], tag: str) -> str:
            style = ' style="text-align:left;vertical-align:top"'
            return "".join(f"<{tag}{style}>{html.escape(number(value))}</{tag}>" for value in values)

        head = f"<tr>{cells(self.columns, 'th')}</tr>"
        body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in self.rows)
        title = f"<caption>{html.escape(self.title)}</caption>" if self.title else ""
        return f"<table>{title}<thead>{head}</thead><tbody>{body}</tbody></table>"


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
