"""python -m bench.rig: what Sluice's own path costs, without a model and without vLLM's front end.

Routers, a Redis and a replica run in processes of their own. Printed: requests per second of router CPU, from the
ticket to the last token; the ticket's delay at a steady rate; cost and memory of a ticket while many wait; time added
to the first token and to the gaps between tokens. Everything is measured `--repeats` times: median [least, most].
"""

import argparse
import contextlib
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
        self, title: str, measurement: Any, *, routers: int = 1, engine: tuple[int, float, float] | None
    ) -> list[Figures]:
        runs: list[Figures] = []
        for _ in tqdm(range(self.repeats), desc=title, leave=False):
            namespace = secrets.token_hex(4)
            with child(serve, self.redis.url, namespace, *engine) if engine else contextlib.nullcontext():
                runs += in_routers(self.redis.url, namespace, routers, measurement)
        row = {"measured": title, **spread(runs)}
        self.table.append(row)
        print(title, *(f"  {name}: {value}" for name, value in row.items() if name != "measured"), sep="\n", flush=True)
        return runs


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.rig", description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement of throughput or delay")
    parser.add_argument("--rate", type=float, default=1250.0, help="requests/s at which the ticket's delay is taken")
    parser.add_argument("--queued", type=int, nargs="+", default=[10, 100, 1000, 10_000])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16, 64, 256, 512])
    parser.add_argument("--json", help="file for all figures")
    options = parser.parse_args()
    rig = Rig(options.repeats)
    try:
        measure(rig, options)
    finally:
        rig.redis.close()
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rig.table, file, indent=1)


def measure(rig: Rig, options: argparse.Namespace) -> None:
    at_once = (512, 0.0, 0.0)
    rig.run("as fast as it goes, 64 at a time", partial(throughput, options.seconds, 64), engine=at_once)
    rig.run(f"{options.rate:g} requests/s", partial(ticket_delay, options.rate, options.seconds), engine=at_once)
    for number in options.queued:
        rig.run(f"{number} waiting", partial(queued, number, rig.redis.pid), engine=None)
    ttft_s, interval_s, tokens = 0.05, 0.02, 20
    for routers in (1, 2):
        for concurrency in options.concurrency:
            each = max(1, concurrency // routers)
            title = f"{concurrency} streams, {routers} router{'s' * (routers > 1)}"
            measurement = partial(added_time, each, ttft_s, interval_s, tokens)
            rig.run(title, measurement, routers=routers, engine=(1024, ttft_s, interval_s))


if __name__ == "__main__":
    main()
