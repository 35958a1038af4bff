"""The application of most tests, prompts, and what plain vLLM answers to them."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from threading import Event
from typing import Any, TypeVar

import pytest

from deployments.config.model import DEMO_MODEL
from deployments.process.vllm_env import cpu_env
from tests.integration.application import EXACT, REPOSITORY, START_TIMEOUT_S, Sluice
from tests.otlp_receiver import Receiver, receiving
from tests.waiting import wait_until

AnswerT = TypeVar("AnswerT")

MAX_TOKENS = 80  # enough for some answers to end by themselves, and to be killed in the middle of
# Few slots, so that a test can fill them without being kept busy by its own streams.
OPTIONS = ("--router-replicas", "2", "--batch-folder", "batches", "--", "--max-num-seqs", "16", *EXACT)


@pytest.fixture(scope="session", autouse=True)
def _installed_from_here() -> None:
    """What `sluice` starts must be what is tested: an environment may have been installed from another folder since."""
    command = [sys.executable, "-P", "-c", "import deployments; print(deployments.__file__)"]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    assert Path(found).is_relative_to(REPOSITORY), f"sluice runs {found}: remove .venv, and `make test` makes it again"


async def under_load(
    ask: Callable[[int], Awaitable[AnswerT]], clients: int, act: Callable[[Event], None]
) -> list[list[AnswerT]]:
    """The answers to each client; all ask again and again until `act`, in a thread, has returned.

    So `act` may wait for a moment that a slow machine would miss under a load that ends by itself. It may set the event
    for nobody to ask anything new from then on.
    """
    enough = Event()

    async def client(number: int) -> list[AnswerT]:
        answers = [await ask(number)]
        while not enough.is_set():
            answers.append(await ask(number))
        return answers

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(client(number)) for number in range(clients)]
        await asyncio.to_thread(act, enough)
        enough.set()
    return [task.result() for task in tasks]


@pytest.fixture(scope="session")
def receiver() -> Iterator[Receiver]:
    """The receiver of the traces of `sluice`."""
    with receiving() as started:
        yield started


@pytest.fixture(scope="session")
def sluice(
    request: pytest.FixtureRequest, receiver: Receiver, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Sluice]:
    """Two routers, two engine replicas, the demo model, batches and traces: for all of `one_model`."""
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.target, "OTEL_BSP_SCHEDULE_DELAY": "200"}  # they are sent soon
    with Sluice(tmp_path_factory.mktemp("sluice"), *OPTIONS, env=env) as application:
        if any("plain_answers" in getattr(item, "fixturenames", ()) for item in request.session.items):
            request.getfixturevalue("plain_vllm")  # answers while tests run that need no answers of its yet
        yield application


@pytest.fixture(scope="session")
def prompts() -> list[str]:
    """64 prompts of many lengths and subjects."""
    subjects = (
        *("rivers", "a bag of buttons", "the moon", "bread"),
        *("a film festival", "seven apples", "cats", "a garden"),
    )
    asks = [
        "Name three facts about {}.",
        "Write a short story about {}.",
        "How many {} are there if every one of 12 children has 3?",
        "Explain {} to a child in simple words, and give an example.",
        "What is the best way to think about {}?",
        "List the steps to draw {}.",
        "Say something about {} and then say why it matters to people who live far away from it. " * 6,
        "Is {} real?",
    ]
    return [ask.replace("{}", subject) for ask in asks for subject in subjects]


@pytest.fixture(scope="session")
def plain_vllm(
    prompts: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """The process that asks plain vLLM the same prompts, and the folder of its answers and its output."""
    folder = tmp_path_factory.mktemp("plain")
    source, target = folder / "prompts.json", folder / "answers.json"
    source.write_text(json.dumps({"prompts": prompts, "max_tokens": MAX_TOKENS, "dtype": EXACT[1]}))
    script = Path(__file__).with_name("plain_reference.py")
    env = {**os.environ, **cpu_env(), "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [sys.executable, str(script), str(DEMO_MODEL), str(source), str(target)]
    with (folder / "output.log").open("wb") as output:
        process = subprocess.Popen(command, env=env, cwd=REPOSITORY, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield process, folder
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="session")
def plain_answers(plain_vllm: tuple[subprocess.Popen[bytes], Path]) -> list[dict[str, Any]]:
    """Its greedy answers."""
    process, folder = plain_vllm
    wait_until(lambda: process.poll() is not None, START_TIMEOUT_S, "plain vLLM has answered")
    assert process.returncode == 0, (folder / "output.log").read_text()
    answers: list[dict[str, Any]] = json.loads((folder / "answers.json").read_text())
    return answers
