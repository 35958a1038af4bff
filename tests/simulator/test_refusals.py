"""What vLLM refuses by its own limits, and what it keeps free: the baseline that goodput is compared with."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.exceptions import MaxQueuedTokensError, QueueOverflowError
from vllm.v1.engine.async_llm import AsyncLLM

from policies.errors import ConfigError
from policies.types import StepCoefficients, StepTimes
from simulator.cluster import ClusterConfig, Run, run
from simulator.disaggregated import PoolsConfig, run_disaggregated
from simulator.engine import Engine, EngineConfig
from simulator.engines import engine_profile
from simulator.presets import system
from simulator.report import Target, attainment, summary
from simulator.requests import Request
from simulator.router import RouterConfig
from simulator.workload import Workload

pytestmark = pytest.mark.long

STEP = StepCoefficients(overhead_s=0.01, prefill_s=1e-4)
TIMES = StepTimes(prefill=STEP, decode=STEP, mixed=STEP)


def served(arrivals_s: list[float], prompt: int, output: int, *, clients: int | None = None, **sizes: Any) -> Run:
    count = len(arrivals_s)
    work = Workload.of("equal", np.array(arrivals_s), np.full(count, prompt), np.full(count, output))
    engine = EngineConfig(**{"slots": 16, "total_blocks": 400, "max_batch_tokens": 100, **sizes})
    router = RouterConfig(credit_lookahead=None)
    return run(ClusterConfig(times=TIMES, engine=engine, router=router, clients=clients), work)


def ids(requests: list[Request]) -> list[str]:
    return [request.request_id for request in requests]


def test_prompts_without_a_first_token_count_whole_towards_the_most_queued_tokens() -> None:
    """At 50 ms two of the first prompt's three chunks are read: 600 tokens are queued all the same."""
    result = served([0.0, 0.001, 0.05, 0.3], 300, 50, max_num_queued_tokens=600)
    assert ids(result.refused) == ["r2"]
    assert ids(result.requests) == ["r0", "r1", "r3"]


def test_a_prompt_larger_than_the_limit_is_taken_while_less_than_the_limit_is_queued() -> None:
    result = served([0.0, 0.001], 2000, 5, max_num_queued_tokens=1)
    assert (ids(result.requests), ids(result.refused)) == (["r0"], ["r1"])


def test_requests_that_run_count_towards_the_most_queued_requests() -> None:
    result = served([0.0] * 20 + [60.0], 10, 500, max_num_queued_reqs=5)
    assert ids(result.requests) == ["r0", "r1", "r2", "r3", "r4", "r20"]
    assert len(result.refused) == 15


def test_whom_vllm_refuses_at_zero_it_refuses_always() -> None:
    for limit in ("max_num_queued_reqs", "max_num_queued_tokens"):
        assert not served([0.0, 9.0], 10, 5, **{limit: 0}).requests


@given(
    held=st.integers(0, 4),
    unread=st.integers(0, 4),
    most_requests=st.none() | st.integers(0, 4),
    most_tokens=st.none() | st.integers(0, 40),
)
def test_the_door_is_vllms_own(held: int, unread: int, most_requests: int | None, most_tokens: int | None) -> None:
    sizes = EngineConfig(max_num_queued_reqs=most_requests, max_num_queued_tokens=most_tokens)
    engine = Engine("one", sizes, ClusterConfig(times=TIMES).batch_policy(), TIMES, lambda *_: ())
    for number in range(held + unread):
        first_token_s = 0.0 if number < held else None
        request = Request(
            request_id=f"r{number}", arrival_s=0.0, prompt_tokens=10, output_tokens=5, first_token_s=first_token_s
        )
        engine.submit(request, 0.0)
    front_end = SimpleNamespace(
        scheduler_config=sizes,
        admission_stats=None,
        get_num_unfinished_requests=lambda: held + unread,
        get_num_queued_tokens=lambda: 10 * unread,
        _record_admission_rejection=lambda reason: None,
    )
    try:
        AsyncLLM.check_admission(front_end)
        taken = True
    except (QueueOverflowError, MaxQueuedTokensError):
        taken = False
    assert engine.takes_more() == taken


def test_in_a_closed_loop_the_next_comes_for_one_that_was_refused() -> None:
    result = served([0.0] * 30, 10, 20, clients=4, max_num_queued_reqs=2)
    assert len(result.requests) + len(result.refused) == 30
    assert len(result.requests) >= 2 and result.refused


def test_what_was_refused_misses_every_target_even_for_an_answer_of_one_token() -> None:
    targets = {"*": Target(ttft_s=60.0, tpot_s=60.0)}
    result = served([0.0] * 10, 10, 1, max_num_queued_reqs=4)
    numbers = summary(result, targets)
    assert numbers["in_time"] == {
        "attainment": 0.4,
        "ttft_met": 0.4,
        "tpot_met": 0.4,
        "e2e_met": 0.4,
        "goodput_per_s": pytest.approx(4 / result.makespan_s),
    }
    assert (numbers["refused"], numbers["classes"]["*"]["refused"], attainment(result, targets)) == (6, 6, 0.4)


def test_a_watermark_leaves_room_in_which_those_that_run_grow() -> None:
    """24 requests that start at three blocks each and grow to six, in 100 blocks."""
    tight = {"total_blocks": 100, "slots": 32, "max_batch_tokens": 4096}
    plain, kept = (served([0.0] * 24, 40, 55, watermark=each, **tight) for each in (0.0, 0.5))
    assert sum(request.preemptions for request in plain.requests) > 0
    assert sum(request.preemptions for request in kept.requests) == 0
    assert len(plain.requests) == len(kept.requests) == 24


def test_a_watermark_holds_back_nobody_who_would_run_alone() -> None:
    result = served([0.0], 1500, 20, total_blocks=100, watermark=0.9)
    assert len(result.requests) == 1


@pytest.mark.parametrize("watermark", [-0.1, 1.0])
def test_a_watermark_is_a_fraction(watermark: float) -> None:
    with pytest.raises(ConfigError, match="watermark"):
        EngineConfig(watermark=watermark)


def test_vllms_refusals_are_for_the_system_that_has_them() -> None:
    refusing = EngineConfig(max_num_queued_tokens=1000)
    with pytest.raises(ConfigError, match="use them with system stock"):
        system("sluice", engine_profile("Llama-3.1-8B@h100_sxm"), refusing, 1)
    stock = system("stock", engine_profile("Llama-3.1-8B@h100_sxm"), refusing, 2)
    work = Workload.of("one", np.zeros(1), np.ones(1, np.int64), np.ones(1, np.int64))
    with pytest.raises(ConfigError, match="a pool for prefill cannot be simulated with max_num_queued_reqs"):
        run_disaggregated(stock, PoolsConfig(), work)
    assert len(run(replace(stock, engine=EngineConfig()), work).requests) == 1
