"""Gang batches: a batch runs until its longest request ends, as in offline work and plain Transformers serving.

Source: Guldogan et al., "Multi-Bin Batching for Increasing LLM Inference Throughput" (paper 000), Algorithm 1. Which
batch goes next, and when a partial one may, is decided by `policies.router.dispatcher`, as it is live: a batch that has
to wait for a replica grows until one is idle, up to its size. When no arrivals are left, what is there goes as it is
(ERRATA 0.12). Batches for engines with continuous batching `simulator.router` hands out.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Protocol

from policies.checks import require_positive
from policies.errors import ConfigError
from policies.gang.batches import GangConfig
from policies.gang.buckets import PromptBuckets
from policies.gang.prefill import PrefillConfig, prefill_passes
from policies.router.dispatcher import Dispatcher
from policies.router.multi_bin import MultiBin
from policies.router.order import FCFS, Order
from policies.router.tickets import ReplicaTerms, Ticket
from policies.types import StepTimes
from simulator.core import Event, Kind
from simulator.requests import Request


class GangTimes(Protocol):
    """How long a batch takes."""

    def batch_s(self, requests: Sequence[Request]) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthTimes:
    """Paper 000's service time: proportional to the longest answer."""

    s_per_token: float

    def __post_init__(self) -> None:
        require_positive(self, "s_per_token")

    def batch_s(self, requests: Sequence[Request]) -> float:
        return self.s_per_token * max(request.output_tokens for request in requests)


PADDED = PrefillConfig(mode="padded", max_pass_tokens=1 << 40)
"""A row for each prompt of a batch, in one pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedTimes:
    """A padded batch: every row is computed at every step until the longest ends.

        prefill(B * P) + sum over n = 1 .. O - 1 of decode(B rows, B * (P + n) tokens of context)

    P and O: the longest prompt and answer. Linear forms sum up in closed form. With a layout of prompts that is not
    padded, the prefill is that of its passes (004).
    """

    times: StepTimes
    prefill: PrefillConfig = PADDED

    def batch_s(self, requests: Sequence[Request]) -> float:
        rows = len(requests)
        prompts = [request.prompt_tokens for request in requests]
        prompt = max(prompts)
        steps = max(request.output_tokens for request in requests) - 1
        decode = self.times.decode
        context = steps * prompt + steps * (steps + 1) / 2.0
        passes = prefill_passes(prompts, self.prefill)
        return (
            sum(self.times.prefill.step_s(prefill_tokens=each.layout.places) for each in passes)
            + steps * (decode.overhead_s + decode.decode_s * rows)
            + decode.kv_s * rows * context
        )


class GangCluster:
    """Bins of waiting requests, and replicas that take whole batches from them, first formed, first served.

    Args:
        buckets: which tell the prompts of a bin apart; when they change, what waits moves. None has one.
        order: of the requests in a bin and bucket.

    Attributes:
        bins, buckets: with the edges in force.
        batches, busy_s: how many ran, and for how long in all.
        wasted_tokens: row-steps after a row had ended.

    Raises:
        ConfigError: there is no replica.
    """

    def __init__(
        self,
        config: GangConfig,
        bins: MultiBin,
        times: GangTimes,
        replicas: int = 1,
        buckets: PromptBuckets | None = None,
        order: Order | None = None,
    ) -> None:
        if replicas < 1:
            raise ConfigError(f"replicas must be at least 1, got {replicas}")
        self.batches = 0
        self.busy_s = 0.0
        self.wasted_tokens = 0
        self.bins, self.buckets = bins, buckets
        self._config, self._times, self._order = config, times, order or FCFS()
        self._dispatcher = Dispatcher()
        self._requests: dict[str, Request] = {}
        self._edges = buckets.edges if buckets else ()
        self._replicas, self._joined, self._busy = replicas, 0, 0

    def _join(self, replica_id: str) -> None:
        terms = ReplicaTerms(gang_max_wait_s=self._config.max_wait_s, gang_patience_s=self._config.patience_s)
        self._dispatcher.register(replica_id, terms, self._config.batch_size, 0.0)
        self._dispatcher.ledger.replicas[replica_id].gang_sizes = self._config.bin_sizes

    def arrive(self, request: Request, now_s: float) -> list[Event]:
        ticket_id = f"{len(self._requests):09}"
        self._requests[ticket_id] = request
        self._dispatcher.queue(self._ticket(request, ticket_id), now_s)
        events = self._start(now_s)
        if request.started_s is None and self._config.max_wait_s < math.inf:
            # The next number, for of the rounded sum less now_s may be left a little less than max_wait_s.
            events.append(Event(math.nextafter(now_s + self._config.max_wait_s, math.inf), Kind.TIMER, self._start))
        return events

    def _ticket(self, request: Request, ticket_id: str) -> Ticket:
        bucket = 0
        if self.buckets is not None:
            bucket = self.buckets.assign(request.prompt_tokens)
            if self.buckets.edges != self._edges:  # by the length of this one
                self._edges = self.buckets.edges
                self._dispatcher.rebin((), self._edges)
        return Ticket(
            request_id=ticket_id,
            bin_index=self.bins.assign(request.predicted_output_tokens, slo_class=request.slo_class),
            deadline_key=self._order.key(request.arrival_s, request.slo_class, 0.0, request.prompt_tokens),
            work_s=0.0,
            router_id="",
            slo_class="",
            bucket=bucket,
            prompt_tokens=None if self.buckets is None else request.prompt_tokens,
        )

    def flush(self, now_s: float) -> list[Event]:
        """No more arrivals: what is left goes as it is."""
        self._config = replace(self._config, max_wait_s=0.0)
        for replica_id in self._dispatcher.ledger.replicas:
            self._join(replica_id)
        return self._start(now_s)

    def _start(self, now_s: float) -> list[Event]:
        events = self._begin(now_s)
        while self._busy == self._joined < self._replicas:  # all are alike, so that one joins when it is needed
            self._join(f"{self._joined:04}")
            self._joined += 1
            events += self._begin(now_s)
        return events

    def _begin(self, now_s: float) -> list[Event]:
        """What idle replicas take."""
        events = []
        for _, places in groupby(self._dispatcher.dispatch(now_s).started, key=attrgetter("replica_id")):
            ids = [place.ticket.request_id for place in places]
            batch = [self._requests[ticket_id] for ticket_id in ids]
            batch_s = self._times.batch_s(batch)
            self.batches += 1
            self._busy += 1
            self.busy_s += batch_s
            for request in batch:
                request.started_s = now_s
            events.append(Event(now_s + batch_s, Kind.STEP, partial(self._end, ids)))
        return events

    def _end(self, ids: list[str], now_s: float) -> Iterable[Event]:
        batch = [self._requests[ticket_id] for ticket_id in ids]
        longest = max(request.output_tokens for request in batch)
        self._busy -= 1
        self.bins.note_time(now_s)
        for ticket_id, request in zip(ids, batch, strict=True):
            self._dispatcher.forget(ticket_id)
            self.wasted_tokens += longest - request.output_tokens
            request.generated_tokens = request.output_tokens
            request.first_token_s = request.last_token_s = request.finished_s = now_s
            self.bins.observe(request.output_tokens, slo_class=request.slo_class)
        return self._start(now_s)
