"""A small table that prints as text and shows as HTML."""

from __future__ import annotations

import html
import math
import os
import shutil
import sys
import textwrap
from collections.abc import Collection, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import groupby, zip_longest
from typing import Any

LONG_TABLE = 24
"""Rows of a table above which a notebook shows it folded: what a screen holds."""

MANY_DIGITS = 1e6
"""From here on a number's size says nothing that "over a million" does not."""

EVERY_ROW = ContextVar("EVERY_ROW", default=False)
"""Whether a table of steps has all of them, as under `pytest -vv`."""

MARKED = ' style="background:rgba(213,94,0,.25);font-weight:bold"'
"""A wrong row in a notebook, light or dark."""

NARROWEST = 16
"""Characters below which a column of text is not wrapped."""


def printable(text: str) -> str:
    """A text with what would steer a terminal written out, as \\x1b; lines stay."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def number(value: Any) -> str:
    """A value as a table shows it: three significant digits for a float, nothing for None, no brackets."""
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, (list, tuple)):
        return " to ".join(number(item) for item in value) if len(value) == 2 else ", ".join(map(number, value))
    if isinstance(value, dict):
        return "; ".join(f"{key}: {number(item)}" for key, item in value.items())
    return "" if value is None else str(value)


def digits(value: float, significant: int = 2) -> str:
    """A number with so many significant digits and no power of ten where a reader needs none."""
    if math.isfinite(value) and abs(value) >= MANY_DIGITS:
        return "over a million" if value > 0 else "below minus a million"
    short = f"{value:.{significant}g}"
    return f"{float(short):.0f}" if "e+" in short else short


def first_of(words: Iterable[str], most: int = 8) -> str:
    """Words in a sentence: the first `most`, and how many more there are."""
    every = list(words)
    return ", ".join(every[:most]) + f" and {len(every) - most} more" * (len(every) > most)


def runs(places: Iterable[int]) -> list[tuple[int, int]]:
    """The first and the last of each run of neighbours, of whole numbers in ascending order."""
    groups = (list(run) for _, run in groupby(enumerate(places), lambda pair: pair[1] - pair[0]))
    return [(run[0][1], run[-1][1]) for run in groups]


def ranges(places: Iterable[int]) -> str:
    """Whole numbers in ascending order as "0, 3 to 5", six runs of them at most."""
    texts = [f"{a}" if a == b else f"{a} to {b}" for a, b in runs(places)]
    return ", ".join(texts[:6]) + (", ..." if len(texts) > 6 else "")


@dataclass(repr=False)
class Table:
    """Rows under named columns, and a note below. `str()` gives aligned text, `wrap` the widest that a text column may
    grow. The rows at the places `marked` are in colour, in text only where standard output is a terminal."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]] = ()
    title: str = ""
    wrap: int = 72
    note: str = ""
    marked: Collection[int] = ()

    def __repr__(self) -> str:
        columns = [printable(column) for column in self.columns]
        for wrap in range(self.wrap, min(self.wrap, NARROWEST) - 1, -4):  # in a terminal, narrower until a line fits
            cells = [[textwrap.wrap(printable(number(cell)), wrap) or [""] for cell in row] for row in self.rows]
            texts = [[column, *(line for row in cells for line in row[i])] for i, column in enumerate(columns)]
            widths = [max(map(len, column)) for column in texts]
            total = sum(widths) + 2 * len(widths) - 2
            if not sys.stdout.isatty() or total <= shutil.get_terminal_size().columns:
                break
        lines: list[tuple[int, Sequence[str]]] = [(-1, columns), (-1, ["-" * width for width in widths])]
        lines += [(k, line) for k, row in enumerate(cells) for line in zip_longest(*row, fillvalue="")]
        padded = ((k, "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True))) for k, line in lines)
        coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        shown = [f"\x1b[1;31m{x.rstrip()}\x1b[0m" if coloured and k in self.marked else x.rstrip() for k, x in padded]
        return "\n".join([*filter(None, [printable(self.title)]), *shown, *filter(None, [printable(self.note)])])

    def _repr_html_(self) -> str:
        def row(values: Iterable[Any], tag: str = "td", place: int = -1) -> str:
            opened = f'<{tag} style="text-align:left;vertical-align:top">'
            cells = "".join(f"{opened}{html.escape(number(value))}</{tag}>" for value in values)
            return f"<tr{MARKED * (place in self.marked)}>{cells}</tr>"

        title = f"<caption>{html.escape(self.title)}</caption>" if self.title else ""
        body = "".join(row(values, place=k) for k, values in enumerate(self.rows))
        table = f"<table>{title}<thead>{row(self.columns, 'th')}</thead><tbody>{body}</tbody></table>"
        table += f"<p>{html.escape(self.note)}</p>" * bool(self.note)
        summary = f"<summary>{len(self.rows)} rows{': ' * bool(self.title)}{html.escape(self.title)}</summary>"
        return f"<details>{summary}{table}</details>" if len(self.rows) > LONG_TABLE else table


def to_stderr(text: str) -> None:
    """Progress what takes long while it does, on standard error."""
    print(f"whywrong: {printable(text)}", file=sys.stderr)
