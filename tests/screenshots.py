"""Makes the pictures of the documents again, from what runs: docs/figures/page.png and docs/figures/report.png.

python -m tests.screenshots [page] [report]
"""

import contextlib
import io
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import openai
from PIL import Image
from playwright.sync_api import Page, expect

from deployments.command import cli
from tests.integration import batches
from tests.integration.application import REPOSITORY, Sluice
from tests.integration.browser import opened

FIGURES = REPOSITORY / "docs/figures"
MOST_BYTES = 100_000
WIDTH, HEIGHT = 960, 1000
COLOURS = 128  # of a picture: as many as it has but for the edges of letters
REQUESTS = 800
ASKED = ("Name three rivers.", "What is bread made of?", "Tell a story about a garden.", "How far away is the moon?")
CLASSES = ("interactive", "standard")


def save(page: Page, name: str, height: int) -> None:
    file = FIGURES / name
    shot = page.screenshot(clip={"x": 0, "y": 0, "width": WIDTH, "height": height})
    Image.open(io.BytesIO(shot)).convert("RGB").quantize(COLOURS).save(file, optimize=True)
    assert file.stat().st_size < MOST_BYTES, f"{file} has {file.stat().st_size} bytes: show less of it"


def page_picture(folder: Path) -> None:
    """While four clients and a batch are served."""
    with Sluice(folder, "--batch-folder", "batches", "--", "--max-num-seqs", "16") as sluice:
        client = sluice.client()
        for requests in (200, 60):
            batches.submitted(client, batches.write(folder / f"{requests}.jsonl", requests, max_tokens=60))
        with opened(sluice.url, width=WIDTH, height=HEIGHT) as page, ThreadPoolExecutor(len(ASKED)) as clients:
            for number in range(48):
                clients.submit(ask, client, number)
            expect(page.locator("#recent tbody tr").nth(30)).to_be_visible()
            expect(page.locator("#batches tbody tr").first).to_contain_text(" of 200")
            expect(page.locator("#batches")).to_contain_text("202")  # the year, or an end that is expected
            save(page, "page.png", HEIGHT)


def ask(client: openai.OpenAI, number: int) -> None:
    client.chat.completions.create(
        model=batches.MODEL,
        messages=[{"role": "user", "content": ASKED[number % len(ASKED)]}],
        max_tokens=20 + 11 * number % 70,
        extra_headers={"X-Sluice-Class": CLASSES[number % len(CLASSES)]},
    )


def report_picture(folder: Path) -> None:
    """A report of two classes, with the pointer on a curve."""
    rng = np.random.default_rng(0)
    arrival_s, answers = np.cumsum(rng.exponential(1 / 7, REQUESTS)), rng.lognormal(5.0, 0.8, REQUESTS)
    prompts = {"chat": rng.lognormal(6.3, 0.8, REQUESTS), "report": rng.lognormal(7.4, 0.8, REQUESTS)}
    rows = ["arrival_s,prompt_tokens,output_tokens,slo_class"]
    for number, kind in enumerate(rng.choice(["chat", "chat", "report"], REQUESTS).tolist()):
        rows.append(f"{arrival_s[number]:.3f},{prompts[kind][number]:.0f},{answers[number]:.0f},{kind}")
    with contextlib.chdir(folder):  # a report names its files as the command does
        Path("traffic.csv").write_text("\n".join(rows))
        asked = "simulate --trace traffic.csv --engine Llama-3.1-8B@l40s --replicas 2 --target chat:0.5:0.05"
        cli.main([*asked.split(), "--target", "report:5:0.1", "--html", "report.html"])
    with opened((folder / "report.html").as_uri(), width=WIDTH, height=HEIGHT) as page:
        page.locator(".chart > svg").first.hover()
        expect(page.locator(".tip").first).to_be_visible()
        charts = page.locator(".charts").bounding_box()
        assert charts is not None
        save(page, "report.png", int(charts["y"] + charts["height"]) + 12)


PICTURES = {"page": page_picture, "report": report_picture}


def main() -> None:
    for name in sys.argv[1:] or PICTURES:
        with tempfile.TemporaryDirectory() as folder:
            PICTURES[name](Path(folder))


if __name__ == "__main__":
    main()
