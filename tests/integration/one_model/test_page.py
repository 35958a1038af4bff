"""The page at `/`, as a person sees it."""

import re
import threading
from pathlib import Path

import httpx
from playwright.sync_api import expect

from deployments.command.status_tables import percent
from tests.integration import batches
from tests.integration.application import Sluice
from tests.integration.browser import opened
from tests.waiting import wait_until

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
        running = threading.Thread(target=ask, args=(sluice, 900))
        running.start()
        expect(page.locator("#replicas")).to_contain_text("1 of ")
        running.join()
        ended = page.locator("#recent tbody tr").first
        expect(ended).to_contain_text("length")
        expect(ended).to_contain_text("900")
        for part in ("bins no bins.dispatch: requests sends each", "prediction no", "batch control no", "phases "):
            expect(page.locator("#parts")).to_contain_text(re.compile(part.replace(" ", r"\s*"), re.I))
        expect(page.locator("#steps rect").first).to_be_attached()
        expect(page.locator("#binsection")).to_be_hidden()
        for tile in ("requests/s", "tokens/s", "first token", "in time"):
            expect(page.locator("#tiles")).to_contain_text(tile)
        all_met = {"ttft": "met", "tpot": "met", "e2e": "met"}
        met, whole = (
            sluice.counted("sluice_slo_requests_total", slo_class="standard", **labels) for labels in (all_met, {})
        )
        in_time = page.locator("#classes tbody tr", has_text="standard").locator("td").nth(6)
        expect(in_time).to_have_text(percent(met / whole))
        assert met and SECRET.split()[0] not in page.content()


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


def test_it_shows_batches_in_progress_whichever_router_answers(sluice: Sluice, tmp_path: Path) -> None:
    client = sluice.client()
    batch = batches.submitted(client, batches.write(tmp_path / "in.jsonl", 2000, max_tokens=200))
    with opened(sluice.url) as page:
        row = page.locator("#batches tbody tr", has_text=batch.id[-7:])
        expect(row).to_contain_text("in progress")
        expect(row).to_contain_text(re.compile(r"[1-9]\d* of 2,000"))
        for each in (batches.MODEL, batches.CHAT, "24h"):
            expect(row).to_contain_text(each)
        answered_by: set[str] = set()

        def shown_by_both() -> bool:
            status = sluice.status()
            answered_by.add(status["answered_by"]["router"])
            assert batch.id in {each["id"] for each in status["open_batches"]["oldest"]}
            return len(answered_by) == 2

        wait_until(shown_by_both, 60, "both routers have shown it")
        client.batches.cancel(batch.id)
        expect(page.locator("#batches")).to_contain_text("none")


def test_it_fits_a_phone_in_the_dark(sluice: Sluice) -> None:
    with opened(sluice.url, width=360, height=700, dark=True) as page:
        expect(page.locator("#replicas")).to_contain_text("it takes more")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(16, 21, 28)"


def test_it_asks_no_other_address(sluice: Sluice) -> None:
    policy = httpx.get(sluice.url, trust_env=False).headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy
