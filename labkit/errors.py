"""The error that a person is meant to read: one line that says what is wrong and what would be right."""


class UsageError(ValueError):
    """Bad input. The command line prints it as one line, without a traceback, and exits with 2."""
