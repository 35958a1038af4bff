from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.engine.drafts import Drafts


def rows_of(count: int) -> np.ndarray:
    return np.arange(count)


def taught(chances: list[float], steps: int = 200, drafted: int = 4, seed: int = 1) -> Drafts:
    """Rows whose places prove right with these chances."""
    rng, drafts = np.random.default_rng(seed), Drafts()
    for row in range(len(chances)):
        drafts.add(row, "standard")
    for _ in range(steps):
        right = rng.random((len(chances), drafted)) < np.array(chances)[:, None]
        accepted = np.where(right.all(axis=1), drafted, right.argmin(axis=1))
        drafts.observe(rows_of(len(chances)), ["standard"] * len(chances), np.full(len(chances), drafted), accepted)
    return drafts


def test_chances_are_learned_by_request() -> None:
    drafts = taught([0.1, 0.5, 0.9], steps=2000)
    assert drafts.chances(rows_of(3)) == pytest.approx([0.1, 0.5, 0.9], abs=0.2)
    assert list(drafts.tokens_per_step(rows_of(3)).argsort()) == [0, 1, 2]


def test_a_new_request_begins_with_what_its_class_has_shown() -> None:
    drafts = taught([0.9] * 4)
    drafts.add(4, "standard")
    drafts.add(5, "another")
    known, unknown = drafts.chances(np.array([4, 5]))
    assert known == pytest.approx(0.9, abs=0.05) and unknown == 0.5
    brought, nothing = drafts.tokens_per_step(np.array([4, 5]))
    assert brought > 3.0 and nothing == 1.0


def test_a_decode_without_drafts_says_nothing_of_them_and_brings_one_token() -> None:
    drafts = taught([0.9])
    before = drafts.chances(rows_of(1))
    for _ in range(200):
        drafts.observe(rows_of(1), ["standard"], np.array([0]), np.array([0]))
    assert drafts.chances(rows_of(1)) == pytest.approx(before)
    assert drafts.tokens_per_step(rows_of(1)) == pytest.approx([1.0], abs=0.01)


def test_where_tokens_cost_nothing_beside_the_step_all_are_taken_and_where_they_cost_much_none() -> None:
    drafts = taught([0.5] * 8)
    drafted = np.full(8, 4)
    cheap = drafts.worth_taking(rows_of(8), drafted, others=0, fixed_s=0.02, token_s=1e-6)
    dear = drafts.worth_taking(rows_of(8), drafted, others=0, fixed_s=1e-4, token_s=1e-2)
    assert cheap.tolist() == [4] * 8 and dear.tolist() == [0] * 8


def test_between_them_those_that_prove_right_get_longer_drafts() -> None:
    drafts = taught([0.15, 0.5, 0.95], steps=2000)
    taken = drafts.worth_taking(rows_of(3), np.full(3, 4), others=0, fixed_s=0.01, token_s=0.001)
    assert taken[0] < taken[1] < taken[2] == 4


def test_now_and_then_all_are_taken_so_that_what_is_not_tried_is_learned_again() -> None:
    drafts = taught([0.01])
    taken = [
        int(drafts.worth_taking(rows_of(1), np.array([4]), others=0, fixed_s=1e-4, token_s=1e-2)[0]) for _ in range(64)
    ]
    assert taken.count(4) == 2 and taken.count(0) == 62


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.floats(0.05, 0.95), st.integers(0, 3)), min_size=1, max_size=3),
    st.integers(0, 3),
    st.floats(1e-4, 1e-1),
    st.floats(1e-5, 1e-2),
)
def test_no_other_choice_brings_more_tokens_a_second(
    requests: list[tuple[float, int]], others: int, fixed_s: float, token_s: float
) -> None:
    drafts = taught([chance for chance, _ in requests], steps=20)
    rows, drafted = rows_of(len(requests)), np.array([each for _, each in requests])
    chances = drafts.chances(rows)

    def brought_a_second(taken: tuple[int, ...]) -> float:
        gained = sum(chance**place for chance, most in zip(chances, taken, strict=True) for place in range(1, most + 1))
        decodes = len(requests) + others
        return float((decodes + gained) / (fixed_s + token_s * (decodes + sum(taken))))

    taken = drafts.worth_taking(rows, drafted, others=others, fixed_s=fixed_s, token_s=token_s)
    best = max(map(brought_a_second, product(*(range(each + 1) for each in drafted))))
    assert brought_a_second(tuple(taken)) == pytest.approx(best)


def test_rows_grow_with_the_requests() -> None:
    drafts = Drafts()
    for row in (0, 255, 256, 2000):
        drafts.add(row, "standard")
    assert drafts.chances(np.array([2000])) == [0.5]
