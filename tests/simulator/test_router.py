"""What the simulated router has of the one that serves: turns of keys, owed starts, refusals, recalls."""

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.errors import ConfigError
from policies.router.admission import ClassLimits
from policies.router.placement import Offer
from policies.router.promise import Promise
from policies.router.tickets import Ticket
from policies.types import StepCoefficients, StepTimes
from simulator.cluster import ClusterConfig, Run, run
from simulator.comparisons import PLACEMENTS
from simulator.engine import EngineConfig
from simulator.requests import Request
from simulator.router import RouterConfig
from simulator.workload import Workload

STEP = StepCoefficients(overhead_s=0.01, prefill_s=1e-4)
TIMES = StepTimes(prefill=STEP, decode=STEP, mixed=STEP)


def served(
    arrivals_s: list[float], *, slots: int = 1, output: int = 100, promised_s: float = 1.0, **others: Any
) -> Run:
    """Requests of 100 prompt tokens; an answer takes a second."""
    count = len(arrivals_s)
    columns = {name: others.pop(name) for name in ("slo_class", "api_key") if name in others}
    work = Workload.of("equal", np.array(arrivals_s), np.full(count, 100), np.full(count, output), **columns)
    engine = EngineConfig(slots=slots, total_blocks=4000, ordered=True)
    config = ClusterConfig(times=TIMES, engine=engine, promises={"*": Promise(ttft_s=promised_s)})
    return run(replace(config, router=RouterConfig(**others)), work)


def by_start(requests: list[Request]) -> list[Request]:
    return sorted(requests, key=lambda request: request.started_s or 0.0)


def test_a_key_that_floods_and_one_that_asks_for_little_take_turns() -> None:
    keys = ["flood"] * 40 + ["small"] * 5
    result = served([0.0] * 45, api_key=keys, promised_s=0.1)
    first = Counter(request.api_key for request in by_start(result.requests)[1:11])
    assert first["small"] == 5


def test_one_start_in_ten_is_owed_to_late_requests_whose_patience_is_over() -> None:
    """Six come at once, and only two of them can be in time; of those that follow one always is."""
    arrivals_s = [0.0] * 6 + np.arange(0.1, 40.0, 0.4).tolist()

    def first_late_start_s(late_patience_s: float) -> float:
        finished = served(arrivals_s, promised_s=2.0, late_patience_s=late_patience_s)
        return min(r.started_s or 0.0 for r in finished.requests if (r.ttft_s or 0.0) > 2.0)

    assert first_late_start_s(5.0) < 12.0 < first_late_start_s(1e6)


def test_a_request_that_would_be_late_is_refused_by_its_predicted_wait() -> None:
    limits = {"": ClassLimits(refuses_late=True)}
    every, some = served([0.0] * 200, promised_s=3.0), served([0.0] * 200, promised_s=3.0, limits=limits)
    assert not every.refused
    assert 0 < len(some.refused) < 200
    assert len(some.requests) + len(some.refused) == 200


def test_a_full_queue_refuses_and_of_it_a_key_has_no_more_than_its_share() -> None:
    limits = {"": ClassLimits(max_waiting=10, max_key_share=0.5)}
    keys = ["flood"] * 20 + ["small"] * 20
    result = served([0.0] * 40, api_key=keys, promised_s=1e3, limits=limits)
    assert Counter(request.api_key for request in result.requests) == {"flood": 6, "small": 5}


def test_what_fills_idle_capacity_gives_its_slot_back_and_goes_on_with_its_tokens() -> None:
    classes = ["nightly"] * 2 + ["chat"]
    result = served([0.0, 0.0, 0.5], slots=2, output=500, slo_class=classes, fills_idle={"nightly": "deadline"})
    chat = next(request for request in result.requests if request.slo_class == "chat")
    assert (chat.started_s or math.inf) < 1.0, "without a slot called back it would wait for five seconds"
    assert all(request.generated_tokens == 500 for request in result.requests)
    last_s = max(request.finished_s or 0.0 for request in result.requests if request.slo_class == "nightly")
    assert 9.4 < last_s < 9.7, "half a second's tokens are kept, and it goes on when the other one ends"


def test_a_request_gives_its_slot_back_no_more_often_than_it_may() -> None:
    classes = ["nightly", *["chat"] * 4]
    never = served(
        [0.0, 1.0, 2.0, 3.0, 4.0], output=500, slo_class=classes, fills_idle={"nightly": "deadline"}, max_recalls=0
    )
    assert by_start(never.requests)[1].started_s == pytest.approx(5.0, abs=0.1)


offers = st.builds(
    Offer,
    st.floats(0, 9),
    st.floats(0, 9),
    st.integers(0, 9),
    st.floats(0, 1),
    st.floats(0, 9),
    st.integers(1, 9),
    st.floats(0, 1),
)


@pytest.mark.parametrize("name", PLACEMENTS)
@given(offered=st.dictionaries(st.sampled_from("abcd"), offers, min_size=1), hits=st.integers(0, 100))
def test_a_placement_chooses_an_offer_whatever_the_order_of_all(
    name: str, offered: dict[str, Offer], hits: int
) -> None:
    ticket = Ticket(
        request_id="x",
        bin_index=0,
        deadline_key=0.0,
        work_s=1.0,
        router_id="",
        unread_tokens=100,
        prefixes=(("a", hits),),
    )
    chosen = PLACEMENTS[name]()(ticket, offered)
    assert chosen in offered
    assert PLACEMENTS[name]()(ticket, dict(reversed(offered.items()))) == chosen


def test_a_placement_that_there_is_not_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="placement must be one of soonest_first_token, .*got 'fcfs'"):
        ClusterConfig(times=TIMES, placement="fcfs")


def test_what_waits_behind_requests_that_an_engine_refuses_gets_their_slots() -> None:
    """No engine takes any."""
    work = Workload.of("equal", np.zeros(5), np.full(5, 100), np.full(5, 10))
    engine = EngineConfig(slots=1, total_blocks=4000, max_num_queued_reqs=0)
    assert len(run(ClusterConfig(times=TIMES, engine=engine), work).refused) == 5
