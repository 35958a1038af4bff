"""A request on its way through the simulator: what it is, and what became of it."""

from dataclasses import dataclass
from math import inf

from policies.router.promise import TARGETS, Promise
from policies.types import FinishedRequest, RequestView


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """One request with its true length and its history.

    Attributes:
        output_tokens: the true length of the answer, unknown to every policy.
        predicted_output_tokens: what a predictor says, or None.
        session: requests of one session begin with what those before had; None where that is not known.
        comes_back: its session has a name, by which engines keep what it had computed through a pause.
        reusable_tokens: leading prompt tokens that its session has had.
        cached_tokens: leading prompt tokens whose KV is cached when it starts; the last token is always computed.
        loaded_tokens: of those, the ones that were loaded from beyond the GPU.
        class_index: whose length statistics and targets it has: its service class's, or those of its bin.
        api_key: whose request it is, for turns and shares of keys; "" without a key.
        fills_idle: its class takes what others leave.
        entered_s: when it came to the engine that holds it.
        promised_ttft_s, promised_tpot_s, promised_e2e_s: what it was promised, first token, mean of a token, and last
            token; inf is nothing.
        foreseen_ttft_s: as it was predicted when it came; None where nobody asked.
        generated_tokens: so far; kept through a preemption or a failure, and then prefilled again.
        refused: its engine or its router took it for one too many; it never ends.
    """

    request_id: str
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    predicted_output_tokens: float | None = None
    session: str | None = None
    comes_back: bool = False
    reusable_tokens: int = 0
    cached_tokens: int = 0
    loaded_tokens: int = 0
    class_index: int = 0
    slo_class: str | None = None
    api_key: str = ""
    fills_idle: bool = False
    entered_s: float | None = None
    promised_ttft_s: float = inf
    promised_tpot_s: float = inf
    promised_e2e_s: float = inf
    foreseen_ttft_s: float | None = None
    generated_tokens: int = 0
    replica_id: str | None = None
    started_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    finished_s: float | None = None
    preemptions: int = 0
    moves: int = 0
    refused: bool = False

    def promised(self) -> Promise:
        seconds = self.promised_ttft_s, self.promised_tpot_s, self.promised_e2e_s
        return Promise(**{name: None if each == inf else each for name, each in zip(TARGETS, seconds, strict=True)})

    def promise(self, promise: Promise) -> None:
        self.promised_ttft_s, self.promised_tpot_s, self.promised_e2e_s = (
            inf if each is None else each for each in (promise.ttft_s, promise.tpot_s, promise.e2e_s)
        )

    def view(self) -> RequestView:
        """As its driver sees it: an engine does not know of the wait in the router."""
        return RequestView(
            request_id=self.request_id,
            arrival_s=self.arrival_s if self.entered_s is None else self.entered_s,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.generated_tokens,
            cached_tokens=self.prefix_tokens,
            predicted_output_tokens=self.predicted_output_tokens,
            class_index=self.class_index,
            slo_class=self.slo_class,
            deadline_s=self.deadline_s,
            tpot_s=self.promised_tpot_s,
            ends_by_s=self.ends_by_s,
        )

    def ended(self) -> FinishedRequest:
        """What policies are told of it when it has all its tokens."""
        return FinishedRequest(
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            class_index=self.class_index,
            predicted_output_tokens=self.predicted_output_tokens,
        )

    @property
    def deadline_s(self) -> float:
        """When its first token is due; inf where none was promised, or it waits for idle capacity."""
        return inf if self.fills_idle else self.arrival_s + self.promised_ttft_s

    @property
    def ends_by_s(self) -> float:
        """When its last token is due; inf where none was promised, or it waits for idle capacity."""
        return inf if self.fills_idle else self.arrival_s + self.promised_e2e_s

    @property
    def prefix_tokens(self) -> int:
        """Cached tokens that spare work: the last token of a prompt is computed in any case."""
        return min(self.cached_tokens, self.prompt_tokens - 1)

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """(last - first token) / (output_tokens - 1); None for one token."""
        if self.first_token_s is None or self.last_token_s is None or self.output_tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.output_tokens - 1)

    @property
    def has_promise(self) -> bool:
        """Whether it was promised any time."""
        return min(self.deadline_s, self.promised_tpot_s, self.ends_by_s) < inf

    @property
    def missed_a_promise(self) -> bool:
        """Whether it ended, and later than it was promised."""
        late = (self.ttft_s or 0.0) > self.promised_ttft_s or (self.tpot_s or 0.0) > self.promised_tpot_s
        return late or (self.latency_s or 0.0) > self.promised_e2e_s

    @property
    def latency_s(self) -> float | None:
        return None if self.finished_s is None else self.finished_s - self.arrival_s
