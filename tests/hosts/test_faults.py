"""What clients see while hosts, their cables and the head are lost. One cluster for all; it takes root.

What each of them costs is printed (`pytest -s`); `python -m tests.hosts` makes a table of it.
"""

import pytest

from tests.hosts.clients import STREAMS
from tests.hosts.cluster import Replica
from tests.hosts.faults import FAULTS, Fault, Trial, undergo
from tests.hosts.outcome import Outcome

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

BY_NAME = {fault.name: fault for fault in FAULTS}
NOTHING_ENDS = (
    "a worker cut off for 5 s",
    "a router cut off from Redis for 30 s",
    "two workers cut off from each other for 30 s",
    "one way between two workers gone for 30 s",
)
LONG_CUT = "a worker cut off for 120 s"
CUTS = ("a worker cut off for 30 s", "a worker cut off for 60 s")
LOSSES = ("power loss of a worker, asked through the head", "power loss of a worker, asked through the other")
PLANNED = (
    "a worker whose clock is 30 s ahead",
    "a further worker joins",
    "a worker drained, and booted again",
    "both workers drained and booted again, one after the other",
)


def undergone(trial: Trial, fault: Fault) -> Outcome:
    """What holds in every fault: no text is wrong, and no stream hangs until its client gives up."""
    made = undergo(trial, fault)
    print(f"\n{fault.name}: {made}")
    assert (made.wrong, made.lost) == (0, 0), made
    assert made.without_retry_after == 0, made
    assert made.whole > 0
    return made


def replicas(trial: Trial) -> set[Replica]:
    return set(trial.cluster.replicas())


@pytest.mark.parametrize("name", NOTHING_ENDS)
def test_no_stream_breaks_and_nothing_is_replaced(trial: Trial, name: str) -> None:
    before = replicas(trial)
    made = undergone(trial, BY_NAME[name])
    assert made.broken == 0, made
    assert replicas(trial) == before


@pytest.mark.parametrize("name", CUTS)
def test_a_worker_that_was_cut_off_for_a_minute_lives_on(trial: Trial, name: str) -> None:
    before = replicas(trial)
    check_that_streams_of_one_router_break_at_most(undergone(trial, BY_NAME[name]))
    assert replicas(trial) == before


@pytest.mark.parametrize("name", LOSSES)
def test_a_worker_without_power_is_replaced_when_it_is_back(trial: Trial, name: str) -> None:
    (lost,) = trial.cluster.workers[:1]
    others = {replica for replica in replicas(trial) if replica.host != lost.name}
    check_that_streams_of_one_router_break_at_most(undergone(trial, BY_NAME[name]))
    assert others <= replicas(trial)


def test_a_worker_that_was_cut_off_for_two_minutes_breaks_what_was_its_own_before_and_after(trial: Trial) -> None:
    """Ray takes it for dead about when it is back: its streams broke at the cut, and those that it got since may."""
    made = undergone(trial, BY_NAME[LONG_CUT])
    assert made.broken <= 2 * STREAMS * 3 / 4, made


def check_that_streams_of_one_router_break_at_most(made: Outcome) -> None:
    """Each of two routers has some half of the streams that are begun at once."""
    assert made.broken <= STREAMS * 3 / 4, made


def test_a_head_that_is_away_ends_no_replica_and_no_stream(trial: Trial) -> None:
    before = replicas(trial)
    made = undergone(trial, BY_NAME["the head cut off for 35 s"])
    assert made.broken == 0 and not made.answers, made
    assert replicas(trial) == before


@pytest.mark.parametrize("name", PLANNED)
def test_nobody_notices_a_wrong_clock_or_that_a_host_joins_or_is_renewed(trial: Trial, name: str) -> None:
    made = undergone(trial, BY_NAME[name])
    assert made.broken == 0 and not made.answers, made


def test_what_clients_left_holds_no_slot(trial: Trial) -> None:
    trial.cluster.wait_until_idle()
