"""Of how many steps one reads prompts."""

from bisect import bisect_right

import pytest

from policies.engine.cycles import Cycle, best_cycle
from policies.types import Unread

ALONE_S, MIXING_S, TOKEN_S = 0.010, 0.010, 1e-5  # a step of decodes, and what one that reads costs besides


def fits(within_s: float) -> int:
    return bisect_right(range(1, 8193), within_s, key=lambda tokens: ALONE_S + MIXING_S + TOKEN_S * tokens)


def cycle(*prompts: tuple[float, int], promised_s: float = 0.025) -> Cycle:
    unread = Unread([due_s for due_s, _ in prompts], [tokens for _, tokens in prompts])
    return best_cycle(unread, 0.0, promised_s=promised_s, alone_s=ALONE_S, fits=fits, least_tokens=16)


def test_every_step_reads_where_that_keeps_all_promises() -> None:
    assert cycle() == Cycle(1, 0.025, pytest.approx(0.025 / 500, rel=0.01), 0)
    assert cycle((1.0, 400), (2.0, 400)).in_time_tokens == 800
    assert cycle((1.0, 400), (2.0, 400)).steps == 1


def test_steps_save_up_for_one_that_reads_where_more_are_in_time_by_it() -> None:
    found = cycle((0.5, 6000), (0.5, 6000))
    assert found.steps == 2  # 2 000 tokens in 50 ms, where every step reading has 500 in 25
    assert found.longest_s == pytest.approx(2 * 0.025 - ALONE_S)
    assert found.seconds_per_token == pytest.approx(0.05 / 2000, rel=0.01)
    assert found.in_time_tokens == 12_000


def test_saving_up_costs_a_prompt_that_cannot_wait_and_pays_where_more_are_in_time_by_it() -> None:
    assert cycle((0.012, 100), (0.5, 6000), (0.5, 6000)).steps == 1
    assert cycle((0.012, 100), *[(0.5, 6000)] * 3).steps == 2


def test_of_cycles_that_miss_as_many_the_shortest_is_taken() -> None:
    found = cycle(*[(0.1, 8000)] * 3)
    assert (found.steps, found.in_time_tokens) == (1, 0)


def test_late_prompts_take_what_a_longer_cycle_gains_where_that_is_noticeable() -> None:
    def found(mixing_s: float) -> Cycle:
        return best_cycle(
            Unread([1.0], [100], late_tokens=5000),
            0.0,
            promised_s=0.025,
            alone_s=ALONE_S,
            fits=lambda within_s: max(0, int((within_s - ALONE_S - mixing_s) / TOKEN_S)),
            least_tokens=16,
        )

    assert found(MIXING_S).steps == 8
    assert found(0.0005).steps == 1


def test_where_reading_costs_nothing_besides_every_step_reads() -> None:
    free = best_cycle(
        Unread([0.2] * 20, [1000] * 20),
        0.0,
        promised_s=0.025,
        alone_s=ALONE_S,
        fits=lambda within_s: max(0, int((within_s - ALONE_S) / TOKEN_S)),
        least_tokens=16,
    )
    assert free.steps == 1
