"""Gang batches: a batch runs until its longest request ends, as in offline work and plain Transformers serving.

Source: Guldogan et al., "Multi-Bin Batching for Increasing LLM Inference Throughput" (paper 000), Algorithm 1, lines 4
and 5, and its system model (section 3): bins fill up, full batches wait in one queue, first formed, first served.
Departures: a bin's batch also goes when its head has waited max_wait_s, or when no arrivals are left (ERRATA 0.12), and
there may be several servers (0.18).
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from policies.checks import require_at_least, require_positive
from policies.multi_bin import MultiBin
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


@dataclass(frozen=True, slots=True, kw_only=True)
class GangConfig:
    """Batches and servers.

    Attributes:
        batch_size: B.
        servers: batches that run at once.
        max_wait_s: a partial batch goes when its head has waited so long; None waits for a full one.

    Raises:
        ConfigError: a value is out of bounds.
    """

    batch_size: int = 8
    servers: int = 1
    max_wait_s: float | None = None

    def __post_init__(self) -> None:
        require_at_least(1, self, "batch_size", "servers")
        if self.max_wait_s is not None:
            require_positive(self, "max_wait_s")


class GangCluster:
    """Bins that fill up, a queue of formed batches, and servers that run them.

    Attributes:
        batches, busy_s: how many ran, and for how long in all.
        wasted_tokens: row-steps after a row had ended.
    """

    def __init__(self, config: GangConfig, bins: MultiBin, times: GangTimes) -> None:
        self.config = config
        self.batches = 0
        self.busy_s = 0.0
        self.wasted_tokens = 0
        self._bins, self._times = bins, times
        self._filling: list[list[Request]] = [[] for _ in range(bins.config.bins)]
        self._formed: deque[list[Request]] = deque()
        self._idle = config.servers

    def arrive(self, request: Request, now_s: float) -> list[Event]:
        index = self._bins.assign(request.predicted_output_tokens, slo_class=request.slo_class)
        filling = self._filling[index]
        filling.append(request)
        events = []
        if len(filling) >= self.config.batch_size:
            self._form(index)
            events = self._start(now_s)
        elif len(filling) == 1 and self.config.max_wait_s is not None:
            due_s = now_s + self.config.max_wait_s
            events = [Event(due_s, Kind.TIMER, partial(self._overdue, index, request))]
        return events

    def _form(self, index: int) -> None:
        self._formed.append(self._filling[index])
        self._filling[index] = []

    def _overdue(self, index: int, head: Request, now_s: float) -> Iterable[Event]:
        if self._filling[index] and self._filling[index][0] is head:
            self._form(index)
        return self._start(now_s)

    def flush(self, now_s: float) -> list[Event]:
        """No more arrivals: what is left goes as it is."""
        for index, filling in enumerate(self._filling):
            if filling:
                self._form(index)
        return self._start(now_s)

    def _start(self, now_s: float) -> list[Event]:
        events = []
        while self._idle and self._formed:
            batch = self._formed.popleft()
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
        for request in batch:
            self.wasted_tokens += longest - request.output_tokens
            request.generated_tokens = request.output_tokens
            request.first_token_s = request.last_token_s = request.finished_s = now_s
            self._bins.observe(request.output_tokens, slo_class=request.slo_class)
        self._idle += 1
        return self._start(now_s)
