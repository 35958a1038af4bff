"""The page at `/`, as a person sees it."""

import threading

import httpx
from playwright.sync_api import expect

from tests.integration.application import Sluice
from tests.integration.browser import opened

SECRET = "Kangaroos of Tasmania"


def ask(sluice: Sluice, max_tokens: int) -> None:
    body = {
        "model": "sluice-demo",
        "messages": [{"role": "user", "content": SECRET}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
    }
    httpx.post(f"{sluice.url}/v1/chat/completions", json=body, timeout=120, trust_env=False).raise_for_status()


def test_it_shows_what_runs_and_never_what_was_asked(sluice: Sluice) -> None:
    with opened(sluice.url) as page:
        expect(page.locator("#what")).to_contain_text("sluice-demo · 2 replicas · 2 routers")
        running = threading.Thread(target=ask, args=(sluice, 300))
        running.start()
        expect(page.locator("#replicas")).to_contain_text("1 of ")
        running.join()
        ended = page.locator("#recent tbody tr").first
        expect(ended).to_contain_text("length")
        expect(ended).to_contain_text("300")
        for tile in ("requests/s", "tokens/s", "first token", "in time"):
            expect(page.locator("#tiles")).to_contain_text(tile)
        assert SECRET.split()[0] not in page.content()


def test_the_box_streams_an_answer_and_says_what_it_took(sluice: Sluice) -> None:
    with opened(sluice.url) as page:
        page.locator("#prompt").fill("Name three rivers.")
        page.locator("#send").press("Enter")
        expect(page.locator("#timing")).to_contain_text("Server-Timing: queue;dur=")
        assert page.locator("#answer").inner_text()


def test_it_says_how_to_call_from_here(sluice: Sluice) -> None:
    with opened(f"{sluice.url}/sluice") as page:
        expect(page.locator("#curl")).to_contain_text(f"curl {sluice.url}/v1/chat/completions")
        expect(page.locator("#python")).to_contain_text(f'base_url="{sluice.url}/v1"')


def test_it_fits_a_phone_in_the_dark(sluice: Sluice) -> None:
    with opened(sluice.url, width=360, height=700, dark=True) as page:
        expect(page.locator("#replicas")).to_contain_text("it takes more")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(16, 21, 28)"


def test_it_asks_no_other_address(sluice: Sluice) -> None:
    policy = httpx.get(sluice.url, trust_env=False).headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy
