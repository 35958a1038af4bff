"""The routed client against real relays, over real TCP and a real Redis; only the engine has no model.

Its answers are known in advance, so every test that disturbs anything asks for the very same tokens.
"""

import asyncio
import contextlib
import math
import os
import secrets
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from itertools import count, pairwise

import msgspec
import pytest

from deployments.engines.relay import Credit, Relay, RelayConfig
from deployments.engines.traces import ReplicaTraces
from deployments.process.ports import free_port
from deployments.serving.embedded_redis import EmbeddedRedis
from policies.errors import AdmissionError, ConfigError, InputError, ReplicaLostError, StateStoreError
from policies.live import Live
from policies.router.multi_bin import MultiBin, MultiBinConfig
from policies.router.placement import PrefixIndex, PrefixIndexConfig
from policies.router.promise import Promise
from policies.types import StepCoefficients, StepTimes
from predictor.histogram import HistogramPredictor
from router import cached_blocks, event_loop, prompt_caches, redis_store, wire
from router.admission import ClassLimits, Door, Tenant
from router.cached_blocks import BlockHashing
from router.classifier import Classifier, Mode
from router.clock import MonotonicClock, SharedClock
from router.ledger import State
from router.metrics import RouterMetrics
from router.redis_store import RedisStateStore, connect
from router.routed_client import RoutedClient, routed_client
from router.state_store import Assignment, ReplicaInfo, Snapshot
from router.terms import RoutedClientConfig, RouterTerms, TicketTerms
from router.timing import RequestTiming
from router.trail import Trail
from tests.fakes import FakeBatch, FakeCache, FakeCodec, FakeEngine, FakeRequest, undisturbed
from tests.gate import Gate
from tests.router.test_key_metrics import counts as page_counts
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.timeout(120)

HEARTBEAT_S = 0.05
_numbers = count()


def requests(number: int, max_tokens: int = 20, *, replays: bool = False) -> list[FakeRequest]:
    return [request(max_tokens, replays=replays) for _ in range(number)]


def request(max_tokens: int = 20, *, replays: bool = False, request_id: str | None = None) -> FakeRequest:
    number = next(_numbers)
    return FakeRequest(
        request_id=request_id or f"x{number}", prompt=[number, 7, 7], max_tokens=max_tokens, replays=replays
    )


class Answer:
    """What a front end has of one request."""

    def __init__(self, asked: FakeRequest) -> None:
        self.asked, self._max_tokens = asked, asked.max_tokens
        self.tokens: list[int] = []
        self.outcome: str | None = None
        self.timing: RequestTiming

    @property
    def expected(self) -> list[int]:
        return undisturbed(self.asked.prompt, self._max_tokens)


class FrontEnd:
    """Stands where vLLM's front end stands: asks, and reads what comes."""

    def __init__(self, client: RoutedClient[FakeRequest, FakeBatch], metrics: RouterMetrics) -> None:
        self.client, self.metrics = client, metrics
        self.answers: dict[str, Answer] = {}
        self._reader = asyncio.create_task(self._read())

    async def ask(
        self,
        asked: FakeRequest,
        slo_class: str = "standard",
        tenant: Tenant | None = None,
        timing: RequestTiming | None = None,
    ) -> Answer:
        self.answers[asked.request_id] = answer = Answer(asked)
        now_s = MonotonicClock().now()
        answer.timing = timing or RequestTiming(received_s=now_s, submitted_s=now_s)
        promise = Promise(ttft_s=TARGETS_S[slo_class])
        await self.client.submit(asked, slo_class=slo_class, promise=promise, timing=answer.timing, tenant=tenant)
        return answer

    async def ask_many(self, number: int, max_tokens: int = 20, *, replays: bool = False) -> list[Answer]:
        return await self.ask_each(requests(number, max_tokens, replays=replays))

    async def ask_each(self, asked: Sequence[FakeRequest]) -> list[Answer]:
        return [await self.ask(each) for each in asked]

    async def ask_at_once(self, replica: "Replica", asked: Sequence[FakeRequest], *, held: int) -> list[Answer]:
        """However slow Redis is, none is answered before all are queued and so many on board of the replica."""
        replica.engine.pause()
        answers = await self.ask_each(asked)
        await until(lambda: replica.engine.held == held)
        replica.engine.resume()
        return answers

    async def _read(self) -> None:
        while True:
            for output in (await self.client.next_outputs()).outputs:
                answer = self.answers[output.request_id]
                assert answer.outcome is None, "an output after the last one"
                answer.tokens += output.new_token_ids
                answer.outcome = output.finish_reason

    def count(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"sluice_{name}", labels) or 0.0

    async def die(self) -> None:
        """As a killed process does: its sockets close, and it says nothing."""
        self._reader.cancel()
        await self.client.background.close()

    async def close(self) -> None:
        self._reader.cancel()
        await self.client.close()


class Replica:
    def __init__(self, relay: Relay, engine: FakeEngine) -> None:
        self.relay, self.engine = relay, engine

    @property
    def replica_id(self) -> str:
        return self.relay.info.replica_id

    async def die(self) -> None:
        """As a killed process does: what it had not sent is lost, and it says nothing."""
        self.hang_up()
        await self.relay._background.close()

    async def stop_beating(self) -> None:
        """As a process does that hangs: its connections stay open."""
        self.engine.pause()
        (beat,) = [task for task in self.relay._background._tasks if task.get_name() == "heartbeat"]
        beat.cancel()

    def hang_up(self) -> None:
        """The network breaks; both ends live."""
        for writer in self.relay._writers:
            writer.transport.abort()


class Line:
    """A network between a router and a replica, of which the replica's end can go on when the router's has gone."""

    @classmethod
    async def to(cls, port: int) -> "Line":
        line = cls(port)
        line._server = await asyncio.start_server(line._carry, "127.0.0.1", 0)
        line.port = line._server.sockets[0].getsockname()[1]
        return line

    def __init__(self, target: int) -> None:
        self.port, self._target = 0, target
        self._server: asyncio.Server | None = None
        self._router: asyncio.StreamWriter | None = None
        self._replica: asyncio.StreamWriter | None = None

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._router = writer
        other_reader, self._replica = await asyncio.open_connection("127.0.0.1", self._target)
        await asyncio.gather(self._pass_on(reader, self._replica), self._pass_on(other_reader, writer))

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)

    def cut_off_router(self) -> None:
        assert self._router is not None
        self._router.transport.abort()

    def hang_up(self) -> None:
        assert self._replica is not None and self._server is not None
        self._replica.transport.abort()
        self._server.close()


class Service:
    """Routers and replicas over one Redis, each with a client of its own."""

    def __init__(self, url: str) -> None:
        self.url, self.name = url, secrets.token_hex(8)
        self.store = self.new_store()
        self.front_ends: list[FrontEnd] = []
        self.replicas: list[Replica] = []
        self._stores = [self.store]

    def new_store(self) -> RedisStateStore:
        return RedisStateStore(connect(self.url), self.name)

    async def replica(
        self,
        slots: int = 4,
        *,
        salt: int = 0,
        step_s: float = 0.002,
        lease_s: float = 15.0,
        silence_s: float = 5.0,
        version: str = "fake-1",
        step_times: StepTimes | None = None,
        classes: tuple[str, ...] = (),
        credit_s: float | None = None,
        token_s: float | None = None,
        traces: ReplicaTraces | None = None,
    ) -> Replica:
        engine = FakeEngine(slots=slots, salt=salt, step_s=step_s, version=version)
        engine.token_s = token_s
        self._stores.append(self.new_store())
        relay = Relay(
            engine=engine,
            store=self._stores[-1],
            info=msgspec.structs.replace(_info(f"r{len(self.replicas)}", silence_s), classes=classes),
            config=RelayConfig(heartbeat_s=HEARTBEAT_S, lease_s=lease_s, step_times=step_times),
            credit=Live(Credit(reading_s=credit_s)),
            traces=traces,
        )
        await relay.start("127.0.0.1")
        self.replicas.append(Replica(relay, engine))
        return self.replicas[-1]

    async def front_end(
        self,
        *,
        max_waiting: int = 4096,
        max_wait_s: float = 60.0,
        silence_s: float = 5.0,
        max_moves: int = 8,
        prefill_s: float = 0.0,
        mode: Mode = "full",
        version: str = "fake-1",
    ) -> FrontEnd:
        metrics = RouterMetrics()
        self._stores.append(self.new_store())
        client = routed_client(
            router_id=f"router{len(self.front_ends)}",
            store=self._stores[-1],
            codec=FakeCodec(version),
            classifier=_classifier(metrics, prefill_s, mode),
            terms=Live(
                RouterTerms(
                    Door({"standard": ClassLimits(max_waiting=max_waiting), "strict": ClassLimits(refuses_late=True)}),
                    RoutedClientConfig(
                        max_wait_s=max_wait_s, max_moves=max_moves, heartbeat_s=HEARTBEAT_S, silence_s=silence_s
                    ),
                )
            ),
            clock=MonotonicClock(),
            shared_clock=SharedClock(),
            metrics=metrics,
        )
        await client.start()
        self.front_ends.append(FrontEnd(client, metrics))
        return self.front_ends[-1]

    async def finish(self, answers: list[Answer]) -> None:
        """Every answer is complete and exact, and nothing of it is left anywhere."""
        await until(lambda: all(answer.outcome is not None for answer in answers))
        assert Counter(answer.outcome for answer in answers) == {"length": len(answers)}
        for answer in answers:
            assert answer.tokens == answer.expected
        await self.is_empty()

    async def is_empty(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                if _nothing_in(await self.store.snapshot()):
                    break
                await asyncio.sleep(HEARTBEAT_S)
        await until(lambda: all(r.engine.held == 0 for r in self.replicas if r.relay.healthy))
        for front_end in self.front_ends:
            assert not front_end.client.ledger

    async def close(self) -> None:
        for front_end in self.front_ends:
            await front_end.close()
        for replica in self.replicas:
            await replica.relay.close()
        for store in self._stores:
            await store.close()


def _nothing_in(snapshot: Snapshot) -> bool:
    return not snapshot.waiting and not any(load.running for load in snapshot.replicas.values())


def _info(replica_id: str, silence_s: float = 3600.0, port: int = 0) -> ReplicaInfo:
    return ReplicaInfo(
        replica_id=replica_id,
        host="127.0.0.1",
        port=port,
        max_model_len=4096,
        silence_s=silence_s,
    )


STEP_TIMES = StepTimes(
    prefill=StepCoefficients(overhead_s=0.01),
    decode=StepCoefficients(overhead_s=0.01),
    mixed=StepCoefficients(overhead_s=0.01),
)


TARGETS_S = {"soon": 0.2, "standard": 1.0, "later": 3.0, "patient": 60.0, "offline": 60.0, "strict": 5.0}


def _classifier(metrics: RouterMetrics, prefill_s: float, mode: Mode) -> Classifier:
    return Classifier(
        predictor=HistogramPredictor(),
        bins=MultiBin(MultiBinConfig(bins=2, refit_every=32)),
        terms=Live(TicketTerms(fills_idle={"offline": "deadline"})),
        step_times=replace(STEP_TIMES, prefill=StepCoefficients(overhead_s=0.01, prefill_s=prefill_s)),
        shared_batch_size=4,
        default_output_tokens=16,
        metrics=metrics,
        prefixes=PrefixIndex(PrefixIndexConfig()),
        mode=mode,
    )


@pytest.fixture
async def service(redis_url: str) -> AsyncIterator[Service]:
    made = Service(redis_url)
    yield made
    await made.close()


# When all is well


async def test_every_request_gets_its_exact_tokens(service: Service) -> None:
    for _ in range(2):
        await service.replica(slots=3)
    front_end = await service.front_end()
    await service.finish(await front_end.ask_many(40))
    assert front_end.count("requests_total", slo_class="standard", bin="0", outcome="length") == 40
    assert front_end.count("output_tokens_total", slo_class="standard") == 800


@pytest.mark.parametrize("reason", ["stop", "length", "repetition"])
async def test_an_answer_is_timed_and_learned_from_whatever_its_end(service: Service, reason: str) -> None:
    replica, front_end = await service.replica(), await service.front_end()
    replica.engine.finish_reason = reason
    answer = await front_end.ask(request())
    await until(lambda: answer.outcome == reason)
    assert front_end.count("requests_total", slo_class="standard", bin="0", outcome=reason) == 1
    assert front_end.count("e2e_seconds_count", slo_class="standard") == 1
    await until(lambda: front_end.client.classifier._seen == 1)  # type: ignore[attr-defined]


async def test_no_engine_gets_more_than_its_slots(service: Service) -> None:
    for _ in range(2):
        await service.replica(slots=2)
    await service.finish(await (await service.front_end()).ask_many(20))
    assert [replica.engine.most_held for replica in service.replicas] == [2, 2]


async def test_two_routers_share_two_replicas(service: Service) -> None:
    for _ in range(2):
        await service.replica(slots=2)
    front_ends = [await service.front_end() for _ in range(2)]
    answers = await asyncio.gather(*(front_end.ask_many(15) for front_end in front_ends))
    await service.finish([answer for batch in answers for answer in batch])
    assert [replica.engine.most_held for replica in service.replicas] == [2, 2]


async def test_a_request_that_came_before_any_replica_is_served_when_one_comes(service: Service) -> None:
    answers = await (await service.front_end()).ask_many(3)
    await service.replica()
    await service.finish(answers)


async def test_routers_tell_each_other_the_lengths_of_answers(service: Service) -> None:
    await service.replica(slots=8)
    asker, listener = [await service.front_end() for _ in range(2)]
    mine, theirs = asker.client.classifier, listener.client.classifier
    before = theirs.bin_edges
    await service.finish([answer for n in range(64) for answer in [await asker.ask(request(1 + n % 16))]])
    await until(lambda: mine.bin_edges != before and theirs.bin_edges == mine.bin_edges)


async def test_a_replica_tells_its_status(service: Service) -> None:
    await service.replica(slots=3)
    front_end = await service.front_end()
    status = {"running": 0, "waiting": 0, "held": 0, "slots": 3, "background_failures": {}}
    assert await front_end.client.statuses() == {"r0": status}


async def test_a_status_of_a_replica_that_is_gone_says_so(service: Service) -> None:
    replica, front_end = await service.replica(), await service.front_end()
    await replica.die()
    assert "error" in (await front_end.client.statuses())["r0"]


async def test_a_replica_that_hangs_up_as_it_is_greeted_costs_nobody_an_answer(service: Service) -> None:
    front_end = await service.front_end()
    info = _info("gone")

    async def welcome_and_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await wire.accept_router(
            reader, writer, secret=info.secret, replica_id=info.replica_id, engine_version="fake-1"
        )
        writer.close()

    server = await asyncio.start_server(welcome_and_end, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    await service.store.register_replica(msgspec.structs.replace(info, port=port), 4, [])
    answers = await front_end.ask_many(4)
    await until(lambda: front_end.count("replicas_lost_total") > 0)
    server.close()
    await service.replica()
    await service.finish(answers)


@pytest.mark.slow
async def test_a_replica_of_no_use_to_one_router_goes_on_serving_another(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    stranger = await service.replica(slots=8)
    content = await service.front_end()
    unhappy = await service.front_end(max_moves=0, version="fake-2")
    running = await content.ask_many(4, 400)
    await until(lambda: all(answer.tokens for answer in running))
    dropped_s: list[float] = []
    drop = unhappy.client.store.drop_replica

    async def noted(replica_id: str) -> None:
        dropped_s.append(asyncio.get_running_loop().time())
        await drop(replica_id)

    monkeypatch.setattr(unhappy.client.store, "drop_replica", noted)
    assert isinstance((await unhappy.client.statuses())["r0"]["error"], str)
    assert not dropped_s, "nobody was to go there"
    waiting = await unhappy.ask_many(4)
    await until(lambda: all(answer.outcome for answer in running))
    await until(lambda: len(dropped_s) >= 3)
    assert min(after - before for before, after in pairwise(dropped_s)) > 2.9 * HEARTBEAT_S
    await service.replica(version="fake-2")
    await service.finish([*running, *waiting])
    assert stranger.engine.taken == 4


# Refusals and cancellations


async def test_more_than_may_wait_are_refused(service: Service) -> None:
    front_end = await service.front_end(max_waiting=2)
    answers = await front_end.ask_many(2)
    with pytest.raises(AdmissionError, match="max_waiting"):
        await front_end.ask(request())
    await until(lambda: front_end.client.entrance.room("standard") == 0)
    await service.replica()
    await service.finish(answers)
    assert front_end.count("requests_total", slo_class="standard", bin="0", outcome="refused") == 1


async def test_more_than_there_is_room_for_are_refused_and_counted_before_they_are_made(service: Service) -> None:
    front_end = await service.front_end(max_waiting=3)
    replica = await service.replica(slots=1)
    replica.engine.pause()
    answers = await front_end.ask_many(3)
    await until(lambda: front_end.client.snapshot.waiting == 2)
    timing = RequestTiming(received_s=0.0, submitted_s=0.0)
    front_end.client.check_room("standard", 1, timing)
    assert timing.outcome is None
    with pytest.raises(AdmissionError, match="room for 1 of 2 requests") as refused:
        front_end.client.check_room("standard", 2, timing)
    assert refused.value.retry_after_s == front_end.client.snapshot.waiting_s > 0
    assert timing.outcome == "refused"
    assert front_end.count("requests_total", slo_class="standard", bin="0", outcome="refused") == 1
    replica.engine.resume()
    await service.finish(answers)


async def test_there_is_room_for_what_the_replicas_could_start_and_what_may_wait(service: Service) -> None:
    front_end = await service.front_end(max_waiting=3)
    assert front_end.client.entrance.room("standard") == 3
    answers = await front_end.ask_many(2)
    await until(lambda: front_end.client.entrance.room("standard") == 1)
    await service.replica(slots=4)
    await service.finish(answers)
    await until(lambda: front_end.client.entrance.room("standard") == 3 + 4)


async def test_a_spent_quota_is_refused_with_the_time_of_the_next_try(service: Service) -> None:
    await service.replica()
    front_end = await service.front_end()
    tenant = Tenant(name="t", requests_per_minute=2)
    began_s = MonotonicClock().now()
    answers = [await front_end.ask(request(), tenant=tenant) for _ in range(2)]
    with pytest.raises(AdmissionError, match="requests_per_minute of t") as refused:
        await front_end.ask(request(), tenant=tenant)
    assert 29.9 - (MonotonicClock().now() - began_s) < refused.value.retry_after_s <= 30
    answers.append(await front_end.ask(request()))
    await service.finish(answers)


@pytest.mark.slow
async def test_a_replica_of_measured_half_speed_gets_less(service: Service) -> None:
    slow = await service.replica(slots=64, step_s=0.04, step_times=STEP_TIMES)
    fast = await service.replica(slots=64, step_s=0.005, step_times=STEP_TIMES)
    front_end = await service.front_end()

    async def is_known() -> bool:
        speeds = (await service.store.snapshot()).replicas
        return speeds[slow.replica_id].slowness > 1.5 * speeds[fast.replica_id].slowness

    async with asyncio.timeout(PATIENCE_S):  # while the machine stands still, both measure the same step
        await service.finish(await front_end.ask_many(8, 60))
        while not await is_known():
            await service.finish(await front_end.ask_many(8, 60))
    before = fast.engine.taken, slow.engine.taken
    await service.finish(await front_end.ask_many(20, 40))
    assert fast.engine.taken - before[0] > slow.engine.taken - before[1]


async def test_prompts_that_begin_alike_go_to_one_replica(service: Service) -> None:
    for _ in range(2):
        await service.replica(slots=64)
    front_end = await service.front_end(prefill_s=1e-3)
    shared = list(range(200))
    ask = [FakeRequest(request_id=secrets.token_hex(8), prompt=[*shared, n], max_tokens=3) for n in range(10)]
    for each in ask:
        await service.finish([await front_end.ask(each)])
    assert sorted(replica.engine.taken for replica in service.replicas) == [0, 10]
    assert _hits(front_end, service) == 9 * 192


def _hits(front_end: FrontEnd, service: Service, name: str = "predicted_hit_tokens_total") -> float:
    """Of all replicas."""
    return sum(front_end.count(name, slo_class="standard", replica=each.replica_id) for each in service.replicas)


async def test_hits_are_counted_and_so_is_by_how_much_they_were_mistaken(service: Service) -> None:
    replica = await service.replica()
    replica.engine.prefixes = set()
    front_end = await service.front_end(prefill_s=1e-3)
    shared = list(range(200))
    for n in range(3):
        if n == 2:
            replica.engine.prefixes.clear()  # all that it had was evicted
        asked = FakeRequest(request_id=f"x{n}", prompt=[*shared, n], max_tokens=2)
        await service.finish([await front_end.ask(asked)])
    assert _hits(front_end, service) == 2 * 192
    assert front_end.count("hit_tokens_total", slo_class="standard") == 192
    assert front_end.count("wrong_hit_tokens_total", slo_class="standard", way="missing") == 192
    assert front_end.metrics.hits == {"predicted": 384, "found": 192, "missing": 192, "unforeseen": 0}


async def test_what_was_counted_of_a_replica_goes_with_it(service: Service) -> None:
    lost, front_end = await service.replica(), await service.front_end(prefill_s=1e-3)
    for n in range(2):
        asked = FakeRequest(request_id=f"x{n}", prompt=list(range(200)), max_tokens=2)
        await service.finish([await front_end.ask(asked)])
    assert _hits(front_end, service) == 192
    await lost.die()
    await until(lambda: not _hits(front_end, service))


async def test_a_request_that_lost_its_replica_goes_on_where_its_prefix_is_cached(service: Service) -> None:
    has_it, front_end = await service.replica(slots=64), await service.front_end(prefill_s=1e-3)
    shared = list(range(200))
    await service.finish([await front_end.ask(FakeRequest(request_id="first", prompt=shared, max_tokens=2))])
    long = await front_end.ask(request(60_000))  # by its work alone no other would come here
    await until(lambda: long.tokens)
    has_it.engine.pause()
    big = await front_end.ask(FakeRequest(request_id="big", prompt=[7] * 3000, max_tokens=1))
    lost = await service.replica()
    lost.engine.pause()
    moved = await front_end.ask(FakeRequest(request_id="moved", prompt=shared, max_tokens=2))
    await until(lambda: lost.engine.held == 1)  # for the big prompt takes longer
    has_it.engine.resume()
    await until(lambda: big.outcome is not None)
    idle = await service.replica()
    await lost.die()
    await until(lambda: moved.outcome is not None)
    assert (idle.engine.taken, has_it.engine.taken) == (0, 4)
    await front_end.client.cancel([long.asked.request_id], "cancelled")
    await service.is_empty()


async def test_in_shadow_mode_requests_start_as_they_came_and_the_plan_is_counted(service: Service) -> None:
    replica = await service.replica(slots=1)
    front_end = await service.front_end(mode="shadow")
    replica.engine.pause()  # all three are there before the first is over
    answers = [await front_end.ask(request(60), slo_class="standard")]
    answers.append(await front_end.ask(request(), slo_class="patient"))
    answers.append(await front_end.ask(request(250), slo_class="standard"))  # long enough to be seen running
    replica.engine.resume()
    await until(lambda: answers[1].outcome is not None)
    assert answers[2].outcome is None
    assert front_end.count("shadow_starts_total", slo_class="patient", plan="later") == 1
    await service.finish(answers)
    assert replica.engine.most_held == 1


async def test_an_id_that_is_not_over_is_refused_and_the_first_goes_on(service: Service) -> None:
    front_end = await service.front_end()
    asked = request(request_id="twice")
    answer = await front_end.ask(asked)
    with pytest.raises(InputError, match="twice"):
        await front_end.client.submit(asked, slo_class="standard", timing=RequestTiming(0.0, 0.0))
    await service.replica()
    await service.finish([answer])


async def test_cancelling_what_waits_and_what_runs_frees_every_slot(service: Service) -> None:
    replica, front_end = await service.replica(slots=3), await service.front_end()
    replica.engine.pause()
    answers = await front_end.ask_many(8)
    await until(lambda: replica.engine.held == 3)
    ids = [answer.asked.request_id for answer in answers]
    await front_end.client.cancel([*ids, ids[0], "never-heard-of"], "cancelled")
    replica.engine.resume()
    await service.is_empty()
    assert not any(answer.tokens for answer in answers)
    assert front_end.count("requests_total", slo_class="standard", bin="0", outcome="cancelled") == 8


async def test_a_slot_given_to_a_cancelled_request_goes_to_the_next(service: Service) -> None:
    replica, front_end = await service.replica(slots=1), await service.front_end()
    replica.engine.pause()
    first, second, third = await front_end.ask_many(3)
    await until(lambda: replica.engine.held == 1)
    await front_end.client.cancel([second.asked.request_id], "cancelled")
    replica.engine.resume()
    await service.finish([first, third])
    assert replica.engine.taken == 2


async def test_a_request_whose_sender_goes_away_while_it_is_queued_leaves_nothing(service: Service) -> None:
    replica, front_end = await service.replica(slots=100, lease_s=3600.0), await service.front_end()
    for number in range(60):
        asking = asyncio.create_task(front_end.ask(request(10_000)))
        await asyncio.sleep(number * 5e-5)
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            answer = await asking
            await front_end.client.cancel([answer.asked.request_id], "cancelled")
    await service.is_empty()
    assert replica.relay.healthy


async def test_a_request_that_no_replica_takes_fails_in_the_end(service: Service) -> None:
    front_end = await service.front_end(max_wait_s=0.2)
    answer = await front_end.ask(request())
    await until(lambda: answer.outcome == "error")
    assert str(answer.timing.unserved) == "no replica took it within 0.2 s"
    await service.is_empty()


async def test_a_request_too_large_for_a_frame_fails_alone(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    await service.replica()
    front_end = await service.front_end()
    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 4096)
    large = await front_end.ask(FakeRequest(request_id="large", prompt=[1] * 5000, max_tokens=4))
    answers = await front_end.ask_many(4)
    await until(lambda: large.outcome == "error")
    await service.finish(answers)


async def test_a_request_that_cannot_be_encoded_is_refused_before_it_is_queued(service: Service) -> None:
    front_end = await service.front_end()
    with pytest.raises(InputError, match="cannot be sent to an engine"):
        await front_end.ask(FakeRequest(request_id="odd", prompt=[1 << 70], max_tokens=4))
    assert not front_end.client.ledger
    await service.replica(slots=1, lease_s=3600.0)
    await service.finish(await front_end.ask_many(4))


async def test_a_router_that_stands_still_says_for_how_long(service: Service) -> None:
    front_end = await service.front_end()
    asyncio.get_running_loop().call_soon(time.sleep, 0.3)
    await until(lambda: front_end.count("event_loop_lag_seconds_sum") > 0.2)


async def test_a_router_says_for_how_long_it_has_waited_for_a_core(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_loop, "CORE_WAIT_LOOK_S", 0.01)
    monkeypatch.setattr(event_loop.CoreWait, "seconds", lambda _: 2.0 * time.monotonic())
    front_end = await service.front_end()
    await until(lambda: front_end.count("event_loop_core_wait_seconds_total") > 0.02)


# What engines are told of promises


def told(replica: Replica, asked: FakeRequest) -> tuple[float | None, bool]:
    """Of a request on board: the seconds until its first token is due, and whether it goes on."""
    (found,) = (one for one in replica.engine._held.values() if one.request_id.startswith(f"{asked.request_id}~"))
    return found.told


async def test_an_engine_is_told_how_much_time_is_left_when_a_request_is_sent(service: Service) -> None:
    replica, front_end = await service.replica(slots=1), await service.front_end()
    replica.engine.pause()
    first, second = await front_end.ask(request()), await front_end.ask(request())
    await until(lambda: replica.engine.held == 1)
    await asyncio.sleep(0.1)
    waited_s = MonotonicClock().now() - second.timing.received_s
    await front_end.client.cancel([first.asked.request_id], "cancelled")
    await until(lambda: replica.engine.held == 1 and second.timing.assigned_s is not None)
    await until(lambda: any(one.startswith(f"{second.asked.request_id}~") for one in replica.engine._held))
    left_s, resumed = told(replica, second.asked)
    assert left_s is not None and second.timing.assigned_s is not None
    assert waited_s > 0.1
    assert left_s == pytest.approx(
        TARGETS_S["standard"] - (second.timing.assigned_s - second.timing.received_s), abs=0.05
    )
    assert not resumed
    replica.engine.resume()
    await service.finish([second])


async def test_who_can_be_in_time_goes_before_who_is_late(service: Service) -> None:
    replica, front_end = await service.replica(slots=1), await service.front_end()
    replica.engine.pause()
    answers = [await front_end.ask(request(), name) for name in ("patient", "soon", "standard", "offline", "later")]
    await until(lambda: replica.engine.held == 1)
    await asyncio.sleep(TARGETS_S["soon"])
    await until(lambda: front_end.count("waiting_max_seconds", slo_class="soon") > 0.1)
    replica.engine.resume()
    await service.finish(answers)
    starts_s = [answer.timing.assigned_s or 0.0 for answer in answers]
    assert sorted(range(5), key=starts_s.__getitem__) == [0, 2, 4, 1, 3]
    assert (await service.store.snapshot()).late == {("soon", "passed"): 1}
    await until(lambda: front_end.count("waiting_max_seconds", slo_class="soon") == 0.0)


async def test_what_goes_on_after_a_loss_starts_before_all_that_wait(service: Service) -> None:
    lost, front_end = await service.replica(slots=1), await service.front_end()
    (answer,) = await front_end.ask_each([request(600)])
    await until(lambda: bool(answer.tokens))
    waiting = [await front_end.ask(request(), "soon") for _ in range(3)]
    await lost.die()
    await service.replica(slots=1)
    await service.finish([answer, *waiting])
    assert answer.timing.last_token_s is not None
    assert all(other.timing.first_token_s > answer.timing.last_token_s for other in waiting)


async def test_what_goes_on_elsewhere_has_no_first_token_to_come(service: Service) -> None:
    lost, front_end = await service.replica(), await service.front_end()
    (answer,) = await front_end.ask_many(1, 600)
    await until(lambda: len(answer.tokens) > 3)
    other = await service.replica()
    other.engine.pause()
    await lost.die()
    await until(lambda: other.engine.held == 1)
    assert told(other, answer.asked) == (None, True)
    other.engine.resume()
    await service.finish([answer])


async def test_promises_kept_and_missed_are_counted_and_what_its_client_left_is_not(service: Service) -> None:
    replica, front_end = await service.replica(), await service.front_end()
    replica.engine.pause()
    late, left = await front_end.ask(request(), "soon"), await front_end.ask(request(), "soon")
    await until(lambda: replica.engine.held == 2)
    await asyncio.sleep(TARGETS_S["soon"])
    await front_end.client.cancel([left.asked.request_id], "cancelled")
    replica.engine.resume()
    await service.finish([late, await front_end.ask(request(), "patient")])
    assert front_end.count("slo_requests_total", slo_class="soon", ttft="missed", tpot="met") == 1
    assert front_end.count("slo_requests_total", slo_class="patient", ttft="met", tpot="met") == 1
    assert (
        sum(
            front_end.metrics.registry.get_sample_value(
                "sluice_slo_requests_total", {"slo_class": "soon", "ttft": a, "tpot": b}
            )
            or 0
            for a in ("met", "missed")
            for b in ("met", "missed")
        )
        == 1
    )


async def test_what_would_be_late_is_refused_where_its_class_says_so_and_what_it_was_told_is_checked(
    service: Service,
) -> None:
    replica, front_end = await service.replica(slots=1), await service.front_end()
    replica.engine.pause()
    waiting = await front_end.ask_many(160)  # 0.04 predicted seconds each, due before a strict request that comes later
    with pytest.raises(AdmissionError, match="late") as refused:
        await front_end.ask(request(), "strict")
    assert 0.0 < refused.value.retry_after_s < 4.0
    replica.engine.resume()
    await service.finish(waiting)
    await service.finish([await front_end.ask(request(), "strict")])
    assert front_end.count("retry_after_error_seconds_count", slo_class="strict") == 1
    assert front_end.count("requests_total", slo_class="strict", bin="0", outcome="refused") == 1
    assert front_end.count("refused_requests_total", slo_class="strict", reason="late") == 1
    assert front_end.count("slo_requests_total", slo_class="strict", ttft="missed", tpot="missed") == 1
    assert front_end.count("slo_requests_total", slo_class="strict", ttft="met", tpot="met") == 1


async def test_a_replica_with_enough_to_read_leaves_the_others_in_the_queue_until_it_has_read(service: Service) -> None:
    replica, front_end = await service.replica(slots=8, credit_s=0.04, token_s=0.01), await service.front_end()
    await until(lambda: front_end.client.snapshot.replicas["r0"].max_unread_tokens == 4)
    replica.engine.pause()
    answers = await front_end.ask_many(6, 400)  # of 3 tokens each
    await until(lambda: replica.engine.held == 2)
    load = (await service.store.snapshot()).replicas["r0"]
    assert (load.running, load.unread_tokens, load.credit) == (2, 6, 0)
    other = await service.replica(slots=1)
    await until(lambda: other.engine.held == 1)  # what has no place there goes elsewhere
    replica.engine.resume()
    await until(lambda: replica.engine.held == 5)  # long before one of them ends
    assert not any(answer.outcome for answer in answers)
    await service.finish(answers)
    assert (await service.store.snapshot()).replicas["r0"].unread_tokens == 0


# Work that fills idle capacity


async def ask_offline(front_end: FrontEnd, replica: Replica, number: int, *, replays: bool = False) -> list[Answer]:
    """So many long answers in the middle of their streams. Slow ones: a Redis that is busy keeps urgent requests from
    their replica for a while, and must not find these over. `hurry` when it does not matter any more."""
    replica.engine.step_s = 0.02
    answers = [await front_end.ask(request(600, replays=replays), "offline") for _ in range(number)]
    await until(lambda: all(answer.tokens for answer in answers))
    return answers


def hurry(replica: Replica) -> None:
    replica.engine.step_s = 0.001


async def test_offline_work_gives_its_slot_to_urgent_work_at_once_and_goes_on_where_it_stood(service: Service) -> None:
    replica = await service.replica(slots=3)
    one, other = [await service.front_end() for _ in range(2)]
    offline = await ask_offline(one, replica, 3)
    urgent = await other.ask_many(2)
    await until(lambda: all(answer.outcome for answer in urgent))
    assert not any(answer.outcome for answer in offline)
    hurry(replica)
    await service.finish([*urgent, *offline])
    assert one.count("requests_recalled_total", slo_class="offline") == 2


async def test_of_a_traced_request_is_noted_that_it_was_recalled_and_where_it_went_on(service: Service) -> None:
    replica, front_end = await service.replica(slots=1, step_s=0.02), await service.front_end()
    now_s = MonotonicClock().now()
    trail = Trail({"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"})
    timing = RequestTiming(received_s=now_s, submitted_s=now_s, trail=trail)
    offline = await front_end.ask(request(600), "offline", timing=timing)
    await until(lambda: bool(offline.tokens))
    (urgent,) = await front_end.ask_many(1)
    await until(lambda: urgent.outcome is not None)
    hurry(replica)
    await service.finish([urgent, offline])
    first, second = trail.stays
    assert (first.because, first.way, second.because, second.way) == ("recalled", "resumed", None, None)
    assert first.first_s is not None and second.first_s is not None and second.sent_tokens > 0
    assert first.left_s is not None and first.sent_s <= first.first_s <= first.left_s <= second.sent_s <= second.first_s


async def test_urgent_work_that_finds_a_free_slot_disturbs_nobody(service: Service) -> None:
    replica, front_end = await service.replica(slots=4), await service.front_end()
    offline = await ask_offline(front_end, replica, 3)
    (urgent,) = await front_end.ask_many(1)
    await until(lambda: urgent.outcome is not None)
    hurry(replica)
    await service.finish([urgent, *offline])
    assert front_end.count("requests_recalled_total", slo_class="offline") == 0


async def test_what_cannot_be_continued_exactly_keeps_its_slot(service: Service) -> None:
    replica, front_end = await service.replica(slots=1), await service.front_end()
    (offline,) = await ask_offline(front_end, replica, 1, replays=True)
    urgent = await front_end.ask_many(2)
    hurry(replica)
    await until(lambda: any(answer.tokens for answer in urgent))
    assert offline.outcome is not None
    await service.finish([*urgent, offline])


async def test_a_request_loses_its_slot_only_so_often(service: Service) -> None:
    replica, front_end = await service.replica(slots=1), await service.front_end()
    (offline,) = await ask_offline(front_end, replica, 1)
    answers = []
    for number in range(6):
        if number == 3:
            hurry(replica)  # from now on it keeps its slot, to its end
        seen = len(offline.tokens)
        (urgent,) = await front_end.ask_many(1)
        await until(lambda answer=urgent: answer.outcome is not None)  # type: ignore[misc]
        await until(lambda least=seen: len(offline.tokens) > least or offline.outcome)  # type: ignore[misc]
        answers.append(urgent)
    await service.finish([*answers, offline])
    assert front_end.count("requests_recalled_total", slo_class="offline") == 3


async def test_a_recall_whose_notice_is_lost_is_found_with_the_heartbeat(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica, front_end = await service.replica(slots=1), await service.front_end()
    (offline,) = await ask_offline(front_end, replica, 1)
    (listener,) = [task for task in front_end.client.background._tasks if task.get_name() == "listen"]
    listener.cancel()
    (urgent,) = await front_end.ask_many(1)
    await until(lambda: urgent.outcome is not None)
    assert offline.outcome is None
    hurry(replica)
    await service.finish([urgent, offline])


# When a replica is lost


@pytest.mark.parametrize(("replays", "way"), [(False, "resumed"), (True, "replayed")])
async def test_requests_of_a_killed_replica_go_on_elsewhere(service: Service, replays: bool, way: str) -> None:
    victim = await service.replica(slots=4)
    front_end = await service.front_end()
    answers = await front_end.ask_at_once(victim, requests(8, 60, replays=replays), held=4)
    await until(lambda: sum(len(answer.tokens) > 5 for answer in answers) == 4)
    await victim.die()
    await service.replica(slots=4)
    await service.finish(answers)
    assert front_end.count("requests_recovered_total", way=way) == 4


async def just_lost(front_end: FrontEnd) -> None:
    """The connection to the first replica is closed, and whoever reads from it has not woken yet."""
    connection = front_end.client.connections.get("r0")
    assert connection is not None
    connection._writer.transport.abort()
    await asyncio.sleep(0)
    assert front_end.client.connections.get("r0") is connection


async def test_a_request_for_a_connection_that_broke_a_moment_ago_goes_on(service: Service) -> None:
    replica, front_end = await service.replica(), await service.front_end()
    replica.engine.pause()
    answer = await front_end.ask(request())
    await until(lambda: replica.engine.held == 1)
    entry = front_end.client.ledger[answer.asked.request_id]
    await just_lost(front_end)
    entry.take_back("lost", 0.0)
    entry.move(State.QUEUEING)
    front_end.client.sending.place(Assignment(entry.request_id, "r0"))
    replica.engine.resume()
    await service.finish([answer])


async def test_requests_on_a_connection_that_broke_a_moment_ago_can_be_cancelled(service: Service) -> None:
    replica, front_end = await service.replica(), await service.front_end()
    replica.engine.pause()
    answers = await front_end.ask_many(2)
    await until(lambda: replica.engine.held == 2)
    await just_lost(front_end)
    await front_end.client.cancel([answer.asked.request_id for answer in answers], "cancelled")
    replica.engine.resume()
    await service.is_empty()


async def test_a_connection_that_broke_a_moment_ago_is_asked_nothing(service: Service) -> None:
    await service.replica()
    front_end = await service.front_end()
    await service.finish([await front_end.ask(request())])
    connection = front_end.client.connections.get("r0")
    assert connection is not None
    await just_lost(front_end)
    with pytest.raises(ReplicaLostError, match="gone"):
        await connection.call("status", timeout_s=3600.0)


async def test_requests_that_had_sent_nothing_start_anew(service: Service) -> None:
    victim, front_end = await service.replica(slots=4), await service.front_end()
    victim.engine.pause()
    answers = await front_end.ask_many(4)
    await until(lambda: victim.engine.held == 4)
    await victim.die()
    await service.replica()
    await service.finish(answers)
    assert front_end.count("requests_recovered_total", way="requeued") == 4


@pytest.mark.parametrize("replays", [False, True])
async def test_requests_survive_one_replica_after_another(service: Service, replays: bool) -> None:
    front_end = await service.front_end()
    victim = await service.replica()
    answers = await front_end.ask_many(4, 60, replays=replays)
    for tokens in (5, 20, 35):
        await until(lambda tokens=tokens: all(len(answer.tokens) > tokens for answer in answers))  # type: ignore[misc]
        await victim.die()
        victim = await service.replica()
    await service.finish(answers)


async def test_a_replica_lost_in_the_middle_of_a_replay_changes_nothing(service: Service) -> None:
    front_end, victim = await service.front_end(), await service.replica()
    answers = await front_end.ask_at_once(victim, requests(4, 60, replays=True), held=4)
    await until(lambda: all(len(answer.tokens) > 30 for answer in answers))
    await victim.die()
    victim = await service.replica(step_s=0.01)
    victim.engine.pause()
    await until(lambda: victim.engine.held == 4)
    victim.engine.resume()
    await asyncio.sleep(0.1)  # about ten tokens of thirty
    await victim.die()
    await service.replica()
    await service.finish(answers)


async def test_a_replay_that_differs_ends_with_an_error(service: Service) -> None:
    victim, front_end = await service.replica(), await service.front_end()
    answers = await front_end.ask_at_once(victim, requests(4, 60, replays=True), held=4)
    await until(lambda: all(len(answer.tokens) > 5 for answer in answers))
    await victim.die()
    other = await service.replica(salt=1)
    await until(lambda: all(answer.outcome is not None for answer in answers))
    assert {answer.outcome for answer in answers} == {"error"}
    for answer in answers:
        assert answer.tokens == answer.expected[: len(answer.tokens)]
    await service.is_empty()
    assert other.relay.healthy


async def test_an_answer_in_one_piece_begins_anew_where_a_replay_would_differ(service: Service) -> None:
    victim, front_end = await service.replica(), await service.front_end()
    asked = [msgspec.structs.replace(request(60, replays=True), in_one_piece=True) for _ in range(4)]
    answers = await front_end.ask_at_once(victim, asked, held=4)
    entries = list(front_end.client.ledger.values())
    await until(lambda: all(len(entry.sent) > 5 for entry in entries))
    assert not any(answer.tokens for answer in answers)
    await victim.die()
    await service.replica(salt=1)
    await until(lambda: all(answer.outcome is not None for answer in answers))
    for answer in answers:
        assert (answer.outcome, answer.tokens) == ("length", undisturbed(answer.asked.prompt, 60, salt=1))
    assert front_end.count("output_tokens_total", slo_class="standard") == 240
    await service.is_empty()


async def test_an_answer_in_one_piece_that_can_be_resumed_is_not_computed_twice(service: Service) -> None:
    victim, front_end = await service.replica(), await service.front_end()
    answer = await front_end.ask(msgspec.structs.replace(request(60), in_one_piece=True))
    await until(lambda: len(answer.tokens) > 5)
    await victim.die()
    await service.replica()
    await service.finish([answer])
    assert front_end.count("requests_recovered_total", way="resumed") == 1


async def test_a_replay_that_ends_too_soon_ends_with_an_error(service: Service) -> None:
    victim, front_end = await service.replica(), await service.front_end()
    answer = await front_end.ask(request(60, replays=True))
    await until(lambda: len(answer.tokens) > 20)
    answer.asked.max_tokens = 10  # what the other replica will be asked for
    await victim.die()
    await service.replica()
    await until(lambda: answer.outcome == "error")
    await service.is_empty()


async def test_a_request_is_not_moved_for_ever(service: Service) -> None:
    front_end = await service.front_end(max_moves=1)
    answer = await front_end.ask(request(10_000))
    for _ in range(2):
        victim = await service.replica()
        await until(lambda victim=victim: victim.engine.held == 1)  # type: ignore[misc]
        await victim.die()
    await until(lambda: answer.outcome == "error")
    await service.is_empty()


async def test_an_engine_that_dies_hands_its_requests_over_at_once(service: Service) -> None:
    victim = await service.replica(silence_s=3600.0)
    front_end = await service.front_end()
    answers = await front_end.ask_many(4, 60)
    await until(lambda: all(answer.tokens for answer in answers))
    victim.engine.die()
    await service.replica()
    await service.finish(answers)
    await victim.relay.drain()


async def test_requests_cancelled_while_the_loss_of_their_replica_is_told_are_not_queued_again(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim, front_end = await service.replica(), await service.front_end()
    victim.engine.pause()
    answers = await front_end.ask_many(4)
    await until(lambda: victim.engine.held == 4)
    told, go_on = asyncio.Event(), asyncio.Event()
    drop = front_end.client.store.drop_replica

    async def slow(replica_id: str) -> None:
        told.set()
        await go_on.wait()
        await drop(replica_id)

    monkeypatch.setattr(front_end.client.store, "drop_replica", slow)
    await victim.die()
    await told.wait()
    await front_end.client.cancel([answer.asked.request_id for answer in answers], "cancelled")
    go_on.set()
    await until(lambda: "connection" not in {task.get_name() for task in front_end.client.background._tasks})
    await until(lambda: "requeue" not in {task.get_name() for task in front_end.client.background._tasks})
    assert not (await service.store.snapshot()).waiting


@pytest.mark.parametrize("replays", [False, True])
async def test_an_engine_that_is_told_to_end_cuts_no_answer_short(service: Service, replays: bool) -> None:
    victim, front_end = await service.replica(), await service.front_end(silence_s=3600.0)
    answers = await front_end.ask_at_once(victim, requests(4, 60, replays=replays), held=4)
    await until(lambda: all(len(answer.tokens) > 5 for answer in answers))
    victim.engine.end()
    await service.replica()
    await service.finish(answers)
    assert not victim.relay.healthy


@pytest.mark.slow
async def test_a_replica_that_hangs_is_left_after_its_silence(service: Service) -> None:
    victim = await service.replica(silence_s=0.5)
    front_end = await service.front_end()
    answers = await front_end.ask_many(4, 60)
    await until(lambda: all(answer.tokens for answer in answers))
    await victim.stop_beating()
    await service.replica()
    await service.finish(answers)


async def test_a_replica_that_another_router_found_lost_is_left_too(service: Service) -> None:
    """Its host is gone: one router's connection broke, the other's will not for a quarter of an hour."""
    victim, front_end = await service.replica(silence_s=3600.0), await service.front_end()
    answers = await front_end.ask_many(4, 60)
    await until(lambda: all(answer.tokens for answer in answers))
    await victim.stop_beating()
    await service.store.drop_replica(victim.replica_id)
    await service.replica()
    await service.finish(answers)


async def test_a_replica_that_accepts_and_says_nothing_costs_no_move(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "HANDSHAKE_TIMEOUT_S", 10 * HEARTBEAT_S)
    front_end = await service.front_end(max_moves=0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        await service.store.register_replica(_info("silent", port=silent.getsockname()[1]), 4, [])
        answers = await front_end.ask_many(3)
        await asyncio.sleep(4 * HEARTBEAT_S)
        await service.replica()
        await service.finish(answers)
    assert front_end.count("requests_recovered_total", way="requeued") == 0


async def test_a_replica_that_comes_back_and_stays_out_of_reach_holds_no_request_beyond_its_wait(
    service: Service,
) -> None:
    front_end = await service.front_end(max_wait_s=60 * HEARTBEAT_S, max_moves=0)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        info = _info("unreachable", port=closed.getsockname()[1])
    asked_s = asyncio.get_running_loop().time()
    answers = await front_end.ask_many(3)
    async with asyncio.timeout(PATIENCE_S):
        while not all(answer.outcome for answer in answers):
            await service.store.register_replica(info, 4, [])
            await asyncio.sleep(HEARTBEAT_S / 2)
    assert {answer.outcome for answer in answers} == {"error"}
    assert asyncio.get_running_loop().time() - asked_s > 59 * HEARTBEAT_S, "they were given up before their time"
    assert front_end.count("replicas_out_of_reach_total") > 0
    await service.is_empty()


async def test_a_replica_of_another_version_costs_no_move(service: Service) -> None:
    stranger = await service.replica(version="fake-2")
    front_end = await service.front_end(max_moves=0)
    answers = await front_end.ask_many(3)
    await stranger.relay.close()
    await service.replica()
    await service.finish(answers)
    assert stranger.engine.taken == 0


async def test_a_broken_network_between_the_living_loses_nothing(service: Service) -> None:
    replica, front_end = await service.replica(slots=4), await service.front_end()
    answers = await front_end.ask_many(8, 60)
    for tokens in (5, 15, 25):
        await until(lambda tokens=tokens: any(len(answer.tokens) > tokens for answer in answers))  # type: ignore[misc]
        before = set(replica.relay._writers)
        replica.hang_up()
        await until(lambda before=before: not before & replica.relay._writers)  # type: ignore[misc]
    await service.finish(answers)
    assert replica.relay.healthy


async def test_a_request_that_comes_again_while_its_old_connection_seems_alive_starts_clean(service: Service) -> None:
    replica = await service.replica(slots=4)
    line = await Line.to(replica.relay.info.port)
    await service.store.register_replica(msgspec.structs.replace(replica.relay.info, port=line.port), 4, [])
    front_end = await service.front_end()
    answers = await front_end.ask_at_once(replica, requests(4, 60), held=4)
    await until(lambda: all(len(answer.tokens) > 5 for answer in answers))
    replica.engine.step_s = 0.1  # none ends before all have come again
    line.cut_off_router()
    await until(lambda: replica.engine.taken == 8)
    replica.engine.pause()
    answers += await front_end.ask_many(4)
    line.hang_up()
    await until(lambda: len(replica.relay._writers) == 1)
    await asyncio.sleep(2 * HEARTBEAT_S)
    assert (replica.engine.held, replica.engine.most_held, replica.engine.taken) == (4, 4, 8)
    replica.engine.step_s = 0.002
    replica.engine.resume()
    await service.finish(answers)


async def test_a_replica_drains_before_it_leaves(service: Service) -> None:
    leaver, front_end = await service.replica(), await service.front_end()
    answers = await front_end.ask_many(4, 60)
    await until(lambda: all(answer.tokens for answer in answers))
    other = await service.replica(slots=1)
    other.engine.pause()
    draining = asyncio.create_task(leaver.relay.drain())
    await until(lambda: front_end.client.snapshot.replicas["r0"].slots == 0)  # all know it, and not the leaver alone
    answers += await front_end.ask_many(4)
    await draining
    await leaver.relay.close()
    await until(lambda: [answer.outcome for answer in answers] == ["length"] * 4 + [None] * 4)
    other.engine.resume()
    await service.finish(answers)
    assert (leaver.engine.taken, other.engine.taken) == (4, 4)
    assert front_end.count("requests_recovered_total", way="resumed") == 0


async def test_the_last_replicas_serve_what_waits_before_they_leave(service: Service) -> None:
    """Both leave at once, and neither can count on the other; some requests have not arrived when they are told to."""
    leavers, front_end = [await service.replica(slots=2) for _ in range(2)], await service.front_end()
    answers = await front_end.ask_many(12)
    await asyncio.gather(*(leaver.relay.drain() for leaver in leavers))
    for leaver in leavers:
        await leaver.relay.close()
    await until(lambda: all(answer.outcome for answer in answers))
    await service.finish(answers)
    assert sum(leaver.engine.taken for leaver in leavers) == 12
    assert front_end.count("replicas_lost_total") == 0


async def test_the_last_replica_serves_what_waits_no_longer_than_it_may(service: Service) -> None:
    leaver, front_end = await service.replica(slots=1), await service.front_end()
    leaver.engine.pause()
    answers = await front_end.ask_many(3)
    await until(lambda: leaver.engine.held == 1)
    draining = asyncio.create_task(leaver.relay.drain(serving_s=0.0))
    await until(lambda: front_end.client.snapshot.replicas["r0"].slots == 0)
    leaver.engine.resume()
    await draining
    await leaver.relay.close()
    await service.replica()
    await service.finish(answers)
    assert leaver.engine.taken == 1


async def test_a_replica_does_not_stay_for_what_it_may_not_take(service: Service) -> None:
    front_end = await service.front_end()
    answers = await front_end.ask_many(2)
    leaver = await service.replica(classes=("patient",))
    await leaver.relay.drain()
    await leaver.relay.close()
    await service.replica()
    await service.finish(answers)


async def test_a_replica_that_drained_is_not_counted_as_lost(service: Service) -> None:
    leaver, front_end = await service.replica(), await service.front_end()
    await service.finish(await front_end.ask_many(4))
    (reading,) = [task for task in front_end.client.background._tasks if task.get_name() == "connection"]
    await leaver.relay.drain()
    await leaver.relay.close()
    await asyncio.wait([reading])
    assert front_end.count("replicas_lost_total") == 0


@pytest.mark.parametrize("hangs", [False, True])
async def test_an_idle_replica_that_dies_or_hangs_is_counted_as_lost(service: Service, hangs: bool) -> None:
    victim, front_end = await service.replica(silence_s=0.5 if hangs else 3600.0), await service.front_end()
    await service.finish(await front_end.ask_many(4))
    await (victim.stop_beating() if hangs else victim.die())
    await until(lambda: front_end.count("replicas_lost_total") > 0)


# When a router is lost


async def test_a_router_that_dies_has_its_slots_released_and_its_queue_forgotten(service: Service) -> None:
    replica = await service.replica(slots=2, lease_s=0.5)
    victim, survivor = [await service.front_end(silence_s=0.5) for _ in range(2)]
    await victim.ask_many(5, 10_000)
    await until(lambda: replica.engine.held >= 2)  # more where the way there took longer than the lease
    await victim.die()
    service.front_ends.remove(victim)
    await service.finish(await survivor.ask_many(4))


async def test_a_router_that_leaves_takes_its_queue_with_it(service: Service) -> None:
    leaver, survivor = [await service.front_end(silence_s=3600.0) for _ in range(2)]
    await leaver.ask_many(5, 10_000)
    await leaver.close()
    service.front_ends.remove(leaver)
    replica = await service.replica(slots=2)
    await service.finish(await survivor.ask_many(4))
    assert replica.engine.taken == 4


# When the shared state forgets, or is away


async def test_lost_notices_are_found_by_the_heartbeat(redis_url: str, service: Service) -> None:
    replica, front_end = await service.replica(slots=1), await service.front_end()
    replica.engine.pause()
    answers = await front_end.ask_many(3)
    (listening,) = [task for task in front_end.client.background._tasks if task.get_name() == "listen"]
    listening.cancel()
    replica.engine.resume()
    await service.finish(answers)


async def test_it_listens_again_after_its_subscription_was_cut(redis_url: str, service: Service) -> None:
    await service.replica(slots=1)
    front_end = await service.front_end()
    admin = connect(redis_url)
    answers = []
    for _ in range(3):
        answers += await front_end.ask_many(3)
        await admin.client_kill_filter(_type="pubsub")
    await service.finish(answers)
    await admin.aclose()


async def test_an_assignment_told_twice_is_sent_once(service: Service) -> None:
    replica, front_end = await service.replica(), await service.front_end()
    replica.engine.pause()
    answer = await front_end.ask(request())
    await until(lambda: replica.engine.held == 1)
    for _ in range(3):
        front_end.client.sending.place(Assignment(answer.asked.request_id, "r0"))
    replica.engine.resume()
    await service.finish([answer])
    assert replica.engine.taken == 1


async def test_a_slot_of_a_second_replica_is_given_back(service: Service) -> None:
    replica, front_end = await service.replica(), await service.front_end()
    replica.engine.pause()
    answer = await front_end.ask(request())
    await until(lambda: replica.engine.held == 1)
    await service.store.register_replica(_info("other"), 1, [])
    await service.store.drop_replica("r0")
    assert await service.store.enqueue(front_end.client.ledger[answer.asked.request_id].ticket)
    front_end.client.sending.place(Assignment(answer.asked.request_id, "other"))
    replica.engine.resume()
    await service.finish([answer])


async def test_a_flushed_redis_loses_nothing(redis_url: str, service: Service) -> None:
    for _ in range(2):
        await service.replica(slots=2)
    front_ends = [await service.front_end() for _ in range(2)]
    answers = [answer for front_end in front_ends for answer in await front_end.ask_many(10, 40)]
    await until(lambda: any(len(answer.tokens) > 10 for answer in answers))
    admin = connect(redis_url)
    await admin.flushall()
    await admin.aclose()
    answers += await (await service.front_end()).ask_many(4)  # one that comes after the flush reaches those from before
    await service.finish(answers)
    assert [replica.engine.most_held for replica in service.replicas] == [2, 2]


async def test_a_redis_that_comes_back_empty_loses_nothing() -> None:
    port, password = free_port(), secrets.token_urlsafe(16)
    server = EmbeddedRedis(port, password)
    service = Service(server.url)
    for _ in range(2):
        await service.replica(slots=2)
    front_end = await service.front_end()
    answers = await front_end.ask_many(12, 60)
    await until(lambda: any(len(answer.tokens) > 5 for answer in answers))
    server.close()
    await until(lambda: sum(answer.outcome is not None for answer in answers) >= 4)  # what runs is not disturbed
    server = EmbeddedRedis(port, password)
    await service.finish(answers)
    await service.close()
    server.close()


@pytest.fixture
async def gate(redis_url: str) -> AsyncIterator[Gate]:
    made = Gate(redis_url)
    await made.open()
    yield made
    made.shut()


async def test_while_redis_is_away_new_requests_use_the_capacity_known_last(gate: Gate) -> None:
    service = Service(gate.url)
    for _ in range(2):
        await service.replica(slots=3)
    front_end = await service.front_end()
    for replica in service.replicas:  # none is over before the router knows of all
        replica.engine.pause()
    first = await front_end.ask_many(4, 200)
    await until(lambda: sum(replica.engine.held for replica in service.replicas) == 4)
    at = front_end.client
    await until(lambda: not at.snapshot.waiting and sum(r.running for r in at.snapshot.replicas.values()) == 4)
    gate.shut()
    for replica in service.replicas:
        replica.engine.resume()
    more = await asyncio.gather(*(front_end.ask(request(20)) for _ in range(10)))
    await until(lambda: all(answer.outcome == "length" for answer in more))
    await until(lambda: not front_end.client.queueing.is_cut_off)
    late = await asyncio.gather(*(front_end.ask(request(60)) for _ in range(10)))
    await until(lambda: any(answer.tokens for answer in late))
    assert max(replica.engine.most_held for replica in service.replicas) <= 3
    await gate.open()
    await service.finish([*first, *more, *late])
    await service.close()


async def test_what_waited_when_redis_went_away_is_served_without_it(gate: Gate) -> None:
    service = Service(gate.url)
    replica = await service.replica(slots=2)
    front_end = await service.front_end()
    answers = await front_end.ask_at_once(replica, requests(8, 60), held=2)
    await until(lambda: sum(bool(answer.tokens) for answer in answers) == 2)
    gate.shut()
    await until(lambda: all(answer.outcome == "length" for answer in answers))
    await gate.open()
    await service.finish(answers)
    assert service.replicas[0].engine.taken == 8
    await service.close()


async def test_whoever_is_cancelled_while_redis_is_away_leaves_every_slot_to_others(gate: Gate) -> None:
    """Those that run on one connection or another, and those that wait."""
    service = Service(gate.url)
    for _ in range(2):
        await service.replica(slots=3)
    front_end = await service.front_end()
    first = await front_end.ask_many(6, 5000)
    await until(lambda: all(answer.tokens for answer in first))
    await until(lambda: sum(load.running for load in front_end.client.snapshot.replicas.values()) == 6)
    gate.shut()
    waiting = await front_end.ask_many(4, 5000)
    await front_end.client.cancel(list(front_end.client.ledger), "cancelled")
    assert "cancel" not in {task.get_name() for task in front_end.client.background._tasks}, "all are told at once"
    more = await front_end.ask_many(6, 2000)
    await until(lambda: all(answer.tokens for answer in more))
    await front_end.client.cancel(list(front_end.client.ledger), "cancelled")
    assert not any(answer.tokens for answer in waiting)
    await gate.open()
    await service.close()


@pytest.mark.parametrize("known", [True, False], ids=["when all know", "before anybody knows"])
async def test_a_replica_lost_while_redis_is_away_loses_nothing(gate: Gate, known: bool) -> None:
    service = Service(gate.url)
    for _ in range(2):
        await service.replica(slots=4)
    front_end = await service.front_end()
    answers = await front_end.ask_many(8, 100)
    await until(lambda: all(answer.tokens for answer in answers))
    gate.shut()
    if known:
        answers += await front_end.ask_many(2, 20)
    await service.replicas[0].die()
    await until(lambda: all(answer.outcome is not None for answer in answers))
    await gate.open()
    await service.finish(answers)
    await service.close()


async def test_a_new_request_does_not_wait_for_a_redis_that_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_store, "CALL_TIMEOUT_S", 10 * PATIENCE_S)
    server = EmbeddedRedis(free_port(), secrets.token_urlsafe(16))
    service = Service(server.url)
    await service.replica(slots=4)
    front_end = await service.front_end()
    await service.finish(first := await front_end.ask_many(2))
    os.kill(server.pid, signal.SIGSTOP)
    try:
        second = await asyncio.wait_for(front_end.ask_many(2), PATIENCE_S)
        await until(lambda: all(answer.outcome == "length" for answer in second))
    finally:
        os.kill(server.pid, signal.SIGCONT)
    await service.finish([*first, *second])
    await service.close()
    server.close()


@pytest.mark.slow
async def test_a_class_that_was_full_when_redis_went_away_is_asked_again(gate: Gate) -> None:
    service = Service(gate.url)
    front_end = await service.front_end(max_waiting=2)
    replica = await service.replica(slots=1)
    replica.engine.pause()  # the first is not over before the router knows that the class is full
    running = await front_end.ask_many(3, 200)
    await until(lambda: replica.engine.held == 1 and front_end.client.entrance.room("standard") == 0)
    gate.shut()
    replica.engine.resume()
    await until(lambda: front_end.client.entrance.room("standard") > 0)
    await until(lambda: all(answer.outcome for answer in running))
    more = await front_end.ask_many(1)
    await until(lambda: all(answer.outcome for answer in more))
    assert replica.engine.taken == 4
    await gate.open()
    await service.finish([*running, *more])
    await service.close()


@pytest.mark.slow
async def test_without_redis_a_new_request_is_refused_in_words() -> None:
    server = EmbeddedRedis(free_port(), secrets.token_urlsafe(16))
    service = Service(server.url)
    front_end = await service.front_end()
    await until(lambda: not front_end.client.queueing.is_cut_off)
    server.close()
    with pytest.raises(StateStoreError, match="Redis"):
        await front_end.ask(request())
    assert not front_end.client.ledger
    await until(lambda: front_end.client.queueing.is_cut_off)
    timing = RequestTiming(received_s=0.0, submitted_s=0.0)
    with pytest.raises(StateStoreError):
        front_end.client.check_room("standard", 1, timing)
    assert timing.outcome == "error"
    await service.close()


@pytest.mark.slow
async def test_a_redis_that_stands_still_for_a_while_doubles_nothing(redis_url: str, service: Service) -> None:
    replica, front_end = await service.replica(slots=4, lease_s=3600.0), await service.front_end()
    admin = connect(redis_url)
    asking = []
    for _ in range(3):
        await admin.client_pause(round(4000 * HEARTBEAT_S))
        asking.append(asyncio.create_task(front_end.ask_many(6)))
        await asyncio.sleep(6 * HEARTBEAT_S)
    answers = [answer for batch in await asyncio.gather(*asking) for answer in batch]
    await service.finish(answers)
    assert (replica.engine.taken, replica.engine.most_held) == (18, 4)
    await admin.aclose()


# What replicas have cached, as they tell it

PROMPT = list(range(41))  # ten blocks of a `FakeCache`


async def hits(front_end: FrontEnd) -> dict[str, int]:
    return dict((await front_end.client.caches.sized(FakeRequest(request_id="?", prompt=PROMPT, max_tokens=1))).hits)


async def hits_are(front_end: FrontEnd, **expected: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            if await hits(front_end) == expected:
                return
            await asyncio.sleep(HEARTBEAT_S)


def all_blocks(replica: Replica) -> set[int]:
    assert replica.engine.cache is not None
    asked = FakeRequest(request_id="?", prompt=PROMPT, max_tokens=1)
    return set(replica.engine.codec.block_hashes(asked, replica.engine.cache.hashing))


async def caching(service: Service, count: int) -> list[Replica]:
    made = [await service.replica(slots=64) for _ in range(count)]
    for replica in made:
        replica.engine.cache = FakeCache()
    return made


async def test_a_router_that_has_sent_nothing_knows_where_a_prompt_is_cached(service: Service) -> None:
    _, holder, _ = await caching(service, 3)
    holder.engine.cache.blocks = all_blocks(holder)  # type: ignore[union-attr]
    front_end = await service.front_end(prefill_s=1e-3)
    await hits_are(front_end, r0=0, r1=40, r2=0)
    await service.finish([await front_end.ask(FakeRequest(request_id="q", prompt=PROMPT, max_tokens=3))])
    assert [replica.engine.taken for replica in service.replicas] == [0, 1, 0]
    assert front_end.count("predicted_hit_tokens_total", slo_class="standard", replica="r1") == 40


async def test_a_request_that_is_moved_goes_on_where_its_prompt_is_cached(service: Service) -> None:
    lost, *_, holder = await caching(service, 3)
    lost.engine.cache.blocks = all_blocks(lost)  # type: ignore[union-attr]
    front_end = await service.front_end(prefill_s=1e-3)
    await hits_are(front_end, r0=40, r1=0, r2=0)
    answer = await front_end.ask(FakeRequest(request_id="q", prompt=PROMPT, max_tokens=2000))
    holder.engine.cache.blocks = all_blocks(holder)  # type: ignore[union-attr]
    await front_end.ask(FakeRequest(request_id="p", prompt=[1], max_tokens=3))
    holder.relay._blocks.due.set()
    await hits_are(front_end, r0=40, r1=0, r2=40)
    await lost.die()
    await until(lambda: holder.engine.held == 1)
    await front_end.client.cancel([answer.asked.request_id], "cancelled")


async def test_each_router_hears_of_what_the_other_one_sent(service: Service) -> None:
    (replica,) = await caching(service, 1)
    one, other = [await service.front_end() for _ in range(2)]
    await hits_are(one, r0=0)
    await service.finish([await one.ask(FakeRequest(request_id="q", prompt=PROMPT, max_tokens=3))])
    await hits_are(other, r0=40)
    replica.engine.cache.blocks.clear()  # type: ignore[union-attr]
    await service.finish([await one.ask(FakeRequest(request_id="p", prompt=[1], max_tokens=3))])
    await hits_are(other, r0=0)


async def test_what_was_just_sent_counts_before_the_replica_tells_it(service: Service) -> None:
    (replica,) = await caching(service, 1)
    front_end = await service.front_end()
    await hits_are(front_end, r0=0)
    replica.engine.pause()
    answer = await front_end.ask(FakeRequest(request_id="q", prompt=PROMPT, max_tokens=3))
    assert await hits(front_end) == {"r0": 40}
    replica.engine.resume()
    await service.finish([answer])


async def test_a_replica_that_evicts_is_not_taken_for_one_that_was_given_the_prompt(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of what was sent where is for replicas that do not tell."""
    monkeypatch.setattr(cached_blocks, "ON_THE_WAY_S", 0.0)
    (replica,) = await caching(service, 1)
    front_end = await service.front_end()
    prompt = list(range(100))  # longer than a block of that memory
    await hits_are(front_end, r0=0)
    await service.finish([await front_end.ask(FakeRequest(request_id="q", prompt=prompt, max_tokens=3))])
    size = await front_end.client.caches.sized(FakeRequest(request_id="p", prompt=prompt, max_tokens=3))
    silent = replace(size, hits={})
    told = replace(size, hits={"r0": 0})
    classifier = front_end.client.classifier
    prefixes = [classifier.ticket(each, "standard", "a", 0.0, ["r0"]).ticket.prefixes for each in (silent, told)]
    assert prefixes == [(("r0", 64),), ()]


async def test_what_a_lost_replica_had_cached_is_forgotten_and_told_again(service: Service) -> None:
    (replica,) = await caching(service, 1)
    replica.engine.cache.blocks = all_blocks(replica)  # type: ignore[union-attr]
    front_end = await service.front_end()
    await hits_are(front_end, r0=40)
    replica.hang_up()
    await hits_are(front_end)
    await hits_are(front_end, r0=40)


async def test_nobody_waits_for_a_killed_replica_because_it_had_the_prompt_cached(service: Service) -> None:
    holder, other = [await service.replica(slots=1) for _ in range(2)]
    for replica in (holder, other):
        replica.engine.cache = FakeCache()
        replica.engine.pause()
    holder.engine.cache.blocks = all_blocks(holder)  # type: ignore[union-attr]
    front_end = await service.front_end(prefill_s=1e-3)
    await hits_are(front_end, r0=40, r1=0)
    prompts = {"there": PROMPT, "elsewhere": [1], "waiting": PROMPT}
    answers = [await front_end.ask(FakeRequest(request_id=n, prompt=p, max_tokens=3)) for n, p in prompts.items()]
    await until(lambda: (holder.engine.held, other.engine.held) == (1, 1))
    await holder.die()
    other.engine.resume()
    await service.finish(answers)
    assert other.engine.taken == 3
    assert await hits(front_end) == {"r1": 40}
    assert front_end.count("predicted_hit_tokens_total", slo_class="standard", replica="r0") == 0


async def test_a_router_that_missed_changes_asks_for_the_whole(service: Service) -> None:
    (replica,) = await caching(service, 1)
    front_end = await service.front_end()
    await hits_are(front_end, r0=0)
    replica.engine.cache.blocks = all_blocks(replica)  # type: ignore[union-attr]
    front_end.client.caches.blocks._replicas["r0"].told.sequence = 1000
    await service.finish([await front_end.ask(FakeRequest(request_id="p", prompt=[1], max_tokens=3))])
    await hits_are(front_end, r0=40)
    assert front_end.count("cached_block_gaps_total") == 1


async def test_a_long_prompt_is_hashed_beside_the_event_loop(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    await caching(service, 1)
    front_end = await service.front_end()
    await hits_are(front_end, r0=0)
    threads: list[str] = []
    hashed = FakeCodec.block_hashes

    def noting(codec: FakeCodec, asked: FakeRequest, hashing: BlockHashing) -> Sequence[int]:
        threads.append(threading.current_thread().name)
        return hashed(codec, asked, hashing)

    monkeypatch.setattr(FakeCodec, "block_hashes", noting)
    monkeypatch.setattr(prompt_caches, "LONG_PROMPT_TOKENS", len(PROMPT))
    for prompt in (PROMPT, PROMPT[:-1]):
        await front_end.client.caches.sized(FakeRequest(request_id="q", prompt=prompt, max_tokens=3))
    assert [name == threading.main_thread().name for name in threads] == [False, True]


# What a key is charged, and how much of a queue it may have

SLOW_TENANT = Tenant(
    name="slow", tokens_per_minute=6
)  # a token in ten seconds: within a test next to nothing comes back
PROMPT_TOKENS = 3


async def owed(service: Service, tenant: Tenant = SLOW_TENANT) -> float:
    """Tokens that must come back until the allowance is whole."""
    quota = tenant.token_quota(0.0)
    assert quota is not None
    refused = await service.store.charge([replace(quota, burst=1e-9)])
    return 0.0 if refused is None else refused.retry_after_s * quota.per_s


async def until_owed(service: Service, least: float, most: float = math.inf, tenant: Tenant = SLOW_TENANT) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            if least <= await owed(service, tenant) <= most:
                return
            await asyncio.sleep(HEARTBEAT_S)


async def owes(service: Service, tokens: float) -> None:
    """Some seconds later at most, of which not much came back."""
    await until_owed(service, tokens - 3, tokens + 0.01)
    await asyncio.sleep(4 * HEARTBEAT_S)
    assert tokens - 4 < await owed(service) <= tokens + 0.01, "it was settled twice"


async def test_an_answer_longer_than_predicted_is_paid_before_the_key_may_ask_again(service: Service) -> None:
    await service.replica()
    front_end = await service.front_end()
    answer = await front_end.ask(request(400), tenant=SLOW_TENANT)
    assert await owed(service) < PROMPT_TOKENS + 17, "so much was predicted"
    await service.finish([answer])
    await owes(service, PROMPT_TOKENS + 400)
    with pytest.raises(AdmissionError, match="tokens_per_minute of slow") as refused:
        await front_end.ask(request(1), tenant=SLOW_TENANT)
    assert refused.value.retry_after_s > 390 / 0.1
    other = await front_end.ask(request(1), tenant=Tenant(name="other", tokens_per_minute=6))
    await service.finish([other])


async def test_an_answer_that_goes_on_is_charged_as_it_goes(service: Service) -> None:
    replica, front_end = await service.replica(), await service.front_end()
    answer = await front_end.ask(request(1_000_000), tenant=SLOW_TENANT)
    await until(lambda: len(answer.tokens) > 300)
    replica.engine.pause()
    ((_, generated),) = replica.engine._states.values()
    await until(lambda: answer.timing.output_tokens == generated)
    await owes(service, PROMPT_TOKENS + answer.timing.output_tokens)
    assert answer.outcome is None
    await front_end.client.cancel([answer.asked.request_id], "cancelled")
    await owes(service, PROMPT_TOKENS + answer.timing.output_tokens)
    replica.engine.resume()
    await service.is_empty()


async def test_what_a_cancelled_request_did_not_take_comes_back(service: Service) -> None:
    replica, front_end = await service.replica(), await service.front_end()
    replica.engine.pause()
    runs, waits = (msgspec.structs.replace(request(900), min_tokens=900) for _ in range(2))
    answer = await front_end.ask(runs, tenant=SLOW_TENANT)
    assert await owed(service) > PROMPT_TOKENS + 890
    await front_end.client.cancel([runs.request_id], "cancelled")
    await owes(service, PROMPT_TOKENS)  # which was read
    assert answer.tokens == []
    replica.engine.resume()
    await service.is_empty()
    generous = Tenant(name="generous", tokens_per_minute=1000)
    for _ in range(20):  # each would take nearly all that it has
        answer = await front_end.ask(msgspec.structs.replace(waits, request_id=request().request_id), tenant=generous)
        await front_end.client.cancel([answer.asked.request_id], "cancelled")
        await until_owed(service, 0, 90, generous)
    await service.is_empty()


@pytest.mark.parametrize(
    "fields", [{}, {"replays": True}, {"replays": True, "in_one_piece": True}], ids=["resumed", "replayed", "anew"]
)
async def test_a_request_that_was_moved_is_settled_once(service: Service, fields: dict[str, bool]) -> None:
    victim = await service.replica(step_s=0.01)
    front_end = await service.front_end()
    answer = await front_end.ask(msgspec.structs.replace(request(200), **fields), tenant=SLOW_TENANT)
    await until_owed(service, PROMPT_TOKENS + 30)  # more than it was charged for at first
    await victim.die()
    await service.replica()
    await service.finish([answer])
    await owes(service, PROMPT_TOKENS + 200)


async def test_a_request_that_was_called_back_is_settled_once(service: Service) -> None:
    replica, front_end = await service.replica(slots=1, step_s=0.02), await service.front_end()
    offline = await front_end.ask(request(600), "offline", tenant=SLOW_TENANT)
    await until(lambda: len(offline.tokens) > 20)
    (urgent,) = await front_end.ask_many(1)
    await until(lambda: urgent.outcome is not None)
    hurry(replica)
    await service.finish([urgent, offline])
    assert front_end.count("requests_recalled_total", slo_class="offline") == 1
    await owes(service, PROMPT_TOKENS + 600)


async def test_what_was_served_while_redis_was_away_is_charged_when_it_is_back(gate: Gate) -> None:
    service = Service(gate.url)
    replica, front_end = await service.replica(), await service.front_end()
    replica.engine.pause()
    began = await front_end.ask(request(200), tenant=SLOW_TENANT)
    await until(lambda: replica.engine.held == 1)
    gate.shut()
    replica.engine.resume()
    more = [await front_end.ask(request(50), tenant=SLOW_TENANT) for _ in range(4)]  # quotas are out of sight
    await front_end.client.entrance.charge(SLOW_TENANT, 1000)
    await until(lambda: all(answer.outcome == "length" for answer in (began, *more)))
    await gate.open()
    await service.finish([began, *more])
    await owes(service, PROMPT_TOKENS + 200 + 4 * (PROMPT_TOKENS + 50) + 1000)
    await service.close()


async def test_work_that_makes_no_request_is_charged_and_refused_alike(service: Service) -> None:
    front_end = await service.front_end()
    tenant = Tenant(name="t", tokens_per_minute=6000)
    await front_end.client.entrance.charge(tenant, 5900)
    with pytest.raises(AdmissionError, match="tokens_per_minute of t are spent") as refused:
        await front_end.client.entrance.charge(tenant, 5000)
    assert 40 < refused.value.retry_after_s <= 49
    with pytest.raises(AdmissionError, match="tokens_per_minute of t"):
        await front_end.ask(msgspec.structs.replace(request(5000), min_tokens=5000), tenant=tenant)
    for unlimited in (None, Tenant(name="u")):
        await front_end.client.entrance.charge(unlimited, 1e9)


async def test_a_router_that_leaves_settles_what_its_answers_took(service: Service) -> None:
    await service.replica()
    staying, leaving = [await service.front_end() for _ in range(2)]
    (settling,) = [task for task in leaving.client.background._tasks if task.get_name() == "settle"]
    settling.cancel()
    answer = await leaving.ask(request(200), tenant=SLOW_TENANT)
    await service.finish([answer])
    await leaving.close()
    await owes(service, PROMPT_TOKENS + 200)
    assert staying.client.entrance.room("standard") > 0


def usage(front_end: FrontEnd, key: str) -> tuple[float, float]:
    """Prompt and output tokens of a key so far."""
    found = page_counts(front_end.metrics.keys.page())
    return found.get(("sluice_key_prompt_tokens_total", key), 0), found.get(("sluice_key_output_tokens_total", key), 0)


async def test_tokens_of_prompts_and_answers_are_counted_by_class_and_by_key(service: Service) -> None:
    await service.replica()
    front_end = await service.front_end()
    mine = [await front_end.ask(request(20), tenant=Tenant(name="mine")) for _ in range(2)]
    others = [await front_end.ask(request(30), tenant=Tenant(name="other")), await front_end.ask(request(40))]
    await service.finish([*mine, *others])
    assert front_end.count("prompt_tokens_total", slo_class="standard") == 4 * PROMPT_TOKENS
    assert front_end.count("output_tokens_total", slo_class="standard") == 20 + 20 + 30 + 40
    assert usage(front_end, "mine") == (2 * PROMPT_TOKENS, 40)
    assert usage(front_end, "other") == (PROMPT_TOKENS, 30)


@pytest.mark.parametrize("replays", [False, True], ids=["resumed", "replayed"])
async def test_a_request_that_was_moved_counts_its_client_s_prompt_once(service: Service, replays: bool) -> None:
    victim = await service.replica(step_s=0.01)
    front_end = await service.front_end()
    answer = await front_end.ask(request(60, replays=replays), tenant=Tenant(name="t"))
    await until(lambda: len(answer.tokens) > 5)
    await victim.die()
    await service.replica()
    await service.finish([answer])
    assert front_end.count("prompt_tokens_total", slo_class="standard") == PROMPT_TOKENS
    assert usage(front_end, "t") == (PROMPT_TOKENS, 60)


async def test_what_is_refused_or_never_came_to_a_replica_took_no_tokens(service: Service) -> None:
    front_end, tenant = await service.front_end(max_waiting=1), Tenant(name="t")
    waits = await front_end.ask(request(), tenant=tenant)
    with pytest.raises(AdmissionError, match="max_key_share"):
        await front_end.ask(request(), tenant=tenant)
    await until(lambda: front_end.client.entrance.room("standard") == 0)
    with pytest.raises(AdmissionError, match="room for 0 of 1"):
        front_end.client.check_room("standard", 1, RequestTiming(received_s=0.0, submitted_s=0.0), tenant)
    await front_end.client.cancel([waits.asked.request_id], "cancelled")
    assert front_end.count("prompt_tokens_total", slo_class="standard") == 0
    assert page_counts(front_end.metrics.keys.page()) == {
        ("sluice_key_requests_total", "t", "refused"): 2,
        ("sluice_key_requests_total", "t", "cancelled"): 1,
    }


async def test_a_key_that_floods_is_refused_alone_and_told_when_its_own_work_is_done(service: Service) -> None:
    one, other = [await service.front_end(max_waiting=20) for _ in range(2)]
    replica = await service.replica(slots=1)
    replica.engine.pause()
    flooding, patient = Tenant(name="flooding"), Tenant(name="patient")
    answers = [await one.ask(request(), tenant=flooding) for _ in range(1 + 10)]  # one of them runs
    refusals = []
    for number in range(200):
        with pytest.raises(AdmissionError, match="max_key_share") as refused:
            await (one, other)[number % 2].ask(request(), tenant=flooding)
        refusals.append(refused.value.retry_after_s)
    assert len(set(refusals)) == 1
    answers += [await other.ask(request(), tenant=patient) for _ in range(10)]
    await until(lambda: one.client.snapshot.waiting == 20)
    assert refusals[0] == pytest.approx(one.client.snapshot.waiting_s / 2, rel=1e-6)  # of all that waits by now
    replica.engine.resume()
    await service.finish(answers)
    answers = [await one.ask(request(), tenant=flooding) for _ in range(10)]
    await service.finish(answers)


@pytest.mark.parametrize("wrong", [{"max_moves": -1}, {"heartbeat_s": 0.0}, {"silence_s": float("inf")}])
def test_a_wrong_setting_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        RoutedClientConfig(**wrong)  # type: ignore[arg-type]
