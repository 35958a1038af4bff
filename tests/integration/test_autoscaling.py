"""Engine replicas follow the load, and nothing is lost when one leaves."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.integration.application import Sluice, free_port, wait_until

PATIENCE_S = 180


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sluice]:
    folder = tmp_path_factory.mktemp("scaled")
    scaling = {"max_replicas": 2, "upscale_delay_s": 2.0, "downscale_delay_s": 4.0, "interval_s": 0.5}
    config = folder / "scaled.yaml"
    config.write_text(yaml.safe_dump({"engine": {"autoscaling": scaling, "drain_timeout_s": 60}}))
    application = Sluice(folder, free_port(), "--config", str(config), "--", "--max-num-seqs", "8")
    try:
        yield application.wait_until_ready()
    finally:
        if application.process.poll() is None:
            application.interrupt()


def replicas(sluice: Sluice) -> int:
    return len(sluice.status()["replicas"])


async def test_replicas_come_with_the_load_and_leave_with_it(scaled: Sluice) -> None:
    assert replicas(scaled) == 1
    client = scaled.async_client()

    async def ask_until(done: asyncio.Event, number: int) -> int:
        """Answers received, one after the other."""
        answers = 0
        while not done.is_set():
            answer = await client.completions.create(
                model="sluice-demo", prompt=f"Story {number}:", max_tokens=200, extra_body={"ignore_eos": True}
            )
            assert answer.usage is not None and answer.usage.completion_tokens == 200
            answers += 1
        return answers

    done = asyncio.Event()
    asking = [asyncio.create_task(ask_until(done, number)) for number in range(16)]
    await asyncio.to_thread(wait_until, lambda: replicas(scaled) == 2, PATIENCE_S, "a second replica")
    done.set()
    answers = await asyncio.gather(*asking)
    assert all(answers)
    await asyncio.to_thread(wait_until, lambda: replicas(scaled) == 1, PATIENCE_S, "the second replica has left")
    assert not scaled.status()["waiting"]


def test_what_it_needs_is_in_the_configuration(tmp_path: Path) -> None:
    config = tmp_path / "wrong.yaml"
    config.write_text(yaml.safe_dump({"engine": {"autoscaling": {"min_replicas": 3, "max_replicas": 2}}}))
    wrong = Sluice(tmp_path, free_port(), "--config", str(config))
    assert wrong.process.wait(60) != 0
    assert "max_replicas (2) is below min_replicas (3)" in wrong.output()
