"""The relay as a router sees it, frame by frame, over real TCP."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from deployments.engines import relay as relay_module
from deployments.engines import router_link
from deployments.engines.on_board import StepSpeed
from deployments.engines.relay import Relay, RelayConfig
from deployments.process.ports import free_port
from deployments.process.ray_tls import AUTHORITY_ENV, CERTIFICATE_ENV, KEY_ENV, USE_TLS_ENV, WireTls, wire_tls
from policies.errors import ConfigError, EngineCallError, ProtocolError, ReplicaLostError, StateStoreError
from policies.router.tickets import Ticket
from policies.types import StepCoefficients, StepTimes
from router import wire
from router.cached_blocks import BlockChanges, BlockSet
from router.connection import ReplicaConnection
from router.connections import STATUS_TIMEOUT_S
from router.redis_store import RedisStateStore, connect
from router.state_store import Queued, ReplicaInfo
from router.wire import Buffer
from tests.authority import Authority
from tests.fakes import FakeCache, FakeCodec, FakeEngine, FakeOutput, FakeRequest, ManualClock, undisturbed
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.timeout(120)

CODEC = FakeCodec()


class Reader:
    """One router's connection, and what came over it."""

    def __init__(self, connection: ReplicaConnection) -> None:
        self.connection = connection
        self.outputs: list[FakeOutput] = []
        self.changes: list[BlockChanges] = []
        self.ended = asyncio.create_task(connection.run(self._take, lambda _, changes: self.changes.append(changes)))

    async def _take(self, connection: ReplicaConnection, parts: Sequence[Buffer]) -> None:
        self.outputs += CODEC.decode_outputs(parts).outputs

    def tokens(self, request_id: str) -> list[int]:
        return [token for o in self.outputs if o.request_id == request_id for token in o.new_token_ids]

    def add(self, request_id: str, max_tokens: int = 5) -> None:
        asked = FakeRequest(request_id=request_id, prompt=[1, 2], max_tokens=max_tokens)
        self.connection.add(CODEC.encode_request(asked))

    async def begun(self) -> None:
        await until(lambda: bool(self.outputs))

    async def answered(self) -> None:
        """What it asked for last is whole."""
        await until(lambda: bool(self.outputs) and self.outputs[-1].finish_reason is not None)

    async def status(self, timeout_s: float = 30.0) -> dict[str, Any]:
        return dict(await self.connection.call("status", timeout_s=timeout_s))


class Replica:
    def __init__(
        self,
        store: RedisStateStore,
        gang_max_wait_s: float | None = None,
        tls: WireTls | None = None,
        **config: float,
    ) -> None:
        self.engine = FakeEngine(slots=4)
        info = ReplicaInfo(
            replica_id="r",
            host="127.0.0.1",
            port=0,
            max_model_len=64,
            gang_max_wait_s=gang_max_wait_s,
        )
        self.store, self.tls = store, tls
        self._readers: list[Reader] = []  # one that nobody holds ends, and its requests with it
        self.relay = Relay(
            engine=self.engine,
            store=store,
            info=info,
            config=RelayConfig(**{"heartbeat_s": 0.02, **config}),  # type: ignore[arg-type]
            tls=None if tls is None else tls.replica,
        )

    async def connection(self, router_id: str) -> ReplicaConnection:
        return await self.connection_of(self.tls, router_id)

    async def connection_of(self, tls: WireTls | None, router_id: str) -> ReplicaConnection:
        """A router's with these certificates."""
        context = None if tls is None else tls.router
        return await ReplicaConnection.open(self.relay.info, router_id=router_id, engine_version="fake-1", tls=context)

    async def reader(self, router_id: str = "a") -> Reader:
        self._readers.append(Reader(await self.connection(router_id)))
        return self._readers[-1]

    async def busy(self) -> Reader:
        """Holds a request of this router, and makes no step before it is resumed."""
        reader = await self.reader()
        self.engine.pause()
        reader.add("x")
        await until(lambda: self.engine.held == 1)
        return reader

    async def running(self) -> int | None:
        load = (await self.store.snapshot()).replicas.get("r")
        return load.running if load else None

    async def give_slot(self, request_id: str) -> None:
        ticket = Ticket(request_id=request_id, bin_index=0, deadline_key=0.0, work_s=1.0, router_id="a")
        assert (await self.store.enqueue(ticket)).assignments


Begin = Callable[..., Awaitable[Replica]]


@pytest.fixture
async def begin(new_store: Callable[[], RedisStateStore]) -> AsyncIterator[Begin]:
    """Starts a replica with these settings."""
    made: list[Replica] = []

    async def begin(**config: Any) -> Replica:
        made.append(Replica(new_store(), **config))
        await made[-1].relay.start("127.0.0.1")
        return made[-1]

    yield begin
    for each in made:
        await each.relay.close()


@pytest.fixture
async def replica(begin: Begin) -> Replica:
    return await begin()


async def settled(call: Callable[[], Awaitable[object]], value: object) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            if await call() == value:
                return
            await asyncio.sleep(0.01)


async def test_each_router_gets_the_outputs_of_its_own_requests(replica: Replica) -> None:
    readers = [await replica.reader(name) for name in ("a", "b")]
    for number, reader in enumerate(readers):
        reader.add(f"x{number}")
    for number, reader in enumerate(readers):
        await reader.answered()
        assert {output.request_id for output in reader.outputs} == {f"x{number}"}
        assert reader.tokens(f"x{number}") == undisturbed([1, 2], 5)


@pytest.mark.parametrize("context", [16, 4096, 16384])
def test_an_engine_that_steps_as_predicted_is_not_slow_with_requests_of_any_length(context: int) -> None:
    times = StepTimes(
        prefill=StepCoefficients(overhead_s=0.005, prefill_s=2e-5),
        decode=StepCoefficients(overhead_s=0.002, decode_s=5e-5, kv_s=3e-7),
        mixed=StepCoefficients(overhead_s=0.003, prefill_s=4e-5, decode_s=2e-4, kv_s=3e-7),
    )
    clock = ManualClock()
    steps = StepSpeed(times, clock)
    for number in range(200):
        content = {"prefill_tokens": 500 * (number % 4 == 0), "decode_requests": 32, "kv_tokens": 32 * context}
        clock.advance_to(clock.now() + times.step_s(**content))
        steps.ended(**content)
        steps.ended(prefill_tokens=0, decode_requests=0, kv_tokens=0)
    assert steps.slowness == pytest.approx(1.0)


async def test_steps_are_compared_by_what_their_requests_hold(replica: Replica) -> None:
    class Contents:
        slowness = 1.0

        def __init__(self) -> None:
            self.seen: list[tuple[int, ...]] = []

        def ended(self, **content: int) -> None:
            self.seen.append(tuple(content.values()))

        def idle(self) -> None: ...

    contents = Contents()
    replica.relay._board.speed = contents  # type: ignore[assignment]
    reader = await replica.reader()
    reader.add("x", 5)
    await reader.answered()
    assert contents.seen == [(2, 0, 0), (0, 1, 3), (0, 1, 4), (0, 1, 5)]  # after the last one it is idle


async def test_a_request_that_comes_again_gets_nothing_of_its_first_arrival(replica: Replica) -> None:
    replica.engine.step_s = 0.05
    first, second = [await replica.reader(name) for name in ("a", "b")]
    first.add("x", 1000)
    await until(lambda: len(first.tokens("x")) > 1)
    second.add("x", 5)
    await second.answered()
    assert second.tokens("x") == undisturbed([1, 2], 5)
    assert replica.relay.healthy


async def test_a_router_cannot_stop_the_requests_of_another(replica: Replica) -> None:
    reader, other = [await replica.reader(name) for name in ("a", "b")]
    reader.add("x", 20)
    await reader.begun()
    other.connection.abort(["x", "x", "never-heard-of"])
    await reader.answered()
    assert reader.tokens("x") == undisturbed([1, 2], 20)


async def test_a_stopped_request_frees_its_slot_and_says_no_more(replica: Replica) -> None:
    await replica.give_slot("x")
    reader = await replica.reader()
    reader.add("x", 10_000)
    await reader.begun()
    reader.connection.abort(["x", "x"])
    await settled(replica.running, 0)
    seen = len(reader.outputs)
    reader.add("y")
    await reader.answered()
    assert {output.request_id for output in reader.outputs[seen:]} == {"y"}


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        (wire.Kind.ADD, b"not msgpack"),
        (wire.Kind.ADD, msgspec.msgpack.encode({"request_id": "x"})),
        (wire.Kind.OUTPUTS, b""),
    ],
    ids=["not msgpack", "not a request", "not of a router"],
)
async def test_a_malformed_frame_ends_that_connection_alone(replica: Replica, kind: wire.Kind, part: bytes) -> None:
    good, bad = [await replica.reader(name) for name in ("a", "b")]
    good.add("x", 20)
    wire.write_frame(bad.connection._writer, kind, [part])
    await bad.ended
    await good.answered()
    assert replica.relay.healthy


async def test_a_connection_that_fails_unforeseen_is_counted_and_costs_no_other(
    replica: Replica, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = [await replica.reader(name) for name in ("a", "b")]
    add = replica.engine.add

    async def choke(request: FakeRequest) -> None:
        if request.request_id.startswith("odd"):
            raise KeyError("what nobody thought of")
        await add(request)

    monkeypatch.setattr(replica.engine, "add", choke)
    bad.add("odd")
    await bad.ended
    good.add("x", 20)
    await good.answered()
    status = await good.status()
    assert (status["background_failures"], status["held"]) == ({"serve": 1}, 0)
    assert "what nobody thought of" in caplog.text


async def test_outputs_too_large_for_a_frame_cost_their_connection_alone(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    many, few = [await replica.reader(name) for name in ("a", "b")]
    replica.engine.pause()
    for number in range(4):
        many.add(f"a-rather-long-name-for-a-request-{number}", 10_000)
    await until(lambda: replica.engine.held == 4)
    few.add("x", 5)
    replica.engine.slots = 8
    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 200)
    replica.engine.resume()
    await many.ended
    await few.answered()
    assert few.tokens("x") == undisturbed([1, 2], 5)
    assert replica.relay.healthy


async def test_outputs_for_a_router_that_died_a_moment_ago_cost_nobody_else_anything(replica: Replica) -> None:
    dying, living = [await replica.reader(name) for name in ("a", "b")]
    replica.engine.pause()
    dying.add("x", 5)
    living.add("y", 5)
    await until(lambda: replica.engine.held == 2)
    (router,) = [held.link for held in replica.relay._board._held.values() if held.request_id == "x"]
    router.writer.transport.abort()
    await asyncio.sleep(0)  # it is closed now, and its reader has not woken yet
    assert "x" in router.request_ids
    router.send(wire.Kind.OUTPUTS, [b"a step's"])
    replica.engine.resume()
    await living.answered()
    assert living.tokens("y") == undisturbed([1, 2], 5)
    assert replica.relay.healthy


async def test_a_router_that_does_not_read_is_hung_up_on(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_link, "MAX_UNSENT_BYTES", 1000)
    replica.engine.step_s = 0.0
    deaf = await replica.reader("deaf")
    deaf.ended.cancel()
    deaf.connection._writer.transport.pause_reading()  # type: ignore[attr-defined]
    reader = await replica.reader("b")
    for number in range(3):
        deaf.connection.add(
            CODEC.encode_request(FakeRequest(request_id=f"{number}" * 100_000, prompt=[1], max_tokens=999))
        )
    await until(lambda: replica.engine.taken == 3 and replica.engine.held == 0)
    reader.add("x")
    await reader.answered()


async def test_an_assigned_request_that_never_comes_gives_its_slot_back(begin: Begin) -> None:
    replica = await begin(lease_s=0.1)
    await replica.give_slot("x")  # it may be over before anybody has looked
    await settled(replica.running, 0)


class HoldsAnswers(RedisStateStore):
    """A real store whose answers to heartbeats can be held up on their way."""

    def __init__(self, url: str, namespace: str) -> None:
        super().__init__(connect(url), namespace)
        self.beat_answers = asyncio.Event()
        self.beat_answers.set()
        self.named: list[list[str]] = []  # by the answers to heartbeats
        self.heard = 0  # of those answers
        self.released: list[list[str]] = []  # as they set out

    async def beat_replica(self, *args: Any, **named: Any) -> list[str] | None:
        answer = await super().beat_replica(*args, **named)
        self.named.append(answer or [])
        await self.beat_answers.wait()
        self.heard += 1
        return answer

    async def release(self, replica_id: str, request_ids: Sequence[str], *args: Any, **named: Any) -> None:
        self.released.append(list(request_ids))
        await super().release(replica_id, request_ids, *args, **named)


@pytest.mark.parametrize("leaves", ["ends", "is recalled"])
async def test_an_answer_to_a_heartbeat_that_is_older_than_an_end_frees_nothing(
    redis_url: str, namespace: str, caplog: pytest.LogCaptureFixture, leaves: str
) -> None:
    store = HoldsAnswers(redis_url, namespace)
    replica = Replica(store, lease_s=1e-3)  # the request is older than it at once
    await replica.relay.start("127.0.0.1")
    reader = await replica.busy()
    await replica.give_slot("x")
    await until(lambda: store.named[-1] == ["x"])
    store.beat_answers.clear()
    answers = len(store.named)
    await until(lambda: len(store.named) > answers)  # this one names it, and is on its way
    if leaves == "ends":
        replica.engine.resume()
        await settled(replica.running, 0)  # its slot is free by now
    else:
        await reader.connection.call("recall", msgspec.msgpack.encode(["x"]), timeout_s=30)
        await store.cancel(["x"])  # as its router does, by queueing it again
    heard = store.heard
    store.beat_answers.set()
    await until(lambda: store.heard > heard + 1)
    assert (store.named[answers], store.released) == (["x"], [["x"]] if leaves == "ends" else [])
    assert "never came" not in caplog.text
    await replica.relay.close()
    await store.close()


async def test_a_request_that_runs_longer_than_the_lease_keeps_its_slot(begin: Begin) -> None:
    replica = await begin(lease_s=0.05)
    reader = await replica.reader()
    replica.engine.pause()
    reader.add("x")
    await until(lambda: replica.engine.held == 1)  # before it has a slot: the way to it may take longer than the lease
    await replica.give_slot("x")
    await asyncio.sleep(0.2)
    assert await replica.running() == 1


async def test_a_replica_that_was_dropped_registers_again_with_what_it_runs(replica: Replica) -> None:
    await replica.busy()
    await replica.store.drop_replica("r")
    await settled(replica.running, 1)
    replica.engine.resume()
    await settled(replica.running, 0)


async def test_a_dead_engine_ends_the_connections_and_the_heartbeat(replica: Replica) -> None:
    reader = await replica.reader()
    reader.add("x", 10_000)
    await reader.begun()
    replica.engine.die()
    await reader.ended
    assert not replica.relay.healthy
    with pytest.raises(ReplicaLostError):
        await replica.reader()
    await replica.store.drop_replica("r")
    await asyncio.sleep(0.1)
    assert await replica.running() is None


@pytest.mark.parametrize(
    ("hang_timeout_s", "pass_s", "why"),
    [(0.2, None, "no step and no answer for 0.2 s"), (5.0, 5.1, "at one forward pass for 5.1 s")],
    ids=["no answer", "a pass without end"],
)
async def test_an_engine_that_hangs_is_given_up_with_the_reason_and_one_that_only_takes_long_is_not(
    begin: Begin, caplog: pytest.LogCaptureFixture, hang_timeout_s: float, pass_s: float | None, why: str
) -> None:
    replica = await begin(hang_timeout_s=hang_timeout_s)
    reader = await replica.reader()
    replica.engine.pause()
    reader.add("x", 10_000)
    replica.engine.pass_s = None if pass_s is None else pass_s - 0.2
    await asyncio.sleep(0.5)
    assert replica.relay.healthy
    if pass_s is None:
        replica.engine.hang()
    replica.engine.pass_s = pass_s
    await reader.ended
    assert not replica.relay.healthy
    assert why in caplog.text and "raise engine.hang_timeout_s" in caplog.text
    await replica.relay.drain()


async def test_what_is_to_be_repeated_is_called_at_every_heartbeat_though_it_fails(replica: Replica) -> None:
    calls: list[int] = []

    async def fail() -> None:
        calls.append(len(calls))
        raise ConfigError("this engine knows no such class")

    replica.relay.repeat(fail, "live settings")
    await until(lambda: len(calls) > 2)
    reader = await replica.reader()
    assert (await reader.status())["background_failures"]["live settings"] > 2


async def test_draining_waits_for_the_last_request_and_takes_no_more(replica: Replica) -> None:
    reader = await replica.busy()
    draining = asyncio.create_task(replica.relay.drain())
    await until(lambda: replica.relay.slots == 0)
    await asyncio.sleep(0.05)
    assert not draining.done()
    replica.engine.resume()
    await draining
    await replica.relay.close()
    await reader.ended
    assert reader.tokens("x") == undisturbed([1, 2], 5)
    assert await replica.running() is None


async def test_status_counts_what_it_holds(replica: Replica) -> None:
    reader = await replica.busy()
    counted = {"running": 1, "waiting": 0, "held": 1, "slots": 4, "background_failures": {}}
    assert await reader.status() == counted
    questions = await asyncio.gather(*(reader.status() for _ in range(20)))
    assert all(answer == questions[0] for answer in questions)


async def test_status_counts_failures_also_of_an_engine_that_does_not_answer(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail() -> None:
        raise ConfigError("this engine knows no such class")

    replica.relay.repeat(fail, "live settings")
    reader = await replica.reader()
    await until(lambda: replica.relay._failures["live settings"] > 0)

    async def refuse() -> dict[str, float]:
        raise EngineCallError("not now")

    with monkeypatch.context() as refusing:
        refusing.setattr(replica.engine, "status", refuse)
        status = await reader.status(STATUS_TIMEOUT_S)
    assert (status["error"], status["background_failures"]["live settings"] > 0) == ("not now", True)
    replica.engine.hang()
    status = await reader.status(STATUS_TIMEOUT_S)
    assert "does not answer" in status["error"] and status["background_failures"]["live settings"] > 0


async def test_a_call_that_no_router_makes_is_refused(replica: Replica) -> None:
    reader = await replica.reader()
    with pytest.raises(EngineCallError, match="replica r: .*'add_lora'"):
        await reader.connection.call("add_lora", timeout_s=30)
    reader.add("x")
    await reader.answered()


async def test_every_router_is_pinged_and_may_ping(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "PING_S", 0.01)
    replica = await begin()
    connections = [await replica.connection(router_id) for router_id in "ab"]
    for connection in connections:
        connection.ping()
        for _ in range(2):
            while (await wire.read_frame(connection._reader)).kind is not wire.Kind.PING:
                pass
    assert len(replica.relay._links) == 2


async def test_a_question_left_open_ends_with_the_connection(replica: Replica) -> None:
    reader = await replica.reader()
    asked = asyncio.create_task(reader.status())
    await asyncio.sleep(0)
    reader.connection.close()
    with pytest.raises(ReplicaLostError):
        await asked


async def test_a_stranger_without_the_secret_is_refused(replica: Replica) -> None:
    forged = msgspec.structs.replace(replica.relay.info, secret=b"guessed")
    with pytest.raises((ReplicaLostError, ProtocolError)):
        await ReplicaConnection.open(forged, router_id="a", engine_version="fake-1")


def certificates(authority: Authority, folder: Path) -> WireTls:
    file = str(authority.issue(folder, "127.0.0.1"))
    named = {CERTIFICATE_ENV: file, KEY_ENV: file, AUTHORITY_ENV: str(authority.certificate)}
    found = wire_tls({USE_TLS_ENV: "1", **named})
    assert found is not None
    return found


async def test_where_ray_is_encrypted_requests_and_answers_are(begin: Begin, tmp_path: Path) -> None:
    tls = certificates(Authority.make(tmp_path, "trusted"), tmp_path)
    replica = await begin(tls=tls)
    reader = await replica.reader()
    reader.add("x")
    await reader.answered()
    assert reader.tokens("x") == undisturbed([1, 2], 5)
    link = reader.connection._writer.get_extra_info("ssl_object")
    assert link.version() == "TLSv1.3"


async def test_a_router_of_another_authority_is_refused(begin: Begin, tmp_path: Path) -> None:
    (theirs := tmp_path / "theirs").mkdir()
    replica = await begin(tls=certificates(Authority.make(tmp_path, "trusted"), tmp_path))
    with pytest.raises(ReplicaLostError):
        await replica.connection_of(certificates(Authority.make(theirs, "stranger"), theirs), "a")


async def test_a_router_that_trusts_all_and_shows_nothing_is_refused(begin: Begin, tmp_path: Path) -> None:
    tls = certificates(Authority.make(tmp_path, "trusted"), tmp_path)
    replica = await begin(tls=tls)
    shows_nothing = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    shows_nothing.check_hostname, shows_nothing.verify_mode = False, ssl.CERT_NONE
    with pytest.raises(ReplicaLostError):
        await replica.connection_of(tls._replace(router=shows_nothing), "a")


@pytest.mark.parametrize("replica_is", [True, False])
async def test_one_side_that_is_not_encrypted_is_told_apart(begin: Begin, tmp_path: Path, replica_is: bool) -> None:
    tls = certificates(Authority.make(tmp_path, "trusted"), tmp_path)
    replica = await begin(tls=tls if replica_is else None)
    with pytest.raises(ProtocolError, match="RAY_USE_TLS.*alike on all nodes"):
        await replica.connection_of(None if replica_is else tls, "a")


def test_certificates_that_cannot_be_used_are_named_before_anything_starts(tmp_path: Path) -> None:
    assert wire_tls({}) is None
    assert wire_tls({USE_TLS_ENV: "0"}) is None
    with pytest.raises(ConfigError, match=f"{KEY_ENV}, {AUTHORITY_ENV} is not"):
        wire_tls({USE_TLS_ENV: "1", CERTIFICATE_ENV: "x"})
    absent = dict.fromkeys((CERTIFICATE_ENV, KEY_ENV, AUTHORITY_ENV), str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match="cannot be used: No such file"):
        wire_tls({USE_TLS_ENV: "true", **absent})


async def test_slots_are_offered_once_the_check_at_start_has_returned(new_store: Callable[[], RedisStateStore]) -> None:
    replica = Replica(new_store())
    seen: list[tuple[int, int | None]] = []

    async def check() -> None:
        await asyncio.sleep(0.1)  # some heartbeats
        seen.append((replica.relay.slots, await replica.running()))

    waiting = Ticket(request_id="x", bin_index=0, deadline_key=0.0, work_s=1.0, router_id="a")
    assert await replica.store.enqueue(waiting) == Queued([])
    await replica.relay.start("127.0.0.1", check=check)
    assert seen == [(0, 0)]
    assert (replica.relay.slots, await replica.running()) == (4, 1)
    await replica.relay.close()


@pytest.mark.slow
async def test_without_its_shared_state_it_says_so_at_start_and_leaves_in_peace() -> None:
    store = RedisStateStore(connect(f"redis://127.0.0.1:{free_port()}/0"), "nowhere")
    replica = Replica(store)
    with pytest.raises(StateStoreError):
        await replica.relay.start("127.0.0.1")
    await replica.relay.drain()
    await replica.relay.close()
    await store.close()


@pytest.mark.parametrize("wrong", [{"heartbeat_s": 0.0}, {"lease_s": 0.0}])
def test_a_wrong_setting_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        RelayConfig(**wrong)  # type: ignore[arg-type]


async def test_an_idle_gang_replica_sees_to_it_that_no_request_waits_for_a_full_batch_for_ever(begin: Begin) -> None:
    replica = await begin(gang_max_wait_s=0.1, heartbeat_s=60.0)
    lonely = Ticket(request_id="x", bin_index=0, deadline_key=0.0, work_s=1.0, router_id="a")
    assert await replica.store.enqueue(lonely) == Queued([])
    await settled(replica.running, 1)
    await replica.relay.close()


async def test_a_replica_that_only_reads_prompts_offers_what_is_safe_in_its_cache(begin: Begin) -> None:
    made = await begin(prefill_budget_tokens=2, prefill_memory_share=0.5)
    made.engine.free_tokens = 8
    reader = await made.reader()

    async def slots() -> int:
        return (await made.store.snapshot()).replicas["r"].slots

    await settled(slots, 2)
    made.engine.free_tokens = 2
    reader.add("x")
    await settled(slots, 1)


# What the prefix cache holds


def known(reader: Reader) -> BlockSet:
    """By all that came."""
    blocks = BlockSet()
    for changes in reader.changes:
        assert blocks.apply(changes)
    return blocks


@pytest.fixture
def cache(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> FakeCache:
    monkeypatch.setattr(relay_module, "BLOCKS_PAUSE_S", 0.01)
    replica.engine.cache = FakeCache()
    return replica.engine.cache


async def test_every_router_is_told_the_whole_first_and_then_what_changes(replica: Replica, cache: FakeCache) -> None:
    cache.blocks |= {1, 2, 3}
    first = await replica.reader("a")
    await until(lambda: known(first).blocks == {1, 2, 3})
    cache.blocks ^= {3, 4}
    first.add("x")
    await until(lambda: known(first).blocks == {1, 2, 4})
    second = await replica.reader("b")
    await until(lambda: known(second).blocks == {1, 2, 4})
    cache.blocks.clear()
    second.add("y")
    await until(lambda: not known(first).blocks and not known(second).blocks)
    assert [changes.since is None for changes in first.changes] == [True, False, False]
    assert [changes.since is None for changes in second.changes] == [True, False]


async def test_nobody_is_told_anything_and_no_engine_is_asked_while_nothing_happens(
    replica: Replica, cache: FakeCache
) -> None:
    reader = await replica.reader()
    await until(lambda: bool(reader.changes))
    asked = len(cache.asked)
    await asyncio.sleep(0.1)
    assert (len(cache.asked), len(reader.changes)) == (asked, 1)
    reader.add("x")  # steps that leave the cache as it is
    await reader.answered()
    await until(lambda: len(cache.asked) > asked)
    assert len(reader.changes) == 1


async def test_a_router_that_asks_is_told_the_whole_again(replica: Replica, cache: FakeCache) -> None:
    cache.blocks.add(7)
    first, second = [await replica.reader(name) for name in ("a", "b")]
    await until(lambda: bool(first.changes) and bool(second.changes))
    first.connection.ask_for_blocks()
    await until(lambda: len(first.changes) == 2)
    assert (first.changes[1].since, len(first.changes[1]), len(second.changes)) == (None, 1, 1)


async def test_a_cache_that_was_lost_track_of_is_told_as_a_whole_to_all(replica: Replica, cache: FakeCache) -> None:
    cache.blocks |= {1, 2}
    readers = [await replica.reader(name) for name in ("a", "b")]
    await until(lambda: all(reader.changes for reader in readers))
    cache.sequence, cache.blocks = 100, {3}
    readers[0].add("x")
    await until(lambda: all(known(reader).blocks == {3} for reader in readers))
    assert all(reader.changes[-1].since is None for reader in readers)


async def test_a_router_that_reads_nothing_holds_up_no_other_and_is_told_the_whole_later(
    replica: Replica, cache: FakeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_link, "MAX_UNSENT_BEFORE_BLOCKS", 0)
    quick, slow = [await replica.reader(name) for name in ("quick", "slow")]
    await until(lambda: bool(quick.changes) and bool(slow.changes))
    slow.connection._reader._transport.pause_reading()  # type: ignore[attr-defined]
    for count in (1_500_000, 10):  # of 12 MB, more than sockets take; what follows is not sent on top
        cache.blocks = set(range(count))
        quick.add("x")
        await until(lambda count=count: len(quick.changes[-1]) in (count, 1_499_990))  # type: ignore[misc]
    slow.connection._reader._transport.resume_reading()  # type: ignore[attr-defined]
    await until(lambda: len(slow.changes[-1]) == 10)
    assert [changes.since is None for changes in quick.changes] == [True, False, False]
    assert [changes.since is None for changes in slow.changes] == [True, False, True]


async def test_an_engine_that_cannot_tell_is_left_alone(replica: Replica) -> None:
    reader = await replica.reader()
    reader.add("x")
    await reader.answered()
    assert not reader.changes


async def test_after_a_failure_the_engine_is_asked_again(
    replica: Replica, cache: FakeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(since: int | None) -> BlockChanges:
        monkeypatch.undo()
        raise EngineCallError("not now")

    reader = await replica.reader()
    await until(lambda: bool(reader.changes))
    cache.blocks.add(1)
    monkeypatch.setattr(cache, "changes", fail)
    reader.add("x", max_tokens=200)
    await until(lambda: known(reader).blocks == {1})
    assert replica.relay._failures["cached blocks"] == 1
