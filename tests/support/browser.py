"""Pages in headless Chromium: what they log, what they request, how they look."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
#: Chromium by itself talks to Google; the last one is for containers, whose user is root.
_OPTIONS = (
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-gpu",
    "--disable-sync",
    "--no-first-run",
    *(("--no-sandbox",) if hasattr(os, "geteuid") and os.geteuid() == 0 else ()),
)


@contextmanager
def chromium() -> Iterator[Any]:
    """A running browser; the test is skipped where there is none.

    It is the one that ``CHROMIUM`` names, or one on the path, or the one that
    ``playwright install chromium`` put in place.
    """
    from playwright.sync_api import sync_playwright

    named = os.environ.get("CHROMIUM")
    found = named or next(filter(None, map(shutil.which, _NAMES)), None)
    with sync_playwright() as playwright:
        kind = playwright.chromium
        if found is None and not Path(kind.executable_path).exists():
            pytest.skip("no Chromium: install Debian's chromium, or `playwright install chromium`")
        browser = kind.launch(executable_path=found, args=list(_OPTIONS))
        try:
            yield browser
        finally:
            browser.close()


class Page:
    """A file opened in a tab of its own.

    :ivar page: Playwright's page.
    :ivar problems: errors that the page logged or didn't catch, and refusals of its policy.
    :ivar requests: what it asked for besides itself.
    """

    def __init__(self, browser: Any, file: Path, **context: Any) -> None:
        context = {"viewport": {"width": 1280, "height": 900}, **context}
        self.context = browser.new_context(**context)
        self.page = self.context.new_page()
        self.problems: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.problems.append(message.text))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(file.as_uri())
        self.requests.remove(file.as_uri())

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)

    def focused(self) -> str:
        """The accessible name of what has the focus."""
        return str(
            self.page.evaluate(
                "document.activeElement.getAttribute('aria-label')"
                " || document.activeElement.textContent"
            )
        )

    def details(self) -> str:
        """The panel's text, its white space folded."""
        return " ".join(self.page.locator(".panel").first.inner_text().split())

    def box(self, name: str) -> Any:
        """The head of the box whose accessible name begins so."""
        return self.page.locator(f'.box[aria-label^="{name}"] > .head').first

    def boxes(self) -> list[str]:
        """The accessible names of the boxes in sight, in document order."""
        return [
            str(box.get_attribute("aria-label"))
            for box in self.page.locator(".box").all()
            if box.is_visible()
        ]
