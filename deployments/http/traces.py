"""Spans of an HTTP request and of the engine requests that came of it, made of times that are noted anyway.

    POST /v1/chat/completions            server; goes on with its client's `traceparent`
        chat MODEL                       one engine request, by OpenTelemetry's conventions for generative models
            classify                     predicted length, bin, ticket
            KV transfer                  its prompt is read by a prefill replica, with `queue` and `engine` of there
            queue                        until it was sent to a replica
            engine                       its time there, as the router sees it
                prefill, decode          until the first output, and after it
            replica                      the same as the replica sees it, see `deployments.engines.traces`
            resume                       from a replica that was lost to the next, which has `engine` again

No text of a prompt or an answer is in them, and of an API key only its name.
"""

import re
from collections.abc import Mapping
from itertools import zip_longest
from typing import TYPE_CHECKING

from starlette.types import Scope

from router.codec import WHOLE
from router.timing import HttpContext, RequestTiming
from router.trail import KVTransfer, Stay, Trail

if TYPE_CHECKING:
    from deployments.process.spans import Attributes, OpenSpan, Tracing

MOST_FOLLOWED = 16  # engine requests of one HTTP request: a span each, and more in a replica
TRACE_HEADERS = ("traceparent", "tracestate")
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
}
_OTHER_OPERATION = "generate_content"
_PROVIDER = "sluice"
# Level 1 of W3C Trace Context, 3.2: version ff and ids of zeros are invalid, and later versions than 00 may append.
_TRACEPARENT = re.compile(
    r"(?!ff)(?!00.{54})[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?"
)


def client_trace_id(headers: Mapping[str, str]) -> str | None:
    """The client's trace id; None without a trace or with a malformed header, which is no reason for a refusal."""
    found = _TRACEPARENT.fullmatch(headers.get("traceparent", ""))
    return found[1] if found else None


class HttpTraces:
    """Begins those of the requests that the sampler takes."""

    def __init__(self, tracing: "Tracing") -> None:
        self._tracing = tracing

    def begin(self, scope: Scope, path: str, headers: Mapping[str, str], received_s: float) -> "HttpTrace | None":
        """Args:
        path: without what the application stands under.
        """
        given = {name: headers[name] for name in TRACE_HEADERS if name in headers}
        span = self._tracing.begin_server(scope["method"], received_s, headers=given)
        return None if span is None else HttpTrace(span, scope, path)


class HttpTrace:
    """A sampled trace of one HTTP request; `router.timing.Trace`."""

    def __init__(self, span: "OpenSpan", scope: Scope, path: str) -> None:
        self._span, self._scope, self._path = span, scope, path
        self._operation = _OPERATIONS.get(path, _OTHER_OPERATION)
        self._followed: list[tuple[OpenSpan, RequestTiming, str]] = []

    @property
    def trace_id(self) -> str:
        return self._span.trace_id

    def follow(self, timing: RequestTiming, model: str) -> None:
        if len(self._followed) < MOST_FOLLOWED:
            span = self._span.begin(f"{self._operation} {model}", timing.submitted_s)
            timing.trail = Trail(span.headers)
            self._followed.append((span, timing, model))

    def end(self, context: HttpContext, status: int, now_s: float) -> None:
        """End the span of the whole exchange, and those of its engine requests."""
        for span, timing, model in self._followed:
            self._end_request(span, timing, model, now_s)
        route = self._route()
        method: str = self._scope["method"]
        attributes: Attributes = {
            "http.request.method": method,
            "http.route": route,
            "http.response.status_code": status,
            "sluice.request_id": context.request_id or None,
            "sluice.class": context.slo_class or None,
            "sluice.key": context.tenant.name if context.tenant else None,
            "sluice.engine_requests": len(context.timings),
        }
        error = str(status) if status >= 500 else None
        self._span.end(now_s, attributes, name=f"{method} {route}" if route else method, error=error)

    def _route(self) -> str | None:
        """Without what clients put into the path; None where nothing of the application answered."""
        if "endpoint" not in self._scope:
            return None
        return path_template(self._path, self._scope.get("path_params", {}))

    def _end_request(self, span: "OpenSpan", timing: RequestTiming, model: str, now_s: float) -> None:
        trail, outcome = timing.trail, timing.outcome or "refused"
        assert trail is not None, "it is followed"
        ended_s = next((stay.left_s for stay in reversed(trail.stays) if stay.left_s is not None), now_s)
        _add_stages(span, timing, trail, ended_s)
        first_s, ticket = timing.first_token_s, trail.ticket
        attributes: Attributes = {
            "gen_ai.operation.name": self._operation,
            "gen_ai.provider.name": _PROVIDER,
            "gen_ai.request.model": model,
            "gen_ai.request.max_tokens": trail.max_output_tokens,
            "gen_ai.usage.input_tokens": trail.prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": trail.hit_tokens,
            "gen_ai.usage.output_tokens": timing.output_tokens,
            "gen_ai.response.finish_reasons": (outcome,) if outcome in WHOLE else None,
            "gen_ai.response.time_to_first_chunk": None if first_s is None else first_s - timing.received_s,
            "sluice.outcome": outcome,
            "sluice.engine_request_id": timing.request_id,
            "sluice.resumed": sum(stay.because is not None for stay in trail.stays),
            "sluice.promised_ttft_s": timing.promise.ttft_s,
            "sluice.promised_tpot_s": timing.promise.tpot_s,
            "sluice.promised_e2e_s": timing.promise.e2e_s,
            "sluice.predicted_output_tokens": None if ticket is None else ticket.predicted_output_tokens,
            **_waited(timing, trail),
        }
        error = None if outcome in WHOLE or outcome == "cancelled" else outcome
        span.end(ended_s, attributes, error=error)


def path_template(path: str, parameters: Mapping[str, object]) -> str:
    """The path with names in the place of what clients put there: whole segments, the last that fit."""
    segments = path.split("/")
    for name, value in reversed([*parameters.items()]):
        given = str(value).split("/")
        fits = (at for at in reversed(range(len(segments))) if segments[at : at + len(given)] == given)
        if value and (at := next(fits, None)) is not None:  # a rest of a path may be empty
            segments[at : at + len(given)] = [f"{{{name}}}"]
    return "/".join(segments)


def _add_stages(span: "OpenSpan", timing: RequestTiming, trail: Trail, ended_s: float) -> None:
    if (ticket := trail.ticket) is not None and trail.classified_s is not None:
        predicted = {"sluice.bin": ticket.bin_index, "sluice.predicted_output_tokens": ticket.predicted_output_tokens}
        span.add("classify", timing.submitted_s, trail.classified_s, {"sluice.class": ticket.slo_class, **predicted})
    if trail.kv_transfer is not None:
        _add_kv_transfer(span, trail.kv_transfer, ended_s)
    if trail.queued_s is not None:
        _add_queue(span, timing, trail, ended_s)
    for stay, following in zip_longest(trail.stays, trail.stays[1:]):
        _add_stay(span, stay, ended_s)
        if stay.because is not None:
            _add_resume(span, stay, following, ended_s)


def _waited(timing: RequestTiming, trail: Trail) -> "Attributes":
    """The attributes that explain its wait."""
    if (ticket := trail.ticket) is None:
        return {}
    sent = trail.stays[0] if trail.stays else None
    ttft_s = timing.promise.ttft_s
    return {
        "sluice.class": ticket.slo_class,
        "sluice.bin": ticket.bin_index,
        "sluice.replica": sent.replica_id if sent else None,
        "sluice.late": ttft_s is not None and sent is not None and sent.sent_s > timing.received_s + ttft_s,
    }


def _add_queue(span: "OpenSpan", timing: RequestTiming, trail: Trail, ended_s: float) -> None:
    assert trail.queued_s is not None
    span.add("queue", trail.queued_s, trail.stays[0].sent_s if trail.stays else ended_s, _waited(timing, trail))


def _add_stay(span: "OpenSpan", stay: Stay, ended_s: float) -> None:
    left_s = ended_s if stay.left_s is None else stay.left_s
    attributes: Attributes = {"sluice.replica": stay.replica_id, "sluice.sent_tokens": stay.sent_tokens}
    engine = span.begin("engine", stay.sent_s, attributes)
    engine.add("prefill", stay.sent_s, left_s if stay.first_s is None else stay.first_s)
    if stay.first_s is not None:
        engine.add("decode", stay.first_s, left_s)
    engine.end(left_s, error="replica_lost" if stay.because == "lost" else None)


def _add_resume(span: "OpenSpan", stay: Stay, following: Stay | None, ended_s: float) -> None:
    left_s = ended_s if stay.left_s is None else stay.left_s
    attributes: Attributes = {
        "sluice.because": stay.because,
        "sluice.way": stay.way,
        "sluice.left_replica": stay.replica_id,
        "sluice.replica": following.replica_id if following else None,
        "sluice.sent_tokens": following.sent_tokens if following else None,
    }
    span.add("resume", left_s, following.sent_s if following else ended_s, attributes)


def _add_kv_transfer(span: "OpenSpan", kv_transfer: KVTransfer, ended_s: float) -> None:
    until_s = ended_s if kv_transfer.ended_s is None else kv_transfer.ended_s
    transfer = span.begin("KV transfer", kv_transfer.began_s, {"sluice.fell_back": kv_transfer.fell_back})
    if (queued_s := kv_transfer.trail.queued_s) is not None:
        stays = kv_transfer.trail.stays
        transfer.add("queue", queued_s, stays[0].sent_s if stays else until_s)
        for stay in stays:
            _add_stay(transfer, stay, until_s)
    transfer.end(until_s)
