"""The search behind SLA-bound batch sizes and chunks: the largest x whose latency meets a target.

Source: 001, Algorithm 2, corrected: the search reaches both of its bounds (ERRATA 1.10), low <= value <= high holds
after every update (1.11), and while the value does not bind it learns nothing upward but what was measured (1.12). It
brackets with x * target / latency: for any latency a + c*x with a, c >= 0 the answer lies between x and that, on either
side. So an upward shift of the latency is met in a few updates, where the printed algorithm falls by delta per update.
What was believed to be safe gives way in steps that begin at delta and grow by four: one noisy window must not halve a
batch. On target is what lies within epsilon_D below it. The printed band lies on both sides, and a mean just above a
promise breaks it for every request.

A target that x at its minimum still misses is out of reach: to cut then costs throughput and keeps no promise. So the
search lets go: x is at its maximum, as if there were no target, until a window shows that the target can be kept, or
until some windows have passed, after which it begins anew. It waits twice as long after every try in vain.

What x really used proves safe is evidence whether the value binds or not: routers that are offered the value itself as
room never make a queue, so that it would not be seen to bind for ever. Used comes from the load, so a low load proves
little, and the value stays.
"""

from dataclasses import dataclass
from math import ceil, floor

from policies.types import LEAST_STEP_S, StepResult

# The least that a search for chunks answers with. A step that reads no more counts as one of decodes alone.
LEAST_CHUNK_TOKENS = 64
# epsilon_D / D_SLA: a latency so little below its target is on it.
TOLERANCE_FRACTION = 0.04
# One noisy window must not end a search.
_MISSES = 2
# Windows after which a search that has let go begins anew; a try in vain takes about eight, 3 % of the least.
_LEAST_REST, _MOST_REST = 256, 1024


class LatencySearch:
    """Largest integer x in [minimum, maximum] with latency(x) <= target, for a latency that rises with x.

    Attributes:
        value: the present answer; low, high: where the true one is believed to be, low <= value <= high.
        out_of_reach: not even the minimum keeps the target, and nothing is bounded.
    """

    def __init__(
        self,
        *,
        minimum: int,
        maximum: int,
        initial: int,
        target_s: float,
        stride: int,
        drift: int = 1,
        tolerance_fraction: float = TOLERANCE_FRACTION,
    ) -> None:
        """
        Args:
            stride: alpha, the most that the value climbs beyond what is known to be safe.
            drift: delta, by how much a bound gives way first.
            tolerance_fraction: epsilon_D, as a share of the target.
        """
        self._minimum, self._maximum, self._stride, self._drift = minimum, maximum, stride, drift
        self._target_s, self._tolerance_s = target_s, target_s * tolerance_fraction
        self._initial = min(max(initial, minimum), maximum)
        self._rest, self._next_rest = 0, _LEAST_REST
        self._begin()

    def _begin(self) -> None:
        self.value, self.low, self.high = self._initial, self._minimum, self._maximum
        self._probe = self._drop = self._drift
        self._misses = 0
        self.out_of_reach = False

    def update(self, latency_s: float, used: float, *, binding: bool) -> None:
        """Move after one window of measurements.

        Args:
            latency_s: mean latency over the window, >= 0.
            used: mean x really used, > 0; above ``value`` while a batch drains towards it.
            binding: whether ``value`` kept more from being used; when it did not, a fast system proves no more than
                what lies between ``used`` and its bound.
        """
        bound = used * self._target_s / max(latency_s, LEAST_STEP_S)
        missed = latency_s > self._target_s
        if self.out_of_reach:
            self._rest -= 1
            if not missed:
                self._next_rest = _LEAST_REST
            if missed and self._rest > 0:
                return
            self._begin()
            if missed:
                return
        self._misses = self._misses + 1 if missed and self.value == self._minimum and used <= self._minimum else 0
        if self._misses == _MISSES and self._minimum < self._maximum:
            self._let_go()
        elif missed:
            self._too_slow(bound, draining=used > self.value)
        elif latency_s >= self._target_s - self._tolerance_s:
            self._on_target(used)
        elif binding or bound > self.value:
            self._fast(max(used, bound))

    def _let_go(self) -> None:
        self.out_of_reach = True
        self._rest, self._next_rest = self._next_rest, min(2 * self._next_rest, _MOST_REST)
        self.value = self.high = self._maximum

    def _too_slow(self, bound: float, *, draining: bool) -> None:
        if draining and bound >= self.value:
            return  # already on the way down to a value that may do
        self._probe = self._drift
        self.high = self._clamped(min(bound, self.high))
        if self.low > self.high:  # what was safe once is not any more, or this window was an unlucky one
            self.low = self._clamped(self.high - self._drop)
            self._drop *= 4
        self.value = (self.low + self.high) // 2

    def _on_target(self, used: float) -> None:
        """Keep the value near what is used, so that a load that could not fill it does not overshoot later."""
        self._drop = self._drift
        half = max(1, self._stride // 2)
        self.low, self.high = self._clamped(used - half), self._clamped(ceil(used) + half)
        self.value = min(max(self.value, self.low), self.high)

    def _fast(self, bound: float) -> None:
        """Halve the interval, but go at most a stride beyond what is safe; reopen a closed one in doubling steps."""
        self._drop = self._drift
        self.low = self._clamped(bound)
        if self.high <= self.low:
            self.high = self._clamped(self.low + self._probe)
            self._probe = min(2 * self._probe, self._stride)
        self.value = min((self.low + self.high + 1) // 2, self.low + self._stride)

    def _clamped(self, x: float) -> int:
        return min(max(floor(x), self._minimum), self._maximum)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyWindow:
    """Means over one window; ``binding`` when the value searched for bound in most of its steps."""

    latency_s: float
    used: float
    binding: bool


class WindowMean:
    """Averages samples in windows of a fixed number of steps, whichever of them bring one: windows of several searches
    then end together, and a plan can be kept between those ends. One with samples from less than half of its steps goes
    on for as many steps more."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._least_samples = -(-steps // 2)
        self._steps_left = steps
        self._samples = 0
        self._latency_s = 0.0
        self._used = 0.0
        self._binding = 0

    @property
    def steps_left(self) -> int:
        """Until the window may end, >= 1."""
        return self._steps_left

    def add(self, latency_s: float, used: float, *, binding: bool) -> None:
        """Take the sample of the present step."""
        self._samples += 1
        self._latency_s += latency_s
        self._used += used
        self._binding += binding

    def step(self) -> LatencyWindow | None:
        """End the present step. Returns the window that ends with it, or None."""
        self._steps_left -= 1
        if self._steps_left:
            return None
        self._steps_left = self._steps
        return self._close() if self._samples >= self._least_samples else None

    def _close(self) -> LatencyWindow:
        n = self._samples
        window = LatencyWindow(latency_s=self._latency_s / n, used=self._used / n, binding=2 * self._binding > n)
        self._samples, self._latency_s, self._used, self._binding = 0, 0.0, 0.0, 0
        return window


class TokenGap:
    """Time between two tokens of a running request: the steps in between, prefills included, add up."""

    def __init__(self) -> None:
        self._pending_s = 0.0

    def add(self, result: StepResult) -> float | None:
        """The gap that this step closes, s; None for a step that decodes nothing."""
        if result.tells_time:
            self._pending_s += result.step_s
        if result.decode_requests:
            gap_s, self._pending_s = self._pending_s, 0.0
            return gap_s
        if result.running_count <= result.prefill_requests:
            self._pending_s = 0.0  # no request was between two tokens
        return None
