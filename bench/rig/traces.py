"""python -m bench.rig.traces: what traces cost a router, without a model and without vLLM's front end.

A router's CPU per token without traces, with one request in a hundred and with all of them, one after another in each
repeat. Printed are the medians, and of those with traces the ratios to those without in the same repeat. The receiver
is a process of its own, which takes everything and looks at nothing.
"""

import argparse
import contextlib
import multiprocessing
import os
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection

import grpc
from tqdm import tqdm

from bench.rig.__main__ import replica
from bench.rig.measurements import added_time
from bench.rig.processes import in_routers
from bench.summary import Spread
from deployments.process.environment import free_port
from deployments.process.parent import die_with_parent
from deployments.serving.embedded_redis import EmbeddedRedis

RATIOS = (None, 0.01, 1.0)  # of requests that are traced; None is without traces
EXPORT = "opentelemetry.proto.collector.trace.v1.TraceService"
FIGURE = "router CPU us per token"
TTFT_S, INTERVAL_S = 0.05, 0.02


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
    context = multiprocessing.get_context("spawn")
    mine, its = context.Pipe()
    process = context.Process(target=receive, args=(its,))
    process.start()
    try:
        yield f"http://127.0.0.1:{mine.recv()}"
    finally:
        process.terminate()
        process.join(timeout=10)


def environment(endpoint: str, ratio: float | None) -> dict[str, str]:
    if ratio is None:
        return {"OTEL_SDK_DISABLED": "true"}
    return {
        "OTEL_SDK_DISABLED": "false",
        "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
        "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": str(ratio),
    }


def measured(redis_url: str, endpoint: str, ratio: float | None, streams: int, tokens: int) -> float:
    os.environ.update(environment(endpoint, ratio))
    namespace = secrets.token_hex(4)
    with replica(redis_url, namespace, 1024, TTFT_S, INTERVAL_S):
        measurement = partial(added_time, streams, TTFT_S, INTERVAL_S, tokens)
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
            for repeat in tqdm(range(options.repeats)):
                for ratio in RATIOS if repeat % 2 == 0 else reversed(RATIOS):
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
