"""One replica reads prompts and one decodes: real Redis, Ray, vLLM and NIXL, killed and cancelled under load."""

import asyncio
import json
import os
import time
from collections.abc import Callable, Iterator
from threading import Event
from typing import Any

import openai
import psutil
import pytest

from tests.integration.application import EXACT, START_TIMEOUT_S, Sluice, chat
from tests.integration.conftest import MAX_TOKENS, under_load
from tests.waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

KEEP_S = 6
BUDGET_TOKENS = 96
SETTINGS = {
    "vllm_args": ["--max-num-seqs", "48", "--max-num-batched-tokens", str(BUDGET_TOKENS), *EXACT],
    "router": {"silence_s": 15},
    "engine": {
        "replicas": 1,
        "prefill": {"split": "always", "min_prompt_tokens": 8, "keep_s": KEEP_S, "max_wait_s": 60},
    },
}


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sluice]:
    """One replica that reads prompts and one that decodes."""
    with Sluice(tmp_path_factory.mktemp("split"), settings=SETTINGS) as application:
        yield application


async def ask(client: openai.AsyncOpenAI, prompt: str) -> list[int]:
    asked = chat(prompt, max_tokens=MAX_TOKENS, extra_body={"return_token_ids": True})
    stream = await client.chat.completions.create(**asked, stream=True)
    token_ids: list[int] = []
    async for chunk in stream:
        if chunk.choices and (new := chunk.choices[0].model_extra.get("token_ids")):
            token_ids += new
    return token_ids


async def ask_all(sluice: Sluice, prompts: list[str]) -> list[list[int]]:
    async with sluice.async_client() as client:
        return await asyncio.gather(*(ask(client, prompt) for prompt in prompts))


def count(sluice: Sluice, name: str, **labels: str) -> float:
    return sluice.counted(f"sluice_{name}_total", **labels)


def replicas(status: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {**status["replicas"], **status["prefill"]["replicas"]}


def both_are_back(sluice: Sluice) -> bool:
    status = sluice.status()
    ready = [len(pool["replicas"]) == 1 and _answers(pool) for pool in (status, status["prefill"])]
    return all(ready)


def _answers(pool: dict[str, Any]) -> bool:
    return all("free_blocks" in replica["engine"] for replica in pool["replicas"].values())


def nothing_is_held(sluice: Sluice) -> bool:
    """By both engines' own counts of blocks (vLLM keeps one for itself), and by the shared state's of slots."""
    found = replicas(sluice.status()).values()
    return len(found) == 2 and all(
        replica["running"] == 0
        and replica["engine"].get("free_blocks") == replica["engine"].get("total_blocks", 0) - 1
        and replica["engine"]["kv_held"] == 0
        for replica in found
    )


def wait_until_nothing_is_held(sluice: Sluice, timeout_s: float) -> None:
    """Caches that nobody fetched are kept for KEEP_S."""
    give_up_s = time.monotonic() + timeout_s
    while not nothing_is_held(sluice):
        assert time.monotonic() < give_up_s, json.dumps(replicas(sluice.status()), indent=1)
        time.sleep(0.1)


def process_of(sluice: Sluice, pool: str) -> psutil.Process:
    """Ray names the process of a replica by its deployment."""
    found = [
        p
        for p in sluice.engine_replicas()
        if ("EngineReplica--prefill" in " ".join(p.cmdline())) == (pool == "prefill")
    ]
    assert len(found) == 1, found
    return found[0]


def test_64_greedy_answers_equal_those_of_one_engine_token_by_token(
    split: Sluice, prompts: list[str], plain_answers: list[dict[str, Any]]
) -> None:
    assert asyncio.run(ask_all(split, prompts)) == [answer["token_ids"] for answer in plain_answers]

    def all_are_published() -> bool:
        return count(split, "kv_transfers") + count(split, "kv_transfer_fallbacks") == 64

    wait_until(all_are_published, 30, "the router has published all of them")
    assert count(split, "kv_transfers") > 32, "most were to be handed over"
    wait_until_nothing_is_held(split, 3 * KEEP_S)
    (reading,) = split.status()["prefill"]["replicas"].values()
    (answering,) = split.status()["replicas"].values()
    assert reading["engine"]["steps"]["decode"] == 0
    assert reading["engine"]["free_tokens"] > 0, "by which its slots are bound"
    assert count(split, "prefill_tokens") > 64 * 20
    assert answering["engine"]["kv_transfer_bytes"] > 0 and answering["engine"]["kv_transfer_seconds"] > 0


def test_nixl_leaves_each_engine_every_core(split: Sluice) -> None:
    cores = [os.sched_getaffinity(engine.pid) for engine in split.engine_cores()]
    assert cores == [os.sched_getaffinity(0)] * 2


def test_prompts_longer_than_the_token_budget_are_among_them(split: Sluice, prompts: list[str]) -> None:
    answer = split.client().chat.completions.create(**chat(max(prompts, key=len), max_tokens=1))
    assert answer.usage is not None and answer.usage.prompt_tokens > BUDGET_TOKENS


def test_what_a_client_tells_the_connector_is_not_passed_on(split: Sluice) -> None:
    def failures() -> float:
        (answering,) = split.status()["replicas"].values()
        return float(answering["engine"]["kv_transfer_failures"])

    before = failures()
    forged = {"kv_transfer_params": {"do_remote_prefill": True, "remote_host": "192.0.2.1"}}
    asked = chat("Name a river and say where it flows.", max_tokens=4, extra_body=forged)
    assert split.client().chat.completions.create(**asked).choices[0].message.content
    assert failures() == before


def test_what_a_prefill_replica_has_cached_is_predicted_exactly(split: Sluice) -> None:
    """The longer prompt is handed over too, for it is read from the last whole block of the shorter one on."""

    async def grow() -> None:
        async with split.async_client() as client:
            for sentences in (40, 60):  # a block has 128 tokens
                await ask(client, "One river after another. " * sentences)

    names = ("kv_transfers", "prefill_predicted_hit_tokens", "prefill_hit_tokens", "prefill_wrong_hit_tokens")
    before = [count(split, name) for name in names]
    asyncio.run(grow())

    def counted() -> list[float]:
        return [count(split, name) - old for name, old in zip(names, before, strict=True)]

    def all_are_published() -> bool:  # each pool has heartbeats of its own
        kv_transfers, _, found, _ = counted()
        return kv_transfers >= 2 and found > 0

    wait_until(all_are_published, 60, "the router has published what was found")
    _, predicted, found, wrong = counted()  # of tests before also what had not been published
    assert (wrong, predicted) == (0, found) and found % 128 == 0


def test_cancelled_streams_leave_no_blocks_pinned(split: Sluice, prompts: list[str]) -> None:
    async def hang_up(client: openai.AsyncOpenAI, prompt: str, number: int) -> None:
        """While it waits, is read, is handed over or is answered."""
        asked = chat(prompt, max_tokens=1500, extra_body={"ignore_eos": True})  # it has not ended when it is left
        stream = await client.chat.completions.create(**asked, stream=True)
        await asyncio.sleep(0.02 * number)
        await stream.close()

    async def cancel_all() -> None:
        async with split.async_client() as client:
            await asyncio.gather(*(hang_up(client, prompt, number) for number, prompt in enumerate(prompts)))

    before = count(split, "requests", outcome="cancelled")
    asyncio.run(cancel_all())
    wait_until_nothing_is_held(split, 3 * KEEP_S)
    wait_until(lambda: count(split, "requests", outcome="cancelled") - before > 32, 30, "the router has published them")


@pytest.mark.parametrize("victim", ["decode", "prefill"])
def test_either_side_killed_under_load_costs_no_request_and_changes_no_answer(
    split: Sluice, prompts: list[str], plain_answers: list[dict[str, Any]], victim: str, request: pytest.FixtureRequest
) -> None:
    wait_until(lambda: both_are_back(split), START_TIMEOUT_S, "both replicas serve")

    def on_board() -> float:
        counters = ("requests_recovered", "prefill_requests_recovered", "kv_transfer_fallbacks")
        return sum(count(split, name) for name in counters)

    before = on_board()
    answers = asyncio.run(ask_until(split, prompts, lambda _: kill_with_requests_on_board(split, victim)))
    assert answers == [{tuple(answer["token_ids"])} for answer in plain_answers]
    assert on_board() > before, "nobody was on board of the killed"
    wait_until(lambda: both_are_back(split), START_TIMEOUT_S, "Ray Serve has replaced whom it lost")
    wait_until_nothing_is_held(split, 10 * KEEP_S)


async def ask_until(sluice: Sluice, prompts: list[str], act: Callable[[Event], None]) -> list[set[tuple[int, ...]]]:
    """All that each prompt was answered by clients that ask it again and again until `act` has returned."""
    async with sluice.async_client() as client:

        async def ask_once(number: int) -> tuple[int, ...]:
            return tuple(await ask(client, prompts[number]))

        return [set(answers) for answers in await under_load(ask_once, len(prompts), act)]


def kill_with_requests_on_board(sluice: Sluice, pool: str) -> None:
    process = process_of(sluice, pool)

    def stopped_with_requests() -> bool:
        process.suspend()  # else a short prompt may have left it before it is killed
        status = sluice.status()
        if _holds_requests(status["prefill"] if pool == "prefill" else status):
            return True
        process.resume()
        return False

    wait_until(stopped_with_requests, 120, f"the {pool} replica has requests on board")
    process.kill()


def _holds_requests(pool: dict[str, Any]) -> bool:
    return any(replica["running"] for replica in pool["replicas"].values())
