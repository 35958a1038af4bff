"""How many replicas keep what is promised: the load that one bears is learned from how near promises come to breaking.

    ratio(load) = ratio of the fit * (load / load of the fit) ** steepness

A ratio is what was predicted or measured over what was promised; what counts is the 90th percentile over the last
minute, of the class and the kind of promise that is worst off. A load is the predicted seconds of work that come in a
second for each replica. Both are learned together; a proportional rule is a steepness of 1. The work is forecast by
Holt's level and trend for the time at which a replica would be up that is wanted now. The 90th percentile is llm-d's
signal (llm-d-autoscaling#1376); no paper of the five treats the number of replicas.
"""

from collections import defaultdict, deque
from dataclasses import dataclass
from math import ceil, exp, log

import numpy as np

from policies.checks import require_at_least, require_positive

WINDOW_S = 60.0  # of ratios: long enough for some hundred requests, shorter than most replicas take to start
_MOST_RATIOS = 1000  # of each class and kind: a quantile of more says no more
_QUANTILE = 0.9
_MEMORY_S = 1800.0  # of the fit: what a service is asked changes over hours
_LEAST_RATIO, _MOST_RATIO = 0.1, 10.0  # so that no burst outweighs half an hour
_PRIOR_SPREAD = 0.01  # of log loads, a tenth squared: as much of them as has no say against a steepness of 1
_TREND_STARTS = 4.0  # a trend is learned over so many starts of a replica, its level over one
_FIRST_START_S, _MOST_START_S = 120.0, 600.0  # until one was seen; what waits longer waits for a host
# Of the ratio, with a replica fewer: a 90th percentile of a hundred requests errs by a fifth.
_SPARE = 0.8


class Ratios:
    """What was predicted or measured of requests over what they were promised, over the last minute."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], deque[tuple[float, float]]] = defaultdict(lambda: deque(maxlen=_MOST_RATIOS))

    def note(self, now_s: float, slo_class: str, kind: str, ratio: float) -> None:
        self._seen[slo_class, kind].append((now_s, ratio))

    def worst(self, now_s: float) -> float | None:
        """The 90th percentile of the class and the kind where it is highest; None without a request."""
        found = []
        for seen in self._seen.values():
            while seen and seen[0][0] < now_s - WINDOW_S:
                seen.popleft()
            if seen:
                found.append(float(np.quantile([ratio for _, ratio in seen], _QUANTILE)))
        return max(found, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromisedState:
    """All replicas at one moment.

    Attributes:
        replicas, starting: that serve, and that will.
        arrived_s: predicted seconds of all work that ever came to the routers that told of it.
        routers: how many of them told.
        waiting_s: of that, what waits.
        ratio: as of `Ratios.worst`.
    """

    now_s: float
    replicas: int
    starting: int
    arrived_s: float
    waiting_s: float
    ratio: float | None
    routers: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicasForPromisesConfig:
    """What is enough.

    Attributes:
        most_ratio: what the ratio may be: 1 is just in time.
        min_replicas: never fewer.

    Raises:
        ConfigError: most_ratio is not positive, or min_replicas below 1.
    """

    most_ratio: float = 1.0
    min_replicas: int = 1

    def __post_init__(self) -> None:
        require_positive(self, "most_ratio")
        require_at_least(1, self, "min_replicas")


class Forecast:
    """Level and trend by double exponential smoothing (Holt), of an amount that is told as it grows."""

    def __init__(self) -> None:
        self.level: float | None = None
        self._trend = 0.0
        self._seen: tuple[float, float, int] | None = None  # when, the amount, and how many told

    def observe(self, now_s: float, amount: float, memory_s: float, tellers: int = 1) -> None:
        """Args:
        amount: of all time.
        memory_s: of the level; a trend is learned more slowly.
        tellers: of parts of the amount. Where they are more or fewer than before, what came since is not known: one who
            was silent for a while tells again of all time.
        """
        at_s, had, told = self._seen or (now_s, amount, tellers)
        passed_s, more = now_s - at_s, max(0.0, amount - had)  # less there is where another took one's place
        if self._seen is not None and passed_s <= 0.0:
            return
        self._seen = now_s, amount, tellers
        if passed_s <= 0.0 or tellers != told:
            return
        rate = more / passed_s
        if self.level is None:
            self.level = rate
            return
        before = self.level
        self.level += self._trend * passed_s
        self.level = max(0.0, self.level + (1.0 - exp(-passed_s / memory_s)) * (rate - self.level))
        kept = exp(-passed_s / (_TREND_STARTS * memory_s))
        self._trend = kept * self._trend + (1.0 - kept) * (self.level - before) / passed_s

    def at(self, ahead_s: float) -> float:
        """A rate, after so many seconds; never below the level, for a fall is waited for."""
        return (self.level or 0.0) + max(0.0, self._trend * ahead_s)


class RatioOfLoad:
    """The fit: a line through the logarithms of loads and ratios, of which the older ones are forgotten."""

    def __init__(self) -> None:
        self._weight = self._load = self._ratio = self._spread = self._common = 0.0

    def observe(self, passed_s: float, load: float, ratio: float) -> None:
        x, y = log(load), log(min(_MOST_RATIO, max(_LEAST_RATIO, ratio)))
        self._weight = exp(-passed_s / _MEMORY_S) * self._weight + passed_s
        share = passed_s / self._weight
        off_x, off_y = x - self._load, y - self._ratio
        self._load += share * off_x
        self._ratio += share * off_y
        self._spread = (1.0 - share) * (self._spread + share * off_x**2)
        self._common = (1.0 - share) * (self._common + share * off_x * off_y)

    def most_load(self, ratio: float) -> float | None:
        """The load at which that is the ratio; None before any was seen."""
        if not self._weight:
            return None
        steepness = max(1.0, (self._common + _PRIOR_SPREAD) / (self._spread + _PRIOR_SPREAD))
        return exp(self._load + (log(ratio) - self._ratio) / steepness)


class StartTime:
    """Seconds from the first look that wants another replica until one more serves; half of what the last took."""

    def __init__(self) -> None:
        self.seconds = _FIRST_START_S
        self._wanted: tuple[float, int] | None = None  # since when, and how many served then

    def observe(self, state: PromisedState, wanted: int) -> None:
        if self._wanted is None:
            if wanted > state.replicas and not state.starting:
                self._wanted = state.now_s, state.replicas
            return
        since_s, had = self._wanted
        if state.replicas > had:
            self.seconds = (self.seconds + min(_MOST_START_S, state.now_s - since_s)) / 2
            self._wanted = None
        elif wanted <= state.replicas and not state.starting:  # no longer wanted
            self._wanted = None


class ReplicasForPromises:
    """Counts the replicas at every look; looks are some seconds apart at most."""

    def __init__(self, config: ReplicasForPromisesConfig) -> None:
        self.config = config
        self._work, self._fit, self._start = Forecast(), RatioOfLoad(), StartTime()
        self._looked_s: float | None = None

    def choose(self, state: PromisedState) -> int:
        """As many as will keep the ratio; none fewer while it is not kept, or would not be with fewer."""
        self._learn(state)
        wanted = max(self.config.min_replicas, self._wanted(state))
        self._start.observe(state, wanted)
        return wanted

    def _wanted(self, state: PromisedState) -> int:
        config, there = self.config, state.replicas + state.starting
        most_load, spare_load = (self._fit.most_load(each * config.most_ratio) for each in (1.0, _SPARE))
        if most_load is None or spare_load is None:
            return there
        # What waits is worked off by the time at which another replica would be up.
        work = self._work.at(self._start.seconds) + state.waiting_s / self._start.seconds
        least, enough = (ceil(work / load - 1e-9) for load in (most_load, spare_load))
        late = state.ratio is not None and state.ratio > config.most_ratio
        recovering = state.replicas + 1 if late else 0  # the fit errs, and does not say by how many
        return max(least, min(there, enough), recovering)

    def _learn(self, state: PromisedState) -> None:
        passed_s = 0.0 if self._looked_s is None else state.now_s - self._looked_s
        self._looked_s = state.now_s
        self._work.observe(state.now_s, state.arrived_s, self._start.seconds, state.routers)
        level = self._work.level
        if level and state.replicas and state.ratio is not None and passed_s > 0.0:
            self._fit.observe(passed_s, level / state.replicas, state.ratio)
