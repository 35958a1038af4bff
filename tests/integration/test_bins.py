"""Whole batches of one bin to a replica of vLLM: real routers, Redis, Ray Serve and engine, which is killed in one."""

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from tests.integration.application import EXACT, START_TIMEOUT_S, Sluice
from tests.waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

# So long that a machine that stands still for seconds lets a test fill a batch, and two requests wait it out.
BATCH_SIZE, WAIT_S = 3, 15.0
EDGE_TOKENS = 18.0
# A request is predicted no fewer tokens than it must have and no more than it may.
BRIEF: dict[str, Any] = {"max_tokens": 12}
LONG: dict[str, Any] = {"max_tokens": 1500, "extra_body": {"ignore_eos": True}}
SETTINGS = {
    "bins": {
        "count": 2,
        "rule": "fixed",
        "edges": [0.0, EDGE_TOKENS, 100_000.0],
        "dispatch": "batches",
        "serving": "shortest_first",
    },
    "engine": {"replicas": 1, "gang": {"batch_size": BATCH_SIZE, "max_wait_s": WAIT_S}},
    "router": {"silence_s": 5},
    "vllm_args": [*EXACT],
}


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sluice]:
    with Sluice(tmp_path_factory.mktemp("bins"), settings=SETTINGS) as application:
        yield application


def replica(sluice: Sluice) -> dict[str, Any]:
    (found,) = sluice.status()["replicas"].values()
    return dict(found)


async def shows(sluice: Sluice, *, waiting: dict[str, int], running: int) -> None:
    def it_does() -> bool:
        status = sluice.status()
        on = [each["running"] for each in status["replicas"].values()]
        return (status["waiting"], on) == (waiting, [running])

    await asyncio.to_thread(wait_until, it_does, START_TIMEOUT_S, f"waiting {waiting}, running {running}")


def went(sluice: Sluice) -> dict[str, int]:
    return dict(sluice.status()["batches"])


class Asked:
    """A streamed answer to one prompt, from when it was asked for."""

    def __init__(self, sluice: Sluice, prompt: str, **options: Any) -> None:
        self.text, self.began = "", asyncio.Event()
        self._start_s, self.first_token_s = time.monotonic(), 0.0
        self.task = asyncio.create_task(self._read(sluice, prompt, options))

    async def _read(self, sluice: Sluice, prompt: str, options: dict[str, Any]) -> str:
        async with sluice.async_client() as client:
            stream = await client.completions.create(
                model="sluice-demo", prompt=prompt, temperature=0, stream=True, **options
            )
            async for chunk in stream:
                if not self.began.is_set():
                    self.first_token_s = time.monotonic() - self._start_s
                    self.began.set()
                self.text += chunk.choices[0].text
        return self.text


def ask(sluice: Sluice, count: int, **options: Any) -> list[Asked]:
    return [Asked(sluice, f"Tell me {number} things about the moon.", **options) for number in range(count)]


async def test_full_batches_go_at_once_and_the_rest_when_its_wait_is_over(batches: Sluice) -> None:
    """Two batches, and two requests that are none; nothing is known of lengths yet, so all are of one bin."""
    assert went(batches) == {}
    asked = ask(batches, 2 * BATCH_SIZE + 2, **BRIEF)
    await asyncio.gather(*(each.task for each in asked))
    assert went(batches) == {"0:full": 2, "0:waited": 1}
    waits = sorted(each.first_token_s for each in asked)
    assert all(wait_s > WAIT_S for wait_s in waits[-2:])
    assert all(wait_s < WAIT_S for wait_s in waits[: 2 * BATCH_SIZE])


def predictions_are_there(sluice: Sluice) -> bool:
    """The router has exchanged the lengths of what has ended."""
    with redis.Redis.from_url(sluice.redis_url()) as client:
        return any(int(client.get(key) or 0) >= 2 * BATCH_SIZE + 2 for key in client.scan_iter("*:lengths_total"))


async def test_batches_are_of_one_bin_and_a_replica_takes_the_next_when_one_has_ended(batches: Sluice) -> None:
    await asyncio.to_thread(wait_until, lambda: predictions_are_there(batches), 60, "lengths were exchanged")
    before = went(batches)
    asked = [*ask(batches, BATCH_SIZE - 1, **BRIEF), *ask(batches, BATCH_SIZE - 1, **LONG)]
    await shows(batches, waiting={"standard:0": BATCH_SIZE - 1, "standard:1": BATCH_SIZE - 1}, running=0)
    long = [*asked[BATCH_SIZE - 1 :], *ask(batches, 1, **LONG)]
    await asyncio.gather(*(each.began.wait() for each in long))  # together, and the others wait
    brief = [*asked[: BATCH_SIZE - 1], *ask(batches, 1, **BRIEF)]
    await shows(batches, waiting={"standard:0": BATCH_SIZE}, running=BATCH_SIZE)
    assert replica(batches)["takes_batches"] and replica(batches)["slots"] == BATCH_SIZE
    assert not any(each.began.is_set() for each in brief)
    for each in long:
        each.task.cancel()
    await asyncio.gather(*(each.task for each in brief))
    await shows(batches, waiting={}, running=0)
    after = went(batches)
    assert {name: after[name] - before.get(name, 0) for name in after} == {"0:full": 1, "0:waited": 0, "1:full": 1}
    assert batches.status()["bin_edges_tokens"] == SETTINGS["bins"]["edges"]  # type: ignore[index]
    assert batches.counted("sluice_batches_total", why="full") >= 1


async def test_a_batch_whose_engine_is_killed_goes_on_as_one_on_the_next(batches: Sluice) -> None:
    middle = {"max_tokens": 1000, "extra_body": {"ignore_eos": True}}
    whole = await asyncio.gather(*(each.task for each in ask(batches, BATCH_SIZE, **middle)))
    asked = ask(batches, BATCH_SIZE, **middle)
    await asyncio.gather(*(each.began.wait() for each in asked))
    (core,) = batches.engine_cores()
    core.kill()
    assert not any(each.task.done() for each in asked)
    assert await asyncio.gather(*(each.task for each in asked)) == whole
    assert batches.counted("sluice_requests_recovered_total", way="resumed") == BATCH_SIZE
    await shows(batches, waiting={}, running=0)
