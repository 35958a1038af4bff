"""Rows of requests, and that a snapshot shows of each what is known of it."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from deployments.engines.vllm.request_metadata import RequestMetadata
from deployments.engines.vllm.scheduler.columns import Columns
from tests.virtual_engine import VirtualEngine

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]


def write(columns: Columns, row: int, number: int) -> None:
    columns.write(
        row,
        prompt_tokens=number,
        class_index=1,
        predicted_output_tokens=None if number % 2 else 3.0 * number,
        deadline_s=number + 0.5,
        first_token_s=np.nan,
        tpot_s=np.inf,
        ends_by_s=number + 9.5,
    )


def test_rows_keep_what_was_written_while_others_come_and_go() -> None:
    columns, rng, rows = Columns(), random.Random(1), dict[int, int]()
    for number in range(2000):
        rows[number] = columns.add()
        write(columns, rows[number], number)
        if rng.random() < 0.6:
            columns.remove(rows.pop(rng.choice(list(rows))))
    assert len(rows) == len(set(rows.values())) > 600
    counts, times = columns.pick(np.array(list(rows.values())))
    assert counts.tolist() == [list(rows), [1] * len(rows)]
    assert times[0].tolist() == pytest.approx([np.nan if each % 2 else 3.0 * each for each in rows], nan_ok=True)
    assert times[1].tolist() == [each + 0.5 for each in rows]
    assert times[4].tolist() == [each + 9.5 for each in rows]


@pytest.mark.parametrize("depth", [1, 2], ids=["sync", "two steps in flight"])
def test_a_snapshot_shows_of_each_what_is_known_of_it(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = VirtualEngine({"mode": "auto", "classes": ["a", "b"]}, slots=16, blocks=60, depth=depth)
    taker, shown, rng = engine.scheduler.planner._taker, list[str](), random.Random(2)

    def running(requests: Any, *args: Any, running: Callable[..., Any] = taker._running) -> Any:
        found = running(requests, *args)
        for at, request in enumerate(requests):
            known = taker._known[request]
            shown.append(request.request_id)
            assert found.prompt_tokens[at] == request.num_prompt_tokens
            assert found.class_index[at] == known.class_index
            assert found.predicted_output_tokens[at] == known.told.predicted_output_tokens
            assert (found.deadline_s[at], found.tpot_s[at]) == (known.deadline_s, known.tpot_s)
            assert found.ends_by_s[at] == known.ends_by_s
            assert found.first_token_s[at] == pytest.approx(known.first_token_s, nan_ok=True)
        return found

    monkeypatch.setattr(taker, "_running", running)
    for number in range(150):
        told = RequestMetadata(
            slo_class=rng.choice(["a", "b", None]), predicted_output_tokens=number, ttft_left_s=9.0, tpot_s=0.1 + number
        )
        engine.add(f"r{number}", rng.randint(8, 200), rng.randint(1, 60), extra_args=told.as_extra_args())
        engine.step(rng.choice([0, 3, 6]))
        if number == 70:
            engine.scheduler.control({"classes": ["b", "c"], "tpot_s": 4.0})
    engine.run()
    assert len(set(shown)) > 100 and engine.preempted


@pytest.mark.parametrize("predicted", [None, 3.0, 1e300, np.inf, np.nan])
def test_an_answer_is_taken_to_be_no_longer_than_its_own_limit(predicted: float | None) -> None:
    engine = VirtualEngine({"mode": "mixed", "e2e_s": 1.0})
    planner = engine.scheduler.planner
    told = RequestMetadata(predicted_output_tokens=predicted).as_extra_args()
    request = engine.add("one", 10, 5, max_tokens=7, extra_args=told)
    waiting = planner._taker.waiting(request, 0.0, planner.policy.answers)
    assert all(1.0 <= each <= 7.0 for each in waiting.left)
