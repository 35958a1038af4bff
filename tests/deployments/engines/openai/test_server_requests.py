"""From a client's body to what a server gets, and what a router knows of it."""

import json
from typing import Any

import pytest

from deployments.engines.openai.front_end import CHATS, COMPLETIONS, server_request
from deployments.engines.openai.messages import ServerRequest
from policies.errors import InputError


def made(path: str, body: dict[str, Any], tenant: str | None = None) -> ServerRequest:
    return server_request(path, body, "theirs", tenant)


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "ours", "messages": [{"role": "user", "content": "Name three rivers."}], **more}


def test_a_body_goes_on_as_it_is_but_for_what_is_ours() -> None:
    body = chat(temperature=0.5, service_tier="flex", vendor_field={"x": [1]})
    sent = json.loads(made(CHATS, body).body)
    assert sent == {name: value for name, value in body.items() if name != "service_tier"} | {"model": "theirs"}


def test_servers_always_count_the_tokens_of_a_stream() -> None:
    asked = made(CHATS, chat(stream=True, stream_options={"continuous_usage_stats": True}))
    assert json.loads(asked.body)["stream_options"] == {"continuous_usage_stats": True, "include_usage": True}
    assert (asked.streams, asked.tells_usage) == (True, False)
    assert made(CHATS, chat(stream=True, stream_options={"include_usage": True})).tells_usage
    assert "stream_options" not in json.loads(made(CHATS, chat()).body)


@pytest.mark.parametrize(
    ("path", "body", "most"),
    [
        (CHATS, chat(), None),
        (CHATS, chat(max_tokens=5), 5),
        (CHATS, chat(max_tokens=5, max_completion_tokens=7, n=2), 14),
        (COMPLETIONS, {"prompt": "x"}, 16),
        (COMPLETIONS, {"prompt": ["x", "y"], "max_tokens": 3, "n": 2}, 12),
        (COMPLETIONS, {"prompt": [[1, 2], [3]], "max_tokens": 3}, 6),
        (COMPLETIONS, {"prompt": [1, 2, 3], "max_tokens": 3, "best_of": 4}, 12),
    ],
)
def test_the_most_that_an_answer_may_have(path: str, body: dict[str, Any], most: int | None) -> None:
    assert made(path, body).max_output_tokens == most


def test_prompts_are_as_long_as_their_text_and_begin_alike_where_it_does() -> None:
    long, longer = (made(COMPLETIONS, {"prompt": "river " * number}) for number in (100, 200))
    assert (long.prompt_tokens, longer.prompt_tokens) == (150, 300)
    assert list(longer.pieces[:150]) == list(long.pieces)
    assert made(COMPLETIONS, {"prompt": [5, 6, 7]}).pieces == [5, 6, 7]
    first, second = (made(CHATS, chat(tools=[{"name": name}])) for name in ("a", "b"))
    assert first.pieces != second.pieces


def test_keys_have_caches_of_their_own() -> None:
    salts = {made(CHATS, chat(**own), tenant).salt for own in ({}, {"cache_salt": "x"}) for tenant in (None, "a", "b")}
    assert len(salts) == 6
    asked = made(CHATS, chat(cache_salt="x"), "a")
    assert json.loads(asked.body)["cache_salt"] == asked.salt


@pytest.mark.parametrize(
    ("path", "body", "why"),
    [
        (CHATS, {}, "messages must be"),
        (CHATS, {"messages": ["x"]}, "each of messages"),
        (COMPLETIONS, {"prompt": ""}, "prompt must be"),
        (CHATS, chat(max_tokens="5"), "max_tokens must be"),
        (CHATS, chat(n=True), "n must be"),
        (CHATS, chat(max_tokens=10**400), "max_tokens must be"),  # beyond a float, in which its length is predicted
        (CHATS, chat(stream="false"), "stream must be"),
        (CHATS, chat(stream_options=[1]), "stream_options"),
        (CHATS, chat(cache_salt=5), "cache_salt"),
    ],
)
def test_what_no_server_could_answer_is_refused(path: str, body: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why):
        made(path, body)
