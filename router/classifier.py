"""What a request is expected to cost, and the ticket that follows from it.

A driver: it asks the predictors and the policies and puts their answers together; it decides nothing itself. Lengths of
finished requests are exchanged with all routers, so that every router's bins and predictions rest on the same window.
"""

from collections import deque

from policies.errors import StateStoreError
from policies.multi_bin import MultiBin
from policies.order import Order
from policies.placement import work_s
from policies.types import RequestView, StepTimes
from predictor.base import LengthPredictor
from predictor.learned import Foresight, LearnedPredictor, Question
from predictor.metrics import PredictorMetrics
from router.codec import RequestSize
from router.metrics import RouterMetrics
from router.state_store import StateStore, Ticket

MAX_UNSENT_LENGTHS = 4096


class Classifier:
    """From a request's size to its ticket."""

    def __init__(
        self,
        *,
        predictor: LengthPredictor,
        bins: MultiBin,
        order: Order,
        step_times: StepTimes,
        shared_batch_size: int,
        default_output_tokens: int,
        metrics: RouterMetrics,
        learned: LearnedPredictor | None = None,
    ) -> None:
        self._predictor, self._bins, self._order = predictor, bins, order
        self._step_times, self._shared_batch_size = step_times, shared_batch_size
        self._default_output_tokens = default_output_tokens
        self._metrics, self._learned = metrics, learned
        if learned is not None:
            metrics.registry.register(PredictorMetrics(learned))
        self._unsent: deque[tuple[str, int]] = deque(maxlen=MAX_UNSENT_LENGTHS)
        self._seen = 0

    @property
    def bin_edges(self) -> tuple[float, ...]:
        return self._bins.edges

    async def foresee(self, question: Question) -> Foresight | None:
        """What the learned predictor says, within its deadline; None where there is none."""
        return None if self._learned is None else await self._learned.foresee(question)

    def ticket(
        self, size: RequestSize, slo_class: str, router_id: str, now_s: float, foresight: Foresight | None = None
    ) -> Ticket:
        predicted = self._predict(size, slo_class, foresight)
        request_work_s = self._work_s(size, predicted, now_s)
        return Ticket(
            request_id=size.request_id,
            bin_index=self._bins.assign(predicted, slo_class=slo_class),
            deadline_key=self._order.key(now_s, slo_class, request_work_s, size.prompt_tokens),
            work_s=request_work_s,
            router_id=router_id,
        )

    def _predict(self, size: RequestSize, slo_class: str, foresight: Foresight | None) -> float | None:
        prediction = foresight.prediction if foresight is not None else None
        if prediction is None:
            prediction = self._predictor.predict(slo_class, size.prompt_tokens)
        if prediction is None:
            self._metrics.predictor_fallbacks.labels(slo_class).inc()
            return None
        return min(prediction.mean_tokens, size.max_output_tokens or prediction.mean_tokens)

    def _work_s(self, size: RequestSize, predicted: float | None, now_s: float) -> float:
        view = RequestView(request_id=size.request_id, arrival_s=now_s, prompt_tokens=size.prompt_tokens)
        if predicted is None:
            predicted = min(self._default_output_tokens, size.max_output_tokens or self._default_output_tokens)
        return work_s(view, self._step_times, output_tokens=predicted, shared_batch_size=self._shared_batch_size)

    def observe(
        self, slo_class: str, output_tokens: int, foresight: Foresight | None = None, *, is_cut: bool = False
    ) -> None:
        """Take note of a finished request, cut when it ended at its limit; it counts after the next `exchange`."""
        self._unsent.append((slo_class, output_tokens))
        if self._learned is not None and foresight is not None:
            self._learned.observe(
                foresight,
                output_tokens,
                is_cut=is_cut,
                histogram=self._predictor.predict(slo_class, prompt_tokens=0),
                bin_of=lambda tokens: self._bins.assign(tokens, slo_class=slo_class),
            )

    async def exchange(self, store: StateStore) -> None:
        """Share the new lengths and learn from everybody's.

        Raises:
            StateStoreError: the store does not answer; the lengths wait for the next time.
        """
        new, self._unsent = self._unsent, deque(maxlen=MAX_UNSENT_LENGTHS)
        try:
            self._seen, unseen = await store.exchange_lengths(self._seen, new, self._bins.config.window_requests)
        except StateStoreError:
            self._unsent = deque([*new, *self._unsent], maxlen=MAX_UNSENT_LENGTHS)
            raise
        for slo_class, output_tokens in unseen:
            self._bins.observe(output_tokens, slo_class=slo_class)
            self._predictor.observe(slo_class, output_tokens)
