"""Engine replicas follow the load, and nothing is lost when one leaves."""

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from deployments.command.cores import keep_to
from tests.integration.application import START_TIMEOUT_S, Sluice
from tests.integration.several_models.models import SCALED
from tests.waiting import wait_until

pytestmark = pytest.mark.long


def replicas(sluice: Sluice) -> int:
    return len(sluice.status(SCALED)["replicas"])


@contextmanager
def new_replicas_on(cores: set[int], sluice: Sluice) -> Iterator[None]:
    """For the time of the block."""
    everywhere = os.sched_getaffinity(0)
    try:
        keep_to(cores, sluice.parents_of_new_replicas())
        yield
    finally:
        keep_to(everywhere, sluice.parents_of_new_replicas())


def cores_of_the_new_one(now: list[psutil.Process], before: list[psutil.Process]) -> set[int]:
    (came,) = (process for process in now if process not in before)
    return os.sched_getaffinity(came.pid)


async def test_replicas_come_with_the_load_and_leave_with_it(models: Sluice) -> None:
    await asyncio.to_thread(wait_until, lambda: replicas(models) == 1, START_TIMEOUT_S, "one replica, without load")
    client = models.async_client()

    async def ask_until(done: asyncio.Event, number: int) -> int:
        """Answers received, one after the other. Each client's have a length of their own: if all ended at once, a look
        in between would find nobody at work."""
        answers, tokens = 0, 64 + 8 * number
        while not done.is_set():
            answer = await client.completions.create(
                model=SCALED, prompt=f"Story {number}:", max_tokens=tokens, extra_body={"ignore_eos": True}
            )
            assert answer.usage is not None and answer.usage.completion_tokens == tokens
            answers += 1
        return answers

    everywhere = os.sched_getaffinity(0)
    a_core, relays, engines = {max(everywhere)}, models.engine_replicas(), models.engine_cores()
    done = asyncio.Event()
    with new_replicas_on(a_core, models):
        asking = [asyncio.create_task(ask_until(done, number)) for number in range(16)]
        await asyncio.to_thread(wait_until, lambda: replicas(models) == 2, START_TIMEOUT_S, "a second replica")
    assert cores_of_the_new_one(models.engine_replicas(), relays) == a_core
    assert cores_of_the_new_one(models.engine_cores(), engines) == everywhere, "its engine takes all cores"
    done.set()
    answers = await asyncio.gather(*asking)
    assert all(answers)
    await asyncio.to_thread(wait_until, lambda: replicas(models) == 1, START_TIMEOUT_S, "the second replica has left")
    assert not models.status(SCALED)["waiting"]
