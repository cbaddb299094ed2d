"""What labkit needs beside whywrong, and how it says so."""

import sys

import pytest

from labkit.requirements import needs
from whywrong.errors import UsageError


def test_what_is_not_installed_is_one_line_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "papermill", None)
    line = "^labkit run needs papermill: `make setup` in the checkout installs it$"
    with pytest.raises(UsageError, match=line), needs("labkit run"):
        import papermill  # noqa: F401
    with pytest.raises(ModuleNotFoundError), needs("labkit run"):
        import no_such_module  # noqa: F401
