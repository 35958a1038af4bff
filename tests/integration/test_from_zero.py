"""A model whose last engine ends where no request comes, and whose first one starts when a request comes."""

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.integration.application import START_TIMEOUT_S, Sluice, chat
from tests.waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

SETTINGS: dict[str, Any] = {
    "classes": {"standard": {"ttft_s": 600}, "quick": {"ttft_s": 0.5, "when_late": "refuse"}},
    "engine": {
        "num_cpus": 0,
        "drain_timeout_s": 60,
        "autoscaling": {"min_replicas": 0, "max_replicas": 2, "downscale_to_zero_delay_s": 4.0},
    },
}


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sluice]:
    with Sluice(tmp_path_factory.mktemp("zero"), settings=SETTINGS) as application:
        yield application


def asleep(sluice: Sluice) -> bool:
    return str(sluice.status()["without_replicas"]).startswith("none is needed") and not sluice.engine_replicas()


async def test_the_last_one_ends_and_requests_wait_for_the_first_one(scaled: Sluice) -> None:
    await asyncio.to_thread(wait_until, lambda: asleep(scaled), START_TIMEOUT_S, "the last engine has ended")
    assert scaled.get("/health") == b""
    async with scaled.async_client() as client:
        answers = await asyncio.gather(
            *(client.chat.completions.create(**chat(f"Name {n} rivers.", max_tokens=16)) for n in range(8))
        )
    assert [answer.choices[0].finish_reason for answer in answers] == ["length"] * 8
    assert scaled.status()["without_replicas"] is None


async def test_what_would_be_late_is_told_how_long_a_start_takes_and_has_one_start(scaled: Sluice) -> None:
    await asyncio.to_thread(wait_until, lambda: asleep(scaled), START_TIMEOUT_S, "the last engine has ended")
    assert "the last start took" in scaled.status()["without_replicas"]
    quick = {"X-Sluice-Class": "quick"}
    async with scaled.async_client() as client:
        with pytest.raises(openai.RateLimitError, match="late") as refused:
            await client.chat.completions.create(**chat("Name a river.", max_tokens=4), extra_headers=quick)
        assert int(refused.value.response.headers["retry-after"]) >= 1
        await asyncio.to_thread(wait_until, lambda: scaled.status()["replicas"], START_TIMEOUT_S, "an engine is there")
        answer = await client.chat.completions.create(**chat("Name a river.", max_tokens=4), extra_headers=quick)
    assert answer.choices[0].finish_reason == "length"
