from types import SimpleNamespace
from typing import Any

import pytest

from policies.errors import IllegalMoveError, InputError
from policies.router.tickets import Ticket
from router.ledger import MOVES, Entry, Ledger, State
from router.metrics import RouterMetrics
from router.timing import RequestTiming
from router.trail import Trail


def entry(request_id: str = "x", state: State = State.QUEUEING) -> Entry[Any]:
    return Entry(
        request=None,
        ticket=Ticket(request_id=request_id, bin_index=0, deadline_key=0.0, work_s=1.0, router_id="r"),
        metrics=RouterMetrics().of("standard"),
        timing=RequestTiming(received_s=0.0, submitted_s=0.0, trail=Trail({})),
        waiting_since_s=0.0,
        prompt_tokens=3,
        state=state,
    )


def connection(replica_id: str = "a") -> Any:
    return SimpleNamespace(info=SimpleNamespace(replica_id=replica_id))


@pytest.mark.parametrize("after", State)
@pytest.mark.parametrize("before", State)
def test_only_moves_of_the_table_are_made_and_every_other_one_raises(before: State, after: State) -> None:
    made = entry(state=before)
    if after in MOVES[before]:
        made.move(after)
        assert made.state is after
    else:
        with pytest.raises(IllegalMoveError, match=f"request x is {before}, and cannot become {after}"):
            made.move(after)
        assert made.state is before


def test_every_state_can_end_and_none_follows_on_an_end() -> None:
    assert {state for state in State if State.ENDED not in MOVES[state]} == {State.ENDED}
    assert not MOVES[State.ENDED]
    assert {state for follow in MOVES.values() for state in follow} == set(State)


def test_what_is_taken_back_is_on_no_replica_and_waits_since_then() -> None:
    made = entry()
    made.assign("a")
    made.run(connection(), 1.0)
    assert (made.state, made.replica_id, made.stay is not None) == (State.RUNNING, "a", True)
    made.take_back("lost", 5.0)
    assert (made.state, made.replica_id, made.connection, made.stay) == (State.RECALLED, None, None, None)
    assert made.waiting_since_s == 5.0
    assert made.trail is not None and (made.trail.stays[0].left_s, made.trail.stays[0].because) == (5.0, "lost")


def test_what_was_not_sent_has_waited_all_along() -> None:
    made = entry()
    made.assign("a")
    made.take_back("lost", 5.0)
    assert (made.state, made.waiting_since_s) == (State.RECALLED, 0.0)


def test_a_ledger_tells_its_requests_by_state_and_by_replica_until_they_end() -> None:
    ledger = Ledger[Any]()
    made = [entry(name) for name in "xyz"]
    for each in made:
        ledger.add(each)
    made[0].assign("a")
    made[1].assign("b")
    made[1].run(there := connection("b"), 1.0)
    assert ledger.in_state(State.ASSIGNED, State.QUEUEING) == [made[0], made[2]]
    assert ledger.on(there) == [made[1]]
    assert ledger.by_replica() == {"a": ["x"], "b": ["y"]}
    ledger.end(made[1])
    assert made[1].has_ended and list(ledger) == ["x", "z"]
    assert (ledger.needs("a"), ledger.needs("b")) == (True, False)


def test_an_id_is_in_a_ledger_once_until_it_has_ended() -> None:
    ledger = Ledger[Any]()
    ledger.add(first := entry())
    with pytest.raises(InputError, match="x is not over yet"):
        ledger.add(entry())
    ledger.end(first)
    ledger.add(entry())
