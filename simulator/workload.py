"""What arrives, as columns of one table, and synthetic laws of it. Out of files it comes by `simulator.traces`; what a
file does not have, arrivals or prompts, comes from a law."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.random import Generator

from policies.errors import InputError
from policies.types import FloatArray, IntArray
from simulator.requests import Request


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Workload:
    """Requests as columns of one length n, in the order of arrival.

    Attributes:
        arrival_s: float64, from 0, not decreasing.
        prompt_tokens, output_tokens: int64, at least 1.
        cached_tokens: int64, leading prompt tokens that some request before had (0 where unknown).
        predicted_output_tokens: float64, NaN where there is no prediction.
        slo_class: labels, or None.
        session: labels of requests that begin with what those before them had, or None.
        api_key: whose requests they are, or None.
        comes_back: whether clients name their sessions, or None where none does.
    """

    name: str
    arrival_s: FloatArray
    prompt_tokens: IntArray
    output_tokens: IntArray
    cached_tokens: IntArray
    predicted_output_tokens: FloatArray
    slo_class: tuple[str, ...] | None = None
    session: tuple[str, ...] | None = None
    api_key: tuple[str, ...] | None = None
    comes_back: tuple[bool, ...] | None = None

    @classmethod
    def of(
        cls,
        name: str,
        arrival_s: FloatArray,
        prompt_tokens: IntArray,
        output_tokens: IntArray,
        *,
        cached_tokens: FloatArray | IntArray | None = None,
        predicted_output_tokens: FloatArray | None = None,
        slo_class: Sequence[str] | None = None,
        session: Sequence[str] | None = None,
        api_key: Sequence[str] | None = None,
        comes_back: Sequence[bool] | None = None,
    ) -> Self:
        """Sorted by arrival, from 0, with lengths of at least 1.

        Raises:
            InputError: there are no requests, or columns of unequal length.
        """
        order = np.argsort(arrival_s, kind="stable")
        n = len(order)
        if not n or not n == len(prompt_tokens) == len(output_tokens):
            raise InputError(f"workload {name} needs equal columns, got {n} arrivals and {len(prompt_tokens)} prompts")
        cached = np.zeros(n) if cached_tokens is None else cached_tokens
        predicted = np.full(n, np.nan) if predicted_output_tokens is None else predicted_output_tokens
        return cls(
            name=name,
            arrival_s=np.asarray(arrival_s[order] - arrival_s[order[0]], dtype=np.float64),
            prompt_tokens=np.maximum(np.asarray(prompt_tokens, dtype=np.int64)[order], 1),
            output_tokens=np.maximum(np.asarray(output_tokens, dtype=np.int64)[order], 1),
            cached_tokens=np.asarray(cached, dtype=np.int64)[order],
            predicted_output_tokens=np.asarray(predicted, dtype=np.float64)[order],
            slo_class=None if slo_class is None else tuple(np.asarray(slo_class)[order].tolist()),
            session=None if session is None else tuple(np.asarray(session)[order].tolist()),
            api_key=None if api_key is None else tuple(np.asarray(api_key)[order].tolist()),
            comes_back=None if comes_back is None else tuple(np.asarray(comes_back)[order].tolist()),
        )

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def rate(self) -> float | None:
        """Requests per second over the whole of it; None when all arrive at once."""
        span_s = float(self.arrival_s[-1])
        return len(self) / span_s if span_s > 0 else None

    def requests(self) -> list[Request]:
        """Fresh requests, one per row."""
        labels = self.slo_class or (None,) * len(self)
        sessions = self.session or (None,) * len(self)
        keys = self.api_key or ("",) * len(self)
        come_back = self.comes_back or (False,) * len(self)
        predicted = self.predicted_output_tokens.tolist()
        columns = zip(
            self.arrival_s.tolist(),
            self.prompt_tokens.tolist(),
            self.output_tokens.tolist(),
            self.cached_tokens.tolist(),
            predicted,
            labels,
            sessions,
            keys,
            come_back,
            strict=True,
        )
        return [
            Request(
                request_id=f"r{index}",
                arrival_s=arrival_s,
                prompt_tokens=prompt,
                output_tokens=output,
                session=session,
                comes_back=returns,
                reusable_tokens=cached,
                cached_tokens=cached if session is None else 0,
                predicted_output_tokens=prediction if prediction == prediction else None,
                slo_class=label,
                api_key=key,
            )
            for index, (arrival_s, prompt, output, cached, prediction, label, session, key, returns) in enumerate(
                columns
            )
        ]

    def arriving(self, arrival_s: FloatArray) -> "Workload":
        """The same requests in the same order at other times."""
        return replace(self, arrival_s=np.sort(arrival_s))

    def faster(self, factor: float) -> "Workload":
        """Arrivals compressed in time: twice the factor is twice the load."""
        return replace(self, arrival_s=self.arrival_s / factor)

    def head(self, count: int) -> "Workload":
        return self.rows(np.arange(min(count, len(self))))

    def rows(self, chosen: IntArray) -> "Workload":
        labels = None if self.slo_class is None else [self.slo_class[row] for row in chosen.tolist()]
        return Workload.of(
            self.name,
            self.arrival_s[chosen],
            self.prompt_tokens[chosen],
            self.output_tokens[chosen],
            cached_tokens=self.cached_tokens[chosen],
            predicted_output_tokens=self.predicted_output_tokens[chosen],
            slo_class=labels,
            session=None if self.session is None else [self.session[row] for row in chosen.tolist()],
            api_key=None if self.api_key is None else [self.api_key[row] for row in chosen.tolist()],
            comes_back=None if self.comes_back is None else [self.comes_back[row] for row in chosen.tolist()],
        )

    def sample(self, count: int, rng: Generator) -> "Workload":
        """Rows drawn with replacement, all arriving at once: give them arrivals."""
        chosen = replace(self, arrival_s=np.zeros(len(self)))
        return chosen.rows(rng.integers(0, len(self), count))

    def shorter_than(self, max_tokens: int) -> "Workload":
        """Without the requests whose prompt and answer together are longer."""
        return self.rows(np.flatnonzero(self.prompt_tokens + self.output_tokens <= max_tokens))

    def without_prefixes(self) -> "Workload":
        return replace(self, cached_tokens=np.zeros(len(self), np.int64), session=None, comes_back=None)


def mixed(name: str, *parts: Workload) -> Workload:
    """Several workloads at once, each request labelled with the name of its part."""
    join = np.concatenate
    return Workload.of(
        name,
        join([part.arrival_s for part in parts]),
        join([part.prompt_tokens for part in parts]),
        join([part.output_tokens for part in parts]),
        cached_tokens=join([part.cached_tokens for part in parts]),
        predicted_output_tokens=join([part.predicted_output_tokens for part in parts]),
        slo_class=[part.name for part in parts for _ in range(len(part))],
    )


Law = Callable[[Generator, int], FloatArray]


def length_law(text: str) -> Law:
    """A law of lengths from its name and numbers, as `--output-law` takes it.

    constant:N  uniform:LOW:HIGH  exponential:MEAN  lognormal:MEAN:SIGMA (sigma of the logarithm)

    Raises:
        InputError: it is none of these.
    """
    kind, *numbers = text.split(":")
    try:
        given = [float(number) for number in numbers]
        law = _LAWS[kind](*given)
        _check_law(given, lambda: law(np.random.default_rng(0), 1))
        return law
    except (ArithmeticError, KeyError, TypeError, ValueError):
        known = "constant:N, uniform:LOW:HIGH, exponential:MEAN, lognormal:MEAN:SIGMA"
        raise InputError(f"unknown length law {text!r}; there are {known}") from None


def _check_law(given: Sequence[float], draw: Callable[[], FloatArray]) -> None:
    """Raises ValueError, or what ``draw`` raises, where numbers or one drawn value are negative or not finite."""
    with np.errstate(all="ignore"):
        values = [*given, *draw().tolist()]
    if not all(0.0 <= value < math.inf for value in values):
        raise ValueError(f"{values} are not all finite and at least 0")


_LAWS: dict[str, Callable[..., Law]] = {
    "constant": lambda n: lambda rng, count: np.full(count, n),
    "uniform": lambda low, high: lambda rng, count: rng.uniform(low, high, count),
    "exponential": lambda mean: lambda rng, count: rng.exponential(mean, count),
    "lognormal": lambda mean, sigma: lambda rng, count: rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, count),
}


def synthetic(name: str, prompt_law: Law, output_law: Law, count: int, rng: Generator) -> Workload:
    """Prompts and outputs from laws, rounded, all arriving at once."""
    prompts, outputs = np.rint(prompt_law(rng, count)), np.rint(output_law(rng, count))
    return Workload.of(name, np.zeros(count), prompts.astype(np.int64), outputs.astype(np.int64))


def poisson(rate: float, count: int, rng: Generator) -> FloatArray:
    """Arrivals independent of each other, ``rate`` per second."""
    return np.cumsum(rng.exponential(1.0 / rate, count))


def gamma_bursts(rate: float, cv: float, count: int, rng: Generator) -> FloatArray:
    """Gaps by the gamma law with that coefficient of variation: 1 is Poisson, above come bursts."""
    shape = 1.0 / cv**2
    return np.cumsum(rng.gamma(shape, 1.0 / (rate * shape), count))


def square_wave(low: float, high: float, period_s: float, count: int, rng: Generator) -> FloatArray:
    """Poisson at the low and the high rate in turns of half a period, the low one first."""
    unit = np.cumsum(rng.exponential(1.0, count))
    half = period_s / 2.0
    cycles, left = np.divmod(unit, (low + high) * half)
    within = np.where(left < low * half, left / low, half + (left - low * half) / high)
    return np.asarray(cycles * period_s + within)


def arrival_law(text: str) -> Callable[[int, Generator], FloatArray]:
    """Arrival times from a name and numbers, as `--arrivals` takes them.

    poisson:RATE  gamma:RATE:CV  square:LOW:HIGH:PERIOD_S  all (at once)

    Raises:
        InputError: it is none of these.
    """
    kind, *numbers = text.split(":")
    try:
        given = [float(number) for number in numbers]
        laws: dict[str, Callable[..., FloatArray]] = {"poisson": poisson, "gamma": gamma_bursts, "square": square_wave}
        if kind == "all" and not given:
            return lambda count, rng: np.zeros(count)
        law = laws[kind]
        _check_law(given, lambda: law(*given, 1, np.random.default_rng(0)))
        return lambda count, rng: law(*given, count, rng)
    except (ArithmeticError, KeyError, TypeError, ValueError):
        known = "poisson:RATE, gamma:RATE:CV, square:LOW:HIGH:PERIOD_S, all, trace"
        raise InputError(f"unknown arrivals {text!r}; there are {known}") from None
