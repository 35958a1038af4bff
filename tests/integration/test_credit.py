"""A replica offers what its scheduler would really admit, so requests wait in their bins and not inside the engine."""

import asyncio
import statistics
from collections.abc import Iterator

import openai
import pytest

from tests.integration.application import Sluice, free_port, wait_until

SLOTS, STREAMS, TOKENS = 32, 48, 96
# A cache for some nine of these answers at their full length.
OPTIONS = (
    *("--engine-replicas", "1", "--"),
    *("--max-num-seqs", str(SLOTS), "--max-model-len", "512", "--block-size", "32", "--num-gpu-blocks-override", "36"),
)


@pytest.fixture
def tight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sluice]:
    application = Sluice(tmp_path_factory.mktemp("tight"), free_port(), *OPTIONS)
    try:
        yield application.wait_until_ready()
    finally:
        application.interrupt()


async def _answer(client: openai.AsyncOpenAI, number: int) -> int:
    answer = await client.completions.create(
        model="sluice-demo", prompt=f"{number} rivers:", max_tokens=TOKENS, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None
    return answer.usage.completion_tokens


async def _answers_and_looks(application: Sluice) -> tuple[list[int], list[dict[str, int]]]:
    """Tokens of every answer, and what the replica said of itself meanwhile."""
    looks = []
    async with application.async_client() as client:
        answers = asyncio.gather(*(_answer(client, number) for number in range(STREAMS)))
        while not answers.done():
            status = await asyncio.to_thread(application.status)
            (replica,) = status["replicas"].values()
            looks.append({"slots": replica["slots"], "in_bins": sum(status["waiting"].values()), **replica["engine"]})
            await asyncio.sleep(0.1)
        return await answers, looks


def test_with_a_small_cache_requests_wait_in_their_bins(tight: Sluice) -> None:
    assert asyncio.run(_answers_and_looks(tight))[0] == [TOKENS] * STREAMS  # what lengths are, is learned from these
    wait_until(lambda: next(iter(tight.status()["replicas"].values()))["running"] == 0, 10, "the first round is over")
    answers, looks = asyncio.run(_answers_and_looks(tight))
    assert answers == [TOKENS] * STREAMS
    busy = [look for look in looks if look["in_bins"]]
    assert len(busy) > 5, "nobody had to wait: this test shows nothing"
    assert statistics.median(look["slots"] for look in busy) < SLOTS // 2, "the memory's limit reaches the routers"
    assert statistics.median(look["waiting"] for look in busy) <= 8, "the engine's own queue stays short"
    preempted = looks[-1]["preemptions"] - looks[0]["preemptions"]
    assert preempted < STREAMS // 4, "who knows the lengths admits what fits"
