"""A model and its candidates behind one name, with small applications in the place of front ends."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from deployments.config.candidate import CandidateSection
from deployments.http import copies as under_copies
from deployments.http.copies import Copies, CopyTerms
from deployments.http.middleware import TENANT, SluiceMiddleware
from deployments.http.model_switch import ModelSwitch
from deployments.http.promises import Promises
from deployments.http.sessions import SESSION_HEADER
from deployments.http.trials import Tally, Trial
from deployments.http.versions import Versions
from policies.errors import ReplicaLostError
from policies.live import Live
from policies.router.candidate import Verdict, place
from policies.router.explanation import Cause
from policies.router.promise import Promise
from router.background import BackgroundTasks
from router.candidate_metrics import CandidateMetrics
from router.timing import RequestTiming, current
from tests.deployments.bodies import asking, behind_middleware, key_ring, request_bodies
from tests.waiting import until

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
PROMISED = Promise(ttft_s=1.0)
NEW, OLD = "new", "old"
LIMIT = 1 << 20
# Of a request that has ended, for the log.
TOLD = ("prompt_tokens", "predicted_tokens", "replica", "resumed", "wait_s", "ttft_s")


class FrontEnd:
    """Answers as it is told, and notes what it was asked, as whom."""

    def __init__(self, name: str) -> None:
        self.name, self.bodies, self.contexts = name, list[Any](), list[Any]()
        self.raw = list[bytes]()
        self.status, self.ttft_s, self.outcome, self.cause = 200, 0.1, "stop", None
        self.recalls, self.unserved = 0, None
        self.may_end = asyncio.Event()
        self.may_end.set()
        paths = (CHAT, RESPONSES, "/tokenize")
        self.app = Starlette(routes=[Route(path, self._answer, methods=["POST"]) for path in paths])

    async def _answer(self, request: Request) -> Response:
        context, now_s = current.get(), time.monotonic()
        assert context is not None
        self.raw.append(await request.body())
        self.bodies.append(json.loads(self.raw[-1]))
        self.contexts.append(context)
        if request.url.path != "/tokenize":
            timing = RequestTiming(context.received_s, now_s, promise=context.promise, assigned_s=now_s)
            timing.first_token_s = timing.last_token_s = max(context.received_s, now_s) + self.ttft_s
            timing.output_tokens, timing.outcome, timing.cause = 7, self.outcome, self.cause
            timing.unserved = self.unserved
            timing.ended = dict.fromkeys(TOLD) | {"recalls": self.recalls, "moves": 0}
            context.timings.append(timing)
        await self.may_end.wait()
        return JSONResponse({"model": self.name}, self.status)


class Rig:
    """A model, candidates with these shares, and whoever asks them."""

    def __init__(self, *sections: dict[str, Any]) -> None:
        self.old, self.failed, self.has_engines = FrontEnd(OLD), list[str](), True
        self.new = [FrontEnd(f"{NEW}{number or ''}") for number in range(len(sections))]
        self.registry = CollectorRegistry()
        metrics = CandidateMetrics(self.registry)
        self.sections = [Live(CandidateSection(of=OLD, **section)) for section in sections]
        self.trials = [
            Trial(each.name, OLD, each.app, section, metrics, lambda: self.has_engines)
            for each, section in zip(self.new, self.sections, strict=True)
        ]
        self.made_by: dict[str, str] = {}
        self.background = BackgroundTasks(self.failed.append)
        self.terms = Live[CopyTerms | None](CopyTerms("offline", 30.0))
        versions = Versions(OLD, self.old.app, self.trials, self._made_by, Copies(self.background, self.terms))
        apps = {each.name: each.app for each in (self.old, *self.new)} | {"adapter": self.old.app}
        self.middleware: SluiceMiddleware = behind_middleware(
            ModelSwitch(apps, {OLD: versions}),
            bodies=request_bodies(LIMIT, context_tokens=1 << 16),
            promises=Promises({"standard": PROMISED}, "standard"),
        )
        self.client = asking(self.middleware)

    async def _made_by(self, response_id: str) -> str | None:
        return self.made_by.get(response_id)

    async def ask(
        self, path: str = CHAT, *, session: str | None = None, model: str = OLD, **body: Any
    ) -> httpx.Response:
        headers = {} if session is None else {SESSION_HEADER: session}
        return await self.client.post(path, json={"model": model, **body}, headers=headers)

    async def answered_by(self, path: str = CHAT, **how: Any) -> str:
        response = await self.ask(path, **how)
        return str(response.json()["model"])

    def value(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"sluice_candidate_{name}", {"of": OLD, **labels}) or 0.0


@pytest.fixture
async def make() -> AsyncIterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def new(*sections: dict[str, Any]) -> Rig:
        made.append(Rig(*sections))
        return made[-1]

    yield new
    for rig in made:
        await rig.client.aclose()
        await rig.background.close()
        assert rig.failed == []


def total(tally: Tally) -> int:
    return tally.counts.requests


async def test_a_share_of_sessions_goes_to_the_candidate_and_stays_there(make: Callable[..., Rig]) -> None:
    rig = make({"share": 0.3})
    names = [f"session {number}" for number in range(40)]
    first = [await rig.answered_by(session=name) for name in names]
    assert [await rig.answered_by(session=name) for name in names] == first
    assert 4 <= first.count(NEW) <= 20 and first.count(OLD) + first.count(NEW) == len(names)
    rig.sections[0].replace(CandidateSection(of=OLD, share=0.6))
    more = [await rig.answered_by(session=name) for name in names]
    assert {name for name, by in zip(names, first, strict=True) if by == NEW} < {
        name for name, by in zip(names, more, strict=True) if by == NEW
    }, "a larger share takes more sessions and gives none back"


async def test_a_session_stays_where_it_is_when_it_asks_for_several_answers(make: Callable[..., Rig]) -> None:
    rig = make({"share": 0.5})
    for number in range(10):
        name = f"session {number}"
        assert len({await rig.answered_by(session=name, n=n) for n in (1, 2, 1, 3)}) == 1


async def test_without_a_session_each_request_is_drawn_by_its_id(make: Callable[..., Rig]) -> None:
    rig = make({"share": 0.5})
    for number in range(10):
        headers = {"X-Request-Id": f"request {number}"}
        response = await rig.client.post(CHAT, json={"model": OLD}, headers=headers)
        assert response.json()["model"] == (NEW if place(f"request {number}") < 0.5 else OLD)
    assert {await rig.answered_by() for _ in range(40)} == {NEW, OLD}, "without an id of its own either"


async def test_the_candidate_is_asked_under_its_name_with_all_else_as_it_came(make: Callable[..., Rig]) -> None:
    rig = make({"share": 1.0})
    body = b'{"temperature": 1.10, "messages": [{"model": "old", "content": "\\u00e4"}], "model" : "old", "x": 1e2}'
    response = await rig.client.post(CHAT, content=body)
    assert response.headers["x-sluice-model"] == NEW
    (raw,) = rig.new[0].raw
    assert json.loads(raw) == {**json.loads(body), "model": NEW}
    assert b"1.10" in raw and b"\\u00e4" in raw and b"1e2" in raw


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "old", "top_p": NaN}',
        '{"model": "old", "prompt": "\u00e4"}'.encode("utf-16"),
        json.dumps({"model": "old", "prompt": "x" * 100_000}).encode(),
        b'{"model": "x", "model": "old"}',
    ],
)
async def test_whatever_names_the_model_can_be_given_another_name(make: Callable[..., Rig], body: bytes) -> None:
    rig = make({"share": 1.0})
    assert (await rig.client.post(CHAT, content=body)).json() == {"model": NEW}
    assert rig.new[0].bodies[0]["model"] == NEW


async def test_who_names_the_candidate_gets_it_and_is_not_counted(make: Callable[..., Rig]) -> None:
    rig = make({"share": 0.0})
    response = await rig.ask(model=NEW)
    assert response.json() == {"model": NEW}
    assert total(rig.trials[0].run.candidate) == 0
    assert await rig.answered_by() == OLD
    assert total(rig.trials[0].run.incumbent) == 1


@pytest.mark.parametrize("model", ["adapter", "nobody"])
async def test_adapters_and_unknown_names_are_left_alone(make: Callable[..., Rig], model: str) -> None:
    rig = make({"share": 1.0})
    assert await rig.answered_by(model=model) == OLD
    assert total(rig.trials[0].run.incumbent) == 0


async def test_what_is_only_read_stays_with_the_model_that_it_names(make: Callable[..., Rig]) -> None:
    rig = make({"share": 1.0})
    assert await rig.answered_by("/tokenize") == OLD
    rig.trials[0].go_by(Verdict.PROMOTE)
    assert await rig.answered_by("/tokenize") == NEW


async def test_lines_of_a_batch_stay_with_the_model_that_they_name_until_another_takes_over(
    make: Callable[..., Rig],
) -> None:
    rig = make({"share": 1.0})

    async def of_batch(scope: Any, receive: Any, send: Any) -> None:
        await rig.middleware({**scope, TENANT: None}, receive, send)

    async with asking(of_batch) as client:
        assert (await client.post(CHAT, json={"model": OLD})).json() == {"model": OLD}
        assert total(rig.trials[0].run.incumbent) == 0
        rig.trials[0].go_by(Verdict.PROMOTE)
        assert (await client.post(CHAT, json={"model": OLD})).json() == {"model": NEW}


@pytest.mark.parametrize("share", [0.0, 1.0])
async def test_a_conversation_goes_on_with_the_version_that_made_its_last_response(
    make: Callable[..., Rig], share: float
) -> None:
    rig = make({"share": share})
    rig.made_by = {"resp_of_new": NEW, "resp_of_old": OLD, "resp_of_another": "another"}
    drawn = NEW if share else OLD
    for previous, by in (("resp_of_new", NEW), ("resp_of_old", OLD), ("resp_of_another", drawn), ("resp_z", drawn)):
        assert await rig.answered_by(RESPONSES, previous_response_id=previous) == by
    rig.trials[0].go_by(Verdict.ROLL_BACK)
    assert await rig.answered_by(RESPONSES, previous_response_id="resp_of_new") == OLD


async def test_after_a_verdict_all_go_one_way_and_nothing_more_is_counted(make: Callable[..., Rig]) -> None:
    rig = make({"share": 0.5})
    for verdict, by in ((Verdict.ROLL_BACK, OLD), (Verdict.PROMOTE, NEW)):
        rig.trials[0].go_by(verdict)
        assert {await rig.answered_by() for _ in range(20)} == {by}
        assert total(rig.trials[0].run.candidate) == total(rig.trials[0].run.incumbent) == 0
    assert rig.value("verdict") == 1


async def test_a_stream_that_runs_at_the_verdict_ends_where_it_began_and_is_counted(make: Callable[..., Rig]) -> None:
    rig = make({"share": 1.0})
    rig.new[0].may_end.clear()
    running = asyncio.create_task(rig.ask())
    await until(lambda: bool(rig.new[0].bodies))
    rig.trials[0].go_by(Verdict.ROLL_BACK)
    rig.new[0].may_end.set()
    assert (await running).json() == {"model": NEW}
    assert total(rig.trials[0].run.candidate) == 1


@pytest.mark.parametrize("mirror", [False, True])
async def test_a_candidate_whose_engines_are_all_gone_is_asked_nothing_until_one_is_back(
    make: Callable[..., Rig], mirror: bool
) -> None:
    rig = make({"share": 1.0, "mirror": mirror})
    rig.has_engines = False
    assert await rig.answered_by() == OLD
    await copied(rig, requests=0)
    assert rig.new[0].bodies == [] and total(rig.trials[0].run.candidate) == 0
    rig.has_engines = True
    assert await rig.answered_by() == (OLD if mirror else NEW)


async def test_two_candidates_have_parts_of_their_own(make: Callable[..., Rig]) -> None:
    rig = make({"share": 0.3}, {"share": 0.3})
    names = [f"session {number}" for number in range(60)]
    first = [await rig.answered_by(session=name) for name in names]
    assert set(first) == {OLD, NEW, f"{NEW}1"}
    rig.trials[0].go_by(Verdict.ROLL_BACK)
    later = [await rig.answered_by(session=name) for name in names]
    assert later == [OLD if by == NEW else by for by in first], "what one loses goes to the incumbent"


@pytest.mark.parametrize(
    ("how", "counted"),
    [
        ({}, "kept"),
        ({"ttft_s": 5.0}, "missed"),
        ({"outcome": "error"}, "failed"),
        ({"status": 500}, "failed"),
        ({"status": 503, "outcome": "refused"}, "failed"),
        ({"status": 429, "outcome": "refused", "cause": Cause.LATE}, "missed"),
        ({"status": 429, "outcome": "refused", "cause": Cause.QUOTA}, None),
        ({"outcome": "cancelled"}, None),
        ({"status": 501, "outcome": "cancelled"}, None),
    ],
)
@pytest.mark.parametrize("share", [0.0, 1.0])
async def test_each_version_is_counted_by_how_its_requests_ended(
    make: Callable[..., Rig], share: float, how: dict[str, Any], counted: str | None
) -> None:
    rig = make({"share": share})
    for each in (rig.old, rig.new[0]):
        for name, value in how.items():
            setattr(each, name, value)
    await rig.ask()
    run, version = rig.trials[0].run, "candidate" if share else "incumbent"
    tally, other = (run.candidate, run.incumbent) if share else (run.incumbent, run.candidate)
    assert total(other) == 0
    assert {name for name in ("kept", "missed", "failed", "unpromised") if getattr(tally, name)} == {counted} - {None}
    assert counted is None or rig.value("requests_total", version=version, outcome=counted) == 1


async def test_what_was_promised_nothing_is_counted_as_that(make: Callable[..., Rig]) -> None:
    rig = make({"share": 1.0})
    rig.middleware._promises.replace(Promises({"standard": Promise()}, "standard"))
    await rig.ask()
    tally = rig.trials[0].run.candidate
    assert (tally.unpromised, total(tally), tally.counts.kept) == (1, 1, 0)


# Copies


async def copied(rig: Rig, requests: int = 1, **how: Any) -> None:
    """Ask, and wait for the copies."""
    for _ in range(requests):
        assert await rig.answered_by(**how) == OLD
    await until(lambda: rig.terms.now is None or not rig.background._tasks)


async def test_a_copy_runs_in_an_idle_class_in_nobody_s_name_and_both_are_counted(make: Callable[..., Rig]) -> None:
    rig = make({"share": 1.0, "mirror": True})
    response = await rig.client.post(
        CHAT, json={"model": OLD, "stream": True}, headers={"Authorization": "Bearer k", "X-Request-Id": "mine"}
    )
    assert response.headers["x-sluice-model"] == OLD
    await copied(rig, requests=0)
    (context,), run = rig.new[0].contexts, rig.trials[0].run
    assert (context.slo_class, context.promise) == ("offline", PROMISED), "it runs as its request does"
    assert (context.tenant, context.session, context.is_copy) == (None, None, True)
    assert (context.request_id, rig.new[0].bodies) == ("mine-copy", [{"model": NEW, "stream": True}])
    assert (run.incumbent.kept, run.candidate.kept, run.candidate.output_tokens) == (1, 1, 7)


async def test_the_answer_does_not_wait_for_its_copy_and_only_pairs_are_counted(make: Callable[..., Rig]) -> None:
    rig = make({"share": 1.0, "mirror": True})
    rig.new[0].may_end.clear()
    assert await rig.answered_by() == OLD
    await until(lambda: bool(rig.new[0].bodies))
    assert total(rig.trials[0].run.incumbent) == 0
    rig.new[0].may_end.set()
    await copied(rig, requests=0)
    assert (total(rig.trials[0].run.incumbent), total(rig.trials[0].run.candidate)) == (1, 1)


async def test_a_copy_is_judged_by_the_promise_of_its_request_from_its_slot_on(make: Callable[..., Rig]) -> None:
    rig = make({"share": 1.0, "mirror": True})
    rig.new[0].ttft_s = 5.0
    await copied(rig)
    assert (rig.trials[0].run.incumbent.kept, rig.trials[0].run.candidate.missed) == (1, 1)


async def test_a_failure_of_a_copy_is_counted_and_seen_by_nobody(make: Callable[..., Rig]) -> None:
    rig = make({"share": 1.0, "mirror": True})
    rig.new[0].status = 500
    await copied(rig)
    assert (rig.trials[0].run.incumbent.kept, rig.trials[0].run.candidate.failed) == (1, 1)


UNSERVED = {"outcome": "error", "unserved": ReplicaLostError("no replica took it within 600 s")}


@pytest.mark.parametrize("how", [{"recalls": 1}, {"outcome": "refused"}, UNSERVED])
async def test_a_copy_that_gave_way_or_was_not_taken_is_left_out(make: Callable[..., Rig], how: dict[str, Any]) -> None:
    rig = make({"share": 1.0, "mirror": True})
    for name, value in how.items():
        setattr(rig.new[0], name, value)
    await copied(rig)
    run = rig.trials[0].run
    assert (total(run.incumbent), total(run.candidate), run.copies_left_out) == (0, 0, 1)
    assert rig.value("copies_left_out_total") == 1


async def test_beyond_so_many_copies_others_are_left_out(
    make: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(under_copies, "MOST_COPIES", 2)
    rig = make({"share": 1.0, "mirror": True})
    rig.new[0].may_end.clear()
    for _ in range(5):
        assert await rig.answered_by() == OLD
    assert rig.trials[0].run.copies_left_out == 3
    rig.new[0].may_end.set()
    await copied(rig, requests=0)
    assert total(rig.trials[0].run.candidate) == 2
    await copied(rig)
    assert total(rig.trials[0].run.candidate) == 3, "there is room again"


async def test_a_copy_that_is_not_over_in_time_is_ended_and_left_out(make: Callable[..., Rig]) -> None:
    rig = make({"share": 1.0, "mirror": True})
    rig.terms.replace(CopyTerms("offline", 0.01))
    rig.new[0].may_end.clear()
    await copied(rig)
    assert rig.trials[0].run.copies_left_out == 1


@pytest.mark.parametrize("path", [RESPONSES, "/tokenize"])
async def test_what_may_have_consequences_is_not_copied(make: Callable[..., Rig], path: str) -> None:
    rig = make({"share": 1.0, "mirror": True})
    assert await rig.answered_by(path) == OLD
    await copied(rig, requests=0)
    assert rig.new[0].bodies == []


async def test_keys_are_still_needed_and_named(make: Callable[..., Rig]) -> None:
    rig = make({"share": 1.0})
    rig.middleware._keys = key_ring(entries=[{"name": "mine", "sha256": "0" * 64}])
    assert (await rig.ask()).status_code == 401
    assert rig.new[0].bodies == []
