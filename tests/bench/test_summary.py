import pytest

from bench.summary import Spread, median_interval, paired_ratios, percentile


def test_a_percentile_lies_between_the_two_nearest_values() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([0.0, 100.0], 99) == pytest.approx(99.0)


def test_the_percentile_of_nothing_is_none() -> None:
    assert percentile([], 50) is None


def test_a_spread_is_the_median_between_the_extremes() -> None:
    assert Spread.of([3.0, 9.0, 1.0]) == Spread(median=3.0, low=1.0, high=9.0)


def test_ratios_are_taken_within_a_repeat_and_not_between_medians() -> None:
    slowed_down_machine = [10.0, 20.0, 40.0]
    assert paired_ratios([9.0, 18.0, 44.0], slowed_down_machine) == Spread(median=0.9, low=0.9, high=1.1)


@pytest.mark.parametrize(("count", "rank", "coverage"), [(8, 2, 0.930), (12, 3, 0.961), (20, 6, 0.959)])
def test_a_median_lies_between_two_ranks(count: int, rank: int, coverage: float) -> None:
    found = median_interval([float(count - n) for n in range(count)])
    assert found is not None
    assert (found.low, found.high) == (rank, count + 1 - rank)
    assert found.coverage == pytest.approx(coverage, abs=5e-4)


@pytest.mark.parametrize("count", [0, 1, 7])
def test_few_values_have_their_range_and_nothing_narrower(count: int) -> None:
    assert median_interval([1.0] * count) is None


def test_an_unpaired_repeat_is_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        paired_ratios([1.0, 2.0], [1.0])


def test_a_spread_is_shown_as_its_median_with_the_least_and_the_greatest() -> None:
    assert f"{Spread.of([3.0, 1.0, 2.0]):.1f}" == "2.0 [1.0, 3.0]"
    assert f"{Spread.of([1234.5]):,.4g}" == "1,234 [1,234, 1,234]"
