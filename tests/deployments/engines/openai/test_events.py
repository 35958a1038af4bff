"""What clients get of the answers of servers of others."""

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.engines.openai.events import DONE, Events, Told
from deployments.engines.openai.messages import ServerOutput, ServerRequest
from policies.errors import ProtocolError

SENT = [b'{"a": 1}', b'{"text": "\xc3\xa9\\n\\n"}', DONE]
STREAM = b": keeps the line open\n\ndata: " + b"\n\n: again\n\ndata:".join(SENT) + b"\n\n"


def request(**told: Any) -> ServerRequest:
    asked = {"request_id": "one", "path": "/v1/chat/completions", "body": b"", "answer_id": "chatcmpl-one"}
    return ServerRequest(**{**asked, "created": 7, "model": "ours", "streams": True, **told})


def chunk(delta: dict[str, Any], finish: str | None = None, **more: Any) -> bytes:
    said = {"id": "theirs", "object": "chat.completion.chunk", "created": 99, "model": "/their/model"}
    return json.dumps(said | {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]} | more).encode()


def usage(tokens: int) -> bytes:
    return json.dumps({"id": "theirs", "choices": [], "usage": {"completion_tokens": tokens}}).encode()


def told(events: list[bytes], asked: ServerRequest) -> list[ServerOutput]:
    so_far = Told(asked)
    outputs = [so_far.event(event) for event in events]
    assert so_far.is_done
    return [output for output in outputs if output is not None]


def client_gets(outputs: list[ServerOutput]) -> list[Any]:
    """What an SSE client reads."""
    events = list(Events().feed(b"".join(part for output in outputs for part in output.parts)))
    return [each.decode() if each == DONE else json.loads(each) for each in events]


@given(st.lists(st.integers(0, len(STREAM)), max_size=8), st.booleans())
def test_events_are_the_same_wherever_a_stream_is_cut(cuts: list[int], with_returns: bool) -> None:
    stream = STREAM.replace(b"\n\n", b"\r\n\r\n") if with_returns else STREAM
    edges = [0, *sorted(cuts), len(stream)]
    events = Events()
    found = [event for start, end in zip(edges, edges[1:], strict=False) for event in events.feed(stream[start:end])]
    assert found == SENT


def test_a_long_event_costs_what_its_bytes_do() -> None:
    """An image in an answer, which comes in pieces: the replica's event loop must not look through it at each."""
    data, piece, events = b"x" * (16 << 20), 1 << 14, Events()
    began_s = time.process_time()
    stream = b"data: " + data + b"\n\n"
    found = [each for at in range(0, len(stream), piece) for each in events.feed(stream[at : at + piece])]
    assert found == [data]
    assert time.process_time() - began_s < 2.0  # some hundredths; several seconds if each piece is one more look at all


def test_a_stream_is_the_clients_own_and_each_part_of_it_has_text() -> None:
    events = [chunk({"role": "assistant", "content": ""}), chunk({"content": "A"}), chunk({"content": "B"})]
    outputs = told([*events, chunk({}, "stop"), usage(2), DONE], request())
    assert [len(output.new_token_ids) for output in outputs] == [1, 1, 0]
    assert [output.finish_reason for output in outputs] == [None, None, "stop"]
    got = client_gets(outputs)
    assert [each["choices"][0]["delta"].get("content") for each in got[:-1]] == ["", "A", "B", None]
    assert {(each["id"], each["created"], each["model"]) for each in got[:-1]} == {("chatcmpl-one", 7, "ours")}
    assert got[-1] == "[DONE]"


def test_usage_is_told_to_those_who_ask_and_counts_tokens_that_no_event_told_of() -> None:
    events = [chunk({"content": "A and B"}), chunk({}, "length"), usage(3), DONE]
    first, last = told(events, request(tells_usage=True))
    assert (len(first.new_token_ids), len(last.new_token_ids), last.finish_reason) == (1, 2, "length")
    assert client_gets([first, last])[2]["usage"] == {"completion_tokens": 3}
    assert not any("usage" in each for each in client_gets(told(events, request())) if each != "[DONE]")


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "refusal", "tool_calls"])
def test_whatever_a_model_says_counts(name: str) -> None:
    said, _ = told([chunk({name: "x" if name != "tool_calls" else [{"index": 0}]}), DONE], request())
    assert len(said.new_token_ids) == 1


def test_equal_events_have_equal_tokens_whoever_says_them() -> None:
    here, there = (told([chunk({"content": "A"}, id=server), DONE], request())[0] for server in ("a", "b"))
    other = told([chunk({"content": "B"}), DONE], request())[0]
    assert here.new_token_ids == there.new_token_ids != other.new_token_ids


def test_an_error_in_a_stream_ends_it() -> None:
    said, error = told([chunk({"content": "A"}), b'{"error": {"message": "no"}}'], request())
    assert (said.finish_reason, error.finish_reason) == (None, "error")
    assert client_gets([error]) == [{"error": {"message": "no"}}, "[DONE]"]


def test_a_field_for_errors_without_one_ends_nothing() -> None:
    said, end = told([chunk({"content": "A"}, error=None), chunk({}, "stop"), DONE], request())
    assert (len(said.new_token_ids), end.finish_reason) == (1, "stop")


def test_a_whole_answer_is_named_and_counted() -> None:
    body = {"id": "theirs", "choices": [{"text": "x", "finish_reason": "length"}], "usage": {"completion_tokens": 4}}
    output = Told(request(streams=False)).whole(json.dumps(body).encode())
    assert (len(output.new_token_ids), output.finish_reason, output.content_type) == (4, "length", "application/json")
    assert json.loads(output.parts[0]) == body | {"id": "chatcmpl-one"}


@pytest.mark.parametrize("counted", [10**7, -5, True, 2.5, "9", None])
def test_a_count_that_no_answer_has_counts_nothing(counted: object) -> None:
    """It would be a list of as many tokens, in whose memory the replica ends."""
    body = {"choices": [{"text": "x", "finish_reason": "stop"}], "usage": {"completion_tokens": counted}}
    assert len(Told(request(streams=False)).whole(json.dumps(body).encode()).new_token_ids) == 0


@pytest.mark.parametrize("choices", ["5", "true", '{"index": 0}', '"x"'])
def test_choices_that_are_no_list_of_objects_are_no_answer(choices: str) -> None:
    with pytest.raises(ProtocolError, match="no JSON object of the OpenAI API"):
        Told(request()).event(b'{"choices": ' + choices.encode() + b"}")


@pytest.mark.parametrize("said", [b"<html>", b"[]", b'{"choices": ["x"]}', b"\xff"])
def test_what_is_no_answer_of_the_api_is_refused(said: bytes) -> None:
    with pytest.raises(ProtocolError, match="no JSON"):
        Told(request()).event(said)
    with pytest.raises(ProtocolError, match="no JSON"):
        Told(request(streams=False)).whole(said)
