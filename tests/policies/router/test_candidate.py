"""When a candidate goes back, or takes over."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.errors import InputError
from policies.router.candidate import (
    ERROR,
    LEAST_REQUESTS,
    TOLERATED_MISSED,
    Verdict,
    VersionCounts,
    place,
    verdict,
)

TABLE = Path(__file__).parents[3] / "docs/measurements/policies.md"
LOOK_EVERY = 20  # requests of both, so often that a test for one look would be wrong in time


class Rates(NamedTuple):
    missed: float
    failed: float = 0.0


def counts(missed: int = 0, kept: int = 0, failed: int = 0, requests: int | None = None) -> VersionCounts:
    return VersionCounts(
        requests=missed + kept + failed if requests is None else requests, kept=kept, missed=missed, failed=failed
    )


def traffic(
    incumbent: Rates, candidate: Rates, share: float, seed: int
) -> Iterator[tuple[VersionCounts, VersionCounts]]:
    """Counts of both, for ever, at every look."""
    rng = random.Random(seed)
    tallies = {True: {"kept": 0, "missed": 0, "failed": 0}, False: {"kept": 0, "missed": 0, "failed": 0}}
    while True:
        for _ in range(LOOK_EVERY):
            is_candidates = rng.random() < share
            rates = candidate if is_candidates else incumbent
            how = "failed" if rng.random() < rates.failed else "missed" if rng.random() < rates.missed else "kept"
            tallies[is_candidates][how] += 1
        yield counts(**tallies[False]), counts(**tallies[True])


def verdicts(incumbent: Rates, candidate: Rates, share: float, seed: int, requests: int) -> Iterator[Verdict]:
    """What is said at each look, until so many requests have come to both together."""
    looks = traffic(incumbent, candidate, share, seed)
    for _ in range(requests // LOOK_EVERY):
        yield verdict(*next(looks))


def first_word(incumbent: Rates, candidate: Rates, share: float, seed: int, requests: int) -> Verdict:
    said = verdicts(incumbent, candidate, share, seed, requests)
    return next((each for each in said if each is not Verdict.WAIT), Verdict.WAIT)


def test_nothing_is_said_before_there_is_something_of_both() -> None:
    assert verdict(counts(), counts()) is Verdict.WAIT
    assert verdict(counts(kept=10_000), counts()) is Verdict.WAIT
    assert verdict(counts(), counts(missed=10_000)) is Verdict.WAIT


def test_requests_that_were_promised_nothing_say_nothing_of_promises() -> None:
    unpromised = counts(requests=100_000)
    assert verdict(unpromised, unpromised) is Verdict.WAIT, "promoted for promises that nobody made"


def test_one_that_fails_is_rolled_back_though_it_misses_no_promise() -> None:
    assert verdict(counts(kept=2000), counts(kept=100)) is Verdict.WAIT
    assert verdict(counts(kept=2000), counts(kept=80, failed=20)) is Verdict.ROLL_BACK


@pytest.mark.parametrize("how", ["missed", "failed"])
@pytest.mark.parametrize("share", [0.05, 0.5])
def test_one_that_does_nothing_right_is_found_with_the_least_requests_and_no_single_stall_decides(
    share: float, how: str
) -> None:
    asked = LEAST_REQUESTS
    incumbents = counts(kept=round(asked * (1 - share) / share))
    assert verdict(incumbents, counts(**{how: asked})) is Verdict.ROLL_BACK
    assert verdict(incumbents, counts(**{how: asked - 1})) is Verdict.WAIT


@given(
    rate=st.floats(0.0, 0.95 - TOLERATED_MISSED),
    failing=st.floats(0.0, 0.2),
    share=st.sampled_from([0.05, 0.2, 0.5]),
    tolerated=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 10**6),
)
def test_one_that_is_as_good_or_worse_by_what_is_tolerated_is_rolled_back_as_seldom_as_is_said(
    rate: float, failing: float, share: float, tolerated: float, seed: int
) -> None:
    """Of this many sequences, two false verdicts are by that rate one chance in fifty, and the test is far below it."""
    sequences, most = 20, 1
    candidate = Rates(rate + tolerated * TOLERATED_MISSED, failing)
    false = sum(
        Verdict.ROLL_BACK in verdicts(Rates(rate, failing), candidate, share, seed + number, 3000)
        for number in range(sequences)
    )
    assert false <= most


@pytest.mark.long
@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5])
@pytest.mark.parametrize("tolerated", [0.0, 1.0])
def test_over_many_sequences_false_verdicts_stay_below_the_rate_that_is_said(rate: float, tolerated: float) -> None:
    sequences = 500
    candidate = Rates(rate + tolerated * TOLERATED_MISSED)
    found = [list(verdicts(Rates(rate), candidate, 0.2, seed, 6000)) for seed in range(sequences)]
    rolled_back = sum(Verdict.ROLL_BACK in each for each in found) / sequences
    promoted = sum(Verdict.PROMOTE in each for each in found) / sequences
    print(f"{rate:.0%}, {tolerated * TOLERATED_MISSED:.0%} above: {rolled_back:.1%} back, {promoted:.1%} promoted")
    assert rolled_back <= ERROR
    assert tolerated < 1 or promoted <= ERROR, "it is worse by as much as must not be promoted"


@given(seed=st.integers(0, 10**6))
def test_one_that_misses_twice_as_often_is_found(seed: int) -> None:
    """One in ten of the incumbent's, one in five of the candidate's: within some thousand requests of its own."""
    assert first_word(Rates(0.1), Rates(0.2), 0.2, seed, requests=8000) is Verdict.ROLL_BACK


@given(seed=st.integers(0, 10**6))
def test_one_that_is_as_good_is_promoted_in_the_end(seed: int) -> None:
    assert first_word(Rates(0.01, 0.001), Rates(0.01, 0.001), 0.5, seed, requests=24_000) is Verdict.PROMOTE


@given(
    incumbent=st.tuples(st.integers(0, 500), st.integers(0, 500)), candidate=st.tuples(st.integers(0, 500), st.just(0))
)
def test_a_larger_count_of_kept_promises_never_brings_a_roll_back(
    incumbent: tuple[int, int], candidate: tuple[int, int]
) -> None:
    before, missed = counts(*incumbent), candidate[0]
    if verdict(before, counts(missed, kept=200)) is not Verdict.ROLL_BACK:
        assert verdict(before, counts(missed, kept=400)) is not Verdict.ROLL_BACK


@pytest.mark.parametrize(
    ("incumbent", "candidate", "said", "requests"),
    [
        (0.02, 0.3, Verdict.ROLL_BACK, 30),
        (0.1, 0.2, Verdict.ROLL_BACK, 550),
        (0.05, 0.1, Verdict.ROLL_BACK, 2600),
        (0.01, 0.01, Verdict.PROMOTE, 3100),
        (0.05, 0.05, Verdict.PROMOTE, 4500),
    ],
)
def test_it_takes_as_many_requests_as_the_table_says(
    incumbent: float, candidate: float, said: Verdict, requests: int
) -> None:
    """With counts as they are in the mean, and one in twenty for the candidate."""
    assert f"{requests:,}".replace(",", " ") in TABLE.read_text()

    def of(asked: int, rate: float) -> VersionCounts:
        return counts(missed=round(rate * asked), kept=asked - round(rate * asked))

    def said_after(asked: int) -> Verdict:
        return verdict(of(19 * asked, incumbent), of(asked, candidate))

    least = next(asked for asked in range(10, 10_000, 10) if said_after(asked) is said)
    assert least == pytest.approx(requests, rel=0.05)


@pytest.mark.parametrize("wrong", [{"kept": -1}, {"requests": 1, "kept": 2}])
def test_counts_that_cannot_be_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(InputError):
        VersionCounts(**wrong)


def test_places_are_the_same_everywhere_and_spread_evenly() -> None:
    assert place("a session") == place("a session") != place("another")
    assert place("\ud800") < 1.0, "what no UTF-8 can hold has a place too"
    places = [place(f"session {number}") for number in range(10_000)]
    for share in (0.05, 0.5):
        assert sum(each < share for each in places) / len(places) == pytest.approx(share, abs=0.02)
