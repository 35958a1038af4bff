"""States, results and toy engines for policies that choose phases."""

from policies.engine.exclusive import ExclusiveMixed
from policies.types import (
    BatchState,
    Phase,
    StepCoefficients,
    StepPlan,
    StepResult,
    StepTimes,
)
from tests.policies.states import answers_of, batch_of, queue_of, result_of, state_of
from tests.toy_engine import ToyEngine, random_jobs, run_closed


def make_times(*, prefill_overhead_s: float = 0.04, interference_s: float = 0.0, mixed_s: float = 0.0) -> StepTimes:
    """Step times whose mixed steps cost ``interference_s`` and a fixed ``mixed_s`` more than their two parts."""
    return StepTimes(
        prefill=StepCoefficients(overhead_s=prefill_overhead_s, prefill_s=2e-5),
        decode=StepCoefficients(overhead_s=0.01, decode_s=3e-5),
        mixed=StepCoefficients(overhead_s=0.01 + mixed_s, prefill_s=2e-5, decode_s=3e-5, interference_s=interference_s),
    )


def make_state(*, decoding: int = 0, prefilling: int = 0, waiting: int = 0, **overrides: object) -> BatchState:
    running = batch_of(decoding=decoding, reading=prefilling)
    return state_of(**{"running": running, "waiting": queue_of(waiting), "slots": 64, **overrides})


def make_result(*, phase: Phase, prefill_tokens: int = 0, decodes: int = 0, finished: int = 0) -> StepResult:
    return result_of(
        phase=phase,
        prefill_tokens=prefill_tokens,
        decode_requests=decodes,
        waiting_count=5,
        finished=answers_of(*[10] * finished, prompt_tokens=100),
    )


def saturated(engine: ToyEngine, count: int = 900, mean_output: float = 100.0, seed: int = 1) -> ToyEngine:
    jobs = random_jobs(count, prompt=(50, 150), mean_output=mean_output, seed=seed)
    return run_closed(engine, jobs, 2 * engine.slots)


def steady(engine: ToyEngine) -> list[StepResult]:
    """Steps with a queue, without the first fifth."""
    return [r for r in engine.results[len(engine.results) // 5 :] if r.waiting_count]


def tokens_per_s(results: list[StepResult]) -> float:
    return sum(r.scheduled_tokens for r in results) / sum(r.step_s for r in results)


class Recorder:
    """Passes through to a policy and keeps the mode of every step."""

    def __init__(self, policy: ExclusiveMixed) -> None:
        self.policy = policy
        self.modes: list[bool] = []

    def plan(self, state: BatchState) -> StepPlan:
        plan = self.policy.plan(state)
        self.modes.append(self.policy.exclusive)
        return plan

    def observe(self, result: StepResult) -> None:
        self.policy.observe(result)

    @property
    def switches(self) -> int:
        return sum(a != b for a, b in zip(self.modes, self.modes[1:], strict=False))
