"""How far beyond its forecast an engine may admit: as far as recomputing what is preempted costs less than it brings.

A preemption in vLLM loses no tokens, it computes them again as a prefill. Where a decode step costs nearly the same
whatever it holds and prefill is cheap, a batch that is 20 % larger brings nearly 20 % and its preemptions cost 1 %:
there a forecast that avoids every preemption gives away throughput. Where prefill is dear it is the other way round.

Source: this project's own, on top of 001's chance constraint, which knows no price. With g the share admitted beyond
the safe capacity, b the batch, a the overhead of decode steps as a share of all time and c the share of time spent on
recomputing:

    throughput ~ (1 + a * db/b) * (1 - c),  b ~ 1 + g,  c ~ (g + h)^2   =>   at the optimum c = a (g + h) / (2 (1 + g))

h is how far below the forecast's own safe capacity preemptions begin: its chance constraint admits a few. With h = 0
a single one would bind g to 0 for good, as nothing costs less than nothing. In caches for 10, 20 and 40 requests c was
seen to grow as with an h of about 0.3 requests, so that is what it is taken for.

The controller moves g towards the point where the measured c meets that, by a part of g + h at a time, for that is the
scale on which c changes: a tenth of a percent for a batch of hundreds. a follows from the learned step times. c is
taken as preemptions * mean tokens held * seconds per prefill token / busy seconds.
"""

from math import log

from policies.types import StepResult, StepTimes

# The largest g: there nothing but the prompts that fit now holds admission back, as in vLLM itself.
MOST = 4.0
# h, in requests.
_MARGIN_REQUESTS = 0.3
# Steps between two moves.
_WINDOW_STEPS = 32
# Weight of the newest window in c.
_SMOOTHING = 0.4
# The largest move up, as a share of g + h, and of 1 + g; down it is twice that at most. Near the optimum moves are
# smaller: preemptions come in bursts, and a fixed step would swing between none and too many.
_GAIN = 0.2
_MOST_GAIN = 0.01


class Overcommit:
    """Adapts ``share``, the g above, from 0."""

    def __init__(self) -> None:
        self.share = 0.0
        self._cost: float | None = None
        self._steps = 0
        self._preempted = 0
        self._busy_s = 0.0
        self._decodes = 0
        self._decode_steps = 0
        self._kv_tokens = 0

    def observe(self, result: StepResult) -> None:
        self._steps += 1
        self._preempted += result.preempted
        self._busy_s += result.step_s
        if result.decode_requests:
            self._decode_steps += 1
            self._decodes += result.decode_requests
            self._kv_tokens += result.kv_tokens

    @property
    def due(self) -> bool:
        return self._steps >= _WINDOW_STEPS and self._busy_s > 0.0 and self._decode_steps > 0

    def move(self, times: StepTimes, *, binding: bool) -> None:
        """Close the window and move.

        Args:
            binding: whether g kept requests waiting that would fit now: without, a larger one would change nothing.
        """
        overhead, cost = self._overhead_share(times), self._cost_share(times)
        self._cost = cost if self._cost is None else self._cost + _SMOOTHING * (cost - self._cost)
        reach = self.share + _MARGIN_REQUESTS * self._decode_steps / self._decodes
        pull = _pull(overhead * reach / (2.0 * (1.0 + self.share)), self._cost)
        if pull < 0.0 or binding:
            self.share += pull * min(_GAIN * reach, _MOST_GAIN * (1.0 + self.share))
            self.share = min(max(0.0, self.share), MOST)
        self._steps = self._preempted = self._decodes = self._decode_steps = self._kv_tokens = 0
        self._busy_s = 0.0

    def _overhead_share(self, times: StepTimes) -> float:
        return min(1.0, times.decode.overhead_s * self._decode_steps / self._busy_s)

    def _cost_share(self, times: StepTimes) -> float:
        held = self._kv_tokens / self._decodes
        return self._preempted * held * times.prefill.prefill_s / self._busy_s


def _pull(wanted: float, cost: float) -> float:
    """-2 to 1: the logarithm of what recomputing may cost over what it does cost."""
    if not cost:
        return 1.0
    return min(max(-2.0, log(wanted / cost)), 1.0) if wanted else -2.0
