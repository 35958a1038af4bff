"""When things happened to a request, on the router's clock."""

from contextvars import ContextVar
from dataclasses import dataclass, field

from policies.errors import AdmissionError, InputError, ReplicaLostError, StateStoreError
from predictor.conversation import Asked
from router.admission import Tenant


@dataclass(slots=True)
class RequestTiming:
    """One engine request: seconds on the router's clock, None until it happened.

    received_s is when its HTTP request came in, submitted_s when it was ready to be queued (tokenized and checked).
    outcome is how it ended, as it is counted: stop, length, repetition, cancelled, error or refused. unserved is why,
    when it was admitted and waited in vain.
    """

    received_s: float
    submitted_s: float
    assigned_s: float | None = None
    last_token_s: float | None = None
    output_tokens: int = 0
    outcome: str | None = None
    unserved: ReplicaLostError | StateStoreError | None = None


@dataclass(slots=True)
class HttpContext:
    """What the HTTP layer knows of the request that this task serves, and the engine requests that came of it.

    `expected_tokens` is the client's own guess at its answer. `asked` holds what its chats ask, by the text that the
    chat template made of each, None where it makes tokens at once. `refused` is why one of those requests may not
    queue, `queued` that one could.
    """

    received_s: float
    slo_class: str
    tenant: Tenant | None = None
    refused: AdmissionError | InputError | StateStoreError | None = None
    queued: bool = False
    expected_tokens: int | None = None
    asked: dict[str | None, Asked] = field(default_factory=dict)
    timings: list[RequestTiming] = field(default_factory=list)
    request_id: str = ""

    @property
    def refusal(self) -> AdmissionError | InputError | StateStoreError | ReplicaLostError | None:
        """Why a request of it may not queue, or waited in vain: as long as nothing is sent the response will say that,
        whatever the front end makes of it."""
        return self.refused or next((timing.unserved for timing in self.timings if timing.unserved), None)


current: ContextVar[HttpContext | None] = ContextVar("sluice_http_context", default=None)
