"""What it brings to give up cached blocks of sessions last, where agents share engines with chats.

Sessions of agents are named, chats are not. Azure's conversations say nothing of who comes back, and count as requests
that never do; Mooncake's begin as others did, which an engine may find in its cache as long as it lasts.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from policies.strict_text import csv_rows
from simulator.cluster import run
from simulator.engine import EngineConfig
from simulator.engines import engine_profile
from simulator.presets import system
from simulator.profiles import opened
from simulator.reproduce.common import Setting, table
from simulator.reproduce.goodput import ENGINE
from simulator.reproduce.prefixes import MOST_ANSWER_TOKENS, TARGET, WARM_UP_S, of_agents, of_mooncake
from simulator.requests import Request
from simulator.workload import Workload

SECONDS = 400.0
FRACTIONS = (0.0, 0.5, 0.75, 0.9)
# Sessions of agents a second, other traffic and the factor on its rate, tokens of a cache; on four replicas.
LOADS = (
    (0.05, "azure_conv", 1.0, 400_000),
    (0.05, "mooncake", 0.5, 400_000),
    (0.05, "mooncake", 1.0, 2_000_000),
)
REPLICAS = 4


class Job(NamedTuple):
    starts_per_s: float
    others: str
    speed: float
    cache_tokens: int
    kept_fraction: float
    seed: int


def kept(setting: Setting) -> list[str]:
    """Agents beside chats: first tokens and tokens read twice by the share of the cache that sessions keep."""
    jobs = [Job(*load, fraction, seed) for load in LOADS for fraction in FRACTIONS for seed in range(setting.runs)]
    files = {name: str(setting.file(name)) for name in ("agents", *{job.others for job in jobs})}
    found = dict(zip(jobs, setting.each(partial(_measured, files), jobs), strict=True))
    rows = []
    for load in LOADS:
        for fraction in FRACTIONS:
            means = np.mean([found[Job(*load, fraction, seed)] for seed in range(setting.runs)], axis=0)
            rows.append((*load, fraction, *map(float, means)))
    heading = ("agents", "others", "speed", "cache", "kept", "mean s", "agents s", "others s", "read twice, millions")
    return table(heading, rows)


def _measured(files: Mapping[str, str], job: Job) -> tuple[float, float, float, float]:
    blocks = job.cache_tokens // EngineConfig().block_size
    engine = EngineConfig(total_blocks=blocks, kept_fraction=job.kept_fraction)
    config = system("sluice", engine_profile(ENGINE), engine, REPLICAS, {"*": TARGET})
    requests = [each for each in run(config, traffic(files, job)).requests if each.arrival_s >= WARM_UP_S]
    agents, others = ([each for each in requests if each.comes_back is named] for named in (True, False))
    twice = sum(each.reusable_tokens - each.cached_tokens for each in requests)
    return _mean_s(requests), _mean_s(agents), _mean_s(others), twice / 1e6


def _mean_s(requests: Sequence[Request]) -> float:
    return float(np.mean([each.ttft_s for each in requests]))


def traffic(files: Mapping[str, str], job: Job) -> Workload:
    rng = np.random.default_rng(job.seed)
    agents = of_agents(_rows(files["agents"]), job.starts_per_s, SECONDS, rng)
    rows = _rows(files[job.others])
    others = of_mooncake(rows, job.speed, SECONDS, rng) if job.others == "mooncake" else _never_back(rows, job.speed)
    join = np.concatenate
    return Workload.of(
        "agents and chats",
        join([agents.arrival_s, others.arrival_s]),
        join([agents.prompt_tokens, others.prompt_tokens]),
        join([agents.output_tokens, others.output_tokens]),
        cached_tokens=join([agents.cached_tokens, others.cached_tokens]),
        session=[f"{part}/{name}" for part, of in (("a", agents), ("b", others)) for name in of.session or ()],
        comes_back=[True] * len(agents) + [False] * len(others),
    )


def _never_back(rows: Sequence[Mapping[str, str]], speed: float) -> Workload:
    """Each request is a session of its own, which takes room in a cache and is never found there."""
    came = [row for row in rows if float(row["arrival_s"]) / speed < SECONDS]
    return Workload.of(
        "chats",
        np.array([float(row["arrival_s"]) / speed for row in came]),
        np.array([int(row["prompt_tokens"]) for row in came]),
        np.minimum([int(row["output_tokens"]) for row in came], MOST_ANSWER_TOKENS),
        session=[str(number) for number in range(len(came))],
    )


def _rows(file: str) -> list[dict[str, str]]:
    with opened(Path(file)) as opened_file:
        return [row for _, row in csv_rows(opened_file, file)]
