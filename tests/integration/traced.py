"""An application whose traces are received, and streams that lose a replica."""

import asyncio
import json
import secrets
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from deployments.process.ports import free_port
from tests.integration.application import EXACT, START_TIMEOUT_S, Sluice
from tests.otlp_receiver import Received, Receiver, receiving
from tests.waiting import until, wait_until

OPTIONS = ("--router-replicas", "1", "--engine-replicas", "2", "--batch-folder", "batches")
MAX_TOKENS = 400
BEGUN_PIECES = 5  # of a stream, before its replica is lost


@contextmanager
def traced_application(folder: Path) -> Iterator[tuple[Sluice, Receiver]]:
    """One router, two engine replicas, the demo model."""
    with receiving() as receiver:
        options = (*OPTIONS, "--", "--max-num-seqs", "16", *EXACT)
        with Sluice(folder, free_port(), *options, env=traced_env(receiver)) as application:
            yield application.wait_until_ready(), receiver


def traced_env(receiver: Receiver) -> dict[str, str]:
    """Spans are sent soon after they have ended."""
    return {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.target, "OTEL_BSP_SCHEDULE_DELAY": "200"}


@dataclass
class Stream:
    """One that a client has put into a trace of its own."""

    trace_id: str
    span_id: str
    pieces: int = 0
    is_whole: bool = False


async def streams_that_lose_a_replica(sluice: Sluice, number: int = 6) -> list[Stream]:
    """They are on both replicas when one of those is killed. Returns when all have ended."""
    streams = [Stream(secrets.token_hex(16), secrets.token_hex(8)) for _ in range(number)]
    async with httpx.AsyncClient(base_url=sluice.url, timeout=START_TIMEOUT_S, trust_env=False) as client:
        reading = [asyncio.create_task(_read(client, stream)) for stream in streams]
        await until(lambda: all(stream.pieces >= BEGUN_PIECES for stream in streams))
        sluice.engine_replicas()[0].kill()
        await asyncio.gather(*reading)
    return streams


async def _read(client: httpx.AsyncClient, stream: Stream) -> None:
    body = {
        "model": "sluice-demo",
        "prompt": f"Tell me of {stream.trace_id[:4]}.",
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
        "stream": True,
    }
    headers = {"traceparent": f"00-{stream.trace_id}-{stream.span_id}-01"}
    async with client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                stream.is_whole = True
            elif line.startswith("data: "):
                stream.pieces += len(json.loads(line.removeprefix("data: "))["choices"])


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
