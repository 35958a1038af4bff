"""A replica offers what its scheduler would really admit, so requests wait in their bins and not inside the engine."""

import asyncio
import statistics
from typing import Any

import openai
import pytest

from tests.integration.application import Sluice
from tests.integration.several_models.models import TIGHT, TIGHT_SLOTS
from tests.waiting import wait_until

pytestmark = pytest.mark.long

STREAMS, TOKENS = 40, 96
# While this process or the server stands still nobody looks: then there is another round.
LOOKS, MOST_ROUNDS = 8, 6


async def _answer(client: openai.AsyncOpenAI, number: int) -> int:
    answer = await client.completions.create(
        model=TIGHT, prompt=f"{number} rivers:", max_tokens=TOKENS, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None
    return answer.usage.completion_tokens


async def _answers_and_looks(application: Sluice) -> tuple[list[int], list[dict[str, int]]]:
    """Tokens of every answer, and what the replica said of itself meanwhile."""
    looks = []
    async with application.async_client() as client:
        answers = asyncio.gather(*(_answer(client, number) for number in range(STREAMS)))
        while not answers.done():
            looks.append(await asyncio.to_thread(_look, application))
            await asyncio.sleep(0.1)
        return await answers, looks


def _look(application: Sluice) -> dict[str, int]:
    status = wait_until(lambda: _if_answered(application.status(TIGHT)), 120, "the engine says what it does")
    (replica,) = status["replicas"].values()
    engine = {name: replica["engine"][name] for name in ("running", "waiting", "preemptions")}
    return {"slots": replica["slots"], "held": replica["running"], "in_bins": sum(status["waiting"].values()), **engine}


def _if_answered(status: dict[str, Any]) -> dict[str, Any] | None:
    """An engine that is busy may find no time to."""
    return status if all("running" in replica["engine"] for replica in status["replicas"].values()) else None


def test_with_a_small_cache_requests_wait_in_their_bins(models: Sluice) -> None:
    assert asyncio.run(_answers_and_looks(models))[0] == [TOKENS] * STREAMS  # what lengths are, is learned from these
    busy: list[dict[str, int]] = []
    rounds = preempted = 0
    while len(busy) < LOOKS and rounds < MOST_ROUNDS:
        wait_until(lambda: _look(models)["held"] == 0, 120, "the round before is over")
        before = _look(models)["preemptions"]
        answers, looks = asyncio.run(_answers_and_looks(models))
        assert answers == [TOKENS] * STREAMS
        busy += [look for look in looks if look["in_bins"]]
        preempted += _look(models)["preemptions"] - before
        rounds += 1
    assert len(busy) >= LOOKS, f"nobody had to wait, so this shows nothing: {busy}"
    assert statistics.median(look["slots"] for look in busy) < 3 * TIGHT_SLOTS // 4, f"memory limits the offer: {busy}"
    assert statistics.median(look["waiting"] for look in busy) < TIGHT_SLOTS // 4, f"few wait in the engine: {busy}"
    assert preempted < rounds * STREAMS // 4, f"who knows the lengths admits what fits: {busy}"
