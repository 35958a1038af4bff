"""A replica and a router, each a process that can be killed: python -m tests.chaos.processes replica|router ...

They speak the real protocol over real sockets and a real Redis; only the model is missing. A router asks its requests,
compares every token with what an undisturbed engine answers, and prints what became of them. Asked to be endless it
goes on until SIGTERM: however fast it is, it is in the middle of its requests when something happens to the others.
"""

import argparse
import asyncio
import json
import random
import secrets
import signal
import sys
import time
from collections import Counter

import uvloop

from deployments.engines.relay import Credit, Relay, RelayConfig
from deployments.process.parent import die_with_parent
from policies.live import Live
from policies.router.admission import ClassLimits
from policies.router.multi_bin import MultiBin, MultiBinConfig
from policies.router.placement import PrefixIndex, PrefixIndexConfig
from policies.router.promise import Promise
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
from router.timing import RequestTiming
from tests.fakes import FakeBatch, FakeCodec, FakeEngine, FakeRequest, undisturbed

HEARTBEAT_S, SILENCE_S, LEASE_S = 0.2, 3.0, 4.0
CLASSES = ("interactive", "standard", "offline")
PROMISES = {name: Promise(ttft_s=ttft_s) for name, ttft_s in zip(CLASSES, (0.1, 1.0, 60.0), strict=True)}
CREDIT_S, TOKEN_S = 0.05, 0.001
STEP = StepCoefficients(overhead_s=0.002)


class SkewedClock:
    """Another host's clock: its own beginning, and `rate` seconds for every second."""

    def __init__(self, skew_s: float) -> None:
        self._skew_s = skew_s

    def now(self) -> float:
        return time.monotonic() + self._skew_s


async def serve(options: argparse.Namespace) -> None:
    store = RedisStateStore(connect(options.url), options.namespace)
    engine = FakeEngine(slots=options.slots, step_s=options.step_s)
    engine.token_s = TOKEN_S
    relay = Relay(
        engine=engine,
        store=store,
        info=ReplicaInfo(
            replica_id=options.id,
            host=options.host,
            port=options.port,
            max_model_len=1 << 20,
            gang_max_wait_s=options.gang_max_wait_s,
            silence_s=SILENCE_S,
        ),
        config=RelayConfig(
            heartbeat_s=HEARTBEAT_S, lease_s=LEASE_S, step_times=StepTimes(prefill=STEP, decode=STEP, mixed=STEP)
        ),
        credit=Live(Credit(reading_s=CREDIT_S)),
    )
    await relay.start(options.host)
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    await stopped.wait()
    await relay.drain()
    await relay.close()
    await store.close()


class Asker:
    """Asks `requests` requests, `concurrency` at once, and more until it is `enough`; keeps account of each."""

    def __init__(self, client: RoutedClient[FakeRequest, FakeBatch], options: argparse.Namespace) -> None:
        self._client, self._options = client, options
        self._random = random.Random(options.seed)
        self._tokens: dict[str, list[int]] = {}
        self._ended: dict[str, asyncio.Future[str]] = {}
        self.outcomes: Counter[str] = Counter()
        self.asked = 0
        self.enough = not options.endless

    async def read(self) -> None:
        while True:
            for output in (await self._client.next_outputs()).outputs:
                if output.request_id not in self._ended:
                    continue  # cancelled while this was on the way
                self._tokens[output.request_id] += output.new_token_ids
                if output.finish_reason is not None:
                    self._ended.pop(output.request_id).set_result(output.finish_reason)

    async def ask_on(self) -> None:
        while self.asked < self._options.requests or not self.enough:
            self.asked += 1
            self.outcomes[await self._ask()] += 1
            if sum(self.outcomes.values()) % 100 == 0:
                print(json.dumps({"so_far": sum(self.outcomes.values())}), flush=True)

    def stop(self) -> None:
        self.enough = True

    async def _ask(self) -> str:
        chance = self._random
        request = FakeRequest(
            request_id=secrets.token_hex(8),
            prompt=[chance.randrange(1000) for _ in range(20)],
            max_tokens=chance.randrange(1, 24),
            replays=chance.random() < 0.5,
        )
        self._tokens[request.request_id] = []
        ended = self._ended[request.request_id] = asyncio.get_running_loop().create_future()
        await self._submit(request)
        if chance.random() < self._options.cancel_fraction:
            await asyncio.sleep(chance.random() * 0.05)
            self._ended.pop(request.request_id, None)
            await self._client.cancel([request.request_id], "cancelled")
            return "cancelled"
        async with asyncio.timeout(60):
            outcome = await ended
        expected = undisturbed(request.prompt, request.max_tokens)
        if outcome == "length" and self._tokens.pop(request.request_id) != expected:
            return "wrong"
        return outcome

    async def _submit(self, request: FakeRequest) -> None:
        now_s = self._client.clock.now()
        timing = RequestTiming(received_s=now_s, submitted_s=now_s)
        slo_class = self._random.choice(CLASSES)
        await self._client.submit(request, slo_class=slo_class, promise=PROMISES[slo_class], timing=timing)


async def ask(options: argparse.Namespace) -> None:
    metrics = RouterMetrics()
    store = RedisStateStore(connect(options.url), options.namespace)
    client: RoutedClient[FakeRequest, FakeBatch] = routed_client(
        router_id=secrets.token_hex(6),
        store=store,
        codec=FakeCodec(),
        classifier=Classifier(
            predictor=HistogramPredictor(),
            bins=MultiBin(MultiBinConfig(bins=4, refit_every=64)),
            terms=Live(TicketTerms(fills_idle={"offline": "deadline"})),
            step_times=StepTimes(prefill=STEP, decode=STEP, mixed=STEP),
            shared_batch_size=16,
            default_output_tokens=12,
            metrics=metrics,
            prefixes=PrefixIndex(PrefixIndexConfig()),
        ),
        terms=Live(
            RouterTerms(
                Door({name: ClassLimits(max_waiting=100_000) for name in CLASSES}),
                RoutedClientConfig(max_moves=100, heartbeat_s=HEARTBEAT_S, silence_s=SILENCE_S),
            )
        ),
        clock=SkewedClock(options.skew_s) if options.skew_s else MonotonicClock(),
        shared_clock=SharedClock(),
        metrics=metrics,
    )
    await client.start()
    asker = Asker(client, options)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asker.stop)
    reader = asyncio.create_task(asker.read())
    reader.add_done_callback(_end_with)
    await asyncio.gather(*(asker.ask_on() for _ in range(options.concurrency)))
    left_over = len(client.ledger)
    reader.cancel()
    await client.close()
    await store.close()
    print(json.dumps({"asked": asker.asked, "outcomes": asker.outcomes, "left_over": left_over}), flush=True)


def _end_with(reader: "asyncio.Task[None]") -> None:
    if not reader.cancelled():
        raise SystemExit(f"the reader ended: {reader.exception()!r}")


def main() -> None:
    die_with_parent()
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=("replica", "router"))
    for name in ("url", "namespace"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--id", default="r")
    parser.add_argument("--host", default="127.0.0.1")
    for name, default in (("port", 0), ("slots", 32), ("requests", 1000), ("concurrency", 100), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, chance in (("step-s", 0.002), ("cancel-fraction", 0.0), ("skew-s", 0.0)):
        parser.add_argument(f"--{name}", type=float, default=chance)
    parser.add_argument("--endless", action="store_true", help="the router asks on until SIGTERM")
    parser.add_argument("--gang-max-wait-s", type=float, help="the replica takes gang batches")
    options = parser.parse_args()
    uvloop.run(serve(options) if options.role == "replica" else ask(options))  # as Ray runs them


if __name__ == "__main__":
    sys.exit(main())
