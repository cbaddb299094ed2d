"""Files that are written whole or not at all."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from whywrong.errors import UsageError


def write_text(path: Path, text: str) -> None:
    """Write a whole file or none, and its folder where that is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with complete_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="")


@contextmanager
def complete_file(path: Path) -> Iterator[Path]:
    """A temporary name beside `path`, moved into place when what is written to it is complete, and else removed."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")  # process numbers are of one machine
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def writing(path: Path, what: str) -> Iterator[None]:
    """Where `path` cannot be written, raise UsageError, which begins with `what`."""
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"{what}: {path} cannot be written ({error.strerror or error}); expected one that can"
        ) from None


def writable(folder: Path, what: str) -> Path:
    """The folder, made if it is not there. Raises UsageError, which begins with `what`, if nothing can be written."""
    with writing(folder, what):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    return folder
