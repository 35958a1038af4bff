"""When things happened to a request, on the router's clock."""

from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

from policies.errors import AdmissionError, InputError, ReplicaLostError, StateStoreError
from policies.router.promise import NO_PROMISE, Promise
from policies.router.sessions import Task, Turn
from predictor.conversation import Asked
from router.admission import Tenant
from router.codec import WHOLE
from router.trail import Trail

Refused = AdmissionError | InputError | ReplicaLostError | StateStoreError


@dataclass(slots=True, kw_only=True)
class InSession:
    """A request as a turn of its session.

    Attributes:
        name: digest of the session's.
        task_s: what its client gives the task, None where it says nothing of that.
        comes_back: another turn is likely.
        arrived_s: on the clock of all routers.
        task: that it belongs to, or None.
    """

    name: str
    task_s: float | None = None
    comes_back: bool = False
    arrived_s: float = 0.0
    task: Task | None = None

    @property
    def task_left_s(self) -> float | None:
        """As it arrived; below 0 where the task is late."""
        return None if self.task is None else self.task.ends_by_s - self.arrived_s


@dataclass(slots=True)
class RequestTiming:
    """One engine request: seconds on the router's clock, None until it happened.

    received_s is when its HTTP request came in, submitted_s when it was ready to be queued (tokenized and checked).
    promise is what its client was promised, key the name of its API key ("" without one), once it is submitted. outcome
    is how it ended, as it is counted: stop, length, repetition, cancelled, error or refused. unserved is why, when it
    was admitted and waited in vain. request_id is the engine's, once it is queued. ended is what `RoutedClient` tells
    of it afterwards, None where it was refused. cause is why its promise was not kept, once that is known. trail is
    None where it is not traced, session where it has none. is_copy says that nobody waits for its answer.
    """

    received_s: float
    submitted_s: float
    promise: Promise = NO_PROMISE
    key: str = ""
    assigned_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    output_tokens: int = 0
    outcome: str | None = None
    unserved: ReplicaLostError | StateStoreError | None = None
    request_id: str | None = None
    ended: Mapping[str, Any] | None = None
    cause: str | None = None
    trail: Trail | None = None
    session: InSession | None = None
    is_copy: bool = False

    @property
    def kept(self) -> tuple[bool, bool, bool] | None:
        """Whether the targets of the first token, of those after it and of the last one were met; None where its client
        left, and of a copy. What was not answered as a whole has met none."""
        if self.is_copy or self.outcome == "cancelled":
            return None
        first_s, last_s = self.first_token_s, self.last_token_s
        if self.outcome not in WHOLE or first_s is None or last_s is None:
            return False, False, False
        return self.promise.kept(first_s - self.received_s, self.gap_s, last_s - self.received_s)

    def turn(self, prompt_tokens: int) -> Turn | None:
        """As it ended; None where it is no turn of a session."""
        part, last_s = self.session, self.last_token_s
        if part is None or last_s is None:
            return None
        return Turn(part.name, part.arrived_s, part.arrived_s + last_s - self.received_s, prompt_tokens, part.task)

    @property
    def gap_s(self) -> float | None:
        """Mean seconds per token after the first; None before there are two."""
        if self.first_token_s is None or self.last_token_s is None or self.output_tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.output_tokens - 1)


class Trace(Protocol):
    """The trace that an HTTP request is a part of."""

    def follow(self, timing: RequestTiming, model: str) -> None:
        """One of its engine requests from now on, if there are not too many."""


class TextStream(Protocol):
    """Where the text of the one engine request of an exchange may go past the front end."""

    @property
    def path(self) -> str:
        """Of its route."""

    def claim(self) -> None:
        """An engine request begins, whose text this stream shall bring. With a second one none goes past."""

    def gave(self, text: str) -> None:
        """The front end was given this text to make events of."""

    @property
    def is_open(self) -> bool:
        """Text may be written now."""

    def write(self, text: str) -> None:
        """Send an event with this text. Raises nothing."""


@dataclass(slots=True)
class HttpContext:
    """What the HTTP layer knows of the request that this task serves, and the engine requests that came of it.

    `session` is the digest of its session's name, None without one, and `task_s` what its client gives that session's
    task. `promise` is what each of those is promised, `service_tier` what its answer says of that, None where it did
    not ask for one. `expected_tokens` is the client's own guess at its answer. `asked` holds what its chats ask, by the
    text that the chat template made of each, None where it makes tokens at once. `refused` is why one of those requests
    may not queue, `queued` that one could, whereupon `on_queued` is called; no more than `max_engine_requests` of them
    may be unfinished. `abort` ends engine requests by their ids, in the front end and on their replicas; `is_over` says
    that no client is left to read the answer of another one. `model` is that of the last one, "" before; `trace_id` is
    of the client's trace, or of the one that began here. `trace` is None where it is not traced, `text_stream` where
    all events are the front end's. `drawn_by` is by what one of several versions of a model is drawn for it, "" before
    its body is read; `served_by` is the one that answers, in a header's letters, "" where there is one alone. Those in
    `when_over` are called with the status of the response once the exchange is over. `is_copy` says that nobody waits
    for its answer.
    """

    received_s: float
    slo_class: str
    tenant: Tenant | None = None
    promise: Promise = NO_PROMISE
    session: str | None = None
    task_s: float | None = None
    service_tier: str | None = None
    refused: Refused | None = None
    queued: bool = False
    on_queued: Callable[[], None] | None = None
    expected_tokens: int | None = None
    max_engine_requests: int | None = None
    asked: dict[str | None, Asked] = field(default_factory=dict)
    timings: list[RequestTiming] = field(default_factory=list)
    abort: Callable[[list[str]], Awaitable[None]] | None = None
    is_over: bool = False
    request_id: str = ""
    trace_id: str | None = None
    model: str = ""
    trace: Trace | None = None
    text_stream: TextStream | None = None
    drawn_by: str = ""
    served_by: str = ""
    when_over: list[Callable[[int], None]] = field(default_factory=list)
    is_copy: bool = False

    def note_queued(self) -> None:
        self.queued = True
        if self.on_queued is not None:
            self.on_queued()

    def timing(self, submitted_s: float) -> RequestTiming:
        """Of an engine request of it that begins; the first one is a turn of its session."""
        session = self._in_session()
        return RequestTiming(self.received_s, submitted_s, session=session, is_copy=self.is_copy)

    def _in_session(self) -> InSession | None:
        return InSession(name=self.session, task_s=self.task_s) if self.session and not self.timings else None

    @property
    def is_full(self) -> bool:
        """The next engine request would be one too many."""
        most = self.max_engine_requests
        return most is not None and sum(timing.outcome is None for timing in self.timings) >= most

    async def end(self) -> None:
        """The HTTP exchange is over, however it came: what still runs for it gives its slot back."""
        self.is_over = True
        running = [timing.request_id for timing in self.timings if timing.request_id and timing.outcome is None]
        if running and self.abort is not None:
            await self.abort(running)

    def detached(self) -> "HttpContext":
        """A context of the same client's request, for work that goes on when its exchange is over."""
        return HttpContext(
            self.received_s,
            self.slo_class,
            self.tenant,
            promise=self.promise,
            session=self.session,
            task_s=self.task_s,
            expected_tokens=self.expected_tokens,
            max_engine_requests=self.max_engine_requests,
            asked=self.asked,
            request_id=self.request_id,
            trace_id=self.trace_id,
        )

    @property
    def refusal(self) -> Refused | None:
        """Why a request of it may not queue, or waited in vain. As long as nothing is sent, the response says that, in
        place of what the front end makes of it."""
        return self.refused or next((timing.unserved for timing in self.timings if timing.unserved), None)


current: ContextVar[HttpContext | None] = ContextVar("sluice_http_context", default=None)
