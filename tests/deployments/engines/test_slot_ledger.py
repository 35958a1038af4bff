"""Every request has one state, and every slot is given back once."""

from collections.abc import Callable

import pytest

from deployments.engines import slot_ledger
from deployments.engines.slot_ledger import SlotLedger


@pytest.fixture
def ledger() -> SlotLedger:
    made = SlotLedger()
    made.came("x")
    return made


def test_an_ended_request_gives_its_slot_back_once(ledger: SlotLedger) -> None:
    assert ledger.to_release() == []
    ledger.ended("x")
    assert (ledger.to_release(), set(ledger.held)) == (["x"], set())
    ledger.released()
    assert ledger.to_release() == []


def test_a_slot_that_was_not_released_is_released_by_the_next_call(ledger: SlotLedger) -> None:
    ledger.came("y")
    ledger.ended("x")
    ledger.to_release()
    ledger.not_released()
    ledger.ended("y")
    assert ledger.to_release() == ["x", "y"]


def left_by_recall(ledger: SlotLedger) -> None:
    ledger.ended("x", frees_slot=False)


def recalled_once_ended(ledger: SlotLedger) -> None:
    ledger.ended("x")
    ledger.recalled(["x", "unknown"])


def recalled_on_the_way(ledger: SlotLedger) -> None:
    ledger.ended("x")
    ledger.to_release()
    ledger.recalled(["x"])
    ledger.not_released()


def came_again_once_ended(ledger: SlotLedger) -> None:
    ledger.ended("x")
    ledger.came("x")


def came_again_on_the_way(ledger: SlotLedger) -> None:
    ledger.ended("x")
    ledger.to_release()
    ledger.came("x")
    ledger.not_released()


@pytest.mark.parametrize(
    "happens",
    [left_by_recall, recalled_once_ended, recalled_on_the_way, came_again_once_ended, came_again_on_the_way],
)
def test_a_slot_that_its_router_gives_back_or_that_is_taken_again_is_not_released(
    ledger: SlotLedger, happens: Callable[[SlotLedger], None]
) -> None:
    happens(ledger)
    assert ledger.to_release() == []
    assert ledger.never_came(["x"]) == []


def test_a_request_of_another_router_stays_held_when_one_recalls_its_id(ledger: SlotLedger) -> None:
    ledger.recalled(["x"])
    assert set(ledger.held) == {"x"}


@pytest.mark.parametrize("is_released", [True, False])
def test_one_that_left_is_remembered_for_two_heartbeats(ledger: SlotLedger, is_released: bool) -> None:
    ledger.ended("x", frees_slot=is_released)
    ledger.to_release()
    ledger.released()
    ledger.sends_heartbeat()
    assert ledger.never_came(["x", "y"]) == ["y"]
    ledger.sends_heartbeat()
    assert ledger.never_came(["x", "y"]) == ["x", "y"]


def test_one_that_comes_again_is_not_forgotten(ledger: SlotLedger) -> None:
    ledger.ended("x", frees_slot=False)
    ledger.sends_heartbeat()
    ledger.came("x")
    for _ in range(3):
        ledger.sends_heartbeat()
    assert (ledger.never_came(["x"]), set(ledger.held)) == ([], {"x"})


def test_slots_that_wait_for_a_shared_state_that_is_away_are_bounded(
    ledger: SlotLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_ledger, "MAX_ENDED", 1)
    ledger.came("y")
    ledger.ended("x")
    ledger.ended("y")
    assert ledger.to_release() == ["x"]


@pytest.mark.parametrize("is_known", [True, False])
def test_a_move_that_no_request_makes_is_a_fault_of_the_relay(ledger: SlotLedger, is_known: bool) -> None:
    with pytest.raises(AssertionError, match="from"):
        ledger.came("x") if is_known else ledger.ended("y")
