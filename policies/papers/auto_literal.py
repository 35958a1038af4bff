"""The engine's default policy with the papers' literal rules in the place of some of its parts.

Sources: 001 (memory-aware and SLA-constrained dynamic batching), 003 (EB+). Each rule works for itself; what none of
them says, ``policies.engine.auto`` decides.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import inf
from typing import Any, Literal

from policies.engine.auto import Auto, AutoConfig
from policies.engine.exclusive import ExclusiveMixed
from policies.engine.reading_pace import ReadingPace
from policies.errors import ConfigError
from policies.papers.by_promise import ByPromise
from policies.papers.chunk_size import ChunkSize, ChunkSizeConfig
from policies.papers.exclusive_mixed_literal import ExclusiveMixedLiteral, ExclusiveMixedLiteralConfig
from policies.papers.latency_search import TOLERANCE_FRACTION
from policies.papers.memory_aware import MemoryAware, MemoryAwareConfig
from policies.papers.sla_constrained import SlaConstrained, SlaConstrainedConfig
from policies.papers.smallest import Smallest
from policies.types import BatchPolicy, StepResult

_OF_SEARCH = ("itl_target_s", "itl_tolerance_fraction", "min_batch_size", "search_width", "search_drift")


@dataclass(frozen=True, slots=True, kw_only=True)
class PapersConfig:
    """Literal rules of the papers, each in the place of what Sluice does (docs/concepts/papers.md)."""

    memory: Literal["exact", "linear"] | None = None
    """How many requests memory is safe for by 001's Algorithm 1: eq. 12, or eq. 14 with the buffer L0 of eq. 13. null
    is `engine.scheduler.admission`."""
    memory_basis: Literal["final", "resident"] = "final"
    """With `memory`, a request counts as it is at its end, or at a random step of it, which is safer where the lengths
    of answers scatter more than geometric ones."""
    overflow_probability: float = 0.01
    """The chance, between 0 and 1, that the batch of `memory` or `bounds_exclusive` outgrows the KV cache."""
    sla: Literal["search"] | None = None
    """How many requests, and prompt tokens beside them, a time between tokens allows: `search` is 001's Algorithm 2,
    which goes by how long steps took. null goes by Sluice's model of step times. Admission and phases stay."""
    itl_target_s: float | None = None
    """With `sla`, 001's D_SLA: the mean time between tokens that is held, whatever was promised. null is the strictest
    `tpot_s` that requests in the engine were promised, and nothing is bounded where there is none."""
    itl_tolerance_fraction: float = TOLERANCE_FRACTION
    """With `sla`, 001's epsilon_D as a share of the target, between 0 and 1: a time so little below it is on it."""
    min_batch_size: int = 1
    """With `sla`, 001's B_min: the least that the batch is cut to. B_max is `engine.scheduler.max_batch_size`."""
    search_width: int = 16
    """With `sla`, 001's alpha, in requests: how wide the search is around a batch on target, and how far it climbs at
    once beyond what is known to be safe."""
    search_drift: int = 1
    """With `sla`, 001's delta, in requests: by how much a bound of the search gives way first."""
    phase_rule: Literal["exact", "threshold", "ifr"] = "exact"
    """How long exclusive batching decodes between refills: the best length for the lengths of answers as measured, or
    003's theta0 for geometric ones, or that with its correction for a rising hazard."""
    refill: int | None = None
    """003's k, at least 1: the free slots at which exclusive batching refills. null is what `phase_rule` says."""
    mode_rule: Literal["measured", "crossover"] = "measured"
    """What `mode: auto` goes by: costs of steps with and without a prefill, or 003's eq. 8, which takes every mixed
    step to hold one."""
    priority_margin_fraction: float = 0.0
    """003's delta: how much cheaper a token must be in exclusive batching than in mixed. Above 0 favours a short time
    to the first token, below 0 a short time per token."""
    bounds_exclusive: bool = False
    """Whether 003's N* bounds the batch of exclusive batching, besides slots and admission."""
    literal_buckets: bool = False
    """Whether prompt buckets of batches follow BucketServe's Algorithm 1 (002): a bucket of more than
    `engine.gang.batch_size` prompts, of which most are in its lower half, is halved, up to `bins.prompt_buckets`. Else
    they are cut where padding is saved."""

    def __post_init__(self) -> None:
        if self.refill is not None and self.phase_rule != "exact":
            raise ConfigError(f'refill fixes what phase_rule "{self.phase_rule}" would say: leave one of them out')
        if self.memory is None and self.memory_basis != "final":
            raise ConfigError(f'memory_basis "{self.memory_basis}" is of memory, which is not set')
        if self.sla not in (None, "search"):
            raise ConfigError(f'sla must be "search" or null, got "{self.sla}"')
        for each in fields(self):
            if self.sla is None and each.name in _OF_SEARCH and getattr(self, each.name) != each.default:
                given = f"{each.name} {getattr(self, each.name)}"
                raise ConfigError(f'{given} is of sla, which is not set: set sla "search", or leave it out')
        self.memory_aware()
        self.phases()
        self.search(1.0 if self.itl_target_s is None else self.itl_target_s)

    def memory_aware(self) -> MemoryAwareConfig:
        return MemoryAwareConfig(
            form=self.memory or "exact", basis=self.memory_basis, overflow_probability=self.overflow_probability
        )

    def phases(self, **of_phases: Any) -> ExclusiveMixedLiteralConfig:
        """With the keywords of its base, ``ExclusiveMixedConfig``."""
        return ExclusiveMixedLiteralConfig(
            **of_phases,
            phase_rule=self.phase_rule if self.refill is None else "fixed",
            refill=self.refill,
            mode_rule=self.mode_rule,
            overflow_probability=self.overflow_probability if self.bounds_exclusive else None,
            priority_margin_fraction=self.priority_margin_fraction,
        )

    def search(self, itl_target_s: float) -> tuple[SlaConstrainedConfig, ChunkSizeConfig]:
        """The searches for the batch and for the prompt tokens beside decodes."""
        batch = SlaConstrainedConfig(
            itl_target_s=itl_target_s,
            itl_tolerance_fraction=self.itl_tolerance_fraction,
            min_batch_size=self.min_batch_size,
            search_width=self.search_width,
            search_drift=self.search_drift,
            fused=True,
        )
        chunk = ChunkSizeConfig(itl_target_s=itl_target_s, itl_tolerance_fraction=self.itl_tolerance_fraction)
        return batch, chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoLiteralConfig(AutoConfig):
    """``AutoConfig``, and the rules that replace some of its parts.

    Raises:
        ConfigError: a value is out of bounds.
    """

    papers: PapersConfig = PapersConfig()

    def phases(self) -> ExclusiveMixedLiteralConfig:
        return self.papers.phases(**self.of_phases())


class AutoLiteral(Auto):
    """``Auto``, with the parts that ``AutoLiteralConfig.papers`` names."""

    config: AutoLiteralConfig

    def _phases(self, learned: ExclusiveMixed | None) -> ExclusiveMixed:
        return ExclusiveMixedLiteral(self.config.phases(), learned)

    def _admission(self, learned: BatchPolicy | None, known_as: Sequence[int | None] | None) -> BatchPolicy:
        if self.config.papers.memory is None:
            return super()._admission(learned, known_as)
        return MemoryAware(self.config.papers.memory_aware(), learned if isinstance(learned, MemoryAware) else None)

    def _latency(self) -> BatchPolicy:
        rules = self.config.papers
        if rules.sla is None:
            return super()._latency()
        self._pace = ReadingPace()
        return ByPromise(self._search) if rules.itl_target_s is None else self._search(rules.itl_target_s)

    def _search(self, itl_target_s: float) -> BatchPolicy:
        batch, chunk = self.config.papers.search(itl_target_s)
        return Smallest(SlaConstrained(batch), ChunkSize(chunk))

    @property
    def strictest_s(self) -> float:
        """As of ``Auto``. A target that nobody was promised ends no phase."""
        if self.config.papers.sla is None:
            return super().strictest_s
        return self.latency.strictest_s if isinstance(self.latency, ByPromise) else inf

    @property
    def seconds_per_prompt_token(self) -> float | None:
        """As of ``Auto``. A search foresees nothing: until steps behind a queue have shown how fast prompts are read,
        this is the least that they can take."""
        if self.config.papers.sla is None:
            return super().seconds_per_prompt_token
        times = self.phases.model.times()
        return None if times is None else self._pace.at_least(times.prefill.prefill_s)

    def observe(self, result: StepResult) -> None:
        super().observe(result)
        if self.config.papers.sla is not None:
            self._pace.observe(result)
            self.answers.observe(result)


def auto(
    config: AutoLiteralConfig, learned: Auto | None = None, *, known_as: Sequence[int | None] | None = None
) -> Auto:
    """``Auto``, and ``AutoLiteral`` where a rule is chosen by name; arguments as of both."""
    kind = Auto if config.papers == PapersConfig() else AutoLiteral
    return kind(config, learned, known_as=known_as)
