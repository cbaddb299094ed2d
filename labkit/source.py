"""Source code for a notebook, printed from its file with line numbers and marked lines."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.session.catalogue import ROOT
from whywrong.errors import UsageError


@dataclass(repr=False)
class Source:
    """Lines of a file, from line number `first`; `marked` are the numbers of marked lines."""

    path: Path
    first: int
    lines: list[str]
    marked: list[int]

    def __repr__(self) -> str:
        numbers = range(self.first, self.first + len(self.lines))
        rows = [f"{'>' if n in self.marked else ' '} {n:4} {text}" for n, text in zip(numbers, self.lines, strict=True)]
        return "\n".join([self._place, *rows])

    def _repr_html_(self) -> str:
        from pygments import highlight
        from pygments.formatters import HtmlFormatter
        from pygments.lexers import CudaLexer, PythonLexer

        lexer = PythonLexer(stripnl=False) if self.path.suffix == ".py" else CudaLexer(stripnl=False)
        marked = [n - self.first + 1 for n in self.marked]
        style = HtmlFormatter(
            noclasses=True, linenos="inline", linenostart=self.first, hl_lines=marked, prestyles="color: #222"
        )
        return f"<p><code>{self._place}</code></p>" + highlight("\n".join(self.lines), lexer, style)

    @property
    def _place(self) -> str:
        inside = self.path.is_relative_to(ROOT)
        return f"{self.path.relative_to(ROOT) if inside else self.path.name}, line {self.first}"


def show_source(what: Any, *, mark: str = "", start: str = "", lines: int = 0) -> Source:
    """The source of a function, a Triton kernel, or a file below the checkout, as the output of a notebook's cell.

    It begins at the first line that contains `start` and has `lines` lines, or all that follow. Lines with `mark` are
    marked. Raises UsageError for a missing file, and for a `start` or `mark` that no line contains.
    """
    if isinstance(what, (str, Path)):
        path, first = ROOT / what, 1
        if not path.is_file():
            raise UsageError(f"what: expected a function or a file of the checkout, got {str(what)!r}")
        text = path.read_text(encoding="utf-8").splitlines()
    else:
        function = inspect.unwrap(getattr(what, "fn", what))  # a Triton kernel holds its function
        path = Path(inspect.getsourcefile(function) or "")
        source, first = inspect.getsourcelines(function)
        text = "".join(source).splitlines()
    for name, part in (("start", start), ("mark", mark)):
        if not any(part in line for line in text):
            raise UsageError(f"{name}: expected part of a line of {path.name}, got {part!r}")
    begin = next(i for i, line in enumerate(text) if start in line)
    shown = text[begin : begin + lines] if lines else text[begin:]
    first += begin
    return Source(path, first, shown, [first + i for i, line in enumerate(shown) if mark and mark in line])
