"""Paper 003 (EB+, arXiv 2606.00516): exclusive against mixed batching, from the authors' published calibrations.

Source of calibrations and published results: weifang231/eb-vllm, reproduce/ (Apache-2.0); the numbers below are the
paper's and, after a slash, those of the authors' own rerun. The calibrations hold at a decode context of 512 in eager
mode. A mixed step is costed in two ways: "sum" adds the two slopes to the larger overhead, so mixing is free of
interference; "polynomial" is the published cost per token a + b r + c r^2, which was fitted to 1/throughput and so
contains its overhead already (ERRATA 3.12). Lengths are exponential with the published means.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from policies.engine.step_time import StepTimeConfig
from policies.types import StepCoefficients, StepTimes
from simulator.cluster import ClusterConfig, Run, run
from simulator.engine import EngineConfig
from simulator.engines import engine_profile
from simulator.reproduce.common import Setting, mean, spread, table
from simulator.router import RouterConfig
from simulator.workload import Workload, length_law, synthetic

_POLYNOMIALS = {
    "Qwen3-8B@H200": (2.493675e-05, 5.192856e-05, 1.477785e-05),
    "Qwen3-8B@RTX_PRO_6000": (6.29342675989941e-05, 1.9689261661008702e-04, 9.8989734316548e-06),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    engine: str
    mixing: str
    scheduler: str
    prompt_tokens: int
    output_tokens: int
    slots: int
    clients: int
    requests: int
    seed: int


def _times(engine: str, mixing: str) -> StepTimes:
    times = engine_profile(engine).times
    if mixing == "sum":
        return times
    a, b, c = _POLYNOMIALS[engine]
    # a + b r + c r^2 = a (1 - r) + (a + b + c) r - c r (1 - r)
    mixed = StepCoefficients(overhead_s=0.0, prefill_s=a, decode_s=a + b + c, interference_s=-c)
    return replace(times, mixed=mixed)


def _run(case: _Case) -> Run:
    rng = np.random.default_rng(case.seed)
    laws = length_law(f"exponential:{case.prompt_tokens}"), length_law(f"exponential:{case.output_tokens}")
    work: Workload = synthetic("published", *laws, case.requests, rng)
    times = _times(case.engine, case.mixing)
    settings: dict[str, Any] = {"step_times": StepTimeConfig(prior=times)}
    batch, mode = ("stock", None) if case.scheduler == "v1" else ("exclusive_mixed", case.scheduler)
    cache = engine_profile(case.engine).cache_tokens or 0
    config = ClusterConfig(
        times=times,
        engine=EngineConfig(slots=case.slots, total_blocks=cache // 16),
        batch=batch,
        batch_settings={**settings, "mode": mode} if mode else {},
        router=RouterConfig(credit_lookahead=None),
        clients=case.clients,
    )
    return run(config, work)


def _tokens_per_s(case: _Case) -> float:
    finished = _run(case)
    return sum(r.prompt_tokens + r.output_tokens for r in finished.requests) / finished.makespan_s


_WORKLOADS = {
    "decode-heavy 128/1024": (128, 1024, "13974/11200", "15725/11846", "+12.5 % / +5.8 %"),
    "balanced 512/512": (512, 512, "19509/17424", "20937/18343", "+7.3 % / +5.3 %"),
    "prefill-heavy 1024/128": (1024, 128, "32228/31539", "32863/30903", "+2.0 % / -2.0 %"),
}


def balance(setting: Setting) -> list[str]:
    """Total tokens per second at 1024 slots, saturated: mixed (v1) against exclusive (EB), Qwen3-8B."""
    keys = [
        (engine, name, mixing) for engine in _POLYNOMIALS for name in _WORKLOADS for mixing in ("sum", "polynomial")
    ]
    cases = [
        _Case(
            engine=engine, mixing=mixing, scheduler=scheduler, prompt_tokens=_WORKLOADS[name][0],
            output_tokens=_WORKLOADS[name][1], slots=1024, clients=2048, requests=6000, seed=seed,
        )
        for engine, name, mixing in keys for scheduler in ("v1", "exclusive") for seed in range(setting.runs)
    ]  # fmt: skip
    found = np.array(setting.each(_tokens_per_s, cases)).reshape(len(keys), 2, setting.runs)
    rows = []
    for (engine, name, mixing), (mixed, exclusive) in zip(keys, found, strict=True):
        published = _WORKLOADS[name][2:] if engine.endswith("H200") else ("-", "-", "-")
        gain = f"{spread(100 * (exclusive / mixed - 1))} %"
        rows.append((engine, name, *published, mixing, f"{mean(mixed):.0f}", f"{mean(exclusive):.0f}", gain))
    heading = (
        "engine", "workload", "published v1", "published EB", "published gain", "mixed step", "v1", "EB", "gain"
    )  # fmt: skip
    return table(heading, rows)


_CLIENTS = {
    32: ("11584/11543, 49/42, 8.2/8.4", "8609/10779, 1046/60, 7.1/9.0", "11586/11673, 50/42, 8.2/8.3"),
    512: ("27464/24099, 700/646, 52.7/65.5", "27207/23876, 4600/926, 36.8/69.8", "27460/24435, 700/636, 52.7/64.8"),
    2048: (
        "26368/23055, 24400/24806, 128/135.5", "27198/22957, 34600/26184, 72.8/137.7",
        "27043/23690, 33700/24466, 79.2/128.9",
    ),
}  # fmt: skip


def clients(setting: Setting) -> list[str]:
    """Table 4: 512/256 tokens on an H200 with 32, 512 and 2048 clients; tokens/s, TTFT and TPOT in ms."""
    schedulers = {"v1": "v1", "EB": "exclusive", "EB+": "auto"}
    cases = [
        _Case(
            engine="Qwen3-8B@H200", mixing=mixing, scheduler=scheduler, prompt_tokens=512, output_tokens=256,
            slots=1024, clients=count, requests=max(1000, 4 * count), seed=0,
        )
        for count in _CLIENTS for scheduler in schedulers.values() for mixing in ("sum", "polynomial")
    ]  # fmt: skip
    found = iter(setting.each(_three, cases))
    rows = []
    for count, published in _CLIENTS.items():
        for name, paper in zip(schedulers, published, strict=True):
            rows.append((count, name, paper, next(found), next(found)))
    return table(("clients", "scheduler", "published (paper/rerun)", "simulated, sum", "simulated, polynomial"), rows)


def _three(case: _Case) -> str:
    finished = _run(case)
    tokens = sum(r.prompt_tokens + r.output_tokens for r in finished.requests)
    ttft_s = mean([r.ttft_s for r in finished.requests if r.ttft_s is not None])
    tpot_s = mean([r.tpot_s for r in finished.requests if r.tpot_s is not None])
    return f"{tokens / finished.makespan_s:.0f}, {1e3 * ttft_s:.0f}, {1e3 * tpot_s:.1f}"
