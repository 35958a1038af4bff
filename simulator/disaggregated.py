"""Prefill and decode in pools of their own, with the time that the KV cache takes from one to the other.

The policies are those of the live router (`policies.router.prefill_decode`): which requests are split, in which order
prompts are read, how many a prefill replica holds. As there, the decode replica gives the first token: it computes the
last token of the prompt again when the cache has arrived,

    transfer_s = overhead_s + s_per_token * prompt_tokens

after the prefill ended. The cache leaves the prefill engine at once, as if there were always room to send from.
Transfers do not compete with each other; a decode engine that preempts recomputes the prompt itself.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from statistics import fmean

from policies.checks import require_at_least
from policies.errors import ConfigError
from policies.router.placement import work_s
from policies.router.prefill_decode import (
    BucketOrder,
    BucketOrderConfig,
    PrefillDecode,
    PrefillDecodeConfig,
    PrefillOffer,
    SplitState,
    Why,
    prefill_replicas,
    prefill_slots,
    safe_prompts,
)
from policies.types import RequestView, StepTimes
from simulator.cluster import ClusterConfig, Run, Source, admitted, end_s, new_router
from simulator.core import Event, EventLoop, Kind
from simulator.engine import Engine
from simulator.requests import Request
from simulator.router import SHARED_BATCH_SIZE
from simulator.workload import Workload

_ONE_POOL = ("clients", "failures", "autoscale", "replica_classes")  # what only a cluster of one pool simulates


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolsConfig:
    """The pool that prefills, and what goes there.

    Attributes:
        prefill_replicas: besides those of the cluster, which decode.
        split: which requests, and how their caches move.
        memory_share: of its cache that the prompts may take which a prefill replica holds.
        itl_targets_s: what classes promise between tokens; "*" stands for every one not named.

    Raises:
        ConfigError: a value is out of bounds.
    """

    prefill_replicas: int = 1
    split: PrefillDecodeConfig = field(default_factory=lambda: PrefillDecodeConfig(mode="always", min_prompt_tokens=1))
    memory_share: float = 0.9
    itl_targets_s: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_at_least(1, self, "prefill_replicas")
        if not 0.0 < self.memory_share <= 1.0:
            raise ConfigError(f"memory_share must be above 0 and at most 1, got {self.memory_share}")

    def itl_target_s(self, slo_class: str | None) -> float | None:
        return self.itl_targets_s.get(slo_class or "*", self.itl_targets_s.get("*"))


def planned_prefill_replicas(workload: Workload, times: StepTimes, replicas: int) -> int:
    """By the policy, from the work of reading and of answering these requests; 0 leaves them unsplit."""
    prefill_s = decode_s = 0.0
    for request in workload.requests():
        view = RequestView(request_id="", arrival_s=0.0, prompt_tokens=request.prompt_tokens)
        reading_s = times.prefill.prefill_s * request.prompt_tokens
        both_s = work_s(view, times, output_tokens=request.output_tokens, shared_batch_size=SHARED_BATCH_SIZE)
        prefill_s, decode_s = prefill_s + reading_s, decode_s + both_s - reading_s
    return prefill_replicas(replicas, prefill_s, decode_s)


class _ByBucket:
    """The order of prompts, as the simulator's router asks for it."""

    def __init__(self) -> None:
        self._order = BucketOrder(BucketOrderConfig())

    def key(self, arrival_s: float, slo_class: str | None, estimated_work_s: float, prompt_tokens: int) -> float:
        return self._order.key(arrival_s, self._order.assign(prompt_tokens))


class _Pools:
    """The two routers, and the way from the one to the other."""

    def __init__(
        self, config: ClusterConfig, pools: PoolsConfig, workload: Workload, on_progress: Callable[[int], object]
    ) -> None:
        self._pools, self._on_progress = pools, on_progress
        self._policy = PrefillDecode(pools.split, config.times)
        self._prefill = new_router(replace(config, bins=None), order=_ByBucket())
        self._decode = new_router(config)
        self._whole: dict[str, Request] = {}
        self._replicas = count()
        self._reading_s = 0.0
        self._decoding = [self._engine(f"decode-{n}", config, self._decoded) for n in range(config.replicas)]
        reader = _reader(config, pools, workload)
        self._reading = [self._engine(f"prefill-{n}", reader, self._prefilled) for n in range(pools.prefill_replicas)]
        self.engines = [*self._reading, *self._decoding]

    def _engine(
        self, name: str, config: ClusterConfig, ended: Callable[[float, Engine, list[Request]], Iterable[Event]]
    ) -> Engine:
        return Engine(name, config.engine, config.batch_policy(), config.engine_clock(next(self._replicas)), ended)

    def start(self) -> list[Event]:
        events = [event for engine in self._reading for event in self._prefill.join(engine, 0.0)]
        return events + [event for engine in self._decoding for event in self._decode.join(engine, 0.0)]

    def arrive(self, request: Request, now_s: float) -> list[Event]:
        if request.output_tokens == 1 or self._policy.choose(self._state(request)) is not Why.SPLIT:
            return self._decode.arrive(request, now_s)
        self._whole[request.request_id] = request
        self._reading_s += self._policy.prefill_s(request.prompt_tokens)
        return self._prefill.arrive(replace(request, output_tokens=1), now_s)

    def _state(self, request: Request) -> SplitState:
        contexts = [tokens for engine in self._decoding if (tokens := engine.mean_context_tokens) is not None]
        return SplitState(
            prompt_tokens=request.prompt_tokens,
            itl_target_s=self._pools.itl_target_s(request.slo_class),
            offers=[PrefillOffer(wait_s=self._reading_s / len(self._reading)) for _ in self._reading],
            decode_batch=sum(engine.holds for engine in self._decoding) / len(self._decoding),
            context_tokens=fmean(contexts) if contexts else None,
        )

    def _prefilled(self, now_s: float, engine: Engine, parts: list[Request]) -> Iterable[Event]:
        events = self._prefill.finished(now_s, engine, parts)
        for part in parts:
            request = self._whole.pop(part.request_id)
            self._reading_s -= self._policy.prefill_s(request.prompt_tokens)
            request.started_s, request.preemptions = part.started_s, part.preemptions
            request.cached_tokens = request.prompt_tokens
            due_s = now_s + self._pools.split.transfer.transfer_s(request.prompt_tokens)
            events.append(Event(due_s, Kind.ARRIVAL, partial(self._decode.arrive, request)))
        return events

    def _decoded(self, now_s: float, engine: Engine, requests: list[Request]) -> Iterable[Event]:
        self._on_progress(len(requests))
        return self._decode.finished(now_s, engine, requests)


def _reader(config: ClusterConfig, pools: PoolsConfig, workload: Workload) -> ClusterConfig:
    """An engine that only prefills: plain batches, and as many prompts as fit two of its steps and its cache."""
    mean_tokens = float(workload.prompt_tokens.mean())
    of_steps = prefill_slots(config.engine.max_batch_tokens, mean_tokens)
    safe = safe_prompts((), mean_tokens, pools.memory_share * config.engine.capacity_tokens)
    engine = replace(config.engine, slots=min(config.engine.slots, of_steps, safe))
    return replace(config, engine=engine, batch="stock", batch_settings={})


def run_disaggregated(
    config: ClusterConfig,
    pools: PoolsConfig,
    workload: Workload,
    on_progress: Callable[[int], object] | None = None,
) -> Run:
    """Serve the workload with ``config.replicas`` engines that decode, besides those that prefill.

    Raises:
        ConfigError: the cluster has clients, failures, scaling, reserved replicas or engines that refuse, which pools
            do not know.
    """
    if config.engine.refuses:
        raise ConfigError("a pool for prefill cannot be simulated with max_num_queued_reqs or max_num_queued_tokens")
    if config.router.batches is not None:
        raise ConfigError("a pool for prefill cannot be simulated with batches, which caches would have to wait for")
    if unknown := [name for name in _ONE_POOL if getattr(config, name)]:
        raise ConfigError(f"a pool for prefill cannot be simulated with {', '.join(unknown)}")
    served, refused = admitted(config, workload)
    config = replace(config, engine=config.engine.serving(served))
    both = _Pools(config, pools, workload, on_progress or (lambda count: None))
    loop = EventLoop()
    loop.add(both.start())
    loop.add(Source(served, None, both.arrive).start())
    loop.run()
    last_s = end_s(served)
    return Run(served, refused, both.engines, last_s, last_s * len(both.engines), loop.events)
