"""An open loop's requests and outcomes, against a real HTTP server in the same process."""

import asyncio
import json
import time
from dataclasses import replace
from statistics import fmean, stdev

import pytest
import uvloop
from aiohttp import web

from bench.chat_client import Answer
from bench.open_loop import LOOSE, TIGHT, Lengths, Outcome, Targets, draw_requests, run_open_loop
from tests.bench.test_load import serving, whole_stream, write_in_pieces

LENGTHS = Lengths(tight_prompt=20, loose_prompt=200, answer=10)


def test_a_seed_gives_the_same_requests_at_the_same_times() -> None:
    assert draw_requests(50, 5.0, LENGTHS, seed=1) == draw_requests(50, 5.0, LENGTHS, seed=1)
    assert draw_requests(50, 5.0, LENGTHS, seed=1) != draw_requests(50, 5.0, LENGTHS, seed=2)


def test_they_come_at_their_rate_in_bursts_half_of_each_class_around_their_lengths() -> None:
    drawn = draw_requests(20_000, 5.0, LENGTHS, seed=0)
    times_s = [request.arrival_s for request in drawn]
    gaps_s = [later - earlier for earlier, later in zip(times_s, times_s[1:], strict=False)]
    assert fmean(gaps_s) == pytest.approx(0.2, rel=0.1)
    assert stdev(gaps_s) / fmean(gaps_s) == pytest.approx(2.0, rel=0.1)
    for slo_class, mean in ((TIGHT, 20), (LOOSE, 200)):
        prompts = [len(request.prompt_token_ids) for request in drawn if request.slo_class == slo_class]
        assert len(prompts) == pytest.approx(10_000, rel=0.05)
        assert fmean(prompts) == pytest.approx(mean, rel=0.05)
        assert (min(prompts), max(prompts)) == (mean // 2, mean + mean // 2)


@pytest.mark.parametrize("changed", [{"tight_prompt": 1}, {"answer": 0}])
def test_lengths_of_nothing_are_refused(changed: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least 2 tokens"):
        Lengths(**changed)


def answer(ttft_s: float, *itl_s: float) -> Answer:
    return Answer(ttft_s=ttft_s, itl_s=itl_s, output_tokens=1 + len(itl_s))


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (answer(1.0, 0.05, 0.15), True),
        (answer(1.1, 0.05), False),
        (answer(1.0, 0.1, 0.11), False),
        (answer(1.0), True),
        (None, False),
    ],
)
def test_in_time_is_who_keeps_the_first_token_and_the_mean_of_all_others(given: Answer | None, kept: bool) -> None:
    assert Targets(ttft_s=1.0, tpot_s=0.1).kept_by(given) is kept


def test_a_whole_answer_has_a_target_of_its_own_where_one_is_given() -> None:
    given, targets = answer(1.0, 0.05, 0.15), Targets(ttft_s=1.0, tpot_s=0.1, e2e_s=1.3)
    assert targets.kept_by(given)
    assert not replace(targets, e2e_s=1.1).kept_by(given)


def test_requests_are_sent_when_they_come_however_slow_the_answers_are() -> None:
    came: list[tuple[float, str, int]] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        came.append((time.perf_counter() - began_s, request.headers["X-Sluice-Class"], len(body["prompt"])))
        await asyncio.sleep(1.0)
        return await write_in_pieces(request, whole_stream(3), 100)

    async def run() -> list[Outcome]:
        async with serving(handler, "/v1/completions") as url:
            return await run_open_loop(url, "a model", requests)

    requests = draw_requests(20, 40.0, LENGTHS, seed=0)
    began_s = time.perf_counter()
    outcomes = uvloop.run(run())
    assert [outcome.slo_class for outcome in outcomes] == [request.slo_class for request in requests]
    assert all(outcome.answer is not None for outcome in outcomes)
    expected = sorted((request.slo_class, len(request.prompt_token_ids)) for request in requests)
    assert sorted((slo_class, prompt) for _, slo_class, prompt in came) == expected
    assert max(at_s for at_s, _, _ in came) - min(at_s for at_s, _, _ in came) < 20 * 1.0 / 2


def test_a_refusal_is_an_outcome_with_its_reason() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        await request.read()
        return web.Response(status=429, text="too much waits")

    async def run() -> list[Outcome]:
        async with serving(handler, "/v1/completions") as url:
            return await run_open_loop(url, "a model", draw_requests(3, 100.0, LENGTHS, seed=0))

    assert [(outcome.answer, outcome.error) for outcome in uvloop.run(run())] == [
        (None, "HTTP 429: too much waits")
    ] * 3
