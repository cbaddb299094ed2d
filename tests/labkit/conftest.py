"""A real Chromium for the tests of pages and widgets, where Playwright and a Chromium are installed."""

import shutil

import pytest


@pytest.fixture(scope="module")
def chromium():
    """The browser. Neither is a dependency, so that the tests stay quick to set up; without them a test is skipped."""
    api = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install playwright")
    there = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with api.sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=there, args=["--no-sandbox"])
        except api.Error as error:
            pytest.skip(f"needs a Chromium: `playwright install chromium`, or your system's ({str(error)[:80]})")
        yield browser
        browser.close()
