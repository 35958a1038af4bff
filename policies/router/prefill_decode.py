"""When a request's prefill belongs on a replica of its own, in which order such replicas take prompts, and how many.

Source: Zheng et al., BucketServe (paper 002), sections II and IV: prefill batches come from buckets of like prompt
lengths, first come first served, and are bounded by a token budget (equation 6); decode uses continuous batching
elsewhere; the KV cache moves between them. The paper always splits. Splitting has a price, though: the cache has to
travel, the last prompt token is computed twice, and the prefill replicas do not decode. So here it is a decision:

A prompt that is read where others decode stretches their next steps to

    gap_s = mixed step of (chunk, batch),   chunk = min(unread_tokens, max_batch_tokens)

and without it they would take the decode step of that batch. Reading it elsewhere pays when that gap breaks the
inter-token target and the own steps do not, when a prefill replica would begin in time, and when the way is short:

    prefill_s(prompt - hits there) + transfer_s(prompt) <= (1 + 1 / gain) * prefill_s(prompt - hits here)

Hits are tokens in the prefix caches: there of the prefill replica that would be through first, here of the decode
replica that has most. Without hits the transfer may take 1 / gain of the prefill. Without a target no client
asked for even gaps; two kinds of replicas then only lose what the one has to spare and the other lacks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import floor, isfinite
from sys import maxsize
from typing import Literal

from policies.checks import require_at_least, require_one_of, require_positive
from policies.errors import InputError
from policies.gang.buckets import AdaptiveBucketsConfig, PromptBuckets, max_safe_requests, padding_waste_fraction
from policies.types import StepTimes

# Of a request that runs, while nothing is known of those that do.
_USUAL_CONTEXT_TOKENS = 512.0


class Why(StrEnum):
    """Why a request is split (the first) or not."""

    SPLIT = "split"
    OFF = "off"
    SHORT = "short"
    NO_REPLICA = "no_replica"
    LATE = "late"
    IDLE = "idle"
    NO_TARGET = "no_target"
    WITHIN_TARGET = "within_target"
    BEYOND_TARGET = "beyond_target"
    TRANSFER = "transfer"


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferTimes:
    """Seconds that a prompt's KV cache takes from one replica to another: overhead_s + s_per_token * prompt_tokens.

    Defaults: 131 072 bytes per token (Llama-3.1-8B, 16 bits) over 25 GB/s.

    Raises:
        ConfigError: a value is negative.
    """

    overhead_s: float = 0.002
    s_per_token: float = 5.2e-6

    def __post_init__(self) -> None:
        require_at_least(0, self, "overhead_s", "s_per_token")

    def transfer_s(self, prompt_tokens: int) -> float:
        return self.overhead_s + self.s_per_token * prompt_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillDecodeConfig:
    """When to split.

    Attributes:
        mode: "auto" decides by cost, "always" splits whatever is long enough, "never" nothing.
        min_prompt_tokens: prompts of which a decode replica would read less are never split.
        max_batch_tokens: the longest chunk that a step of a decode replica reads.
        max_wait_s: the longest that a prompt may wait for a prefill replica.
        gain: reading on a decode replica must take this many times the seconds by which the way over a prefill
            replica is longer.

    Raises:
        ConfigError: a value is out of bounds.
    """

    mode: Literal["auto", "always", "never"] = "auto"
    min_prompt_tokens: int = 256
    max_batch_tokens: int = 8192
    max_wait_s: float = 2.0
    gain: float = 2.0
    transfer: TransferTimes = field(default_factory=TransferTimes)

    def __post_init__(self) -> None:
        require_one_of(("auto", "always", "never"), self, "mode")
        require_at_least(1, self, "min_prompt_tokens", "max_batch_tokens", "gain")
        require_positive(self, "max_wait_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillOffer:
    """What a prefill replica offers to a prompt.

    Attributes:
        wait_s: predicted seconds until it would start it.
        hit_tokens: of the prompt, those that it has cached.
        slowness: its seconds for one predicted second.
    """

    wait_s: float
    hit_tokens: int = 0
    slowness: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitState:
    """A request, and both pools as they stand.

    Attributes:
        hit_tokens: of its prompt, those that a decode replica has cached.
        itl_target_s: what its service allows between two tokens, None where nothing is promised.
        offers: of the prefill replicas alive.
        decode_batch: requests that run on a decode replica, on average.
        context_tokens: of each of those, prompt and answer so far, on average; None while that is not known.
        slowness: a decode replica's seconds for one predicted second.
    """

    prompt_tokens: int
    itl_target_s: float | None
    offers: Sequence[PrefillOffer]
    decode_batch: float
    context_tokens: float | None = None
    slowness: float = 1.0
    hit_tokens: int = 0

    @property
    def unread_tokens(self) -> int:
        """Those that a decode replica would read."""
        return max(0, self.prompt_tokens - self.hit_tokens)


class PrefillDecode:
    """Decides for one request after another; keeps nothing."""

    def __init__(self, config: PrefillDecodeConfig, step_times: StepTimes) -> None:
        self.config, self._times = config, step_times

    def choose(self, state: SplitState) -> Why:
        """SPLIT, or the first reason against it."""
        config = self.config
        if config.mode == "never":
            return Why.OFF
        if state.unread_tokens < config.min_prompt_tokens:
            return Why.SHORT
        if not state.offers:
            return Why.NO_REPLICA
        offer = self._soonest(state)
        if offer is None:
            return Why.LATE
        return Why.SPLIT if config.mode == "always" else self._worth(state, offer)

    def _soonest(self, state: SplitState) -> PrefillOffer | None:
        """The replica that would have read the prompt first, among those that would start in time."""
        in_time = (offer for offer in state.offers if offer.wait_s <= self.config.max_wait_s)
        return min(in_time, key=lambda offer: offer.wait_s + offer.slowness * self._there_s(state, offer), default=None)

    def _there_s(self, state: SplitState, offer: PrefillOffer) -> float:
        return self.prefill_s(max(0, state.prompt_tokens - offer.hit_tokens))

    def _worth(self, state: SplitState, offer: PrefillOffer) -> Why:
        if state.itl_target_s is None:
            return Why.NO_TARGET
        if state.decode_batch < 1.0:
            return Why.IDLE  # no client would notice
        way_s = self._there_s(state, offer) + self.config.transfer.transfer_s(state.prompt_tokens)
        if way_s > (1.0 + 1.0 / self.config.gain) * self.prefill_s(state.unread_tokens):
            return Why.TRANSFER
        if self._step_s(state, 0) > state.itl_target_s:
            return Why.BEYOND_TARGET  # missed anyhow: what is needed there is smaller batches
        chunk = min(state.unread_tokens, self.config.max_batch_tokens)
        return Why.SPLIT if self._step_s(state, chunk) > state.itl_target_s else Why.WITHIN_TARGET

    def prefill_s(self, prompt_tokens: int) -> float:
        """Predicted seconds of reading a prompt by itself."""
        return self._times.step_s(prefill_tokens=prompt_tokens)

    @property
    def prompt_token_s(self) -> float:
        """Seconds of `prefill_s` for each prompt token."""
        return self._times.prefill.prefill_s

    @property
    def step_s(self) -> float:
        """Seconds of `prefill_s` that do not depend on the prompt."""
        return self._times.prefill.overhead_s

    def patience_s(self, prompt_tokens: int, slowness: float = 1.0) -> float:
        """The longest to wait for a prompt to be read elsewhere: the queue's bound, and twice its own time."""
        return self.config.max_wait_s + 2.0 * slowness * self.prefill_s(prompt_tokens)

    def _step_s(self, state: SplitState, chunk: int) -> float:
        context = _USUAL_CONTEXT_TOKENS if state.context_tokens is None else state.context_tokens
        kv_tokens = state.decode_batch * context
        step_s = self._times.step_s(prefill_tokens=chunk, decode_requests=state.decode_batch, kv_tokens=kv_tokens)
        return state.slowness * step_s


def prefill_replicas(replicas: int, prefill_s: float, decode_s: float) -> int:
    """How many of `replicas` should only prefill, by the predicted seconds of either kind of work.

    The nearest whole number to the prefill's share, with at least one replica for each; 0 where the share of a single
    replica is not reached: small setups stay unsplit.

    Raises:
        InputError: replicas is below 1, or a number of seconds is negative.
    """
    if replicas < 1 or min(prefill_s, decode_s) < 0.0:
        raise InputError(f"got {replicas} replicas, {prefill_s} and {decode_s} seconds")
    total = prefill_s + decode_s
    share = prefill_s / total if total else 0.0
    return min(replicas - 1, floor(share * replicas + 0.5))


def prefill_slots(max_batch_tokens: int, mean_prompt_tokens: float, ahead: int = 2) -> int:
    """Prompts that a prefill replica should hold at once: those of `ahead` steps, at least one.

    Equation 6 for prompts of the mean length: the first N whose tokens fit the step's budget; with `ahead` 2 the next
    step's are at hand when one ends. More would wait where no policy orders them.

    Raises:
        InputError: a value is not positive.
    """
    if min(max_batch_tokens, mean_prompt_tokens, ahead) <= 0:
        raise InputError(f"got a budget of {max_batch_tokens}, a mean of {mean_prompt_tokens} and {ahead} ahead")
    return max(1, floor(ahead * max_batch_tokens / mean_prompt_tokens))


def safe_prompts(held_tokens: Sequence[int], mean_prompt_tokens: float, safe_tokens: float) -> int:
    """Prompts that a prefill replica may hold at once for their KV caches to be safe, at least one (002, equation 6):

        N = max {N : S_1 + ... + S_N <= safe_tokens}

    Args:
        held_tokens: S of those that it holds; further ones count with the mean.
        safe_tokens: M_safe of equation 5, in tokens: a share of the cache that is free, the paper's is 0.9. It may be
            infinite.
    """
    if not isfinite(safe_tokens):
        return maxsize
    fitting = max_safe_requests(held_tokens, floor(safe_tokens), padded=False)
    if fitting == len(held_tokens):
        fitting += floor((safe_tokens - sum(held_tokens)) / mean_prompt_tokens)
    return max(1, fitting)


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketOrderConfig:
    """Attributes:
        window_s: prompts that come within one such window are served bucket by bucket, shortest first; 0 is first come
            first served throughout.
        refit_every: prompts after which the buckets are adjusted.
        buckets: see `policies.gang.buckets`.

    Raises:
        ConfigError: a value is out of bounds.
    """

    window_s: float = 0.25
    refit_every: int = 64
    buckets: AdaptiveBucketsConfig = field(default_factory=AdaptiveBucketsConfig)

    def __post_init__(self) -> None:
        require_at_least(0, self, "window_s")
        require_at_least(1, self, "refit_every")


class BucketOrder:
    """First come, first served inside a bucket, and bucket by bucket inside a window (002, section II-B).

        key = w * floor(a / w) + w * (bucket + (a mod w) / w) / buckets      a: arrival, w: window

    The key is fixed at arrival. Of two windows the earlier one goes first whatever its buckets, so nothing is ever
    overtaken by what came more than a window later.
    """

    def __init__(self, config: BucketOrderConfig) -> None:
        self.config = config
        self._buckets = PromptBuckets(config.buckets, config.refit_every)

    @property
    def edges(self) -> tuple[float, ...]:
        return self._buckets.edges

    def assign(self, prompt_tokens: int) -> int:
        """The bucket of a prompt, learning from its length."""
        return self._buckets.assign(prompt_tokens)

    def key(self, arrival_s: float, bucket: int) -> float:
        """The sort key, between its window's start and end; least goes first."""
        window_s, buckets = self.config.window_s, self.config.buckets.max_buckets
        if not window_s:
            return arrival_s
        start_s = window_s * floor(arrival_s / window_s)
        return start_s + (window_s * bucket + (arrival_s - start_s)) / buckets


def padded_tokens(prompt_tokens: list[int]) -> int:
    """Tokens of padding that a kernel which pads would add to this batch: the waste that buckets keep small."""
    return round(padding_waste_fraction(prompt_tokens) * len(prompt_tokens) * max(prompt_tokens, default=0))
