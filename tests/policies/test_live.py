import pytest

from policies.live import Live


def test_views_follow_what_is_in_force_through_every_level() -> None:
    live = Live({"a": 2})
    doubled = live.view(lambda values: 2 * values["a"])
    in_words = doubled.view(str)
    assert (doubled.now, in_words.now) == (4, "4")
    live.replace({"a": 5})
    assert (live.now, doubled.now, in_words.now) == ({"a": 5}, 10, "10")


def test_a_value_from_which_a_view_cannot_follow_changes_nothing() -> None:
    live = Live(4)
    halved = live.view(lambda value: value / 2)
    inverted = live.view(lambda value: 1 / value)
    with pytest.raises(ZeroDivisionError):
        live.replace(0)
    assert (live.now, halved.now, inverted.now) == (4, 2.0, 0.25)


def test_a_view_is_worked_out_at_replacements_and_not_at_looks() -> None:
    worked_out: list[int] = []
    live = Live(1)
    view = live.view(worked_out.append)
    for _ in range(3):
        assert view.now is None
    live.replace(2)
    assert worked_out == [1, 2]
