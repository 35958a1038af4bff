"""Growing sessions beyond capacity, where few promises or none can be kept: who waits, and what is read twice.

Sessions go on a while after each answer. `growing` are those of `bench.prefixes`, thirty times as long: first prompts
of 9000 tokens in the mean, 4800 more a turn, pauses of 6 s. `agents` are coding sessions with their own pauses, cut at
60 s and 40 turns. Compared are plain engines that get requests in turn, plain engines where a session goes where most
of it is cached, as Ray's and vllm-router's routers do it, and Sluice by its defaults.
"""

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from simulator.conversations import Turn, run_conversations
from simulator.engine import EngineConfig
from simulator.engines import engine_profile
from simulator.presets import system
from simulator.report import Target
from simulator.reproduce.common import Setting, table
from simulator.reproduce.goodput import ENGINE
from simulator.reproduce.prefixes import MOST_ANSWER_TOKENS, agent_sessions

REPLICAS = 2
SYSTEMS = {
    "in turn": ("stock", "round_robin"),
    "affinity": ("stock", "session_affinity"),
    "Sluice": ("sluice", "soonest_first_token"),
}
_FIRST, _MORE, _TURNS, _PAUSE_S = 9000, 4800, 8, 6.0
_MOST_TURNS, _MOST_PAUSE_S = 40, 60.0
_BEGIN_WITHIN_S = 60.0


class Job(NamedTuple):
    traffic: str
    sessions: int
    cache_tokens: int
    ttft_s: float
    system: str


# A promise of 0.1 s can't be kept by any prompt that is read whole.
LOADS = (
    ("growing", 96, 2_000_000, 0.1),
    ("growing", 96, 1_000_000, 0.1),
    ("growing", 192, 1_000_000, 0.1),
    ("growing", 192, 1_000_000, 2.0),
    ("agents", 96, 2_000_000, 0.5),
)


def beyond(setting: Setting) -> list[str]:
    """Growing sessions beyond capacity: time to first token, hits, and how long all of them take."""
    jobs = [Job(*load, name) for load in LOADS for name in SYSTEMS]
    rows = setting.each(partial(_row, str(setting.file("agents"))), jobs)
    heading = ("traffic", "sessions", "cache", "promised s", "system")
    return table((*heading, "mean s", "median", "p99", "longest", "hits", "all done s", "in time"), rows)


def _row(file: str, job: Job) -> tuple[object, ...]:
    name, placement = SYSTEMS[job.system]
    engine = EngineConfig(total_blocks=job.cache_tokens // EngineConfig().block_size)
    target = Target(ttft_s=job.ttft_s, tpot_s=0.1)
    config = system(name, engine_profile(ENGINE), engine, REPLICAS, {"*": target}, placement=placement)
    sessions = growing(job.sessions) if job.traffic == "growing" else of_agents(file, job.sessions)
    served = run_conversations(config, sessions)
    ttft_s = np.array([each.ttft_s for each in served.requests])
    hits = sum(each.cached_tokens for each in served.requests) / sum(each.reusable_tokens for each in served.requests)
    times_s = (ttft_s.mean(), *np.quantile(ttft_s, [0.5, 0.99]), ttft_s.max())
    in_time = float(np.mean(ttft_s <= job.ttft_s))
    return (*job, *(f"{each:.2f}" for each in times_s), f"{hits:.2f}", f"{served.makespan_s:.0f}", f"{in_time:.0%}")


def growing(count: int) -> list[list[Turn]]:
    """Prompts that grow by as much as between half and one and a half of the mean."""
    rng, sessions = random.Random(100), []
    for _ in range(count):
        ends = [0]
        for turn in range(_TURNS):
            mean = _MORE if turn else _FIRST
            ends.append(ends[-1] + rng.randint(mean // 2, mean + mean // 2))
        sessions.append([_turn(end, start, rng.expovariate(1 / _PAUSE_S)) for start, end in pairwise(ends)])
    return sessions


def of_agents(file: str, count: int) -> list[list[Turn]]:
    """Sessions drawn with replacement, which begin within a minute."""
    rng = np.random.default_rng(0)
    drawn = [_of_one(file)[rng.integers(len(_of_one(file)))] for _ in range(count)]
    starts_s = rng.uniform(0.0, _BEGIN_WITHIN_S, count)
    return [_turns(rows[:_MOST_TURNS], start_s) for rows, start_s in zip(drawn, starts_s, strict=True)]


@cache
def _of_one(file: str) -> list[list[Mapping[str, str]]]:
    """What one agent sent one after the other; a session may have several."""
    agents = defaultdict[tuple[int, str], list[Mapping[str, str]]](list)
    for number, rows in enumerate(agent_sessions(Path(file))):
        for row in rows:
            agents[number, row["agent"]].append(row)
    return list(agents.values())


def _turns(rows: Sequence[Mapping[str, str]], start_s: float) -> list[Turn]:
    came_s = [float(row["t_in_session_s"]) for row in rows]
    pauses_s = [start_s, *(min(_MOST_PAUSE_S, later - earlier) for earlier, later in pairwise(came_s))]
    return [
        _turn(int(row["prompt_tokens"]), int(row["reusable_prefix_tokens"]), pause_s)
        for row, pause_s in zip(rows, pauses_s, strict=True)
    ]


def _turn(prompt_tokens: int, reusable_tokens: int, pause_s: float) -> Turn:
    return Turn(
        prompt_tokens=prompt_tokens,
        reusable_tokens=reusable_tokens,
        output_tokens=MOST_ANSWER_TOKENS,
        pause_s=pause_s,
    )
