"""python -m bench.rig.traces: what traces cost a router, without a model and without vLLM's front end.

First what a request costs on the event loop, where none is sampled and where all are: the least of many rounds, which
is what a busy machine disturbs least. Then a router's CPU per token without traces, with one request in a hundred and
with all of them, in turns: the medians, and the ratios to those without in the same repeat. The
receiver is a process of its own, which takes everything and looks at nothing.
"""

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import secrets
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection

import grpc
from tqdm import tqdm

from bench.rig.measurements import added_time
from bench.rig.processes import PATH, SCOPE, child, in_routers, serve
from bench.session import turns
from bench.summary import Spread
from deployments.http.traces import HttpTraces
from deployments.process.parent import die_with_parent
from deployments.process.ports import free_port
from deployments.process.spans import Tracing
from deployments.serving.embedded_redis import EmbeddedRedis
from policies.router.tickets import Ticket
from router.timing import HttpContext, RequestTiming

RATIOS = (None, 0.01, 1.0)  # of requests that are traced; None is without traces
EXPORT = "opentelemetry.proto.collector.trace.v1.TraceService"
FIGURE = "router CPU us per token"
TTFT_S, INTERVAL_S = 0.05, 0.02
ROUNDS, REQUESTS = 20, 200
TICKET = Ticket(request_id="a", bin_index=3, deadline_key=0.0, work_s=1.0, router_id="r")
HEADERS = {"host": "localhost", "authorization": "Bearer a", "content-type": "application/json"}


def receive(told: Connection) -> None:
    """Until the process that started it ends it."""
    die_with_parent()
    server = grpc.server(ThreadPoolExecutor(1))
    take = grpc.unary_unary_rpc_method_handler(lambda request, context: b"")
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(EXPORT, {"Export": take}),))
    told.send(server.add_insecure_port("127.0.0.1:0"))
    server.start()
    server.wait_for_termination()


@contextlib.contextmanager
def receiver() -> Iterator[str]:
    mine, its = multiprocessing.get_context("spawn").Pipe()
    with child(receive, its):
        yield f"http://127.0.0.1:{mine.recv()}"


def environment(endpoint: str, ratio: float | None) -> dict[str, str]:
    if ratio is None:
        return {"OTEL_SDK_DISABLED": "true"}
    return {
        "OTEL_SDK_DISABLED": "false",
        "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
        "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": str(ratio),
    }


def request_cost_us(endpoint: str, ratio: float) -> float:
    """CPU of the thread that serves; what sends spans is another."""
    os.environ.update(environment(endpoint, ratio))
    tracing = Tracing.by_otlp("router", "grpc")
    traces, costs = HttpTraces(tracing), []
    for _ in range(ROUNDS):
        began_s = time.thread_time()
        for _ in range(REQUESTS):
            _trace_one(traces)
        costs.append((time.thread_time() - began_s) / REQUESTS * 1e6)
    asyncio.run(tracing.close())
    return min(costs)


def _trace_one(traces: HttpTraces) -> None:
    """A request with one answer, which one replica gives."""
    now_s = time.monotonic()
    trace = traces.begin(SCOPE, PATH, HEADERS, now_s)
    if trace is None:
        return
    timing = RequestTiming(received_s=now_s, submitted_s=now_s, first_token_s=now_s, outcome="stop")
    trace.follow(timing, "null")
    assert timing.trail is not None
    timing.trail.classified(TICKET, 100, 128, now_s)
    timing.trail.queued(now_s)
    timing.trail.sent("r0", 0, now_s).first_s = now_s
    timing.trail.left(now_s)
    trace.end(HttpContext(now_s, "standard", timings=[timing]), 200, now_s)


def measured(redis_url: str, endpoint: str, ratio: float | None, streams: int, tokens: int) -> float:
    os.environ.update(environment(endpoint, ratio))
    namespace = secrets.token_hex(4)
    with child(serve, redis_url, namespace, 1024, TTFT_S, INTERVAL_S):
        measurement = partial(added_time, 1, streams, TTFT_S, INTERVAL_S, tokens)
        (figures,) = in_routers(redis_url, namespace, 1, measurement)
    return float(figures[FIGURE])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.rig.traces", description=__doc__)
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    options = parser.parse_args()
    redis = EmbeddedRedis(free_port(), secrets.token_urlsafe(16))
    found: dict[float | None, list[float]] = {ratio: [] for ratio in RATIOS}
    try:
        with receiver() as endpoint:
            for share in (0.0, 1.0):
                print(f"a request, {share:.0%} sampled: {request_cost_us(endpoint, share):.3g} us", flush=True)
            for repeat in tqdm(range(options.repeats)):
                for ratio in turns(RATIOS, repeat):
                    cost = measured(redis.url, endpoint, ratio, options.streams, options.tokens)
                    found[ratio].append(cost)
    finally:
        redis.close()
    for ratio in RATIOS:
        name = "without traces" if ratio is None else f"{ratio:.0%} of requests"
        paired = [cost / without for cost, without in zip(found[ratio], found[None], strict=True)]
        print(f"{name}: {Spread.of(found[ratio]):,.4g} us per token, x {Spread.of(paired):,.4g}")


if __name__ == "__main__":
    main()
