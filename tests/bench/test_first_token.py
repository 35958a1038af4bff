"""Single requests in turn, against two real HTTP servers in the same process."""

import json

import uvloop
from aiohttp import web

from bench.chat_client import Answer
from bench.first_token import Measured, Pair, as_text, measure_pairs
from bench.workload import LoadConfig
from tests.bench.test_load import Handler, serving, whole_stream, write_in_pieces


def test_both_servers_get_every_prompt_and_the_first_turn_as_often() -> None:
    asked: list[tuple[str, str]] = []
    in_flight = 0

    def recording(name: str) -> Handler:
        async def handler(request: web.Request) -> web.StreamResponse:
            nonlocal in_flight
            in_flight += 1
            assert in_flight == 1
            body = json.loads(await request.read())
            assert body["model"] == f"model of {name}"
            asked.append((name, body["messages"][0]["content"]))
            response = await write_in_pieces(request, whole_stream(3), 100)
            in_flight -= 1
            return response

        return handler

    ends = 0

    def on_pair() -> None:
        nonlocal ends
        ends += 1

    async def run() -> list[Pair]:
        async with serving(recording("theirs")) as their_url, serving(recording("ours")) as our_url:
            theirs = LoadConfig(url=their_url, model="model of theirs", concurrency=1, requests=4)
            ours = LoadConfig(url=our_url, model="model of ours", concurrency=1, requests=4)
            return await measure_pairs(theirs, ours, on_pair)

    pairs = uvloop.run(run())
    assert [name for name, _ in asked] == ["theirs", "ours", "ours", "theirs"] * 2
    prompts = [prompt for _, prompt in asked]
    assert prompts[::2] == prompts[1::2]
    assert len(set(prompts)) == ends == len(pairs) == 4
    assert {len(answer.itl_s) for pair in pairs for answer in (pair.theirs, pair.ours)} == {2}


def answer(ttft_s: float, itl_s: tuple[float, ...]) -> Answer:
    return Answer(ttft_s=ttft_s, itl_s=itl_s, output_tokens=1 + len(itl_s))


def test_the_differences_are_paired_and_an_interval_says_where_their_median_lies() -> None:
    pairs = [
        Pair(theirs=answer(0.1 * number, (0.1, 0.1)), ours=answer(0.1 * number + 0.001 * number, (0.1, 0.12)))
        for number in range(1, 10)
    ]
    first, last = as_text(Measured(theirs="vllm serve", ours="Sluice 1x1", pairs=tuple(pairs))).splitlines()[1:]
    assert "500.0 -> 505.0 ms, ×1.010, +5.00 ms (96%: +2.00 to +8.00; quartiles +3.00 and +7.00)" in first
    assert "200.0 -> 220.0 ms, ×1.100, +20.00 ms" in last


def test_few_pairs_have_no_interval() -> None:
    assert "too few pairs" in as_text(
        Measured(theirs="a", ours="b", pairs=(Pair(theirs=answer(0.1, (0.1,)), ours=answer(0.2, (0.1,))),))
    )
