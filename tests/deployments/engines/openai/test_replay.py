"""Answers that another server says again: their clients get each character once."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.engines.openai.events import DONE, Told
from deployments.engines.openai.messages import OpenAiCodec, ServerOutput, ServerRequest
from tests.deployments.engines.openai.test_events import chunk, client_gets, request, usage

TEXT = "The sea is größer than 海, and \U0001f30a."
ROLE = chunk({"role": "assistant", "content": ""})
END = [chunk({}, "stop"), usage(20), DONE]
CODEC = OpenAiCodec()
edges_in_text = st.lists(st.integers(1, len(TEXT) - 1), unique=True).map(sorted)


def cut_at(edges: list[int], name: str = "content") -> list[bytes]:
    return [chunk({name: TEXT[start:end]}) for start, end in zip([0, *edges], [*edges, len(TEXT)], strict=True)]


def outputs_of(events: list[bytes], asked: ServerRequest) -> list[ServerOutput]:
    told = Told(asked)
    return [output for event in events if not told.is_done and (output := told.event(event)) is not None]


def after(outputs: list[ServerOutput], asked: ServerRequest) -> ServerRequest:
    sent = [number for output in outputs for number in output.new_token_ids]
    return CODEC.decode_request(CODEC.encode_request(CODEC.recover(asked, sent).request))


def text_in(outputs: list[ServerOutput], name: str = "content") -> str:
    events = [event for event in client_gets(outputs) if event != DONE.decode()]
    deltas = [choice["delta"] for event in events for choice in event.get("choices", ())]
    return "".join(delta.get(name) or "" for delta in deltas)


@given(st.lists(st.tuples(edges_in_text, st.integers(0, len(TEXT))), max_size=3), edges_in_text)
def test_wherever_servers_cut_their_streams_a_client_gets_each_character_once(
    lost: list[tuple[list[int], int]], last: list[int]
) -> None:
    asked, got = request(), []
    for edges, events in lost:
        part = outputs_of([ROLE, *cut_at(edges)[:events]], asked)
        asked, got = after(part, asked), got + part
    end = outputs_of([ROLE, *cut_at(last), *END], asked)
    assert text_in(got + end) == TEXT
    assert [output.finish_reason for output in got + end if output.finish_reason] == ["stop"]
    assert sum(len(output.new_token_ids) for output in got + end) >= 20
    assert sum(b"assistant" in part for output in got + end for part in output.parts) == 1


@pytest.mark.parametrize(
    ("again", "why"),
    [
        ([chunk({"content": "The lake"})], "differs"),
        ([chunk({"content": "The"}), chunk({}, "length")], "ends before"),
    ],
)
def test_another_answer_ends_the_stream_with_an_error(again: list[bytes], why: str) -> None:
    asked = after(outputs_of([chunk({"content": "The sea"})], request()), request())
    last = outputs_of(again, asked)[-1]
    assert last.finish_reason == "error"
    assert why in client_gets([last])[0]["error"]["message"]


def test_what_is_told_by_token_is_not_cut_amid_an_event() -> None:
    asked = after(outputs_of([chunk({"content": "The sea"})], request()), request())
    event = json.loads(chunk({"content": "The sea is"}))
    event["choices"][0]["logprobs"] = {"content": [{"token": "The sea is"}]}
    (last,) = outputs_of([json.dumps(event).encode()], asked)
    assert (last.finish_reason, "told by token" in client_gets([last])[0]["error"]["message"]) == ("error", True)


def test_reasoning_goes_before_what_is_said_in_one_event_as_in_two() -> None:
    apart, together = (
        [chunk({"reasoning": "Hm"}), chunk({"content": "Yes"})],
        chunk({"content": "Yes", "reasoning": "Hm"}),
    )
    asked = after(outputs_of(apart[:1], request()), request())
    end = outputs_of([together, *END], asked)
    assert (text_in(end, "reasoning"), text_in(end)) == ("", "Yes")


def test_a_call_of_a_tool_keeps_the_id_that_its_client_has() -> None:
    def call(arguments: str, **begins: Any) -> dict[str, Any]:
        named = {"name": "look"} if begins else {}
        return {"index": 0, **begins, "function": {**named, "arguments": arguments}}

    first = outputs_of([chunk({"tool_calls": [call("{", id="here", type="function")]})], request())
    asked = after(first, request())
    whole = chunk({"tool_calls": [call('{"a"', id="there", type="function")]})
    end = outputs_of([whole, chunk({"tool_calls": [call(":1}")]}), *END], asked)
    calls = [each for event in client_gets(end)[:2] for each in event["choices"][0]["delta"]["tool_calls"]]
    assert [each["function"] for each in calls] == [{"arguments": '"a"'}, {"arguments": ":1}"}]
    assert not any("id" in each for each in calls)


def test_each_of_several_answers_is_compared_with_its_own() -> None:
    def said(index: int, text: str) -> bytes:
        return json.dumps({"choices": [{"index": index, "text": text, "finish_reason": None}]}).encode()

    asked = after(outputs_of([said(0, "A"), said(1, "X"), said(0, "B")], request()), request())
    end = outputs_of([said(1, "XY"), said(0, "ABC"), DONE], asked)
    choices = [choice for event in client_gets(end)[:-1] for choice in event["choices"]]
    assert [(choice["index"], choice["text"]) for choice in choices] == [(1, "Y"), (0, "C")]


@pytest.mark.parametrize("calls", [7, [5], [{"function": 5}], [{"function": "name"}], {"name": "x"}, "x"])
def test_calls_of_tools_of_an_odd_shape_are_no_text(calls: object) -> None:
    odd = chunk({"content": TEXT, "tool_calls": calls})
    assert text_in(outputs_of([odd, *END], request())) == TEXT
    begun = outputs_of(cut_at([4])[:1], request())
    assert text_in(outputs_of([odd, *END], after(begun, request()))) == TEXT[4:]
