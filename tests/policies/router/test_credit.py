from math import inf

import pytest

from policies.router.credit import MemoryBound, late_uncounted, longest_promise_s, lookahead


def test_an_eighth_of_the_slots_is_offered_besides() -> None:
    assert [lookahead(slots) for slots in (1, 8, 64, 100)] == [0, 1, 8, 12]


def test_late_requests_are_left_out_of_the_count_up_to_a_bound() -> None:
    assert late_uncounted(3, 4) == 3
    assert late_uncounted(100, 4) == 16


@pytest.mark.parametrize(("promised", "longest"), [((), None), ((inf,), None), ((0.5, 2.0, inf), 2.0)])
def test_only_promises_say_how_long_reading_may_take(promised: tuple[float, ...], longest: float | None) -> None:
    assert longest_promise_s(promised) == longest


def test_memory_bounds_from_when_it_holds_somebody_back_and_follows_a_lighter_load() -> None:
    memory = MemoryBound()
    memory.planned(30, 64, by_memory=False)
    assert memory.requests == inf
    memory.planned(20, 20, by_memory=True)
    memory.planned(20, 64, by_memory=False)
    assert memory.requests == 20
    memory.planned(24, 64, by_memory=False)
    assert memory.requests == 30
