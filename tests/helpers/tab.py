"""A page in a real browser; it notices complaints, requests elsewhere, and scripts that were refused."""

import os
import re
from pathlib import Path
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, Request, expect

DESK = {"width": 1280, "height": 900}
PHONE = {"width": 390, "height": 844}

_WATCH = """
window.__refused = [];
addEventListener("securitypolicyviolation",
  (e) => window.__refused.push(`${e.violatedDirective}: ${e.blockedURI} ${e.sample}`));
"""
_PAINTED = """() => new Promise((resolve) => {
    const look = () => {
        const [paint] = performance.getEntriesByName("first-contentful-paint");
        paint ? resolve(paint.startTime) : requestAnimationFrame(look);
    };
    look();
})"""


def busyness() -> float:
    """How many processes want each core, at least 1: about how much longer everything takes."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


class Tab:
    """A page in a browser profile of its own, and all that it complained of.

    Args:
        chromium: the browser.
        url: of the server; requests to any other are complaints.
        **options: of the browser's context, such as ``color_scheme``.
    """

    def __init__(self, chromium: Browser, url: str, **options: Any) -> None:
        self.context = chromium.new_context(base_url=url, **({"viewport": DESK} | options))
        self.context.add_init_script(_WATCH)
        self.page: Page = self.context.new_page()
        self.page.set_default_timeout(60_000)
        self.complaints: list[str] = []
        self.page.on("console", lambda m: m.type in ("error", "warning") and self.complaints.append(m.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", self._opened)
        self.page.on("request", self._asked)
        self.url = url

    def _opened(self, dialog: Any) -> None:
        self.complaints.append(f"a dialog opened: {dialog.message}")
        dialog.dismiss()

    def _asked(self, request: Request) -> None:
        if not request.url.startswith((self.url, "data:", "blob:")):
            self.complaints.append(f"asked for {request.url}")

    def close(self) -> list[str]:
        """Close it; everything it complained of, refusals by the Content Security Policy included."""
        self.note_refusals()
        self.context.close()
        return self.complaints

    def note_refusals(self) -> None:
        """What the page's Content Security Policy refused is a complaint; call it before going elsewhere."""
        self.complaints += self.page.evaluate("window.__refused.splice(0)")

    def first_content(self, path: str) -> float:
        """Go to a path; milliseconds until its first content is shown (first contentful paint)."""
        self.page.goto(path)
        return self.page.evaluate(_PAINTED)

    def faults(self) -> list[tuple[str, str]]:
        """Serious and critical faults that axe finds: rule and element. Needs ``bypass_csp=True``."""
        found = Axe().run(self.page).response["violations"]
        return [(v["id"], v["nodes"][0]["html"]) for v in found if v["impact"] in ("serious", "critical")]

    def overflow(self) -> int:
        """CSS pixels by which the page is wider than its window."""
        return self.page.evaluate("document.documentElement.scrollWidth - innerWidth")

    def settle(self) -> None:
        """Wait until an audit is made and the first curve, where there is one, is drawn."""
        expect(self.page.locator("[data-working]")).to_have_count(0)
        plots = self.page.locator("figure[data-chart] .plot:visible")
        if plots.count():
            plots.first.scroll_into_view_if_needed()
            expect(plots.first.locator(".main-svg").first).to_be_visible(timeout=20_000)
            self.page.evaluate("scrollTo(0, 0)")

    def picture(self, directory: Path, name: str) -> Path:
        """A screenshot of the whole page, all its curves drawn, as a file of that name."""
        path = directory / f"{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}.png"
        window = self.page.viewport_size
        assert window is not None
        height = min(12_000, self.page.evaluate("document.documentElement.scrollHeight"))
        self.page.set_viewport_size({"width": window["width"], "height": max(height, window["height"])})
        plots = self.page.locator("figure[data-chart] .plot:visible")
        expect(plots.locator(".main-svg:first-child")).to_have_count(plots.count())
        self.page.screenshot(path=path, animations="disabled")
        self.page.set_viewport_size(window)
        return path
