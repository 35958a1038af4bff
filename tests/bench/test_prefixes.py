"""What bench.prefixes makes of its measurements."""

import socket

import pytest

from bench.prefixes import HITS, PREDICTED, Run, as_markdown, draw_sessions, main, seen_before


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


def test_a_port_that_is_taken_is_said_and_nothing_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["--first-port", str(taken.getsockname()[1]), "--rounds", "1"]) == 2
    assert "Address already in use" in capsys.readouterr().err
