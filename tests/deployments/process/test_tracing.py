"""Traces as OpenTelemetry's environment variables ask for them, sent to a real receiver."""

import asyncio
import logging
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping

import pytest

from deployments.process import spans
from deployments.process.ports import free_port
from deployments.process.spans import Tracing
from deployments.process.tracing import protocol_of, started_tracing
from policies.errors import ConfigError
from tests.otlp_receiver import Receiver, receiving, receiving_by_http
from tests.waiting import until

pytestmark = pytest.mark.timeout(120)

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4317"}
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "a=1"}
UNSAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-00"}


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the variables of the user who runs the tests; spans are sent soon."""
    for name in ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", *ENDPOINT, "OTEL_TRACES_SAMPLER", "OTEL_SERVICE_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    with receiving() as made:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", made.target)
        yield made


def started() -> Tracing:
    tracing = started_tracing("router")
    assert tracing is not None
    return tracing


def add_span(tracing: Tracing, name: str = "a") -> None:
    tracing.begin(name, time.monotonic()).end(time.monotonic())


@pytest.mark.parametrize(
    ("environment", "protocol"),
    [
        ({}, None),
        ({"OTEL_SERVICE_NAME": "mine", "OTEL_TRACES_SAMPLER": "always_on"}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, None),
        (ENDPOINT, "grpc"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://other:4317"}, "grpc"),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, "grpc"),
        ({**ENDPOINT, "OTEL_TRACES_EXPORTER": "none"}, None),
        ({**ENDPOINT, "OTEL_SDK_DISABLED": "TRUE"}, None),
        ({**ENDPOINT, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, "http/protobuf"),
        ({**ENDPOINT, "OTEL_EXPORTER_OTLP_PROTOCOL": "x", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"}, "grpc"),
    ],
)
def test_the_standard_variables_say_whether_and_how_traces_are_sent(
    environment: Mapping[str, str], protocol: str | None
) -> None:
    assert protocol_of(environment) == protocol


@pytest.mark.parametrize(
    ("name", "value"), [("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json"), ("OTEL_TRACES_EXPORTER", "zipkin")]
)
def test_a_value_that_means_nothing_here_is_refused_by_its_name(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is '{value}'"):
        protocol_of({**ENDPOINT, name: value})


def test_without_the_variables_nothing_that_makes_or_sends_spans_is_imported() -> None:
    """Ray itself imports what counts."""
    code = """
import sys
SENDS = ("deployments.process.spans", "opentelemetry.sdk.trace", "opentelemetry.exporter", "grpc")
import deployments.batches.runner, deployments.engines.relay, deployments.http.traces, router.routed_client
from deployments.process.tracing import started_tracing
assert started_tracing("router") is None
found = [name for name in sys.modules if name.startswith(SENDS)]
assert not found, found
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


async def test_what_has_ended_is_received_with_the_service_that_it_is_of(receiver: Receiver) -> None:
    tracing = started()
    began_s = time.monotonic()
    span = tracing.begin("outer", began_s, {"sluice.class": "standard", "left_out": None})
    span.add("inner", began_s + 1, began_s + 3)
    span.end(began_s + 4, {"finish": ("stop",)}, error="503")
    await until(lambda: len(receiver.spans) == 2)
    outer, inner = receiver.one("outer"), receiver.one("inner")
    assert outer.attributes == {"sluice.class": "standard", "finish": ["stop"], "error.type": "503"}
    assert (outer.parent, inner.parent, inner.trace_id) == ("", outer.span_id, outer.trace_id)
    assert (outer.is_error, inner.is_error) == (True, False)
    assert inner.began_s - outer.began_s == pytest.approx(1, abs=1e-5)
    assert outer.ended_s - outer.began_s == pytest.approx(4, abs=1e-5)
    assert (outer.resource["service.name"], outer.resource["sluice.part"]) == ("sluice", "router")
    await tracing.close()


@pytest.mark.parametrize(
    ("name", "value"), [("OTEL_SERVICE_NAME", "mine"), ("OTEL_RESOURCE_ATTRIBUTES", "service.name=mine,zone=a")]
)
async def test_a_service_may_have_a_name_of_its_own(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    tracing = started()
    add_span(tracing)
    await tracing.close()
    assert receiver.one("a").resource["service.name"] == "mine"


async def test_traces_go_by_http_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with receiving_by_http() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.target)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
        tracing = started()
        add_span(tracing)
        await tracing.close()
        assert receiver.one("a").kind == "internal"


async def test_a_trace_is_taken_over_with_its_parent_and_goes_on_in_the_next_process(receiver: Receiver) -> None:
    tracing = started()
    span = tracing.begin_server("POST", time.monotonic(), headers=SAMPLED)
    assert span is not None and span.trace_id == TRACE
    headers = span.headers
    assert headers["traceparent"].startswith(f"00-{TRACE}-") and headers["tracestate"] == "a=1"
    span.end(time.monotonic(), name="POST /v1/completions")
    await tracing.close()
    found = receiver.one("POST /v1/completions")
    assert (found.trace_id, found.parent, found.kind) == (TRACE, PARENT, "server")
    assert found.span_id in headers["traceparent"]


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"traceparent": ""},
        {"traceparent": f"00-{TRACE}-{PARENT}"},
        {"traceparent": f"00-{'0' * 32}-{PARENT}-01"},
        {"traceparent": "x" * 16_000},
    ],
)
async def test_malformed_headers_begin_a_trace_of_their_own(receiver: Receiver, headers: Mapping[str, str]) -> None:
    tracing = started()
    span = tracing.begin_server("POST", time.monotonic(), headers=headers)
    assert span is not None and span.trace_id != TRACE
    await tracing.close()


async def test_a_tracestate_beyond_measure_is_not_passed_on(receiver: Receiver) -> None:
    tracing = started()
    span = tracing.begin_server("POST", time.monotonic(), headers={**SAMPLED, "tracestate": "a=" + "1" * 511})
    assert span is not None
    assert (span.trace_id, set(span.headers)) == (TRACE, {"traceparent"})
    await tracing.close()


async def test_who_begins_a_trace_decides_whether_it_is_sampled_and_else_the_ratio(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.25")
    tracing, now_s = started(), time.monotonic()
    assert tracing.begin_server("POST", now_s, headers=SAMPLED) is not None
    assert tracing.begin_server("POST", now_s, headers=UNSAMPLED) is None
    begun = [tracing.begin("a", now_s) for _ in range(1000)]
    assert 150 < sum(span.is_sampled for span in begun) < 350
    # And another process that goes on with one is told.
    for span in begun[:100]:
        taken_over = tracing.begin_server("POST", now_s, headers=span.headers)
        assert (taken_over is not None) == span.is_sampled
    await tracing.close()


async def test_a_receiver_that_is_away_is_told_of_once_and_so_is_its_return(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "4")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "2")
    caplog.set_level(logging.INFO)
    tracing = started()
    failures = _counted_failures(tracing)
    while len(failures) < 3:
        for _ in range(10):  # more than the queue holds
            add_span(tracing)
        await asyncio.sleep(0.02)
    with receiving(port) as receiver:
        while not receiver.spans:
            add_span(tracing, "later")
            await asyncio.sleep(0.02)
        await tracing.close()
    assert [record.message for record in caplog.records if "span" in record.message.lower()] == [
        "spans are dropped: the receiver of traces does not take them",
        "the receiver of traces takes spans again",
    ]


def _counted_failures(tracing: Tracing) -> list[object]:
    """The results of batches that could not be sent, as they come."""
    failures: list[object] = []
    exporter = tracing._exporter._exporter
    export = exporter.export

    def counted(batch: object) -> object:
        result = export(batch)  # type: ignore[arg-type]
        if result is not spans.SpanExportResult.SUCCESS:
            failures.append(result)
        return result

    exporter.export = counted  # type: ignore[assignment,method-assign]
    return failures


async def test_a_process_ends_though_the_receiver_hangs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    silent = await asyncio.start_server(lambda *_: asyncio.sleep(3600), "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "3600")
    monkeypatch.setattr(spans, "FLUSH_S", 0.1)
    tracing = started()
    add_span(tracing)
    await tracing.close()
    assert "the last spans could not be sent within 0.1 s" in caplog.text
    silent.close()
