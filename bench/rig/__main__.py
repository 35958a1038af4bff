"""python -m bench.rig: what Sluice's own path costs, without a model and without vLLM's front end.

Routers, a Redis and a replica run in processes of their own. Printed: requests per second of router CPU, from the
ticket to the last token; the ticket's delay at a steady rate; cost and memory of a ticket while many wait; time added
to the first token and to the gaps between tokens. Everything is measured `--repeats` times: median [least, most].
"""

import argparse
import contextlib
import itertools
import json
import secrets
from functools import partial
from typing import Any

from tqdm import tqdm

from bench.rig.measurements import Figures, added_time, queued, throughput, ticket_delay
from bench.rig.processes import child, in_routers, serve
from bench.summary import Spread
from deployments.process.ports import free_port
from deployments.serving.embedded_redis import EmbeddedRedis


def spread(runs: list[Figures]) -> dict[str, str]:
    """Median [least, most] of every figure."""
    names = runs[0].keys()
    values = {name: [run[name] for run in runs] for name in names}
    return {name: f"{Spread.of(v):,.4g}" for name, v in values.items()}


class Rig:
    """One Redis, and every measurement over it."""

    def __init__(self, repeats: int) -> None:
        self.repeats = repeats
        self.redis = EmbeddedRedis(free_port(), secrets.token_urlsafe(16))
        self.table: list[dict[str, Any]] = []

    def run(
        self,
        title: str,
        measurement: Any,
        *,
        routers: int = 1,
        replicas: int = 1,
        engine: tuple[int, float, float] = (512, 0.0, 0.0),
    ) -> list[Figures]:
        runs: list[Figures] = []
        for _ in tqdm(range(self.repeats), desc=title, leave=False):
            namespace = secrets.token_hex(4)
            with contextlib.ExitStack() as serving:
                for _ in range(replicas):
                    serving.enter_context(child(serve, self.redis.url, namespace, *engine))
                runs += in_routers(self.redis.url, namespace, routers, measurement)
        row = {"measured": title, **spread(runs)}
        self.table.append(row)
        print(title, *(f"  {name}: {value}" for name, value in row.items() if name != "measured"), sep="\n", flush=True)
        return runs


def tickets(rig: Rig, options: argparse.Namespace) -> None:
    rig.run("as fast as it goes, 64 at a time", partial(throughput, options.seconds, 64))
    rig.run(f"{options.rate:g} requests/s", partial(ticket_delay, options.rate, options.seconds))


def queues(rig: Rig, options: argparse.Namespace) -> None:
    for number in options.queued:
        rig.run(f"{number} waiting", partial(queued, number, rig.redis.pid), replicas=0)


def concurrency(rig: Rig, options: argparse.Namespace) -> None:
    for routers, each in itertools.product((1, 2), options.concurrency):
        streams(rig, each, routers=routers, replicas=1)


def scale(rig: Rig, options: argparse.Namespace) -> None:
    for routers, replicas in itertools.product(options.routers, options.replicas):
        streams(rig, 256, routers=routers, replicas=replicas)


MEASUREMENTS = {each.__name__: each for each in (tickets, queues, concurrency, scale)}


def streams(rig: Rig, number: int, *, routers: int, replicas: int) -> None:
    ttft_s, interval_s, tokens = 0.05, 0.02, 20
    title = f"{number} streams, {routers} router{'s' * (routers > 1)}, {replicas} replica{'s' * (replicas > 1)}"
    measurement = partial(added_time, replicas, max(1, number // routers), ttft_s, interval_s, tokens)
    rig.run(title, measurement, routers=routers, replicas=replicas, engine=(1024, ttft_s, interval_s))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.rig", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=MEASUREMENTS, help="measure these alone")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement of throughput or delay")
    parser.add_argument("--rate", type=float, default=1250.0, help="requests/s at which the ticket's delay is taken")
    parser.add_argument("--queued", type=int, nargs="+", default=[10, 100, 1000, 10_000])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16, 64, 256, 512])
    parser.add_argument("--routers", type=int, nargs="+", default=[1, 2, 4], help="that share 256 streams")
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 8, 32], help="that serve them")
    parser.add_argument("--json", help="file for all figures")
    options = parser.parse_args()
    rig = Rig(options.repeats)
    try:
        for name in options.only or MEASUREMENTS:
            MEASUREMENTS[name](rig, options)
    finally:
        rig.redis.close()
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rig.table, file, indent=1)


if __name__ == "__main__":
    main()
