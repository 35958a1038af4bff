"""The latency search keeps its invariants whatever it is told, and finds the answer of any linear plant."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.papers.latency_search import LatencySearch, LatencyWindow, TokenGap, WindowMean
from policies.types import StepResult
from tests.policies.states import result_of


def make_search(minimum: int = 1, maximum: int = 512, initial: int = 32, stride: int = 16) -> LatencySearch:
    return LatencySearch(minimum=minimum, maximum=maximum, initial=initial, target_s=0.05, stride=stride)


def make_result(*, step_s: float, decodes: int, prefills: int = 0, running: int = 8) -> StepResult:
    return result_of(
        step_s=step_s,
        prefill_tokens=100 * prefills,
        prefill_requests=prefills,
        decode_requests=decodes,
        running_count=running,
    )


@given(
    bounds=st.tuples(st.integers(1, 300), st.integers(0, 300)),
    initial=st.integers(-5, 1000),
    stride=st.integers(1, 64),
    updates=st.lists(st.tuples(st.floats(0, 10), st.floats(0.1, 2000), st.booleans()), max_size=40),
)
@settings(deadline=None)
def test_bounds_never_cross_whatever_is_measured(
    bounds: tuple[int, int], initial: int, stride: int, updates: list[tuple[float, float, bool]]
) -> None:
    minimum, maximum = bounds[0], bounds[0] + bounds[1]
    search = make_search(minimum, maximum, initial, stride)
    for latency_s, used, binding in updates:
        search.update(latency_s, used, binding=binding)
        assert minimum <= search.low <= search.value <= search.high <= maximum


@given(base=st.floats(0, 0.2), slope=st.floats(1e-6, 0.05), initial=st.integers(1, 512), stride=st.integers(4, 64))
@settings(deadline=None)
def test_on_any_linear_plant_it_ends_within_one_of_the_answer(
    base: float, slope: float, initial: int, stride: int
) -> None:
    search = make_search(initial=initial, stride=stride)
    for _ in range(400):
        search.update(base + slope * search.value, search.value, binding=True)
    # A request more or less may jump over the dead band: then it alternates between the two neighbours.
    if base + slope > 0.05:
        return  # out of reach, see below
    assert search.value == 1 or base + slope * (search.value - 1) <= 0.05
    assert search.value == 512 or base + slope * (search.value + 1) >= 0.048


@pytest.mark.parametrize("fixed_share", [0.0, 0.4, 0.8])
def test_noise_of_a_fifth_in_each_step_moves_it_by_less_than_a_third(fixed_share: float) -> None:
    """The answer is 100; windows are of 16 steps."""
    rng, search = np.random.default_rng(0), make_search()
    seen = []
    for _ in range(400):
        exact_s = 0.05 * (fixed_share + (1.0 - fixed_share) * search.value / 100)
        search.update(exact_s * rng.lognormal(-0.02, 0.2, 16).mean(), search.value, binding=True)
        seen.append(search.value)
    assert min(seen[50:]) >= 67 and max(seen[50:]) <= 133
    assert 92 <= np.mean(seen[50:]) <= 101


def test_it_finds_a_latency_that_has_doubled_within_a_dozen_windows() -> None:
    search = make_search()
    for window in range(52):
        exact_s = 0.05 * (0.4 + 0.6 * search.value / (100 if window < 40 else 50))
        search.update(exact_s, search.value, binding=True)
    assert search.value == pytest.approx(50, abs=4)


def test_a_fast_system_that_is_not_full_teaches_nothing() -> None:
    search = make_search(initial=40)
    search.update(0.01, 5, binding=False)
    assert (search.value, search.low, search.high) == (40, 1, 512)


def test_what_ran_fast_enough_raises_a_value_that_nobody_waits_behind() -> None:
    search = make_search(initial=32, stride=16)
    search.update(0.0125, 32, binding=False)
    assert 32 * 0.05 / 0.0125 <= search.value <= 32 * 0.05 / 0.0125 + 16


def test_a_low_load_raises_nothing_beyond_a_stride_above_what_it_proves() -> None:
    search = make_search(initial=32, stride=16)
    for _ in range(100):
        search.update(0.01, 8, binding=False)
    assert search.value <= 8 * 0.05 / 0.01 + 16


def test_a_batch_on_its_way_down_is_not_cut_twice_for_the_same_latency() -> None:
    search = make_search(initial=200)
    search.update(0.1, 200, binding=True)
    value = search.value
    search.update(0.099, 198, binding=True)
    assert search.value == value


def test_bounds_give_way_by_the_drift_first() -> None:
    values = []
    for drift in (1, 8):
        search = LatencySearch(minimum=1, maximum=512, initial=64, target_s=0.05, stride=16, drift=drift)
        for latency_s in (0.049, 0.06):
            search.update(latency_s, search.value, binding=True)
        search.update(0.08, search.value, binding=True)
        values.append(search.value)
    assert values[0] > values[1]


def test_what_lies_above_the_target_is_no_longer_on_it() -> None:
    above, below = make_search(initial=64), make_search(initial=64)
    above.update(0.0505, 64, binding=True)
    below.update(0.0485, 64, binding=True)
    assert above.value < below.value == 64


def test_a_step_beyond_what_is_safe_is_at_most_a_stride() -> None:
    search = make_search(initial=32, stride=16)
    search.update(0.04, 32, binding=True)
    assert search.value <= 32 * 0.05 / 0.04 + 16


def missing(search: LatencySearch, updates: int, base_s: float = 0.06) -> list[int]:
    """Values of a search whose latency is above the target whatever it does."""
    seen = []
    for _ in range(updates):
        search.update(base_s + 1e-4 * search.value, search.value, binding=True)
        seen.append(search.value)
    return seen


def test_a_target_that_the_least_misses_bounds_nothing_and_is_tried_again_ever_less_often() -> None:
    search = make_search()
    values = missing(search, 4000)
    assert search.out_of_reach
    assert np.mean(np.array(values[-1000:]) == 512) > 0.98
    begins = [at for at in range(1, 4000) if values[at] == 32 and values[at - 1] == 512]
    assert len(begins) >= 4 and all(np.diff(np.diff(begins)) >= 0)


def test_one_window_above_the_target_at_the_least_value_ends_no_search() -> None:
    search = make_search(initial=1)
    search.update(0.06, 1, binding=True)
    assert (search.out_of_reach, search.value) == (False, 1)
    search.update(0.06, 1, binding=True)
    assert (search.out_of_reach, search.value) == (True, 512)


def test_a_search_that_let_go_goes_on_as_soon_as_the_target_can_be_kept() -> None:
    search = make_search(initial=1)
    missing(search, 5)
    assert search.out_of_reach
    search.update(0.02, 20, binding=False)
    assert not search.out_of_reach and 1 < search.value < 100
    for _ in range(60):
        search.update(0.05 * search.value / 100, search.value, binding=True)
    assert not search.out_of_reach and search.value == pytest.approx(100, abs=2)


def windows(mean: WindowMean, *samples: tuple[float, float, bool] | None) -> list[LatencyWindow | None]:
    """What each step ends, one with a sample or one without."""
    ended = []
    for sample in samples:
        if sample:
            mean.add(sample[0], sample[1], binding=sample[2])
        ended.append(mean.step())
    return ended


def test_a_window_ends_with_the_means_of_its_samples_of_whichever_steps() -> None:
    closed = LatencyWindow(latency_s=0.2, used=15, binding=True)
    samples = (0.1, 10, True), (0.3, 20, True)
    assert windows(WindowMean(2), *samples, samples[0]) == [None, closed, None]
    assert windows(WindowMean(4), samples[0], None, samples[1], None)[3] == closed


def test_a_window_with_few_samples_goes_on_for_as_many_steps_more() -> None:
    mean = WindowMean(4)
    assert windows(mean, None, (0.1, 10, True), None, None) == [None] * 4
    assert mean.steps_left == 4
    ended = windows(mean, (0.3, 20, True), None, None, None)
    assert ended == [None] * 3 + [LatencyWindow(latency_s=0.2, used=15, binding=True)]


def test_half_a_window_at_the_limit_does_not_count_as_binding() -> None:
    closed = windows(WindowMean(2), (0.1, 10, True), (0.1, 10, False))[1]
    assert closed is not None
    assert not closed.binding


def test_the_gap_between_two_tokens_holds_the_prefills_in_between() -> None:
    gap = TokenGap()
    assert gap.add(make_result(step_s=0.02, decodes=8)) == 0.02
    assert gap.add(make_result(step_s=0.5, decodes=0, prefills=2, running=10)) is None
    assert gap.add(make_result(step_s=0.02, decodes=10)) == 0.52
