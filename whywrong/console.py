"""What commands share: one line for an error, exit codes, and arguments that are checked."""

from __future__ import annotations

import argparse
import gc
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TextIO

from whywrong.errors import UsageError, first_line
from whywrong.tables import printable, to_stderr


class Parser(argparse.ArgumentParser):
    """Reports what is wrong in one line, as every other error does."""

    def error(self, message: str) -> NoReturn:
        """Raise UsageError in place of printing the usage."""
        raise UsageError(f"{message}; {self.prog} --help shows what there is")


def positive(text: str) -> int:
    """A whole number from 1, as an argument's type."""
    if not re.fullmatch("[1-9][0-9]{0,8}", text):
        raise argparse.ArgumentTypeError(f"expected a whole number from 1, got {text[:80]!r}")
    return int(text)


def show(text: object, file: TextIO | None = None) -> None:
    """Print what came from files, names and people: nothing that steers a terminal."""
    print(printable(str(text)), file=file, flush=True)


class Progress:
    """How far a thing is, on standard error: from two seconds on in one line of a terminal, which is written over.

    Elsewhere `write` is called with a line every ten seconds, if there is one.
    """

    def __init__(self, write: Callable[[str], Any] | None = None) -> None:
        self._write = None if write in (None, to_stderr) and sys.stderr.isatty() else write or str
        self._due, self._shown = time.monotonic() + (10.0 if self._write else 2.0), ""

    def __call__(self, text: str) -> None:
        """Say this, unless something was said a moment ago."""
        if (now := time.monotonic()) < self._due:
            return
        self._due = now + (10.0 if self._write else 0.5)
        if self._write:
            self._write(text)
        else:
            print(printable(text).ljust(len(self._shown)), end="\r", file=sys.stderr, flush=True)
            self._shown = text

    def close(self) -> None:
        """Take the line away."""
        if self._shown:
            print(" " * len(self._shown), end="\r", file=sys.stderr, flush=True)


@contextmanager
def without_collector() -> Iterator[None]:
    """Without Python's search for garbage. Imports leave none; it took a fifth of `whywrong diff` of an example.

    Not :func:`whywrong.process_state.temporarily`, whose module imports torch, which this is to speed up.
    """
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def with_progress(names: Sequence[str]) -> Iterator[str]:
    """The names of steps, with how many are done on standard error."""
    progress = Progress()
    for done, name in enumerate(names):
        progress(f"{done} of {len(names)} steps")
        yield name
    progress.close()


def run(
    program: str,
    words: Sequence[str],
    act: Callable[[Sequence[str]], int | None],
    interrupted: str = "interrupted",
    show: Callable[[object, TextIO], None] = show,
) -> int:
    """What `act(words)` returns, or 0; for bad input and for any other exception 2, and one line on standard error.

    Warnings are off meanwhile, in the whole process. 141 where nobody reads standard output on, 130 for an interrupt,
    of which `interrupted` says what it leaves.
    """
    try:
        if "\0".join(words).encode("utf-8", "replace").decode() != "\0".join(words):
            raise UsageError("an argument has bytes that are no UTF-8; expected text")
        with warnings.catch_warnings(action="ignore"):  # of libraries, with what files say
            code = act(words)
        sys.stdout.flush()
        return code or 0
    except BrokenPipeError:  # as of `whywrong diff ... | head`; nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except UsageError as error:
        show(f"{program}: {' '.join(str(error).split())}", sys.stderr)
        return 2
    except Exception as error:
        variable = f"{program.upper()}_TRACEBACK"
        if os.environ.get(variable):
            raise
        show(f"{program}: {type(error).__name__}: {first_line(error)} ({variable}=1 shows where)", sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{program}: {interrupted}", file=sys.stderr)
        return 130
