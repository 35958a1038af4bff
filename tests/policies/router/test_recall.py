"""Who gives a slot back for whom."""

from hypothesis import given
from hypothesis import strategies as st

from policies.router.recall import RecallableView, WaitingView, recalls


def urgent(*keys: float) -> list[WaitingView]:
    return [WaitingView(key=key, fills_idle=False) for key in keys]


def running(**keys: float) -> list[RecallableView]:
    return [RecallableView(key=key, request_id=name) for name, key in keys.items()]


def test_as_many_as_wait_are_called_back_those_due_last_first() -> None:
    assert recalls(urgent(1, 2), running(a=60, b=62, c=61), recalled=0) == ["b", "c"]


def test_what_is_on_its_way_is_not_called_for_again() -> None:
    assert recalls(urgent(1, 2), running(a=60, b=62), recalled=1) == ["b"]
    assert recalls(urgent(1, 2), running(a=60, b=62), recalled=2) == []


def test_nobody_gives_a_slot_to_one_that_is_due_later() -> None:
    assert recalls(urgent(1, 61, 63), running(a=60, b=62), recalled=0) == ["b"]


def test_aged_work_at_the_front_stands_before_whoever_comes_after_it() -> None:
    waiting = [*urgent(1), WaitingView(key=2, fills_idle=True), *urgent(3)]
    assert recalls(waiting, running(a=60, b=61), recalled=0) == ["b"]


keys = st.integers(0, 9).map(float)


@given(
    waiting=st.lists(st.builds(WaitingView, key=keys, fills_idle=st.booleans())),
    held=st.dictionaries(st.text("abcdef", min_size=1, max_size=2), keys),
    recalled=st.integers(0, 3),
)
def test_each_that_is_called_back_is_due_after_one_that_waits(
    waiting: list[WaitingView], held: dict[str, float], recalled: int
) -> None:
    waiting.sort(key=lambda request: request.key)
    called = recalls(waiting, running(**held), recalled)
    urgent_keys = [request.key for request in waiting if not request.fills_idle]
    assert len(called) == len(set(called)) <= max(0, len(urgent_keys) - recalled)
    for name, key in zip(called, urgent_keys[recalled:], strict=False):
        assert held[name] > key
