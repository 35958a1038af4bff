"""Exclusive or mixed batching by 003's own rules: theta0, its correction, a fixed refill, eq. 8 as printed, N*.

Source: 003 (EB+). ``policies.engine.exclusive`` serves by default; the closed forms, and what is corrected in them, are
in ``policies.papers.phases``.
"""

from dataclasses import dataclass
from math import floor, inf, isfinite, log1p, sqrt
from typing import Literal

from policies.checks import require_at_least, require_one_of, require_probability
from policies.engine.exclusive import MOST_SHARE, ExclusiveMixed, ExclusiveMixedConfig, Workload
from policies.engine.phases import PhaseLength
from policies.errors import ConfigError
from policies.lengths.statistics import MAX_HAZARD
from policies.papers.phases import (
    crossover_margin,
    hazard_line,
    max_batch_size_exclusive,
    overhead_ratio,
    phase_threshold,
    phase_threshold_ifr,
)
from policies.types import BatchState, Limit, StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class ExclusiveMixedLiteralConfig(ExclusiveMixedConfig):
    """EB+ as it is printed, rule by rule.

    Attributes:
        phase_rule: "exact" is the default's integer T; "threshold" k* = floor(theta0 N); "ifr" the paper's correction
            of theta0; "fixed" ``refill``.
        refill: requests per refill for "fixed".
        mode_rule: what "auto" takes mixed steps to cost. "measured" tells steps with a prefill from those without;
            "crossover" is eq. 8, which charges alpha_MB to every step.
        priority_margin_fraction: delta, advantage demanded of exclusive batching besides; above 0 favours a short
            time to first token, below 0 a short time between tokens.
        overflow_probability: epsilon of N*, which then bounds the batch of exclusive batching besides the slots; None
            sets no such bound.

    Raises:
        ConfigError: a value is out of bounds, or "fixed" comes without ``refill``.
    """

    phase_rule: Literal["exact", "threshold", "ifr", "fixed"] = "exact"
    refill: int | None = None
    mode_rule: Literal["measured", "crossover"] = "measured"
    priority_margin_fraction: float = 0.0
    overflow_probability: float | None = None

    def __post_init__(self) -> None:
        ExclusiveMixedConfig.__post_init__(self)
        require_one_of(("exact", "threshold", "ifr", "fixed"), self, "phase_rule")
        require_one_of(("measured", "crossover"), self, "mode_rule")
        if self.overflow_probability is not None:
            require_probability(self, "overflow_probability")
        require_at_least(1, self, "refill")
        if not isfinite(self.priority_margin_fraction):
            raise ConfigError(f"priority_margin_fraction must be finite, got {self.priority_margin_fraction}")
        if (self.phase_rule == "fixed") != (self.refill is not None):
            raise ConfigError(f'refill goes with phase_rule "fixed", got {self.refill} with "{self.phase_rule}"')


class ExclusiveMixedLiteral(ExclusiveMixed):
    """Chooses a phase for every step, by the rules that its config names.

    Attributes:
        most_exclusive: N*, requests that may run in exclusive batching; inf where nothing bounds them but the slots,
            also where N* is 0: what admission lets run is safer then than one request after another.
    """

    config: ExclusiveMixedLiteralConfig

    def __init__(self, config: ExclusiveMixedLiteralConfig, learned: ExclusiveMixed | None = None) -> None:
        super().__init__(config, learned)
        self.most_exclusive: float = inf
        self._is_safe = True  # at least one request

    @property
    def out_of_reach(self) -> str | None:
        """As ``Targeted``."""
        if self._is_safe:
            return None
        chance = self.config.overflow_probability
        return f"not even one request is safe at overflow_probability {chance:g}, so N* bounds no exclusive batch"

    def exclusive_slots(self, slots: int) -> int:
        return int(min(slots, self.most_exclusive))

    def _phase_plan(self, state: BatchState) -> StepPlan:
        slots = self.exclusive_slots(state.slots)
        if slots == state.slots:
            return super()._phase_plan(state)
        return super()._phase_plan(state._replace(slots=slots))._replace(limited_by=Limit.N_STAR)

    @property
    def _most_phase_steps(self) -> float:
        return super()._most_phase_steps if self.config.phase_rule == "exact" else inf

    def refill(self, slots: int) -> int:
        return self.config.refill or super().refill(slots)

    def _refill_share(self, state: BatchState) -> float:
        if self.config.refill is None:
            return super()._refill_share(state)
        return min(self.config.refill / state.slots, MOST_SHARE)

    def _learn(self, workload: Workload) -> None:
        super()._learn(workload)
        if self.config.overflow_probability is not None:
            most = max_batch_size_exclusive(
                capacity_tokens=workload.capacity_tokens,
                mean_prompt_tokens=workload.means.prompt_tokens,
                std_prompt_tokens=sqrt(workload.moments.var_prompt),
                hazard=workload.hazard,
                threshold=min(self.phase_length.slots_fraction, MOST_SHARE),
                overflow_probability=self.config.overflow_probability,
            )
            self.most_exclusive = most or inf
            self._is_safe = most >= 1

    def _phase_length(self, workload: Workload) -> PhaseLength:
        if self.config.phase_rule == "exact":
            return super()._phase_length(workload)
        refill = self.config.refill or max(1, floor(self._threshold_share(workload) * workload.slots))
        fraction = min(refill / workload.slots, MOST_SHARE)
        return PhaseLength(steps=max(1, round(-log1p(-fraction) / workload.hazard)), slots_fraction=fraction)

    def _threshold_share(self, workload: Workload) -> float:
        """theta0 from the constant hazard, or theta0 + delta theta from the line fitted to the hazard (ERRATA 3.6)."""
        line = hazard_line(workload.table)
        assert line is not None
        corrected = self.config.phase_rule == "ifr"
        hazard = min(line[0], MAX_HAZARD) if corrected else workload.hazard
        prefill_s, decode_s = workload.overheads_s
        share = phase_threshold(overhead_ratio(hazard=hazard, prefill_overhead_s=prefill_s, decode_overhead_s=decode_s))
        if not corrected:
            return share
        ratio = workload.times.decode.decode_s * workload.slots / decode_s
        return phase_threshold_ifr(share, hazard=hazard, hazard_slope=line[1], decode_cost_ratio=ratio)

    def _gain(self, workload: Workload) -> float:
        delta = self.config.priority_margin_fraction
        if self.config.mode_rule == "measured":
            return super()._gain(workload) - delta
        phase = self.phase_length
        margin_s = crossover_margin(workload.times, workload.means, slots=workload.occupancy, **workload.cycle(phase))
        return margin_s / workload.exclusive_token_s(phase) - delta
