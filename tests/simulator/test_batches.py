"""The experiment on batches: what comes when, and what is counted."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from policies.errors import InputError
from simulator.cluster import run
from simulator.reproduce import batches
from simulator.reproduce.batches import Found, Job, day_of, measured, paced
from simulator.reproduce.common import Setting
from simulator.workload import Workload, poisson

SECONDS = 30.0


def trace(count: int = 400) -> Workload:
    rng = np.random.default_rng(0)
    prompts, answers = rng.integers(100, 2000, count), rng.integers(20, 400, count)
    return Workload.of("trace", poisson(5.0, count, rng), prompts, answers)


def test_requests_come_at_the_rate_of_each_window_and_the_trace_begins_again() -> None:
    rates = (20.0, 5.0, 40.0)
    online = paced(trace(), rates, SECONDS)
    counts, _ = np.histogram(online.arrival_s, np.linspace(0.0, SECONDS, 4))
    assert counts / 10.0 == pytest.approx(np.array(rates), rel=0.2)
    assert len(online) > 400
    assert online.prompt_tokens[400:500].tolist() == trace().prompt_tokens[:100].tolist()
    assert set(online.slo_class or ()) == {"interactive"}


def test_bursts_of_the_trace_stay_bursts() -> None:
    bursts = trace().arriving(np.repeat(np.arange(40.0), 10))
    gaps_s = np.diff(paced(bursts, (10.0, 2.0), SECONDS).arrival_s)
    assert np.mean(gaps_s < 1e-9) == pytest.approx(0.9, abs=0.02)


def rates_file(folder: Path, rates: list[float]) -> Path:
    rows = [f"deepseek-r1,{600 * number},7,{rate},1,1" for number, rate in enumerate(rates)]
    head = "model,window_start_s,active_clients,requests_per_s,rate_weighted_client_iat_cv,rate_share"
    file = folder / "rates.csv.gz"
    file.write_bytes(gzip.compress("\n".join([head, "m-large,0,7,99,1,1", *rows, ""]).encode()))
    return file


def test_a_day_is_read_of_one_model(tmp_path: Path) -> None:
    assert day_of(rates_file(tmp_path, [1.0, 2.0] * 72)).tolist() == [1.0, 2.0] * 72
    with pytest.raises(InputError, match="144 rates of deepseek-r1, got 3"):
        day_of(rates_file(tmp_path, [1.0, 2.0, 3.0]))


@pytest.mark.long
def test_batches_add_tokens_by_window_and_cost_others_no_more_than_a_point() -> None:
    job = Job("half", (8.0, 2.0, 8.0), SECONDS, has_batches=False)
    alone, beside = (measured(trace(), 24.0, job._replace(has_batches=each)) for each in (False, True))
    assert alone.requests == beside.requests == len(paced(trace(), job.rates, SECONDS))
    assert beside.in_time > alone.in_time - 0.01
    assert sum(alone.batches) == 0 and min(beside.batches) > 0
    assert beside.batches[1] > beside.batches[0], "more while less else is to be done"
    assert beside.tokens > 1.3 * alone.tokens


def test_requests_of_batches_are_counted_by_themselves_and_stop_with_the_others() -> None:
    online, backlog = paced(trace(), (2.0,), SECONDS / 3), trace().sample(10_000, np.random.default_rng(0))
    finished = run(batches.served_by(), online, backlog=backlog)
    assert len(finished.requests) == len(online)
    assert 0 < len(finished.backlog) < 10_000
    assert all(request.finished_s is not None for request in finished.backlog)
    assert max(request.arrival_s for request in finished.backlog) <= finished.makespan_s


def test_more_requests_than_a_replica_answers_are_not_all_in_time() -> None:
    assert measured(trace(), 24.0, Job("beyond", (100.0,), SECONDS / 5, has_batches=False)).in_time < 0.9


def test_batches_stand_behind_all_others_as_they_are_served() -> None:
    config = batches.served_by()
    assert config.router.fills_idle == {"offline": "deadline"}
    assert config.router.credit_s == batches.TARGET.ttft_s


def results() -> dict[Job, Found]:
    """Two loads of two windows."""
    tokens = {(batches.DAY, False): ((60, 40), (0, 0)), (batches.DAY, True): ((60, 30), (50, 60))}
    tokens |= {("half", False): ((500, 500), (0, 0)), ("half", True): ((500, 500), (0, 0))}
    return {
        Job(load, (1.0, 1.0), 3600.0, has_batches): Found(200, 0.97 if has_batches else 0.98, online, of_batches)
        for (load, has_batches), (online, of_batches) in tokens.items()
    }


def test_the_table_has_a_row_a_load_and_says_where_nothing_is_gained() -> None:
    _, _, day, half = batches.table_of(results())
    assert day.startswith("| a day | 200 | 98.00% | 97.00% | -1.00 |") and day.endswith("| ×2.00 |")
    assert half.endswith("| ×1.00 |")


def test_the_day_is_drawn_by_the_hour(tmp_path: Path) -> None:
    batches.draw_day(results(), Setting(figures=tmp_path))
    assert (tmp_path / "batches.png").read_bytes().startswith(b"\x89PNG")
