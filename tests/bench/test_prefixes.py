"""What bench.prefixes makes of its measurements."""

import pytest

from bench.prefixes import (
    BLIND,
    HITS,
    PREDICTED,
    RAY,
    SLUICE,
    Run,
    as_markdown,
    draw_sessions,
    ratios_as_markdown,
    seen_before,
)


def test_every_prompt_of_a_session_begins_as_the_one_before() -> None:
    sessions = draw_sessions(3, 4, first=40, more=20, think_s=1.0, seed=7)
    for session in sessions:
        for before, after in zip(session.prompts, session.prompts[1:], strict=False):
            assert after[: len(before)] == before
            assert 10 <= len(after) - len(before) <= 30
    assert sessions == draw_sessions(3, 4, first=40, more=20, think_s=1.0, seed=7)
    assert len({tuple(session.prompts[0]) for session in sessions}) == 3
    assert seen_before(sessions) == sum(len(prompt) for session in sessions for prompt in session.prompts[:3])


def test_hits_are_shares_of_what_could_be_found_and_only_routers_predict() -> None:
    of_sluice = Run.of("s", [0.1, 0.3], {HITS[0]: 60.0, PREDICTED: 50.0}, 100)
    of_plain = Run.of("v", [0.2, 0.6], {HITS[1]: 30.0}, 100)
    assert (of_sluice.hits, of_sluice.predicted, of_sluice.mean_s) == (0.6, 0.5, pytest.approx(0.2))
    assert (of_plain.hits, of_plain.predicted) == (0.3, None)
    table = " ".join(as_markdown([of_sluice, of_plain]).split())
    assert "| s | 0.200 [0.200, 0.200] |" in table
    assert "| 30.0% [30.0%, 30.0%] | |" in table


def a_run(system: str, mean_s: float, p99_s: float) -> Run:
    return Run(system=system, mean_s=mean_s, p50_s=mean_s / 2, p99_s=p99_s, hits=0.5, predicted=None)


def test_sluice_is_compared_with_each_other_system_round_by_round() -> None:
    of_sluice, of_ray = [a_run(SLUICE, 0.2, 1.0), a_run(SLUICE, 0.6, 3.0)], [a_run(RAY, 0.4, 1.0), a_run(RAY, 0.6, 2.0)]
    table = " ".join(ratios_as_markdown([*of_sluice, *of_ray]).split())
    assert f"| {RAY} | 0.75 [0.50, 1.00] | 0.75 [0.50, 1.00] | 1.25 [1.00, 1.50] |" in table
    assert ratios_as_markdown(of_sluice) == ratios_as_markdown([a_run(BLIND, 1.0, 2.0)]) == ""
