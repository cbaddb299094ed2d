"""The code under suspicion, printed from its file: its lines with their numbers, those in question marked."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.session.catalogue import ROOT
from whywrong.errors import UsageError


@dataclass(repr=False)
class Source:
    """Lines of a file; `marked` are the numbers of those in question."""

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
        style = HtmlFormatter(noclasses=True, linenos="inline", linenostart=self.first, hl_lines=marked)
        return f"<p><code>{self._place}</code></p>" + highlight("\n".join(self.lines), lexer, style)

    @property
    def _place(self) -> str:
        inside = self.path.is_relative_to(ROOT)
        return f"{self.path.relative_to(ROOT) if inside else self.path.name}, line {self.first}"


def show_source(what: Any, *, mark: str = "", start: str = "", lines: int = 0) -> Source:
    """The source of a function or a Triton kernel, or of a file below the checkout, to be shown by a notebook's cell.

    Of a long one `lines` lines are shown, from the first that holds `start`. Every line that holds `mark` is marked.
    Raises UsageError for a file that is not there, and for a `start` or a `mark` that no line holds.
    """
    if isinstance(what, (str, Path)):
        path, first = ROOT / what, 1
        if not path.is_file():
            raise UsageError(f"what: {str(what)!r} is no file of the checkout; expected a function or a file's path")
        text = path.read_text(encoding="utf-8").splitlines()
    else:
        function = inspect.unwrap(getattr(what, "fn", what))  # a Triton kernel holds its function
        path = Path(inspect.getsourcefile(function) or "")
        source, first = inspect.getsourcelines(function)
        text = "".join(source).splitlines()
    for name, part in (("start", start), ("mark", mark)):
        if not any(part in line for line in text):
            raise UsageError(f"{name}: {part!r} is on no line of {path.name}")
    begin = next(i for i, line in enumerate(text) if start in line)
    shown = text[begin : begin + lines] if lines else text[begin:]
    first += begin
    return Source(path, first, shown, [first + i for i, line in enumerate(shown) if mark and mark in line])
