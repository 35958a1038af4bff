"""Prefill and decode on different replicas. An engine that is offered a cache goes by that cache alone, so a wrong one
would show in the tokens."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from typing import Any

import pytest

from deployments.process.ports import free_port
from deployments.serving.embedded_redis import EmbeddedRedis
from policies.errors import AdmissionError, ConfigError, StateStoreError
from policies.live import Live
from policies.router.admission import Limits, Refusal
from policies.router.placement import PrefixIndex, PrefixIndexConfig
from policies.router.prefill_decode import BucketOrder, BucketOrderConfig, PrefillDecode, PrefillDecodeConfig
from policies.router.tickets import Ticket
from policies.types import StepCoefficients, StepTimes
from router.admission import ClassLimits, Tenant
from router.cached_blocks import BlockHashes, BlockHashing
from router.clock import Clock, MonotonicClock, SharedClock
from router.connections import Connections
from router.ledger import State
from router.metrics import RouterMetrics, SplitMetrics
from router.prefill_decode import SplitClient, SplitConfig
from router.prefill_pool import PrefillClassifier, PrefillPool
from router.routed_client import routed_client
from router.trail import Trail
from tests.fakes import FakeCache, FakeCodec, FakeRequest
from tests.router.service import (
    SLOW_TENANT,
    TRACE,
    Answer,
    Client,
    FrontEnd,
    MovableClock,
    Replica,
    Service,
    begun,
    classifier,
    over,
    request,
    terms,
    timed,
)
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.timeout(120)

LONG = 40
TIMES = StepTimes(
    prefill=StepCoefficients(overhead_s=0.0, prefill_s=1e-4),
    decode=StepCoefficients(overhead_s=0.01),
    mixed=StepCoefficients(overhead_s=0.01, prefill_s=1e-4),
)
PROMPT = list(range(1000, 1060))  # too short for guesses of what is cached


def splits(max_wait_s: float = 15.0) -> PrefillDecodeConfig:
    """Whatever is LONG."""
    return PrefillDecodeConfig(mode="always", min_prompt_tokens=LONG, max_wait_s=max_wait_s)


class SplitService(Service):
    """One router over two pools."""

    front_end_of_both: FrontEnd

    async def reader(self, *, step_s: float = 0.002) -> Replica:
        return await self.replica(pool=":prefill", step_s=step_s, prefill_budget_tokens=512)

    async def start(
        self,
        policy: PrefillDecodeConfig | None = None,
        split: SplitConfig | None = None,
        clock: Clock | None = None,
        **config: Any,
    ) -> None:
        """`config` as of RoutedClientConfig."""
        metrics, codec = RouterMetrics(), FakeCodec()
        split_metrics, decides = SplitMetrics(metrics.registry), PrefillDecode(policy or splits(), TIMES)
        common: dict[str, Any] = {
            "router_id": "router",
            "codec": codec,
            "terms": terms(ClassLimits(), **config),
            "clock": clock or MonotonicClock(),
        }
        prefixes = PrefixIndex(PrefixIndexConfig())
        reading: Client = routed_client(
            store=self.new_store(":prefill"),
            classifier=PrefillClassifier(BucketOrder(BucketOrderConfig()), decides, split_metrics, prefixes),
            shared_clock=SharedClock(),
            metrics=RouterMetrics("prefill"),
            **common,
        )
        decoding: Client = routed_client(
            store=self.new_store(),
            classifier=classifier(metrics, prefill_s=1e-4),
            shared_clock=SharedClock(),
            metrics=metrics,
            **common,
        )
        client = SplitClient(
            decoding=decoding,
            pool=PrefillPool(reading, codec, split_metrics),
            policy=decides,
            codec=codec,
            metrics=split_metrics,
            config=Live(split or SplitConfig()),
            clock=common["clock"],
        )
        await client.start()
        self.front_end_of_both = self.with_front_end(client, metrics)

    async def pools(
        self, slots: int = 4, *, step_s: float = 0.002, reading_step_s: float = 0.002, **start: Any
    ) -> tuple[Replica, Replica]:
        """One replica that reads and one that answers, with the router over both."""
        made = await self.reader(step_s=reading_step_s), await self.replica(slots, step_s=step_s)
        await self.start(**start)
        return made

    @property
    def client(self) -> SplitClient[Any, Any]:
        return self.front_end_of_both.split

    async def ask(
        self,
        prompt_tokens: int = LONG,
        max_tokens: int = 20,
        *,
        prompt: list[int] | None = None,
        tenant: Tenant | None = None,
        trail: Trail | None = None,
        **fields: Any,
    ) -> Answer:
        asked = request(max_tokens, **fields)
        asked.prompt = prompt or [asked.prompt[0], *range(prompt_tokens - 1)]
        (timing := timed()).trail = trail
        return await self.front_end_of_both.ask(asked, tenant=tenant, timing=timing)

    async def ask_many(self, number: int, **asked: Any) -> list[Answer]:
        return [await self.ask(**asked) for _ in range(number)]

    def count(self, name: str, **labels: str) -> float:
        return self.front_end_of_both.count(f"{name}_total", **labels)

    def read_and_unsent(self) -> int:
        """Requests that no decode replica has yet."""
        entries = self.client.decoding.ledger.values()
        return sum(entry.state not in (State.PREPARING, State.RUNNING) for entry in entries)

    async def is_empty(self) -> None:
        await super().is_empty()
        await until(lambda: not self.client.reading_s and not self.client.pool._waiting)
        await until(lambda: not self.client.offered)


@pytest.fixture
async def service(redis_url: str, every_move_is_legal: None) -> AsyncIterator[SplitService]:
    made = SplitService(redis_url)
    yield made
    await made.close()


async def test_long_prompts_are_read_in_one_pool_and_decoded_in_the_other(service: SplitService) -> None:
    reading, answering = await service.pools()
    answers = [await service.ask(LONG + n % 3 * 30) for n in range(20)]
    await service.finish(answers)
    assert (reading.engine.taken, answering.engine.taken, answering.engine.fetched) == (20, 20, 20)
    assert service.count("kv_transfers") == service.count("split_decisions", why="split") == 20
    assert service.count("prefill_tokens") == sum(len(answer.asked.prompt) for answer in answers)
    assert service.count("output_tokens", slo_class="standard") == 400  # the prefill's own token is no answer


async def test_an_answer_tells_once_what_its_prefill_replica_had_cached(service: SplitService) -> None:
    """Its own engine takes all of the prompt for cached."""
    reading, _ = await service.pools()
    split, short = [await service.ask(LONG + 10, max_tokens=4), await service.ask(LONG - 1, max_tokens=4)]
    await service.finish([split, short])
    assert split.hits == [(LONG + 10) // 2, None, None, None]
    assert set(short.hits) == {None}
    assert service.count("split_decisions", why="short") == reading.engine.taken == 1


async def test_of_a_traced_request_is_noted_where_its_prompt_was_read_and_where_it_went_on(
    service: SplitService,
) -> None:
    reading, answering = await service.pools()
    await service.finish([await service.ask(trail=(trail := Trail(TRACE)))])
    assert trail.kv_transfer is not None and trail.queued_s is not None
    read, (went_on,) = trail.kv_transfer, trail.stays
    (was_read,) = read.trail.stays
    assert (was_read.replica_id, went_on.replica_id) == (reading.replica_id, answering.replica_id)
    assert (read.fell_back, read.trail.headers) == (None, TRACE)
    assert was_read.left_s is not None and read.ended_s is not None and read.trail.queued_s is not None
    times = [read.began_s, read.trail.queued_s, was_read.sent_s, was_read.left_s, read.ended_s, trail.queued_s]
    assert [*times, went_on.sent_s] == sorted([*times, went_on.sent_s])


async def test_a_prompt_is_read_where_most_of_it_is_cached_until_waiting_there_costs_more(
    service: SplitService,
) -> None:
    readers = [await service.reader() for _ in range(2)]
    for reader in readers:
        reader.engine.cache = FakeCache()
    await service.replica()
    await service.start()
    for _ in range(4):
        await service.finish([await service.ask(prompt=PROMPT)])
    knows, other = sorted(readers, key=lambda reader: reader.engine.taken, reverse=True)
    assert (knows.engine.taken, other.engine.taken) == (4, 0)
    knows.engine.pause()
    queue = await service.ask(prompt=[*PROMPT, *range(400)])
    await knows.holds(1)
    again = await service.ask(prompt=PROMPT)
    await until(lambda: other.engine.taken == 1)
    knows.engine.resume()
    await service.finish([queue, again])


async def test_prefill_replicas_offer_what_they_have_cached(service: SplitService) -> None:
    empty, full = FakeCache(), FakeCache()
    for cache in (empty, full):
        (await service.reader()).engine.cache = cache
    full.blocks.update(FakeCodec().block_hashes(request(1, prompt=PROMPT), full.hashing))
    await service.start()
    pool = service.client.pool
    await until(lambda: len(pool.client.caches.blocks) == 15)
    size = await pool.client.caches.sized(request(1, prompt=PROMPT))
    assert sorted(offer.hit_tokens for offer in pool.offers(size, 0.0)) == [0, 56]
    assert pool.unread_tokens(size) == 4
    assert [offer.wait_s for offer in pool.offers(size, 3.0)] == [1.5, 1.5], "each reads half of what was given since"


async def test_what_a_decode_replica_has_cached_is_not_read_elsewhere_and_is_hashed_once(
    service: SplitService, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, answering = await service.reader(), await service.replica()
    reading.engine.cache, answering.engine.cache = FakeCache(), FakeCache()
    await service.start()
    here, there = (client.caches for client in (service.client.decoding, service.client.pool.client))
    await until(lambda: here.blocks.hashing is not None and there.blocks.hashing is not None)
    hashed = list[int]()
    hashes_of = FakeCodec.block_hashes

    def block_hashes(codec: FakeCodec, request: FakeRequest, hashing: BlockHashing) -> BlockHashes:
        hashed.append(len(request.prompt))
        return hashes_of(codec, request, hashing)

    with monkeypatch.context() as counted:
        counted.setattr(FakeCodec, "block_hashes", block_hashes)
        size = await here.sized(asked := request(1, prompt=PROMPT))
        assert (await there.sized(asked, size)).blocks == size.blocks
    assert hashed == [len(PROMPT)]
    for _ in range(3):
        await service.finish([await service.ask(prompt=PROMPT)])
    assert (service.count("split_decisions", why="split"), service.count("split_decisions", why="short")) == (1, 2)
    assert reading.engine.taken == 1


async def test_both_pools_are_asked_for_their_status_at_once(
    service: SplitService, monkeypatch: pytest.MonkeyPatch
) -> None:
    both_asked = asyncio.Barrier(2)

    async def status(self: Connections, replica_id: str) -> dict[str, Any]:
        await both_asked.wait()
        return {}

    monkeypatch.setattr(Connections, "_status", status)
    await service.pools()
    async with asyncio.timeout(PATIENCE_S):
        assert len(await service.client.statuses()) == 2


# When a prompt cannot be read elsewhere


async def test_without_a_prefill_replica_nothing_is_split(service: SplitService) -> None:
    await service.replica()
    await service.start()
    await service.finish(await service.ask_many(5))
    assert service.count("split_decisions", why="no_replica") == 5


async def test_a_prefill_replica_that_hangs_is_not_waited_for(service: SplitService) -> None:
    reading, answering = await service.pools(policy=splits(max_wait_s=0.1))
    reading.engine.pause()
    await over(answers := await service.ask_many(5))
    reading.engine.resume()
    await service.finish(answers)
    assert service.count("kv_transfer_fallbacks", reason="late") + service.count("split_decisions", why="late") == 5
    assert answering.engine.fetched == 0


async def test_a_prefill_without_a_cache_falls_back(service: SplitService) -> None:
    reading, answering = await service.pools()
    reading.engine.loses_caches = True
    await service.finish(await service.ask_many(3) + [await service.ask(trail=(trail := Trail(TRACE)))])
    assert service.count("kv_transfer_fallbacks", reason="failed") == 4
    assert answering.engine.fetched == 0
    assert trail.kv_transfer is not None and trail.kv_transfer.fell_back == "failed"


@pytest.mark.parametrize("error", [StateStoreError("Redis is away"), ValueError("no number")])
async def test_a_request_that_fails_once_its_prompt_is_read_is_counted_and_says_why(
    service: SplitService, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    await service.reader()
    await service.start()

    async def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(service.client.decoding.store, "enqueue", fails)
    answer = await service.ask()
    await until(lambda: answer.outcome == "error")
    unserved = error if isinstance(error, StateStoreError) else None
    assert (answer.timing.outcome, answer.timing.unserved) == ("error", unserved)
    assert service.count("requests", outcome="error", slo_class="standard", bin="0") == 1


async def test_a_transfer_that_hangs_is_given_up(service: SplitService) -> None:
    _, answering = await service.pools(split=SplitConfig(stalled_s=0.2))
    answering.engine.transfers_hang = True
    await service.finish(await service.ask_many(4))
    assert service.count("kv_transfer_fallbacks", reason="stalled") == 4


async def test_nothing_comes_any_more_of_a_transfer_that_was_given_up(service: SplitService) -> None:
    _, answering = await service.pools(split=SplitConfig(stalled_s=1e-9), heartbeat_s=3600.0, silence_s=10.0)
    answering.engine.transfers_hang = True
    answer = await service.ask()
    await until(lambda: bool(service.client.offered))
    entry = service.client.decoding.ledger[answer.asked.request_id]
    assert entry.connection is not None
    service.client._restart_stalled()
    assert entry.connection is None, "before anything else runs"
    await service.finish([answer])


async def test_a_cache_that_waited_too_long_is_not_offered(service: SplitService) -> None:
    clock = MovableClock()
    split = SplitConfig(cache_s=100.0, stalled_s=3600.0)
    _, answering = await service.pools(slots=1, split=split, clock=clock, max_wait_s=600.0)
    answering.engine.pause()
    answers = await service.ask_many(3)
    await until(lambda: service.read_and_unsent() == 2 and answering.engine.held == 1)
    clock.ahead_s = 101.0
    answering.engine.resume()
    await service.finish(answers)
    assert service.count("kv_transfer_fallbacks", reason="expired") == 2
    await until(lambda: (answering.engine.fetched, answering.engine.let_go) == (1, 2))


# When replicas die, requests are cancelled, or Redis is away


@pytest.mark.parametrize("replacement", [False, True])
async def test_killed_prefill_replicas_lose_nothing(service: SplitService, replacement: bool) -> None:
    # Without a replacement some wait for all of this time; in less of it a machine that stands still reads nothing.
    reading, _ = await service.pools(reading_step_s=0.02, policy=splits(max_wait_s=3.0))
    answers = await service.ask_many(12, max_tokens=60)
    await until(lambda: reading.engine.taken > 2)
    await reading.die()
    if replacement:
        await service.reader()
    await service.finish(answers + await service.ask_many(6))


@pytest.mark.parametrize("replays", [False, True])
async def test_killed_decode_replicas_lose_nothing(service: SplitService, replays: bool) -> None:
    _, victim = await service.pools(step_s=0.01)
    victim.engine.pause()
    answers = await service.ask_many(12, max_tokens=30, replays=replays)
    await victim.holds(4)
    victim.engine.resume()
    await until(lambda: any(len(answer.tokens) > 3 for answer in answers))
    await victim.die()
    successor = await service.replica()
    await service.finish(answers)
    # What the dead one had been offered may be gone: its requests are read again.
    assert victim.engine.fetched >= 4
    assert successor.engine.taken - successor.engine.fetched >= 4


async def test_a_killed_machine_with_replicas_of_both_kinds_loses_nothing(service: SplitService) -> None:
    reading, answering = await service.pools(step_s=0.01)
    reading.engine.pause()
    answering.engine.pause()
    answers = await service.ask_many(12, max_tokens=30)
    await until(lambda: reading.engine.held > 2)
    reading.engine.resume()
    await answering.holds(4)
    reading.engine.pause()
    answers += await service.ask_many(12, max_tokens=30)
    await until(lambda: reading.engine.held > 2)
    await asyncio.gather(reading.die(), answering.die())
    await service.replica()
    await service.reader()
    await service.finish(answers)


async def test_cancelling_leaves_nothing_behind_wherever_the_request_is(
    service: SplitService, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, answering = await service.pools(slots=1, reading_step_s=0.02)
    cancel = service.front_end_of_both.cancel
    reading.engine.pause()
    while_read = await service.ask_many(3, max_tokens=500)
    await reading.holds(3)
    await cancel(*while_read)
    reading.engine.resume()
    await service.is_empty()
    answering.engine.pause()
    queued = await service.ask_many(3, max_tokens=500)
    await until(lambda: service.read_and_unsent() == 2 and answering.engine.held == 1)
    await cancel(*queued)
    answering.engine.resume()
    await service.is_empty()
    await until(lambda: answering.engine.let_go == 2)  # the caches of those that had not been sent
    with monkeypatch.context() as held:
        held.setattr(service.client.decoding.store, "enqueue", lambda *_: asyncio.sleep(3600.0))
        read = await service.ask_many(3, max_tokens=500)
        await until(lambda: service.read_and_unsent() == 3)
        await cancel(*read)
    await service.is_empty()
    await until(lambda: answering.engine.let_go == 5)
    assert {answer.timing.outcome for answer in (*while_read, *queued, *read)} == {"cancelled"}


async def test_while_redis_is_away_nothing_is_split_and_nothing_is_lost() -> None:
    port, password = free_port(), secrets.token_urlsafe(16)
    server = EmbeddedRedis(port, password)
    service = SplitService(server.url)
    reading, answering = await service.pools(slots=8)
    await begun(answers := await service.ask_many(3, max_tokens=200))
    server.close()
    await over(answers := answers + await service.ask_many(3))
    assert (reading.engine.taken, answering.engine.taken) == (3, 6)
    server = EmbeddedRedis(port, password)
    await service.finish(answers)
    await service.close()
    server.close()


# Quotas


async def test_quotas_count_once_and_at_arrival(service: SplitService) -> None:
    await service.pools()
    tenant = Tenant(name="small", requests_per_minute=4)
    answers = await service.ask_many(4, tenant=tenant)
    with pytest.raises(AdmissionError, match="requests_per_minute of small"):
        await service.ask(tenant=tenant)
    assert next(reversed(service.front_end_of_both.answers.values())).timing.outcome == "refused"
    assert service.count("requests", slo_class="standard", bin="0", outcome="refused") == 1
    await service.finish(answers)
    assert service.count("kv_transfers") == 4


async def test_a_request_whose_charge_got_no_reply_is_charged_once(
    service: SplitService, monkeypatch: pytest.MonkeyPatch
) -> None:
    await service.pools()
    admit = service.client.decoding.store.admit

    async def unheard(ticket: Ticket, limits: Limits) -> Refusal | None:
        await admit(ticket, limits)
        monkeypatch.setattr(service.client.decoding.store, "admit", admit)
        raise StateStoreError("its reply was lost")

    monkeypatch.setattr(service.client.decoding.store, "admit", unheard)
    tenant = Tenant(name="small", requests_per_minute=2)
    answers = await service.ask_many(2, tenant=tenant)
    with pytest.raises(AdmissionError, match="requests_per_minute of small"):
        await service.ask(tenant=tenant)
    await service.finish(answers)
    assert service.count("kv_transfers") == 1, "the first was read where it was decoded"


async def test_a_split_request_pays_for_the_answer_that_it_insists_on(service: SplitService) -> None:
    await service.pools()
    tenant = Tenant(name="small", tokens_per_minute=LONG + 200)
    answer = await service.ask(max_tokens=200, min_tokens=200, tenant=tenant)
    with pytest.raises(AdmissionError, match="tokens_per_minute of small"):
        await service.ask(max_tokens=100, min_tokens=100, tenant=tenant)
    await service.finish([answer])


async def test_a_split_request_is_settled_once_when_it_ends_and_when_it_is_cancelled(service: SplitService) -> None:
    reading, _ = await service.pools()
    await service.finish([await service.ask(max_tokens=200, tenant=SLOW_TENANT)])
    await service.owes(LONG + 200)
    reading.engine.pause()
    other = Tenant(name="other", tokens_per_minute=6)
    cancelled = await service.ask(max_tokens=200, min_tokens=200, tenant=other)
    await service.owes(LONG + 200, other)
    await service.front_end_of_both.cancel(cancelled)
    await service.owes(LONG, other)
    reading.engine.resume()
    await service.is_empty()
    assert service.count("split_decisions", why="split") == 2


# When it pays


@pytest.mark.slow
async def test_auto_splits_only_while_others_would_notice(service: SplitService) -> None:
    reading, answering = await service.pools(
        slots=16,
        step_s=0.01,
        policy=PrefillDecodeConfig(mode="auto", min_prompt_tokens=LONG),
        split=SplitConfig(itl_targets_s={"standard": 0.015}),
    )
    await service.finish([await service.ask(400, max_tokens=3)])
    answering.engine.pause()  # none is over before the router knows of all
    running = [await service.ask(3, max_tokens=200) for _ in range(6)]
    await until(lambda: service.front_end_of_both.running == 6)
    longer = await service.ask(400)
    answering.engine.resume()
    await service.finish([*running, longer])
    assert service.count("split_decisions", why="idle") == 1
    assert service.count("split_decisions", why="split") == 1
    assert reading.engine.taken == 1


async def test_what_running_requests_hold_is_known_with_every_heartbeat(service: SplitService) -> None:
    _, answering = await service.pools(slots=16, step_s=0.01, policy=PrefillDecodeConfig(mode="never"))
    answering.engine.pause()
    running = await service.ask_many(4, max_tokens=100)
    await answering.holds(4)
    answering.engine.resume()
    for tokens, least, most in ((9, 40, 60), (29, 60, 140)):
        await begun(running, tokens)
        answering.engine.pause()  # until a heartbeat has looked
        await until(lambda least=least, most=most: least < (service.client.context_tokens or 0) <= most)  # type: ignore[misc]
        answering.engine.resume()
    await service.finish(running)


def test_wrong_times_are_refused() -> None:
    with pytest.raises(ConfigError, match="cache_s"):
        SplitConfig(cache_s=0.0)
