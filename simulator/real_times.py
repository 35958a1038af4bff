"""How the steps of an engine differ from the step times that policies believe.

On a real engine steps take longer or shorter than a straight line says, wander with what else the machine does, and
between the result of one and the begin of the next passes time that is in neither.
"""

from dataclasses import dataclass, fields
from math import exp, sqrt

import numpy as np

from policies.checks import require_at_least, require_positive
from policies.errors import ConfigError
from simulator.engine import StepClock


@dataclass(frozen=True, slots=True, kw_only=True)
class RealTimes:
    """What is laid over an engine's clock.

    Attributes:
        factor: of every step.
        wander: standard deviation of the logarithm of a further factor, which is another one every wander_steps.
        between_s, between_decode_s: seconds before a step that are in none: so many, and for each request that decodes.

    Raises:
        ConfigError: a value is out of bounds.
    """

    factor: float = 1.0
    wander: float = 0.0
    wander_steps: int = 200
    between_s: float = 0.0
    between_decode_s: float = 0.0

    def __post_init__(self) -> None:
        require_positive(self, "factor")
        require_at_least(1, self, "wander_steps")
        require_at_least(0, self, "wander", "between_s", "between_decode_s")

    @classmethod
    def parsed(cls, text: str) -> "RealTimes":
        """From `factor=1.2,between_s=0.004`. Raises ConfigError."""
        kinds = {each.name: int if each.name == "wander_steps" else float for each in fields(cls)}
        found: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = part.partition("=")
            try:
                found[name] = kinds[name](value)
            except (KeyError, ValueError):
                raise ConfigError(f"{part!r} is no NAME=NUMBER with one of {', '.join(kinds)}") from None
        return cls(**found)  # type: ignore[arg-type]


class RealClock:
    """The steps of one engine."""

    def __init__(self, clock: StepClock, real: RealTimes, seed: int) -> None:
        self._clock, self._real, self._rng = clock, real, np.random.default_rng(seed)
        self._kept = exp(-1.0 / real.wander_steps)
        self._wandered = real.wander * float(self._rng.standard_normal())

    def step_s(
        self,
        *,
        prefill_tokens: float = 0.0,
        decode_requests: float = 0.0,
        kv_tokens: float = 0.0,
        prefill_kv_tokens: float = 0.0,
    ) -> float:
        if self._real.wander:
            new = sqrt(1.0 - self._kept**2) * self._real.wander * float(self._rng.standard_normal())
            self._wandered = self._kept * self._wandered + new
        believed_s = self._clock.step_s(
            prefill_tokens=prefill_tokens,
            decode_requests=decode_requests,
            kv_tokens=kv_tokens,
            prefill_kv_tokens=prefill_kv_tokens,
        )
        return self._real.factor * exp(self._wandered) * believed_s

    def before_s(self, decodes: int) -> float:
        """Seconds before a step of so many decodes that are in none."""
        return self._real.between_s + self._real.between_decode_s * decodes
