"""Prefill and decode in pools of their own."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from policies.errors import ConfigError
from policies.router.prefill_decode import PrefillDecodeConfig, TransferTimes
from policies.types import StepCoefficients, StepTimes
from simulator.cluster import ClusterConfig
from simulator.disaggregated import PoolsConfig, planned_prefill_replicas, run_disaggregated
from simulator.engine import EngineConfig
from simulator.engines import EngineProfile
from simulator.fleet import AutoscaleConfig, Failure
from simulator.planner import PlanConfig, Trials
from simulator.report import Target
from simulator.workload import Workload, length_law, poisson, synthetic

TIMES = StepTimes(
    prefill=StepCoefficients(overhead_s=0.004, prefill_s=5e-5),
    decode=StepCoefficients(overhead_s=0.01, decode_s=1e-4, kv_s=5e-8),
    mixed=StepCoefficients(overhead_s=0.012, prefill_s=5e-5, decode_s=1e-4, kv_s=5e-8),
)
TRANSFER = TransferTimes(overhead_s=0.5, s_per_token=1e-3)
POOLS = PoolsConfig(
    prefill_replicas=2, split=PrefillDecodeConfig(mode="always", min_prompt_tokens=1, max_wait_s=1e6, transfer=TRANSFER)
)


def workload(count: int) -> Workload:
    rng = np.random.default_rng(0)
    drawn = synthetic("drawn", length_law("uniform:1:400"), length_law("exponential:40"), count, rng)
    return drawn.arriving(poisson(10.0, count, rng))


def test_each_request_is_prefilled_in_one_pool_and_decoded_in_the_other() -> None:
    config = ClusterConfig(times=TIMES, engine=EngineConfig(slots=16, total_blocks=2000), replicas=2)
    result = run_disaggregated(config, POOLS, workload(200))
    prefill, decode = result.engines[:2], result.engines[2:]
    longer = [r for r in result.requests if r.output_tokens > 1]
    assert all(r.generated_tokens == r.output_tokens and r.finished_s is not None for r in result.requests)
    assert sum(e.totals.prefill_tokens for e in prefill) == sum(r.prompt_tokens for r in longer)
    assert sum(e.totals.decode_tokens for e in prefill) == 0
    # The last token of each prompt is computed again where decoding starts; prompts for one token only are not split.
    whole = sum(r.prompt_tokens for r in result.requests if r.output_tokens == 1)
    assert sum(e.totals.prefill_tokens for e in decode) == len(longer) + whole


def test_the_first_token_waits_for_the_cache_to_arrive() -> None:
    config = ClusterConfig(times=TIMES, engine=EngineConfig(slots=64, total_blocks=4000))
    for request in run_disaggregated(config, POOLS, workload(60)).requests:
        if request.output_tokens > 1:
            assert request.ttft_s is not None
            assert request.ttft_s > TRANSFER.transfer_s(request.prompt_tokens)


def test_what_decoding_requests_hold_counts_where_prompts_are_split() -> None:
    """With this context every step misses the target anyhow; beside requests of 512 tokens none would."""
    rng = np.random.default_rng(3)
    drawn = synthetic("long", length_law("constant:4000"), length_law("constant:200"), 40, rng)
    reads = StepTimes(
        prefill=TIMES.prefill,
        decode=StepCoefficients(overhead_s=0.01, decode_s=1e-4, kv_s=3e-6),
        mixed=StepCoefficients(overhead_s=0.012, prefill_s=5e-5, decode_s=1e-4, kv_s=3e-6),
    )
    config = ClusterConfig(times=reads, engine=EngineConfig(slots=64, total_blocks=30_000))
    pools = PoolsConfig(split=PrefillDecodeConfig(max_wait_s=100.0), itl_targets_s={"*": 0.1})
    result = run_disaggregated(config, pools, drawn.arriving(poisson(2.0, 40, rng)))
    prefilled = result.engines[0].totals.prefill_tokens
    assert prefilled < 0.5 * 40 * 4000


@pytest.mark.long
def test_auto_splits_under_tight_targets_alone_and_then_evens_the_gaps() -> None:
    rng = np.random.default_rng(3)
    drawn = synthetic("long", length_law("uniform:2000:6000"), length_law("exponential:60"), 150, rng)
    long_prompts = drawn.arriving(poisson(2.0, 150, rng))
    config = ClusterConfig(times=TIMES, engine=EngineConfig(slots=64, total_blocks=30_000), replicas=2)
    split = PrefillDecodeConfig(mode="auto", max_wait_s=1e6)

    def gap_s(target_s: float) -> tuple[float, int]:
        pools = PoolsConfig(prefill_replicas=1, split=split, itl_targets_s={"*": target_s})
        engines = run_disaggregated(config, pools, long_prompts).engines
        gaps = [engine.totals.gaps.percentile(99.0) for engine in engines[1:]]
        return max(gap or 0.0 for gap in gaps), engines[0].totals.prefill_tokens

    (loose_s, loosely_read), (tight_s, tightly_read) = gap_s(10.0), gap_s(0.05)
    assert loosely_read == 0 < tightly_read
    assert tight_s < loose_s / 4


def test_the_plan_gives_prefill_its_share_of_replicas_and_leaves_small_setups_whole() -> None:
    rng = np.random.default_rng(1)
    long_prompts = synthetic("long", length_law("uniform:4000:8000"), length_law("exponential:60"), 50, rng)
    answers = synthetic("answers", length_law("uniform:10:50"), length_law("exponential:300"), 50, rng)
    assert 1 <= planned_prefill_replicas(long_prompts, TIMES, 4) <= 3
    assert planned_prefill_replicas(answers, TIMES, 4) == 0
    assert planned_prefill_replicas(long_prompts, TIMES, 1) == 0


@pytest.mark.parametrize(
    "unknown",
    [
        {"clients": 4},
        {"failures": (Failure(replica=0, at_s=1.0),)},
        {"autoscale": AutoscaleConfig()},
        {"replica_classes": (frozenset({"chat"}),)},
    ],
)
def test_what_pools_cannot_simulate_is_refused(unknown: dict[str, Any]) -> None:
    config = ClusterConfig(times=TIMES, engine=EngineConfig(slots=16, total_blocks=2000), **unknown)
    with pytest.raises(ConfigError, match="pool for prefill"):
        run_disaggregated(config, POOLS, workload(10))


def test_a_prefill_replica_holds_no_more_prompts_than_are_safe_in_its_cache() -> None:
    """Two prompts in flight of 400 tokens each: a step takes 20 of them, the cache 4, half of it 2."""
    rng = np.random.default_rng(0)
    alike = synthetic("alike", length_law("constant:400"), length_law("constant:2"), 64, rng)
    engine = EngineConfig(slots=64, total_blocks=100, max_batch_tokens=8192)
    batches = []
    for share in (1.0, 0.5):
        result = run_disaggregated(ClusterConfig(times=TIMES, engine=engine), replace(POOLS, memory_share=share), alike)
        totals = result.engines[0].totals
        batches.append(totals.prefill_tokens / 400 / totals.steps)
        assert all(r.finished_s is not None for r in result.requests)
    assert batches == pytest.approx([4.0, 2.0])
    with pytest.raises(ConfigError, match="memory_share"):
        PoolsConfig(memory_share=1.1)


def test_pools_have_bounds() -> None:
    with pytest.raises(ConfigError, match="prefill_replicas"):
        PoolsConfig(prefill_replicas=0)


@pytest.mark.long
def test_a_plan_finds_out_where_splitting_pays() -> None:
    rng = np.random.default_rng(0)
    drawn = synthetic("long", length_law("lognormal:4000:0.5"), length_law("exponential:80"), 100, rng)
    long_prompts = drawn.arriving(poisson(4.0, 100, rng))
    profile = EngineProfile(name="ours", times=TIMES, clock=TIMES, cache_tokens=480_000)
    engine = EngineConfig(slots=64, total_blocks=30_000)

    def attained(ttft_s: float, tpot_s: float) -> dict[str, float]:
        config = PlanConfig(
            profiles={"ours": (profile, engine)},
            prices={},
            targets={"*": Target(ttft_s=ttft_s, tpot_s=tpot_s)},
            replicas=(1, 2),
            systems=("sluice", "split"),
        )
        tried = list(Trials(config, long_prompts, processes=1).each(config.points(1.0)))
        assert [(each.point.replicas, each.point.system) for each in tried] == [
            (1, "sluice"),
            (2, "sluice"),
            (2, "split"),
        ]
        return {each.point.system: each.attainment for each in tried[1:]}

    tight, loose = attained(1.0, 0.015), attained(10.0, 1.0)
    assert tight["split"] > tight["sluice"] + 0.1
    assert loose["split"] == loose["sluice"] == 1.0
