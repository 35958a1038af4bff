"""What bench.batches makes of its measurements."""

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import httpx
import openai
import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from bench import batches
from bench.batches import SWING, Run, RunningBatch, as_markdown, batch_lines, drawn, running_batch
from bench.load import ServerUnusable
from bench.open_loop import Lengths
from deployments.batches.http import BatchApi
from deployments.batches.runner import Runner, Troubles
from deployments.batches.storage import Storage
from deployments.config.services import BatchesSection
from tests.deployments.batches.routers import COMPLETIONS, Routers, lines

LENGTHS = Lengths(tight_prompt=8, loose_prompt=16, answer=4)


def test_a_steady_load_comes_at_its_share_of_capacity() -> None:
    requests = drawn("0.5", 40.0, 50.0, LENGTHS, seed=1)
    assert len(requests) == 1000
    assert requests[-1].arrival_s == pytest.approx(50.0, rel=0.2)
    assert requests == drawn("0.5", 40.0, 50.0, LENGTHS, seed=1)


def test_a_swinging_load_is_low_and_high_in_turns() -> None:
    requests = drawn(SWING, 400.0, 60.0, LENGTHS, seed=1)
    assert len(requests) == 400 * 60 / 2
    halves = [int(each.arrival_s / batches.SWING_HALF_S) for each in requests]
    rates = [halves.count(number) / batches.SWING_HALF_S for number in range(8)]
    assert rates[::2] == pytest.approx([40.0] * 4, rel=0.5)
    assert rates[1::2] == pytest.approx([360.0] * 4, rel=0.2)
    arrivals = [each.arrival_s for each in requests]
    assert arrivals == sorted(arrivals)


def test_a_file_of_a_batch_has_a_request_a_line_that_is_not_streamed() -> None:
    lines = [json.loads(line) for line in batch_lines(20, "m", LENGTHS).splitlines()]
    assert [line["custom_id"] for line in lines] == [str(number) for number in range(20)]
    assert {line["url"] for line in lines} == {"/v1/completions"}
    assert all(line["body"]["model"] == "m" and "stream" not in line["body"] for line in lines)


def run(has_batch: bool, in_time: int, tokens: int, load: str = "0.5") -> Run:
    return Run(load=load, has_batch=has_batch, requests=100, in_time=in_time, tokens=tokens, seconds=10.0)


def test_the_table_has_medians_and_pairs_of_the_same_round() -> None:
    runs = [run(False, 100, 1000), run(True, 98, 2000), run(True, 94, 1800), run(False, 96, 1200)]
    page = as_markdown([*runs, run(False, 90, 10, SWING), run(True, 80, 30, SWING)])
    (row,) = (line for line in page.splitlines() if line.startswith("| 0.5"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells == [
        "0.5",
        "200",
        "0.980 [0.960, 1.000]",
        "0.960 [0.940, 0.980]",
        "-2.0 [-2.0, -2.0]",
        "110 [100, 120]",
        "190 [180, 200]",
        "×1.75 [1.50, 2.00]",
    ]
    assert "Of all 300 requests 0.953 were in time alone, 0.907 with a batch: -4.7 points." in page


@contextmanager
def application(folder: Path) -> Iterator[openai.OpenAI]:
    """The real Batch API and its runner, before small routers."""
    storage, section = Storage(str(folder)), BatchesSection(segment_s=0.02)
    runner = Runner(section, storage, Routers(pause_s=0.02))

    @asynccontextmanager
    async def running(app: FastAPI) -> AsyncIterator[None]:
        runner.start()
        yield
        await runner.close()

    async def troubles(owner: str) -> Troubles:
        return runner.troubles(owner)

    api = BatchApi(FastAPI(lifespan=running), section, storage, {COMPLETIONS}, runner.look, troubles)
    with TestClient(api, base_url="http://127.0.0.1") as http:
        yield openai.OpenAI(base_url="http://127.0.0.1/v1", api_key="none", http_client=http, max_retries=0)


def test_a_batch_counts_its_tokens_while_it_runs_and_nothing_of_it_runs_once_it_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "LEAD_S", 0.0)
    with application(tmp_path) as client:
        file = client.files.create(file=("batch.jsonl", lines(map(str, range(5000)))), purpose="batch")
        with running_batch(client, file.id) as batch:
            assert batch is not None and batch.tokens() > 0
        (ended,) = client.batches.list()
        assert ended.status == "cancelled"


def client_of(*statuses: str) -> openai.OpenAI:
    """A client of a server that reports these statuses one after the other."""
    left = list(statuses)

    def answer(request: httpx.Request) -> httpx.Response:
        batch = {"id": "batch_1", "object": "batch", "endpoint": "/v1/completions", "completion_window": "24h"}
        return httpx.Response(200, json={**batch, "created_at": 0, "input_file_id": "f", "status": left.pop(0)})

    return openai.OpenAI(
        base_url="http://127.0.0.1:1/v1",
        api_key="none",
        http_client=httpx.Client(transport=httpx.MockTransport(answer)),
    )


def test_a_batch_that_ends_before_its_load_makes_no_figure() -> None:
    batch = RunningBatch(client_of("validating", "in_progress", "completed"), "f")
    assert batch.tokens() == 0
    with pytest.raises(ServerUnusable, match="the batch is completed while it should run"):
        batch.tokens()


def test_a_batch_that_answers_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "DEADLINE_S", 0.0)
    batch = RunningBatch(client_of("validating", "in_progress"), "f")
    with pytest.raises(ServerUnusable, match="has answered nothing within 0 s"):
        batch.wait_for_answers()
