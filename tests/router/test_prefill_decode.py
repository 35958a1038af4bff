"""Prefill and decode on different replicas: real relays, TCP and Redis; only the engines have no model.

An engine that is offered a cache goes by that cache alone, so a wrong one would show in the tokens.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from deployments.engines.relay import Relay, RelayConfig
from deployments.process.ports import free_port
from deployments.serving.embedded_redis import EmbeddedRedis
from policies.errors import AdmissionError, ConfigError, StateStoreError
from policies.live import Live
from policies.router.admission import Limits, Refusal
from policies.router.multi_bin import MultiBin, MultiBinConfig
from policies.router.order import Deadline, DeadlineConfig
from policies.router.placement import PrefixIndex, PrefixIndexConfig
from policies.router.prefill_decode import BucketOrder, BucketOrderConfig, PrefillDecode, PrefillDecodeConfig
from policies.types import StepCoefficients, StepTimes
from predictor.histogram import HistogramPredictor
from router.admission import ClassLimits, Door, Tenant
from router.cached_blocks import BlockHashes, BlockHashing
from router.classifier import Classifier
from router.clock import Clock, MonotonicClock, SharedClock
from router.connections import Connections
from router.ledger import State
from router.metrics import RouterMetrics, SplitMetrics
from router.prefill_decode import PrefillClassifier, PrefillPool, SplitClient, SplitConfig
from router.redis_store import RedisStateStore, connect
from router.routed_client import RoutedClient, routed_client
from router.state_store import ReplicaInfo, Ticket
from router.terms import RoutedClientConfig, RouterTerms, TicketTerms
from router.timing import RequestTiming
from router.trail import Trail
from tests.fakes import FakeBatch, FakeCache, FakeCodec, FakeEngine, FakeRequest, undisturbed
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.timeout(120)

HEARTBEAT_S = 0.05
LONG = 40
TIMES = StepTimes(
    prefill=StepCoefficients(overhead_s=0.0, prefill_s=1e-4),
    decode=StepCoefficients(overhead_s=0.01),
    mixed=StepCoefficients(overhead_s=0.01, prefill_s=1e-4),
)
_numbers = count()


class Replica:
    def __init__(self, relay: Relay, engine: FakeEngine) -> None:
        self.relay, self.engine = relay, engine

    async def die(self) -> None:
        """As a killed process does: its sockets close, and it says nothing."""
        for writer in self.relay._writers:
            writer.transport.abort()
        await self.relay._background.close()


class Answer:
    def __init__(self, asked: FakeRequest) -> None:
        self.asked = asked
        now_s = MonotonicClock().now()
        self.timing = RequestTiming(received_s=now_s, submitted_s=now_s)
        self.tokens: list[int] = []
        self.outcome: str | None = None
        self.hits: list[int | None] = []


class MovableClock:
    """The machine's, which a test can put forward."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def now(self) -> float:
        return MonotonicClock().now() + self.ahead_s


class Service:
    """One router over two pools."""

    def __init__(self, url: str) -> None:
        self.url, self.name = url, secrets.token_hex(8)
        self._stores: list[RedisStateStore] = []
        self.pools: dict[str, list[Replica]] = {"prefill": [], "decode": []}
        self.answers: dict[str, Answer] = {}
        self.client: SplitClient[FakeRequest, FakeBatch]
        self._reader: asyncio.Task[None] | None = None

    def _store(self, pool: str) -> RedisStateStore:
        self._stores.append(RedisStateStore(connect(self.url), f"{self.name}:{pool}"))
        return self._stores[-1]

    async def replica(self, pool: str, slots: int = 4, step_s: float = 0.002, tells: bool = False) -> Replica:
        """`tells`: what its prefix cache holds."""
        engine = FakeEngine(slots=slots, step_s=step_s)
        engine.cache = FakeCache() if tells else None
        relay = Relay(
            engine=engine,
            store=self._store(pool),
            info=ReplicaInfo(
                replica_id=f"{pool}{len(self.pools[pool])}",
                host="127.0.0.1",
                port=0,
                max_model_len=4096,
                silence_s=5.0,
            ),
            config=RelayConfig(heartbeat_s=HEARTBEAT_S, prefill_budget_tokens=512 if pool == "prefill" else None),
        )
        await relay.start("127.0.0.1")
        self.pools[pool].append(Replica(relay, engine))
        return self.pools[pool][-1]

    async def start(
        self,
        policy: PrefillDecodeConfig | None = None,
        split: SplitConfig | None = None,
        limits: ClassLimits | None = None,
        config: RoutedClientConfig | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.metrics = RouterMetrics()
        splits, codec = SplitMetrics(self.metrics.registry), FakeCodec()
        decides = PrefillDecode(
            policy or PrefillDecodeConfig(mode="always", min_prompt_tokens=LONG, max_wait_s=15.0), TIMES
        )
        common: dict[str, Any] = {
            "router_id": "router",
            "codec": codec,
            "terms": Live(
                RouterTerms(
                    Door({"standard": limits or ClassLimits()}),
                    config or RoutedClientConfig(heartbeat_s=HEARTBEAT_S, silence_s=5.0, max_moves=8),
                )
            ),
            "clock": clock or MonotonicClock(),
        }
        reading: RoutedClient[FakeRequest, FakeBatch] = routed_client(
            store=self._store("prefill"),
            classifier=PrefillClassifier(
                BucketOrder(BucketOrderConfig()), decides, splits, PrefixIndex(PrefixIndexConfig())
            ),
            shared_clock=SharedClock(),
            metrics=RouterMetrics("prefill"),
            **common,
        )
        decoding: RoutedClient[FakeRequest, FakeBatch] = routed_client(
            store=self._store("decode"),
            classifier=_classifier(self.metrics),
            shared_clock=SharedClock(),
            metrics=self.metrics,
            **common,
        )
        self.client = SplitClient(
            decoding=decoding,
            pool=PrefillPool(reading, codec, splits),
            policy=decides,
            codec=codec,
            metrics=splits,
            config=Live(split or SplitConfig()),
            clock=common["clock"],
        )
        await self.client.start()
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        while True:
            for output in (await self.client.next_outputs()).outputs:
                answer = self.answers[output.request_id]
                assert answer.outcome is None, "an output after the last one"
                answer.tokens += output.new_token_ids
                answer.hits.append(output.hits)
                answer.outcome = output.finish_reason

    async def ask(
        self,
        prompt_tokens: int = LONG,
        max_tokens: int = 20,
        min_tokens: int = 0,
        replays: bool = False,
        tenant: Tenant | None = None,
        prompt: list[int] | None = None,
        trail: Trail | None = None,
    ) -> Answer:
        number = next(_numbers)
        asked = FakeRequest(
            request_id=f"x{number}",
            prompt=prompt or [number, *range(prompt_tokens - 1)],
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            replays=replays,
        )
        self.answers[asked.request_id] = answer = Answer(asked)
        answer.timing.trail = trail
        await self.client.submit(asked, slo_class="standard", timing=answer.timing, tenant=tenant)
        return answer

    def count(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"sluice_{name}_total", labels) or 0.0

    def read_and_unsent(self) -> int:
        """Requests that no decode replica has yet."""
        entries = self.client.decoding.ledger.values()
        return sum(entry.state not in (State.PREPARING, State.RUNNING) for entry in entries)

    async def finish(self, answers: list[Answer]) -> None:
        """Every answer is complete and exact, and nothing of it is left anywhere."""
        await until(lambda: all(answer.outcome is not None for answer in answers))
        for answer in answers:
            assert answer.outcome == "length"
            assert answer.tokens == undisturbed(answer.asked.prompt, answer.asked.max_tokens)
        await self.is_empty()

    async def is_empty(self) -> None:
        for client in (self.client.decoding, self.client.pool.client):
            assert not client.ledger
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    at = await client.store.snapshot()
                    if not at.waiting and not any(load.running for load in at.replicas.values()):
                        break
                    await asyncio.sleep(HEARTBEAT_S)
        await until(lambda: all(r.engine.held == 0 for pool in self.pools.values() for r in pool if r.relay.healthy))
        await until(lambda: not self.client.reading_s and not self.client.pool._waiting)
        await until(lambda: not self.client.offered)

    async def close(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            await self.client.close()
        for pool in self.pools.values():
            for replica in pool:
                await replica.relay.close()
        for store in self._stores:
            await store.close()


def _classifier(metrics: RouterMetrics) -> Classifier:
    return Classifier(
        predictor=HistogramPredictor(),
        bins=MultiBin(MultiBinConfig(bins=2, refit_every=32)),
        terms=Live(TicketTerms(order=Deadline(DeadlineConfig()))),
        step_times=TIMES,
        shared_batch_size=4,
        default_output_tokens=16,
        metrics=metrics,
        prefixes=PrefixIndex(PrefixIndexConfig()),
    )


@pytest.fixture
async def service(redis_url: str) -> AsyncIterator[Service]:
    made = Service(redis_url)
    yield made
    await made.close()


TRACE = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}


async def test_of_a_traced_request_is_noted_where_its_prompt_was_read_and_where_it_went_on(service: Service) -> None:
    await service.replica("prefill"), await service.replica("decode")
    await service.start()
    answer = await service.ask(trail=Trail(TRACE))
    await service.finish([answer])
    trail = answer.timing.trail
    assert trail is not None and trail.kv_transfer is not None and trail.queued_s is not None
    read, (went_on,) = trail.kv_transfer, trail.stays
    (was_read,) = read.trail.stays
    assert (was_read.replica_id, went_on.replica_id, read.fell_back) == ("prefill0", "decode0", None)
    assert read.trail.headers == TRACE
    assert was_read.left_s is not None and read.ended_s is not None and read.trail.queued_s is not None
    times = [read.began_s, read.trail.queued_s, was_read.sent_s, was_read.left_s, read.ended_s, trail.queued_s]
    assert [*times, went_on.sent_s] == sorted([*times, went_on.sent_s])


async def test_of_a_traced_request_is_noted_why_its_prompt_was_not_read_elsewhere(service: Service) -> None:
    reading = await service.replica("prefill")
    await service.replica("decode")
    reading.engine.loses_caches = True
    await service.start()
    answer = await service.ask(trail=Trail(TRACE))
    await service.finish([answer])
    assert answer.timing.trail is not None and answer.timing.trail.kv_transfer is not None
    assert answer.timing.trail.kv_transfer.fell_back == "failed"


async def test_long_prompts_are_read_in_one_pool_and_decoded_in_the_other(service: Service) -> None:
    reading, answering = await service.replica("prefill"), await service.replica("decode")
    await service.start()
    answers = [await service.ask(LONG + n % 3 * 30) for n in range(20)]
    await service.finish(answers)
    assert (reading.engine.taken, answering.engine.taken, answering.engine.fetched) == (20, 20, 20)
    assert service.count("kv_transfers") == service.count("split_decisions", why="split") == 20
    assert service.count("prefill_tokens") == sum(len(answer.asked.prompt) for answer in answers)
    assert service.count("output_tokens", slo_class="standard") == 400  # the prefill's own token is no answer


async def test_an_answer_tells_once_what_its_prefill_replica_had_cached(service: Service) -> None:
    """Its own engine takes all of the prompt for cached."""
    await service.replica("prefill")
    await service.replica("decode")
    await service.start()
    split, short = [await service.ask(LONG + 10, max_tokens=4), await service.ask(LONG - 1, max_tokens=4)]
    await service.finish([split, short])
    assert split.hits == [(LONG + 10) // 2, None, None, None]
    assert set(short.hits) == {None}


async def test_a_request_that_cannot_queue_once_its_prompt_is_read_says_why(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    await service.replica("prefill")
    await service.start()

    async def away(*_: object) -> None:
        raise StateStoreError("Redis is away")

    monkeypatch.setattr(service.client.decoding.store, "enqueue", away)
    answer = await service.ask()
    await until(lambda: answer.outcome == "error")
    assert "Redis is away" in str(answer.timing.unserved)


async def test_a_request_that_fails_once_its_prompt_is_read_is_counted(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    await service.replica("prefill")
    await service.start()

    async def broken(*_: object) -> None:
        raise ValueError("no number")

    monkeypatch.setattr(service.client.decoding.store, "enqueue", broken)
    answer = await service.ask()
    await until(lambda: answer.outcome == "error")
    assert (answer.timing.outcome, answer.timing.unserved) == ("error", None)
    assert service.count("requests", outcome="error", slo_class="standard", bin="0") == 1


async def test_short_prompts_go_straight_to_where_they_are_decoded(service: Service) -> None:
    reading, _ = await service.replica("prefill"), await service.replica("decode")
    await service.start()
    await service.finish([await service.ask(LONG - 1) for _ in range(5)])
    assert reading.engine.taken == 0
    assert service.count("split_decisions", why="short") == 5


PROMPT = list(range(1000, 1060))  # too short for guesses of what is cached


async def test_a_prompt_is_read_where_most_of_it_is_cached_until_waiting_there_costs_more(service: Service) -> None:
    readers = [await service.replica("prefill", tells=True) for _ in range(2)]
    await service.replica("decode")
    await service.start()
    for _ in range(4):
        await service.finish([await service.ask(prompt=PROMPT)])
    knows, other = sorted(readers, key=lambda reader: reader.engine.taken, reverse=True)
    assert (knows.engine.taken, other.engine.taken) == (4, 0)
    knows.engine.pause()
    queue = await service.ask(prompt=[*PROMPT, *range(400)])
    await until(lambda: knows.engine.held == 1)
    again = await service.ask(prompt=PROMPT)
    await until(lambda: other.engine.taken == 1)
    knows.engine.resume()
    await service.finish([queue, again])


async def test_prefill_replicas_offer_what_they_have_cached(service: Service) -> None:
    await service.replica("prefill", tells=True)
    reader = await service.replica("prefill", tells=True)
    assert reader.engine.cache is not None
    reader.engine.cache.blocks.update(FakeCodec().block_hashes(a_request(PROMPT), reader.engine.cache.hashing))
    await service.start()
    pool = service.client.pool
    await until(lambda: len(pool.client.caches.blocks) == 15)
    size = await pool.client.caches.sized(a_request(PROMPT))
    assert sorted(offer.hit_tokens for offer in pool.offers(size, 0.0)) == [0, 56]
    assert pool.unread_tokens(size) == 4
    assert [offer.wait_s for offer in pool.offers(size, 3.0)] == [1.5, 1.5], "each reads half of what was given since"


def a_request(prompt: list[int]) -> FakeRequest:
    return FakeRequest(request_id="sized", prompt=prompt, max_tokens=1)


async def test_what_a_decode_replica_has_cached_is_not_read_elsewhere_and_is_hashed_once(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, _ = await service.replica("prefill", tells=True), await service.replica("decode", tells=True)
    await service.start()
    await until(
        lambda: all(client.caches.blocks.hashing for client in (service.client.decoding, service.client.pool.client))
    )
    hashed = list[int]()

    def block_hashes(codec: FakeCodec, request: FakeRequest, hashing: BlockHashing) -> BlockHashes:
        hashed.append(len(request.prompt))
        return hashes_of(codec, request, hashing)

    hashes_of = FakeCodec.block_hashes
    with monkeypatch.context() as counted:
        counted.setattr(FakeCodec, "block_hashes", block_hashes)
        size = await service.client.decoding.caches.sized(a_request(PROMPT))
        there = await service.client.pool.client.caches.sized(a_request(PROMPT), size)
    assert (there.blocks, hashed) == (size.blocks, [len(PROMPT)])
    for _ in range(3):
        await service.finish([await service.ask(prompt=PROMPT)])
    assert (service.count("split_decisions", why="split"), service.count("split_decisions", why="short")) == (1, 2)
    assert reading.engine.taken == 1


async def test_without_a_prefill_replica_nothing_is_split(service: Service) -> None:
    await service.replica("decode")
    await service.start()
    await service.finish([await service.ask() for _ in range(5)])
    assert service.count("split_decisions", why="no_replica") == 5


async def test_a_prefill_replica_that_hangs_is_not_waited_for(service: Service) -> None:
    reading, answering = await service.replica("prefill"), await service.replica("decode")
    await service.start(PrefillDecodeConfig(mode="always", min_prompt_tokens=LONG, max_wait_s=0.1))
    reading.engine.pause()
    answers = [await service.ask() for _ in range(5)]
    await until(lambda: all(answer.outcome for answer in answers))
    reading.engine.resume()
    await service.finish(answers)
    assert service.count("kv_transfer_fallbacks", reason="late") + service.count("split_decisions", why="late") == 5
    assert answering.engine.fetched == 0


async def test_both_pools_are_asked_for_their_status_at_once(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    both_asked = asyncio.Barrier(2)

    async def status(self: Connections, replica_id: str) -> dict[str, Any]:
        await both_asked.wait()
        return {}

    monkeypatch.setattr(Connections, "_status", status)
    for pool in ("prefill", "decode"):
        await service.replica(pool)
    await service.start()
    async with asyncio.timeout(PATIENCE_S):
        assert len(await service.client.statuses()) == 2


@pytest.mark.parametrize("replacement", [False, True])
async def test_killed_prefill_replicas_lose_nothing(service: Service, replacement: bool) -> None:
    reading, _ = await service.replica("prefill", step_s=0.02), await service.replica("decode")
    # Without a replacement some wait for all of this time; in less of it a machine that stands still reads nothing.
    await service.start(PrefillDecodeConfig(mode="always", min_prompt_tokens=LONG, max_wait_s=3.0))
    answers = [await service.ask(max_tokens=60) for _ in range(12)]
    await until(lambda: reading.engine.taken > 2)
    await reading.die()
    if replacement:
        await service.replica("prefill")
    answers += [await service.ask() for _ in range(6)]
    await service.finish(answers)


@pytest.mark.parametrize("replays", [False, True])
async def test_killed_decode_replicas_lose_nothing(service: Service, replays: bool) -> None:
    await service.replica("prefill")
    victim = await service.replica("decode", step_s=0.01)
    await service.start()
    victim.engine.pause()
    answers = [await service.ask(max_tokens=30, replays=replays) for _ in range(12)]
    await until(lambda: victim.engine.held == 4)
    victim.engine.resume()
    await until(lambda: any(len(answer.tokens) > 3 for answer in answers))
    await victim.die()
    successor = await service.replica("decode")
    await service.finish(answers)
    # What the dead one had been offered may be gone: its requests are read again.
    assert victim.engine.fetched >= 4
    assert successor.engine.taken - successor.engine.fetched >= 4


async def test_a_killed_machine_with_replicas_of_both_kinds_loses_nothing(service: Service) -> None:
    reading, answering = await service.replica("prefill"), await service.replica("decode", step_s=0.01)
    await service.start()
    reading.engine.pause()
    answering.engine.pause()
    answers = [await service.ask(max_tokens=30) for _ in range(12)]
    await until(lambda: reading.engine.held > 2)
    reading.engine.resume()
    await until(lambda: answering.engine.held == 4)
    reading.engine.pause()
    answers += [await service.ask(max_tokens=30) for _ in range(12)]
    await until(lambda: reading.engine.held > 2)
    await asyncio.gather(reading.die(), answering.die())
    await service.replica("decode")
    await service.replica("prefill")
    await service.finish(answers)


async def test_a_prefill_without_a_cache_falls_back(service: Service) -> None:
    reading, answering = await service.replica("prefill"), await service.replica("decode")
    reading.engine.loses_caches = True
    await service.start()
    await service.finish([await service.ask() for _ in range(4)])
    assert service.count("kv_transfer_fallbacks", reason="failed") == 4
    assert answering.engine.fetched == 0


async def test_a_transfer_that_hangs_is_given_up(service: Service) -> None:
    await service.replica("prefill")
    answering = await service.replica("decode")
    answering.engine.transfers_hang = True
    await service.start(split=SplitConfig(stalled_s=0.2))
    await service.finish([await service.ask() for _ in range(4)])
    assert service.count("kv_transfer_fallbacks", reason="stalled") == 4


async def test_nothing_comes_any_more_of_a_transfer_that_was_given_up(service: Service) -> None:
    await service.replica("prefill")
    answering = await service.replica("decode")
    answering.engine.transfers_hang = True
    await service.start(split=SplitConfig(stalled_s=1e-9), config=RoutedClientConfig(heartbeat_s=3600.0))
    answer = await service.ask()
    await until(lambda: bool(service.client.offered))
    entry = service.client.decoding.ledger[answer.asked.request_id]
    assert entry.connection is not None
    service.client._restart_stalled()
    assert entry.connection is None, "before anything else runs"
    await service.finish([answer])


async def test_a_cache_that_waited_too_long_is_not_offered(service: Service) -> None:
    await service.replica("prefill")
    answering = await service.replica("decode", slots=1)
    clock = MovableClock()
    await service.start(split=SplitConfig(cache_s=100.0, stalled_s=3600.0), clock=clock)
    answering.engine.pause()
    answers = [await service.ask() for _ in range(3)]
    await until(lambda: service.read_and_unsent() == 2 and answering.engine.held == 1)
    clock.ahead_s = 101.0
    answering.engine.resume()
    await service.finish(answers)
    assert service.count("kv_transfer_fallbacks", reason="expired") == 2
    await until(lambda: (answering.engine.fetched, answering.engine.let_go) == (1, 2))


async def test_cancelling_leaves_nothing_behind_wherever_the_request_is(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, answering = await service.replica("prefill", step_s=0.02), await service.replica("decode", slots=1)
    await service.start()
    reading.engine.pause()
    while_read = [await service.ask(max_tokens=500) for _ in range(3)]
    await until(lambda: reading.engine.held == 3)
    await service.client.cancel([answer.asked.request_id for answer in while_read], "cancelled")
    assert [answer.timing.outcome for answer in while_read] == ["cancelled"] * 3
    reading.engine.resume()
    await service.is_empty()
    answering.engine.pause()
    queued = [await service.ask(max_tokens=500) for _ in range(3)]
    await until(lambda: service.read_and_unsent() == 2 and answering.engine.held == 1)
    await service.client.cancel([answer.asked.request_id for answer in queued], "cancelled")
    answering.engine.resume()
    await service.is_empty()
    await until(lambda: answering.engine.let_go == 2)  # the caches of those that had not been sent
    with monkeypatch.context() as held:
        held.setattr(service.client.decoding.store, "enqueue", lambda *_: asyncio.sleep(3600.0))
        read = [await service.ask(max_tokens=500) for _ in range(3)]
        await until(lambda: service.read_and_unsent() == 3)
        await service.client.cancel([answer.asked.request_id for answer in read], "cancelled")
    await service.is_empty()
    await until(lambda: answering.engine.let_go == 5)
    counted = sum(
        sample.value
        for family in service.metrics.requests.collect()
        for sample in family.samples
        if sample.name.endswith("_total") and sample.labels["outcome"] == "cancelled"
    )
    assert counted == 9


async def test_a_request_that_is_being_read_is_not_over_yet(service: Service) -> None:
    reading, _ = await service.replica("prefill"), await service.replica("decode")
    await service.start()
    reading.engine.pause()
    answer = await service.ask()
    with pytest.raises(Exception, match="not over yet"):
        timing = RequestTiming(received_s=0.0, submitted_s=0.0)
        await service.client.submit(answer.asked, slo_class="standard", timing=timing)
    reading.engine.resume()
    await service.finish([answer])


async def test_quotas_count_once_and_at_arrival(service: Service) -> None:
    await service.replica("prefill")
    await service.replica("decode")
    await service.start()
    tenant = Tenant(name="small", requests_per_minute=4)
    answers = [await service.ask(tenant=tenant) for _ in range(4)]
    with pytest.raises(AdmissionError, match="requests_per_minute of small"):
        await service.ask(tenant=tenant)
    assert next(reversed(service.answers.values())).timing.outcome == "refused"
    assert service.count("requests", slo_class="standard", bin="0", outcome="refused") == 1
    await service.finish(answers)
    assert service.count("kv_transfers") == 4


async def test_a_request_whose_charge_got_no_reply_is_charged_once(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    await service.replica("prefill")
    await service.replica("decode")
    await service.start()
    admit = service.client.decoding.store.admit

    async def unheard(ticket: Ticket, limits: Limits) -> Refusal | None:
        await admit(ticket, limits)
        monkeypatch.undo()
        raise StateStoreError("its reply was lost")

    monkeypatch.setattr(service.client.decoding.store, "admit", unheard)
    tenant = Tenant(name="small", requests_per_minute=2)
    answers = [await service.ask(tenant=tenant) for _ in range(2)]
    with pytest.raises(AdmissionError, match="requests_per_minute of small"):
        await service.ask(tenant=tenant)
    await service.finish(answers)
    assert service.count("kv_transfers") == 1, "the first was read where it was decoded"


async def test_a_split_request_pays_for_the_answer_that_it_insists_on(service: Service) -> None:
    await service.replica("prefill")
    await service.replica("decode")
    await service.start()
    tenant = Tenant(name="small", tokens_per_minute=LONG + 200)
    answer = await service.ask(max_tokens=200, min_tokens=200, tenant=tenant)
    with pytest.raises(AdmissionError, match="tokens_per_minute of small"):
        await service.ask(max_tokens=100, min_tokens=100, tenant=tenant)
    await service.finish([answer])


async def until_owed(service: Service, tenant: Tenant, tokens: float) -> None:
    """Of an allowance to which next to nothing comes back within a test."""
    quota = tenant.token_quota(0.0)
    assert quota is not None
    owed: list[float] = []
    async with asyncio.timeout(PATIENCE_S):
        while len(owed) < 4 or not all(tokens - 3 < each <= tokens + 0.01 for each in owed[-4:]):
            refused = await service.client.decoding.store.charge([replace(quota, burst=1e-9)])
            owed.append(refused.retry_after_s * quota.per_s if refused else 0.0)
            await asyncio.sleep(HEARTBEAT_S)


async def test_a_split_request_is_settled_once_when_it_ends_and_when_it_is_cancelled(service: Service) -> None:
    reading, _ = await service.replica("prefill"), await service.replica("decode")
    await service.start()
    slow, other = (Tenant(name=name, tokens_per_minute=6) for name in ("slow", "other"))
    answer = await service.ask(max_tokens=200, tenant=slow)
    await service.finish([answer])
    await until_owed(service, slow, LONG + 200)
    reading.engine.pause()
    cancelled = await service.ask(max_tokens=200, min_tokens=200, tenant=other)
    await until_owed(service, other, LONG + 200)
    await service.client.cancel([cancelled.asked.request_id], "cancelled")
    await until_owed(service, other, LONG)
    reading.engine.resume()
    await service.is_empty()
    assert service.count("split_decisions", why="split") == 2


async def test_while_redis_is_away_nothing_is_split_and_nothing_is_lost() -> None:
    port, password = free_port(), secrets.token_urlsafe(16)
    server = EmbeddedRedis(port, password)
    service = Service(server.url)
    reading, answering = await service.replica("prefill"), await service.replica("decode", slots=8)
    await service.start()
    answers = [await service.ask(max_tokens=200) for _ in range(3)]
    await until(lambda: all(answer.tokens for answer in answers))
    server.close()
    answers += [await service.ask() for _ in range(3)]
    await until(lambda: all(answer.outcome for answer in answers))
    assert (reading.engine.taken, answering.engine.taken) == (3, 6)
    server = EmbeddedRedis(port, password)
    await service.finish(answers)
    await service.close()
    server.close()


@pytest.mark.slow
async def test_auto_splits_only_while_others_would_notice(service: Service) -> None:
    reading, answering = await service.replica("prefill"), await service.replica("decode", slots=16, step_s=0.01)
    await service.start(
        PrefillDecodeConfig(mode="auto", min_prompt_tokens=LONG),
        SplitConfig(itl_targets_s={"standard": 0.015}),
    )
    alone = await service.ask(prompt_tokens=400, max_tokens=3)
    await service.finish([alone])
    answering.engine.pause()  # none is over before the router knows of all
    running = [await service.ask(prompt_tokens=3, max_tokens=200) for _ in range(6)]
    await until(lambda: sum(load.running for load in service.client.snapshot.replicas.values()) == 6)
    longer = await service.ask(prompt_tokens=400)
    answering.engine.resume()
    await service.finish([*running, longer])
    assert service.count("split_decisions", why="idle") == 1
    assert service.count("split_decisions", why="split") == 1
    assert reading.engine.taken == 1


async def test_what_running_requests_hold_is_known_with_every_heartbeat(service: Service) -> None:
    _, answering = await service.replica("prefill"), await service.replica("decode", slots=16, step_s=0.01)
    await service.start(PrefillDecodeConfig(mode="never"))
    answering.engine.pause()
    running = [await service.ask(prompt_tokens=40, max_tokens=100) for _ in range(4)]
    await until(lambda: answering.engine.held == 4)
    answering.engine.resume()
    for tokens, least, most in ((10, 40, 60), (30, 60, 140)):
        await until(lambda tokens=tokens: all(len(answer.tokens) >= tokens for answer in running))  # type: ignore[misc]
        answering.engine.pause()  # until a heartbeat has looked
        await until(lambda least=least, most=most: least < (service.client.context_tokens or 0) <= most)  # type: ignore[misc]
        answering.engine.resume()
    await service.finish(running)


def test_wrong_times_are_refused() -> None:
    with pytest.raises(ConfigError, match="cache_s"):
        SplitConfig(cache_s=0.0)
