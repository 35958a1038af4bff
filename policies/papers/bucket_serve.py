"""BucketServe's Algorithm 1 to the letter, and its closed forms of padding.

Source: Zheng et al., "BucketServe: Bucket-Based Dynamic Batching for Smart and Efficient LLM Inference Serving" (paper
002): equations 1, 3 and 4, and Algorithm 1. `policies.gang.buckets` serves by default, and says what is wrong here.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from policies.checks import check_counts, require_at_least
from policies.errors import ConfigError
from policies.gang.buckets import padding_waste_fraction
from policies.gang.partition import Atoms, checked_lengths, least_cost_cuts
from policies.types import FloatArray

PaddingMeasure = Literal["tokens", "ratio"]


def kv_bytes_per_token(layers: int, kv_heads: int, head_dim: int, bytes_per_element: int) -> int:
    """KV cache of one token, keys and values: 2 * layers * kv_heads * head_dim * bytes_per_element (equation 1).

    Heads are the KV heads of one tensor-parallel rank, not the attention heads (ERRATA 2.1).

    Raises:
        InputError: an argument is below 1.
    """
    check_counts(layers=layers, kv_heads=kv_heads, head_dim=head_dim, bytes_per_element=bytes_per_element)
    return 2 * layers * kv_heads * head_dim * bytes_per_element


def bucket_padding_fraction(edges: ArrayLike, lengths: ArrayLike, measure: PaddingMeasure = "tokens") -> float:
    """Expected padding when every prompt is padded to the longest of its bucket, 0 to 1.

    "tokens" is sum(max - S) / sum(max) over all buckets, what a padded kernel computes in vain; "ratio" is the mean
    of 1 - S/max (equation 3), which counts a short prompt's padding as much as a long one's (ERRATA 2.4).

    Args:
        edges: shape (k + 1,), ascending; lengths beyond them count in the first or last bucket. lengths: shape (n,).

    Raises:
        InputError: as `policies.gang.partition.checked_lengths`.
    """
    sample = checked_lengths(lengths)
    inner = np.asarray(edges, dtype=np.float64)[1:-1]
    buckets = [part for part in np.split(sample, np.searchsorted(sample, inner, side="left")) if len(part)]
    if measure == "ratio":
        return math.fsum(len(part) * padding_waste_fraction(part) for part in buckets) / len(sample)
    padded = math.fsum(len(part) * part[-1] for part in buckets)
    return 1.0 - float(sample.sum()) / padded if padded else 0.0


def optimal_bucket_edges(lengths: ArrayLike, k: int, *, measure: PaddingMeasure = "tokens") -> FloatArray:
    """The k buckets with the least padding of a sample, in place of equation 4 (ERRATA 2.3, 2.5).

    For a density f they satisfy F(U_b) - F(L_b) = (U_{b+1} - U_b) f(U_b) in tokens, and as ratios
    (1/U_b^2) * integral of S f over the bucket = (1 - U_b/U_{b+1}) f(U_b). Found for the sample itself by a dynamic
    programme, exact up to 1024 distinct lengths.

    Args:
        lengths: shape (n,), n >= 1, any order, >= 0. measure: see `bucket_padding_fraction`.

    Returns:
        float64, shape (k + 1,), strictly ascending from 0 to infinity; surplus buckets lie empty above the longest.

    Raises:
        InputError: k < 1, or lengths as `policies.gang.partition.checked_lengths` refuses them.
    """
    check_counts(k=k)
    atoms = Atoms.of(lengths, resolution=1024)
    return atoms.edges(least_cost_cuts(_padding_cost(atoms, measure), min(k, len(atoms))), k)


def _padding_cost(atoms: Atoms, measure: PaddingMeasure) -> FloatArray:
    """cost[a, b] = padding of points a to b - 1 as one bucket; shape (d + 1, d + 1), infinite where b <= a."""
    count = np.concatenate(([0.0], np.cumsum(atoms.counts)))
    tokens = np.concatenate(([0.0], np.cumsum(atoms.counts * atoms.values)))
    longest = np.concatenate(([0.0], atoms.highs))
    cost: FloatArray = longest * (count - count[:, None]) - (tokens - tokens[:, None])
    if measure == "ratio":
        cost /= np.where(longest > 0.0, longest, 1.0)
    cost[np.tril_indices(len(cost))] = np.inf
    return cost


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketServeConfig:
    """Settings of Algorithm 1.

    Attributes:
        l_max: end of the last bucket, in tokens; longer prompts have no bucket.
        threshold: theta; a bucket splits when more than this share of it lies below its middle.
        max_buckets: most buckets, beyond which none splits; None is the paper's, without an end (ERRATA 2.8).

    Raises:
        ConfigError: l_max or max_buckets < 1, or threshold outside [0, 1].
    """

    l_max: int
    threshold: float = 0.5
    max_buckets: int | None = None

    def __post_init__(self) -> None:
        require_at_least(1, self, "l_max", "max_buckets")
        if not 0.0 <= self.threshold <= 1.0:
            raise ConfigError(f"threshold must be between 0 and 1, got {self.threshold}")

    def build(self) -> "BucketServeBuckets":
        return BucketServeBuckets(self)


class BucketServeBuckets:
    """Algorithm 1 of BucketServe as printed, for comparisons.

    One call splits each bucket at most once (ERRATA 2.9). Line 22 divides by the size of a bucket that may be empty;
    here the size is tested first (ERRATA 2.6). Everything else is literal: a prompt of l_max tokens or more has no
    bucket, and as long as most of a bucket sits on its lower edge every call adds another bucket.
    """

    def __init__(self, config: BucketServeConfig) -> None:
        self.config, self.end = config, float(config.l_max)
        self._edges: tuple[float, ...] = (0.0, float(config.l_max))

    @property
    def edges(self) -> tuple[float, ...]:
        return self._edges

    def assign(self, prompt_tokens: int) -> int | None:
        return bisect_right(self._edges, prompt_tokens) - 1 if prompt_tokens < self.config.l_max else None

    def adjust(self, waiting_tokens: Sequence[int], max_requests: int) -> tuple[float, ...]:
        waiting = np.array([tokens for tokens in waiting_tokens if tokens < self.config.l_max])
        if len(waiting) < max_requests:
            self._edges = (0.0, float(self.config.l_max))
        else:
            middles = [
                (low + high) / 2
                for low, high in pairwise(self._edges)
                if self._splits(waiting, low, high, max_requests)
            ]
            most = self.config.max_buckets
            room = len(middles) if most is None else most + 1 - len(self._edges)
            self._edges = tuple(sorted((*self._edges, *middles[:room])))
        return self._edges

    def take(self, edges: Sequence[float]) -> None:
        self._edges = tuple(edges)

    def _splits(self, waiting: FloatArray, low: float, high: float, min_split: int) -> bool:
        members = waiting[(low <= waiting) & (waiting < high)]
        below = int(np.count_nonzero(members < (low + high) / 2))
        return len(members) > min_split and below / len(members) > self.config.threshold
