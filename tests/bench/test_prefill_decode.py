"""The load of `bench.prefill_decode` on a server that streams words at a steady pace."""

import argparse
import asyncio
import json
import re
from collections.abc import Awaitable, Callable

import pytest
import uvloop
from aiohttp import web

from bench import prefill_decode
from bench.chat_client import RequestFailed
from bench.prefill_decode import Load, Measured

LONG, SHORT, WORDS, PACE_S = 300, 16, 12, 0.1
WORD = b'data: {"choices": [{"index": 0, "text": "a "}]}\n\n'
END = b'data: {"choices": [], "usage": {"completion_tokens": 12}}\n\ndata: [DONE]\n\n'
ERROR = b'data: {"error": {"message": "engine died"}}\n\n'

Stream = Callable[[web.StreamResponse, list[int]], Awaitable[None]]


async def words(response: web.StreamResponse, prompt: list[int]) -> None:
    for _ in range(WORDS if len(prompt) == SHORT else 1):
        await response.write(WORD)
        await asyncio.sleep(PACE_S)
    await response.write(END)


def measured(
    monkeypatch: pytest.MonkeyPatch, stream: Stream = words, prompts: list[list[int]] | None = None
) -> Measured:
    """With a warm-up and a time to measure that are both shorter than an answer."""
    monkeypatch.setattr(prefill_decode, "WARM_UP_S", 0.2)
    options = argparse.Namespace(streams=2, seconds=0.4, every=0.2, burst=2, long_tokens=LONG)

    async def handler(request: web.Request) -> web.StreamResponse:
        prompt = json.loads(await request.text())["prompt"]
        if prompts is not None:
            prompts.append(prompt)
        response = web.StreamResponse()
        await response.prepare(request)
        await stream(response, prompt)
        return response

    async def run() -> Measured:
        app = web.Application()
        app.router.add_post("/v1/completions", handler)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            return await Load(options, f"http://127.0.0.1:{runner.addresses[0][1]}", "m", seed=3).run()
        finally:
            await runner.cleanup()

    return uvloop.run(run())


def test_gaps_of_answers_that_outlast_the_time_count_and_those_of_the_warm_up_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = measured(monkeypatch)
    assert 0 < len(found.gaps_s) < 2 * (WORDS - 1)
    assert len(found.ttft_s) == 2 * 2


def test_a_seed_gives_two_systems_the_same_prompts_however_fast_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    async def at_once(response: web.StreamResponse, prompt: list[int]) -> None:
        await asyncio.sleep(PACE_S if len(prompt) == SHORT else 0.0)
        await response.write(WORD + END)

    slow: list[list[int]] = []
    fast: list[list[int]] = []
    measured(monkeypatch, words, slow)
    measured(monkeypatch, at_once, fast)
    assert sorted(p for p in slow if len(p) == LONG) == sorted(p for p in fast if len(p) == LONG)
    assert all(prompt in fast for prompt in slow)


@pytest.mark.parametrize("length", [SHORT, LONG])
@pytest.mark.parametrize(
    ("sent", "reason"),
    [(WORD + ERROR + END, "engine died"), (WORD, "without [DONE]"), (END, "held no token")],
)
def test_a_stream_that_fails_ends_the_measurement(
    length: int, sent: bytes, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def one_fails(response: web.StreamResponse, prompt: list[int]) -> None:
        await (response.write(sent) if len(prompt) == length else words(response, prompt))

    with pytest.raises(RequestFailed, match=re.escape(reason)):
        measured(monkeypatch, one_fails)
