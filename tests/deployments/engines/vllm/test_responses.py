"""vLLM's Responses API with a store that routers share, in a real Redis."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import ResponseFunctionToolCall
from openai_harmony import Conversation, DeveloperContent, Message, Role, SystemContent
from pydantic_core import to_json
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app

from deployments import app
from deployments.config.model import DEMO_ARGS, DEMO_MODEL
from deployments.engines.vllm.args import parse_vllm_args
from deployments.engines.vllm.front_end import RoutedAsyncLLM
from deployments.engines.vllm.responses import KeptResponses, _conversation, _decoded, stored_responses
from deployments.http.in_process import ask
from deployments.http.keys import digest
from deployments.http.middleware import TENANT, SluiceMiddleware
from deployments.process.ports import free_port
from deployments.responses.background import BackgroundResponses
from deployments.responses.http import ResponsesApi
from deployments.responses.store import Place, ResponseStore, shown_id
from policies.errors import AdmissionError, StateStoreError
from router.admission import Tenant
from router.background import BackgroundTasks
from router.clock import MonotonicClock
from tests.deployments.bodies import behind_middleware, key_ring
from tests.deployments.engines.vllm.routed import ROOM, Routed
from tests.deployments.responses.stores import end_lease, stores, unstored
from tests.waiting import until, until_async

pytestmark = pytest.mark.slow  # importing vLLM takes seconds

MODEL = str(DEMO_MODEL)
KEYS = [{"name": name, "sha256": digest(f"key of {name}")} for name in ("me", "you")]
MAX_BYTES = 1 << 20


@pytest.fixture
def routed() -> Routed:
    return Routed()


@pytest.fixture
async def llm(monkeypatch: pytest.MonkeyPatch, routed: Routed) -> AsyncIterator[Any]:
    for name, value in app.router_env().items():
        monkeypatch.setenv(name, value)
    args = parse_vllm_args(["--model", MODEL, *DEMO_ARGS, "--disable-log-stats"])
    made = RoutedAsyncLLM(args, routed, isolates_keys=True)  # type: ignore[arg-type]
    yield SimpleNamespace(engine=made, args=args)
    await until(lambda: not made.output_processor.request_states)
    made.shutdown()


@dataclass
class OneRouter:
    """One of several: what it serves, what it stores by, and what failed in it."""

    served: SluiceMiddleware
    background: BackgroundResponses
    store: ResponseStore
    failures: list[str]

    def client(self, key: str = "me") -> openai.AsyncOpenAI:
        transport = httpx.ASGITransport(self.served)
        return openai.AsyncOpenAI(
            base_url="http://sluice/v1",
            api_key=f"key of {key}",
            max_retries=0,
            http_client=httpx.AsyncClient(transport=transport),
        )


async def made_router(llm: Any, store: ResponseStore | None, max_bytes: int = MAX_BYTES) -> Any:
    failures: list[str] = []
    kept = background = None
    if store is not None:
        background = BackgroundResponses(store, BackgroundTasks(failures.append), MonotonicClock(), max_bytes=max_bytes)
        background.keep_alive()
        kept = KeptResponses(background=background, max_bytes=max_bytes)
    made = build_app(llm.args, ("generate",), llm.engine.model_config)
    with stored_responses(kept):
        await init_app_state(llm.engine, made.state, llm.args, ("generate",))
    made.state.server = SimpleNamespace()
    keys = key_ring(ROOM, entries=KEYS)
    await keys.reload()
    served = behind_middleware(ResponsesApi(made, store), ROOM, keys=keys)
    return OneRouter(served, background, store, failures)  # type: ignore[arg-type]


@pytest.fixture
async def routers(llm: Any, redis_url: str, namespace: str) -> AsyncIterator[list[OneRouter]]:
    """Two that know of each other by Redis alone."""
    async with stores(redis_url, namespace) as make:
        made = [await made_router(llm, make()) for _ in range(2)]
        yield made
        for router in made:
            await router.background.close()
            assert not router.failures


def prompts(llm: Any, routed: Routed) -> list[str]:
    """What engines were asked, as text."""
    return [llm.engine.get_tokenizer().decode(request.prompt_token_ids) for request in routed.asked]


async def test_a_conversation_goes_on_at_another_router_with_all_that_was_said(
    routers: list[OneRouter], llm: Any, routed: Routed
) -> None:
    one, other = (router.client() for router in routers)
    first = await one.responses.create(model=MODEL, input="seven rivers", instructions="Be brief.")
    second = await other.responses.create(model=MODEL, input="and bread?", previous_response_id=first.id)
    third = await one.responses.create(model=MODEL, input="and the moon?", previous_response_id=second.id)
    said = prompts(llm, routed)[-1]
    parts = ["seven rivers", first.output_text, "and bread?", second.output_text, "and the moon?"]
    assert all(parts)
    places = [
        said.index(part, 0 if number == 0 else said.index(parts[number - 1])) for number, part in enumerate(parts)
    ]
    assert places == sorted(places)
    assert "Be brief." not in said  # instructions hold for one response
    assert third.previous_response_id == second.id
    assert len({request.cache_salt for request in routed.asked}) == 1, "its prefix is found where it was read"
    retrieved = await other.responses.retrieve(first.id)
    assert (retrieved.output_text, retrieved.status) == (first.output_text, "completed")
    assert first.to_dict() == retrieved.to_dict()


async def test_a_stream_is_stored_when_its_client_reads_its_end(routers: list[OneRouter]) -> None:
    one, other = (router.client() for router in routers)
    async for event in await one.responses.create(model=MODEL, input="a", stream=True):
        if event.type in ("response.created", "response.in_progress"):
            assert event.response.to_dict()["store"] is True
        if event.type == "response.completed":
            assert event.response.to_dict()["store"] is True
            stored = await other.responses.retrieve(event.response.id)
            assert stored.output_text == event.response.output_text
            break
    else:
        pytest.fail("the stream had no end")


async def test_what_is_not_to_be_stored_is_not(routers: list[OneRouter]) -> None:
    client = routers[0].client()
    for unstored_by in ({"store": False}, {"extra_body": {"request_id": "an id of mine"}}):
        answer = await client.responses.create(model=MODEL, input="a", **unstored_by)  # type: ignore[call-overload]
        assert answer.to_dict()["store"] is False
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(answer.id)
    told = [
        event.response.to_dict()["store"]
        async for event in await client.responses.create(model=MODEL, input="a", store=False, stream=True)
        if event.type in ("response.created", "response.in_progress", "response.completed")
    ]
    assert told == [False] * 3
    assert (await routers[0].store.usage()).responses == 0


async def test_an_answer_names_the_tier_under_which_it_was_served(routers: list[OneRouter]) -> None:
    client = routers[0].client()
    answer = await client.responses.create(model=MODEL, input="a", service_tier="flex")
    assert answer.service_tier == "default"  # no class is flex here


async def test_nothing_that_is_shown_holds_the_id_that_opens_a_response(
    routers: list[OneRouter], routed: Routed, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    client, ids = routers[0].client(), list[str]()
    ids.append((await client.responses.create(model=MODEL, input="a")).id)
    routed.fails = True
    own = {"request_id": "resp_my-own"}
    begun = await client.responses.create(model=MODEL, input="a", background=True, extra_body=own)
    ids.append(begun.id)
    await until(lambda: routers[0].failures == ["background response"])
    routers[0].failures.clear()
    told = [request.request_id for request in routed.asked]
    assert len(told) == 2
    told += [
        str(vars(record)) for record in caplog.records if record.name.startswith(("deployments", "router", "vllm"))
    ]
    for response_id in ids:
        assert any(shown_id(response_id) in each for each in told)
        assert not any(response_id.removeprefix("resp_") in each for each in told)


async def test_of_another_key_nothing_is_told_deleted_cancelled_or_gone_on_from(
    routers: list[OneRouter], routed: Routed
) -> None:
    mine, yours = routers[0].client("me"), routers[0].client("you")
    answer = await mine.responses.create(model=MODEL, input="a")
    for response_id in (answer.id, "resp_of_nobody", "no-id-at-all"):
        for call in (yours.responses.retrieve, yours.responses.cancel, yours.responses.delete):
            with pytest.raises(openai.NotFoundError, match=response_id) as caught:
                await call(response_id)
            assert caught.value.param == "response_id"
        with pytest.raises(openai.NotFoundError, match="not found") as caught:
            await yours.responses.create(model=MODEL, input="b", previous_response_id=response_id)
        assert caught.value.param == "previous_response_id"
    assert len(routed.asked) == 1
    assert (await mine.responses.retrieve(answer.id)).id == answer.id


async def test_a_deleted_response_is_404_everywhere(routers: list[OneRouter]) -> None:
    one, other = (router.client() for router in routers)
    answer = await one.responses.create(model=MODEL, input="a")
    await other.responses.delete(answer.id)
    for call in (one.responses.retrieve, other.responses.delete):
        with pytest.raises(openai.NotFoundError):
            await call(answer.id)


async def test_one_in_the_background_is_told_by_any_router_until_it_is_completed(routers: list[OneRouter]) -> None:
    one, other = (router.client() for router in routers)
    begun = await one.responses.create(model=MODEL, input="a", background=True)
    assert (begun.status, begun.background) == ("queued", True)

    async def is_completed() -> bool:
        return (await other.responses.retrieve(begun.id)).status == "completed"

    await until_async(is_completed)
    done = await other.responses.retrieve(begun.id)
    assert done.output_text and done.background
    again = await other.responses.create(model=MODEL, input="b", previous_response_id=begun.id)
    assert again.output_text
    assert (await other.responses.cancel(begun.id)).status == "completed"


async def test_one_in_the_background_is_cancelled_by_any_router_and_its_engine_stops(
    routers: list[OneRouter], routed: Routed
) -> None:
    one, other = (router.client() for router in routers)
    routed.stalls = True
    for end in ("cancel", "delete"):
        begun = await one.responses.create(model=MODEL, input="a", background=True)
        assert routed.running, "it goes on when its exchange is over"
        with pytest.raises(openai.BadRequestError, match="queued") as caught:
            await other.responses.create(model=MODEL, input="b", previous_response_id=begun.id)
        assert caught.value.param == "previous_response_id"
        if end == "cancel":
            assert (await other.responses.cancel(begun.id)).status == "cancelled"
        else:
            await other.responses.delete(begun.id)
        await until(lambda: not routed.running)
    with pytest.raises(openai.NotFoundError):
        await one.responses.retrieve(begun.id)


async def test_only_what_is_made_in_the_background_can_be_cancelled(routers: list[OneRouter]) -> None:
    client = routers[0].client()
    answer = await client.responses.create(model=MODEL, input="a")
    with pytest.raises(openai.BadRequestError, match="background"):
        await client.responses.cancel(answer.id)
    assert (await client.responses.retrieve(answer.id)).status == "completed"


async def test_one_whose_router_dies_has_failed_and_says_why(routers: list[OneRouter], routed: Routed) -> None:
    routed.stalls = True
    begun = await routers[0].client().responses.create(model=MODEL, input="a", background=True)
    await end_lease(routers[0].store, Place.of_key("me", begun.id))
    lost = await routers[1].client().responses.retrieve(begun.id)
    assert (lost.status, lost.error and lost.error.code) == ("failed", "server_error")
    assert lost.error is not None and "router" in lost.error.message
    await until(lambda: not routed.running)


async def test_a_router_that_is_stopped_ends_what_it_makes(routers: list[OneRouter], routed: Routed) -> None:
    routed.stalls = True
    begun = await routers[0].client().responses.create(model=MODEL, input="a", background=True)
    await routers[0].background.close()
    ended = await routers[1].client().responses.retrieve(begun.id)
    assert ended.status == "failed"
    assert ended.error is not None and "stopped" in ended.error.message
    assert not routed.running


async def test_a_router_that_is_told_to_leave_lets_end_what_it_makes(routers: list[OneRouter], routed: Routed) -> None:
    routed.stalls = True
    one, other = (router.client() for router in routers)
    begun = await one.responses.create(model=MODEL, input="a", background=True)
    draining = asyncio.create_task(routers[0].background.drain(3600))
    assert (await other.responses.retrieve(begun.id)).status in ("queued", "in_progress")
    assert not draining.done()
    await other.responses.cancel(begun.id)
    async with asyncio.timeout(60):
        await draining
    assert not routed.running


async def test_one_in_the_background_that_may_not_queue_is_refused_and_not_stored(
    routers: list[OneRouter], routed: Routed
) -> None:
    client = routers[0].client()
    routed.raises = AdmissionError("the rate is spent", 7.0)
    with pytest.raises(openai.RateLimitError, match="the rate is spent") as caught:
        await client.responses.create(model=MODEL, input="a", background=True)
    assert caught.value.response.headers["retry-after"] == "7"
    routed.raises = StateStoreError("no queue")
    with pytest.raises(openai.InternalServerError, match="no queue") as failed:
        await client.responses.create(model=MODEL, input="a", background=True)
    assert failed.value.status_code == 503
    assert (await routers[0].store.usage()).responses == 0


async def test_one_in_the_background_that_an_engine_fails_has_failed(routers: list[OneRouter], routed: Routed) -> None:
    routed.fails = True
    client = routers[0].client()
    begun = await client.responses.create(model=MODEL, input="a", background=True)

    async def has_failed() -> bool:
        return (await client.responses.retrieve(begun.id)).status == "failed"

    await until_async(has_failed)
    await until(lambda: routers[0].failures == ["background response"])  # nobody else would see it
    routers[0].failures.clear()


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"background": True, "stream": True}, "stream"),
        ({"background": True, "store": False}, "background"),
        ({"store": True, "extra_body": {"request_id": "x y"}}, "request_id"),
    ],
)
async def test_what_cannot_be_is_refused_with_the_field_named(
    routers: list[OneRouter], routed: Routed, asked: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=param):
        await routers[0].client().responses.create(model=MODEL, input="a", **asked)
    assert not routed.asked


async def test_a_stored_response_is_not_streamed_once_more(routers: list[OneRouter]) -> None:
    client = routers[0].client()
    answer = await client.responses.create(model=MODEL, input="a")
    with pytest.raises(openai.BadRequestError, match="stream") as caught:
        await client.responses.retrieve(answer.id, stream=True)
    assert caught.value.param == "stream"


async def test_an_id_of_ones_own_is_kept_and_may_not_be_begun_twice(routers: list[OneRouter], routed: Routed) -> None:
    routed.stalls = True
    one, other = (router.client() for router in routers)
    own = {"request_id": "resp_my-own"}
    begun = await one.responses.create(model=MODEL, input="a", background=True, extra_body=own)
    assert begun.id == "resp_my-own"
    with pytest.raises(openai.BadRequestError, match="already"):
        await other.responses.create(model=MODEL, input="a", background=True, extra_body=own)
    assert (await other.responses.cancel(begun.id)).status == "cancelled"


async def test_one_that_is_begun_anew_after_its_deletion_is_the_one_that_is_told(
    routers: list[OneRouter], routed: Routed
) -> None:
    routed.stalls = True
    client, own = routers[0].client(), {"request_id": "resp_my-own"}
    await client.responses.create(model=MODEL, input="a", background=True, extra_body=own)
    await client.responses.delete("resp_my-own")
    await client.responses.create(model=MODEL, input="b", background=True, extra_body=own)
    await until(lambda: len(routers[0].background._making) == 1)  # the first has been stopped
    assert (await client.responses.retrieve("resp_my-own")).status in ("queued", "in_progress")
    assert (await client.responses.cancel("resp_my-own")).status == "cancelled"
    await until(lambda: not routers[0].background._making)


async def test_a_body_in_chunks_counts_by_its_size(llm: Any, routed: Routed, redis_url: str, namespace: str) -> None:
    routed.stalls = True

    async def body() -> AsyncIterator[bytes]:
        yield json.dumps({"model": MODEL, "input": "a" * 100, "background": True}).encode()

    async with stores(redis_url, namespace) as make:
        router = await made_router(llm, make())
        client, headers = router.client(), {"Content-Type": "application/json", "Authorization": "Bearer key of me"}
        answer = await client._client.post("http://sluice/v1/responses", content=body(), headers=headers)
        assert answer.status_code == 200, answer.text
        (making,) = router.background._making
        assert 100 < making.size < 1000
        await router.background.close()


async def test_what_is_made_in_the_background_is_bounded_in_bytes(
    llm: Any, routed: Routed, redis_url: str, namespace: str
) -> None:
    routed.stalls = True
    async with stores(redis_url, namespace) as make:
        router = await made_router(llm, make(), max_bytes=2000)
        client = router.client()
        begun = await client.responses.create(model=MODEL, input="a" * 800, background=True)
        with pytest.raises(openai.InternalServerError, match="max_buffered_bytes") as caught:
            await client.responses.create(model=MODEL, input="a" * 1600, background=True)
        assert caught.value.status_code == 503
        await client.responses.cancel(begun.id)
        await until(lambda: not router.background._making)
        await router.background.close()


def test_calls_of_tools_stand_before_their_outputs() -> None:
    call = ResponseFunctionToolCall(type="function_call", call_id="c1", name="weather", arguments='{"at": "sea"}')
    messages = [{"role": "user", "content": "How is it?"}]
    read = _decoded("resp_1", json.dumps(_conversation(messages, [call])).encode())
    assert [message["role"] for message in read.messages] == ["user", "assistant"]
    assert read.messages[-1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"at": "sea"}'}


def test_harmonys_messages_come_back_as_they_went() -> None:
    messages = [
        Message.from_role_and_content(Role.SYSTEM, SystemContent.new()),
        Message.from_role_and_content(Role.DEVELOPER, DeveloperContent.new().with_instructions("Be brief.")),
        Message.from_role_and_content(Role.USER, "How is it?"),
        Message.from_role_and_content(Role.ASSISTANT, "Fair.").with_channel("final"),
    ]
    call = ResponseFunctionToolCall(type="function_call", call_id="c1", name="weather", arguments="{}")
    read = _decoded("resp_1", to_json(_conversation(messages, [call])))
    assert Conversation.from_messages(read.messages).to_dict() == Conversation.from_messages(messages).to_dict()
    assert read.output == [call]


async def test_a_conversation_that_no_request_may_bring_is_not_stored_and_says_so(
    llm: Any, redis_url: str, namespace: str
) -> None:
    async with stores(redis_url, namespace) as make:
        router = await made_router(llm, make(), max_bytes=2000)
        answer = await router.client().responses.create(model=MODEL, input="a " * 500)
        assert answer.to_dict()["store"] is False
        assert (await router.store.usage()).responses == 0
        assert unstored(router.store, "room") == 1
        await router.background.close()


async def test_without_redis_plain_responses_go_on_and_what_needs_it_says_so(
    llm: Any, routed: Routed, namespace: str
) -> None:
    async with stores(f"redis://127.0.0.1:{free_port()}/0", namespace) as make:
        router = await made_router(llm, make())
        client = router.client()
        answer = await client.responses.create(model=MODEL, input="a")
        assert answer.output_text and answer.to_dict()["store"] is False
        for needs in ({"store": True}, {"background": True}, {"previous_response_id": "resp_1"}):
            with pytest.raises(openai.InternalServerError, match="cannot be stored now|Redis") as caught:
                await client.responses.create(model=MODEL, input="a", **needs)  # type: ignore[call-overload]
            assert caught.value.status_code == 503
        for call in (client.responses.retrieve, client.responses.cancel, client.responses.delete):
            with pytest.raises(openai.InternalServerError, match="Redis") as caught:
                await call("resp_1")
            assert caught.value.status_code == 503
        assert len(routed.asked) == 1
        assert unstored(router.store, "redis") == 1
        await router.background.close()


async def test_where_nothing_is_stored_what_needs_it_is_refused(llm: Any, routed: Routed) -> None:
    client = (await made_router(llm, None)).client()
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve("resp_1")
    assert (await client.responses.create(model=MODEL, input="a")).output_text
    for param, value in (("store", True), ("background", True), ("previous_response_id", "resp_1")):
        with pytest.raises(openai.BadRequestError, match="responses.store") as caught:
            await client.responses.create(model=MODEL, input="a", **{param: value})  # type: ignore[call-overload]
        assert caught.value.param == param
    assert len(routed.asked) == 1


async def test_lines_of_batches_keep_no_state(routers: list[OneRouter]) -> None:
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/responses",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        TENANT: Tenant(name="me"),
    }

    async def line(**body: Any) -> tuple[int, Any]:
        reply = await ask(routers[0].served, scope, json.dumps({"model": MODEL, "input": "a", **body}).encode())
        return reply.status, json.loads(reply.body)

    assert [(await line(store=store))[0] for store in (True, False)] == [200, 200]
    for needs in ({"background": True}, {"previous_response_id": "resp_1"}):
        status, answer = await line(**needs)
        assert (status, answer["error"]["param"]) == (400, next(iter(needs)))
    assert (await routers[0].store.usage()).responses == 0


async def test_a_client_that_leaves_without_the_id_leaves_nothing_behind(
    routers: list[OneRouter], routed: Routed
) -> None:
    """While its request is on the way into the queue."""
    on_the_way, goes_on = asyncio.Event(), asyncio.Event()
    submit = routed.submit

    async def slow(request: Any, **settings: Any) -> None:
        on_the_way.set()
        await goes_on.wait()
        await submit(request, **settings)

    routed.submit = slow  # type: ignore[method-assign]
    asking = asyncio.create_task(routers[0].client().responses.create(model=MODEL, input="a", background=True))
    await on_the_way.wait()
    asking.cancel()
    await asyncio.wait([asking])

    async def nothing_is_left() -> bool:
        return (await routers[1].store.usage()).responses == 0

    await until_async(nothing_is_left)
    goes_on.set()
    await until(lambda: not routed.running)
