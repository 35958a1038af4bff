"""Traces of an application, and that of a stream which lost its replica."""

from collections.abc import Collection

from tests.integration.application import START_TIMEOUT_S
from tests.otlp_receiver import Received, Receiver
from tests.waiting import wait_until


def traced_env(receiver: Receiver) -> dict[str, str]:
    """Spans are sent soon after they have ended."""
    return {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.target, "OTEL_BSP_SCHEDULE_DELAY": "200"}


def resumed_trace(receiver: Receiver, trace_ids: Collection[str]) -> list[Received]:
    """All spans of a stream that went on elsewhere, once those of its router and of its second replica are there."""

    def found() -> list[Received]:
        whole = [_of(receiver, span.trace_id) for span in receiver.named("resume") if span.trace_id in trace_ids]
        return next((spans for spans in whole if _is_whole(spans)), [])

    spans: list[Received] = wait_until(found, START_TIMEOUT_S, "the trace of a resumed stream is whole")
    return spans


def _of(receiver: Receiver, trace_id: str) -> list[Received]:
    return sorted((span for span in receiver.spans if span.trace_id == trace_id), key=lambda span: span.began_s)


def _is_whole(spans: list[Received]) -> bool:
    names = [span.name for span in spans]
    return "replica" in names and any(name.startswith("POST ") for name in names)


def check_resumed(spans: list[Received], asked: str) -> None:
    """That a resumed stream's spans tell what became of it, below the client's span `asked`."""
    (server,) = (span for span in spans if span.name.startswith("POST "))
    (request,) = (span for span in spans if span.parent == server.span_id)
    assert server.parent == asked
    parts = [span for span in spans if span.parent == request.span_id]
    lost, resume, again = (span for span in parts if span.name in ("engine", "resume"))
    assert (lost.name, resume.name, again.name) == ("engine", "resume", "engine")
    assert (resume.attributes["sluice.because"], resume.attributes["sluice.way"]) == ("lost", "resumed")
    assert resume.attributes["sluice.left_replica"] == lost.attributes["sluice.replica"]
    assert resume.attributes["sluice.replica"] == again.attributes["sluice.replica"]
    # The lost one was killed, and told nothing.
    told = [span for span in spans if span.name == "replica"]
    assert [span.attributes["sluice.replica"] for span in told] == [again.attributes["sluice.replica"]]
    assert told[0].parent == request.span_id
    sent, after = resume.attributes["sluice.sent_tokens"], told[0].attributes["gen_ai.usage.output_tokens"]
    assert sent > 0 and after > 0
    assert request.attributes["gen_ai.usage.output_tokens"] == sent + after
