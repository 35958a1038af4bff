"""Routers and replicas over one Redis: real relays, TCP and Redis; only the engine has no model.

Its answers are known in advance, so every test that disturbs anything asks for the very same tokens.
"""

import asyncio
import contextlib
import math
import secrets
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import msgspec

from deployments.engines.relay import Credit, Relay, RelayConfig
from deployments.engines.traces import ReplicaTraces
from policies.live import Live
from policies.router.multi_bin import MultiBin, MultiBinConfig
from policies.router.placement import PrefixIndex, PrefixIndexConfig
from policies.router.promise import Promise
from policies.types import StepCoefficients, StepTimes
from predictor.histogram import HistogramPredictor
from router.admission import ClassLimits, Door, Tenant
from router.classifier import Classifier, Mode
from router.clock import MonotonicClock, SharedClock
from router.metrics import RouterMetrics
from router.prefill_decode import SplitClient
from router.redis_store import RedisStateStore, connect
from router.routed_client import RoutedClient, routed_client
from router.state_store import ReplicaInfo, Snapshot
from router.terms import RoutedClientConfig, RouterTerms, TicketTerms
from router.timing import RequestTiming
from tests.fakes import FakeBatch, FakeCodec, FakeEngine, FakeRequest, undisturbed
from tests.waiting import until, until_async

HEARTBEAT_S = 0.05
PROMPT_TOKENS = 3
STEP_TIMES = StepTimes(
    prefill=StepCoefficients(overhead_s=0.01),
    decode=StepCoefficients(overhead_s=0.01),
    mixed=StepCoefficients(overhead_s=0.01),
)
TARGETS_S = {"soon": 0.2, "standard": 1.0, "later": 3.0, "patient": 60.0, "offline": 60.0, "strict": 5.0}
# A token in ten seconds: within a test next to nothing comes back.
SLOW_TENANT = Tenant(name="slow", tokens_per_minute=6)
TRACE = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
_numbers = count()

Client = RoutedClient[FakeRequest, FakeBatch]


def request(max_tokens: int = 20, *, prompt: Sequence[int] = (), **fields: Any) -> FakeRequest:
    """A request with an id and a prompt of its own, unless they are given."""
    number = next(_numbers)
    fields = {"request_id": f"x{number}", "prompt": list(prompt) or [number, 7, 7], **fields}
    return FakeRequest(max_tokens=max_tokens, **fields)


def requests(number: int, max_tokens: int = 20, **fields: Any) -> list[FakeRequest]:
    return [request(max_tokens, **fields) for _ in range(number)]


def timed() -> RequestTiming:
    """The timing of a request that comes now."""
    now_s = MonotonicClock().now()
    return RequestTiming(received_s=now_s, submitted_s=now_s)


class Answer:
    """What a front end has of one request."""

    def __init__(self, asked: FakeRequest, timing: RequestTiming) -> None:
        self.asked, self.timing, self._max_tokens = asked, timing, asked.max_tokens
        self.tokens: list[int] = []
        self.hits: list[int | None] = []
        self.outcome: str | None = None

    @property
    def expected(self) -> list[int]:
        return undisturbed(self.asked.prompt, self._max_tokens)


async def begun(answers: Iterable[Answer], tokens: int = 0) -> None:
    """Each has more than these tokens."""
    await until(lambda: all(len(answer.tokens) > tokens for answer in answers))


async def over(answers: Iterable[Answer]) -> None:
    await until(lambda: all(answer.outcome is not None for answer in answers))


class FrontEnd:
    """Stands where vLLM's front end stands: asks, and reads what comes."""

    def __init__(self, client: Client | SplitClient[FakeRequest, FakeBatch], metrics: RouterMetrics) -> None:
        self._asks, self.metrics = client, metrics
        self.pools = [client] if isinstance(client, RoutedClient) else [client.decoding, client.pool.client]
        self.answers: dict[str, Answer] = {}
        self._reader = asyncio.create_task(self._read())

    @property
    def client(self) -> Client:
        """The client of the replicas that answer."""
        return self.pools[0]

    @property
    def split(self) -> SplitClient[FakeRequest, FakeBatch]:
        assert isinstance(self._asks, SplitClient)
        return self._asks

    async def ask(
        self,
        asked: FakeRequest,
        slo_class: str = "standard",
        tenant: Tenant | None = None,
        timing: RequestTiming | None = None,
        promise: Promise | None = None,
    ) -> Answer:
        self.answers[asked.request_id] = answer = Answer(asked, timing or timed())
        promise = promise or Promise(ttft_s=TARGETS_S[slo_class])
        await self._asks.submit(asked, slo_class=slo_class, promise=promise, timing=answer.timing, tenant=tenant)
        return answer

    async def ask_many(self, number: int, max_tokens: int = 20, **fields: Any) -> list[Answer]:
        return await self.ask_each(requests(number, max_tokens, **fields))

    async def ask_each(self, asked: Sequence[FakeRequest]) -> list[Answer]:
        return [await self.ask(each) for each in asked]

    async def ask_at_once(self, replica: "Replica", asked: Sequence[FakeRequest], *, held: int) -> list[Answer]:
        """However slow Redis is, none is answered before all are queued and the replica holds `held` of them."""
        replica.engine.pause()
        answers = await self.ask_each(asked)
        await replica.holds(held)
        replica.engine.resume()
        return answers

    async def cancel(self, *answers: Answer) -> None:
        await self._asks.cancel([answer.asked.request_id for answer in answers], "cancelled")

    async def _read(self) -> None:
        while True:
            for output in (await self._asks.next_outputs()).outputs:
                answer = self.answers[output.request_id]
                assert answer.outcome is None, "an output after the last one"
                answer.tokens += output.new_token_ids
                answer.hits.append(output.hits)
                answer.outcome = output.finish_reason

    @property
    def running(self) -> int:
        """Requests on all replicas, as of the last heartbeat."""
        return sum(load.running for load in self.client.snapshot.replicas.values())

    def count(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"sluice_{name}", labels) or 0.0

    def task(self, name: str) -> "asyncio.Task[Any]":
        """The one of this name in the background."""
        (found,) = [task for task in self.client.background._tasks if task.get_name() == name]
        return found

    def does(self, name: str) -> bool:
        return name in {task.get_name() for task in self.client.background._tasks}

    async def die(self) -> None:
        """As a killed process does: its sockets close, and it says nothing."""
        self._reader.cancel()
        await self.client.background.close()

    async def close(self) -> None:
        self._reader.cancel()
        await self._asks.close()


class Replica:
    def __init__(self, relay: Relay, engine: FakeEngine) -> None:
        self.relay, self.engine = relay, engine

    @property
    def replica_id(self) -> str:
        return self.relay.info.replica_id

    async def holds(self, requests: int) -> None:
        await until(lambda: self.engine.held == requests)

    async def die(self) -> None:
        """As a killed process does: what it had not sent is lost, and it says nothing."""
        self.hang_up()
        await self.relay._background.close()

    async def leave(self) -> None:
        await self.relay.drain()
        await self.relay.close()

    async def stop_beating(self) -> None:
        """As a process does that hangs: its connections stay open."""
        self.engine.pause()
        (beat,) = [task for task in self.relay._background._tasks if task.get_name() == "heartbeat"]
        beat.cancel()

    def hang_up(self) -> None:
        """The network breaks; both ends live."""
        for writer in self.relay._writers:
            writer.transport.abort()


def told(replica: Replica, asked: FakeRequest) -> tuple[float | None, bool]:
    """For a request on board, the seconds until its first token is due, and whether it is a resumed one."""
    (found,) = (one for one in replica.engine._held.values() if one.request_id.startswith(f"{asked.request_id}~"))
    return found.told


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
    """Routers and replicas, each with a client of Redis of its own."""

    def __init__(self, url: str, name: str | None = None) -> None:
        self.url, self.name = url, name or secrets.token_hex(8)
        self._stores: list[RedisStateStore] = []
        self.store = self.new_store()
        self.front_ends: list[FrontEnd] = []
        self.replicas: list[Replica] = []

    def new_store(self, pool: str = "") -> RedisStateStore:
        self._stores.append(RedisStateStore(connect(self.url), f"{self.name}{pool}"))
        return self._stores[-1]

    async def replica(
        self,
        slots: int = 4,
        *,
        pool: str = "",
        salt: int = 0,
        step_s: float = 0.002,
        silence_s: float = 5.0,
        version: str = "fake-1",
        classes: tuple[str, ...] = (),
        credit_s: float | None = None,
        token_s: float | None = None,
        traces: ReplicaTraces | None = None,
        host: str = "127.0.0.1",
        **config: Any,
    ) -> Replica:
        """`config` as of RelayConfig."""
        engine = FakeEngine(slots=slots, salt=salt, step_s=step_s, version=version)
        engine.token_s = token_s
        relay = Relay(
            engine=engine,
            store=self.new_store(pool),
            info=msgspec.structs.replace(info(f"r{len(self.replicas)}", silence_s), classes=classes, host=host),
            config=RelayConfig(heartbeat_s=HEARTBEAT_S, **config),
            credit=Live(Credit(reading_s=credit_s)),
            traces=traces,
        )
        await relay.start(host)
        self.replicas.append(Replica(relay, engine))
        return self.replicas[-1]

    async def front_end(
        self,
        *,
        max_waiting: int = 4096,
        prefill_s: float = 0.0,
        mode: Mode = "full",
        version: str = "fake-1",
        **config: Any,
    ) -> FrontEnd:
        """`config` as of RoutedClientConfig."""
        metrics = RouterMetrics()
        client = routed_client(
            router_id=f"router{len(self.front_ends)}",
            store=self.new_store(),
            codec=FakeCodec(version),
            classifier=classifier(metrics, prefill_s, mode),
            terms=terms(ClassLimits(max_waiting=max_waiting), **config),
            clock=MonotonicClock(),
            shared_clock=SharedClock(),
            metrics=metrics,
        )
        await client.start()
        return self.with_front_end(client, metrics)

    def with_front_end(self, client: Client | SplitClient[FakeRequest, FakeBatch], metrics: RouterMetrics) -> FrontEnd:
        self.front_ends.append(FrontEnd(client, metrics))
        return self.front_ends[-1]

    async def both(self, slots: int = 4) -> tuple[Replica, FrontEnd]:
        """A replica and a router."""
        return await self.replica(slots), await self.front_end()

    async def finish(self, answers: Iterable[Answer]) -> None:
        """Every answer is complete and exact, and nothing of it is left anywhere."""
        answers = list(answers)
        await over(answers)
        assert Counter(answer.outcome for answer in answers) == {"length": len(answers)}
        for answer in answers:
            assert answer.tokens == answer.expected
        await self.is_empty()

    async def is_empty(self) -> None:
        async def nothing_in(store: Any) -> bool:
            return _nothing_in(await store.snapshot())

        clients = [client for front_end in self.front_ends for client in front_end.pools]
        for store in [self.store, *(client.store for client in clients)]:
            await until_async(lambda store=store: nothing_in(store))  # type: ignore[misc]
        await until(lambda: all(r.engine.held == 0 for r in self.replicas if r.relay.healthy))
        assert not any(client.ledger for client in clients)

    async def owed(self, tenant: Tenant = SLOW_TENANT) -> float:
        """Tokens that must come back until the allowance is whole."""
        quota = tenant.token_quota(0.0)
        assert quota is not None
        refused = await self.front_ends[0].client.store.charge([replace(quota, burst=1e-9)])
        return 0.0 if refused is None else refused.retry_after_s * quota.per_s

    async def until_owed(self, least: float, most: float = math.inf, tenant: Tenant = SLOW_TENANT) -> None:
        async def is_owed() -> bool:
            return least <= await self.owed(tenant) <= most

        await until_async(is_owed)

    async def owes(self, tokens: float, tenant: Tenant = SLOW_TENANT) -> None:
        """Some seconds later at most, of which not much came back."""
        await self.until_owed(tokens - 3, tokens + 0.01, tenant)
        await asyncio.sleep(4 * HEARTBEAT_S)
        assert tokens - 4 < await self.owed(tenant) <= tokens + 0.01, "it was settled twice"

    async def close(self) -> None:
        for front_end in self.front_ends:
            await front_end.close()
        for replica in self.replicas:
            await replica.relay.close()
        for store in self._stores:
            await store.close()


def _nothing_in(snapshot: Snapshot) -> bool:
    return not snapshot.waiting and not any(load.running for load in snapshot.replicas.values())


def info(replica_id: str, silence_s: float = 3600.0, port: int = 0) -> ReplicaInfo:
    return ReplicaInfo(replica_id=replica_id, host="127.0.0.1", port=port, max_model_len=4096, silence_s=silence_s)


def terms(limits: ClassLimits, **config: Any) -> Live[RouterTerms]:
    """Terms with the class `standard`; `strict` refuses requests that would be late."""
    config = {"heartbeat_s": HEARTBEAT_S, "max_wait_s": 60.0, "silence_s": 5.0, "max_moves": 8, **config}
    door = Door({"standard": limits, "strict": ClassLimits(refuses_late=True)})
    return Live(RouterTerms(door, RoutedClientConfig(**config)))


def classifier(metrics: RouterMetrics, prefill_s: float = 0.0, mode: Mode = "full") -> Classifier:
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


class MovableClock(MonotonicClock):
    """The machine's, which a test can put forward."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def now(self) -> float:
        return super().now() + self.ahead_s
