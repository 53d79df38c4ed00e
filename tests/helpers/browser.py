"""The browser that page tests use: one that is installed, or Playwright's own.

    python tests/helpers/browser.py

Run, it fetches Playwright's Chromium where there is none, and says what to do where that is not possible.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

VARIABLE = "ART_BROWSER"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
ADVICE = (
    f"no Chromium was found: set {VARIABLE} to one, or install it (`playwright install chromium`, or "
    "`apt-get install chromium`)"
)
ARGUMENTS = ("--no-sandbox",) if hasattr(os, "geteuid") and os.geteuid() == 0 else ()
"""Chromium's sandbox does not run as root."""


def browser() -> Path | None:
    """The executable of a Chromium; None where there is none."""
    named = os.environ.get(VARIABLE)
    if named:
        if not Path(named).is_file():
            raise FileNotFoundError(f"{VARIABLE}={named}: there is no such file")
        return Path(named)
    for name in NAMES:
        if found := shutil.which(name):
            return Path(found)
    with sync_playwright() as playwright:
        own = Path(playwright.chromium.executable_path)
    return own if own.is_file() else None


def main() -> None:
    if browser() is None:
        fetched = subprocess.run([sys.executable, "-m", "playwright", "install", "chromium"], timeout=600)
        if fetched.returncode or browser() is None:
            print(f"{ADVICE}; tests of pages are skipped", file=sys.stderr)
            return
    print(f"tests of pages use {browser()}")


if __name__ == "__main__":
    main()
