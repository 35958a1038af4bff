"""What policies see and what they answer: frozen snapshots in, frozen decisions out.

A driver (vLLM scheduler plug-in, router, simulator) builds a snapshot, asks, and applies the answer. Times are seconds
on the driver's own clock and are comparable only within one driver. Counts are requests or tokens as the suffix says.

The running batch is a structure of arrays, because a snapshot is taken at every engine step and may hold hundreds of
requests; the waiting queue is a short tuple of views, because only its head can be admitted in the next step.
Policies treat every array as read-only and keep no reference to one after ``plan`` returns: a driver may hand out
views of buffers that it overwrites at the next step.

What is made anew at every step or for every request is a named tuple, given by keyword like the rest: a frozen
dataclass takes about three times as long to make.
"""

from dataclasses import dataclass, fields
from enum import Enum
from functools import cached_property
from math import inf
from typing import NamedTuple, Protocol, Self, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from policies.errors import ConfigError, InputError

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

_LEAST_STEP_S = 1e-6


class Phase(Enum):
    """What one forward pass may hold."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


class Limit(Enum):
    """Which limit made a batch cap as small as it is."""

    MEMORY = "memory"
    SLA = "sla"
    SLOTS = "slots"


class RequestView(NamedTuple):
    """One request that waits, in a router's bin or in an engine's queue.

    Attributes:
        arrival_s: when it reached this driver, on the driver's clock.
        prompt_tokens: length of the prompt, known exactly.
        output_tokens: already generated, above 0 only after a preemption or a resume; they are prefilled again.
        cached_tokens: leading tokens whose KV is already in the cache (prefix hit); not prefilled again.
        predicted_output_tokens: the predictor's mean for the whole answer, or None when there is no prediction.
        max_output_tokens: the caller's own cap, or None.
        class_index: which length statistics it belongs to, 0 <= class_index < number of classes.
        slo_class: label of the service level, or None.
        deadline_s: when its first token is due, on the driver's clock; inf where none was promised.
        tpot_s: mean seconds a token that were promised to it; inf where none were.
    """

    request_id: str
    arrival_s: float
    prompt_tokens: int
    output_tokens: int = 0
    cached_tokens: int = 0
    predicted_output_tokens: float | None = None
    max_output_tokens: int | None = None
    class_index: int = 0
    slo_class: str | None = None
    deadline_s: float = inf
    tpot_s: float = inf

    @property
    def prefill_tokens(self) -> int:
        """Tokens that a prefill must still compute: prompt + generated before - cached."""
        return max(0, self.prompt_tokens + self.output_tokens - self.cached_tokens)


@dataclass(frozen=True, eq=False)
class RunningRequests:
    """The running batch as arrays of one length n; row i is one request, in the driver's order.

    Attributes:
        prompt_tokens: int64, shape (n,).
        output_tokens: int64, shape (n,); generated so far (a driver with steps in flight may lag by those steps).
        prefill_tokens_left: int64, shape (n,); 0 once a request decodes.
        class_index: int64, shape (n,).
        predicted_output_tokens: float64, shape (n,); NaN where there is no prediction.
        deadline_s: float64, shape (n,); when the first token is, or was, due; inf where none was promised.
        first_token_s: float64, shape (n,); when it came; NaN before.
        tpot_s: float64, shape (n,); mean seconds a token that were promised; inf where none were.
    """

    prompt_tokens: IntArray
    output_tokens: IntArray
    prefill_tokens_left: IntArray
    class_index: IntArray
    predicted_output_tokens: FloatArray
    deadline_s: FloatArray
    first_token_s: FloatArray
    tpot_s: FloatArray

    @classmethod
    def of(
        cls,
        *,
        prompt_tokens: ArrayLike,
        output_tokens: ArrayLike,
        prefill_tokens_left: ArrayLike | None = None,
        class_index: ArrayLike | None = None,
        predicted_output_tokens: ArrayLike | None = None,
        deadline_s: ArrayLike | None = None,
        first_token_s: ArrayLike | None = None,
        tpot_s: ArrayLike | None = None,
    ) -> Self:
        """Build from any sequences, with the shapes checked; drivers that own buffers call the constructor instead.

        Raises:
            InputError: the arrays differ in length or are not one-dimensional.
        """
        prompt = np.asarray(prompt_tokens, dtype=np.int64)

        def counts(given: ArrayLike | None) -> IntArray:
            return np.zeros(prompt.shape, dtype=np.int64) if given is None else np.asarray(given, dtype=np.int64)

        def seconds(given: ArrayLike | None, missing: float) -> FloatArray:
            return np.full(prompt.shape, missing) if given is None else np.asarray(given, dtype=np.float64)

        made = cls(
            prompt,
            counts(output_tokens),
            counts(prefill_tokens_left),
            counts(class_index),
            seconds(predicted_output_tokens, np.nan),
            seconds(deadline_s, inf),
            seconds(first_token_s, np.nan),
            seconds(tpot_s, inf),
        )
        shapes = {getattr(made, column.name).shape for column in fields(made)}
        if prompt.ndim != 1 or len(shapes) != 1:
            raise InputError(f"running arrays must share one shape (n,), got {sorted(shapes)}")
        return made

    @classmethod
    def empty(cls) -> Self:
        return cls.of(prompt_tokens=(), output_tokens=())

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    @cached_property
    def total_prompt_tokens(self) -> int:
        return int(np.add.reduce(self.prompt_tokens))

    @cached_property
    def total_tokens(self) -> int:
        """Prompts and answers so far, of all together."""
        return self.total_prompt_tokens + int(np.add.reduce(self.output_tokens))

    @cached_property
    def prefilling_count(self) -> int:
        """How many have a part of their prompt still to compute."""
        return int(np.count_nonzero(self.prefill_tokens_left))

    @cached_property
    def computed_tokens(self) -> int:
        """Of these, all but what is left of prompts."""
        return self.total_tokens - int(np.add.reduce(self.prefill_tokens_left))


class BatchState(NamedTuple):
    """One engine just before a step.

    Attributes:
        now_s: the driver's clock.
        waiting: head of the queue in the order in which the driver would start requests, at most as long as the
            driver likes but not empty while anything waits; a request that was preempted stands here again.
        waiting_count: length of the whole queue, >= len(waiting).
        slots: most requests that may run at once (vLLM's max_num_seqs).
        free_blocks, total_blocks: KV blocks; what a prefix cache holds and may evict counts as free.
        block_size: tokens per block.
        max_batch_tokens: most tokens the engine computes in one step.
        departed: requests that have left the batch so far, however: only differences count.
        max_model_len: most tokens of one request, prompt and answer; None where the driver does not say.
        cuts_prompts: whether a step may hold a part of a prompt.
    """

    now_s: float
    running: RunningRequests
    waiting: tuple[RequestView, ...]
    waiting_count: int
    slots: int
    free_blocks: int
    total_blocks: int
    block_size: int
    max_batch_tokens: int
    departed: int
    max_model_len: int | None = None
    cuts_prompts: bool = True

    @property
    def capacity_tokens(self) -> int:
        return self.total_blocks * self.block_size

    @property
    def free_tokens(self) -> int:
        return self.free_blocks * self.block_size

    @property
    def running_count(self) -> int:
        return len(self.running)

    @property
    def prefilling_count(self) -> int:
        """Running requests with a part of their prompt still to compute."""
        return self.running.prefilling_count

    @property
    def free_slots(self) -> int:
        return max(0, self.slots - self.running_count)


class StepPlan(NamedTuple):
    """What the next step may do, and for how long that may stand.

    The driver asks again when one of ``steps`` and ``departures`` is over, and whenever something happens that matters
    (``policies.engine.standing_plan``).

    Attributes:
        phase: DECODE starts nobody and defers prefill chunks; PREFILL leaves running decodes out; MIXED does both.
        max_batch_size: most requests that may run at once, >= 1. Below the present batch it evicts nothing: the batch
            drains by completions.
        limited_by: which limit made max_batch_size what it is.
        max_batch_tokens: most tokens of a step, >= 1.
        starts: how many of those that wait may start, from the head of the queue, while the plan stands; inf is any
            number.
        steps: steps, this one included, before the driver asks again, >= 1.
        departures: requests that may leave the batch before the driver asks again.
        max_prefill_tokens: most prompt tokens of a MIXED step in which somebody decodes, >= 0; None is no such bound.
    """

    phase: Phase
    max_batch_size: int
    limited_by: Limit
    max_batch_tokens: int
    starts: float = inf
    steps: int = 1
    departures: float = inf
    max_prefill_tokens: int | None = None

    def budget(self, decodes: int) -> int:
        """Most tokens of a step in which so many get a token; those whose last one is in flight get none."""
        if self.max_prefill_tokens is None or not decodes:
            return self.max_batch_tokens
        return min(self.max_batch_tokens, decodes + self.max_prefill_tokens)


class FinishedRequest(NamedTuple):
    """A request that left the engine in a step; ``aborted`` ones only say that the answer was at least this long."""

    prompt_tokens: int
    output_tokens: int
    class_index: int = 0
    predicted_output_tokens: float | None = None
    aborted: bool = False


class StepResult(NamedTuple):
    """One executed step.

    Attributes:
        now_s: the driver's clock when the step ended.
        step_s: seconds the engine was busy with it; a wait for work does not count.
        phase: the phase it was planned with.
        prefill_tokens, prefill_requests: tokens computed for prompts, and for how many requests.
        decode_requests: requests that decoded one token each.
        kv_tokens: tokens of context that the decoding requests read, summed over them.
        max_batch_size: the cap in force; running_count, waiting_count: the batch and the queue after admission.
        preempted: requests that lost their KV in this step.
        prefill_kv_tokens: tokens of context that the tokens of prompts read, summed over them (`chunk_kv_tokens`).
        finished: requests that ended with this step.
    """

    now_s: float
    step_s: float
    phase: Phase
    prefill_tokens: int
    prefill_requests: int
    decode_requests: int
    kv_tokens: int
    max_batch_size: int
    running_count: int
    waiting_count: int
    preempted: int = 0
    prefill_kv_tokens: int = 0
    finished: tuple[FinishedRequest, ...] = ()

    @property
    def scheduled_tokens(self) -> int:
        return self.prefill_tokens + self.decode_requests

    @property
    def tells_time(self) -> bool:
        """Whether step times can be learned from it: it computed tokens and took a finite time, at least a microsecond.
        Anything shorter is a clock's rounding; NaN and infinity would stay in a fit for good."""
        return self.scheduled_tokens > 0 and _LEAST_STEP_S <= self.step_s < inf


class BatchPolicy(Protocol):
    """Decides step by step what an engine runs; owns whatever state its decisions need and nothing else."""

    def plan(self, state: BatchState) -> StepPlan:
        """Decide the next step. Changes nothing in ``state``; equal histories of calls give equal answers."""

    def observe(self, result: StepResult) -> None:
        """Take note of one executed step; called once per step, in order."""


@runtime_checkable
class Paced(Protocol):
    """A batch policy that knows how long reading prompts takes: a driver sorts its queue by promises then."""

    @property
    def seconds_per_prompt_token(self) -> float | None:
        """Decodes in between included; None while that is not known."""


def chunk_kv_tokens(tokens: int, computed_tokens: int) -> int:
    """Tokens of context that the tokens of a chunk read, summed over them: all computed before, and half the chunk."""
    return tokens * (2 * computed_tokens + tokens) // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCoefficients:
    """Seconds of one step, linear in what it holds.

        step_s = overhead_s + prefill_s * P + prefill_kv_s * PKV + decode_s * D + kv_s * KV + interference_s * P*D/(P+D)

    P: prefill tokens, D: decoding requests, PKV and KV: tokens of context that each of those P and D reads, summed
    (`chunk_kv_tokens`): attention is linear in the context of each token. The last term is what makes the
    cost per token quadratic in the decode share r = D/(P+D): per token it is prefill_s*(1-r) + decode_s*r +
    interference_s*r*(1-r), the a + b*r + c*r^2 of 003's profiles. It is 0 for a pure prefill or a pure decode step.

    Raises:
        ConfigError: a coefficient is negative or not finite (interference_s may be negative).
    """

    overhead_s: float
    prefill_s: float = 0.0
    decode_s: float = 0.0
    kv_s: float = 0.0
    interference_s: float = 0.0
    prefill_kv_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("overhead_s", "prefill_s", "decode_s", "kv_s", "prefill_kv_s"):
            value = getattr(self, name)
            if not 0.0 <= value < float("inf"):
                raise ConfigError(f"{name} must be finite and >= 0, got {value}")
        if not abs(self.interference_s) < float("inf"):
            raise ConfigError(f"interference_s must be finite, got {self.interference_s}")

    def step_s(
        self,
        *,
        prefill_tokens: float = 0.0,
        decode_requests: float = 0.0,
        kv_tokens: float = 0.0,
        prefill_kv_tokens: float = 0.0,
    ) -> float:
        tokens = prefill_tokens + decode_requests
        mixing = prefill_tokens * decode_requests / tokens if tokens else 0.0
        return (
            self.overhead_s
            + self.prefill_s * prefill_tokens
            + self.decode_s * decode_requests
            + self.kv_s * kv_tokens
            + self.interference_s * mixing
            + self.prefill_kv_s * prefill_kv_tokens
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Step seconds of one engine: a form for each kind of step, because their fixed costs differ."""

    prefill: StepCoefficients
    decode: StepCoefficients
    mixed: StepCoefficients

    def step_s(
        self,
        *,
        prefill_tokens: float = 0.0,
        decode_requests: float = 0.0,
        kv_tokens: float = 0.0,
        prefill_kv_tokens: float = 0.0,
    ) -> float:
        """Seconds of a step with this content; 0 for an empty one.

        A mixed step takes at least as long as its decodes alone: a fitted interference below zero is no licence to
        go beneath that where few prompt tokens meet many decodes.
        """
        if not decode_requests:
            if not prefill_tokens:
                return 0.0
            return self.prefill.step_s(prefill_tokens=prefill_tokens, prefill_kv_tokens=prefill_kv_tokens)
        alone_s = self.decode.step_s(decode_requests=decode_requests, kv_tokens=kv_tokens)
        if not prefill_tokens:
            return alone_s
        mixed_s = self.mixed.step_s(
            prefill_tokens=prefill_tokens,
            decode_requests=decode_requests,
            kv_tokens=kv_tokens,
            prefill_kv_tokens=prefill_kv_tokens,
        )
        return max(alone_s, mixed_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaView:
    """One engine replica as a router sees it.

    Attributes:
        credit: slots it still offers.
        step_times: as fitted.
        outstanding_s: predicted seconds of work that it holds.
        unread_tokens: of the prompts that it holds, neither read nor cached.
        prompt_token_s: its pace of reading them, what decodes take of its steps included; None while it is not known.
        slo_classes: the service levels it is reserved for, or None when it takes all.
    """

    replica_id: str
    credit: int
    step_times: StepTimes
    outstanding_s: float = 0.0
    unread_tokens: int = 0
    prompt_token_s: float | None = None
    slo_classes: frozenset[str] | None = None

    def serves(self, slo_class: str | None) -> bool:
        return self.slo_classes is None or slo_class in self.slo_classes
