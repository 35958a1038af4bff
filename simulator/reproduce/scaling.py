"""Replicas that follow a day: promises kept against replica-hours, by the work in the system and by promises.

Requests of the Azure conversation trace, repeated as often as needed, come at the pace of a day of ServeGen's m-small,
whose busiest ten minutes take most of the replicas that there may be. The day is compressed: `COMPRESSION` of its
seconds pass in one. Bursts within the trace, starts of replicas and the delays of Ray Serve keep their seconds, so that
the day's swings are that much steeper for every rule. Each rule is tried with several settings, which makes a curve,
and curves are compared at equal shares of promises kept.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from policies.types import FloatArray
from simulator.cluster import ClusterConfig, run
from simulator.engine import EngineConfig
from simulator.engines import engine_profile
from simulator.fleet import AutoscaleConfig
from simulator.predictors import predicted
from simulator.presets import system
from simulator.report import Target, attainment
from simulator.reproduce.batches import day_of, paced
from simulator.reproduce.common import Setting, table
from simulator.workload import Workload

ENGINE = "llama2-70b@a100-80gb/4"
SLOTS = 64
# Its steps of 32 decodes take 50 ms, and it reads a prompt of the trace in a quarter of a second.
TARGETS = {"interactive": Target(ttft_s=2.0, tpot_s=0.1), "standard": Target(ttft_s=10.0, tpot_s=0.3)}
COMPRESSION = 16.0
START_S = 90.0
MOST_REPLICAS = 8
PEAK_RATE = 10.0  # requests per second in the busiest ten minutes
DAY = ("m-small", 1)  # the second day of the file: it swings most
_DAY_S = 86_400.0
_AT_FIRST = 4  # replicas, for every rule
SHARES = (0.95, 0.97, 0.98)
# slot_use and downscale_delay_s: the best of slot_use from 0.35 to 0.8 by delays from 20 to 300 s, for one seed.
_BY_WORK = ((0.35, 300.0), (0.42, 300.0), (0.5, 60.0), (0.65, 300.0))
_RATIOS, _DOWNSCALE_S = (1.0, 1.3, 1.6, 2.0), 60.0
WORK, PROMISES = "by work", "by promises"


class Job(NamedTuple):
    """One way to scale: a rule with its settings, on the requests of a seed."""

    rule: str
    scale: AutoscaleConfig
    seed: int


class Found(NamedTuple):
    """Attributes:
    kept: share of the requests that were in time.
    hours: of replicas, those that start and that drain too, as of the whole day.
    """

    kept: float
    hours: float


def settings() -> dict[str, list[AutoscaleConfig]]:
    """By rule."""
    scale = AutoscaleConfig(max_replicas=MOST_REPLICAS, start_s=START_S)
    return {
        WORK: [replace(scale, slot_use=use, downscale_delay_s=delay_s) for use, delay_s in _BY_WORK],
        PROMISES: [replace(scale, most_ratio=ratio, downscale_delay_s=_DOWNSCALE_S) for ratio in _RATIOS],
    }


def scaling(setting: Setting) -> list[str]:
    """Replica-hours over a day at equal shares of promises kept: scaling by work in the system, and by promises."""
    trace, day = setting.workload("azure_conv"), day_of(setting.file("servegen_rates"), *DAY)
    rates = PEAK_RATE * day / day.max()
    ways = [(rule, scale) for rule, scales in settings().items() for scale in scales]
    jobs = [Job(rule, scale, seed) for rule, scale in ways for seed in range(setting.runs)]
    each = iter(setting.each(partial(measured, trace, rates), jobs))
    found = {way: [next(each) for _ in range(setting.runs)] for way in ways}
    means = {way: Found(*np.mean(found[way], axis=0).tolist()) for way in ways}
    curves = {rule: frontier([each for way, each in means.items() if way[0] == rule]) for rule in settings()}
    _draw(curves, setting)
    return [*_settings_table(means), "", *_compared(curves)]


def measured(trace: Workload, rates: FloatArray, job: Job) -> Found:
    """One run."""
    finished = run(served_by(job.scale), traffic(trace, rates, _DAY_S / COMPRESSION, job.seed))
    return Found(attainment(finished, TARGETS), finished.replica_s * COMPRESSION / 3600.0)


def traffic(trace: Workload, rates: FloatArray, seconds: float, seed: int) -> Workload:
    """The day, with the trace begun elsewhere for each seed; classes come equally often."""
    rng = np.random.default_rng(seed)
    rows = np.roll(np.arange(len(trace)), -int(rng.integers(len(trace))))
    gaps_s = np.diff(trace.arrival_s, prepend=0.0)[rows]
    begun = replace(
        trace,
        arrival_s=np.cumsum(gaps_s) - gaps_s[0],
        prompt_tokens=trace.prompt_tokens[rows],
        output_tokens=trace.output_tokens[rows],
    )
    day = paced(begun, rates.tolist(), seconds)
    day = replace(day, slo_class=tuple(rng.choice(sorted(TARGETS), size=len(day)).tolist()))
    return predicted(day, "noise:0.44", rng)


def served_by(scale: AutoscaleConfig | None) -> ClusterConfig:
    profile = engine_profile(ENGINE)
    engine = EngineConfig(slots=SLOTS, total_blocks=profile.cache(None) // EngineConfig().block_size)
    return system("sluice", profile, engine, _AT_FIRST, TARGETS, autoscale=scale)


def frontier(points: Sequence[Found]) -> list[Found]:
    """Those than which no other keeps more for fewer hours, by hours."""
    best: list[Found] = []
    for each in sorted(points, key=lambda point: (point.hours, -point.kept)):
        if not best or each.kept > best[-1].kept:
            best.append(each)
    return best


def hours_at(kept: float, curve: Sequence[Found]) -> float | None:
    """Between the settings on either side; None beyond them."""
    if not curve[0].kept <= kept <= curve[-1].kept:
        return None
    return float(np.interp(kept, [each.kept for each in curve], [each.hours for each in curve]))


def _settings_table(means: Mapping[tuple[str, AutoscaleConfig], Found]) -> list[str]:
    rows = []
    for (rule, scale), each in means.items():
        rows.append((rule, _said(scale), f"{scale.downscale_delay_s:g}", f"{each.kept:.2%}", f"{each.hours:.1f}"))
    return table(("rule", "setting", "downscale_delay_s", "kept", "replica-hours"), rows)


def _said(scale: AutoscaleConfig) -> str:
    """What is tried of a rule."""
    if scale.most_ratio is not None:
        return f"most_ratio {scale.most_ratio:g}"
    return f"slot_use {scale.slot_use:g}"


def _compared(curves: Mapping[str, Sequence[Found]]) -> list[str]:
    rows = []
    for kept in SHARES:
        work, promises = (hours_at(kept, curves[rule]) for rule in (WORK, PROMISES))
        shown = ("-" if hours is None else f"{hours:.1f}" for hours in (work, promises))
        rows.append((f"{kept:.0%}", *shown, f"×{promises / work:.2f}" if work and promises else "-"))
    return table(("kept", f"replica-hours {WORK}", PROMISES, "of it"), rows)


def _draw(curves: Mapping[str, Sequence[Found]], setting: Setting) -> None:
    lines = {rule: ([each.hours for each in curve], [each.kept for each in curve]) for rule, curve in curves.items()}
    setting.draw("scaling", lines, x="replica-hours", y="promises kept", title="a day, 1 to 8 replicas")
