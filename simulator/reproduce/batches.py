"""What a backlog of batches makes of idle engines, and what it costs the requests beside it.

Requests of the Azure conversation trace, repeated as often as needed, come at three steady shares of capacity and over
a day: at the pace of a day of ServeGen's DeepSeek-R1, whose busiest ten minutes are at `PEAK_LOAD`. Batches are
requests drawn from the same trace, more than can be served. The policies that serve let them in.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from math import inf
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from policies.errors import InputError
from policies.router.credit import longest_promise_s
from policies.strict_text import csv_rows
from policies.types import FloatArray
from simulator.backlog import SLO_CLASS
from simulator.cluster import ClusterConfig, Run, run
from simulator.engine import EngineConfig
from simulator.engines import engine_profile
from simulator.presets import system
from simulator.profiles import opened
from simulator.report import Target
from simulator.reproduce.common import Setting, table
from simulator.reproduce.goodput import ENGINE, TARGETS
from simulator.requests import Request
from simulator.workload import Workload

ONLINE = "interactive"
TARGET = TARGETS[ONLINE]
STEADY_LOADS = (0.5, 0.9, 1.2)
STEADY_S = 300.0
DAY = "a day"
PEAK_LOAD = 0.9
# Of ten minutes of the day: an hour stands for the day, and swings are 24 times as steep as they were.
WINDOW_S = 25.0
KEPT_AT_CAPACITY = 0.95
_RATES = (8.0, 64.0)  # requests per second between which a replica's capacity is searched
_HALVINGS = 5
_DAY_OF = "deepseek-r1"
_DAY_S, _WINDOWS = 86_400.0, 144


class Job(NamedTuple):
    """`rates`: requests per second in windows of equal length, which together take `seconds`."""

    load: str
    rates: tuple[float, ...]
    seconds: float
    has_batches: bool


class Found(NamedTuple):
    """Attributes:
    requests: of those that wait, how many came.
    in_time: share of them that kept `TARGET`.
    online, batches: tokens of answers that ended while requests came, by window of the job's rates.
    """

    requests: int
    in_time: float
    online: tuple[int, ...]
    batches: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return sum(self.online) + sum(self.batches)


def batches(setting: Setting) -> list[str]:
    """Batches beside chat at half, near and beyond capacity and over a day: tokens per GPU-hour, requests in time."""
    trace, day = setting.workload("azure_conv"), day_of(setting.file("servegen_rates"))
    capacity = capacity_of(trace)
    loads = [(f"{load:g} of capacity", (load * capacity,), STEADY_S) for load in STEADY_LOADS]
    loads.append((DAY, tuple((PEAK_LOAD * capacity * day / day.max()).tolist()), WINDOW_S * len(day)))
    jobs = [Job(*load, has_batches) for load, has_batches in product(loads, (False, True))]
    found = dict(zip(jobs, setting.each(partial(measured, trace, capacity), jobs), strict=True))
    draw_day(found, setting)
    return [f"Capacity: {capacity:.1f} requests a second.", "", *table_of(found)]


def table_of(found: Mapping[Job, Found]) -> list[str]:
    heading = ("load", "requests", "alone in time", "with batches", "points", "tokens/GPU-hour alone", "with", "gain")
    rows = []
    for job, alone in found.items():
        if not job.has_batches:
            beside = found[job._replace(has_batches=True)]
            rates = (f"{each.tokens / job.seconds * 3600 / 1e6:.2f} M" for each in (alone, beside))
            points = f"{100 * (beside.in_time - alone.in_time):+.2f}"
            shares = (f"{alone.in_time:.2%}", f"{beside.in_time:.2%}", points)
            rows.append((job.load, alone.requests, *shares, *rates, f"×{beside.tokens / alone.tokens:.2f}"))
    return table(heading, rows)


def draw_day(found: Mapping[Job, Found], setting: Setting) -> None:
    """Tokens of the day by the hour."""
    (alone,) = (each for job, each in found.items() if job.load == DAY and not job.has_batches)
    (beside,) = (each for job, each in found.items() if job.load == DAY and job.has_batches)
    hours = np.linspace(0.0, 24.0, len(alone.online), endpoint=False).tolist()
    lines = {"alone": alone.online, "requests, batches beside": beside.online, "batches": beside.batches}
    series = {name: (hours, [each / WINDOW_S for each in tokens]) for name, tokens in lines.items()}
    setting.draw("batches", series, x="hour of the day", y="tokens of answers a second", title="one replica")


def day_of(file: Path, model: str = _DAY_OF, day: int = 0) -> FloatArray:
    """Requests per second of one of the file's days, by ten minutes; shape (144,).

    Raises:
        InputError: the file has no such day.
    """
    with opened(file) as lines:
        rows = [row for _, row in csv_rows(lines, str(file)) if row["model"] == model]
    rates = [float(row["requests_per_s"]) for row in rows if float(row["window_start_s"]) // _DAY_S == day]
    if len(rates) != _WINDOWS or min(rates) < 0.0 or max(rates) == 0.0:
        raise InputError(f"{file} must have {_WINDOWS} rates of {model}, got {len(rates)}")
    return np.array(rates)


def paced(trace: Workload, rates: Sequence[float], seconds: float) -> Workload:
    """The trace, again and again, with its clock run so that requests come at these rates, in windows of equal length.

    Bursts within the trace stay bursts.
    """
    assert trace.rate is not None
    due = np.concatenate([[0.0], np.cumsum(rates) * (seconds / len(rates))])  # requests by the end of each window
    rounds, rows = np.divmod(np.arange(int(due[-1]) + len(trace)), len(trace))
    came = rounds * len(trace) + trace.arrival_s[rows] * trace.rate  # at one request a second
    came, rows = came[came < due[-1]], rows[came < due[-1]]
    arrival_s = np.interp(came, due, np.linspace(0.0, seconds, len(due)))
    return Workload.of(
        "online", arrival_s, trace.prompt_tokens[rows], trace.output_tokens[rows], slo_class=[ONLINE] * len(rows)
    )


def capacity_of(trace: Workload) -> float:
    """The highest rate at which `KEPT_AT_CAPACITY` of the requests are in time, alone on one replica."""
    low, high = _RATES
    for _ in tqdm(range(_HALVINGS), desc="capacity", unit="run", disable=None):
        middle = (low * high) ** 0.5
        job = Job("search", (middle,), STEADY_S / 2, has_batches=False)
        if measured(trace, middle, job).in_time >= KEPT_AT_CAPACITY:
            low = middle
        else:
            high = middle
    return low


def measured(trace: Workload, capacity: float, job: Job) -> Found:
    """One run."""
    online = paced(trace, job.rates, job.seconds)
    backlog = trace.sample(int(2 * capacity * job.seconds), np.random.default_rng(0)) if job.has_batches else None
    return _found(run(served_by(), online, backlog=backlog), job)


def served_by() -> ClusterConfig:
    """One replica of Sluice's defaults, with the class of batches as it is served."""
    profile = engine_profile(ENGINE)
    targets = {ONLINE: TARGET, SLO_CLASS: Target(ttft_s=60.0, tpot_s=inf)}
    engine = EngineConfig(total_blocks=(profile.cache_tokens or 0) // EngineConfig().block_size)
    config = system("sluice", profile, engine, 1, targets)
    credit_s = longest_promise_s([TARGET.ttft_s])
    return replace(config, router=replace(config.router, fills_idle={SLO_CLASS: "deadline"}, credit_s=credit_s))


def _found(finished: Run, job: Job) -> Found:
    requests = finished.requests
    edges = np.linspace(0.0, job.seconds, len(job.rates) + 1)
    return Found(
        requests=len(requests) + len(finished.refused),
        in_time=sum(map(TARGET.met, requests)) / (len(requests) + len(finished.refused)),
        online=_tokens(requests, edges),
        batches=_tokens(finished.backlog, edges),
    )


def _tokens(requests: Sequence[Request], edges: FloatArray) -> tuple[int, ...]:
    """Tokens of answers by the time of their end; answers after the last edge are not counted."""
    ended = [(each.finished_s, each.output_tokens) for each in requests if each.finished_s is not None]
    ends_s, tokens = np.array(ended).reshape(-1, 2).T
    return tuple(np.histogram(ends_s, edges, weights=tokens)[0].astype(int).tolist())
