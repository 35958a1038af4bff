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

from collections.abc import Sequence
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

# No step is shorter, and no part of one: a clock's rounding is.
LEAST_STEP_S = 1e-6


class Phase(Enum):
    """What one forward pass may hold."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


class Limit(Enum):
    """Which limit made a batch cap as small as it is. The last three are rules of the papers, chosen by name."""

    MEMORY = "memory"
    SLA = "sla"
    SLOTS = "slots"
    ALGORITHM_1 = "algorithm_1"  # 001's, for memory
    ALGORITHM_2 = "algorithm_2"  # 001's, for the time between tokens
    N_STAR = "n_star"  # 003's, for memory in exclusive batching

    @property
    def is_memory(self) -> bool:
        return self in (Limit.MEMORY, Limit.ALGORITHM_1, Limit.N_STAR)


class RequestView(NamedTuple):
    """One waiting request, in a router's bin or in an engine's queue.

    Attributes:
        request_id: unique within the driver.
        arrival_s: when the request reached this driver, on the driver's clock.
        prompt_tokens: length of the prompt, known exactly.
        output_tokens: tokens of the answer generated before a preemption or a resume; they are prefilled again. 0 for a
            new request.
        cached_tokens: leading tokens whose KV is already in the cache (prefix hit); they are not prefilled again.
        predicted_output_tokens: predicted mean length of the whole answer, or None when there is no prediction.
        max_output_tokens: the client's limit on the answer, or None.
        class_index: which length statistics the request belongs to, 0 <= class_index < number of classes.
        slo_class: name of the service class, or None.
        deadline_s: when the first token is due, on the driver's clock; inf when none was promised.
        tpot_s: promised mean seconds per token after the first; inf when none were promised.
        ends_by_s: when the last token is due, on the driver's clock; inf when none was promised.
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
    ends_by_s: float = inf

    @property
    def prefill_tokens(self) -> int:
        """Tokens that a prefill must still compute: prompt + generated before - cached."""
        return max(0, self.prompt_tokens + self.output_tokens - self.cached_tokens)


# What a column holds of a request of which it says nothing.
_UNSAID: dict[str, int | float] = {
    "prefill_tokens_left": 0,
    "class_index": 0,
    "predicted_output_tokens": np.nan,
    "deadline_s": inf,
    "first_token_s": np.nan,
    "tpot_s": inf,
    "ends_by_s": inf,
    "tokens_per_step": 1.0,
}


@dataclass(frozen=True, eq=False)
class RunningRequests:
    """The running batch as arrays of one length n; row i is one request, in the driver's order.

    Attributes:
        prompt_tokens: int64, shape (n,).
        output_tokens: int64, shape (n,); generated so far (a driver with steps in flight may lag by those steps).
        prefill_tokens_left: int64, shape (n,); tokens that the prefill must still compute, 0 once a request decodes.
        class_index: int64, shape (n,); as in ``RequestView``.
        predicted_output_tokens: float64, shape (n,); of the whole answer, NaN where there is no prediction.
        deadline_s: float64, shape (n,); when the first token is, or was, due; inf where none was promised.
        first_token_s: float64, shape (n,); when the first token came; NaN before.
        tpot_s: float64, shape (n,); promised mean seconds per token after the first; inf where none were promised.
        ends_by_s: float64, shape (n,); when the last token is due; inf where none was promised.
        tokens_per_step: float64, shape (n,); that a decode brings in the mean: more than one where drafts prove right.
    """

    prompt_tokens: IntArray
    output_tokens: IntArray
    prefill_tokens_left: IntArray
    class_index: IntArray
    predicted_output_tokens: FloatArray
    deadline_s: FloatArray
    first_token_s: FloatArray
    tpot_s: FloatArray
    ends_by_s: FloatArray
    tokens_per_step: FloatArray

    @classmethod
    def of(cls, *, prompt_tokens: ArrayLike, output_tokens: ArrayLike, **others: ArrayLike) -> Self:
        """Build from any sequences, with the shapes checked; drivers that own buffers call the constructor instead.

        Without ``others`` all requests decode, are of class 0, and nothing is promised or predicted.

        Raises:
            InputError: the arrays differ in length or are not one-dimensional, or there is no such column.
        """
        prompt, output = np.asarray(prompt_tokens, dtype=np.int64), np.asarray(output_tokens, dtype=np.int64)
        if unknown := others.keys() - _UNSAID.keys():
            raise InputError(f"running requests have no column {', '.join(sorted(unknown))}")
        columns = {name: others.get(name, np.full(prompt.shape, value)) for name, value in _UNSAID.items()}
        typed = {name: np.asarray(column, dtype=type(_UNSAID[name])) for name, column in columns.items()}
        made = cls(prompt, output, **typed)
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
        """Tokens of all requests whose KV is in the cache: ``total_tokens`` less what prefills must still compute."""
        return self.total_tokens - int(np.add.reduce(self.prefill_tokens_left))


class Left(NamedTuple):
    """Tokens that an answer has left.

    Attributes:
        short: one in ten of those like it has no more.
        median: of those like it.
        mean: of those like it.
    """

    short: float
    median: float
    mean: float


class Unread(NamedTuple):
    """Prompts whose first tokens were promised, in progress or waiting, that were not late when they were last judged.

    Attributes:
        deadline_s: when their first tokens are due, on the driver's clock, ascending.
        tokens: of each, those that are still to be read.
        late_tokens: unread, of all others: of late ones, and of those whose first tokens were not promised.
    """

    deadline_s: Sequence[float] = ()
    tokens: Sequence[int] = ()
    late_tokens: int = 0


class BatchState(NamedTuple):
    """One engine just before a step.

    Attributes:
        now_s: the driver's clock.
        running: the running batch.
        waiting: head of the queue, in the order in which the driver would start requests. The driver chooses its
            length; it is not empty while a request waits. A preempted request stands here again.
        waiting_count: length of the whole queue, >= len(waiting).
        slots: most requests that may run at once (vLLM's max_num_seqs).
        free_blocks: KV blocks that are free; a block that the prefix cache holds and may evict counts as free.
        total_blocks: KV blocks of the engine.
        block_size: tokens per KV block.
        max_batch_tokens: most tokens that the engine computes in one step.
        departed: requests that have left the batch since the engine started, for any reason. Policies use the
            difference between two states.
        max_model_len: most tokens of one request, prompt and answer together; None when the driver does not know.
        cuts_prompts: whether a step may compute a part of a prompt (chunked prefill).
        unread: of the whole queue, as far as it was judged; empty where a driver sorts nothing by promises.
        in_flight: steps that were scheduled and have no result yet; their `step_s` is what they have taken so far. Of
            requests that run, `output_tokens` counts what these make.
        draft_tokens: drafted tokens that the next step verifies; None where nothing is drafted.
        encoder_tokens: of images or sounds, which the encoder takes whole in the next step that reads a prompt.
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
    unread: Unread = Unread()
    in_flight: tuple["StepResult", ...] = ()
    draft_tokens: int | None = None
    encoder_tokens: int = 0

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
    """What the next steps may hold, and how many steps the plan is for.

    The driver calls ``plan`` again after ``steps`` steps, after ``departures`` requests have left the batch, or when an
    event ends the plan early, such as a preemption (``policies.engine.standing_plan``).

    Attributes:
        phase: DECODE starts no request and defers prefill chunks; PREFILL leaves running decodes out; MIXED does both.
        max_batch_size: most requests that may run at once, >= 1. Where more run already, none is evicted: the batch
            shrinks as requests end.
        limited_by: which limit determined max_batch_size.
        max_batch_tokens: most tokens of a step, >= 1.
        starts: how many waiting requests may start while the plan stands, from the head of the queue; inf sets no
            limit.
        steps: how many steps, this one included, the driver may run before it calls ``plan`` again, >= 1.
        departures: how many requests may leave the batch before the driver calls ``plan`` again; inf sets no limit.
        max_prefill_tokens: most prompt tokens of a MIXED step in which a request decodes, >= 0; None sets no limit.
    """

    phase: Phase
    max_batch_size: int
    limited_by: Limit
    max_batch_tokens: int
    starts: float = inf
    steps: int = 1
    departures: float = inf
    max_prefill_tokens: int | None = None

    def most(self, slots: int) -> int:
        """Most requests of a batch, also after its steps. A phase of prompts names those of one refill."""
        return slots if self.phase is Phase.PREFILL else min(self.max_batch_size, slots)

    def budget(self, decodes: int, drafts: int = 0) -> int:
        """Most tokens of a step in which ``decodes`` requests get a token each, and so many drafted ones together. A
        request whose last token is in flight gets none."""
        if self.max_prefill_tokens is None or not decodes:
            return self.max_batch_tokens
        return min(self.max_batch_tokens, decodes + drafts + self.max_prefill_tokens)


class FinishedRequest(NamedTuple):
    """A request that left the engine in a step.

    Attributes:
        prompt_tokens: length of the prompt.
        output_tokens: length of the answer.
        class_index: which length statistics the request belongs to.
        predicted_output_tokens: what was predicted for it, or None.
        aborted: it was ended before its answer was complete, so the answer would have been at least this long.
    """

    prompt_tokens: int
    output_tokens: int
    class_index: int = 0
    predicted_output_tokens: float | None = None
    aborted: bool = False


class StepResult(NamedTuple):
    """One executed step.

    Attributes:
        now_s: the driver's clock when the step ended.
        step_s: seconds that the engine was busy with the step; waiting for work does not count.
        phase: the phase of its plan.
        prefill_tokens: prompt tokens computed.
        prefill_requests: requests whose prompts they belong to.
        decode_requests: requests that decoded: one token each, and those of their drafts that proved right.
        kv_tokens: tokens of context that the decoding requests read, summed over them.
        max_batch_size: the limit on running requests in force.
        running_count: running requests, after requests have started.
        waiting_count: waiting requests, after requests have started.
        preempted: requests that were preempted in this step: their KV is lost.
        prefill_kv_tokens: tokens of context that the prompt tokens read, summed over them (`chunk_kv_tokens`).
        draft_tokens: drafted tokens of the decoding requests that it computed.
        encoder_tokens: of images or sounds that it encoded.
        accepted_tokens: of the drafted ones, those that proved right.
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
    draft_tokens: int = 0
    encoder_tokens: int = 0
    accepted_tokens: int = 0
    finished: tuple[FinishedRequest, ...] = ()

    @property
    def decode_tokens(self) -> int:
        """Tokens that it computed for requests that decode."""
        return self.decode_requests + self.draft_tokens

    @property
    def scheduled_tokens(self) -> int:
        return self.prefill_tokens + self.decode_tokens

    @property
    def tells_time(self) -> bool:
        """Whether step times can be learned from it: it computed tokens and took a finite time, at least a microsecond.
        Anything shorter is a clock's rounding; NaN and infinity would stay in a fit for good."""
        return self.scheduled_tokens > 0 and LEAST_STEP_S <= self.step_s < inf


class BatchPolicy(Protocol):
    """Decides step by step what an engine runs; owns the state that its decisions need and nothing else."""

    def plan(self, state: BatchState) -> StepPlan:
        """Decide the next step. Changes nothing in ``state``; equal histories of calls give equal answers."""

    def observe(self, result: StepResult) -> None:
        """Take note of one executed step; called once per step, in order."""


class Foreseen(Protocol):
    """What a batch policy knows of whole answers that are due by a time (``policies.engine.answers``)."""

    @property
    def seconds_per_token(self) -> float:
        """Of an answer, in steps in which requests decode, in the mean; 0 while it is not known."""

    def left(self, class_index: int, predicted_output_tokens: float | None, made: int = 0) -> Left:
        """Tokens that an answer has left that has made so many."""

    def come(self, arrival_s: float, ends_by_s: float, unread_tokens: int, left: Left) -> None:
        """A request has come whose last token is due by then."""


@runtime_checkable
class Paced(Protocol):
    """A batch policy that knows how long reading prompts takes. A driver then sorts its queue by promises."""

    @property
    def seconds_per_prompt_token(self) -> float | None:
        """Mean seconds, with the decodes of the same steps; None while it is not known."""

    @property
    def answers(self) -> "Foreseen":
        """Whole answers that are due by a time."""

    def answer_price(self, context_tokens: float) -> float:
        """What a token of an answer takes of the engine, in tokens of a prompt, at this context; 0 while it is not
        known."""


@runtime_checkable
class Priced(Protocol):
    """A batch policy that knows what decodes cost. A driver then takes as many drafted tokens as are worth it."""

    def decode_price(self, kv_tokens: float) -> tuple[float, float] | None:
        """Seconds of a step of decodes besides their tokens, at that context in sum, and of each token of theirs,
        drafted or not; None while not known."""


@runtime_checkable
class Encoding(Protocol):
    """A batch policy that knows what images and sounds cost. A driver then counts them in what is to be read."""

    @property
    def media_price(self) -> float:
        """As of ``StepTimes``."""


@runtime_checkable
class Targeted(Protocol):
    """A batch policy that holds a bound of its own, and says where no batch keeps it."""

    @property
    def out_of_reach(self) -> str | None:
        """What not even its smallest batch keeps, and what it does then, in words; None where there is nothing."""


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
    Where a decode takes drafted tokens into the step, ``decode_tokens`` with them, the last term counts all of these;
    ``decode_s`` is of the whole decode.

    Raises:
        ConfigError: a coefficient is negative or not finite (interference_s may be negative).
    """

    overhead_s: float
    prefill_s: float = 0.0
    decode_s: float = 0.0
    kv_s: float = 0.0
    interference_s: float = 0.0
    prefill_kv_s: float = 0.0
    decode_tokens: float = 1.0

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
        decode_tokens = self.decode_tokens * decode_requests
        tokens = prefill_tokens + decode_tokens
        mixing = prefill_tokens * decode_tokens / tokens if tokens else 0.0
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
    """Step seconds of one engine: a form for each kind of step, because their fixed costs differ.

    Attributes:
        encoder_s: seconds that encoding a token of images or sounds takes, in whatever step.
    """

    prefill: StepCoefficients
    decode: StepCoefficients
    mixed: StepCoefficients
    encoder_s: float = 0.0

    @property
    def media_price(self) -> float:
        """What encoding a token of images or sounds takes, in tokens of a prompt; 0 while it is not known."""
        return self.encoder_s / self.prefill.prefill_s if self.prefill.prefill_s > 0.0 else 0.0

    def step_s(
        self,
        *,
        prefill_tokens: float = 0.0,
        decode_requests: float = 0.0,
        kv_tokens: float = 0.0,
        prefill_kv_tokens: float = 0.0,
        encoder_tokens: float = 0.0,
    ) -> float:
        """Seconds of a step with this content; 0 for an empty one, and for media without a prompt.

        A mixed step takes at least as long as its decodes alone: a fitted interference below zero is no licence to
        go beneath that where few prompt tokens meet many decodes.
        """
        if not decode_requests:
            if not prefill_tokens:
                return 0.0
            alone_s = self.prefill.step_s(prefill_tokens=prefill_tokens, prefill_kv_tokens=prefill_kv_tokens)
            return alone_s + self.encoder_s * encoder_tokens
        alone_s = self.decode.step_s(decode_requests=decode_requests, kv_tokens=kv_tokens)
        if not prefill_tokens:
            return alone_s
        mixed_s = self.mixed.step_s(
            prefill_tokens=prefill_tokens,
            decode_requests=decode_requests,
            kv_tokens=kv_tokens,
            prefill_kv_tokens=prefill_kv_tokens,
        )
        return max(alone_s, mixed_s) + self.encoder_s * encoder_tokens
