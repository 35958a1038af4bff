"""Gang batches: a batch runs until its longest request ends, as in offline work and plain Transformers serving.

Source: Guldogan et al., "Multi-Bin Batching for Increasing LLM Inference Throughput" (paper 000), Algorithm 1. Which
batch goes next, and when a partial one may, is decided by `policies.gang.batches`, as it is live: a batch that has to
wait for a replica grows until one is idle, up to its size. When no arrivals are left, what is there goes as it is
(ERRATA 0.12). What batches are to an engine with continuous batching, `simulator.router.BatchRouter` has.
"""

import math
from bisect import insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Protocol

from policies.checks import require_positive
from policies.errors import ConfigError
from policies.gang.batches import GangConfig, LaneView, next_batch
from policies.router.multi_bin import MultiBin
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedTimes:
    """A padded batch: every row is computed at every step until the longest ends.

        prefill(B * P) + sum over n = 1 .. O - 1 of decode(B rows, B * (P + n) tokens of context)

    P and O: the longest prompt and answer. Linear forms sum up in closed form.
    """

    times: StepTimes

    def batch_s(self, requests: Sequence[Request]) -> float:
        rows = len(requests)
        prompt = max(request.prompt_tokens for request in requests)
        steps = max(request.output_tokens for request in requests) - 1
        decode = self.times.decode
        context = steps * prompt + steps * (steps + 1) / 2.0
        return (
            self.times.prefill.step_s(prefill_tokens=rows * prompt)
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
    """What waits, by class and bin, until its batch goes.

    Attributes:
        config: how batches are formed, from now on.
    """

    def __init__(self, config: GangConfig) -> None:
        self.config = config
        self._lanes: dict[tuple[str, int], list[_Waits]] = {}

    def __iter__(self) -> Iterator[Request]:
        return (waits.request for waits in chain.from_iterable(self._lanes.values()))

    def add(self, request: Request, bin_index: int, key: float, now_s: float, slo_class: str = "") -> float:
        """Returns when its wait for others is over, inf for never."""
        lane = self._lanes.setdefault((slo_class, bin_index), [])
        insort(lane, _Waits(request, key, now_s), key=attrgetter("key"))
        # The next number, for of the rounded sum less now_s may be left a little less than max_wait_s.
        return math.nextafter(now_s + self.config.max_wait_s, math.inf)

    def take(self, now_s: float, slo_classes: frozenset[str] | None = None) -> list[Request]:
        """The batch that goes next, off its lane; empty when none is formed.

        Args:
            slo_classes: of one of these; None is any.
        """
        lanes = ((name, lane) for name, lane in self._lanes.items() if slo_classes is None or name[0] in slo_classes)
        views = [self._view(*name, lane, now_s) for name, lane in lanes if lane]
        if (chosen := next_batch(views, self.config)) is None:
            return []
        lane = self._lanes[chosen.slo_class, chosen.bin_index]
        batch = [waits.request for waits in lane[: len(chosen.keys)]]
        del lane[: len(batch)]
        return batch

    def _view(self, slo_class: str, bin_index: int, lane: list[_Waits], now_s: float) -> LaneView:
        batch = lane[: self.config.size_of(bin_index)]
        return LaneView(
            slo_class=slo_class,
            bin_index=bin_index,
            keys=[waits.key for waits in batch],
            waited_s=now_s - min(waits.since_s for waits in batch),
        )


class GangCluster:
    """Bins of waiting requests, and replicas that take whole batches from them, first formed, first served.

    Attributes:
        bins: with the edges in force.
        batches, busy_s: how many ran, and for how long in all.
        wasted_tokens: row-steps after a row had ended.

    Raises:
        ConfigError: there is no replica.
    """

    def __init__(self, config: GangConfig, bins: MultiBin, times: GangTimes, replicas: int = 1) -> None:
        if replicas < 1:
            raise ConfigError(f"replicas must be at least 1, got {replicas}")
        self.batches = 0
        self.busy_s = 0.0
        self.wasted_tokens = 0
        self.bins = bins
        self._lanes, self._times = Lanes(config), times
        self._idle = replicas

    def arrive(self, request: Request, now_s: float) -> list[Event]:
        index = self.bins.assign(request.predicted_output_tokens, slo_class=request.slo_class)
        due_s = self._lanes.add(request, index, request.arrival_s, now_s)
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
