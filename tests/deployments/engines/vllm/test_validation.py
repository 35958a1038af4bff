"""What vLLM's routes refuse: soon, by the field's name, and never with 500."""

import json
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any, get_args

import httpx
import pytest
from fastapi import FastAPI
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.serve.exception_handling import error_response
from vllm.exceptions import VLLMError

from bench.one_client.attacks import beyond_the_limits
from deployments import app
from deployments.config.model import DEMO_ARGS, DEMO_MODEL
from deployments.engines.vllm.args import parse_vllm_args
from deployments.engines.vllm.front_end import RoutedAsyncLLM
from deployments.engines.vllm.grammars import Compiled
from deployments.engines.vllm.responses import stored_responses
from deployments.engines.vllm.validation import MAX_MESSAGE_CHARS, refuse_soon, shown
from tests.deployments.bodies import behind_middleware
from tests.deployments.engines.vllm.routed import ROOM, Routed

pytestmark = pytest.mark.slow  # importing vLLM takes seconds

TOOLS = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
MANY = 20
MOST_ERRORS = 400  # of one entry, by the members of the largest union
OF_ENGINES = {"logprobs", "use_beam_search"}  # what the engine of these tests does not compute
USER = {"role": "user", "content": "a"}
WHOLE: dict[str, Any] = {
    "model": str(DEMO_MODEL),
    "messages": [USER],
    "prompt": "a",
    "input": "a",
    "state": "a",
    "query": "a",
    "items": ["a"],
    "label_token_ids": [300, 301],
    "questions": {"a": {"type": "boolean", "instructions": "a"}},
    "tokens": [300],
    "max_tokens": 1,
}
OF_RESPONSES = {"model": str(DEMO_MODEL), "input": "a"}  # a prompt is a template there
WRONG: list[Any] = [1, "a", {}, [], {"type": "nobody"}, {"role": "user", "content": [{"type": "nobody"}] * MANY}]
OF_OTHER_TYPES: list[Any] = [None, True, 5, 1.5, "a", [], ["a"], [1], [{}], [[1]], {}, {"a": "b"}, {"type": "a"}]


SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "b"}'}}
ITEMS = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "b"},
    {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "a"}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
    USER,
]
# Fields that hold others, each with all that it may have.
RICH: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "system", "content": "a"},
            {"role": "user", "name": "n", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "a"},
            {"role": "tool", "tool_call_id": "c", "content": "b"},
            USER,
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}},
        "logit_bias": {"300": 1.0},
        "chat_template_kwargs": {"enable_thinking": True},
        "vllm_xargs": {"a": 1},
        "stop": ["a"],
        "bad_words": ["a"],
    },
    "/v1/completions": {
        "prompt": ["a", "b"],
        "structured_outputs": {"json": SCHEMA, "whitespace_pattern": " "},
        "stream_options": {"include_usage": True},
        "stream": True,
    },
    "/v1/responses": {
        "input": ITEMS,
        "tools": [{"type": "function", **FUNCTION}],
        "text": {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA, "strict": True}},
        "reasoning": {"effort": "low", "summary": "auto"},
        "metadata": {"a": "b"},
        "include": ["reasoning.encrypted_content"],
    },
    "/v1/messages": {
        "system": [{"type": "text", "text": "a"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"a": "b"}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "b"}]},
        ],
        "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}],
        "stop_sequences": ["a"],
        "metadata": {"user_id": "a"},
    },
    "/tokenize": {
        "messages": [USER],
        "tools": [{"type": "function", "function": FUNCTION}],
        "chat_template_kwargs": {"a": 1},
    },
}


class Compiles:
    """In place of the process that compiles grammars."""

    async def compiled(self, fields: dict[str, Any]) -> Compiled:
        return Compiled(backend="xgrammar", grammar="root ::= a")


@pytest.fixture
async def vllms(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FastAPI]:
    for name, value in app.router_env().items():
        monkeypatch.setenv(name, value)
    args = parse_vllm_args(["--model", str(DEMO_MODEL), *DEMO_ARGS, "--disable-log-stats", *TOOLS])
    args.enable_offline_docs = True
    llm = RoutedAsyncLLM(args, Routed(), made_grammars=lambda _: Compiles())  # type: ignore[arg-type, return-value]
    made = build_app(args, ("generate",), llm.model_config)
    refuse_soon(made)
    with stored_responses(None):
        await init_app_state(llm, made.state, args, ("generate",))
    made.state.server = SimpleNamespace()
    yield made
    llm.shutdown()


@pytest.fixture
async def client(vllms: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(behind_middleware(vllms, ROOM), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://sluice") as made:
        yield made


def body_fields(vllms: FastAPI) -> dict[str, Any]:
    """What each route reads its body by."""
    routes: list[Any] = [route for route in vllms.routes if hasattr(route, "dependant")]
    return {route.path: route.dependant.body_params[0] for route in routes if route.dependant.body_params}


def whole(path: str) -> dict[str, Any]:
    if path == "/v1/responses":
        return OF_RESPONSES
    return WHOLE | ({"messages": [[USER]]} if path.endswith("/batch") else {})


def names(body_field: Any) -> set[str]:
    """Of the fields of a body."""
    kinds = get_args(body_field.field_info.annotation) or (body_field.field_info.annotation,)
    return {field.alias or name for kind in kinds for name, field in kind.model_fields.items()} - OF_ENGINES


def errors(body_field: Any, body: dict[str, Any]) -> int:
    """How many a body of this kind makes."""
    try:
        return len(body_field.validate(body)[1])
    except VLLMError:
        return 1


def lists(wrong: Any, number: int) -> Iterator[Any]:
    yield [wrong] * number
    yield {str(each): wrong for each in range(number)}


def test_of_a_list_or_object_the_first_wrong_entry_is_told_on_every_route(vllms: FastAPI) -> None:
    for path, body_field in body_fields(vllms).items():
        for name in names(body_field):
            for wrong in WRONG:
                for some, many in zip(lists(wrong, MANY // 2), lists(wrong, MANY), strict=True):
                    told = [errors(body_field, {**whole(path), name: each}) for each in (some, many)]
                    assert told[1] <= max(1, told[0]) < MOST_ERRORS, (path, name, wrong)


async def test_a_field_of_another_type_is_refused_by_its_name_on_every_route(
    vllms: FastAPI, client: httpx.AsyncClient
) -> None:
    failed = []
    for path, body_field in body_fields(vllms).items():
        for name in sorted(names(body_field)):
            for value in OF_OTHER_TYPES:
                answer = await client.post(path, json={**whole(path), name: value})
                if answer.status_code >= 500 and answer.status_code != 501:
                    failed.append((path, name, value, answer.text[:150]))
    assert not failed, "\n".join(map(str, failed))


def mutations(value: Any) -> Iterator[Any]:
    """The same, with one value anywhere in it of another type."""
    yield from OF_OTHER_TYPES
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from ({**value, name: other} for other in mutations(inner))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from ([*value[:number], other, *value[number + 1 :]] for other in mutations(inner))


@pytest.mark.long
@pytest.mark.parametrize("path", RICH)
async def test_a_value_of_another_type_anywhere_in_a_body_is_no_fault_of_the_server(
    client: httpx.AsyncClient, path: str
) -> None:
    right = await client.post(path, json=whole(path) | RICH[path])
    assert right.status_code == 200, right.text
    failed = {}
    for name, value in RICH[path].items():
        for other in mutations(value):
            answer = await client.post(path, json={**whole(path), name: other})
            if answer.status_code >= 500 and answer.status_code != 501:
                failed[json.dumps({name: other})] = answer.text[:200]
    assert not failed, "\n".join(f"{body}: {said}" for body, said in failed.items())


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("/v1/chat/completions", "structured_outputs", [1]),
        ("/v1/chat/completions", "messages", 5),
        ("/v1/completions", "structured_outputs", "a"),
        ("/v1/responses", "tools", 5),
        ("/v1/responses", "input", [{"type": "message", "role": "assistant", "content": []}, USER]),
    ],
)
async def test_what_vllms_own_checks_break_at_is_told_by_its_field(
    client: httpx.AsyncClient, path: str, field: str, value: Any
) -> None:
    refused = await client.post(path, json={**whole(path), field: value})
    assert (refused.status_code, field in refused.json()["error"]["param"]) == (400, True)


async def test_what_is_hardly_beyond_a_limit_is_refused_in_words(client: httpx.AsyncClient) -> None:
    for name, attack in beyond_the_limits(2048).items():
        body = {**attack.body, "model": attack.body.get("model", str(DEMO_MODEL))}
        refused = await client.post(attack.path, json=body)
        assert refused.status_code in (400, 404), name
        assert 0 < len(refused.json()["error"]["message"]) <= MAX_MESSAGE_CHARS + len("..."), name


@pytest.mark.parametrize("field", ["background", "truncation", "temperature", "tool_choice"])
async def test_a_null_field_of_a_response_is_as_one_left_out(client: httpx.AsyncClient, field: str) -> None:
    left_out, null = [
        (await client.post("/v1/responses", json={**OF_RESPONSES, **more})).json() for more in ({}, {field: None})
    ]
    assert null[field] == left_out[field]


async def test_what_an_error_repeats_of_a_request_is_bounded(client: httpx.AsyncClient) -> None:
    refused = await client.post("/v1/completions", json={"model": "a" * 30_000, "prompt": "a"})
    assert refused.status_code == 404
    assert MAX_MESSAGE_CHARS < len(refused.json()["error"]["message"]) <= MAX_MESSAGE_CHARS + len("...")
    assert error_response.sanitize_message is shown


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("no file /usr/lib/python3/site.py here", "no file <path> here"),
        ("see /srv/models/a and models/b/c.json", "see <path> and models<path>"),
        ("<object at 0x7f00a1>", "<object>"),
        ('Traceback\n  File "a.py", line 3, in f\n    g()\nended', "Traceback\n  \nended"),
        ("POST /v1/chat/completions takes application/json", "POST /v1/chat/completions takes application/json"),
    ],
)
def test_errors_tell_no_path_of_a_file_and_no_address(said: str, told: str) -> None:
    assert shown(said) == told
