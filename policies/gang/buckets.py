"""Buckets over prompt lengths: requests of like length share a padded batch, and the ranges follow the traffic.

Source: Zheng et al., "BucketServe: Bucket-Based Dynamic Batching for Smart and Efficient LLM Inference Serving" (paper
002): equations 2, 5 and 6. Padding exists only where a kernel pads (the Transformers engine, the predictor); with
variable-length attention buckets merely order the queue (ERRATA 2.14).

`AdaptiveBuckets`, the default, departs from Algorithm 1 (`policies.papers.bucket_serve`; ERRATA numbers):
- 2.3, 2.5 Equation 4 has no solution and bisection is right for uniform lengths only: cuts minimise padded tokens.
- 2.4 Padding counts to the longest member, in tokens, not as a mean of ratios to the bucket's bound.
- 2.7 A split is judged by the padding it saves, not by a majority below the middle.
- 2.8 Buckets have a minimum width and a maximum number, so splitting ends.
- 2.10 Only neighbours merge, for a reason and with hysteresis, instead of all at once whenever the queue is short.
- 2.11 Both halves of a split hold a minimum of requests, also when memory is full and no batch fits.
- 2.12 Lengths beyond every bucket belong to the last one.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, takewhile
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

from policies.checks import require_at_least
from policies.errors import ConfigError, InputError
from policies.gang.partition import checked_lengths
from policies.types import FloatArray


class BucketPolicy(Protocol):
    """Keeps ranges of prompt lengths, from 0 to ``end``."""

    end: float

    @property
    def edges(self) -> tuple[float, ...]:
        """Ascending bounds in tokens; bucket i (from 0) is edges[i] <= prompt_tokens < edges[i + 1]."""

    def assign(self, prompt_tokens: int) -> int | None:
        """The bucket of a prompt; None if there is none for it."""

    def adjust(self, waiting_tokens: Sequence[int], max_requests: int) -> tuple[float, ...]:
        """Adapt the ranges to the prompts that wait, given how many fit a batch; returns the new edges.

        Requests are not held here: after a change the driver asks `assign` again, so none can be lost or doubled.
        """

    def take(self, edges: Sequence[float]) -> None:
        """Go on from these edges."""


class BucketPolicyConfig(Protocol):
    """Settings of one kind of buckets."""

    @property
    def max_buckets(self) -> int | None:
        """Most buckets; None sets no limit."""

    def build(self) -> BucketPolicy: ...


def max_safe_requests(lengths: Sequence[int], capacity_tokens: int, *, padded: bool) -> int:
    """How many requests from the head of ``lengths`` fit a batch; their order matters.

    Not padded: the largest N whose first N lengths sum to at most the capacity (equation 6). Padded: N times the
    longest of them must fit, as in equation 1, because a padded kernel stores that much (ERRATA 2.2). Neither leaves
    room for the output: take it off the capacity before (ERRATA 2.1).

    Raises:
        InputError: a length or the capacity is negative.
    """
    if capacity_tokens < 0 or min(lengths, default=0) < 0:
        raise InputError(f"capacity and lengths must be >= 0, got {capacity_tokens} and {min(lengths, default=0)}")
    longest = enumerate(accumulate(lengths, max), start=1)
    needed = (count * tokens for count, tokens in longest) if padded else accumulate(lengths)
    return sum(1 for _ in takewhile(lambda tokens: tokens <= capacity_tokens, needed))


def padding_waste_fraction(lengths: ArrayLike) -> float:
    """Share of padding in one batch padded to its longest member: sum(max - S) / sum(max) (equation 2).

    0 for a batch that is empty or holds only empty prompts.

    Raises:
        InputError: a length is negative or not finite, or the sample is not one-dimensional.
    """
    if np.size(lengths) == 0:
        return 0.0
    sample = checked_lengths(lengths)
    return float(1.0 - sample.mean() / sample[-1]) if sample[-1] > 0.0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveBucketsConfig:
    """When a bucket is worth having.

    Attributes:
        split_fraction: a split must save at least this share of all padded tokens that wait.
        merge_fraction: neighbours merge when that costs less than this share of them; below split_fraction, which is
            the hysteresis.
        min_requests: fewer prompts say nothing: each half of a split has as many, and so has each of two merged for
            being alike.
        patience: a bucket that held fewer in this many calls in a row merges with a neighbour.
        min_width_tokens: narrowest bucket.
        max_buckets: most buckets.

    Raises:
        ConfigError: a value is out of bounds, or merge_fraction not below split_fraction.
    """

    split_fraction: float = 0.05
    merge_fraction: float = 0.02
    min_requests: int = 4
    patience: int = 16
    min_width_tokens: int = 16
    max_buckets: int = 8

    def __post_init__(self) -> None:
        if not 0.0 <= self.merge_fraction < self.split_fraction <= 1.0:
            raise ConfigError(
                "fractions must satisfy 0 <= merge_fraction < split_fraction <= 1, "
                f"got {self.merge_fraction} and {self.split_fraction}"
            )
        require_at_least(1, self, "min_requests", "patience", "min_width_tokens", "max_buckets")

    def build(self) -> "AdaptiveBuckets":
        return AdaptiveBuckets(self)


@dataclass(frozen=True, slots=True)
class _Split:
    saved_tokens: float
    edge: float


class AdaptiveBuckets:
    """Buckets that split where padding is saved and merge where it is not.

    Every call of `adjust` first merges what has been nearly empty for long, then neighbours that are alike, then
    splits, each time the pair or bucket with most to gain, until nothing is worth doing.

    It comes to rest. Let P be the padded tokens and n the number of buckets: a split lowers ln P by at least
    split_fraction, a merge of neighbours that are alike raises it by less than merge_fraction, so for any price between
    the two ln P + price * n falls at every step, and on the same lengths no earlier set of edges can return. Merging
    the nearly empty does raise P, but only lowers their number, and a split never makes such a bucket.

    Ranges reach from 0 to infinity: every prompt has a bucket.
    """

    end = math.inf

    def __init__(self, config: AdaptiveBucketsConfig) -> None:
        self.config = config
        self._edges: list[float] = [0.0, math.inf]
        self._thin_calls = [0]

    @property
    def edges(self) -> tuple[float, ...]:
        return tuple(self._edges)

    def assign(self, prompt_tokens: int) -> int:
        """The bucket of a prompt, 0 to len(edges) - 2."""
        return bisect_right(self._edges, prompt_tokens, 1, len(self._edges) - 1) - 1

    def take(self, edges: Sequence[float]) -> None:
        self._edges, self._thin_calls = list(edges), [0] * (len(edges) - 1)

    def adjust(self, waiting_tokens: Sequence[int], max_requests: int) -> tuple[float, ...]:
        waiting = np.sort(np.asarray(waiting_tokens, dtype=np.float64))
        self._merge_thin(waiting)
        self._merge_alike(waiting)
        self._split(waiting, max_requests)
        return self.edges

    def _members(self, waiting: FloatArray) -> list[FloatArray]:
        return np.split(waiting, np.searchsorted(waiting, self._edges[1:-1], side="left"))

    def _merge_thin(self, waiting: FloatArray) -> None:
        thin = [len(part) < self.config.min_requests for part in self._members(waiting)]
        self._thin_calls = [calls + 1 if few else 0 for calls, few in zip(self._thin_calls, thin, strict=True)]
        while len(self._thin_calls) > 1 and max(self._thin_calls) >= self.config.patience:
            bucket = self._thin_calls.index(max(self._thin_calls))
            costs = _merge_costs(self._members(waiting))
            pairs = [pair for pair in (bucket - 1, bucket) if 0 <= pair < len(costs)]
            self._merge(min(pairs, key=lambda pair: costs[pair]))

    def _merge_alike(self, waiting: FloatArray) -> None:
        while True:
            members = self._members(waiting)
            limit = self.config.merge_fraction * _padded_tokens(members)
            few = [len(part) < self.config.min_requests for part in members]
            costs = [
                math.inf if few[pair] or few[pair + 1] else cost for pair, cost in enumerate(_merge_costs(members))
            ]
            if min(costs, default=math.inf) >= limit:
                return
            self._merge(costs.index(min(costs)))

    def _merge(self, pair: int) -> None:
        del self._edges[pair + 1], self._thin_calls[pair + 1]
        self._thin_calls[pair] = 0

    def _split(self, waiting: FloatArray, min_split: int) -> None:
        while len(self._thin_calls) < self.config.max_buckets:
            members = self._members(waiting)
            found = [self._best_split(part, bucket, min_split) for bucket, part in enumerate(members)]
            best = max((split for split in found if split), key=lambda split: split.saved_tokens, default=None)
            if best is None or best.saved_tokens < self.config.split_fraction * _padded_tokens(members):
                return
            bucket = found.index(best)
            self._edges.insert(bucket + 1, best.edge)
            self._thin_calls[bucket : bucket + 1] = [0, 0]

    def _best_split(self, part: FloatArray, bucket: int, min_split: int) -> _Split | None:
        """Where this bucket's members (ascending) are best cut: left half times what its longest falls short."""
        least = self.config.min_requests
        cuts = np.arange(least, len(part) - least + 1)
        if len(part) <= min_split or not len(cuts):
            return None
        below, above = part[cuts - 1], part[cuts]
        edges = np.ceil((below + above) / 2.0)
        room = np.minimum(edges - self._edges[bucket], self._edges[bucket + 1] - edges)
        allowed = (below < above) & (room >= self.config.min_width_tokens)
        saved = np.where(allowed, cuts * (part[-1] - below), -np.inf)
        best = int(saved.argmax())
        return _Split(float(saved[best]), float(edges[best])) if allowed[best] else None


class PromptBuckets:
    """Buckets over the prompts that arrive, adjusted after every ``refit_every`` of them.

    These stand for what waits, of which one router knows a part. Prompts beyond every bucket belong to the last one
    (ERRATA 2.12).

    Raises:
        ConfigError: refit_every is below 1.
    """

    def __init__(self, config: BucketPolicyConfig, refit_every: int, max_requests: int = 0) -> None:
        """max_requests: N_max, of a batch: a bucket with no more does not split."""
        if refit_every < 1:
            raise ConfigError(f"refit_every must be >= 1, got {refit_every}")
        self.config, self._refit_every, self._max_requests = config, refit_every, max_requests
        self._buckets = config.build()
        self._recent: list[int] = []

    @property
    def edges(self) -> tuple[float, ...]:
        return self._buckets.edges

    def assign(self, prompt_tokens: int) -> int:
        """The bucket of a prompt, learning from its length."""
        self._recent.append(prompt_tokens)
        if len(self._recent) >= self._refit_every:
            self._buckets.adjust(self._recent, self._max_requests)
            self._recent.clear()
        bucket = self._buckets.assign(prompt_tokens)
        return len(self.edges) - 2 if bucket is None else bucket

    def fits(self, edges: Sequence[float]) -> bool:
        """Whether these may be in force here: ascending over the whole range, and not too many."""
        most = self.config.max_buckets
        whole = len(edges) > 1 and edges[0] == 0.0 and edges[-1] == self._buckets.end
        few = most is None or len(edges) <= most + 1
        return whole and few and all(low < high for low, high in pairwise(edges))

    def adopt(self, edges: Sequence[float]) -> None:
        """Put edges in force that another router found.

        Raises:
            InputError: they do not fit.
        """
        if not self.fits(edges):
            bounds = f"ascend from 0 to {self._buckets.end}, {self.config.max_buckets} buckets at most"
            raise InputError(f"edges must {bounds}: {edges}")
        if tuple(edges) != self.edges:
            self._buckets.take(edges)


def _padded_tokens(members: list[FloatArray]) -> float:
    return math.fsum(len(part) * part[-1] for part in members if len(part))


def _merge_costs(members: list[FloatArray]) -> list[float]:
    """Tokens that each pair of neighbours would add to the padding as one bucket."""
    return [
        len(left) * float(right[-1] - left[-1]) if len(left) and len(right) else 0.0
        for left, right in pairwise(members)
    ]
