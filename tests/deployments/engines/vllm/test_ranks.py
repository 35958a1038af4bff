"""Data-parallel engines: which ranks are woken when, and real ones on this machine's processors."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams

from deployments.config.model import DEMO_ARGS, DEMO_MODEL
from deployments.engines.vllm.codec import VllmCodec
from deployments.engines.vllm.engine import VllmEngine
from deployments.engines.vllm.ranks import RankGroup, started_ranks
from deployments.process.environment import REPLICA_ENV
from deployments.process.vllm_env import cpu_env
from policies.errors import ConfigError, ReplicaLostError
from tests.deployments.engines.vllm.requests import request_of
from tests.random_models import write_experts
from tests.waiting import until

TOKENS = 12
WITH_EXPERTS = ("--worker-extension-cls", "tests.experts_on_cpus.ExpertsOnCpus")


class Link:
    """Of a rank: notes the waves that it is told to join."""

    def __init__(self, *, steps_together: bool = True) -> None:
        self.told, self.group = SimpleNamespace(steps_together=steps_together), None
        self.waves: list[int] = []
        self.is_dead = False

    def start_wave(self, wave: int) -> None:
        self.waves.append(wave)

    def died(self) -> None:
        self.is_dead = True


def group_of(links: Sequence[Link]) -> RankGroup:
    return RankGroup(links)  # type: ignore[arg-type]


def waves(links: Sequence[Link]) -> list[list[int]]:
    return [link.waves for link in links]


def test_the_first_request_after_a_rest_wakes_all_other_ranks_and_no_later_one() -> None:
    links = [Link() for _ in range(3)]
    group: Any = group_of(links)
    group.added(links[1])
    group.added(links[0])
    assert waves(links) == [[0], [], [0]]


def test_a_request_that_may_have_come_into_a_rest_wakes_all_again() -> None:
    links = [Link() for _ in range(2)]
    group: Any = group_of(links)
    group.added(links[0])
    group.added(links[0])
    for _ in links:  # each says so
        group.rest(0)
    assert waves(links) == [[1], [0, 1]]
    for _ in links:
        group.rest(1)  # it had been in time
    assert waves(links) == [[1], [0, 1]]
    group.added(links[1])
    assert waves(links) == [[1, 2], [0, 1]]


def test_ranks_without_experts_are_left_alone() -> None:
    links = [Link(steps_together=False) for _ in range(2)]
    group: Any = group_of(links)
    group.added(links[0])
    assert waves(links) == [[], []]
    group.died()
    assert all(link.is_dead for link in links)


class Running:
    """The ranks of an engine, each with what came out of it."""

    def __init__(self, engines: Sequence[VllmEngine]) -> None:
        self.engines, self._codec = engines, VllmCodec()
        self._tokens: dict[str, list[int]] = {}
        self._ended: set[str] = set()
        self._number = 0
        self.readers = [asyncio.create_task(self._read(engine)) for engine in engines]

    async def _read(self, engine: VllmEngine) -> None:
        while True:
            batch = await engine.next_outputs()
            for output in self._codec.decode_outputs(engine.codec.encode_outputs(batch, batch.outputs)).outputs:
                self._tokens[output.request_id] += output.new_token_ids
                if output.finish_reason is not None:
                    self._ended.add(output.request_id)

    async def begin(self, rank: int, prompt: Sequence[int]) -> str:
        self._number += 1
        name = f"{self._number}"
        params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
        request = request_of(*prompt, request_id=name, sampling_params=params)
        self._tokens[name] = []
        engine = self.engines[rank]
        await engine.add(engine.codec.decode_request(self._codec.encode_request(request)))
        return name

    async def answer(self, name: str) -> list[int]:
        await until(lambda: name in self._ended)
        return self._tokens[name]

    async def asked(self, rank: int, prompt: Sequence[int]) -> list[int]:
        return await self.answer(await self.begin(rank, prompt))


Started = Callable[..., Any]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    for name, value in {**cpu_env(eager=True), REPLICA_ENV: "1", "VLLM_LOGGING_LEVEL": "WARNING"}.items():
        monkeypatch.setenv(name, value)

    @asynccontextmanager
    async def starting(model: Path, ranks: int) -> AsyncIterator[Running]:
        argv = ["--model", str(model), *DEMO_ARGS, "--dtype", "float32"]
        parallel = ["--data-parallel-size", str(ranks), *WITH_EXPERTS] if ranks > 1 else []
        engines = await asyncio.to_thread(started_ranks, [*argv, *parallel], None, ranks)
        running = Running(engines)
        try:
            yield running
        finally:
            for reader in running.readers:
                reader.cancel()
            for engine in engines:
                await asyncio.to_thread(engine.shutdown)

    return starting


PROMPTS = [list(range(10 * number + 10, 10 * number + 30)) for number in range(4)]


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("experts", [False, True], ids=["plain", "experts"])
async def test_each_rank_answers_as_one_engine_alone_does(started: Started, tmp_path: Path, experts: bool) -> None:
    if experts:
        write_experts(tmp_path)
    model = tmp_path if experts else DEMO_MODEL
    async with started(model, 1) as alone:
        expected = [await alone.asked(0, prompt) for prompt in PROMPTS]
    async with started(model, 2) as running:
        assert running.engines[0].core.told.steps_together == experts
        for rank in (1, 0, 1):  # the other one has nothing to do
            assert [await running.asked(rank, prompt) for prompt in PROMPTS] == expected
        names = [await running.begin(number % 2, prompt) for number, prompt in enumerate(PROMPTS * 4)]
        assert [await running.answer(name) for name in names] == expected * 4
        for _ in range(20):  # into the rest of the one before, or just before it
            assert await running.asked(1, PROMPTS[0]) == expected[0]
        statuses = [await engine.status() for engine in running.engines]
        assert ["data_parallel" in status["off"]["phases"] for status in statuses] == [experts, experts]
        assert all("exact_hits" not in status["off"] for status in statuses)


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_the_death_of_a_rank_is_that_of_all(started: Started) -> None:
    async with started(DEMO_MODEL, 2) as running:
        running.engines[1].core._process.kill()
        for reader in running.readers:
            with pytest.raises(ReplicaLostError):
                await reader
        assert all(engine.dead for engine in running.engines)


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_where_one_rank_does_not_start_none_is_left(started: Started, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, RuntimeError)):
        async with started(tmp_path / "nothing", 2):
            pass
