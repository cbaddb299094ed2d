"""English text that is at hand on every machine: the documentation and docstrings of the Python that runs this."""

from __future__ import annotations

import ast
import hashlib
import sys
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from pydoc_data import topics

import numpy as np

from kernels import native
from whywrong.errors import UsageError
from whywrong.files import complete_file

FOLDERS = ("test", "tests", "idlelib", "site-packages", "dist-packages", "__pycache__", "lib2to3")
TEXT = (".txt", ".md", ".rst")


@dataclass(frozen=True)
class Corpus:
    """Bytes of text, and the share of it at the end that is kept for validation."""

    name: str
    text: bytes
    validation: float = 0.05

    @property
    def facts(self) -> dict[str, str | int]:
        """What result.json says of it: its name, bytes and hash. It differs between Python versions."""
        return {"name": self.name, "bytes": len(self.text), "sha256": hashlib.sha256(self.text).hexdigest()[:16]}

    def split(self) -> tuple[np.ndarray, np.ndarray]:
        """Training and validation bytes, uint8: every twentieth piece of 4096 validates, so that both are alike."""
        whole = np.frombuffer(self.text, dtype=np.uint8)
        piece, every = 4096, round(1 / self.validation)
        kept = (np.arange(len(whole)) // piece) % every == every - 1
        return whole[~kept], whole[kept]


def corpus(folder: str = "") -> Corpus:
    """The docstrings and text files of this Python's standard library, or the text files of `folder`.

    Raises UsageError for a folder that is not there, or that holds under 10,000 bytes of text (.txt, .md, .rst).
    """
    if not folder:
        return _standard()
    root = Path(folder)
    if not root.is_dir():
        raise UsageError(f"text: {folder!r} is no folder; expected one with .txt, .md or .rst files")
    paths = [path for path in sorted(root.rglob("*")) if path.suffix in TEXT]
    text = "\n\n".join(path.read_text(encoding="utf-8", errors="replace") for path in paths).encode()
    if len(text) < 10_000:
        raise UsageError(f"text: {folder!r} holds {len(text)} bytes of .txt, .md and .rst; expected 10,000 at least")
    return Corpus(root.name, text)


@cache
def _standard() -> Corpus:
    """Gathered once a Python version and kept in the cache: parsing the library takes seconds."""
    kept = native.cache() / f"corpus-{sys.version_info[0]}.{sys.version_info[1]}.{sys.version_info[2]}.txt"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        with complete_file(kept) as part:
            part.write_bytes(_gathered(Path(sysconfig.get_path("stdlib"))))
    return Corpus("docstrings and text of Python's standard library", kept.read_bytes())


def _gathered(root: Path) -> bytes:
    pieces = [str(text) for text in topics.topics.values()]
    for path in sorted(root.rglob("*.py")):
        if not set(path.relative_to(root).parts[:-1]) & set(FOLDERS):
            pieces += _docstrings(path)
    for path in sorted(root.rglob("*.txt")):
        if not set(path.relative_to(root).parts[:-1]) & set(FOLDERS):
            pieces.append(path.read_text(encoding="utf-8", errors="replace"))
    return "\n\n".join(dict.fromkeys(pieces)).encode()


def _docstrings(path: Path) -> list[str]:
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return []
    found: list[str | None] = []
    left: list[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef] = [tree]
    while left:
        node = left.pop(0)
        found.append(ast.get_docstring(node))
        left += [part for part in node.body if isinstance(part, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))]
    return [text for text in found if text and len(text) > 40]
