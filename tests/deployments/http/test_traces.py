"""Traces of whole requests, from HTTP to replicas and back: real relays, TCP, Redis and a real receiver of OTLP. Only
the engines have no model, and the application is a small one."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator

import httpx
import pytest
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from deployments.engines.traces import ReplicaTraces
from deployments.http.keys import digest
from deployments.http.promises import Promises
from deployments.http.traces import (
    _OPERATIONS,
    _OTHER_OPERATION,
    MOST_FOLLOWED,
    HttpTraces,
    client_trace_id,
    path_template,
)
from deployments.process.spans import Tracing
from policies.router.promise import Promise
from policies.router.tickets import Ticket
from router.timing import HttpContext, RequestTiming, current
from router.trail import KVTransfer, Trail
from tests.deployments.bodies import asking, behind_middleware, key_ring
from tests.documented import ROOT
from tests.otlp_receiver import Received, Receiver, receiving
from tests.router.service import TARGETS_S, Answer, FrontEnd, Replica, Service, request
from tests.waiting import until

pytestmark = pytest.mark.timeout(120)

PATH = "/v1/chat/completions"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACED = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
PROMISES = Promises({name: Promise(ttft_s=ttft_s, e2e_s=60.0) for name, ttft_s in TARGETS_S.items()}, "standard")
KEYS = [{"name": "team", "sha256": digest("a secret")}]


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    with receiving() as made:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", made.target)
        yield made


class Application:
    """Router and replicas, each with traces of its own as in processes of their own; `client` asks over HTTP."""

    def __init__(self, service: Service, keys: list[dict[str, str]] | None) -> None:
        self.service, self.tracing = service, Tracing.by_otlp("router", "grpc")
        self.engines = Tracing.by_otlp("engine", "grpc")
        self.front_end: FrontEnd
        self.answers: list[Answer] = []
        routes = [Route(PATH, self._complete, methods=["POST"]), Route("/v1/files/{id}", _show)]
        self.keys = key_ring(tuple(TARGETS_S), entries=keys)
        self.client = asking(
            behind_middleware(
                Starlette(routes=routes), promises=PROMISES, keys=self.keys, traces=HttpTraces(self.tracing)
            )
        )

    async def replica(self) -> Replica:
        replica_id = f"r{len(self.service.replicas)}"
        return await self.service.replica(traces=ReplicaTraces(self.engines, replica_id))

    async def _complete(self, asked: Request) -> JSONResponse:
        """As vLLM's front end does it, for as many answers as are asked for."""
        body, context = await asked.json(), _context()
        context.abort = lambda ids: self.front_end.client.cancel(ids, "cancelled")
        mine = [await self._submit(context, body["max_tokens"]) for _ in range(body.get("n", 1))]
        await until(lambda: all(answer.outcome is not None for answer in mine))
        return JSONResponse({"tokens": [answer.tokens for answer in mine]})

    async def _submit(self, context: HttpContext, max_tokens: int) -> Answer:
        timing = RequestTiming(received_s=context.received_s, submitted_s=time.monotonic())
        context.timings.append(timing)
        assert context.trace is not None
        context.trace.follow(timing, "demo")
        new = request(max_tokens)
        timing.request_id = new.request_id
        answer = await self.front_end.ask(new, context.slo_class, context.tenant, timing, context.promise)
        self.answers.append(answer)
        return answer

    async def ask(self, **headers: str) -> httpx.Response:
        return await self.client.post(PATH, json={"max_tokens": 20}, headers={**TRACED, **headers})

    async def flush(self) -> None:
        """All that has ended has been received then."""
        await self.tracing.close()
        await self.engines.close()


def _context() -> HttpContext:
    found = current.get()
    assert found is not None
    return found


async def _show(asked: Request) -> JSONResponse:
    return JSONResponse({})


@pytest.fixture
async def application(redis_url: str, receiver: Receiver) -> AsyncIterator[Application]:
    service = Service(redis_url)
    made = Application(service, None)
    made.front_end = await service.front_end()
    yield made
    await made.client.aclose()
    await service.close()
    await made.flush()


def shape(receiver: Receiver, span: Received) -> dict[str, object]:
    """Names of the spans below it, in order of their begin; those of the replicas, which may overlap others, last."""
    children = sorted(receiver.children(span), key=lambda each: each.name == "replica")
    return {f"{number} {each.name}": shape(receiver, each) for number, each in enumerate(children)}


STAY = {"0 prefill": {}, "1 decode": {}}


async def test_a_request_is_one_trace_from_its_client_to_the_replica(
    application: Application, receiver: Receiver
) -> None:
    await application.replica()
    assert (await application.ask(**{"X-Request-Id": "mine"})).status_code == 200
    await application.service.is_empty()
    await application.flush()
    assert {span.trace_id for span in receiver.spans} == {TRACE}
    server, chat = receiver.one(f"POST {PATH}"), receiver.one("chat demo")
    assert (server.parent, server.kind) == (PARENT, "server")
    assert shape(receiver, server) == {
        "0 chat demo": {"0 classify": {}, "1 queue": {}, "2 engine": STAY, "3 replica": STAY}
    }
    assert server.attributes == {
        "http.request.method": "POST",
        "http.route": PATH,
        "http.response.status_code": 200,
        "sluice.request_id": "mine",
        "sluice.class": "standard",
        "sluice.engine_requests": 1,
    }
    (answer,) = application.answers
    timing = answer.timing
    assert timing.first_token_s is not None
    assert chat.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "sluice",
        "gen_ai.request.model": "demo",
        "gen_ai.request.max_tokens": 20,
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 20,
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.response.time_to_first_chunk": timing.first_token_s - timing.received_s,
        "sluice.outcome": "length",
        "sluice.engine_request_id": timing.request_id,
        "sluice.resumed": 0,
        "sluice.promised_ttft_s": 1.0,
        "sluice.promised_e2e_s": 60.0,
        "sluice.class": "standard",
        "sluice.bin": 0,
        "sluice.replica": "r0",
        "sluice.late": False,
    }
    replica = receiver.one("replica")
    assert (replica.kind, replica.resource["sluice.part"]) == ("server", "engine")
    assert replica.attributes["sluice.finish"] == "length"
    for span in receiver.spans:
        assert server.began_s <= span.began_s <= span.ended_s
    assert chat.ended_s <= server.ended_s


async def test_a_request_that_lost_its_replica_goes_on_in_the_same_trace(
    application: Application, receiver: Receiver
) -> None:
    lost = await application.replica()
    asking = asyncio.create_task(application.ask())
    await until(lambda: bool(application.answers) and len(application.answers[0].tokens) >= 3)
    lost.engine.pause()
    await application.replica()
    await lost.die()
    assert (await asking).status_code == 200
    sent = application.answers[0].timing.trail
    assert sent is not None
    await application.flush()
    server = receiver.one(f"POST {PATH}")
    assert shape(receiver, server) == {
        "0 chat demo": {
            "0 classify": {},
            "1 queue": {},
            "2 engine": STAY,
            "3 resume": {},
            "4 engine": STAY,
            "5 replica": STAY,
            "6 replica": STAY,
        }
    }
    first, second = receiver.named("engine")
    resume = receiver.one("resume")
    sent_tokens = sent.stays[1].sent_tokens
    assert sent_tokens >= 3
    assert first.attributes == {"sluice.replica": "r0", "sluice.sent_tokens": 0, "error.type": "replica_lost"}
    assert second.attributes == {"sluice.replica": "r1", "sluice.sent_tokens": sent_tokens}
    assert (first.is_error, second.is_error) == (True, False)
    assert resume.attributes == {
        "sluice.because": "lost",
        "sluice.way": "resumed",
        "sluice.left_replica": "r0",
        "sluice.replica": "r1",
        "sluice.sent_tokens": sent_tokens,
    }
    assert (first.ended_s, resume.ended_s) == (resume.began_s, second.began_s)
    assert receiver.one("chat demo").attributes["sluice.resumed"] == 1
    assert {span.attributes["sluice.finish"] for span in receiver.named("replica")} == {"stopped", "length"}


async def test_every_answer_of_a_request_is_followed_up_to_a_bound(
    application: Application, receiver: Receiver
) -> None:
    await application.replica()
    body = {"max_tokens": 2, "n": MOST_FOLLOWED + 8}
    assert (await application.client.post(PATH, json=body, headers=TRACED)).status_code == 200
    await application.flush()
    assert len(receiver.named("chat demo")) == MOST_FOLLOWED
    assert receiver.one(f"POST {PATH}").attributes["sluice.engine_requests"] == MOST_FOLLOWED + 8


async def test_a_request_whose_client_says_that_it_is_not_sampled_leaves_nothing(
    application: Application, receiver: Receiver
) -> None:
    unsampled = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
    assert (await application.client.get("/v1/files/x", headers=unsampled)).status_code == 200
    await application.flush()
    assert not receiver.spans


async def test_what_a_path_holds_of_its_client_is_not_in_the_route_and_probes_are_not_traced(
    application: Application, receiver: Receiver
) -> None:
    for path in ("/v1/files/file-17", "/nowhere", "/health", "/sluice/status"):
        await application.client.get(path)
    await application.flush()
    found = {span.name: span.attributes["http.response.status_code"] for span in receiver.spans}
    assert found == {"GET /v1/files/{id}": 200, "GET": 404}


async def test_no_span_holds_a_secret_or_a_text(redis_url: str, receiver: Receiver) -> None:
    service = Service(redis_url)
    application = Application(service, KEYS)
    application.front_end = await service.front_end()
    await application.replica()
    await application.keys.reload()
    body = {"max_tokens": 5, "messages": "a text"}
    headers = {**TRACED, "Authorization": "Bearer a secret"}
    assert (await application.client.post(PATH, json=body, headers=headers)).status_code == 200
    assert (await application.client.post(PATH, json=body, headers=TRACED)).status_code == 401
    await application.client.aclose()
    await service.close()
    await application.flush()
    refused, served = sorted(receiver.named("POST") + receiver.named(f"POST {PATH}"), key=lambda span: span.name)
    assert (served.attributes["sluice.key"], refused.attributes["http.response.status_code"]) == ("team", 401)
    assert "secret" not in str(receiver.spans) and "a text" not in str(receiver.spans)


async def follow(note: Callable[[RequestTiming, Trail], None]) -> None:
    """A trace of one engine request, of which `note` says what became of it; returns when it has been sent."""
    tracing = Tracing.by_otlp("router", "grpc")
    scope = {"type": "http", "method": "POST", "path": PATH}
    trace = HttpTraces(tracing).begin(scope, PATH, TRACED, 100.0)
    assert trace is not None
    context = HttpContext(100.0, "standard", trace=trace)
    timing = RequestTiming(received_s=100.0, submitted_s=101.0)
    context.timings.append(timing)
    trace.follow(timing, "demo")
    assert timing.trail is not None
    note(timing, timing.trail)
    trace.end(context, 200, 110.0)
    await tracing.close()


async def test_a_kv_transfer_shows_the_replica_that_read_the_prompt(receiver: Receiver) -> None:
    def note(timing: RequestTiming, trail: Trail) -> None:
        elsewhere = Trail(trail.headers, queued_s=101.5)
        elsewhere.sent("p0", 0, 102.0).first_s = 103.0
        elsewhere.left(103.0)
        trail.kv_transfer = KVTransfer(101.25, elsewhere, ended_s=103.5)
        trail.queued(104.0)
        trail.sent("d0", 0, 105.0).first_s = 106.0
        trail.left(108.0)
        timing.outcome = "stop"

    await follow(note)
    chat, transfer = receiver.one("chat demo"), receiver.one("KV transfer")
    elsewhere = {"0 queue": {}, "1 engine": STAY}
    assert shape(receiver, chat) == {"0 KV transfer": elsewhere, "1 queue": {}, "2 engine": STAY}
    assert [engine.attributes["sluice.replica"] for engine in receiver.named("engine")] == ["p0", "d0"]
    assert (transfer.ended_s - transfer.began_s, chat.ended_s - chat.began_s) == pytest.approx((2.25, 7.0), abs=1e-5)


async def test_an_answer_tells_what_its_first_replica_had_cached(receiver: Receiver) -> None:
    def note(timing: RequestTiming, trail: Trail) -> None:
        trail.found(48)
        trail.found(64)  # by the replica on which it went on
        timing.outcome = "stop"

    await follow(note)
    assert receiver.one("chat demo").attributes["gen_ai.usage.cache_read.input_tokens"] == 48


def test_names_of_generative_ai_are_those_of_the_conventions() -> None:
    texts = [path.read_text() for path in (ROOT / "deployments").rglob("*.py")]
    used = {name for text in texts for name in re.findall(r"\"(gen_ai\.[\w.]+)\"", text)}
    known = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")}
    assert len(used) > 5 and used <= known
    operations = {*_OPERATIONS.values(), _OTHER_OPERATION}
    assert operations <= {each.value for each in gen_ai_attributes.GenAiOperationNameValues}


async def test_a_request_that_never_was_sent_shows_its_wait_and_its_error(receiver: Receiver) -> None:
    def note(timing: RequestTiming, trail: Trail) -> None:
        trail.queued(102.0)
        timing.outcome = "error"

    await follow(note)
    chat, queue = receiver.one("chat demo"), receiver.one("queue")
    assert (chat.is_error, chat.attributes["error.type"]) == (True, "error")
    assert "gen_ai.response.finish_reasons" not in chat.attributes
    assert queue.ended_s == chat.ended_s == receiver.one("POST").ended_s


async def test_a_request_that_was_late_when_it_was_sent_says_so(receiver: Receiver) -> None:
    def note(timing: RequestTiming, trail: Trail) -> None:
        timing.promise, timing.outcome = Promise(ttft_s=4.0), "length"
        ticket = Ticket(request_id="a", bin_index=3, deadline_key=0.0, work_s=1.0, router_id="r", slo_class="fast")
        trail.classified(ticket, 7, None, 101.5)
        trail.queued(102.0)
        trail.sent("r0", 0, 104.5)
        trail.left(109.0)

    await follow(note)
    waited = {"sluice.class": "fast", "sluice.bin": 3, "sluice.replica": "r0", "sluice.late": True}
    assert receiver.one("queue").attributes == waited
    assert waited.items() <= receiver.one("chat demo").attributes.items()


@pytest.mark.parametrize(
    ("path", "parameters", "template"),
    [
        ("/v1/responses/v1", {"id": "v1"}, "/v1/responses/{id}"),
        ("/v1/responses/s/cancel", {"id": "s"}, "/v1/responses/{id}/cancel"),
        ("/v1/a/b/a", {"one": "a", "two": "b", "three": "a"}, "/v1/{one}/{two}/{three}"),
        ("/files/a/b/c", {"rest": "a/b/c"}, "/files/{rest}"),
        ("/files/", {"rest": ""}, "/files/"),
    ],
)
def test_a_route_has_names_in_the_place_of_what_clients_wrote(
    path: str, parameters: dict[str, str], template: str
) -> None:
    assert path_template(path, parameters) == template


@pytest.mark.parametrize(
    ("traceparent", "found"),
    [
        (f"00-{TRACE}-{PARENT}-01", TRACE),
        (f"cc-{TRACE}-{PARENT}-01-what-comes-later", TRACE),
        (f"00-{TRACE}-{PARENT}-01-more", None),
        (f"ff-{TRACE}-{PARENT}-01", None),
        (f"00-{'0' * 32}-{PARENT}-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        (f"00-{TRACE.upper()}-{PARENT}-01", None),
        (f"00-{TRACE[:-1]}-{PARENT}-01", None),
        ("", None),
    ],
)
def test_the_trace_of_a_client_is_taken_from_a_header_that_is_well_formed(traceparent: str, found: str | None) -> None:
    assert client_trace_id({"traceparent": traceparent}) == found
    assert client_trace_id({}) is None
