"""The parts of the rig, each in a process of its own: Redis, one replica, and routers that measure."""

import asyncio
import contextlib
import multiprocessing
import resource
import secrets
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from bench.rig.null_engine import NullBatch, NullCodec, NullEngine, NullRequest
from deployments.engines.relay import Relay, RelayConfig
from deployments.http.traces import HttpTraces
from deployments.process.parent import die_with_parent
from deployments.process.tracing import started_tracing
from policies.live import Live
from policies.router.admission import ClassLimits
from policies.router.multi_bin import MultiBin, MultiBinConfig
from policies.router.placement import PrefixIndex, PrefixIndexConfig
from policies.types import StepCoefficients, StepTimes
from predictor.histogram import HistogramPredictor
from router.admission import Door
from router.classifier import Classifier
from router.clock import MonotonicClock, SharedClock
from router.metrics import RouterMetrics
from router.redis_store import RedisStateStore, connect
from router.routed_client import RoutedClient, routed_client
from router.state_store import ReplicaInfo
from router.terms import RoutedClientConfig, RouterTerms, TicketTerms
from router.timing import HttpContext, RequestTiming

Measurement = Callable[["RigRouter"], Awaitable[Any]]
STEP_TIMES = StepTimes(
    prefill=StepCoefficients(overhead_s=0.0, prefill_s=2e-5),
    decode=StepCoefficients(overhead_s=5e-3, decode_s=4e-5),
    mixed=StepCoefficients(overhead_s=5e-3, prefill_s=2e-5, decode_s=4e-5),
)


PATH = "/v1/completions"
SCOPE = {"type": "http", "method": "POST", "path": PATH}


class RigRouter:
    """A routed client with a reader that wakes the caller that waits for an answer.

    Where the environment asks for traces, each request has what HTTP does for its trace besides.
    """

    def __init__(self, url: str, namespace: str) -> None:
        self.store = RedisStateStore(connect(url), namespace)
        metrics = RouterMetrics()
        self.client: RoutedClient[NullRequest, NullBatch] = routed_client(
            router_id=secrets.token_hex(6),
            store=self.store,
            codec=NullCodec(),
            classifier=_classifier(metrics),
            terms=Live(RouterTerms(Door({"standard": ClassLimits(max_waiting=1 << 20)}), RoutedClientConfig())),
            clock=MonotonicClock(),
            shared_clock=SharedClock(),
            metrics=metrics,
        )
        self._tracing = started_tracing("router")
        self._traces = None if self._tracing is None else HttpTraces(self._tracing)
        self._stamps: dict[str, list[float]] = {}
        self._ended: dict[str, asyncio.Future[None]] = {}

    async def start(self) -> None:
        await self.client.start()
        self._reader = asyncio.create_task(self._read())

    async def close(self) -> None:
        self._reader.cancel()
        await self.client.close()
        await self.store.close()
        if self._tracing is not None:
            await self._tracing.close()

    async def _read(self) -> None:
        while True:
            outputs = (await self.client.next_outputs()).outputs
            now_s = time.perf_counter()
            for output in outputs:
                self._stamps[output.request_id].append(now_s)
                if output.finish_reason is not None:
                    self._ended.pop(output.request_id).set_result(None)

    async def submit(self, max_tokens: int, timing: RequestTiming | None = None) -> str:
        """Queue one request; returns its id."""
        request = NullRequest(secrets.token_hex(8), 100, max_tokens)
        self._stamps[request.request_id] = [time.perf_counter()]
        self._ended[request.request_id] = asyncio.get_running_loop().create_future()
        await self.client.submit(request, slo_class="standard", timing=timing or _timing(time.monotonic()))
        return request.request_id

    async def ask(self, max_tokens: int) -> list[float]:
        """The times of its submission and of every token."""
        timing = _timing(now_s := time.monotonic())
        trace = None if self._traces is None else self._traces.begin(SCOPE, PATH, {}, now_s)
        if trace is not None:
            trace.follow(timing, "null")
        request_id = await self.submit(max_tokens, timing)
        await self._ended[request_id]
        if trace is not None:
            trace.end(HttpContext(now_s, "standard", timings=[timing]), 200, time.monotonic())
        return self._stamps.pop(request_id)

    async def forget(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            del self._stamps[request_id], self._ended[request_id]
        await self.client.cancel(request_ids, "cancelled")


def _timing(now_s: float) -> RequestTiming:
    return RequestTiming(received_s=now_s, submitted_s=now_s)


def _classifier(metrics: RouterMetrics) -> Classifier:
    return Classifier(
        predictor=HistogramPredictor(),
        bins=MultiBin(MultiBinConfig(bins=4)),
        terms=Live(TicketTerms()),
        step_times=STEP_TIMES,
        shared_batch_size=32,
        default_output_tokens=64,
        metrics=metrics,
        prefixes=PrefixIndex(PrefixIndexConfig()),
    )


@contextlib.contextmanager
def child(target: Callable[..., object], *args: object) -> Iterator[None]:
    """A process that ends with the with block."""
    process = multiprocessing.get_context("spawn").Process(target=target, args=args)
    process.start()
    try:
        yield
    finally:
        process.terminate()
        process.join(timeout=20)


async def serve_engine(url: str, namespace: str, engine: Any, config: RelayConfig, max_model_len: int) -> None:
    """A replica with that engine, until SIGTERM."""
    store = RedisStateStore(connect(url), namespace)
    info = ReplicaInfo(replica_id=secrets.token_hex(4), host="127.0.0.1", port=0, max_model_len=max_model_len)
    relay = Relay(engine=engine, store=store, info=info, config=config)
    await relay.start("127.0.0.1")
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    await stopped.wait()
    await relay.close()
    await store.close()


async def _serve(url: str, namespace: str, slots: int, ttft_s: float, interval_s: float) -> None:
    engine = NullEngine(slots=slots, ttft_s=ttft_s, interval_s=interval_s)
    await serve_engine(url, namespace, engine, RelayConfig(step_times=STEP_TIMES), 1 << 20)


def serve(url: str, namespace: str, slots: int, ttft_s: float, interval_s: float) -> None:
    """A replica with a null engine, until SIGTERM."""
    die_with_parent()
    asyncio.run(_serve(url, namespace, slots, ttft_s, interval_s))


async def _measure(url: str, namespace: str, measurement: Measurement) -> Any:
    router = RigRouter(url, namespace)
    await router.start()
    try:
        return await measurement(router)
    finally:
        await router.close()


def _route(url: str, namespace: str, measurement: Measurement) -> Any:
    return asyncio.run(_measure(url, namespace, measurement))


def in_routers(url: str, namespace: str, number: int, measurement: Measurement, timeout_s: float = 180.0) -> list[Any]:
    """The results of one measurement that runs in several router processes at once."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(number, mp_context=context, initializer=die_with_parent) as pool:
        measured = [pool.submit(_route, url, namespace, measurement) for _ in range(number)]
        return [each.result(timeout_s) for each in measured]


def cpu_s() -> float:
    """CPU seconds of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
