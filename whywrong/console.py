"""What commands share: one line for an error, exit codes, and arguments that are checked."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn, TextIO

from whywrong.errors import UsageError, first_line
from whywrong.tables import printable


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


def with_progress(names: Sequence[str]) -> Iterator[str]:
    """The names of steps; from two seconds on a terminal's standard error says how many are done."""
    due, shown = time.monotonic() + 2.0, ""
    for done, name in enumerate(names):
        if time.monotonic() >= due and sys.stderr.isatty():
            due, shown = time.monotonic() + 0.5, f"{done} of {len(names)} steps"
            print(shown, end="\r", file=sys.stderr, flush=True)  # what comes next is written over it
        yield name
    print(" " * len(shown), end="\r" * bool(shown), file=sys.stderr, flush=True)


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
