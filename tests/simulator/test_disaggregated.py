"""Prefill and decode in pools of their own."""

import numpy as np
import pytest

from policies.errors import ConfigError
from policies.types import StepCoefficients, StepTimes
from simulator.cluster import ClusterConfig
from simulator.disaggregated import TransferConfig, run_disaggregated
from simulator.engine import EngineConfig
from simulator.workload import Workload, length_law, poisson, synthetic

TIMES = StepTimes(
    prefill=StepCoefficients(overhead_s=0.004, prefill_s=5e-5),
    decode=StepCoefficients(overhead_s=0.01, decode_s=1e-4, kv_s=5e-8),
    mixed=StepCoefficients(overhead_s=0.012, prefill_s=5e-5, decode_s=1e-4, kv_s=5e-8),
)
TRANSFER = TransferConfig(prefill_replicas=2, overhead_s=0.5, s_per_token=1e-3)


def workload(count: int) -> Workload:
    rng = np.random.default_rng(0)
    drawn = synthetic("drawn", length_law("uniform:1:400"), length_law("exponential:40"), count, rng)
    return drawn.arriving(poisson(10.0, count, rng))


def test_each_request_is_prefilled_in_one_pool_and_decoded_in_the_other() -> None:
    config = ClusterConfig(times=TIMES, engine=EngineConfig(slots=16, total_blocks=2000), replicas=2)
    result = run_disaggregated(config, TRANSFER, workload(200))
    prefill, decode = result.engines[:2], result.engines[2:]
    assert all(r.generated_tokens == r.output_tokens and r.finished_s is not None for r in result.requests)
    assert sum(e.totals.prefill_tokens for e in prefill) == sum(r.prompt_tokens for r in result.requests)
    assert sum(e.totals.decode_tokens for e in prefill) == 0
    # The token that the prefill gave, and the last of the prompt, are computed again where decoding starts.
    longer = [r for r in result.requests if r.output_tokens > 1]
    assert sum(e.totals.prefill_tokens for e in decode) <= 2 * len(longer)


def test_the_second_token_waits_for_the_cache_to_arrive() -> None:
    config = ClusterConfig(times=TIMES, engine=EngineConfig(slots=64, total_blocks=4000))
    for request in run_disaggregated(config, TRANSFER, workload(60)).requests:
        if request.output_tokens > 1:
            assert request.last_token_s is not None and request.first_token_s is not None
            assert request.last_token_s - request.first_token_s > TRANSFER.transfer_s(request.prompt_tokens)


def test_transfers_have_bounds() -> None:
    with pytest.raises(ConfigError, match="prefill_replicas"):
        TransferConfig(prefill_replicas=0)
    with pytest.raises(ConfigError, match="s_per_token"):
        TransferConfig(s_per_token=-1.0)
