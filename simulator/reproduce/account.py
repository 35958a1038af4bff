"""One answer's account: what its steps have left of the promised time per token so far, and what they took too much.

after n further tokens: account = n * tpot_s - (seconds since its first token)
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import numpy as np

from policies.engine.auto import Auto, AutoConfig
from policies.types import BoolArray, FloatArray, StepResult
from simulator import plots
from simulator.cluster import ClusterConfig, run
from simulator.predictors import predicted
from simulator.real_times import RealTimes
from simulator.reproduce.common import Setting, table
from simulator.reproduce.goodput import MEASURED, TARGETS, TRAFFIC, Variant
from simulator.requests import Request

_RATE = 10.0  # requests per second of `TRAFFIC["mix"]`: more than a plain engine could serve in time
_REQUESTS = 1500
_CLASS = "interactive"
_TOKENS = range(60, 121)  # of the answer, so that single steps are seen
# Steps are longer and shorter than believed in turn, as on a machine that others use as well.
_SERVED = replace(MEASURED, real_times=RealTimes(wander=0.15))


class _Watched(Auto):
    """Keeps what it is told of steps."""

    def __init__(self, config: AutoConfig, steps: list[StepResult]) -> None:
        super().__init__(config)
        self._steps = steps

    def observe(self, result: StepResult) -> None:
        self._steps.append(result)
        super().observe(result)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Watching(ClusterConfig):
    """One engine, whose steps are kept."""

    steps: list[StepResult] = field(default_factory=list)

    def batch_policy(self) -> Auto:
        return _Watched(AutoConfig(**self.batch_settings), self.steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """By the tokens after the first one, shape (tokens,).

    Attributes:
        gap_s: before each.
        reads: whether its step read prompts as well.
        target_s: promised per token.
    """

    gap_s: FloatArray
    reads: BoolArray
    target_s: float

    @property
    def saved_s(self) -> FloatArray:
        """Below 0 where it is overdrawn."""
        return np.asarray(np.cumsum(self.target_s - self.gap_s))


def account(setting: Setting) -> list[str]:
    """One answer's account over its steps: the one that was overdrawn most of those that kept their promise."""
    accounts = _kept()
    shown = min(accounts, key=lambda each: float(each.saved_s.min()))
    if path := setting.figure("account"):
        _draw(shown, path.with_suffix(".svg"))
    saved_s = shown.saved_s
    numbers = {
        "tokens after the first": len(saved_s),
        "of which prompts were read beside": int(shown.reads.sum()),
        "promised, ms a token": 1e3 * shown.target_s,
        "in the mean, ms a token": 1e3 * float(shown.gap_s.mean()),
        "longest step, ms": 1e3 * float(shown.gap_s.max()),
        "most saved, ms": 1e3 * float(saved_s.max()),
        "most overdrawn, ms": -1e3 * float(saved_s.min()),
        "left at the end, ms": 1e3 * float(saved_s[-1]),
    }
    return table(("one answer", "value"), numbers.items())


def _kept() -> list[Account]:
    """Of all answers of the class that kept their promise, of such lengths."""
    made = Variant().config(_SERVED)
    config = _Watching(**{each.name: getattr(made, each.name) for each in fields(made)})
    rng = np.random.default_rng(0)
    load = predicted(TRAFFIC["mix"].drawn(_RATE, _REQUESTS, rng), "noise:0.44", rng)
    target = TARGETS[_CLASS]
    return [
        _account(request, config.steps, target.tpot_s)
        for request in run(config, load).requests
        if request.slo_class == _CLASS and request.output_tokens in _TOKENS and not request.preemptions
        if target.met(request)
    ]


def _account(request: Request, steps: Sequence[StepResult], target_s: float) -> Account:
    """A request that decodes gets a token from every step with decodes."""
    first_s, last_s = request.first_token_s, request.finished_s
    assert first_s is not None and last_s is not None, "it kept its promise"
    mine = [step for step in steps if step.decode_requests and first_s < step.now_s <= last_s]
    return Account(
        gap_s=np.diff([first_s, *(step.now_s for step in mine)]),
        reads=np.array([step.prefill_tokens > 0 for step in mine]),
        target_s=target_s,
    )


def _draw(shown: Account, path: Path) -> None:
    made = plots.figure(2)
    gaps, saved = made.axes
    tokens = np.arange(1, len(shown.gap_s) + 1)
    for reads, label in ((False, "decodes alone"), (True, "reads prompts, too")):
        mine = shown.reads == reads
        gaps.bar(tokens[mine], 1e3 * shown.gap_s[mine], label=label)
    gaps.axhline(1e3 * shown.target_s, color="black", linestyle=":", label="promised in the mean")
    gaps.set(ylabel="before the token, ms", title="steps")
    saved.plot(tokens, 1e3 * shown.saved_s, ".-", color="black", label="account")
    saved.fill_between(tokens, 1e3 * shown.saved_s, where=(shown.saved_s < 0).tolist(), color="red", label="overdrawn")
    saved.axhline(0.0, color="grey", linewidth=0.8)
    saved.set(xlabel="tokens after the first", ylabel="saved up, ms", title="the answer's account")
    for axes in (gaps, saved):
        axes.legend(fontsize=7)
    plots.save(made, path)
