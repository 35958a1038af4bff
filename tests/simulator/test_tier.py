"""Memory beyond the cache of a GPU."""

import numpy as np
import pytest

from policies.errors import ConfigError
from simulator.cluster import Run, run
from simulator.engine import EngineConfig
from simulator.engines import engine_profile
from simulator.planner import Point, ablations
from simulator.presets import TIER, system, without
from simulator.report import Target, summary
from simulator.requests import Request
from simulator.tier import Tier, TierConfig
from simulator.workload import Workload

TARGETS = {"*": Target(ttft_s=5.0, tpot_s=0.1)}
FAST_S = 131_072 / 50e9  # Llama-3.1-8B's bytes of a token over the link of an H100
READ_S = 3e-5


def turn(session: str = "a", reusable_tokens: int = 10_000, prompt_tokens: int = 12_000) -> Request:
    return Request(
        request_id=session,
        arrival_s=0.0,
        prompt_tokens=prompt_tokens,
        output_tokens=4,
        session=session,
        reusable_tokens=reusable_tokens,
    )


def test_a_tier_has_what_the_gpu_has_not_and_loads_go_one_after_the_other() -> None:
    tier = Tier(TierConfig(tokens=100_000, token_s=1e-5), 16)
    tier.keep(turn(), 10_000)
    load = tier.load(turn(), 4000, 0.0, READ_S)
    assert load.tokens == 6000 and load.saved_tokens == 6000 - 2000
    assert tier.begin(turn(), load, 0.0) == pytest.approx(0.06)
    assert tier.load(turn(), 4000, 0.03, READ_S).saved_tokens == 6000 - 2000 - 1000
    assert tier.begin(turn(), load, 0.03) == pytest.approx(0.12)
    assert not tier.load(turn("another"), 0, 0.0, READ_S).parts


@pytest.mark.parametrize(("read_s", "loaded"), [(None, 10_000), (READ_S, 0), (1e-3, 10_000)])
def test_what_is_read_as_fast_is_not_loaded(read_s: float | None, loaded: int) -> None:
    tier = Tier(TierConfig(tokens=100_000, token_s=1e-4), 16)
    tier.keep(turn(), 10_000)
    assert tier.load(turn(), 0, 0.0, read_s).tokens == loaded


def test_the_session_that_was_used_last_goes_last() -> None:
    tier = Tier(TierConfig(tokens=20_000, token_s=1e-6), 16)
    for session in ("a", "b"):
        tier.keep(turn(session), 10_000)
    tier.begin(turn("a"), tier.load(turn("a"), 0, 0.0, READ_S), 0.0)
    tier.keep(turn("c"), 6000)
    assert [tier.load(turn(session), 0, 1.0, READ_S).tokens for session in ("a", "b", "c")] == [10_000, 4000, 6000]


def two_sessions(rounds: int = 5) -> Workload:
    """In turn, of which a cache holds one."""
    arrivals = [10.0 * n + 5.0 * which for n in range(rounds) for which in (0, 1)]
    prompts = np.array([100_000 + 1000 * n for n in range(rounds) for _ in (0, 1)])
    reusable = np.maximum(0, prompts - 1000) * (np.arange(len(prompts)) > 1)
    return Workload.of(
        "turns",
        np.array(arrivals),
        prompts,
        np.full(len(prompts), 4),
        cached_tokens=reusable,
        session=["a", "b"] * rounds,
    )


def served(tier: TierConfig | None, feature: str | None = None) -> Run:
    engine = EngineConfig(total_blocks=120_000 // 16, tier=tier)
    config = system("sluice", engine_profile("Llama-3.1-8B@h100_sxm"), engine, 1, TARGETS)
    return run(without(feature, config) if feature else config, two_sessions())


def test_prompts_that_the_gpu_has_given_up_are_loaded_instead_of_read() -> None:
    found, lost = served(TierConfig(tokens=1_000_000, token_s=FAST_S)), served(None)
    later, again = found.requests[2:], lost.requests[2:]
    assert all(each.loaded_tokens > 0 and each.prompt_tokens - each.cached_tokens <= 1016 for each in later)
    assert max(each.ttft_s or 0.0 for each in later) < min(each.ttft_s or 9.0 for each in again) / 3
    assert min(each.ttft_s or 0.0 for each in later) > 80_000 * FAST_S
    numbers = summary(found, TARGETS)
    assert 0.5 < numbers["prefix_loaded_fraction"] < numbers["prefix_reuse_fraction"] < 1
    assert "prefix_loaded_fraction" not in summary(lost, TARGETS)


def test_a_slow_tier_is_as_good_as_none() -> None:
    slow, lost = served(TierConfig(tokens=1_000_000, token_s=1e-3)), served(None)
    assert [each.ttft_s for each in slow.requests] == [each.ttft_s for each in lost.requests]


def test_a_tier_can_be_taken_out() -> None:
    taken_out = served(TierConfig(tokens=1_000_000, token_s=FAST_S), TIER)
    assert [each.ttft_s for each in taken_out.requests] == [each.ttft_s for each in served(None).requests]


@pytest.mark.parametrize("wrong", [{"tokens": 0, "token_s": 1e-6}, {"tokens": 1, "token_s": -1.0}])
def test_sizes_must_make_sense(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        TierConfig(**wrong)  # type: ignore[arg-type]


def test_a_plan_says_what_a_tier_brings() -> None:
    point = Point(engine="e", system="sluice", replicas=1, load=1.0)
    assert TIER in [each.without for each in ablations(point, has_tier=True)]
    assert TIER not in [each.without for each in ablations(point)]
