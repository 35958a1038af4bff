"""Gang batches: a batch runs until its longest request ends, as in offline work and plain Transformers serving.

Source: Guldogan et al., "Multi-Bin Batching for Increasing LLM Inference Throughput" (paper 000), Algorithm 1. Which
batch goes next, and when a partial one may, is decided by `policies.gang.batches`, as it is live: a batch that has to
wait for a replica grows until one is idle, up to its size. When no arrivals are left, what is there goes as it is
(ERRATA 0.12). What batches are to an engine with continuous batching, `simulator.router.BatchRouter` has.
"""

import math
from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Protocol

from policies.checks import require_positive
from policies.errors import ConfigError
from policies.gang.batches import GangConfig, LaneView, next_batch
from policies.gang.buckets import PromptBuckets
from policies.gang.prefill import PrefillConfig, prefill_passes
from policies.router.multi_bin import MultiBin
from policies.router.order import FCFS, Order
from policies.types import StepTimes
from simulator.core import Event, Kind
from simulator.requests import Request

_key = attrgetter("key")


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


@dataclass(frozen=True, slots=True)
class _Waits:
    """A request in a lane, since when, and under which key."""

    request: Request
    key: float
    since_s: float


class Lanes:
    """What waits, by class, bin and bucket, until its batch goes.

    Args:
        buckets: which tell the prompts of a bin apart; when they change, what waits moves. None has one.

    Attributes:
        config: how batches are formed, from now on.
    """

    def __init__(self, config: GangConfig, buckets: PromptBuckets | None = None) -> None:
        self.config = config
        self._buckets = buckets
        self._lanes: dict[tuple[str, int, int], list[_Waits]] = {}

    def __iter__(self) -> Iterator[Request]:
        return (waits.request for waits in chain.from_iterable(self._lanes.values()))

    def add(self, request: Request, bin_index: int, key: float, now_s: float, slo_class: str = "") -> float:
        """Returns when its wait for others is over, inf for never."""
        self._put(slo_class, bin_index, self._bucket(request), _Waits(request, key, now_s))
        # The next number, for of the rounded sum less now_s may be left a little less than max_wait_s.
        return math.nextafter(now_s + self.config.max_wait_s, math.inf)

    def _put(self, slo_class: str, bin_index: int, bucket: int, waits: _Waits) -> None:
        insort(self._lanes.setdefault((slo_class, bin_index, bucket), []), waits, key=attrgetter("key"))

    def _bucket(self, request: Request) -> int:
        """Its own, after what waits has moved if its length has changed the buckets."""
        if self._buckets is None:
            return 0
        before, bucket = self._buckets.edges, self._buckets.assign(request.prompt_tokens)
        if self._buckets.edges != before:
            self._move(self._buckets.edges)
        return bucket

    def _move(self, edges: Sequence[float]) -> None:
        before, self._lanes = self._lanes, {}
        for (slo_class, bin_index, _), lane in before.items():
            for waits in lane:
                bucket = bisect_right(edges, waits.request.prompt_tokens, 1, len(edges) - 1) - 1
                self._put(slo_class, bin_index, bucket, waits)

    def take(self, now_s: float, slo_classes: frozenset[str] | None = None) -> list[Request]:
        """The batch that goes next, off its lane; empty when none is formed.

        Args:
            slo_classes: of one of these; None is any.
        """
        lanes = ((name, lane) for name, lane in self._lanes.items() if slo_classes is None or name[0] in slo_classes)
        views = [self._view(*name, lane, now_s) for name, lane in lanes if lane]
        if (chosen := next_batch(views, self.config)) is None:
            return []
        lane = self._lanes[chosen.slo_class, chosen.bin_index, chosen.bucket]
        batch = [waits.request for waits in lane[: len(chosen.keys)]]
        del lane[: len(batch)]
        return batch

    def _view(self, slo_class: str, bin_index: int, bucket: int, lane: list[_Waits], now_s: float) -> LaneView:
        batch = lane[: self.config.size_of(bin_index)]
        return LaneView(
            slo_class=slo_class,
            bin_index=bin_index,
            bucket=bucket,
            keys=[waits.key for waits in batch],
            waited_s=now_s - min(waits.since_s for waits in batch),
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
        self._lanes, self._times, self._order = Lanes(config, buckets), times, order or FCFS()
        self._idle = replicas

    def arrive(self, request: Request, now_s: float) -> list[Event]:
        index = self.bins.assign(request.predicted_output_tokens, slo_class=request.slo_class)
        request.key = self._order.key(request.arrival_s, request.slo_class, request.work_s, request.prompt_tokens)
        due_s = self._lanes.add(request, index, request.key, now_s)
        events = self._start(now_s)
        if request.started_s is None and due_s < math.inf:
            events.append(Event(due_s, Kind.TIMER, self._start))
        return events

    def flush(self, now_s: float) -> list[Event]:
        """No more arrivals: what is left goes as it is."""
        self._lanes.config = replace(self._lanes.config, max_wait_s=0.0)
        return self._start(now_s)

    def _start(self, now_s: float) -> list[Event]:
        events = []
        while self._idle and (batch := self._lanes.take(now_s)):
            self._idle -= 1
            batch_s = self._times.batch_s(batch)
            self.batches += 1
            self.busy_s += batch_s
            for request in batch:
                request.started_s = now_s
            events.append(Event(now_s + batch_s, Kind.STEP, partial(self._end, batch)))
        return events

    def _end(self, batch: list[Request], now_s: float) -> Iterable[Event]:
        longest = max(request.output_tokens for request in batch)
        self.bins.note_time(now_s)
        for request in batch:
            self.wasted_tokens += longest - request.output_tokens
            request.generated_tokens = request.output_tokens
            request.first_token_s = request.last_token_s = request.finished_s = now_s
            self.bins.observe(request.output_tokens, slo_class=request.slo_class)
        self._idle += 1
        return self._start(now_s)
