"""The error that a person is meant to read: one line that says what is wrong and what would be right."""

import difflib
from collections.abc import Iterable


class UsageError(ValueError):
    """Bad input. The command line prints it as one line, without a traceback, and exits with 2."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``did you mean heads? `` for the known name that is nearest, or an empty string."""
    return "".join(f"did you mean {near}? " for near in difflib.get_close_matches(name, known, n=1, cutoff=0.5))
