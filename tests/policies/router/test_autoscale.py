from dataclasses import replace

import pytest

from policies.errors import ConfigError
from policies.router.autoscale import FleetState, ReplicasForWork, ReplicasForWorkConfig


def wanted(config: ReplicasForWorkConfig | None = None, **state: float) -> int:
    given = {"replicas": 2, "slots": 20, "running": 0, "waiting": 0, "waiting_s": 0.0, **state}
    return ReplicasForWork(config or ReplicasForWorkConfig()).choose(FleetState(**given))  # type: ignore[arg-type]


def test_without_work_it_is_the_minimum() -> None:
    assert wanted() == 1
    assert wanted(ReplicasForWorkConfig(min_replicas=3)) == 3


def test_slots_are_used_to_the_fraction() -> None:
    assert wanted(running=16) == 2
    assert wanted(running=17) == 3
    assert wanted(running=20, waiting=20) == 5


def test_a_few_long_requests_count_for_what_they_are() -> None:
    assert wanted(running=10, waiting=1, waiting_s=30.0) == 6
    assert wanted(running=10, waiting=1, waiting_s=30.0, slowness=2.0) == 12


def test_before_any_replica_is_there_nothing_changes() -> None:
    assert wanted(replicas=0, slots=0) == 1
    assert wanted(replicas=2, slots=0, waiting=5) == 2


def test_without_work_none_is_needed_where_none_may_be() -> None:
    config = ReplicasForWorkConfig(min_replicas=0)
    idle = FleetState(replicas=1, slots=10, running=0, waiting=0, waiting_s=0.0)
    assert [ReplicasForWork(config).choose(replace(idle, running=running)) for running in (0, 1)] == [0, 1]


def test_a_square_wave_moves_it_to_two_places_only() -> None:
    high, low = wanted(running=20, waiting=12), wanted(running=6)
    assert (high, low) == (4, 1)
    assert wanted(replicas=4, slots=40, running=32) == high


@pytest.mark.parametrize("wrong", [{"slot_use": 0.0}, {"slot_use": 1.5}, {"max_queue_s": 0.0}, {"min_replicas": -1}])
def test_a_value_out_of_bounds_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ReplicasForWorkConfig(**wrong)  # type: ignore[arg-type]
