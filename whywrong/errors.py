"""The error that a person is meant to read: one line that says what is wrong and what would be right."""

import difflib
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from numbers import Integral, Real
from typing import Any


class UsageError(ValueError):
    """Bad input. The command line prints it as one line, without a traceback, and exits with 2."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``did you mean heads? `` for the known name that is nearest, or an empty string."""
    return "".join(f"did you mean {near}? " for near in difflib.get_close_matches(name, known, n=1, cutoff=0.5))


def check_number(name: str, value: Any, least: float = 0, whole: bool = False) -> None:
    """Raise UsageError for what is no number, or no `whole` one, or below `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral if whole else Real) or not float(value) >= least:
        raise UsageError(f"{name}: expected a {'whole ' * whole}number from {least}, got {value!r}")


def first_line(error: object) -> str:
    """The first line of an error or a text, 160 characters at most; the error's type where it has none."""
    text = ""
    with suppress(Exception):  # a text that cannot be made
        text = str(error).strip()
    return (text.splitlines() or [type(error).__name__])[0][:160]


LOG = logging.getLogger("whywrong")
"""At DEBUG it has each exception that a search goes on after."""


@contextmanager
def collected(errors: list[str], what: str, expected: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Go on after an exception, which is logged as a line that begins with `what`.

    Unless it is one of the `expected`, and no lack of memory, that line is appended to `errors` too.
    """
    try:
        yield
    except Exception as error:
        line = f"{what}: {type(error).__name__}: {first_line(error)}"
        memory = type(error).__name__ == "OutOfMemoryError"  # torch's, a RuntimeError
        errors += [line] * (memory or not isinstance(error, expected))
        LOG.debug("%s", line, exc_info=True)


OPTIONAL = {name: name.lower() for name in ("IPython", "hypothesis", "ipywidgets", "jinja2", "matplotlib", "onnx")}
OPTIONAL["yaml"] = "pyyaml"
"""Packages that whywrong does without where nothing asks for them, and the names by which they are installed."""


@contextmanager
def needs(what: str) -> Iterator[None]:
    """Where one of OPTIONAL is not installed, raise UsageError with the command that installs it: `what` needs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        name = str(error.name).split(".")[0]
        if name not in OPTIONAL:
            raise
        raise UsageError(f"{what} needs {name}: pip install {OPTIONAL[name]}") from None
