"""Prefill and decode in pools of their own, with the time that the KV cache takes from one to the other.

A request is prefilled where the prefill pool's router puts it, yields its first token there, and joins the decode
pool's queue when its cache has arrived:

    transfer_s = overhead_s + s_per_token * prompt_tokens

The cache leaves the prefill engine when the prefill ends, as if there were always room to send from. Transfers do not
compete with each other; a decode engine that preempts recomputes the prompt itself.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

from policies.checks import require_at_least
from simulator.cluster import ClusterConfig, Run, Source, new_router
from simulator.core import Event, EventLoop, Kind
from simulator.engine import Engine
from simulator.requests import Request
from simulator.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferConfig:
    """How the cache moves; 131 072 bytes per token (Llama-3.1-8B, 16 bits) over 25 GB/s take 5.2 microseconds.

    Raises:
        ConfigError: a value is out of bounds.
    """

    prefill_replicas: int = 1
    overhead_s: float = 0.002
    s_per_token: float = 5.2e-6

    def __post_init__(self) -> None:
        require_at_least(1, self, "prefill_replicas")
        require_at_least(0, self, "overhead_s", "s_per_token")

    def transfer_s(self, prompt_tokens: int) -> float:
        return self.overhead_s + self.s_per_token * prompt_tokens


class _Pools:
    """The two routers, and the way from the one to the other."""

    def __init__(self, config: ClusterConfig, transfer: TransferConfig, on_progress: Callable[[int], object]) -> None:
        self._transfer, self._on_progress = transfer, on_progress
        self._prefill, self._decode = new_router(config), new_router(config)
        self._whole: dict[str, Request] = {}
        stock = replace(config, batch="stock", batch_settings={})
        self.engines = [
            *(self._engine(f"prefill-{n}", stock, self._prefilled) for n in range(transfer.prefill_replicas)),
            *(self._engine(f"decode-{n}", config, self._decoded) for n in range(config.replicas)),
        ]

    def _engine(
        self, name: str, config: ClusterConfig, ended: Callable[[float, Engine, list[Request]], Iterable[Event]]
    ) -> Engine:
        return Engine(name, config.engine, config.batch_policy(), config.clock or config.times, ended)

    def start(self) -> list[Event]:
        events = []
        for engine in self.engines:
            router = self._prefill if engine.replica_id.startswith("prefill") else self._decode
            events += router.join(engine, 0.0)
        return events

    def arrive(self, request: Request, now_s: float) -> list[Event]:
        self._whole[request.request_id] = request
        return self._prefill.arrive(replace(request, output_tokens=1), now_s)

    def _prefilled(self, now_s: float, engine: Engine, parts: list[Request]) -> Iterable[Event]:
        events = self._prefill.finished(now_s, engine, parts)
        for part in parts:
            request = self._whole.pop(part.request_id)
            request.started_s, request.preemptions = part.started_s, part.preemptions
            request.first_token_s = request.last_token_s = now_s
            request.generated_tokens, request.cached_tokens = 1, request.prompt_tokens
            if request.output_tokens == 1:
                request.finished_s, request.replica_id = now_s, part.replica_id
                self._on_progress(1)
            else:
                due_s = now_s + self._transfer.transfer_s(request.prompt_tokens)
                events.append(Event(due_s, Kind.ARRIVAL, partial(self._decode.arrive, request)))
        return events

    def _decoded(self, now_s: float, engine: Engine, requests: list[Request]) -> Iterable[Event]:
        self._on_progress(len(requests))
        return self._decode.finished(now_s, engine, requests)


def run_disaggregated(
    config: ClusterConfig,
    transfer: TransferConfig,
    workload: Workload,
    on_progress: Callable[[int], object] | None = None,
) -> Run:
    """Serve the workload with ``config.replicas`` engines that decode, besides those that prefill."""
    requests = workload.requests()
    capacity = config.engine.capacity_tokens
    served = [r for r in requests if r.prompt_tokens + r.output_tokens <= capacity]
    refused = [r for r in requests if r.prompt_tokens + r.output_tokens > capacity]
    pools = _Pools(config, transfer, on_progress or (lambda count: None))
    loop = EventLoop()
    loop.add(pools.start())
    loop.add(Source(served, None, pools.arrive).start())
    loop.run()
    last_s = max((r.finished_s for r in served if r.finished_s is not None), default=0.0)
    return Run(served, refused, pools.engines, last_s, last_s * len(pools.engines), loop.events)
