"""Exclusive or mixed batching, decided online: phases of pure prefill and pure decode, or both in one step.

Source: 003 (EB+), the online controller: sliding-window length statistics, phase length, crossover with smoothed
occupancy and KV gate. The closed forms live in ``policies.engine.phases``; the paper's own rules, such
as theta0, eq. 8 as printed, the priority margin and the bound N*, in ``policies.papers.exclusive_mixed_literal``.
Departures, with ERRATA numbers:

* The phase is planned by the integer T of 3.4 by default and ended by count: a refill is due once the slots that could
  be filled reach share/(1-share) of those that decode, with share = 1/E[ceil(O/T)]. In a full batch that is the
  refill T would bring on average, but steadier: -0.2 to +0.5 % throughput in simulation against T steps by the clock,
  over geometric, uniform, lognormal and production lengths. Below saturation no request waits for k arrivals (3.8).
* A refill takes ALL free slots (3.8), and one is due at once when nothing decodes.
* What mixed batching costs is reckoned step by step: with answers longer than the batch is wide, most of its steps
  hold no prefill, which 003's formula does not know.
* Mode switches are relative to the cost of a token (3.11). Step times are measured before an engine takes requests, or
  come from a profile; the fit goes on with the mode in use, so that a choice by wrong ones is taken back. Of the other
  mode nothing is tried out on requests. While no prefill alone has been measured, it is taken for the prompt's part of
  a mixed step, which errs towards mixing.
"""

from dataclasses import dataclass, field
from math import expm1, floor
from typing import Literal

from policies.checks import ROUNDING, require_at_least, require_one_of, require_probability
from policies.engine.phases import (
    PhaseLength,
    RefillLimits,
    WorkloadMeans,
    best_phase_of_survival,
    exclusive_throughput,
    exclusive_token_s,
    mixed_steps_throughput,
)
from policies.engine.plans import STANDING_SHARE, STANDING_STEPS, capped_plan
from policies.engine.step_time import StepTimeConfig, StepTimeModel
from policies.lengths.statistics import MAX_HAZARD, LengthMoments, LengthStatistics, LifeTable, SurvivalLaw
from policies.types import LEAST_STEP_S, BatchState, Limit, Phase, StepPlan, StepResult, StepTimes

# A refill is due at the latest when nine times as many could start as still decode: a tail of a few would keep slots
# empty for as long as it lives.
MOST_SHARE = 0.9
# A phase that lasts longer than this many times its length ends as soon as any request can start.
_PATIENCE = 1.5
# Weight of the newest step with a prefill in the smoothed number of running requests: some ten refills are remembered.
_OCCUPANCY_SMOOTHING = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class ExclusiveMixedConfig:
    """EB+.

    Attributes:
        mode: "auto" chooses by cost, "exclusive" and "mixed" stay what they say.
        step_times: how step times are learned, and their prior.
        hysteresis_fraction: advantage, relative to what a token costs in exclusive batching, that a mode switch needs.
        replan_steps: steps between two looks at lengths, step times and mode.
        min_samples: completions before lengths count as known.
        window: as in ``LengthStatistics``.
        speculates: as in ``ForecastAdmissionConfig``.
        initial_phase_steps, initial_slots_fraction: the phase until lengths and step times are known.

    Raises:
        ConfigError: a value is out of bounds.
    """

    mode: Literal["auto", "exclusive", "mixed"] = "auto"
    step_times: StepTimeConfig = field(default_factory=StepTimeConfig)
    hysteresis_fraction: float = 0.01
    replan_steps: int = 128
    min_samples: int = 32
    window: int = 1000
    initial_phase_steps: int = 32
    initial_slots_fraction: float = 0.1
    speculates: bool = False

    def __post_init__(self) -> None:
        require_one_of(("auto", "exclusive", "mixed"), self, "mode")
        require_at_least(1, self, "replan_steps", "min_samples", "window", "initial_phase_steps")
        require_at_least(0, self, "hysteresis_fraction")
        require_probability(self, "initial_slots_fraction")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What a look at the statistics found.

    Attributes:
        occupancy: smoothed batch size.
        slots: most requests in exclusive batching.
        capacity_tokens: of the KV cache.
    """

    table: LifeTable
    moments: LengthMoments
    times: StepTimes
    occupancy: float
    slots: int
    max_batch_tokens: int
    capacity_tokens: int

    @property
    def means(self) -> WorkloadMeans:
        """Output tokens are those decoded: the first comes with the prefill (ERRATA 3.15). Their mean is 1 / hazard,
        because the mean of the completed alone is biased short while a load builds up (3.6)."""
        return WorkloadMeans(
            prompt_tokens=max(1.0, self.moments.mean_prompt_tokens),
            output_tokens=max(1.0, 1.0 / self.hazard - 1.0),
            context_tokens=max(1.0, self.moments.mean_resident_tokens),
        )

    @property
    def hazard(self) -> float:
        """Ends per token at risk: the hazard of a geometric length."""
        hazard = self.table.constant_hazard()
        assert hazard is not None
        return min(hazard, MAX_HAZARD)

    @property
    def overheads_s(self) -> tuple[float, float]:
        """Overheads of a prefill step and of a decode step; a fit may find 0, and the phase length needs a ratio."""
        times = self.times
        return max(times.prefill.overhead_s, LEAST_STEP_S), max(times.decode.overhead_s, LEAST_STEP_S)

    @property
    def limits(self) -> RefillLimits:
        return RefillLimits(
            slots=self.slots,
            mean_prompt_tokens=self.means.prompt_tokens,
            max_batch_tokens=self.max_batch_tokens,
        )

    def cycle_s(self, phase: PhaseLength) -> float:
        """Seconds of a phase of decodes in a full batch, and of the refill after it."""
        context = self.slots * self.means.context_tokens
        decode_s = self.times.decode.step_s(decode_requests=self.slots, kv_tokens=context)
        refill = phase.refill(self.slots)
        steps = float(self.limits.prefill_steps(refill))
        prefill = self.times.prefill
        return (
            phase.steps * decode_s + steps * prefill.overhead_s + prefill.prefill_s * refill * self.means.prompt_tokens
        )

    def exclusive_token_s(self, phase: PhaseLength) -> float:
        """Seconds per token of phases of this length."""
        return 1.0 / exclusive_throughput(self.times, self.means, **self.cycle(phase))

    def cycle(self, phase: PhaseLength) -> dict[str, float]:
        """What a phase and its refill hold, as ``exclusive_throughput`` takes it."""
        refill = phase.slots_fraction * min(self.occupancy, self.slots)
        # A small batch frees less than a slot per phase: then only some phases are followed by a prefill.
        prefills = float(self.limits.prefill_steps(refill)) if refill >= 1.0 else -expm1(-refill)
        return {"refill": refill, "phase_steps": phase.steps, "prefill_steps": prefills}

    def phase_length(self) -> PhaseLength:
        """The integer T for the lengths as they are."""
        law = self.table.law()
        assert law is not None
        survival = law.unit_survival(floor(min(law.quantile(0.9999), law.edges[-1])) + 1)
        return best_phase_of_survival(survival, *self.overheads_s, self.limits, thinned=True)


class ExclusiveMixed:
    """Chooses a phase for every step.

    PREFILL opens when a refill is due and goes on until the free slots are filled, the queue is empty or the cache is
    full; DECODE follows. In mixed mode every step may do both.

    Attributes:
        model: step times as they are learned.
        lengths: output lengths as they are learned.
        exclusive: whether prefill and decode take turns.
        phase_length: the phase in force, or that would be.
        cycle_s: seconds of one phase of each kind with a full batch; 0 while that is not known.
    """

    def __init__(self, config: ExclusiveMixedConfig, learned: "ExclusiveMixed | None" = None) -> None:
        """``learned``: one whose lengths this one takes over, and its step times if they began alike; it must not be
        used any more."""
        self.config = config
        known = learned.model if learned and learned.config.step_times == config.step_times else None
        self.model: StepTimeModel = known or StepTimeModel(config.step_times)
        self.lengths: LengthStatistics = learned.lengths if learned else LengthStatistics(window=config.window)
        if config.speculates:
            self.lengths.stop_counting_steps()
        self.exclusive = config.mode == "exclusive"
        self.phase_length = PhaseLength(steps=config.initial_phase_steps, slots_fraction=config.initial_slots_fraction)
        self.cycle_s = 0.0
        self._occupancy: float = learned._occupancy if learned else 0.0
        self._refills: int = learned._refills if learned else 0
        self._steps_to_look = 0
        self._phase = Phase.DECODE
        self._phase_steps = 0  # decode steps of the phase so far
        self._phase_served = 0  # requests that will have been in the batch once the refill is over
        self._steps_barred = 0  # before a prefill is tried again, after one that could hold nothing

    def law(self) -> SurvivalLaw | None:
        """Output lengths as seen so far, of requests that ended."""
        return self.lengths.table(0).law()

    def plan(self, state: BatchState) -> StepPlan:
        if self.config.mode != "mixed" and self._steps_to_look <= 0:
            self._steps_to_look = self.config.replan_steps
            self._look(state)
        if not self.exclusive:
            self._phase = Phase.DECODE  # a phase of prefill is not gone on with later
            return capped_plan(state, state.slots, Limit.SLOTS, steps=STANDING_STEPS)
        return self._phase_plan(state)

    def exclusive_slots(self, slots: int) -> int:
        """Most requests that run at once in exclusive batching, given the engine's slots."""
        return slots

    def _phase_plan(self, state: BatchState) -> StepPlan:
        startable = self._startable(state)
        if self._prefills(state, startable):
            return self._prefill_plan(state, startable)
        return self._decode_plan(state, startable)

    def observe(self, result: StepResult) -> None:
        self.model.observe(result)
        self.lengths.observe(result)
        self._steps_to_look -= 1
        self._phase_steps += result.phase is Phase.DECODE
        self._steps_barred -= 1
        if result.phase is Phase.PREFILL and not result.scheduled_tokens:
            self._steps_barred = STANDING_STEPS
        if result.prefill_tokens:  # until the next refill slots stay empty that mixing would fill
            self._refills += 1
            weight = max(_OCCUPANCY_SMOOTHING, 1.0 / self._refills)
            self._occupancy += weight * (result.running_count - self._occupancy)

    def _prefills(self, state: BatchState, startable: int) -> bool:
        """Whether the next step is one of prefill."""
        prefilling = state.prefilling_count
        decoding = state.running_count - prefilling
        if not decoding:
            begins = bool(prefilling or startable)
        elif self._steps_barred > 0:
            begins = False
        elif self._phase is Phase.PREFILL and (prefilling or (startable and self._starts_left(state) > 0)):
            return True
        else:
            begins = bool(prefilling) or self._refill_due(state, decoding, startable)
        if begins:  # slots that come free in the refill wait for the next one
            self._phase_served = state.running_count + startable + state.departed
        return begins

    def _starts_left(self, state: BatchState) -> int:
        return self._phase_served - state.departed - state.running_count

    def _prefill_plan(self, state: BatchState, startable: int) -> StepPlan:
        self._phase = Phase.PREFILL
        starts = max(0, min(startable, self._starts_left(state)))
        short = startable < min(state.free_slots, state.waiting_count)
        return StepPlan(
            phase=Phase.PREFILL,
            max_batch_size=max(1, min(state.running_count + starts, state.slots)),
            limited_by=Limit.MEMORY if short else Limit.SLOTS,
            max_batch_tokens=state.max_batch_tokens,
            starts=starts,
        )

    def _decode_plan(self, state: BatchState, startable: int) -> StepPlan:
        if self._phase is Phase.PREFILL:
            self._phase, self._phase_steps = Phase.DECODE, 0
        steps, departures = self._stands(state, startable)
        return StepPlan(
            phase=Phase.DECODE,
            max_batch_size=state.slots,
            limited_by=Limit.SLOTS,
            max_batch_tokens=state.max_batch_tokens,
            starts=0,
            steps=steps,
            departures=departures,
        )

    def _stands(self, state: BatchState, startable: int) -> tuple[int, int]:
        """Steps and departures before which no refill comes due."""
        share = self._refill_share(state)
        departures = state.running_count - floor(state.slots * (1.0 - share) + ROUNDING) - 1
        if departures < 0:  # slots are free, and blocks are not
            departures = floor(STANDING_SHARE * state.running_count)
        steps = min(float(STANDING_STEPS), self._steps_to_look, self._most_phase_steps - self._phase_steps)
        if steps < 1 and not startable:  # beyond its patience: one that leaves makes room for one that waits
            return STANDING_STEPS, 0
        return max(1, int(steps)), departures

    def _refill_due(self, state: BatchState, decoding: int, startable: int) -> bool:
        """Whether a decode phase has lasted long enough."""
        if not startable:
            return False
        if self._phase_steps >= self._most_phase_steps:
            return True
        # Slots that no request waits for are free as well: below saturation a refill is due at once (ERRATA 3.8).
        free = state.free_slots if startable == state.waiting_count else startable
        share = self._refill_share(state)
        return free >= max(1.0, decoding * share / (1.0 - share) - ROUNDING)

    @property
    def _most_phase_steps(self) -> float:
        return _PATIENCE * self.phase_length.steps

    def refill(self, slots: int) -> int:
        """Requests per refill of a batch of that many."""
        return self.phase_length.refill(slots)

    def _refill_share(self, state: BatchState) -> float:
        """The share of the slots that must be free before they are filled."""
        return min(self.phase_length.slots_fraction, MOST_SHARE)

    def _startable(self, state: BatchState) -> int:
        """Waiting requests, from the head, that have a slot and whose prompts fit beside a block for each that runs; at
        least one when nothing runs."""
        if not state.waiting:
            return 0  # a policy before this one let none through
        room = state.free_blocks - state.running_count
        for count, request in enumerate(state.waiting[: state.free_slots]):
            room -= -(-request.prefill_tokens // state.block_size)
            if room < 0:
                return max(count, 1 - min(1, state.running_count))
        return min(state.waiting_count, state.free_slots)

    def _look(self, state: BatchState) -> None:
        """Learn the phase from lengths and step times as they are now, and in "auto" the mode."""
        moments, times = self.lengths.moments(), self.model.times()
        if moments is None or times is None or moments.requests < self.config.min_samples:
            return
        workload = Workload(
            table=self.lengths.table(0, state.running.output_tokens),
            moments=moments,
            times=times,
            occupancy=max(1.0, self._occupancy),
            slots=self.exclusive_slots(state.slots),
            max_batch_tokens=state.max_batch_tokens,
            capacity_tokens=state.capacity_tokens,
        )
        self._learn(workload)
        # Where noise was fitted tokens may seem to cost nothing beside the steps: nothing is decided by that.
        if self.config.mode == "auto" and exclusive_token_s(times, workload.means):
            self.exclusive = self._pays(workload)

    def _learn(self, workload: Workload) -> None:
        self.phase_length = self._phase_length(workload)
        self.cycle_s = workload.cycle_s(self.phase_length)

    def _phase_length(self, workload: Workload) -> PhaseLength:
        return workload.phase_length()

    def _gain(self, workload: Workload) -> float:
        """What a token costs more in mixed batching than in phases, as a share of the latter."""
        mixed_s = 1.0 / mixed_steps_throughput(workload.times, workload.means, slots=workload.occupancy)
        return mixed_s / workload.exclusive_token_s(self.phase_length) - 1.0

    def _pays(self, workload: Workload) -> bool:
        """Whether a token of exclusive batching is cheaper, by more than the hysteresis where that means a switch."""
        hysteresis = self.config.hysteresis_fraction
        return self._gain(workload) > (-hysteresis if self.exclusive else hysteresis)
