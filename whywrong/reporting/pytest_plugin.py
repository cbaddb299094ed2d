"""For pytest, which loads it by itself: what a fuzzed test that fails shows, and all rows of a table under -vv."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from whywrong.reporting.fuzzed import FuzzedError
from whywrong.tables import EVERY_ROW


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: Any) -> Generator[None, Any, Any]:
    """Under -vv tables of steps have all of them."""
    before = EVERY_ROW.set(item.config.getoption("verbose") > 1)
    try:
        return (yield)
    finally:
        EVERY_ROW.reset(before)


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
