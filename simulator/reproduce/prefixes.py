"""What placement by the first token brings where prompts begin as others did: sessions of agents, Mooncake's chats.

Every system is Sluice but for its placement, on engines with a block cache each. Compared are

    round robin          in turn
    least work           the least predicted work, blind to prefixes
    session affinity     where most of the prompt is cached, however long the queue; else the least work
    lmetric              the least product of prompt tokens to be read and requests that run
    first token          the default: seconds until the first token, queue and hit in one price

`tiers` gives each engine memory beyond its GPU besides, from which prompts are loaded where reading takes longer.

Sessions of agents start as a Poisson stream, then go by their own clocks. What they had before `WARM_UP_S` is served,
and not counted. Answers are cut: this is about reading, and most steps would decode a few requests.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.random import Generator

from policies.strict_text import csv_rows
from simulator.cluster import run
from simulator.engine import EngineConfig
from simulator.engines import engine_profile
from simulator.presets import system
from simulator.profiles import opened
from simulator.report import Target
from simulator.reproduce.common import Setting, table
from simulator.reproduce.goodput import ENGINE
from simulator.requests import Request
from simulator.tier import TierConfig
from simulator.workload import Workload

TARGET = Target(ttft_s=5.0, tpot_s=0.1)
REPLICAS = (4, 8)
CACHES = (400_000, 2_000_000)
SECONDS: Mapping[str, float] = {"agents": 1200.0, "mooncake": 400.0}
WARM_UP_S = 200.0
MOST_ANSWER_TOKENS = 8
# Session starts a second, and factors on Mooncake's own rate; for four replicas.
LOADS: Mapping[str, tuple[float, float]] = {"agents": (0.02, 0.05), "mooncake": (1.0, 2.0)}
PLACEMENTS = {
    "round robin": "round_robin",
    "least work": "least_work",
    "session affinity": "session_affinity",
    "lmetric": "lmetric",
    "first token": "soonest_first_token",
}
# Of each engine, in tokens: half a terabyte at 131 072 bytes of Llama-3.1-8B's cache.
TIER_TOKENS = 4_000_000
_TOKEN_BYTES = 131_072
# Seconds to load a token, by the bytes of a second: PCI Express 5.0 has 63 GB/s a direction on the 16 lanes of an H100,
# of which copies get four fifths; fast disks have 5 to 7 GB/s.
TIERS: Mapping[str, float | None] = {"none": None, "50 GB/s": _TOKEN_BYTES / 50e9, "5 GB/s": _TOKEN_BYTES / 5e9}
_LEAST_REQUESTS = 5  # of a session
_MOST_TOKENS = 200_000  # of a prompt
_MOONCAKE_BLOCK = 512


class Job(NamedTuple):
    traffic: str
    load: float
    replicas: int
    cache_tokens: int
    placement: str
    tier: str = "none"


class Found(NamedTuple):
    """Attributes:
    requests: that were counted.
    mean_s, p99_s: until the first token.
    hits: tokens found in caches or tiers, of those that an endless cache for all would hold.
    loaded: those of them that were loaded from tiers, likewise.
    read_again: tokens that were read though they had been read before.
    in_time: share of the requests that kept `TARGET`.
    """

    requests: int
    mean_s: float
    p99_s: float
    hits: float
    loaded: float
    read_again: int
    in_time: float


def prefixes(setting: Setting) -> list[str]:
    """Sessions on 4 and 8 replicas, small and large caches: time to first token, hits, and requests in time."""
    jobs = [
        Job(traffic, load, replicas, cache_tokens, placement)
        for traffic, loads in LOADS.items()
        for replicas, cache_tokens, load in product(REPLICAS, CACHES, loads)
        for placement in PLACEMENTS
    ]
    files = {name: str(setting.file(name)) for name in LOADS}
    rows = []
    for job, found in zip(jobs, setting.each(partial(measured, files), jobs), strict=True):
        shown = (f"{found.mean_s:.2f}", f"{found.p99_s:.2f}", f"{found.hits:.2f}", f"{found.in_time:.1%}")
        rows.append((*job[:4], found.requests, job.placement, *shown))
    heading = ("traffic", "load", "replicas", "cache", "requests", "placement")
    return table((*heading, "mean s", "p99 s", "hits", "in time"), rows)


def tiers(setting: Setting) -> list[str]:
    """Sessions of agents on 4 replicas, with and without memory beyond the GPU: first token, hits, read twice."""
    load, replicas, (small, large) = LOADS["agents"][1], min(REPLICAS), CACHES
    jobs = [
        Job("agents", load, replicas, small, "least work"),
        *(Job("agents", load, replicas, small, "first token", tier) for tier in TIERS),
        *(Job("agents", load, replicas, large, "first token", tier) for tier in ("none", "50 GB/s")),
    ]
    files, rows = {"agents": str(setting.file("agents"))}, []
    for job, found in zip(jobs, setting.each(partial(measured, files), jobs), strict=True):
        hits = (f"{found.hits - found.loaded:.2f}", f"{found.loaded:.2f}", f"{found.read_again / 1e6:.2f}")
        rows.append((job.cache_tokens, job.tier, job.placement, f"{found.mean_s:.2f}", f"{found.p99_s:.2f}", *hits))
    heading = ("cache", "tier", "placement", "mean s", "p99 s", "GPU hits", "tier hits", "read twice, millions")
    return table(heading, rows)


def measured(files: Mapping[str, str], job: Job) -> Found:
    """One run."""
    work = _traffic(files[job.traffic], job.traffic, job.load * job.replicas / min(REPLICAS))
    token_s = TIERS[job.tier]
    engine = EngineConfig(
        total_blocks=job.cache_tokens // EngineConfig().block_size,
        tier=None if token_s is None else TierConfig(tokens=TIER_TOKENS, token_s=token_s),
    )
    config = system(
        "sluice",
        engine_profile(ENGINE),
        engine,
        job.replicas,
        {"*": TARGET},
        placement=PLACEMENTS[job.placement],
    )
    return _found(run(config, work).requests)


def _found(requests: Sequence[Request]) -> Found:
    counted = [each for each in requests if each.arrival_s >= WARM_UP_S]
    ttft_s = np.array([each.ttft_s for each in counted])
    reusable = sum(each.reusable_tokens for each in counted)
    known = sum(each.cached_tokens for each in counted)
    return Found(
        requests=len(counted),
        mean_s=float(ttft_s.mean()),
        p99_s=float(np.quantile(ttft_s, 0.99)),
        hits=known / reusable,
        loaded=sum(each.loaded_tokens for each in counted) / reusable,
        read_again=reusable - known,
        in_time=float(np.mean([TARGET.met(each) for each in counted])),
    )


@cache
def _traffic(file: str, name: str, load: float) -> Workload:
    rows = _rows(Path(file))
    if name == "agents":
        return of_agents(rows, load, SECONDS[name], np.random.default_rng(0))
    return of_mooncake(rows, load, SECONDS[name], np.random.default_rng(0))


def _rows(path: Path) -> list[dict[str, str]]:
    with opened(path) as file:
        return [row for _, row in csv_rows(file, str(path))]


def of_agents(rows: Sequence[Mapping[str, str]], starts_per_s: float, seconds: float, rng: Generator) -> Workload:
    """Sessions drawn with replacement; of long ones what comes within `seconds` of the first start of all.

    Those of fewer than five requests, and with prompts that no cache here would hold, are left out.
    """
    whole = _whole(rows)
    starts_s = np.sort(rng.uniform(0.0, seconds, rng.poisson(starts_per_s * seconds)))
    came = [
        (start_s + float(row["t_in_session_s"]), row, f"{number}/{row['agent']}")
        for number, start_s in enumerate(starts_s)
        for row in whole[rng.integers(len(whole))]
    ]
    return _workload("agents", [each for each in came if each[0] < seconds])


def agent_sessions(path: Path) -> list[list[Mapping[str, str]]]:
    """The rows of each session of at least five requests whose prompts a cache here may hold."""
    return _whole(_rows(path))


def _whole(rows: Sequence[Mapping[str, str]]) -> list[list[Mapping[str, str]]]:
    sessions = defaultdict[str, list[Mapping[str, str]]](list)
    for row in rows:
        sessions[row["session"]].append(row)
    return [
        each
        for each in sessions.values()
        if len(each) >= _LEAST_REQUESTS and max(int(row["prompt_tokens"]) for row in each) < _MOST_TOKENS
    ]


def of_mooncake(rows: Sequence[Mapping[str, str]], speed: float, seconds: float, rng: Generator) -> Workload:
    """The trace with its sessions reconstructed, see `sessions_of`, and its batches of arrivals spread.

    Its clock is in steps of three seconds: requests of one step come evenly over it.
    """
    arrivals = np.array([float(row["arrival_s"]) for row in rows])
    arrivals = (arrivals + np.sort(rng.uniform(0.0, 3.0, len(rows)))) / speed if len(rows) else arrivals
    names = sessions_of([(int(row["prompt_tokens"]), int(row["reusable_prefix_tokens"])) for row in rows])
    came = [each for each in zip(arrivals.tolist(), rows, names, strict=True) if each[0] < seconds]
    return _workload("mooncake", came)


def _workload(name: str, came: Sequence[tuple[float, Mapping[str, str], str]]) -> Workload:
    def column(field: str) -> np.ndarray[Any, np.dtype[np.int64]]:
        return np.array([int(row[field]) for _, row, _ in came], dtype=np.int64)

    return Workload.of(
        name,
        np.array([arrival_s for arrival_s, _, _ in came]),
        column("prompt_tokens"),
        np.minimum(column("output_tokens"), MOST_ANSWER_TOKENS),
        cached_tokens=column("reusable_prefix_tokens"),
        session=[session for _, _, session in came],
    )


def sessions_of(rows: Sequence[tuple[int, int]]) -> list[str]:
    """Which requests follow on each other, by (prompt, reusable) tokens in order of arrival: a reconstruction.

    The trace tells how much of a prompt had been seen in whole blocks, and not where. A prompt of which so much had
    been seen as another has whole blocks follows on the latest such; else on the one with least blocks more, as an
    answer that was asked for anew does. One block alone, which nearly all prompts share, makes no session. Of the
    trace's reusable tokens 90 % are explained in the first way, and 3 % in the second.
    """
    blocks: dict[str, int] = {}  # that the latest prompt of each session had
    latest = defaultdict[int, list[str]](list)  # sessions by that, some of them outdated
    names: list[str] = []
    for number, (prompt_tokens, reusable_tokens) in enumerate(rows):
        seen = reusable_tokens // _MOONCAKE_BLOCK
        name = _followed(seen, blocks, latest[seen]) if seen > 1 else None
        name = str(number) if name is None else name
        blocks[name] = max(blocks.get(name, 0), prompt_tokens // _MOONCAKE_BLOCK)
        latest[blocks[name]].append(name)
        names.append(name)
    return names


def _followed(seen: int, blocks: Mapping[str, int], same: list[str]) -> str | None:
    while same:
        name = same.pop()
        if blocks[name] == seen:
            return name
    longer = [(count, name) for name, count in blocks.items() if count > seen]
    return min(longer)[1] if longer else None
