"""Traces of a whole application, as a receiver of OTLP gets them."""

import json
import urllib.request
from pathlib import Path

from tests.integration import batches
from tests.integration.application import START_TIMEOUT_S, Sluice
from tests.otlp_receiver import Received, Receiver
from tests.waiting import wait_until


def test_a_line_of_a_batch_is_one_trace_from_the_runner_to_the_engine(
    sluice: Sluice, receiver: Receiver, tmp_path: Path
) -> None:
    client = sluice.client()
    batch = batches.submitted(client, batches.write(tmp_path / "in.jsonl", 3))
    batches.ended(client, batch, START_TIMEOUT_S)

    def whole() -> list[Received]:
        """The lines' own spans, once all below them have come."""
        found = [span for span in receiver.named("batch line") if span.attributes["sluice.batch"] == batch.id]
        traces = {span.trace_id for span in found}
        below = [span.name for span in receiver.spans if span.trace_id in traces]
        return found if (below.count(f"POST {batches.CHAT}"), below.count("replica")) == (3, 3) else []

    lines = wait_until(whole, START_TIMEOUT_S, "a span of each line, request and time on a replica")
    assert {line.attributes["sluice.batch_line"] for line in lines} == {1, 2, 3}
    for line in lines:
        (server,) = receiver.children(line)
        (chat,) = receiver.children(server)
        assert (line.parent, server.name, chat.name) == ("", f"POST {batches.CHAT}", f"chat {batches.MODEL}")
        assert {child.name for child in receiver.children(chat)} == {"classify", "queue", "engine", "replica"}
        parts = [line, server, *(child for child in receiver.children(chat) if child.name == "replica")]
        assert [span.resource["sluice.part"] for span in parts] == ["batches", "router", "engine"]
        assert len({span.resource["process.pid"] for span in parts}) == 3


def test_the_log_names_the_trace_of_a_request(sluice: Sluice) -> None:
    body = {"model": batches.MODEL, "prompt": "Hello", "max_tokens": 2}
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    headers = {"Content-Type": "application/json", "traceparent": f"00-{trace_id}-00f067aa0ba902b7-01"}
    asked = urllib.request.Request(f"{sluice.url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(asked, timeout=START_TIMEOUT_S) as response:
        assert response.status == 200
    wait_until(lambda: _logged(sluice, trace_id), START_TIMEOUT_S, "the line of the request")


def _logged(sluice: Sluice, trace_id: str) -> list[str]:
    lines = [line for log in sluice.logs.glob("worker-*.err") for line in log.read_text().splitlines()]
    return [line for line in lines if f'"trace_id": "{trace_id}"' in line]
