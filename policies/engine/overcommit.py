"""How far beyond its forecast an engine may admit: as far as recomputing what is preempted costs less than it brings.

A preemption in vLLM loses no tokens, it computes them again as a prefill. Where a decode step costs nearly the same
whatever it holds and prefill is cheap, a batch that is 20 % larger brings nearly 20 % and its preemptions cost 1 %:
there a forecast that avoids every preemption gives away throughput. Where prefill is dear it is the other way round.

Source: this project's own, on top of 001's chance constraint, which knows no price. With g the share admitted beyond
the safe capacity, b the batch, a the overhead of decode steps as a share of all time and c the share of time spent on
recomputing:

    throughput ~ (1 + a db/b) (1 - c),  b ~ 1 + g,  dc/dg = c / r   =>   at the optimum c = a r / (1 + g)

r, the reach, is by how much g grows until c has grown e-fold. Near the forecast's own bound preemptions are the tail of
a sum over the batch, so there r = h with h ~ 1 / sqrt(b); far beyond it c grows with a power of g, the first where
answers are of nearly one length and the second where they are exponential, so r = g / 1.5: r = h + max(0, g) / 1.5.
Seen in caches for 10 to 80 requests: h of 0.06 to 0.13 / sqrt(b). Throughput is the same within 0.2 % for all of 0.035
to 0.1, so 0.05 is taken, which preempts less.

A window moves g up by what preemptions would have been worth their price in it, and every preemption moves it down, by
a part of the reach each: so g rests where the two are equal in the mean, however rare preemptions are, as long as no
move is cut: far beyond the bound, where single dear ones are, it lets through more. A preemption is taken to cost the
mean tokens held times the seconds per prefill token; a follows from the learned step times.
"""

from math import sqrt

from policies.types import StepResult, StepTimes

# The largest g: there nothing but the prompts that fit now holds admission back, as in vLLM itself.
MOST = 4.0
# h for a batch of one.
_SCALE = 0.05
# Of g, with which preemptions grow far beyond the bound.
_POWER = 1.5
# The least g, in units of h: the forecast's bound may itself let too many through.
_LEAST = -6.0
# Steps between two moves.
_WINDOW_STEPS = 32
# What one preemption moves g, as a share of the reach.
_GAIN = 0.15
# The largest move, as a share of 1 + g.
_MOST_GAIN = 0.01


class Overcommit:
    """Adapts ``share``, the g above, from 0."""

    def __init__(self) -> None:
        self.share = 0.0
        self._restart()

    def _restart(self) -> None:
        self._steps = self._preempted = self._decodes = self._decode_steps = self._kv_tokens = 0
        self._busy_s = 0.0

    def observe(self, result: StepResult) -> None:
        self._steps += 1
        self._preempted += result.preempted
        if result.tells_time:
            self._busy_s += result.step_s
        if result.decode_requests:
            self._decode_steps += 1
            self._decodes += result.decode_requests
            self._kv_tokens += result.kv_tokens

    @property
    def due(self) -> bool:
        return self._steps >= _WINDOW_STEPS and self._busy_s > 0.0 and self._decode_steps > 0

    def move(self, times: StepTimes | None, *, binding: bool) -> None:
        """Close the window and move.

        Args:
            times: None while it is not known what a prompt costs; nothing moves then.
            binding: whether g kept requests waiting that would fit now: without, a larger one would change nothing.
        """
        if times is not None:
            self._move(times, binding)
        self._restart()

    def _move(self, times: StepTimes, binding: bool) -> None:
        h = _SCALE * sqrt(self._decode_steps / self._decodes)
        reach = h + max(0.0, self.share) / _POWER
        most = _MOST_GAIN * (1.0 + self.share)
        wanted, price = self._overhead_share(times) * reach / (1.0 + self.share), self._price(times)
        move = _GAIN * reach * (wanted / price - self._preempted) if price > 0.0 else most
        if move < 0.0 or binding:
            self.share += min(max(-most, move), most)
            self.share = min(max(_LEAST * h, self.share), MOST)

    def _overhead_share(self, times: StepTimes) -> float:
        return min(1.0, times.decode.overhead_s * self._decode_steps / self._busy_s)

    def _price(self, times: StepTimes) -> float:
        """What one preemption costs, as a share of the window's time."""
        return self._kv_tokens / self._decodes * times.prefill.prefill_s / self._busy_s
