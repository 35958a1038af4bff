"""Which steps are measured, in which order and for how long: vLLM's real scheduler on a virtual clock."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from deployments.command.calibration import PREDICTED_BATCHES, Batch, Calibration, Progress
from policies.errors import InputError
from policies.types import StepCoefficients, StepTimes
from tests.virtual_engine import VirtualEngine

pytestmark = pytest.mark.slow

TIMES = StepTimes(
    prefill=StepCoefficients(overhead_s=0.016, prefill_s=1.7e-5),
    decode=StepCoefficients(overhead_s=0.009, decode_s=2.6e-5, kv_s=5e-8),
    mixed=StepCoefficients(overhead_s=0.019, prefill_s=2e-5, decode_s=4e-5, kv_s=6e-8, interference_s=1e-6),
)


class CurvedTimes(StepTimes):
    """No linear law: steps get longer with the square of what they hold."""

    def step_s(
        self,
        *,
        prefill_tokens: float = 0.0,
        decode_requests: float = 0.0,
        kv_tokens: float = 0.0,
        prefill_kv_tokens: float = 0.0,
        encoder_tokens: float = 0.0,
    ) -> float:
        held = prefill_tokens + decode_requests + kv_tokens / 100.0
        return 0.001 + 1e-8 * held**2


class Engine:
    """The virtual engine, as a calibration drives it."""

    def __init__(self, times: StepTimes = TIMES, *, slots: int = 65, blocks: int = 8192, budget: int = 2048) -> None:
        settings = {"mode": "mixed", "admission": "slots"}
        self.virtual = VirtualEngine(settings, slots=slots, blocks=blocks, budget=budget, times=times)
        self.scheduler = self.virtual.scheduler
        self.slots, self.max_batch_tokens, self.max_request_tokens = slots, budget, 2048
        self.cache_tokens = 16 * blocks
        self._added = 0

    def add(self, prompt_tokens: int, output_tokens: int) -> str:
        self._added += 1
        self.virtual.add(f"r{self._added}", prompt_tokens, output_tokens + 1, max_tokens=output_tokens)
        return f"r{self._added}"

    def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self.virtual.abort(request_id)

    def step(self) -> None:
        self.virtual.step()

    @property
    def busy(self) -> bool:
        return self.virtual.busy

    @property
    def now_s(self) -> float:
        return self.virtual.clock.now()


def run(
    engine: Engine, *, error: float = 0.0, seconds: float = math.inf, most_batch: int | None = None
) -> tuple[Calibration, list[Progress]]:
    calibration = Calibration(engine, steps=6, seconds=seconds, most_batch=most_batch)
    told = list(calibration.run(error))
    assert engine.virtual.all_free
    assert engine.scheduler.on_step is None
    return calibration, told


def assert_close(found: StepTimes, expected: StepTimes, *, within: float) -> None:
    for prompt, size, context in ((0, 1, 64), (0, 64, 1024), (512, 0, 0), (512, 16, 1024), (128, 64, 256)):
        held = {"prefill_tokens": prompt, "decode_requests": size, "kv_tokens": size * context}
        assert found.step_s(**held) == pytest.approx(expected.step_s(**held), rel=within)


def test_all_sizes_contexts_and_prompts_are_measured_where_no_error_is_allowed() -> None:
    calibration, told = run(Engine())
    assert len(calibration.batches) == told[-1].total == 1 + 4 * 3
    held = {(step.decode_requests, step.prefill_tokens) for step in calibration.measured.steps}
    assert held == {(size, prompt) for size in (0, 1, 4, 16, 64) for prompt in (0, 32, 128, 512)} - {(0, 0)}
    assert len(calibration.measured.steps) == 3 + 12 * 4
    assert_close(calibration.measured.times(), TIMES, within=1e-3)


def test_it_ends_once_batches_farthest_from_all_others_were_predicted() -> None:
    calibration, told = run(Engine(), error=0.01)
    assert calibration.batches[1:3] == [Batch(1, 64, (0, 32, 128, 512)), Batch(64, 1024, (0, 32, 128, 512))]
    least = 1 + 3 + PREDICTED_BATCHES  # prompts alone, what a fit needs, what it predicts
    assert [progress.done for progress in told] == list(range(1, least + 1))
    assert [progress.times is None for progress in told[:4]] == [True, True, True, False]
    assert [progress.error_fraction is None for progress in told] == [True] * (least - 1) + [False]
    assert_close(calibration.measured.times(), TIMES, within=1e-3)


def test_what_no_linear_law_predicts_is_measured_to_the_end() -> None:
    times = CurvedTimes(prefill=TIMES.prefill, decode=TIMES.decode, mixed=TIMES.mixed)
    _, told = run(Engine(times), error=0.05)
    assert told[-1].done == told[-1].total
    assert told[-1].error_fraction is not None and told[-1].error_fraction > 0.05


@pytest.mark.parametrize("seconds", [3.0, 6.0, 10.0])
def test_a_budget_is_kept_and_what_was_measured_in_it_is_enough_for_a_fit(seconds: float) -> None:
    engine = Engine()
    calibration, told = run(engine, seconds=seconds)
    assert engine.now_s <= seconds
    assert told[-1].done < told[-1].total
    assert all(progress.left_s <= seconds - progress.took_s for progress in told)
    assert_close(calibration.measured.times(), TIMES, within=0.05)


def test_a_budget_too_short_for_a_fit_is_kept_too() -> None:
    engine = Engine()
    calibration, _ = run(engine, seconds=0.5)
    assert engine.now_s <= 0.5
    with pytest.raises(InputError, match="at least 3"):
        calibration.measured.times()


def test_one_step_is_not_cut_off_however_long_it_is() -> None:
    slow = replace(TIMES, prefill=StepCoefficients(overhead_s=30.0))
    engine = Engine(slow)
    _, told = run(engine, seconds=10.0)
    assert told == [] and engine.now_s == pytest.approx(30.0, abs=0.1)


def test_the_time_left_is_foreseen() -> None:
    engine = Engine()
    _, told = run(engine)
    for progress in told[3:]:  # since there is a fit
        assert progress.left_s == pytest.approx(engine.now_s - progress.took_s, rel=0.1, abs=0.1)


def test_batches_keep_to_slots_to_the_cache_and_to_what_was_asked_for() -> None:
    calibration, _ = run(Engine(slots=65, blocks=512))
    assert {batch.size * batch.context for batch in calibration.batches} <= set(range(512 * 16))
    assert (
        Batch(64, 64, (0, 32, 128, 512)) not in calibration.batches
    )  # with what the requests get while it is measured
    assert max(batch.size for batch in run(Engine(slots=16))[0].batches) == 4
    assert max(batch.size for batch in run(Engine(), most_batch=16)[0].batches) == 16
