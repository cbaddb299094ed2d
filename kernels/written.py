"""Sources in which a reader of a notebook has written a line, and what they define."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from whywrong.errors import UsageError


def with_line(source: str, mark: str, line: str) -> str:
    """`source` with `line` in place of its one line that contains `mark`, as far to the right as that one."""
    lines = source.splitlines()
    (at,) = [i for i, text in enumerate(lines) if mark in text]
    lines[at] = lines[at][: len(lines[at]) - len(lines[at].lstrip())] + line.strip()
    return "\n".join(lines) + "\n"


def load(folder: Path, name: str, source: str, what: str) -> Any:
    """`what` of the module `name`, which is written to `folder`: Triton reads a kernel's source from its file.

    Raises UsageError for a source that is not Python.
    """
    try:
        compile(source, f"{name}.py", "exec")
    except SyntaxError as error:
        wrong = (error.text or "").strip()
        raise UsageError(f"line: expected a line of Python, got {wrong!r} ({error.msg})") from None
    path = folder / f"{name}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec
    assert spec.loader
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, what)
