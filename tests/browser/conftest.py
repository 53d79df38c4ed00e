"""What tests of pages share: one browser, and a place for screenshots.

Screenshots of every page are kept for whoever changes it: in ``.pytest_cache/d/screenshots``, or in the
directory that the variable ``ART_SCREENSHOTS`` names, which a CI job keeps as an artefact.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.browser import ADVICE, ARGUMENTS, browser
from playwright.sync_api import Browser, expect, sync_playwright

expect.set_options(timeout=60_000)  # a busy machine may take seconds; a quiet one waits for nothing


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """The browser; tests of pages are skipped where there is none.

    One for each module: while Playwright's sync face is on, its event loop counts as running in this thread,
    and asynchronous tests of other modules could not run.
    """
    found = browser()
    if found is None:
        pytest.skip(ADVICE)
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=found, args=list(ARGUMENTS))
        yield started
        started.close()


@pytest.fixture(scope="session")
def screenshots(pytestconfig: pytest.Config) -> Path:
    """Where screenshots go."""
    named = os.environ.get("ART_SCREENSHOTS")
    cache: pytest.Cache | None = getattr(pytestconfig, "cache", None)
    if not named and cache is None:
        pytest.skip("no cache directory and no ART_SCREENSHOTS: screenshots have no place to go")
    directory = Path(named) if named else cache.mkdir("screenshots")  # type: ignore[union-attr]
    directory.mkdir(parents=True, exist_ok=True)
    return directory
