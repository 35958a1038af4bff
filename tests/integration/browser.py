"""Pages as a person sees them."""

from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Page, expect

from bench.browser import chromium

PATIENCE_MS = 60_000
expect.set_options(timeout=PATIENCE_MS)  # its own five seconds are little on a busy machine


@contextmanager
def opened(url: str, *, width: int = 1200, height: int = 900, dark: bool = False) -> Iterator[Page]:
    """The page at this address. Whatever it writes to the console as an error fails the test."""
    with chromium() as browser:
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light"
        )
        page, errors = context.new_page(), list[str]()
        page.set_default_timeout(PATIENCE_MS)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(url)
        yield page
        assert not errors, errors
