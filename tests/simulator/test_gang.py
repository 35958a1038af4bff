"""Gang batches against paper 000's closed forms."""

import math

import numpy as np
import pytest

from policies.errors import ConfigError
from policies.gang.batches import GangConfig
from policies.gang.buckets import AdaptiveBucketsConfig, PromptBuckets
from policies.gang.packing import Packing
from policies.gang.prefill import PrefillConfig
from policies.papers.bin_worth import latency_uniform, throughput_uniform
from policies.papers.bucket_serve import BucketServeConfig
from policies.router.multi_bin import MultiBinConfig
from policies.router.order import LJF, SJF, Order
from policies.types import StepCoefficients, StepTimes
from simulator.cluster import GangRun, run_gang
from simulator.gang import LengthTimes, PaddedTimes
from simulator.predictors import predicted
from simulator.requests import Request
from simulator.workload import Workload, length_law, poisson, synthetic

pytestmark = pytest.mark.long

UNIT = 1000  # tokens per unit of time, so that whole tokens are fine enough for lengths uniform on [1, 20]


def uniform(count: int, rate: float, seed: int = 0) -> Workload:
    rng = np.random.default_rng(seed)
    drawn = synthetic("uniform", length_law("constant:1"), length_law(f"uniform:{UNIT}:{20 * UNIT}"), count, rng)
    return predicted(drawn.arriving(poisson(rate, count, rng)), "oracle", rng)


def bins(k: int) -> MultiBinConfig:
    edges = tuple(np.linspace(UNIT, 20 * UNIT, k + 1).tolist())
    return MultiBinConfig(bins=k, rule="fixed", initial_edges=edges)


def served(
    k: int,
    batch_size: int,
    workload: Workload,
    replicas: int = 1,
    max_wait_s: float = math.inf,
    patience_s: float = 0.0,
) -> GangRun:
    config = GangConfig(batch_size=batch_size, max_wait_s=max_wait_s, patience_s=patience_s)
    return run_gang(config, bins(k), LengthTimes(s_per_token=1 / UNIT), workload, replicas)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_throughput_is_that_of_theorem_4_2_within_half_a_percent(k: int) -> None:
    """All at once, so the server never idles; B divides what each bin gets but for the last batches."""
    result = served(k, 32, uniform(128_000, rate=1e6))
    assert result.throughput == pytest.approx(throughput_uniform(k, 32, 1.0, 20.0), rel=0.005)


@pytest.mark.parametrize("k", [1, 3])
def test_latency_with_replicas_to_spare_is_that_of_lemma_5_1(k: int) -> None:
    result = served(k, 16, uniform(40_000, rate=4.0), replicas=1000)
    assert result.mean_latency_s == pytest.approx(latency_uniform(k, 16, 1.0, 20.0, 4.0), rel=0.01)


def test_a_partial_batch_goes_when_its_head_has_waited_long_enough() -> None:
    result = served(2, 64, uniform(50, rate=0.2), replicas=50, max_wait_s=3.0)
    assert max((r.started_s or 0.0) - r.arrival_s for r in result.requests) <= 3.0 + 1e-9
    assert all(r.generated_tokens == r.output_tokens for r in result.requests)


def lengths(*outputs: int, every_s: float) -> Workload:
    """Requests with known answers of these lengths, one arriving after another."""
    tokens = np.array(outputs)
    arrival_s = every_s * np.arange(len(tokens))
    return Workload.of("given", arrival_s, tokens, tokens, predicted_output_tokens=tokens.astype(float))


@pytest.mark.parametrize(("k", "takes_s"), [(1, 11.0), (2, 8.0)])
def test_the_four_requests_of_figure_1b_take_8_seconds_in_two_bins_and_11_in_one(k: int, takes_s: float) -> None:
    edges = {1: (0.0, 7.0 * UNIT), 2: (0.0, 4.0 * UNIT, 7.0 * UNIT)}[k]
    binned = MultiBinConfig(bins=k, rule="fixed", initial_edges=edges)
    full = GangConfig(batch_size=2, max_wait_s=math.inf)
    work = lengths(UNIT, 5 * UNIT, 2 * UNIT, 6 * UNIT, every_s=0.0)
    assert run_gang(full, binned, LengthTimes(s_per_token=1 / UNIT), work).makespan_s == pytest.approx(takes_s)


def test_a_batch_that_waits_for_a_replica_grows_until_one_is_idle() -> None:
    """As live: max_wait_s of the second request is over long before the first batch ends, and three more join it."""
    result = served(1, 8, lengths(20 * UNIT, *[UNIT] * 5, every_s=1.0), max_wait_s=0.5)
    first, *others = result.requests
    assert first.started_s == pytest.approx(0.5)
    assert {request.started_s for request in others} == {first.finished_s}
    assert result.cluster.batches == 2


def longest_wait_s(result: GangRun) -> float:
    return max((r.started_s or 0.0) - r.arrival_s for r in result.requests)


def test_shortest_first_lowers_the_mean_latency_and_patience_bounds_what_the_long_ones_pay() -> None:
    work = uniform(4000, rate=1.3)  # the capacity of these replicas
    first_formed, bounded, shortest = (served(4, 8, work, 2, patience_s=at_s) for at_s in (0.0, 200.0, math.inf))
    assert shortest.mean_latency_s < bounded.mean_latency_s < 0.9 * first_formed.mean_latency_s
    assert longest_wait_s(first_formed) < longest_wait_s(bounded) < 0.9 * longest_wait_s(shortest)


ONE_BIN = MultiBinConfig(bins=1, rule="fixed", initial_edges=(0.0, 1e9))
ALGORITHM_1 = BucketServeConfig(l_max=4096, max_buckets=4)


@pytest.mark.parametrize("rule", [AdaptiveBucketsConfig(max_buckets=4), ALGORITHM_1])
def test_prompts_of_like_length_share_a_batch_once_buckets_have_seen_them(
    rule: AdaptiveBucketsConfig | BucketServeConfig,
) -> None:
    """Two kinds of prompts, in turn, of which the short ones are more: without buckets every batch holds both."""
    prompts = np.array([50, 60, 3000] * 80)
    work = Workload.of("two", np.arange(240.0), prompts, np.ones(240, dtype=np.int64))

    def padded_s(buckets: PromptBuckets | None) -> float:
        times = PaddedTimes(times=_linear(prefill_s=1e-3, decode_s=0.0))
        result = run_gang(GangConfig(batch_size=4, max_wait_s=math.inf), ONE_BIN, times, work, 1, buckets)
        assert all(r.generated_tokens == 1 for r in result.requests)
        assert result.cluster.buckets is buckets
        return result.cluster.busy_s

    buckets = PromptBuckets(rule, refit_every=24, max_requests=4)
    assert padded_s(buckets) < 0.6 * padded_s(None)
    assert len(buckets.edges) > 2


@pytest.mark.parametrize("order", [SJF(), LJF()])
def test_a_lane_is_served_in_the_order_that_was_asked_for(order: Order) -> None:
    """The first goes alone, for it came first; the others wait for it and are sorted."""
    prompts = np.array([5, 400, 30, 900, 7, 60, 20])
    work = Workload.of("one by one", 1e-6 * np.arange(7), prompts, np.ones(7, dtype=np.int64))
    times = PaddedTimes(times=_linear(prefill_s=1e-3, decode_s=0.0))
    result = run_gang(GangConfig(batch_size=2, max_wait_s=0.0), ONE_BIN, times, work, order=order)
    by_start = sorted(result.requests[1:], key=lambda request: request.started_s or 0.0)
    pairs = [{r.prompt_tokens for r in by_start[at : at + 2]} for at in (0, 2, 4)]
    shortest = [{7, 20}, {30, 60}, {400, 900}]
    assert pairs == (shortest if isinstance(order, SJF) else shortest[::-1])


def _linear(prefill_s: float, decode_s: float) -> StepTimes:
    form = StepCoefficients(overhead_s=0.0, prefill_s=prefill_s, decode_s=decode_s)
    return StepTimes(prefill=form, decode=form, mixed=form)


@pytest.mark.parametrize(("packing", "tokens"), [("first_fit", 27), ("best_fit", 27)])
def test_a_prepacked_prefill_takes_the_time_of_its_rows(packing: Packing, tokens: int) -> None:
    prompts = (9, 7, 5, 3, 1)
    batch = [Request(request_id=str(p), arrival_s=0.0, prompt_tokens=p, output_tokens=1) for p in prompts]
    times = _linear(prefill_s=1.0, decode_s=0.0)
    packed = PaddedTimes(times=times, prefill=PrefillConfig(packing=packing))
    assert (packed.batch_s(batch), PaddedTimes(times=times).batch_s(batch)) == (tokens, 45)


def test_without_a_replica_nothing_can_run() -> None:
    with pytest.raises(ConfigError, match="replicas"):
        served(1, 8, uniform(8, rate=1.0), replicas=0)


def test_what_is_left_after_the_last_arrival_is_served_in_partial_batches() -> None:
    result = served(5, 64, uniform(100, rate=5.0))
    assert all(r.finished_s is not None for r in result.requests)
    assert result.cluster.batches >= 5


def test_steps_of_a_padded_batch_sum_up_to_the_closed_form() -> None:
    times = StepTimes(
        prefill=StepCoefficients(overhead_s=0.01, prefill_s=1e-4),
        decode=StepCoefficients(overhead_s=0.02, decode_s=1e-3, kv_s=1e-6),
        mixed=StepCoefficients(overhead_s=0.02),
    )
    batch = [
        Request(request_id=str(n), arrival_s=0.0, prompt_tokens=p, output_tokens=o)
        for n, (p, o) in enumerate([(100, 7), (40, 30), (250, 12)])
    ]
    steps = sum(times.decode.step_s(decode_requests=3, kv_tokens=3 * (250 + n)) for n in range(1, 30))
    assert PaddedTimes(times=times).batch_s(batch) == pytest.approx(0.01 + 1e-4 * 750 + steps)
