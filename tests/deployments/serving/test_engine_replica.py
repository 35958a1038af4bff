"""Two groups of engine replicas: only equals read each other's KV caches."""

import asyncio
import math
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from deployments.config.application import AppConfig
from deployments.config.engine import EngineSection, PrefillSection, Role
from deployments.config.live import EngineTerms, with_live
from deployments.config.router import RouterSection
from deployments.process.log_settings import LogSettings
from deployments.process.ports import SINGLE_PORTS
from deployments.process.vllm_env import NIXL_DELAY_ENV, nixl_env, set_up_gpu_engine
from deployments.serving.engine_replica import EngineReplica, _require_nixl, check_pairs
from deployments.serving.live_settings import LiveSettings
from policies.errors import (
    ConfigError,
    EngineStartError,
    ReplicaLostError,
    SluiceError,
    StateStoreAccessError,
    StateStoreError,
)
from policies.router.tickets import Assignment, Notice, Ticket
from router.redis_store import RedisStateStore, connect
from router.state_store import Queued, ReplicaInfo
from tests.fakes import FakeEngine
from tests.waiting import until


def info(kv_layout: str, replica_id: str = "r") -> ReplicaInfo:
    return ReplicaInfo(
        replica_id=replica_id,
        host="127.0.0.1",
        port=1,
        max_model_len=1,
        kv_layout=kv_layout,
    )


def test_unequal_pairs_are_refused_naming_both_layouts_and_the_way_out() -> None:
    mine = info("dtype=float32 block_size=16")
    check_pairs(mine, [], "decode")
    check_pairs(mine, [info("dtype=float32 block_size=16")], "decode")
    with pytest.raises(ConfigError, match=r"this decode replica has .*block_size=16.* and other .*=32.*--block-size"):
        check_pairs(mine, [info("dtype=float32 block_size=32", "other")], "decode")


def test_nixl_listens_where_the_replica_does_and_on_loopback_alone_there() -> None:
    env = nixl_env("127.0.0.1", on_cpu=True)
    # Not one that the system hands out by itself: Ray would have it before NIXL listens, once the model is loaded.
    assert int(env["VLLM_NIXL_SIDE_CHANNEL_PORT"]) in SINGLE_PORTS
    assert (env["VLLM_NIXL_SIDE_CHANNEL_HOST"], env["UCX_NET_DEVICES"]) == ("127.0.0.1", "lo")
    assert NIXL_DELAY_ENV in env
    elsewhere = nixl_env("0.0.0.0", on_cpu=False)
    assert "UCX_NET_DEVICES" not in elsewhere and NIXL_DELAY_ENV not in elsewhere


class Engine(FakeEngine):
    """It has a cache of some layout, and adapters that may be refused."""

    max_model_len, max_batch_tokens, adapts, ended = 64, 64, True, False
    kv_layout = "block_size=16"
    controlled: Mapping[str, Any] = MappingProxyType({})

    async def load_adapters(self) -> None:
        if not self.adapts:
            raise ValueError("no such rank")

    async def measure(self, seconds: float) -> None:
        """It takes no time."""

    async def control(self, changes: dict[str, Any]) -> dict[str, Any]:
        self.controlled = changes
        return changes

    def shutdown(self) -> None:
        self.ended = True


class Replica(EngineReplica):
    """As Ray Serve makes it: there is one before it is initialized, and it is told to leave also when that failed."""

    leave = EngineReplica.__del__

    def __del__(self) -> None:  # type: ignore[override]
        """Nobody would await it."""


class Fleet:
    """Where replicas start: vLLM is a fake, and one request waits for each group of them."""

    def __init__(self, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self._url, self._redis, self.built = redis_url, connect(redis_url), 0
        prefill = PrefillSection()
        self.config = AppConfig(
            model="m",
            name=uuid4().hex,
            engine=EngineSection(bind_host="127.0.0.1", prefill=prefill, drain_timeout_s=60.0),
            router=RouterSection(silence_s=0.5),
        )
        self.engine, self.logs_by = Engine(), list[LogSettings]()
        self.store = RedisStateStore(self._redis, self.config.namespace("fake-1"))
        self.prefill_store = RedisStateStore(self._redis, self.config.prefill_namespace("fake-1"))
        monkeypatch.setitem(sys.modules, "deployments.engines.vllm.ranks", SimpleNamespace(started_ranks=self._build))
        monkeypatch.setattr("deployments.serving.engine_replica.log_by", self.logs_by.append)
        context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="mine"))
        monkeypatch.setattr("deployments.serving.engine_replica.serve.get_replica_context", lambda: context)

    @property
    def address(self) -> str:
        return self._url.rpartition("@")[2]

    def _build(self, args: object, batch_size: int | None, ranks: int) -> list[Engine]:
        self.built += 1
        return [self.engine, *(Engine() for _ in range(ranks - 1))]

    async def queue(self, request_id: str) -> None:
        ticket = Ticket(request_id=request_id, bin_index=0, deadline_key=0.0, work_s=1.0, router_id="a")
        assert await self.store.enqueue(ticket) == Queued([])

    async def start(self, replica: Replica, role: Role = "decode") -> None:
        await replica.__init__(self.config, self._url, (), role)  # type: ignore[misc]

    async def close(self) -> None:
        await self._redis.aclose()


@pytest.fixture
async def fleet(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fleet]:
    made = Fleet(redis_url, monkeypatch)
    yield made
    await made.close()


def new_replica() -> Replica:
    return Replica.__new__(Replica)


@pytest.mark.parametrize("failing", ["adapters", "pair"])
async def test_a_replica_whose_start_failed_leaves_at_once_though_something_waits(fleet: Fleet, failing: str) -> None:
    fleet.engine.adapts = failing != "adapters"
    if failing == "pair":
        await fleet.prefill_store.register_replica(info("block_size=32", "unequal"), 4)
    await fleet.queue("x")
    replica = new_replica()
    async with asyncio.timeout(50.0):  # a drain would last 60
        with pytest.raises((ConfigError, EngineStartError), match=r"no such rank|block_size=32"):
            await fleet.start(replica)
        await replica.leave()
    assert fleet.engine.ended
    assert await fleet.store.replica_infos() == []


async def test_a_replica_that_is_half_of_an_unequal_pair_is_given_nothing(fleet: Fleet) -> None:
    await fleet.prefill_store.register_replica(info("block_size=32", "unequal"), 4)
    told: list[Notice] = []

    async def listen() -> None:
        async for notices in fleet.store.notices("a"):
            told.extend(notices)
            listening.set()

    listening = asyncio.Event()
    listener = asyncio.create_task(listen())
    await listening.wait()
    await fleet.queue("x")
    with pytest.raises(ConfigError, match="block_size=32"):
        await fleet.start(new_replica())
    await fleet.store.register_replica(info("block_size=16", "equal"), 4)
    await until(lambda: bool(told))
    assert told == [Assignment("x", "equal")]
    listener.cancel()


def fails(
    times: float, call: Callable[..., Awaitable[Any]], error: type[StateStoreError] = StateStoreError
) -> Callable[..., Awaitable[Any]]:
    """As while Redis is away: the first calls fail."""
    left = [times]

    async def called(*args: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            raise error("no answer")
        return await call(*args)

    return called


@pytest.mark.parametrize("name", ["register_replica", "replica_infos"])
async def test_an_engine_that_has_loaded_waits_for_a_redis_that_is_away(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(RedisStateStore, name, fails(2, getattr(RedisStateStore, name)))
    await fleet.queue("x")
    replica = new_replica()
    await fleet.start(replica)
    assert (fleet.built, await fleet.store.locate(["x"])) == (1, ["mine"])
    await fleet.store.cancel(["x"])
    await replica.leave()


@pytest.mark.parametrize("name", ["register_replica", "replica_infos"])
@pytest.mark.parametrize(
    ("times", "error"), [(math.inf, StateStoreError), (1, StateStoreAccessError)], ids=["it is away", "it refuses"]
)
async def test_a_loaded_replica_that_redis_does_not_let_in_leaves_in_time_or_at_once(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, name: str, times: float, error: type[StateStoreError]
) -> None:
    engine = fleet.config.engine.model_copy(update={"start_timeout_s": 2.0})
    fleet.config = fleet.config.model_copy(update={"engine": engine})
    with monkeypatch.context() as away:
        away.setattr(RedisStateStore, name, fails(times, getattr(RedisStateStore, name), error))
        with pytest.raises(error, match="no answer"):
            await fleet.start(new_replica())
    assert fleet.engine.ended
    assert await fleet.store.replica_infos() == []


@pytest.mark.parametrize("name", ["register_replica", "replica_infos"])
async def test_a_replica_told_to_leave_while_it_waits_for_redis_does_not_come_back(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    replica = new_replica()
    with monkeypatch.context() as away:
        away.setattr(RedisStateStore, name, fails(math.inf, getattr(RedisStateStore, name)))
        starting = asyncio.create_task(fleet.start(replica))
        await until(lambda: fleet.built == 1)
        await asyncio.sleep(0.2)  # some heartbeats
        await replica.leave()
    assert fleet.engine.ended
    await asyncio.wait([starting], timeout=0.5)
    assert await fleet.store.replica_infos() == []
    with pytest.raises(SluiceError, match="told to end"):
        starting.result()


async def test_a_replica_told_to_leave_while_its_engine_loads_serves_nothing(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = asyncio.Event()

    async def adapts() -> None:
        loads.set()
        await asyncio.sleep(0.3)

    monkeypatch.setattr(fleet.engine, "load_adapters", adapts)
    replica = new_replica()
    starting = asyncio.create_task(fleet.start(replica))
    await loads.wait()
    await replica.leave()
    await asyncio.wait([starting], timeout=1.0)
    assert await fleet.store.replica_infos() == []
    with pytest.raises(SluiceError, match="told to end"):
        starting.result()


async def test_a_replica_that_redis_refuses_loads_no_model(fleet: Fleet) -> None:
    with pytest.raises(StateStoreAccessError, match="redis_url"):
        await new_replica().__init__(fleet.config, f"redis://:wrong@{fleet.address}")  # type: ignore[misc]
    assert fleet.built == 0


@pytest.mark.parametrize(("cuda", "backend"), [("13.0", "nixl-cu13"), ("12.8", "nixl-cu12"), (None, "nixl-cu12")])
def test_a_nixl_that_does_not_import_is_named_with_the_backend_that_it_lacks(
    cuda: str | None, backend: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The package is there, and raises ImportError where that of torch's version of CUDA is missing."""
    (tmp_path / "nixl.py").write_text("raise ImportError('its backend is not installed')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "nixl", raising=False)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(version=SimpleNamespace(cuda=cuda)))
    with pytest.raises(ConfigError, match=rf"its backend is not installed.*nixl==1\.5\.1 {backend}==1\.5\.1"):
        _require_nixl()


def test_an_engine_on_gpus_chooses_its_threads_and_compiles_nothing_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Ray sets OMP_NUM_THREADS to the CPUs of an actor, and what is set vLLM leaves alone."""
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", "unset")
    monkeypatch.delenv("VLLM_USE_FLASHINFER_SAMPLER")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    caplog.set_level("INFO", logger="deployments.process.vllm_env")
    set_up_gpu_engine({"OMP_NUM_THREADS": "1"})
    assert os.environ["OMP_NUM_THREADS"] == "1"
    assert not caplog.messages
    assert os.environ.pop("VLLM_USE_FLASHINFER_SAMPLER") == "0"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch(0o755)
    set_up_gpu_engine({})
    assert not {"OMP_NUM_THREADS", "VLLM_USE_FLASHINFER_SAMPLER"} & os.environ.keys()
    (said,) = caplog.messages
    assert "OMP_NUM_THREADS=1" in said and "engine.env" in said, "who set it for the node learns how to keep it"


@pytest.mark.slow
def test_threads_are_chosen_before_torch_counts_them() -> None:
    """It reads OMP_NUM_THREADS once, when it is imported."""
    script = "import sys, deployments.serving.engine_replica; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


async def test_a_replica_goes_by_what_routers_tell_of_changed_settings(fleet: Fleet) -> None:
    replica = new_replica()
    await fleet.start(replica)
    fleet.engine.token_s = 0.01
    assert replica._relays[0].slots == fleet.engine.slots
    changed = with_live(
        fleet.config,
        {
            "engine": {"credit_s": 0.5, "scheduler": {"mode": "mixed"}},
            "router": {"max_wait_s": 7},
            "logs": {"level": "DEBUG"},
        },
    )
    await LiveSettings(fleet.store, fleet.config).tell({}, EngineTerms.of(fleet.config, changed, "decode"))
    await until(lambda: fleet.engine.controlled.get("mode") == "mixed")
    assert (replica._terms.now.max_wait_s, replica._relays[0]._board.prompts.max_unread_tokens) == (7, 50)
    assert fleet.logs_by == [LogSettings(), LogSettings(level="DEBUG")]
    await fleet.store._redis.flushall()
    await asyncio.sleep(0.2)  # some heartbeats
    assert replica._terms.now.max_wait_s == 7, "nobody tells of others"
    await replica.leave()


async def test_each_rank_is_a_replica_for_routers_and_all_go_by_the_same_settings(fleet: Fleet) -> None:
    engine = fleet.config.engine.model_copy(update={"prefill": None})
    fleet.config = fleet.config.model_copy(update={"vllm_args": ("--data-parallel-size", "2"), "engine": engine})
    fleet.store = RedisStateStore(fleet._redis, fleet.config.namespace("fake-1"))
    replica = new_replica()
    await fleet.start(replica)
    assert {info.replica_id for info in await fleet.store.replica_infos()} == {"mine-rank0", "mine-rank1"}
    changed = with_live(fleet.config, {"engine": {"scheduler": {"mode": "mixed"}}})
    await LiveSettings(fleet.store, fleet.config).tell({}, EngineTerms.of(fleet.config, changed, "decode"))
    await until(lambda: all(engine.controlled.get("mode") == "mixed" for engine in replica._engines))
    replica.check_health()
    replica._relays[1]._give_up()
    with pytest.raises(ReplicaLostError):
        replica.check_health()
    await replica.leave()
    assert await fleet.store.replica_infos() == []
    assert all(engine.ended for engine in replica._engines)
