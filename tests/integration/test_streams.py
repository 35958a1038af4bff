"""Many streams at once: nothing lost, slots freed, a killed replica unnoticed by clients. Real Redis, Ray and vLLM."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from deployments.config import DEMO_MODEL
from deployments.environment import cpu_env
from tests.integration.application import REPOSITORY, Sluice, wait_until

MAX_TOKENS = 200


@pytest.fixture(scope="session")
def plain_answers(prompts: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Greedy answers of plain vLLM to the same prompts."""
    folder = tmp_path_factory.mktemp("plain")
    source, target = folder / "prompts.json", folder / "answers.json"
    source.write_text(json.dumps({"prompts": prompts, "max_tokens": MAX_TOKENS}))
    script = Path(__file__).with_name("plain_reference.py")
    env = {**os.environ, **cpu_env(), "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    subprocess.run(
        [sys.executable, str(script), str(DEMO_MODEL), str(source), str(target)],
        env=env, cwd=REPOSITORY, check=True, timeout=300,
    )  # fmt: skip
    answers: list[dict[str, Any]] = json.loads(target.read_text())
    return answers


async def stream_one(client: openai.AsyncOpenAI, prompt: str) -> tuple[str, str | None]:
    """Text and finish reason of one streamed greedy answer."""
    stream = await client.chat.completions.create(
        model="sluice-demo",
        messages=[{"role": "user", "content": prompt}],
        temperature=0,
        max_tokens=MAX_TOKENS,
        stream=True,
    )
    text, reason = [], None
    async for chunk in stream:
        text.append(chunk.choices[0].delta.content or "")
        reason = chunk.choices[0].finish_reason or reason
    return "".join(text), reason


async def stream_all(sluice: Sluice, prompts: list[str]) -> list[tuple[str, str | None]]:
    async with sluice.async_client() as client:
        return await asyncio.gather(*(stream_one(client, prompt) for prompt in prompts))


def engines(sluice: Sluice) -> list[dict[str, int]]:
    return [replica["engine"] for replica in sluice.status()["replicas"].values()]


def used_slots(sluice: Sluice) -> int:
    return sum(engine["held"] for engine in engines(sluice))


def waiting(sluice: Sluice) -> int:
    return int(sum(sluice.status()["waiting"].values()))


def all_slots_are_free(sluice: Sluice) -> bool:
    """By the engines' own counts and by the shared state's."""
    status = sluice.status()
    return (
        all(engine.get("running") == engine.get("waiting") == engine.get("held") == 0 for engine in engines(sluice))
        and all(replica["running"] == 0 for replica in status["replicas"].values())
        and not status["waiting"]
    )


def test_greedy_token_ids_equal_those_of_plain_vllm(
    sluice: Sluice, prompts: list[str], plain_answers: list[dict[str, Any]]
) -> None:
    async def ask_all() -> list[list[int]]:
        async with sluice.async_client() as client:
            answers = await asyncio.gather(
                *(
                    client.chat.completions.create(
                        model="sluice-demo",
                        messages=[{"role": "user", "content": prompt}],
                        temperature=0,
                        max_tokens=MAX_TOKENS,
                        extra_body={"return_token_ids": True},
                    )
                    for prompt in prompts
                )
            )
            return [answer.choices[0].model_extra["token_ids"] for answer in answers]

    assert asyncio.run(ask_all()) == [answer["token_ids"] for answer in plain_answers]
    lengths = {len(answer["token_ids"]) for answer in plain_answers}
    assert len(lengths) > 8, f"answers of only these lengths compare too little: {lengths}"


def test_64_streams_use_both_replicas_and_all_end(
    sluice: Sluice, prompts: list[str], plain_answers: list[dict[str, Any]]
) -> None:
    async def watch() -> tuple[list[tuple[str, str | None]], int]:
        streams = asyncio.create_task(stream_all(sluice, prompts))
        most_used = 0
        while not streams.done():
            status = await asyncio.to_thread(sluice.status)
            most_used = max(most_used, sum(replica["running"] > 0 for replica in status["replicas"].values()))
            await asyncio.sleep(0.05)
        return await streams, most_used

    answers, most_used = asyncio.run(watch())
    assert [text for text, _ in answers] == [answer["text"] for answer in plain_answers]
    assert all(reason in ("stop", "length") for _, reason in answers)
    assert most_used == 2
    wait_until(lambda: all_slots_are_free(sluice), 5, "all slots are free again")


def test_24_cancelled_streams_free_their_slots_within_a_second(sluice: Sluice) -> None:
    slots = sum(replica["slots"] for replica in sluice.status()["replicas"].values())
    running, queued = slots, 12

    async def cancel_24() -> float:
        async with sluice.async_client() as client:

            async def run_on(number: int) -> None:
                stream = await client.completions.create(
                    model="sluice-demo", prompt=[300 + number, 11, 13], max_tokens=1900, stream=True,
                    extra_body={"ignore_eos": True},
                )  # fmt: skip
                async for _ in stream:
                    pass

            tasks = [asyncio.create_task(run_on(number)) for number in range(running)]
            await asyncio.to_thread(wait_until, lambda: used_slots(sluice) == slots, 60, "every slot is in use")
            tasks += [asyncio.create_task(run_on(number)) for number in range(running, running + queued)]
            await asyncio.to_thread(wait_until, lambda: waiting(sluice) == queued, 60, "the others are queued")
            # Twelve that run and twelve that wait go first; then all that are left, 24 at once and more.
            for group in ([*tasks[:12], *tasks[-12:]], tasks):
                for task in group:
                    task.cancel()
                await asyncio.gather(*group, return_exceptions=True)
        return time.monotonic()

    ended_s = asyncio.run(cancel_24())
    wait_until(lambda: all_slots_are_free(sluice), 5, "all slots are free again")
    assert time.monotonic() - ended_s < 1.0


def test_a_killed_replica_costs_no_request_and_changes_no_answer(
    sluice: Sluice, prompts: list[str], plain_answers: list[dict[str, Any]]
) -> None:
    victim = sluice.engine_replicas()[0]
    core = victim.children(recursive=True)

    async def kill_under_load() -> list[tuple[str, str | None]]:
        streams = asyncio.create_task(stream_all(sluice, prompts * 3))

        def busy() -> bool:
            return len([r for r in sluice.status()["replicas"].values() if r["running"] >= 16]) == 2

        await asyncio.to_thread(wait_until, busy, 30, "both replicas are busy")
        os.kill(victim.pid, signal.SIGKILL)
        return await streams

    answers = asyncio.run(kill_under_load())
    assert [text for text, _ in answers] == [answer["text"] for answer in plain_answers * 3]
    assert all(reason in ("stop", "length") for _, reason in answers)
    assert _gone(core), "the engine outlived its replica"
    metrics = sluice.metrics()
    moved = sum(
        float(line.rsplit(" ", 1)[1]) for line in metrics if line.startswith("sluice_requests_recovered_total{")
    )
    assert moved > 0, "nothing was on board of the killed replica: the test proved nothing"
    wait_until(lambda: len(sluice.status()["replicas"]) == 2, 120, "Ray Serve has replaced the killed replica")
    wait_until(lambda: all_slots_are_free(sluice), 5, "all slots are free again")


def _gone(processes: list[psutil.Process]) -> bool:
    wait_until(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes), 10, "gone")
    return True
