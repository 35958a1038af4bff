"""Traces of a whole application, as a receiver of OTLP gets them."""

import asyncio
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration import batches
from tests.integration.application import START_TIMEOUT_S, Sluice
from tests.integration.traced import MAX_TOKENS, resumed_trace, streams_that_lose_a_replica, traced_application
from tests.otlp_receiver import Received, Receiver
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Sluice, Receiver]]:
    with traced_application(tmp_path_factory.mktemp("traced")) as application:
        yield application


def test_a_line_of_a_batch_is_one_trace_from_the_runner_to_the_engine(
    traced: tuple[Sluice, Receiver], tmp_path: Path
) -> None:
    sluice, receiver = traced
    client = sluice.client()
    batches.ended(client, batches.submitted(client, batches.write(tmp_path / "in.jsonl", 3)), START_TIMEOUT_S)
    lines = wait_until(lambda: _as_many(receiver, "batch line", 3), START_TIMEOUT_S, "a span of each line")
    wait_until(lambda: _as_many(receiver, f"POST {batches.CHAT}", 3), START_TIMEOUT_S, "and of each request")
    wait_until(lambda: _as_many(receiver, "replica", 3), START_TIMEOUT_S, "and of each time on a replica")
    assert {line.attributes["sluice.batch_line"] for line in lines} == {1, 2, 3}
    for line in lines:
        (server,) = receiver.children(line)
        (chat,) = receiver.children(server)
        assert (line.parent, server.name, chat.name) == ("", f"POST {batches.CHAT}", f"chat {batches.MODEL}")
        assert {child.name for child in receiver.children(chat)} == {"classify", "queue", "engine", "replica"}
        parts = [line, server, *(child for child in receiver.children(chat) if child.name == "replica")]
        assert [span.resource["sluice.part"] for span in parts] == ["batches", "router", "engine"]
        assert len({span.resource["process.pid"] for span in parts}) == 3


def test_a_stream_whose_replica_is_killed_stays_in_its_clients_trace(traced: tuple[Sluice, Receiver]) -> None:
    sluice, receiver = traced
    streams = asyncio.run(streams_that_lose_a_replica(sluice))
    assert all(stream.is_whole for stream in streams)
    spans = resumed_trace(receiver, streams)
    by_name = {span.name: span for span in spans}
    (asked,) = [stream for stream in streams if stream.trace_id == spans[0].trace_id]
    server, request = by_name["POST /v1/completions"], by_name[f"text_completion {batches.MODEL}"]
    assert (server.parent, request.parent) == (asked.span_id, server.span_id)
    lost, resume, again = (span for span in receiver.children(request) if span.name in ("engine", "resume"))
    assert (lost.name, resume.name, again.name) == ("engine", "resume", "engine")
    assert (resume.attributes["sluice.because"], resume.attributes["sluice.way"]) == ("lost", "resumed")
    assert resume.attributes["sluice.left_replica"] == lost.attributes["sluice.replica"]
    assert resume.attributes["sluice.replica"] == again.attributes["sluice.replica"]
    assert 0 < resume.attributes["sluice.sent_tokens"] < MAX_TOKENS
    # The lost one was killed, and told nothing.
    told = [span for span in spans if span.name == "replica"]
    assert [span.attributes["sluice.replica"] for span in told] == [again.attributes["sluice.replica"]]
    assert told[0].parent == request.span_id
    usage = request.attributes["gen_ai.usage.output_tokens"], told[0].attributes["gen_ai.usage.output_tokens"]
    assert usage == (MAX_TOKENS, MAX_TOKENS - resume.attributes["sluice.sent_tokens"])


def test_the_log_names_the_trace_of_a_request(traced: tuple[Sluice, Receiver]) -> None:
    sluice, receiver = traced
    body = {"model": batches.MODEL, "prompt": "Hello", "max_tokens": 2}
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    headers = {"Content-Type": "application/json", "traceparent": f"00-{trace_id}-00f067aa0ba902b7-01"}
    asked = urllib.request.Request(f"{sluice.url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(asked, timeout=START_TIMEOUT_S) as response:
        assert response.status == 200
    wait_until(lambda: _logged(sluice, trace_id), START_TIMEOUT_S, "the line of the request")


def _as_many(receiver: Receiver, name: str, number: int) -> list[Received]:
    found = receiver.named(name)
    return found if len(found) >= number else []


def _logged(sluice: Sluice, trace_id: str) -> list[str]:
    lines = [line for log in sluice.logs.glob("worker-*.err") for line in log.read_text().splitlines()]
    return [line for line in lines if f'"trace_id": "{trace_id}"' in line]
