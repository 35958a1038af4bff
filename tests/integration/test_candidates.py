"""A new version beside the old one under load, on real engines: what is worse goes back, and nothing breaks off.

The incumbent runs 32 requests at once. One candidate runs a single one, so the first tokens of its requests wait; the
other, which is as the incumbent, gets copies.
"""

import asyncio
import itertools
import json
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import openai
import pytest
from openai.types.responses import Response
from playwright.sync_api import expect

from tests.integration.application import SLUICE, START_TIMEOUT_S, Sluice
from tests.integration.browser import opened
from tests.waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

OLD, TIGHT, TWIN = "sluice-demo", "tight", "twin"
CLIENTS, TOKENS = 16, 120
SHARE = 0.4
# Of a stream that starts at once a busy machine keeps it; one that waits for several others does not.
PROMISED_S = 1.0


@pytest.fixture(scope="module")
def sluice(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sluice]:
    def model(slots: int, **more: Any) -> dict[str, Any]:
        args = ["--max-num-seqs", str(slots), "--max-model-len", "512"]
        return {"model": "demo", "vllm_args": args, "engine": {"replicas": 1}, **more}

    settings = {
        **model(32),
        "classes": {"standard": {"ttft_s": PROMISED_S}, "offline": {"ttft_s": 60.0, "fills_idle": True}},
        "router": {"replicas": 2},
        "more_models": [
            model(1, served_model_name=TIGHT, candidate={"of": OLD, "share": SHARE}),
            model(32, served_model_name=TWIN, candidate={"of": OLD, "share": 0.5, "mirror": True, "decide": "never"}),
        ],
    }
    with Sluice(tmp_path_factory.mktemp("candidates"), settings=settings) as application:
        yield application


@dataclass(frozen=True)
class Answer:
    """Of one stream: the model that its header named, and those that its chunks did."""

    header: str
    models: frozenset[str]
    tokens: int
    finish: str | None


async def stream(client: openai.AsyncOpenAI, number: int) -> Answer:
    raw = await client.completions.with_raw_response.create(
        model=OLD,
        prompt=f"Story {number}:",
        max_tokens=TOKENS,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    models, tokens, finish = set[str](), 0, None
    async for chunk in raw.parse():
        models.add(chunk.model)
        if chunk.choices:
            finish = chunk.choices[0].finish_reason or finish
        if chunk.usage is not None:
            tokens = chunk.usage.completion_tokens
    return Answer(raw.headers["x-sluice-model"], frozenset(models), tokens, finish)


def told(sluice: Sluice, name: str) -> dict[str, Any]:
    (found,) = [each for each in sluice.status()["candidates"] if each["model"] == name]
    return found


async def load_until_rolled_back(sluice: Sluice) -> list[Answer]:
    """All answers, those that ran at the verdict among them: clients who ask one after the other."""
    numbers, over = itertools.count(), asyncio.Event()
    answers: list[Answer] = []

    async def ask(client: openai.AsyncOpenAI) -> None:
        while not over.is_set():
            answers.append(await stream(client, next(numbers)))

    def look() -> None:
        wait_until(lambda: told(sluice, TIGHT)["in_force"] != "wait", 300, "the candidate is rolled back")

    async with sluice.async_client() as client:
        asking = asyncio.gather(*(ask(client) for _ in range(CLIENTS)))
        try:
            await asyncio.to_thread(look)
        finally:
            over.set()
            await asking
    return answers


def test_a_session_and_a_conversation_stay_with_their_version(sluice: Sluice) -> None:
    client = sluice.client()

    def answered(**more: Any) -> Response:
        return client.responses.create(model=OLD, input="Name a river.", max_output_tokens=4, **more)

    first: dict[str, Response] = {}
    while len(first) < 2:
        response = answered()
        first[response.model] = response
    assert first.keys() == {OLD, TIGHT}
    for made_by, response in first.items():
        for _ in range(4):
            response = answered(previous_response_id=response.id)
            assert response.model == made_by
    for number in range(6):
        headers = {"x-sluice-session": f"session {number}"}
        assert len({answered(extra_headers=headers).model for _ in range(3)}) == 1


def test_a_candidate_whose_promises_fail_is_rolled_back_under_load_and_every_stream_ends_whole(
    sluice: Sluice,
) -> None:
    answers = asyncio.run(load_until_rolled_back(sluice))
    found = told(sluice, TIGHT)
    print(f"{len(answers)} streams; {json.dumps(found)}")
    assert (found["in_force"], found["verdict"], found["answers_share"]) == ("roll_back", "roll_back", 0.0), found
    assert all((answer.tokens, answer.finish) == (TOKENS, "length") for answer in answers)
    assert all(answer.models == {answer.header} for answer in answers)
    by = [answer.header for answer in answers]
    assert set(by) == {OLD, TIGHT}
    assert found["candidate"]["missed"] > 0 == found["candidate"]["failed"] == found["incumbent"]["failed"]
    assert "candidate tight of sluice-demo: rolled back" in logged(sluice)


def logged(sluice: Sluice) -> str:
    return "".join(log.read_text() for log in sluice.logs.glob("worker-*.err"))


def test_afterwards_all_go_to_the_incumbent_by_the_word_of_every_router(sluice: Sluice) -> None:
    """After the test above."""

    async def ask() -> list[Answer]:
        async with sluice.async_client() as client:
            return await asyncio.gather(*(stream(client, number) for number in range(CLIENTS)))

    assert {answer.header for answer in asyncio.run(ask())} == {OLD}
    verdicts = sluice.series("sluice_candidate_verdict", model=TIGHT, of=OLD)
    assert verdicts == [-1.0, -1.0]
    assert sluice.client().completions.create(model=TIGHT, prompt="Mine:", max_tokens=2).model == TIGHT


def test_copies_are_compared_and_nobody_sees_or_pays_for_them(sluice: Sluice) -> None:
    """After the tests above, whose requests were copied where an idle replica had time for them."""
    wait_until(lambda: told(sluice, TWIN)["candidate"]["requests"] > 0, 120, "copies have ended")
    found = told(sluice, TWIN)
    print(json.dumps(found))
    assert found["in_force"] == "wait" and found["answers_share"] == 0.0
    pairs = found["candidate"]["requests"]
    assert found["incumbent"]["requests"] == pairs and found["candidate"]["failed"] == 0
    assert found["candidate"]["mean_output_tokens"] == found["incumbent"]["mean_output_tokens"] == TOKENS
    classes = {
        name: sluice.counted("sluice_requests_total", model=TWIN, slo_class=name) for name in ("standard", "offline")
    }
    assert classes["standard"] == 0 < classes["offline"]


def test_a_router_that_starts_anew_obeys_what_was_decided_before(sluice: Sluice) -> None:
    """After the tests above."""
    killed = sluice.routers()[0]
    others = {router.pid for router in sluice.routers()}
    killed.kill()

    def said_by_a_new_one() -> dict[str, Any] | None:
        status = sluice.status()
        return status if status["answered_by"]["pid"] not in others else None

    status = wait_until(said_by_a_new_one, START_TIMEOUT_S, "a new router answers")
    (found,) = [each for each in status["candidates"] if each["model"] == TIGHT]
    assert (found["in_force"], found["answers_share"]) == ("roll_back", 0.0)
    assert found["candidate"]["missed"] > 0, "on which it was decided"


def test_the_page_and_the_command_show_both(sluice: Sluice) -> None:
    command = [SLUICE, "status", "--url", sluice.url]
    env = {**os.environ, "NO_PROXY": "127.0.0.1"}
    shown = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True, env=env).stdout
    assert re.search(rf"^{TIGHT} +{OLD} +40.0 % +roll back +roll back +candidate ", shown, re.MULTILINE), shown
    with opened(sluice.url) as page:
        rows = page.locator("#candidates tbody tr")
        expect(rows.nth(0)).to_contain_text(re.compile(f"{TIGHT}.*{OLD}.*roll back.*candidate"))
        expect(rows.nth(2)).to_contain_text(re.compile(f"{TWIN}.*50.0 % in copies.*wait"))
