"""What is measured in a router process of the rig."""

import asyncio
import time
from collections.abc import Sequence

import psutil

from bench.rig.processes import RigRouter, cpu_s
from bench.summary import percentile

Figures = dict[str, float]


def _ms(seconds: Sequence[float], percent: float) -> float:
    found = percentile(seconds, percent)
    assert found is not None, "nothing was measured"
    return found * 1e3


async def wait_for_replicas(router: RigRouter, replicas: int = 1) -> None:
    async with asyncio.timeout(30 + 3 * replicas):
        while True:
            if len(await router.store.replica_infos()) >= replicas:
                break
            await asyncio.sleep(0.05)
        await router.ask(1)


async def throughput(seconds: float, concurrency: int, router: RigRouter) -> Figures:
    """Requests of one token, as fast as they go."""
    await wait_for_replicas(router)
    done, until_s = 0, time.perf_counter() + seconds
    before_cpu_s, before_s = cpu_s(), time.perf_counter()

    async def ask_on() -> None:
        nonlocal done
        while time.perf_counter() < until_s:
            await router.ask(1)
            done += 1

    await asyncio.gather(*(ask_on() for _ in range(concurrency)))
    spent_s, passed_s = cpu_s() - before_cpu_s, time.perf_counter() - before_s
    return {"requests/s": done / passed_s, "requests per router CPU second": done / spent_s}


async def ticket_delay(rate: float, seconds: float, router: RigRouter) -> Figures:
    """From submission to assignment, at a steady rate."""
    await wait_for_replicas(router)
    delays: list[float] = []
    started_s = time.perf_counter()

    async def one() -> None:
        before_s = time.perf_counter()
        request_id = await router.submit(1)
        delays.append(time.perf_counter() - before_s)
        await router._ended[request_id]
        del router._stamps[request_id]

    tasks = []
    for n in range(int(rate * seconds)):
        await asyncio.sleep(max(0.0, started_s + n / rate - time.perf_counter()))
        tasks.append(asyncio.create_task(one()))
    await asyncio.gather(*tasks)
    return {"ticket p50 ms": _ms(delays, 50), "ticket p99 ms": _ms(delays, 99)}


async def _redis_bytes(router: RigRouter) -> int:
    return int((await router.store._redis.info("memory"))["used_memory"])


async def queued(number: int, redis_pid: int, router: RigRouter) -> Figures:
    """Cost of one more ticket, and of taking it back, while `number` wait for a replica that is not there."""
    server = psutil.Process(redis_pid)
    memory = psutil.Process().memory_info().rss, await _redis_bytes(router)
    waiting = [await router.submit(1) for _ in range(number)]
    grown = psutil.Process().memory_info().rss - memory[0], await _redis_bytes(router) - memory[1]
    times, before_cpu_s, before_redis = [], cpu_s(), sum(server.cpu_times()[:2])
    for _ in range(200):
        before_s = time.perf_counter()
        request_id = await router.submit(1)
        times.append(time.perf_counter() - before_s)
        await router.forget([request_id])
    figures = {
        "ticket p50 us": _ms(times, 50) * 1e3,
        "router CPU us": (cpu_s() - before_cpu_s) / len(times) * 1e6,
        "Redis CPU us": (sum(server.cpu_times()[:2]) - before_redis) / len(times) * 1e6,
        "router bytes each": grown[0] / max(1, number),
        "Redis bytes each": grown[1] / max(1, number),
    }
    await router.forget(waiting)
    await asyncio.sleep(2.0)  # the cancellation runs in the background
    return figures


async def added_time(
    replicas: int, concurrency: int, ttft_s: float, interval_s: float, tokens: int, router: RigRouter
) -> Figures:
    """What a request sees beyond the engine's own times."""
    await wait_for_replicas(router, replicas)
    per_stream = max(3, 64 // concurrency)

    async def stream() -> list[list[float]]:
        return [await router.ask(tokens) for _ in range(per_stream)]

    before_cpu_s = cpu_s()
    answers = [stamps for each in await asyncio.gather(*(stream() for _ in range(concurrency))) for stamps in each]
    spent_s = cpu_s() - before_cpu_s
    first = [stamps[1] - stamps[0] - ttft_s for stamps in answers]
    gaps = [b - a - interval_s for stamps in answers for a, b in zip(stamps[1:], stamps[2:], strict=False)]
    return {
        "added TTFT p50 ms": _ms(first, 50),
        "added TTFT p99 ms": _ms(first, 99),
        "added ITL p99 ms": _ms(gaps, 99),
        "router CPU us per token": spent_s / (len(answers) * tokens) * 1e6,
    }
