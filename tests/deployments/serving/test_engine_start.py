"""An engine that does not come up is ended in time, and says why."""

import asyncio
import multiprocessing
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Literal, NoReturn

import pytest

from deployments.config.application import AppConfig
from deployments.config.engine import EngineSection, GangSection
from deployments.config.lengths import BinsSection
from deployments.serving.engine_start import started_engines
from policies.errors import EngineStartError
from tests.fakes import FakeEngine
from tests.waiting import until

pytestmark = pytest.mark.timeout(120)


def within(start_timeout_s: float) -> AppConfig:
    return AppConfig(model="m", engine=EngineSection(start_timeout_s=start_timeout_s))


class Adapting(FakeEngine):
    """Its process is real, and `load_adapters` does what it is told."""

    def __init__(self, adapt: Callable[[], Any]) -> None:
        super().__init__()
        self._adapt, self.ended = adapt, False
        self.process = sleeping_process()

    async def load_adapters(self) -> None:
        await self._adapt()

    async def measure(self, seconds: float) -> None:
        """It takes no time."""

    def shutdown(self) -> None:
        self.ended = True
        self.process.kill()


def sleeping_process() -> Any:
    process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,), daemon=True)
    process.start()
    return process


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], None]:
    """Puts something else in the place of vLLM."""

    def stands_in(make: Callable[..., Any]) -> None:

        def ranks(argv: list[str], batch_size: int | None, count: int) -> list[Any]:
            return [make(argv, batch_size) for _ in range(count)]

        monkeypatch.setitem(sys.modules, "deployments.engines.vllm.ranks", SimpleNamespace(started_ranks=ranks))
        monkeypatch.setattr("deployments.serving.engine_start.last_line", lambda logs: "Loading weights: 3 of 9")
        monkeypatch.setattr("deployments.serving.engine_start.last_error", lambda log: "ValueError: no memory left")

    return stands_in


async def nothing() -> None: ...


async def for_ever() -> None:
    await asyncio.Event().wait()


async def test_an_engine_that_does_not_start_says_why(vllm: Any) -> None:
    def fails(*args: object) -> NoReturn:
        raise RuntimeError("see root cause above")

    vllm(fails)
    with pytest.raises(EngineStartError, match="did not start: ValueError: no memory left"):
        await started_engines(AppConfig(model="m"), "decode")


async def test_an_engine_that_never_starts_is_ended_within_its_time(vllm: Any) -> None:
    started: list[Any] = []

    def hangs(*args: object) -> NoReturn:
        started.append(sleeping_process())
        started[0].join()  # as vLLM waits: without a limit, but until the process ends
        raise RuntimeError("see root cause above")

    vllm(hangs)
    with pytest.raises(EngineStartError, match=r"within 4 s \(engine.start_timeout_s\).*Loading weights: 3 of 9"):
        await started_engines(within(4.0), "decode")
    await until(lambda: not started[0].is_alive())


@pytest.mark.parametrize("question", ["status", "adapters"])
async def test_an_engine_that_loads_and_then_answers_nothing_is_ended_within_its_time(vllm: Any, question: str) -> None:
    engine = Adapting(for_ever if question == "adapters" else nothing)
    engine.hangs = question == "status"
    vllm(lambda *args: engine)
    with pytest.raises(EngineStartError, match=r"within 0.5 s \(engine.start_timeout_s\)"):
        await started_engines(within(0.5), "decode")
    await until(lambda: not engine.process.is_alive())


@pytest.mark.parametrize("error", [ValueError("no such rank"), TimeoutError("no such rank")])
async def test_an_engine_that_refuses_its_adapters_is_shut_down_and_says_why(vllm: Any, error: Exception) -> None:
    async def refuse() -> NoReturn:
        raise error

    engine = Adapting(refuse)
    vllm(lambda *args: engine)
    with pytest.raises(EngineStartError, match="has loaded, but cannot serve: no such rank"):
        await started_engines(within(600.0), "decode")
    assert engine.ended


async def test_a_time_limit_of_the_engines_own_is_not_taken_for_ours(vllm: Any) -> None:
    def fails(*args: object) -> NoReturn:
        raise TimeoutError("the hub of models does not answer")

    vllm(fails)
    with pytest.raises(TimeoutError, match="the hub of models"):
        await started_engines(within(600.0), "decode")


async def test_a_start_that_is_cancelled_leaves_no_engine(vllm: Any) -> None:
    engine = Adapting(for_ever)
    vllm(lambda *args: engine)
    starting = asyncio.create_task(started_engines(within(600.0), "decode"))
    await until(engine.process.is_alive)
    await asyncio.sleep(0.1)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await until(lambda: not engine.process.is_alive())


@pytest.mark.parametrize(("dispatch", "told"), [("requests", None), ("batches", 24)])
async def test_an_engine_is_told_how_many_make_a_batch_where_it_takes_batches(
    vllm: Any, dispatch: Literal["requests", "batches"], told: int | None
) -> None:
    given: list[object] = []

    def starts(args: object, batch_size: int | None) -> Adapting:
        given.append(batch_size)
        return Adapting(nothing)

    vllm(starts)
    gang = GangSection(batch_size=24) if dispatch == "batches" else GangSection()
    config = AppConfig(model="m", bins=BinsSection(dispatch=dispatch), engine=EngineSection(gang=gang))
    (engine,) = await started_engines(config, "decode")
    engine.shutdown()
    assert given == [told]


async def test_where_one_rank_cannot_serve_none_is_left(vllm: Any) -> None:
    async def refuse() -> NoReturn:
        raise ValueError("no such rank")

    engines = [Adapting(nothing), Adapting(refuse)]
    waiting = iter(engines)
    vllm(lambda *args: next(waiting))
    config = AppConfig(model="m", vllm_args=("--data-parallel-size", "2"))
    with pytest.raises(EngineStartError, match="cannot serve: no such rank"):
        await started_engines(config, "decode")
    assert [engine.ended for engine in engines] == [True, True]
