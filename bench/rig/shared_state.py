"""python -m bench.rig.shared_state: what a request costs Redis, by replicas, requests that wait, and API keys.

One process plays every router and replica over the store that serves, with the Lua that serves: it frees a slot, queues
another request, and beats for all replicas once a second. Printed for each case: Redis' CPU per request (release,
enqueue, their part of the heartbeats) and how many requests per second a core of Redis would take; median [least, most]
of `--repeats`. With `--figure` it is drawn.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
from tqdm import tqdm

from bench.summary import Spread
from deployments.process.ports import free_port
from deployments.serving.embedded_redis import EmbeddedRedis
from policies.router.tickets import Assignment, Ticket
from router.redis_store import RedisStateStore, connect
from router.state_store import Queued, ReplicaInfo

ROUTER = "rig"
SLOTS = 16
AT_ONCE = 16  # releases and enqueues that are under way
BEAT_S = 1.0


class Case(NamedTuple):
    replicas: int
    waiting: int
    keys: int


class Fleet:
    """Routers and replicas of one application, as far as Redis sees them."""

    def __init__(self, url: str, case: Case) -> None:
        self.store, self.case = RedisStateStore(connect(url), secrets.token_hex(4)), case
        self.running: asyncio.Queue[Assignment] = asyncio.Queue()
        self._numbers = itertools.count()
        self._replicas = [f"replica-{number}" for number in range(case.replicas)]

    async def fill(self) -> None:
        """All slots but the ones of requests under way are taken, or as many requests wait as the case says."""
        for replica_id in self._replicas:
            info = ReplicaInfo(replica_id=replica_id, host="127.0.0.1", port=1, max_model_len=1 << 20)
            await self.store.register_replica(info, SLOTS)
        slots = SLOTS * self.case.replicas
        first = slots + self.case.waiting if self.case.waiting else max(1, slots * 3 // 4)
        for at in range(0, first, 32):
            await asyncio.gather(*(self._enqueue() for _ in range(min(32, first - at))))

    async def replace(self, until_s: float) -> int:
        """Requests that ended, each replaced by another one, until then."""
        ended = 0
        while time.perf_counter() < until_s:
            assigned = await self.running.get()
            await self.store.release(assigned.replica_id, [assigned.request_id])
            await self._enqueue()
            ended += 1
        return ended

    async def listen(self, subscribed: asyncio.Event) -> None:
        async for notices in self.store.notices(ROUTER):
            subscribed.set()
            for notice in notices:
                self._note(notice)

    async def beat(self) -> None:
        while True:
            await self.store.beat_router(ROUTER, 10.0)
            for replica_id in self._replicas:
                await self.store.beat_replica(replica_id, SLOTS, lease_s=1e6)
            await asyncio.sleep(BEAT_S)

    async def _enqueue(self) -> None:
        answer = await self.store.enqueue(self._ticket(next(self._numbers)))
        assert isinstance(answer, Queued), answer
        for assignment in answer.assignments:
            self._note(assignment)

    def _note(self, notice: object) -> None:
        if isinstance(notice, Assignment):
            self.running.put_nowait(notice)

    def _ticket(self, number: int) -> Ticket:
        """One with a promise, a predicted length, and a part of its prompt on one replica."""
        now_s = time.time()
        return Ticket(
            request_id=secrets.token_hex(8),
            bin_index=number % 4,
            deadline_key=now_s + number % 7,
            late_key=now_s + 1e6,
            work_s=0.5 + number % 5,
            router_id=ROUTER,
            arrival_s=now_s,
            deadline_s=now_s + 3600.0,
            tpot_s=0.05,
            unread_tokens=1000,
            prefixes=((self._replicas[number % len(self._replicas)], 500),),
            prompt_token_s=1e-5,
            step_s=0.02,
            predicted_output_tokens=100.0 + number % 300,
            prompt_tokens=1000,
            api_key=f"key-{number % self.case.keys}",
        )


async def measured(url: str, redis_pid: int, case: Case, seconds: float) -> float:
    """CPU of Redis per request, in microseconds."""
    server, fleet = psutil.Process(redis_pid), Fleet(url, case)
    subscribed = asyncio.Event()
    background = [asyncio.create_task(fleet.listen(subscribed))]
    try:
        async with asyncio.timeout(60 + case.waiting / 100 + seconds):
            await subscribed.wait()
            await fleet.fill()
            background.append(asyncio.create_task(fleet.beat()))
            before_s, began_s = sum(server.cpu_times()[:2]), time.perf_counter()
            ended = sum(await asyncio.gather(*(fleet.replace(began_s + seconds) for _ in range(AT_ONCE))))
        return 1e6 * (sum(server.cpu_times()[:2]) - before_s) / ended
    finally:
        for task in background:
            task.cancel()
        for outcome in await asyncio.gather(*background, return_exceptions=True):
            if not isinstance(outcome, asyncio.CancelledError):
                raise RuntimeError("the rig's background ended") from outcome
        await fleet.store.close()


def run(cases: Sequence[Case], repeats: int, seconds: float) -> dict[Case, list[float]]:
    """Each repeat goes through all cases, each with a Redis of its own: what the machine does besides falls on all."""
    found: dict[Case, list[float]] = {case: [] for case in cases}
    for _, case in tqdm([(n, case) for n in range(repeats) for case in cases], desc="shared state", leave=False):
        with contextlib.closing(EmbeddedRedis(free_port(), secrets.token_urlsafe(16))) as redis:
            found[case].append(asyncio.run(measured(redis.url, redis.pid, case, seconds)))
    return found


def table(found: dict[Case, list[float]]) -> list[str]:
    lines = [
        "| replicas | waiting | API keys | Redis CPU, µs a request | requests/s a core of Redis |",
        "|---|---|---|---|---|",
    ]
    for case, figures in found.items():
        cost = Spread.of(figures)
        lines.append(f"| {case.replicas} | {case.waiting} | {case.keys} | {cost:.0f} | {1e6 / cost.median:.0f} |")
    return lines


def draw(path: Path, found: dict[Case, list[float]]) -> None:
    """Redis' CPU per request over replicas, a line for each number of waiting requests and keys."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for waiting, keys in sorted({case[1:] for case in found}):
        cases = sorted(case for case in found if case[1:] == (waiting, keys))
        costs = [Spread.of(found[case]).median for case in cases]
        axes.plot(
            [case.replicas for case in cases], costs, "o-", label=f"{waiting} waiting, {keys} API key{'s' * (keys > 1)}"
        )
    axes.set(xlabel="engine replicas", ylabel="CPU of Redis per request, µs", xscale="log", ylim=(0, None))
    axes.set_xticks(ticks := sorted({case.replicas for case in found}), map(str, ticks))
    axes.minorticks_off()
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.rig.shared_state",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 8, 32])
    parser.add_argument("--waiting", type=int, nargs="+", default=[0, 1000, 10_000])
    parser.add_argument("--keys", type=int, nargs="+", default=[1, 1000])
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--figure", type=Path, help="draw it there, as PNG or SVG")
    parser.add_argument("--json", type=Path, help="file for all figures")
    options = parser.parse_args()
    cases = [Case(*each) for each in itertools.product(options.replicas, options.waiting, options.keys)]
    found = run(cases, options.repeats, options.seconds)
    print("\n".join(table(found)))
    if options.figure:
        draw(options.figure, found)
    if options.json:
        options.json.write_text(json.dumps([case._asdict() | {"runs": runs} for case, runs in found.items()]))


if __name__ == "__main__":
    main()
