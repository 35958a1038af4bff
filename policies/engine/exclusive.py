"""Exclusive or mixed batching, decided online: phases of pure prefill and pure decode, or both in one step.

Source: 003 (EB+), the online controller: sliding-window length statistics, phase length, crossover with smoothed
occupancy, KV gate and priority margin. The closed forms live in ``policies.engine.phases``.
Departures, with ERRATA numbers:

* The phase is planned by the integer T of 3.4 by default and ended by count: a refill is due once the slots that could
  be filled reach share/(1-share) of those that decode, with share = 1/E[ceil(O/T)]. In a full batch that is the
  refill T would bring on average, but steadier: -0.2 to +0.5 % throughput in simulation against T steps by the clock,
  over geometric, uniform, lognormal and production lengths. Below saturation nobody waits for k arrivals (3.8).
* A refill takes ALL free slots (3.8), and one is due at once when nothing decodes.
* theta0, the IFR correction and a fixed refill are there by name.
* What mixed batching costs is reckoned step by step: with answers longer than the batch is wide, most of its steps
  hold no prefill, which 003's formula does not know.
* Mode switches are relative to the cost of a token (3.11). The closed form over-predicts exclusive batching (3.13), so
  each mode's prediction is scaled by what that mode was measured to cost, and nothing is decided before every kind of
  step has been measured or given as a prior. A mode that the closed form puts within its own error of the other is
  tried, for else a crossover of a few percent is not found.
* A kind of step that has not been measured is looked for one step at a time: decodes for which admission waits a step,
  then prefills alone. Whole phases would show those sooner, but cost up to a tenth where they do not pay; so they are
  tried only where what mixed steps show promises much of them.
* Now and then a few steps are taken of the kind that the mode in use does not have: those that were measured while the
  engine warmed up, or under another load, would otherwise bind it for good.
* A prefill phase that could schedule nothing is not tried again before blocks were freed or the queue changed.
"""

from dataclasses import dataclass, field, replace
from math import ceil, expm1, floor, inf, log1p
from typing import Literal

import numpy as np

from policies.checks import (
    require_at_least,
    require_each_positive,
    require_one_of,
    require_positive,
    require_probability,
)
from policies.engine.phases import (
    PhaseLength,
    RefillLimits,
    WorkloadMeans,
    best_phase_of_survival,
    exclusive_throughput,
    exclusive_token_s,
    mixed_steps_throughput,
    overhead_ratio,
    phase_threshold,
    phase_threshold_ifr,
    refill_cap,
)
from policies.engine.plans import KEPT_STEPS, LEFT_SHARE, READ_STEPS, capped_plan
from policies.engine.step_time import StepContents, StepTimeConfig, StepTimeModel
from policies.errors import ConfigError
from policies.lengths.statistics import LengthMoments, LengthStatistics, LifeTable, SurvivalLaw
from policies.types import BatchState, Limit, Phase, StepPlan, StepResult, StepTimes

# A fitted overhead may come out as 0; the phase length needs a ratio.
_LEAST_OVERHEAD_S = 1e-6
_MOST_HAZARD = 0.999
# A refill is due at the latest when nine times as many could start as still decode.
_MOST_SHARE = 0.9
# A phase longer than this many times its length ends with whatever can start: nobody waits for a k-th arrival.
_PATIENCE = 1.5
# Weight of the newest step with a prefill in the smoothed number of running requests.
_OCCUPANCY_SMOOTHING = 0.1
# Share of a span's cost that enters the running ratio, and the ratio hoped for at each look in the mode that is not in
# use: by so much the closed form may err, so what may be the better mode is tried.
_RATIO_SMOOTHING = 0.3
_HOPED_RATIO = 0.95
# By so much a ratio that was measured is hoped to have fallen since the last look: a mode that was tried in vain is not
# tried at every look, each time for 32 requests.
_HOPE = 0.02
# Gain that whole phases must promise to be tried before it is known what a prefill costs alone.
_MUCH = 0.05
# After 8, 16 and 32 times ``replan_steps`` and then after every 32 so many steps are taken of the kind that the
# preferred mode does not have, enough to move a form that has faded: one step in 512, in the long run.
_LOOK_STEPS, _FIRST_LOOK, _LOOKS = 8, 8, 32
# By so much sooner than after ``replan_steps`` it is seen how to look for missing steps, and whether a mode that was
# entered has served enough requests to be measured: every step in the worse mode costs.
_EXPLORING, _TRYING = 8, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ExclusiveMixedConfig:
    """EB+.

    Attributes:
        mode: "auto" chooses by cost, "exclusive" and "mixed" stay what they say.
        phase_rule: "exact" is the integer T; "threshold" theta0; "ifr" the paper's correction; "fixed" ``refill``.
        refill: requests per refill for "fixed".
        step_times: how step times are learned, and their prior.
        itl_budgets_s: bound on the gap that a refill puts between two tokens of a running request, by class_index,
            or None; the strictest that runs counts. One bounds all classes, and empty is none.
        max_wait_s: a head of the queue older than this is started in a prefill phase at once, or None.
        hysteresis_fraction: advantage, relative to what a token costs in exclusive batching, that a mode switch needs.
        priority_margin_fraction: delta, advantage demanded of exclusive batching besides; above 0 favours a short
            time to first token, below 0 a short time between tokens.
        replan_steps: steps between two looks at lengths, step times and mode, in "mixed" none; in "auto" an eighth
            until it is known how to look for prefills alone, none once a kind of step that was missing is known, and a
            fourth until the mode in use is measured.
        min_samples: completions before lengths count as known.
        window: as in ``LengthStatistics``.
        speculates: as in ``ForecastAdmissionConfig``.
        initial_phase_steps, initial_slots_fraction: the phase until lengths and step times are known.

    Raises:
        ConfigError: a value is out of bounds, or "fixed" comes without ``refill``.
    """

    mode: Literal["auto", "exclusive", "mixed"] = "auto"
    phase_rule: Literal["exact", "threshold", "ifr", "fixed"] = "exact"
    refill: int | None = None
    step_times: StepTimeConfig = field(default_factory=StepTimeConfig)
    itl_budgets_s: tuple[float | None, ...] = ()
    max_wait_s: float | None = None
    hysteresis_fraction: float = 0.01
    priority_margin_fraction: float = 0.0
    replan_steps: int = 128
    min_samples: int = 32
    window: int = 1000
    initial_phase_steps: int = 32
    initial_slots_fraction: float = 0.1
    speculates: bool = False

    def __post_init__(self) -> None:
        require_one_of(("auto", "exclusive", "mixed"), self, "mode")
        require_one_of(("exact", "threshold", "ifr", "fixed"), self, "phase_rule")
        require_at_least(1, self, "replan_steps", "min_samples", "window", "initial_phase_steps")
        require_at_least(0, self, "hysteresis_fraction")
        require_probability(self, "initial_slots_fraction")
        require_positive(self, "max_wait_s")
        require_each_positive(self, "itl_budgets_s")
        require_at_least(1, self, "refill")
        if (self.phase_rule == "fixed") != (self.refill is not None):
            raise ConfigError(f'refill goes with phase_rule "fixed", got {self.refill} with "{self.phase_rule}"')
        if not abs(self.priority_margin_fraction) < inf:
            raise ConfigError(f"priority_margin_fraction must be finite, got {self.priority_margin_fraction}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Workload:
    """What a look at the statistics found: length law, moments, step times, smoothed batch size and its bound."""

    table: LifeTable
    moments: LengthMoments
    times: StepTimes
    occupancy: float
    slots: int
    max_batch_tokens: int

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
        return min(hazard, _MOST_HAZARD)

    @property
    def prefill_overhead_s(self) -> float:
        return max(self.times.prefill.overhead_s, _LEAST_OVERHEAD_S)

    @property
    def decode_overhead_s(self) -> float:
        return max(self.times.decode.overhead_s, _LEAST_OVERHEAD_S)

    def token_s(self, phase: PhaseLength | None, prompt_tokens: float | None = None) -> float:
        """Seconds per token of phases of this length, or of mixed batching without one, in a full batch; at another
        mean length of prompts if one is given."""
        means = self.means if prompt_tokens is None else replace(self.means, prompt_tokens=prompt_tokens)
        if phase is None:
            return 1.0 / mixed_steps_throughput(self.times, means, slots=self.occupancy)
        refill = phase.slots_fraction * self.occupancy
        # A small batch frees less than a slot per phase: then only some phases are followed by a prefill.
        prefills = float(self.limits(None).prefill_steps(refill)) if refill >= 1.0 else -expm1(-refill)
        return 1.0 / exclusive_throughput(
            self.times, means, refill=refill, phase_steps=phase.steps, prefill_steps=prefills
        )

    def limits(self, itl_budget_s: float | None) -> RefillLimits:
        prompt = self.means.prompt_tokens
        most = None
        if itl_budget_s is not None:
            most = refill_cap(
                self.times.prefill,
                mean_prompt_tokens=prompt,
                max_batch_tokens=self.max_batch_tokens,
                itl_budget_s=itl_budget_s,
            )
        return RefillLimits(
            slots=self.slots,
            mean_prompt_tokens=prompt,
            max_batch_tokens=self.max_batch_tokens,
            max_refill=most,
        )


def _phase_length(config: ExclusiveMixedConfig, workload: _Workload, itl_budget_s: float | None) -> PhaseLength:
    """The phase that the configured rule asks for."""
    limits = workload.limits(itl_budget_s)
    if config.phase_rule == "exact":
        return _exact_phase(workload, limits)
    share = config.refill / limits.slots if config.refill else _threshold_share(config, workload)
    if limits.max_refill is not None:
        share = min(share, limits.max_refill / limits.slots)
    fraction = min(share, _MOST_SHARE)
    return PhaseLength(steps=max(1, round(-log1p(-fraction) / workload.hazard)), slots_fraction=fraction)


def _exact_phase(workload: _Workload, limits: RefillLimits) -> PhaseLength:
    law = workload.table.law()
    assert law is not None
    survival = law.unit_survival(floor(min(law.quantile(0.9999), law.edges[-1])) + 1)
    overheads_s = workload.prefill_overhead_s, workload.decode_overhead_s
    return best_phase_of_survival(survival, *overheads_s, limits, thinned=True)


def _threshold_share(config: ExclusiveMixedConfig, workload: _Workload) -> float:
    """theta0 from the constant hazard, or theta0 + delta theta from the line fitted to the hazard (ERRATA 3.6)."""
    line = workload.table.linear_hazard()
    assert line is not None
    hazard = min(line.p0, _MOST_HAZARD) if config.phase_rule == "ifr" else workload.hazard
    share = phase_threshold(
        overhead_ratio(
            hazard=hazard,
            prefill_overhead_s=workload.prefill_overhead_s,
            decode_overhead_s=workload.decode_overhead_s,
        )
    )
    if config.phase_rule == "threshold":
        return share
    ratio = workload.times.decode.decode_s * workload.slots / workload.decode_overhead_s
    return phase_threshold_ifr(share, hazard=hazard, hazard_slope=line.eta, decode_cost_ratio=ratio)


class _TokenCost:
    """What tokens cost in one mode against what the closed form says, over spans of completed requests.

    Steps are charged what step times as known now say of what they held, not what they took: else a machine that is
    slow for a while would make the mode in use look dear beside the other, which it would slow down as much.
    """

    def __init__(self) -> None:
        self.ratio = 1.0
        self.restart()

    def add(self, result: StepResult) -> None:
        self._contents.add(result)
        self._prefill_tokens += result.prefill_tokens
        self._decode_tokens += result.decode_requests
        self._finished += len(result.finished)
        self._steps += 1
        self._running += result.running_count

    def restart(self) -> None:
        """The mode is entered: what was measured in it long ago counts no more once there is a new span."""
        self._spans = 0
        self._open_span()

    def _open_span(self) -> None:
        self._contents = StepContents()
        self._prefill_tokens = self._decode_tokens = self._finished = self._steps = self._running = 0

    def learn(self, workload: _Workload, phase: PhaseLength | None, least_finished: int) -> None:
        """Close the span if enough requests ended in it. It is held against the closed form of its own prompts and
        batch: with those of the mean, the ratio would follow the luck of the draw."""
        if self._finished < least_finished or not self._decode_tokens:  # requests also end when nothing is computed
            return
        decline = phase.slots_fraction / 2.0 if phase else 0.0  # of the batch, until the middle of a phase
        workload = replace(workload, occupancy=max(1.0, self._running / self._steps / (1.0 - decline)))
        requests = self._decode_tokens / workload.means.output_tokens
        predicted_s = workload.token_s(phase, prompt_tokens=max(1.0, self._prefill_tokens / requests))
        measured = self._contents.seconds(workload.times) / (self._prefill_tokens + self._decode_tokens) / predicted_s
        self._spans += 1
        self.ratio += max(_RATIO_SMOOTHING, 1.0 / self._spans) * (min(max(measured, 0.5), 2.0) - self.ratio)
        self._open_span()

    @property
    def is_measured(self) -> bool:
        """Whether a span has ended since the mode was entered."""
        return self._spans > 0

    def hope(self) -> None:
        """The form that the ratio was measured against is about to change. What the mode has shown is believed, and
        given up bit by bit, if the closed form may err by so much: else it was an odd span, and all is hoped again."""
        credible = self.is_measured and abs(self.ratio - 1.0) <= 1.0 - _HOPED_RATIO
        self.ratio = max(_HOPED_RATIO, self.ratio - _HOPE) if credible else _HOPED_RATIO


class _ModeChoice:
    """Whether exclusive batching is worth it, from predicted costs corrected by measured ones."""

    def __init__(self, config: ExclusiveMixedConfig) -> None:
        self._config = config
        self.exclusive = config.mode == "exclusive"
        self._preferred = self.exclusive
        self._decides = config.mode == "auto"
        self._decided = False
        self._missing: tuple[Phase, ...] = ()  # kinds of steps to be measured yet, in this order
        self._parts_prefills = False  # whether a prefill alone, if it is among those, is looked for by now
        self._steps = 0  # since the first decision
        self._next_look = _FIRST_LOOK * config.replan_steps
        self._look_steps = 0
        self._costs = {False: _TokenCost(), True: _TokenCost()}

    @property
    def steps_to_next_look(self) -> int:
        """Fewer while every step may be one too many in the worse mode."""
        return -(-self._config.replan_steps // self._looks_per_replan)

    @property
    def _looks_per_replan(self) -> int:
        if self._decides and not self._decided and not self._parts_prefills:
            return _EXPLORING
        tries = self._decided and not self._look_steps and not self._costs[self._preferred].is_measured
        return _TRYING if tries else 1

    @property
    def looks_at(self) -> Phase | None:
        """The kind of step of which a few are to be taken although the preferred mode has none, or few."""
        if self._look_steps:
            return Phase.MIXED if self._preferred else Phase.PREFILL
        kind = self._missing[0] if self._missing else None
        return None if kind is Phase.MIXED or (kind is Phase.PREFILL and not self._parts_prefills) else kind

    def begins_look(self) -> Phase | None:
        """The kind that is looked at once more from now on."""
        return self.looks_at if self._look_steps == _LOOK_STEPS else None

    @property
    def awaits_steps(self) -> bool:
        """Whether the next one may be the last of a look, or make a kind known that was missing."""
        return bool(self._look_steps or self._missing)

    def has_found(self, model: StepTimeModel) -> bool:
        """Whether the kind that was missing first is known by now."""
        return bool(self._missing) and model.measured(self._missing[0])

    def steps_to_find(self, model: StepTimeModel) -> int:
        """Steps before which the kind that is missing first cannot be known."""
        return model.steps_missing(self._missing[0]) if self._missing else KEPT_STEPS

    def observe(self, result: StepResult) -> None:
        self._steps += self._decided
        if not self._look_steps:
            self._costs[self.exclusive].add(result)
        elif result.prefill_tokens and bool(result.decode_requests) == self._preferred:
            self._look_steps -= 1
            if not self._look_steps:
                self.exclusive = self._preferred

    def explore(self, model: StepTimeModel) -> bool:
        """See which kinds of steps are still unknown. Returns whether the modes can be held against each other, if only
        with what mixed steps say of a prefill alone."""
        kinds = () if model.config.prior is not None else (Phase.MIXED, Phase.DECODE, Phase.PREFILL)
        self._missing = tuple([kind for kind in kinds if not model.measured(kind)])
        return self._missing in ((), (Phase.PREFILL,))

    def decide(self, workload: _Workload, phase: PhaseLength) -> None:
        """Switch when the other mode's token is cheaper by more than the hysteresis.

        Where noise was fitted tokens may seem to cost nothing beside the steps: nothing is decided by that. While no
        prefill alone has been measured, what is found is only how to look for it.
        """
        if not exclusive_token_s(workload.times, workload.means):
            self._look_steps, self.exclusive = 0, self._preferred  # a look is begun once, and not for ever
            return
        if self._missing:
            promised = workload.token_s(None) / workload.token_s(phase) - 1.0
            self._parts_prefills, self.exclusive = True, promised > _MUCH
            return
        self._learn(workload, phase)
        mixed_s = self._costs[False].ratio * workload.token_s(None)
        exclusive_s = self._costs[True].ratio * workload.token_s(phase)
        gain = mixed_s / exclusive_s - 1.0 - self._config.priority_margin_fraction
        hysteresis = self._config.hysteresis_fraction
        preferred = gain > (-hysteresis if self._preferred else hysteresis)
        self._look_steps = self._steps_of_look()
        if self._look_steps:
            self._costs[not preferred].hope()
        if preferred != self._preferred:
            self._preferred = preferred
            self._costs[preferred].restart()
        self.exclusive = preferred and not self._look_steps

    def _learn(self, workload: _Workload, phase: PhaseLength) -> None:
        if self._decided:
            self._costs[self._preferred].learn(workload, phase if self._preferred else None, self._config.min_samples)
        else:  # what came before was the batch filling up, which no formula is about
            self._costs[self._preferred].restart()
        self._decided = True

    def _steps_of_look(self) -> int:
        """How many steps of the other kind are to be taken now."""
        if self._steps < self._next_look:
            return 0
        self._next_look += min(self._next_look, _LOOKS * self._config.replan_steps)
        return _LOOK_STEPS


class _Stall:
    """Remembers a prefill phase that could schedule nothing, until something changed that could help."""

    def __init__(self) -> None:
        self._stalled = False
        self._free_blocks: int | None = None
        self._waiting_count = 0

    def observe(self, result: StepResult) -> None:
        if result.finished:
            self._stalled = False
        if result.phase is Phase.PREFILL and not result.scheduled_tokens:
            self._stalled, self._free_blocks = True, None

    def holds(self, state: BatchState) -> bool:
        if not self._stalled:
            return False
        if self._free_blocks is None:
            self._free_blocks, self._waiting_count = state.free_blocks, state.waiting_count
        self._stalled = state.free_blocks <= self._free_blocks and state.waiting_count == self._waiting_count
        return self._stalled


class ExclusiveMixed:
    """Chooses a phase for every step.

    PREFILL opens when a refill is due and goes on until the free slots are filled, the queue is empty or the cache is
    full; DECODE follows. In mixed mode every step may do both.
    """

    def __init__(self, config: ExclusiveMixedConfig, learned: "ExclusiveMixed | None" = None) -> None:
        """``learned``: one whose step times and lengths this one takes over; it must not be used any more."""
        self.config = config
        self.phase_length = PhaseLength(steps=config.initial_phase_steps, slots_fraction=config.initial_slots_fraction)
        self._model = StepTimeModel(config.step_times)
        self._lengths = LengthStatistics(window=config.window)
        self._choice = _ModeChoice(config)
        self._stall = _Stall()
        self._occupancy = 0.0
        self._refills = 0
        self._steps_to_look = 0
        self._unread: list[StepResult] = []
        if learned:
            learned._read_steps()
            self._model, self._lengths = learned._model, learned._lengths
            self._occupancy, self._refills = learned._occupancy, learned._refills
        if config.speculates:
            self._lengths.stop_counting_steps()
        self._phase = Phase.DECODE
        self._phase_steps = 0
        self._phase_served = 0  # requests that will have been in the batch once the refill is over
        self._steps_to_part = 0  # before a prefill is parted again, after one in which nobody could start
        self._blocks_from = 0  # count of departures before which no refill is looked for where blocks were missing
        self._blocks_steps = 0  # for which that holds
        self._held_back = False  # whether prompts waited in the last step, so that decodes were alone
        self._limited_by = Limit.SLOTS
        self._workload: _Workload | None = None
        self._itl_budgets_s = np.array([inf if b is None else b for b in config.itl_budgets_s or (None,)])

    @property
    def exclusive(self) -> bool:
        """True while prefill and decode take turns."""
        return self._choice.exclusive

    def step_times(self) -> StepTimes | None:
        """Step times as learned so far."""
        self._read_steps()
        return self._model.times()

    def recompute_times(self) -> StepTimes | None:
        """The same, but None while it is not known what a prompt costs."""
        times = self.step_times()
        return times if self._model.knows_prefills else None

    def law(self) -> SurvivalLaw | None:
        """Output lengths as seen so far, of requests that ended."""
        self._read_steps()
        return self._lengths.table(0).law()

    def plan(self, state: BatchState) -> StepPlan:
        if self.config.mode == "mixed":
            return capped_plan(state, state.slots, Limit.SLOTS, KEPT_STEPS)
        if self._steps_to_look <= 0:
            self._replan(state)
            self._steps_to_look = self._choice.steps_to_next_look
        if not self.exclusive:
            kind = self._choice.looks_at
            parted = self._parted_plan(state, kind) if kind else None
            return parted or self._mixed_plan(state, looks=kind is not None)
        startable = self._startable(state)
        self._enter_phase(state, startable)
        return self._exclusive_plan(state, startable)

    def observe(self, result: StepResult) -> None:
        self._steps_to_look -= 1
        if self.config.mode != "mixed":
            self._follow(result)
        self._unread.append(result)
        if len(self._unread) == READ_STEPS or self._choice.awaits_steps:
            self._read_steps()

    def _follow(self, result: StepResult) -> None:
        """What the next phase depends on."""
        self._phase_steps += result.phase is Phase.DECODE
        self._steps_to_part -= 1
        self._blocks_steps -= 1
        if result.phase is Phase.PREFILL and not result.scheduled_tokens:
            self._steps_to_part = KEPT_STEPS
        self._stall.observe(result)

    def _read_steps(self) -> None:
        """Learn from the steps that have been observed meanwhile."""
        unread, self._unread = self._unread, []
        for result in unread:
            self._model.observe(result)
            self._lengths.observe(result)
            if result.prefill_tokens:  # until the next refill slots stay empty that mixing would fill
                self._refills += 1
                weight = max(_OCCUPANCY_SMOOTHING, 1.0 / self._refills)
                self._occupancy += weight * (result.running_count - self._occupancy)
            if self.config.mode != "mixed":
                self._choice.observe(result)
        if self._choice.has_found(self._model):
            self._steps_to_look = 0

    def _mixed_plan(self, state: BatchState, *, looks: bool) -> StepPlan:
        self._phase, self._held_back = Phase.DECODE, False
        steps = min(KEPT_STEPS, self._steps_to_look, self._choice.steps_to_find(self._model))
        plan = capped_plan(state, state.slots, Limit.SLOTS, max(1, steps))
        if not looks:
            return plan
        # Whoever comes or reads a prompt may do so in a step of that kind; but nobody can come while slots are taken.
        reads = state.prefilling_count or state.free_slots
        return plan._replace(may_leave=0, steps=1 if reads else plan.steps)

    def _parted_plan(self, state: BatchState, kind: Phase) -> StepPlan | None:
        """A prefill or decodes alone, but not twice in a row; None where they are alone anyhow, or there are none."""
        prefill = kind is Phase.PREFILL
        barred = (self._phase is Phase.PREFILL or self._steps_to_part > 0) if prefill else self._held_back
        if barred or kind is Phase.MIXED or (prefill and self._stall.holds(state)):
            return None
        startable, prefilling = self._startable(state, ahead=0), state.prefilling_count
        if not (startable or prefilling) or state.running_count == prefilling:
            return None
        if prefill:
            self._open_prefill(state, startable)
        else:
            self._phase, self._held_back = Phase.DECODE, True
        return self._exclusive_plan(state, startable)

    def _exclusive_plan(self, state: BatchState, startable: int) -> StepPlan:
        prefill = self._phase is Phase.PREFILL
        limit = min(self._phase_limit(state), state.slots) if prefill else state.slots
        room = min(startable, max(0, limit - state.running_count)) if prefill else 0
        steps, may_leave = (1, 0) if prefill else self._decode_steps_ahead(state, startable)
        return StepPlan(
            phase=self._phase,
            max_batch_size=max(1, limit),
            limited_by=self._limited_by if prefill else Limit.SLOTS,
            max_batch_tokens=state.max_batch_tokens,
            admit=tuple(request.request_id for request in state.waiting[:room]),
            steps=steps,
            may_leave=may_leave,
        )

    def _decode_steps_ahead(self, state: BatchState, startable: int) -> tuple[int, int]:
        """Steps in which no refill comes due, and how many may depart in them."""
        if self.config.max_wait_s is not None or self._choice.looks_at or self._stall.holds(state):
            return 1, 0
        steps, spare = min(KEPT_STEPS, self._steps_to_look), self._spare(state)
        if spare < 0:  # but for blocks
            if not self._waits_for_blocks(state):
                return 1, 0
            steps, spare = min(steps, self._blocks_steps), self._blocks_from - state.departed - 1
        patience = self._most_phase_steps - self._phase_steps
        if patience < steps:
            if startable or not state.waiting_count:
                return max(1, floor(patience)), spare
            spare = 0  # nobody who waits can start now, but somebody could as soon as anyone has left
        return max(1, steps), spare

    def _spare(self, state: BatchState) -> int:
        """How many may depart before slots enough for a refill are free; below 0 where they are."""
        share = self._refill_share(state)
        most_running = state.slots * (1.0 - share) if state.slots_return else state.free_slots * (1.0 - share) / share
        return state.running_count - floor(most_running) - 1

    def _wait_for_blocks(self, state: BatchState, decoding: int, startable: int) -> None:
        """Where slots are free and blocks are not, more can start only once somebody has left."""
        short = startable < min(state.waiting_count, state.free_slots) and self._spare(state) < 0
        if short and not self._waits_for_blocks(state) and not self._refill_due(state, decoding, startable):
            self._blocks_from = state.departed + self._leave_first(state, decoding) + 1
            self._blocks_steps = KEPT_STEPS

    def _waits_for_blocks(self, state: BatchState) -> bool:
        """Whether too few have departed since a refill was looked for to look again."""
        return self._blocks_steps > 0 and state.departed < self._blocks_from

    def _leave_first(self, state: BatchState, decoding: int) -> int:
        """How many may depart before they have made room for a refill, if each frees what a running request holds in
        the mean, less what all grow by until the next one does: an estimate, so of few nobody."""
        refill = state.waiting[: ceil(self._refill_size(state, decoding))]
        wanted = sum([-(-request.prefill_tokens // state.block_size) for request in refill])
        missing = wanted + state.running_count - state.free_blocks
        held = (state.total_blocks - state.free_blocks) / max(1, state.running_count)
        grown = self._workload.means.output_tokens / state.block_size if self._workload else 0.0
        needed = ceil(missing / max(1.0, held - grown))
        return max(0, min(needed - 1, floor(LEFT_SHARE * state.running_count)))

    def _enter_phase(self, state: BatchState, startable: int) -> None:
        prefilling = state.prefilling_count
        decoding = state.running_count - prefilling
        stalled = self._stall.holds(state)
        if self._phase is Phase.PREFILL:
            room = startable and state.running_count < self._phase_limit(state)
            if (prefilling or room) and not (stalled and decoding):
                return
            self._phase, self._phase_steps = Phase.DECODE, 0
        elif decoding and not stalled and (prefilling or self._refill_due(state, decoding, startable)):
            self._open_prefill(state, startable)
        if not decoding and (prefilling or startable):
            self._open_prefill(state, startable)
        if self._phase is Phase.DECODE:
            self._wait_for_blocks(state, decoding, startable)

    def _open_prefill(self, state: BatchState, startable: int) -> None:
        """Start a refill of what can start now; slots that it frees itself wait for the next one."""
        self._phase, self._blocks_steps = Phase.PREFILL, 0
        self._limited_by = Limit.MEMORY if startable < min(state.free_slots, state.waiting_count) else Limit.SLOTS
        most = self._workload.limits(self._itl_budget_s(state)).max_refill if self._workload else None
        if most is not None and most < startable:
            startable, self._limited_by = most, Limit.SLA
        self._phase_served = state.running_count + startable + state.departed

    def _phase_limit(self, state: BatchState) -> int:
        """Most that may run in this refill."""
        return self._phase_served - state.departed

    def _itl_budget_s(self, state: BatchState) -> float | None:
        """The budget of the strictest class that runs, or None."""
        budgets = self._itl_budgets_s
        running = budgets if len(budgets) == 1 else budgets[state.running.class_index]
        shortest = float(running.min(initial=inf))
        return shortest if shortest < inf else None

    def _refill_due(self, state: BatchState, decoding: int, startable: int) -> bool:
        """Whether a decode phase has lasted long enough."""
        if not startable:
            return False
        if self.config.max_wait_s is not None and state.now_s - state.waiting[0].arrival_s >= self.config.max_wait_s:
            return True
        if self._phase_steps >= self._most_phase_steps:
            return True
        if self._waits_for_blocks(state):
            return False
        # Slots that nobody waits for are free as well: below saturation a refill is due at once (ERRATA 3.8).
        free = state.free_slots if startable == state.waiting_count else startable
        return free >= self._refill_size(state, decoding)

    def _refill_size(self, state: BatchState, decoding: int) -> float:
        """Requests that are worth a refill."""
        share = self._refill_share(state)
        return max(1.0, decoding * share / (1.0 - share))

    @property
    def _most_phase_steps(self) -> float:
        return _PATIENCE * self.phase_length.steps if self.config.phase_rule == "exact" else inf

    def _refill_share(self, state: BatchState) -> float:
        """Of the slots, to be free before they are filled."""
        share = self.config.refill / state.slots if self.config.refill else self.phase_length.slots_fraction
        return min(share, _MOST_SHARE)

    def _startable(self, state: BatchState, ahead: int = 1) -> int:
        """Waiting requests, from the head, that have a slot and whose prompts fit beside so many more blocks for each
        that runs; at least one when nothing runs. A step that is parted for once may let in whom a mixed one would."""
        if not state.waiting:
            return 0  # a policy before this one let nobody through
        room = state.free_blocks - ahead * state.running_count
        for count, request in enumerate(state.waiting[: state.free_slots]):
            room -= -(-request.prefill_tokens // state.block_size)
            if room < 0:
                return max(count, 1 - min(1, state.running_count))
        return min(state.waiting_count, state.free_slots)

    def _replan(self, state: BatchState) -> None:
        self._read_steps()
        auto = self.config.mode == "auto"
        if auto and not self._choice.explore(self._model):
            return
        moments, times = self._lengths.moments(), self._model.times()
        if moments is None or times is None or moments.requests < self.config.min_samples:
            return
        workload = _Workload(
            table=self._lengths.table(0, state.running.output_tokens),
            moments=moments,
            times=times,
            occupancy=max(1.0, self._occupancy),
            slots=state.slots,
            max_batch_tokens=state.max_batch_tokens,
        )
        self._workload = workload
        self.phase_length = _phase_length(self.config, workload, self._itl_budget_s(state))
        if auto:
            self._choice.decide(workload, self.phase_length)
            if kind := self._choice.begins_look():  # so few would not tell against what was measured long ago
                self._model.fade(kind)
