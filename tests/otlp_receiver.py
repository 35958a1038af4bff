"""A receiver of traces as OpenTelemetry's collector is one: OTLP over gRPC, and over HTTP with protobuf."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from tests.http_server import Asked, answering

STOP_S = 5.0
HANGS_S = 120.0  # at most


@dataclass(frozen=True)
class Received:
    """One span; ids in hexadecimal, `parent` "" without one, times in Unix seconds."""

    name: str
    trace_id: str
    span_id: str
    parent: str
    kind: str
    began_s: float
    ended_s: float
    is_error: bool
    attributes: dict[str, Any]
    resource: dict[str, Any]


class Receiver:
    """Its spans come in threads of its own."""

    def __init__(self) -> None:
        self.target = ""
        self._spans: list[Received] = []
        self._lock = threading.Lock()
        self._answers = threading.Event()
        self._answers.set()

    @contextmanager
    def hanging(self) -> Iterator[None]:
        """It accepts, and answers nobody, for the time of the block."""
        self._answers.clear()
        try:
            yield
        finally:
            self._answers.set()

    def take(self, request: ExportTraceServiceRequest) -> None:
        self._answers.wait(HANGS_S)
        found = [
            _received(span, _values(of_resource.resource.attributes))
            for of_resource in request.resource_spans
            for of_scope in of_resource.scope_spans
            for span in of_scope.spans
        ]
        with self._lock:
            self._spans += found

    @property
    def spans(self) -> list[Received]:
        with self._lock:
            return list(self._spans)

    def named(self, name: str) -> list[Received]:
        return [span for span in self.spans if span.name == name]

    def one(self, name: str) -> Received:
        (found,) = self.named(name)
        return found

    def children(self, of: Received) -> list[Received]:
        """In the order in which they began."""
        return sorted((each for each in self.spans if each.parent == of.span_id), key=lambda each: each.began_s)


def _received(span: Span, resource: dict[str, Any]) -> Received:
    return Received(
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        kind=Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_").lower(),
        began_s=span.start_time_unix_nano / 1e9,
        ended_s=span.end_time_unix_nano / 1e9,
        is_error=span.status.code == Status.STATUS_CODE_ERROR,
        attributes=_values(span.attributes),
        resource=resource,
    )


def _values(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs if isinstance(pair, KeyValue)}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return None if kind is None else getattr(value, kind)


class _Service(TraceServiceServicer):  # type: ignore[misc]
    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def Export(self, request: ExportTraceServiceRequest, context: grpc.ServicerContext) -> ExportTraceServiceResponse:
        self._receiver.take(request)
        return ExportTraceServiceResponse()


@contextmanager
def receiving(port: int = 0, receiver: Receiver | None = None) -> Iterator[Receiver]:
    """By gRPC; its `target` is a URL. With a receiver of before its spans stay."""
    receiver = receiver or Receiver()
    server = grpc.server(ThreadPoolExecutor(2), options=[("grpc.so_reuseport", 0)])
    add_TraceServiceServicer_to_server(_Service(receiver), server)
    receiver.target = f"http://127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}"
    server.start()
    try:
        yield receiver
    finally:
        server.stop(None).wait(STOP_S)


@contextmanager
def receiving_by_http() -> Iterator[Receiver]:
    """By HTTP with protobuf."""
    receiver = Receiver()

    def take(asked: Asked) -> tuple[int, bytes]:
        receiver.take(ExportTraceServiceRequest.FromString(asked.body))
        return (200 if asked.path == "/v1/traces" else 404), b""

    with answering(take) as receiver.target:
        yield receiver
