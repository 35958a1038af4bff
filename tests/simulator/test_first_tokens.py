"""Predicted first tokens beside true ones."""

import numpy as np
import pytest

from policies.errors import InputError
from simulator.reproduce.first_tokens import compared, measured
from simulator.requests import Request
from simulator.workload import Workload, poisson


def request(foreseen_s: float | None, true_s: float, promised_s: float = 2.0) -> Request:
    each = Request(request_id="one", arrival_s=10.0, prompt_tokens=1, output_tokens=1, promised_ttft_s=promised_s)
    each.foreseen_ttft_s, each.first_token_s = foreseen_s, 10.0 + true_s
    return each


def test_errors_are_summed_whatever_their_sign() -> None:
    found = compared([request(1.0, 0.5), request(1.0, 1.5), request(2.0, 3.0)])
    assert found.error == pytest.approx(0.5)
    assert found.bias == pytest.approx(5.0 / 4.0)
    assert (found.mistaken, found.kept) == (pytest.approx(1 / 3), pytest.approx(2 / 3))


@pytest.mark.parametrize("requests", [[], [request(None, 1.0)]])
def test_nothing_is_said_of_what_was_not_predicted(requests: list[Request]) -> None:
    with pytest.raises(InputError, match="predicted"):
        compared(requests)


def test_with_room_for_all_first_tokens_come_as_predicted() -> None:
    rng = np.random.default_rng(0)
    trace = Workload.of("trace", poisson(3.0, 600, rng), rng.integers(100, 2000, 600), rng.integers(20, 300, 600))
    for found in measured(trace, (2.0, 0)).values():
        assert found.error < 0.15
        assert (found.mistaken, found.kept) == (0.0, 1.0)
