"""What is foreseen of a request: the learned predictor's word, a client's hint or a limit, each while it proves right.

A driver: it asks the scorer (with a deadline), turns the score into tokens by the curve of the served model and, once
that one has seen enough, of its system prompt, and lets `policies.lengths.drift` decide which source is
believed. Curves learn from what all routers share (`scored`, `learn`); which is believed each router judges by the
requests that it served itself:

* the learned predictor against the histogram of the class, for each model and class; believed until it does worse;
* a client's expected tokens, and the request's own limit on tokens, against what would be used without them, for each
  key; believed only after they have done better.

What is not believed is still asked and judged, so that it can return. Everything kept is bounded; what was used least
lately goes first.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from math import isfinite
from typing import Generic, Literal, NamedTuple, TypeVar

from policies.lengths.drift import Accuracy, DriftConfig, DriftSwitch, Judged
from policies.router.promise import NO_PROMISE, Promise
from predictor.asking import Asking
from predictor.base import LengthPrediction
from predictor.calibration import HIGH, LOW, Calibrator, Curve

Source = Literal["learned", "hint", "limit"]
Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")
MAX_CURVES, MAX_SWITCHES = 64, 1024  # of models and of system prompts each, and of what is believed


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A request, as far as its length may depend on it.

    Attributes:
        prompt: its text, without the system prompt.
        system_prompt: its name (`predictor.conversation`), not its text; requests that share one share a curve.
        key: of the client, as it is told apart for hints; "" without one.
        hinted_tokens: what the client expects.
        max_output_tokens: the request's own limit.
    """

    prompt: str
    model: str
    slo_class: str
    system_prompt: str = ""
    key: str = ""
    hinted_tokens: int | None = None
    max_output_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Foresight:
    """Keep it until the request ends, and hand it to `observe`.

    Attributes:
        prediction: what to go by; None means the histogram.
        source: whose word that is. learned and score: what the predictor said, believed or not.
    """

    question: Question
    prediction: LengthPrediction | None
    source: Source | None
    score: float | None
    learned: LengthPrediction | None


class Scored(NamedTuple):
    """A finished request as the curves of every router learn from it.

    Attributes:
        scale: of the checkpoint that gave the score; a score means nothing to another one.
    """

    scale: str
    model: str
    system_prompt: str
    score: float
    output_tokens: int
    is_cut: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedConfig:
    """How the learned predictor gains and loses trust, and how clients' claims do."""

    drift: DriftConfig = DriftConfig()
    hints: DriftConfig = DriftConfig(window_requests=64, patience=24, starts_on=False)


class Kept(Generic[Key, Value]):
    """A bounded number of values by key, made when first asked for; the least recently used goes first."""

    def __init__(self, limit: int, make: Callable[[], Value]) -> None:
        self._limit, self._make = limit, make
        self._values: OrderedDict[Key, Value] = OrderedDict()

    def __getitem__(self, key: Key) -> Value:
        if key not in self._values:
            self._values[key] = self._make()
            if len(self._values) > self._limit:
                self._values.popitem(last=False)
        self._values.move_to_end(key)
        return self._values[key]

    def __len__(self) -> int:
        return len(self._values)

    def items(self) -> Iterator[tuple[Key, Value]]:
        yield from self._values.items()


class LearnedPredictor:
    """One for each router."""

    def __init__(self, asking: Asking, prior: Curve, config: LearnedConfig | None = None) -> None:
        chosen = config or LearnedConfig()
        self.asking = asking
        self._scale = blake2b(repr(prior).encode(), digest_size=8).hexdigest()
        # Apart, so that many system prompts cannot push a model's own curve out.
        self._of_model: Kept[str, Calibrator] = Kept(MAX_CURVES, lambda: Calibrator(prior))
        self._of_system_prompt: Kept[tuple[str, str], Calibrator] = Kept(MAX_CURVES, lambda: Calibrator(prior))
        self._learned: Kept[tuple[str, str], DriftSwitch] = Kept(MAX_SWITCHES, lambda: DriftSwitch(chosen.drift))
        self._hints: Kept[tuple[str, Source], DriftSwitch] = Kept(MAX_SWITCHES, lambda: DriftSwitch(chosen.hints))

    async def foresee(self, question: Question, promise: Promise = NO_PROMISE) -> Foresight:
        """Takes the asking's deadline at most."""
        score = await self.asking.score(question.prompt, promise)
        learned = None if score is None else self._curve(question).predict(score)
        prediction, source = self._believed(question, learned)
        return Foresight(question=question, prediction=prediction, source=source, score=score, learned=learned)

    def _curve(self, question: Question) -> Calibrator:
        own = self._of_system_prompt[question.model, question.system_prompt]
        return own if own.has_own_curve else self._of_model[question.model]

    def _believed(
        self, question: Question, learned: LengthPrediction | None
    ) -> tuple[LengthPrediction | None, Source | None]:
        for source, tokens in _claims(question):
            if self._hints[question.key, source].is_on:
                return LengthPrediction(mean_tokens=float(tokens)), source
        if learned is not None and self._learned[question.model, question.slo_class].is_on:
            return learned, "learned"
        return None, None

    def observe(
        self,
        foresight: Foresight,
        output_tokens: int,
        *,
        is_cut: bool,
        histogram: LengthPrediction | None,
        bin_of: Callable[[float], int],
    ) -> None:
        """Judge what was foreseen of a request that is finished.

        Args:
            is_cut: it ended at its limit and would have been longer.
            histogram: what its class's histogram says, None before it says anything.
            bin_of: the bin of a number of predicted tokens.
        """
        question = foresight.question
        reference = histogram
        if foresight.learned is not None and histogram is not None:
            switch = self._learned[question.model, question.slo_class]
            if not is_cut:  # of one that would have been longer the length is not known
                switch.observe(_judged(foresight.learned, histogram, output_tokens, bin_of))
            reference = foresight.learned if switch.is_on else histogram
        if reference is not None:
            self._judge_claims(question, reference, output_tokens, bin_of)

    def scored(self, foresight: Foresight, output_tokens: int, is_cut: bool) -> Scored | None:
        """What all routers' curves are to learn from it; None when it got no score in time."""
        if foresight.score is None:
            return None
        asked = foresight.question
        return Scored(self._scale, asked.model, asked.system_prompt, foresight.score, output_tokens, is_cut)

    def learn(self, finished: Iterable[Scored]) -> None:
        """Take note of requests that this router or another one finished; those of another checkpoint, and scores that
        are no numbers, teach nothing."""
        of_model: defaultdict[str, list[tuple[float, float, bool]]] = defaultdict(list)
        of_system_prompt: defaultdict[tuple[str, str], list[tuple[float, float, bool]]] = defaultdict(list)
        for scored in finished:
            if scored.scale == self._scale and isfinite(scored.score):
                one = (scored.score, float(scored.output_tokens), scored.is_cut)
                of_model[scored.model].append(one)
                of_system_prompt[scored.model, scored.system_prompt].append(one)
        for model, taken in of_model.items():
            self._of_model[model].observe(taken)
        for key, taken in of_system_prompt.items():
            self._of_system_prompt[key].observe(taken)

    def _judge_claims(
        self, question: Question, reference: LengthPrediction, output_tokens: int, bin_of: Callable[[float], int]
    ) -> None:
        """A limit that cut the answer proved right: it is the length that came."""
        for source, tokens in _claims(question):
            claim = LengthPrediction(mean_tokens=float(tokens))
            limit = question.max_output_tokens or reference.mean_tokens
            bounded = LengthPrediction(mean_tokens=min(reference.mean_tokens, limit))
            self._hints[question.key, source].observe(_judged(claim, bounded, output_tokens, bin_of))

    def accuracies(self) -> dict[tuple[str, str], tuple[Accuracy, bool]]:
        """By model and class: how the learned predictor does, and whether it is believed."""
        return {key: (switch.accuracy(), switch.is_on) for key, switch in self._learned.items()}


def _claims(question: Question) -> Iterator[tuple[Source, int]]:
    if question.hinted_tokens is not None:
        yield "hint", question.hinted_tokens
    if question.max_output_tokens is not None:
        yield "limit", question.max_output_tokens


def _judged(
    challenger: LengthPrediction, reference: LengthPrediction, output_tokens: int, bin_of: Callable[[float], int]
) -> Judged:
    return Judged(
        actual_tokens=output_tokens,
        challenger_tokens=challenger.mean_tokens,
        reference_tokens=reference.mean_tokens,
        actual_bin=bin_of(output_tokens),
        challenger_bin=bin_of(challenger.mean_tokens),
        reference_bin=bin_of(reference.mean_tokens),
        low_tokens=challenger.quantile_tokens.get(LOW),
        high_tokens=challenger.quantile_tokens.get(HIGH),
    )
