"""For pytest, which loads it by itself: a fuzzed test that fails shows the failure, and a test of it alone."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from whywrong.reporting.fuzzed import FuzzedError


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Generator[None, Any, Any]:
    """The report in place of a traceback through this package."""
    report = yield
    error = call.excinfo.value if call.excinfo else None
    if isinstance(error, FuzzedError):
        report.longrepr = str(error)
        if error.report.failure:
            report.sections.append(("a test of this failure", error.script))
    return report
