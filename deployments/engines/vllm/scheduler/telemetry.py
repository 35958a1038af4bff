"""What the scheduler plug-in counts, as plain numbers and words that cross a process boundary."""

from collections.abc import Mapping, Sequence
from typing import Any

from deployments.engines.vllm.scheduler.gaps import PromisedGaps
from policies.engine.auto import Auto
from policies.types import BatchPolicy, BatchState, Phase, StepPlan, StepResult, Targeted

_QUANTILES = (0.5, 0.9, 0.99)


class Telemetry:
    """Counters since the start, and the last plan. Reading it costs, counting hardly does.

    Attributes:
        gaps: mean times between tokens, believed and real.
    """

    def __init__(self) -> None:
        self.gaps = PromisedGaps()
        self._plan: StepPlan | None = None
        self._steps = dict.fromkeys(("prefill", "decode", "mixed", "empty"), 0)
        self._preemptions = self._finished = self._switches = 0
        self._busy_s = self._between_s = 0.0
        self.overhead_s = 0.0

    def planned(self, plan: StepPlan, overhead_s: float) -> None:
        if self._plan is not None and self._plan.phase is not plan.phase:
            self._switches += 1
        self._plan = plan
        self.overhead_s += overhead_s

    def spent(self, overhead_s: float) -> None:
        self.overhead_s += overhead_s

    def observed(self, result: StepResult, between_s: float, policy: BatchPolicy) -> None:
        """The policy has observed it; between_s: of its seconds, those before its begin."""
        self._steps[_kind(result)] += 1
        self._preemptions += result.preempted
        self._finished += len(result.finished)
        self._busy_s += result.step_s
        self._between_s += between_s
        believed_s = policy.believed_step_s if isinstance(policy, Auto) else None
        believed_s = result.step_s if believed_s is None else believed_s
        self.gaps.step(result, between_s=between_s, believed_s=believed_s)

    def of_steps(self) -> dict[str, Any]:
        plan = self._plan
        return {
            "phase": plan.phase.value if plan else Phase.MIXED.value,
            "max_batch_size": plan.max_batch_size if plan else None,
            "limited_by": plan.limited_by.value if plan else None,
            "max_batch_tokens": plan.max_batch_tokens if plan else None,
            "max_prefill_tokens": plan.max_prefill_tokens if plan else None,
            "steps": dict(self._steps),
            "phase_switches": self._switches,
            "preemptions": self._preemptions,
            "finished": self._finished,
            "busy_seconds": self._busy_s,
            "between_seconds": self._between_s,
            "planning_seconds": self.overhead_s,
            "promised_gaps": self.gaps.numbers(),
        }

    def of_policy(self, policy: BatchPolicy, state: BatchState) -> dict[str, Any]:
        """A target that is out of reach, step-time fit in seconds, quantiles of the output length, and where there may
        be phases, their length. Of another policy only the first may be known."""
        said = {"out_of_reach": policy.out_of_reach} if isinstance(policy, Targeted) else {}
        if not isinstance(policy, Auto):
            return said
        phases, law = policy.phases, policy.law
        times = phases.model.times()
        forms = {} if times is None else {kind: getattr(times, kind) for kind in ("prefill", "decode", "mixed")}
        names = ("overhead_s", "prefill_s", "decode_s", "kv_s", "interference_s", "prefill_kv_s")
        k = phases.refill(phases.exclusive_slots(state.slots))
        cycle = {} if policy.config.mode == "mixed" else {"phase_steps": phases.phase_length.steps, "refill": k}
        return {
            **said,
            **cycle,  # in "mixed" the policy does not look for one
            "exclusive": phases.exclusive,
            "overcommit": policy.overcommit,
            **policy.step_errors,
            "step_times": {kind: {name: getattr(form, name) for name in names} for kind, form in forms.items()},
            "output_tokens": {} if law is None else {f"p{100 * q:g}": law.quantile(q) for q in _QUANTILES},
        }


class Transfers:
    """KV caches that a connector moved, from the lists of numbers that vLLM's connectors tell."""

    def __init__(self) -> None:
        self._count, self._seconds, self._bytes, self._failures, self._expired = 0, 0.0, 0, 0, 0

    def add(self, told: Mapping[str, Sequence[float]]) -> None:
        self._count += len(told.get("transfer_duration", ()))
        self._seconds += sum(told.get("transfer_duration", ()))
        self._bytes += int(sum(told.get("bytes_transferred", ())))
        for name in ("num_failed_transfers", "num_failed_handshakes", "num_failed_notifications"):
            self._failures += len(told.get(name, ()))
        self._expired += len(told.get("num_kv_expired_reqs", ()))

    def numbers(self) -> dict[str, Any]:
        return {
            "kv_transfers": self._count,
            "kv_transfer_seconds": self._seconds,
            "kv_transfer_bytes": self._bytes,
            "kv_transfer_failures": self._failures,
            "kv_expired": self._expired,
        }


def _kind(result: StepResult) -> str:
    if not result.scheduled_tokens:
        return "empty"
    if not result.decode_requests:
        return "prefill"
    return "mixed" if result.prefill_tokens else "decode"
