"""What bench.page makes of its measurements."""

import socket

import pytest

from bench.cpu import Role
from bench.page import Pair, as_markdown, main


def test_a_role_s_use_of_a_core_stands_in_percent_with_the_difference_of_each_pair() -> None:
    pairs = [
        Pair(alone={Role.ROUTER: 0.010}, watched={Role.ROUTER: 0.015, Role.REDIS: 0.001}),
        Pair(alone={Role.ROUTER: 0.020}, watched={Role.ROUTER: 0.027, Role.REDIS: 0.001}),
        Pair(alone={Role.ROUTER: 0.030}, watched={Role.ROUTER: 0.039, Role.REDIS: 0.001}),
    ]
    lines = {" ".join(line.split()) for line in as_markdown(pairs).splitlines()}
    assert "| router | 2.00 [1.00, 3.00] | 2.70 [1.50, 3.90] | +0.70 [+0.50, +0.90] |" in lines
    assert "| all | 2.00 [1.00, 3.00] | 2.80 [1.60, 4.00] | +0.80 [+0.60, +1.00] |" in lines
    assert any(line.startswith("| Redis | 0.00") for line in lines)


@pytest.mark.slow
def test_a_port_that_is_taken_is_said_and_nothing_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["--first-port", str(taken.getsockname()[1]), "--pairs", "1"]) == 2
    assert "Address already in use" in capsys.readouterr().err
