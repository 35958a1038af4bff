"""Spans of this process, sent in the background. The one module that imports OpenTelemetry.

Sampling is decided once, where a trace begins or is taken over. Times are those of Python's monotonic clock, as
everywhere else here.
"""

import asyncio
import logging
import os
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version

from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, format_trace_id, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from router.trail import TraceHeaders

logger = logging.getLogger(__name__)

FLUSH_S = 5.0  # for spans that were not sent when the process ends
DEFAULT_SERVICE_NAME = "sluice"
# They write a line or more for each batch that cannot be sent.
_LOUD = ("opentelemetry.exporter", "opentelemetry.sdk._shared_internal")

Attribute = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, Attribute | None]
"""None is left out."""

_w3c = TraceContextTextMapPropagator()


class OpenSpan:
    """A span that goes on until `end`. Calls of one that is not sampled have no effect.

    A trace keeps the difference between the clocks from when it began here: if a clock is set meanwhile, no child lies
    outside of its parent.
    """

    def __init__(self, tracer: Tracer, span: Span, ahead_ns: int) -> None:
        """Args:
        ahead_ns: Unix time less the time of the monotonic clock.
        """
        self._tracer, self._span, self._ahead_ns = tracer, span, ahead_ns

    @property
    def trace_id(self) -> str:
        """In hexadecimal."""
        return format_trace_id(self._span.get_span_context().trace_id)

    @property
    def is_sampled(self) -> bool:
        return self._span.is_recording()

    @property
    def headers(self) -> TraceHeaders:
        """Headers by which another process goes on with the trace, or learns that it is not sampled."""
        carrier: dict[str, str] = {}
        _w3c.inject(carrier, set_span_in_context(self._span))
        return carrier

    def begin(self, name: str, began_s: float, attributes: Attributes | None = None) -> "OpenSpan":
        """A child."""
        context, began_ns = set_span_in_context(self._span), _ns(began_s) + self._ahead_ns
        span = self._tracer.start_span(name, context, attributes=_given(attributes), start_time=began_ns)
        return OpenSpan(self._tracer, span, self._ahead_ns)

    def add(self, name: str, began_s: float, ended_s: float, attributes: Attributes | None = None) -> None:
        """Add a child that is over already."""
        self.begin(name, began_s, attributes).end(ended_s)

    def end(
        self, ended_s: float, attributes: Attributes | None = None, *, name: str | None = None, error: str | None = None
    ) -> None:
        """Args:
        error: its type, if it failed.
        """
        self._span.set_attributes(_given(attributes))
        if name is not None:
            self._span.update_name(name)
        if error is not None:
            self._span.set_attribute("error.type", error)
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end(_ns(ended_s) + self._ahead_ns)


class Tracing:
    """Begins the spans of this process; `close` it at the end."""

    def __init__(self, part: str, exporter: SpanExporter) -> None:
        """The sampler, the queue's bound and what the service is called are the SDK's, by its environment variables."""
        self._exporter = _LoggedOnce(exporter)
        self._processor = BatchSpanProcessor(self._exporter)
        provider = TracerProvider(resource=_resource(part), shutdown_on_exit=False)
        provider.add_span_processor(self._processor)
        self._tracer = provider.get_tracer("sluice", version("sluice-serve"))

    @classmethod
    def by_otlp(cls, part: str, protocol: str) -> "Tracing":
        return cls(part, _exporter(protocol))

    def begin(self, name: str, began_s: float, attributes: Attributes | None = None) -> OpenSpan:
        """The first of a trace."""
        return self._begin(name, began_s, attributes, SpanKind.INTERNAL, None)

    def begin_server(
        self, name: str, began_s: float, attributes: Attributes | None = None, *, headers: TraceHeaders
    ) -> OpenSpan | None:
        """The span of a request from elsewhere; None if the sampler does not take it.

        Args:
            headers: those of the request. Without any, or with malformed ones, the span is the first of a trace.
        """
        span = self._begin(name, began_s, attributes, SpanKind.SERVER, headers)
        return span if span.is_sampled else None

    def _begin(
        self, name: str, began_s: float, attributes: Attributes | None, kind: SpanKind, headers: TraceHeaders | None
    ) -> OpenSpan:
        parent = _w3c.extract(_bounded(headers)) if headers else None
        ahead_ns = time.time_ns() - time.monotonic_ns()
        began_ns = _ns(began_s) + ahead_ns
        span = self._tracer.start_span(name, parent, kind, _given(attributes), start_time=began_ns)
        return OpenSpan(self._tracer, span, ahead_ns)

    async def close(self) -> None:
        """Send what is left, for FLUSH_S at most."""
        closing = asyncio.ensure_future(asyncio.to_thread(self._processor.shutdown))
        await asyncio.wait([closing], timeout=FLUSH_S)
        if not closing.done():
            logger.warning("the last spans could not be sent within %g s", FLUSH_S)
            self._exporter.shutdown()  # ends the try that goes on, unless it waits for an answer by HTTP
            await asyncio.wait([closing], timeout=1.0)
        if closing.done():
            closing.result()


class _LoggedOnce(SpanExporter):
    """The SDK's exporter tries each batch for some seconds and then drops it, and its queue drops what does not fit
    meanwhile. One line is logged when that begins, and one when it is over."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter, self._fails = exporter, False
        for name in _LOUD:
            logging.getLogger(name).setLevel(logging.CRITICAL)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        fails = result is not SpanExportResult.SUCCESS
        if fails and not self._fails:
            logger.warning("spans are dropped: the receiver of traces does not take them")
        elif self._fails and not fails:
            logger.info("the receiver of traces takes spans again")
        self._fails = fails
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)


def _exporter(protocol: str) -> SpanExporter:
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as ByGrpc

        return ByGrpc()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as ByHttp

    return ByHttp()


def _resource(part: str) -> Resource:
    """A service name from the environment is kept."""
    own: dict[str, str | int] = {
        "sluice.part": part,
        "process.pid": os.getpid(),
        "service.version": version("sluice-serve"),
    }
    made = Resource.create(own)
    is_named = not str(made.attributes[SERVICE_NAME]).startswith("unknown_service")
    return made if is_named else made.merge(Resource({SERVICE_NAME: DEFAULT_SERVICE_NAME}))


def _given(attributes: Attributes | None) -> dict[str, Attribute]:
    return {name: value for name, value in (attributes or {}).items() if value is not None}


def _bounded(headers: TraceHeaders) -> TraceHeaders:
    """Without a `tracestate` beyond the 512 characters that W3C advises: it goes with every span."""
    if len(headers.get("tracestate", "")) <= 512:
        return headers
    return {name: value for name, value in headers.items() if name != "tracestate"}


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
