"""Load, or read again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.router.tiers import NOTHING, Loadable, cheapest_load

READ_S = 1e-3


def host(tokens: int, token_s: float = 1e-4, wait_s: float = 0.0) -> Loadable:
    return Loadable(tier="CPU", tokens=tokens, token_s=token_s, wait_s=wait_s)


def disk(tokens: int, token_s: float) -> Loadable:
    return Loadable(tier="STORAGE", tokens=tokens, token_s=token_s)


def test_a_load_saves_what_it_brings_less_what_could_be_read_meanwhile() -> None:
    load = cheapest_load([host(1000)], READ_S)
    assert (load.tokens, load.read_tokens, load.saved_tokens) == (1000, 100, 900)


@pytest.mark.parametrize("loadable", [[], [host(1000, token_s=READ_S)], [host(1000, wait_s=0.95)]])
def test_where_reading_is_as_fast_nothing_is_loaded(loadable: list[Loadable]) -> None:
    assert cheapest_load(loadable, READ_S) == NOTHING


def test_what_waits_for_the_link_counts() -> None:
    assert cheapest_load([host(1000, wait_s=0.3)], READ_S).saved_tokens == 600


def test_a_slow_tier_behind_a_fast_one_is_left_out() -> None:
    near = host(1000)
    assert cheapest_load([near, disk(500, 2 * READ_S)], READ_S).parts == (near,)
    assert cheapest_load([near, disk(500, READ_S / 2)], READ_S).saved_tokens == 900 + 250


def test_a_slow_tier_before_a_fast_one_is_loaded_for_what_comes_behind() -> None:
    assert cheapest_load([disk(100, 2 * READ_S), host(1000)], READ_S).saved_tokens == 1100 - 200 - 100


def test_where_reading_costs_nothing_nothing_is_loaded() -> None:
    assert cheapest_load([host(1000)], 0.0) == NOTHING


@given(
    st.lists(
        st.builds(
            Loadable,
            tier=st.just("CPU"),
            tokens=st.integers(0, 10_000),
            token_s=st.floats(0.0, 2e-3),
            wait_s=st.floats(0.0, 5.0),
        ),
        max_size=4,
    )
)
def test_no_load_is_dearer_than_reading(loadable: list[Loadable]) -> None:
    load = cheapest_load(loadable, READ_S)
    assert load.saved_tokens >= 0
    assert sum(part.seconds for part in load.parts) <= (load.read_tokens + 0.5) * READ_S + 1e-9
