"""A real browser, Debian's Chromium without a window."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, sync_playwright

_NAMES = ("chromium", "chromium-browser", "google-chrome")


def executable() -> str:
    """Raises FileNotFoundError: there is none."""
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        raise FileNotFoundError("no browser is installed: apt-get install chromium")
    return found


@contextmanager
def chromium() -> Iterator[Browser]:
    """It runs an event loop in this thread, so that nothing else does until its end. Raises as `executable`."""
    found = executable()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()
