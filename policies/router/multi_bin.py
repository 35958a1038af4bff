"""Multi-bin batching: assigns requests to bins of predicted output length.

Source: Guldogan et al., "Multi-Bin Batching for Increasing LLM Inference Throughput" (paper 000), Algorithm 1, lines 1
to 3. The rest of the algorithm, forming batches and serving them, is the driver's.

Departures (ERRATA numbers):
- 0.17 Lengths outside the edges fall into the first or last bin instead of none.
- The edges follow the lengths that are seen (the paper sets them once, by "prior knowledge or system profiling"), and a
  request without a prediction has a bin as well.

The rules that place the edges stand in `policies.router.bin_edges`, what they are worth in `policies.papers.bin_worth`.
"""

import math
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

from policies.checks import require_at_least, require_one_of, require_positive
from policies.errors import ConfigError, InputError
from policies.papers.bin_worth import bins_for_load
from policies.router.bin_edges import equal_mass_edges, exponential_edges, optimal_edges
from policies.types import FloatArray

EdgeRule = Literal["equal_mass", "optimal", "fixed"]

# A refit runs between two requests of a live router; a quarter of the points costs a sixteenth of the time.
_REFIT_RESOLUTION = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiBinConfig:
    """How many bins, and how their edges follow the lengths that are seen.

    Attributes:
        bins: k. Two to four suffice with a predictor: the paper's own gained 8 % at four (appendix C.1).
        seconds_per_token: of a gang batch's answer. With it ``bins`` is the most, and every refit takes as many as pay
            at the rate at which requests finished lately (`bins_for_load`); None keeps ``bins``.
        batch_size: size of a gang batch, for the "optimal" rule and the prior's edges.
        rule: how a refit cuts: "optimal" (least expected batch maximum), "equal_mass" (as the paper), "fixed" (never).
        initial_edges: bins + 1 ascending edges to start with; None takes `exponential_edges` at the prior's mean.
        prior_mean_tokens: mean output before any is seen; 256 is the mean of the LMSYS arena trace (VTC artifact).
        window_requests: how many of the latest finished requests count, overall and again per class; after a change
            of traffic the edges are right once that many have finished.
        refit_every: finished requests from one automatic refit to the next.

    Raises:
        ConfigError: a value is out of bounds, the rule is unknown, or the edges do not ascend or do not fit ``bins``.
    """

    bins: int = 4
    seconds_per_token: float | None = None
    batch_size: int = 8
    rule: EdgeRule = "optimal"
    initial_edges: tuple[float, ...] | None = None
    prior_mean_tokens: float = 256.0
    window_requests: int = 2048
    refit_every: int = 256

    def __post_init__(self) -> None:
        require_at_least(1, self, "bins", "batch_size", "window_requests", "refit_every")
        require_one_of(get_args(EdgeRule), self, "rule")
        require_positive(self, "prior_mean_tokens", "seconds_per_token")
        if self.initial_edges is not None and not _fits(self.initial_edges, self.bins):
            raise ConfigError(f"initial_edges must be {self.bins + 1} ascending numbers, got {self.initial_edges}")


def _fits(edges: Sequence[float], bins: int) -> bool:
    return len(edges) == bins + 1 and all(low < high for low, high in pairwise(edges))


class _RecentLengths:
    """The latest lengths, at most ``limit`` of them, kept sorted: observing costs a bisection and a short move."""

    __slots__ = ("_arrived", "_limit", "ascending")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._arrived: deque[float] = deque()
        self.ascending: list[float] = []

    def observe(self, length: float) -> None:
        if len(self._arrived) == self._limit:
            del self.ascending[bisect_left(self.ascending, self._arrived.popleft())]
        self._arrived.append(length)
        insort(self.ascending, length)

    def median(self) -> float:
        return self.ascending[(len(self.ascending) - 1) // 2]


class _FinishRate:
    """Requests per second that finished, where many are told of at one time: they finished since the time before.

    What is told at the latest time may not be all of it yet, so it counts from the next on.
    """

    def __init__(self) -> None:
        self._since_s: float | None = None
        self._until_s = self._now_s = 0.0
        self._finished = self._newest = 0

    def note_time(self, now_s: float) -> None:
        if self._since_s is None:
            self._since_s = self._until_s = self._now_s = now_s
        elif now_s > self._now_s:
            if self._now_s > self._since_s:  # before the first time is no span
                self._finished += self._newest
            self._until_s, self._now_s, self._newest = self._now_s, now_s, 0

    def observe(self) -> None:
        self._newest += 1

    def taken(self) -> float | None:
        """Begin anew; None, and nothing begins, while no span is over in which any finished."""
        if self._since_s is None or not self._finished:
            return None
        per_s = self._finished / (self._until_s - self._since_s)
        self._since_s, self._finished = self._until_s, 0
        return per_s


class MultiBin:
    """Assigns requests to bins of predicted output length (Algorithm 1, lines 1 to 3), with edges that follow.

    `observe` takes the true length of every finished request into a sliding window; after each ``refit_every`` of them
    the edges are cut anew by the configured rule. A refit depends on the window alone, so equal histories give equal
    edges. Routers that share bins let one of them refit and the others `adopt` its edges. A request keeps the bin that
    it was given: moving those that wait is the driver's choice.

    Class names come from configuration, never from a client: each one seen holds a window of its own.
    """

    def __init__(self, config: MultiBinConfig) -> None:
        self.config = config
        self._recent = _RecentLengths(config.window_requests)
        self._recent_of_class: dict[str | None, _RecentLengths] = {}
        self._since_refit = 0
        self._rate = _FinishRate()
        self.adopt(config.initial_edges or self._prior_edges())

    @property
    def edges(self) -> tuple[float, ...]:
        """The edges in force, one more than bins, ascending, in tokens."""
        return self._edges

    def assign(self, predicted_output_tokens: float | None, *, slo_class: str | None = None) -> int:
        """The bin of a prediction, 0 to bins - 1; predictions beyond the edges go to the first or last bin.

        Without a prediction (None, or NaN out of an array) it is the bin of the class's median length: before the class
        has finished a request that of all classes, and before any has the lower of the middle bins.
        """
        if predicted_output_tokens is None or math.isnan(predicted_output_tokens):
            return self._median_bin(slo_class)
        return bisect_right(self._inner, predicted_output_tokens)

    def _median_bin(self, slo_class: str | None) -> int:
        recent = self._recent_of_class.get(slo_class, self._recent)
        return bisect_right(self._inner, recent.median()) if recent.ascending else (len(self._edges) - 2) // 2

    def note_time(self, now_s: float) -> None:
        """At which what is observed next finished, on one clock: the load is told by it."""
        self._rate.note_time(now_s)

    def observe(self, output_tokens: float, *, slo_class: str | None = None) -> None:
        """Take note of a finished request's true length; may refit.

        Raises:
            InputError: the length is negative or not finite.
        """
        if not 0.0 <= output_tokens < math.inf:
            raise InputError(f"output_tokens must be finite and >= 0, got {output_tokens}")
        if slo_class not in self._recent_of_class:
            self._recent_of_class[slo_class] = _RecentLengths(self.config.window_requests)
        self._recent_of_class[slo_class].observe(output_tokens)
        self._recent.observe(output_tokens)
        self._rate.observe()
        self._since_refit += 1
        if self._since_refit >= self.config.refit_every:
            self.refit()

    def refit(self) -> tuple[float, ...]:
        """Cut the window anew by the configured rule; without samples, or with fixed edges, nothing changes."""
        self._since_refit = 0
        if self._recent.ascending and self.config.rule != "fixed":
            self.adopt(self._fitted(self._bins_that_pay()))
        return self._edges

    def _bins_that_pay(self) -> int:
        """At the rate of what finished since this was asked last; as many as now while that is not known."""
        config = self.config
        if config.seconds_per_token is None:
            return config.bins
        if (per_s := self._rate.taken()) is None:
            return len(self._edges) - 1
        per_token_time = config.seconds_per_token * per_s
        return bins_for_load(per_token_time, config.batch_size, self._recent.ascending, max_bins=config.bins)

    def _prior_edges(self) -> FloatArray:
        return exponential_edges(self.config.bins, 1.0 / self.config.prior_mean_tokens, self.config.batch_size)

    def _fitted(self, bins: int) -> FloatArray:
        config, sample = self.config, self._recent.ascending
        if config.rule == "equal_mass":
            return equal_mass_edges(sample, bins)
        return optimal_edges(sample, bins, config.batch_size, resolution=_REFIT_RESOLUTION)

    def fits(self, edges: Sequence[float]) -> bool:
        """Whether these may be in force here: of ``bins`` bins, or where their number follows the load of fewer."""
        bins = len(edges) - 1
        is_count = bins == self.config.bins or (
            self.config.seconds_per_token is not None and 1 <= bins < self.config.bins
        )
        return is_count and _fits(edges, bins)

    def adopt(self, edges: Iterable[float]) -> None:
        """Put edges in force that another router fitted.

        Raises:
            InputError: they do not fit.
        """
        adopted = tuple(float(edge) for edge in edges)
        if not self.fits(adopted):
            most = "" if self.config.seconds_per_token is None else "at most "
            raise InputError(f"edges must be {most}{self.config.bins + 1} ascending numbers, got {adopted}")
        self._edges = adopted
        self._inner = adopted[1:-1]
