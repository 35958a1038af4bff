"""Steps that take otherwise than policies believe."""

from dataclasses import replace

import numpy as np
import pytest

from policies.engine.stock import Stock
from policies.errors import ConfigError
from policies.types import StepCoefficients, StepResult, StepTimes
from simulator.cluster import ClusterConfig, run
from simulator.core import EventLoop
from simulator.engine import Engine
from simulator.engines import engine_profile
from simulator.real_times import RealClock, RealTimes
from simulator.workload import Workload

FORM = StepCoefficients(overhead_s=0.01, prefill_s=1e-5, decode_s=1e-4)
TIMES = StepTimes(prefill=FORM, decode=FORM, mixed=FORM)
ALONE = Workload.of("one", np.zeros(1), np.full(1, 1000), np.full(1, 101))


def decoding_s(**real: float) -> float:
    """Seconds from the first of 101 tokens to the last one, of a request that is alone."""
    config = ClusterConfig(times=TIMES, real_times=RealTimes(**real) if real else None)  # type: ignore[arg-type]
    (request,) = run(config, ALONE).requests
    assert request.finished_s is not None and request.first_token_s is not None
    return request.finished_s - request.first_token_s


@pytest.mark.parametrize(
    ("real", "expected_s"),
    [
        ({}, 1.01),
        ({"factor": 1.5}, 1.515),
        ({"between_s": 0.004, "between_decode_s": 0.001}, 1.51),
    ],
)
def test_steps_and_what_is_between_them_take_their_time(real: dict[str, float], expected_s: float) -> None:
    assert decoding_s(**real) == pytest.approx(expected_s)


def test_what_is_between_steps_is_in_none() -> None:
    config = ClusterConfig(times=TIMES, real_times=RealTimes(between_s=1.0))
    (engine,) = run(config, ALONE).engines
    assert engine.totals.busy_s == pytest.approx(1.01 + 0.02)


def test_each_engine_wanders_by_itself_and_the_same_each_time() -> None:
    wandering = RealTimes(wander=0.2, wander_steps=10)
    first, again, other = (
        [clock.step_s(decode_requests=1) for _ in range(2000)]
        for clock in (RealClock(TIMES, wandering, seed) for seed in (0, 0, 1))
    )
    assert first == again != other
    logs = np.log(np.array(first) / 0.0101)
    assert logs.std() == pytest.approx(0.2, abs=0.05)
    assert np.corrcoef(logs[:-1], logs[1:])[0, 1] == pytest.approx(np.exp(-0.1), abs=0.05)


def test_it_is_read_from_what_a_command_is_given() -> None:
    assert RealTimes.parsed("factor=1.2,wander_steps=50") == RealTimes(factor=1.2, wander_steps=50)
    for wrong in ("factor", "factor=a", "speed=1", "factor=0", "wander=-1"):
        with pytest.raises(ConfigError):
            RealTimes.parsed(wrong)


def test_a_measured_engine_has_a_price_of_mixing() -> None:
    times = engine_profile("Qwen3-8B@h100_vllm").times
    assert times.mixed.overhead_s > times.decode.overhead_s + 0.009
    assert replace(times, mixed=times.decode) != times


def test_policies_hear_of_what_is_between_steps_as_live_ones_do() -> None:
    told: list[float] = []
    config = ClusterConfig(times=TIMES, real_times=RealTimes(between_s=0.004))

    class Listening(Stock):
        def observe(self, result: StepResult) -> None:
            told.append(result.step_s)

    engine = Engine("one", config.engine, Listening(), config.engine_clock(0), lambda now_s, engine, ended: ())
    loop = EventLoop()
    loop.add(engine.submit(ALONE.requests()[0], 0.0))
    loop.run()
    assert told == pytest.approx([0.024, *[0.0141] * 100])
