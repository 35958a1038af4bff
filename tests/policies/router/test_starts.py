"""When a first replica is predicted to be there."""

from policies.router.starts import Starts


def test_a_start_takes_as_long_as_the_last_one() -> None:
    starts = Starts()
    assert starts.asked(50.0) == 0.0  # none was seen
    starts.came(41.7, 60.0)
    assert (starts.took_s, starts.since_s) == (41.0, None)
    assert [starts.asked(at_s) for at_s in (200.0, 211.0, 300.0)] == [41.0, 30.0, 0.0]


def test_the_wait_for_a_place_belongs_to_it() -> None:
    starts = Starts()
    starts.asked(100.0)
    starts.came(30.0, 190.0)
    assert starts.took_s == 90.0
    starts.came(30.0, 500.0)  # nobody had asked
    assert starts.took_s == 30.0
