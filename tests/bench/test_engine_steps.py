import random

import pytest

from bench.deployments.engine_steps import StepRecorder, law_of, seconds_by
from policies.errors import InputError
from policies.types import StepResult
from tests.virtual_engine import TIMES, VirtualEngine, run_closed

pytestmark = pytest.mark.slow

CHUNKS = 128  # a budget that most prompts are longer than


def recorded(mode: str, depth: int) -> tuple[VirtualEngine, list[StepResult]]:
    """A run in a cache so small that some are preempted."""
    rng = random.Random(3)
    engine = VirtualEngine({"mode": mode, "admission": "slots"}, slots=16, blocks=80, budget=CHUNKS, depth=depth)
    recorder = StepRecorder(engine.scheduler, engine.clock.now)
    run_closed(engine, [(rng.randint(8, 300), rng.randint(1, 120)) for _ in range(40)], clients=16)
    recorder.close()
    assert "schedule" not in vars(engine.scheduler)
    return engine, recorder.steps


@pytest.mark.parametrize("depth", [1, 2], ids=["sync", "two steps in flight"])
@pytest.mark.parametrize("mode", ["mixed", "exclusive"])
def test_steps_hold_and_take_what_the_plug_in_says_of_them(mode: str, depth: int) -> None:
    engine, steps = recorded(mode, depth)
    planned = [step for step in engine.results if step.scheduled_tokens]
    assert engine.preempted and any(step.prefill_tokens == CHUNKS for step in steps)

    def told(step: StepResult) -> tuple[float, ...]:
        return (step.prefill_tokens, step.prefill_requests, step.decode_requests, step.preempted, step.running_count)

    assert [told(step) for step in steps] == [told(step) for step in planned]
    # At its first step the plug-in still has the clock that this one was put in the place of.
    assert [step.step_s for step in steps[1:]] == pytest.approx([step.step_s for step in planned[1:]])
    # The plug-in follows a mean; the engine's clock knows the contexts themselves.
    assert [step.step_s for step in steps] == pytest.approx([seconds_by(TIMES, [step]) for step in steps])


def test_one_law_of_all_runs_gives_each_its_seconds() -> None:
    runs = [recorded(mode, 1)[1] for mode in ("stock", "exclusive")]
    times = law_of(runs)
    for steps in runs:
        assert seconds_by(times, steps) == pytest.approx(sum(step.step_s for step in steps), rel=0.01)
    assert seconds_by(times, []) == 0.0


def test_steps_of_one_kind_have_no_law() -> None:
    engine = VirtualEngine({"mode": "stock"})
    recorder = StepRecorder(engine.scheduler, engine.clock.now)
    engine.add("only", 16, 40)
    engine.run()
    with pytest.raises(InputError, match="prefill"):
        law_of([recorder.steps])
