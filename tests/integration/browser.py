"""A real browser, Debian's Chromium without a window, for the page."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Page, sync_playwright

_NAMES = ("chromium", "chromium-browser", "google-chrome")
PATIENCE_MS = 60_000


@contextmanager
def opened(url: str, *, width: int = 1200, height: int = 900, dark: bool = False) -> Iterator[Page]:
    """The page at this address. Whatever it writes to the console as an error fails the test."""
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    assert found, "the tests of the page need a browser: apt-get install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        try:
            context = browser.new_context(
                viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light"
            )
            page, errors = context.new_page(), list[str]()
            page.set_default_timeout(PATIENCE_MS)
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.goto(url)
            yield page
            assert not errors, errors
        finally:
            browser.close()
