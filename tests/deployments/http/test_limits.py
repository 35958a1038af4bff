"""What one request may ask for, before anything is done with it."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.http.limits import RequestLimits, engine_requests, judged

LIMITS = RequestLimits.of_context(2048, takes_media=False, max_body_bytes=None, max_engine_requests=256)
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


def why(body: Any, limits: RequestLimits = LIMITS) -> str | None:
    return judged(json.dumps(body).encode(), limits).why_refused


def nested(depth: int, inside: Any = 1) -> Any:
    for _ in range(depth):
        inside = {"oneOf": [inside]}
    return inside


def one_ofs(depth: int) -> Any:
    return {"type": "integer"} if depth == 0 else {"oneOf": [one_ofs(depth - 1), one_ofs(depth - 1)]}


REFUSED = {
    "a bad word of megabytes": ({**CHAT, "bad_words": ["a" * 3_900_000]}, "bad_words"),
    "bad words beyond number": ({**CHAT, "bad_words": ["a"] * 257}, "bad_words"),
    "a long stop string": ({**CHAT, "stop": "a" * 5000}, "stop"),
    "many stop strings": ({**CHAT, "stop": ["a"] * 65}, "stop"),
    "stop sequences of messages": ({**CHAT, "stop_sequences": ["a"] * 65}, "stop_sequences"),
    "many stop tokens": ({**CHAT, "stop_token_ids": [1] * 1025}, "stop_token_ids"),
    "a schema of alternatives": (
        {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"schema": one_ofs(12)}}},
        "response_format",
    ),
    "a long grammar": ({**CHAT, "structured_outputs": {"grammar": "a" * 70_000}}, "structured_outputs"),
    "many messages": ({"messages": [{"role": "user", "content": "a"}] * 120_000}, "messages"),
    "many items of responses": ({"input": [{"role": "user", "content": "a"}] * 1025}, "input"),
    "many choices": ({**CHAT, "structured_outputs": {"choice": ["a"] * 1025}}, "choice"),
    "many biases": ({**CHAT, "logit_bias": {str(n): 1 for n in range(200_000)}}, "logit_bias"),
    "many tools": ({**CHAT, "tools": [{"type": "function"}] * 513}, "tools"),
    "a text beyond the context": ({"prompt": "a" * 3_800_000}, "prompt"),
    "a name beyond the context": ({"metadata": {"a" * 40_000: 1}}, "name"),
    "many conversations": ({"messages": [CHAT["messages"]] * 257}, "257 answers"),
    "many items to score": ({"query": "a", "items": ["a"] * 257}, "257 answers"),
    "many questions": ({"state": "a", "questions": {str(n): {"type": "b"} for n in range(257)}}, "257 answers"),
    "answers to many prompts": ({"prompt": ["a"] * 16, "n": 17}, "272 answers"),
    "answers in words": ({**CHAT, "n": "257"}, "257 answers"),
    "answers as a fraction of nothing": ({**CHAT, "n": 257.0}, "257 answers"),
    "answers that nobody can count": ({"prompt": ["a"] * 100, "n": 10**4299}, "answers"),
    "token ids beyond any context": ({"prompt": [[1] * 10_000] * 7}, "numbers"),
    "a list of a field that nobody knows": ({"new": ["a"] * 5000}, "new"),
    "an object of a field that nobody knows": ({"new": {str(n): 1 for n in range(5000)}}, "new"),
    "values in many small lists": ({"new": [[[1, "a"]] * 1000] * 40}, "values"),
    "nesting": ({"new": nested(40)}, "deeper"),
    "half a surrogate pair": ({**CHAT, "stop": ["\ud800"]}, "surrogate"),
    "half a surrogate pair in a name": ({**CHAT, "vllm_xargs": {"\udfff": 1}}, "surrogate"),
}


@pytest.mark.parametrize(("body", "named"), REFUSED.values(), ids=REFUSED)
def test_what_would_hold_a_router_up_is_refused_by_its_name(body: Any, named: str) -> None:
    found = why(body)
    assert found is not None
    assert named in found


SERVED = {
    "a chat": CHAT,
    "a long chat": {"messages": [{"role": "user", "content": "a" * 400}] * 2000},
    "stop strings as agents send them": {**CHAT, "stop": ["Observation:", "\n\n"] * 8},
    "many tools": {**CHAT, "tools": [{"type": "function", "function": {"name": "f", "parameters": nested(8)}}] * 128},
    "a schema": {
        **CHAT,
        "response_format": {"json_schema": {"schema": {"properties": {str(n): {} for n in range(99)}}}},
    },
    "all prompts that a request may have": {"prompt": ["a" * 4000] * 128, "n": 2},
    "the same as tokens": {"prompt": [[1] * 500] * 128},
    "biases": {**CHAT, "logit_bias": {str(n): -100 for n in range(1024)}},
    "a pair of surrogates": {**CHAT, "stop": ["😀"]},
    "the text of an escape": {**CHAT, "stop": ["\\ud800"]},
    "nothing": {},
    "a list": [],
    "a number": 1,
}


@pytest.mark.parametrize("body", SERVED.values(), ids=SERVED)
def test_what_clients_send_is_served(body: Any) -> None:
    assert why(body) is None


def test_what_is_no_json_is_left_to_the_application() -> None:
    assert judged(b"x" * 1000, LIMITS).why_refused is None
    assert judged(b'{"a": "\xff"}', LIMITS).why_refused is None


def test_lists_a_hundred_thousand_deep_are_refused() -> None:
    assert "deeper" in str(judged(b"[" * 100_000 + b"]" * 100_000, LIMITS).why_refused)


def test_images_are_as_long_as_the_body_may_be_where_the_model_sees() -> None:
    seeing = RequestLimits.of_context(2048, takes_media=True, max_body_bytes=None, max_engine_requests=256)
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 5_000_000}}
    chat = {"messages": [{"role": "user", "content": [image]}]}
    assert why(chat, seeing) is None
    assert "url" in str(why(chat))


def test_a_body_grows_with_the_context() -> None:
    long = RequestLimits.of_context(131_072, takes_media=False, max_body_bytes=None, max_engine_requests=256)
    assert long.max_body_bytes > 5_000_000
    assert why({"prompt": "a" * 2_000_000}, long) is None


@given(st.integers(1, 300), st.integers(1, 20), st.sampled_from(["prompt", "items", "messages"]))
def test_engine_requests_are_those_to_all_prompts(prompts: int, answers: int, field: str) -> None:
    each: Any = [{"role": "user"}] if field == "messages" else "a"
    assert engine_requests({field: [each] * prompts, "n": answers}) == prompts * answers


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inside: st.lists(inside, max_size=4) | st.dictionaries(st.text(max_size=8), inside, max_size=4),
)


@given(JSON)
def test_whatever_is_small_is_served(body: Any) -> None:
    assert why(body) is None


@given(JSON, st.sampled_from(["stop", "bad_words", "messages", "choice", "n", "prompt", "items"]))
def test_a_field_of_any_type_is_judged(value: Any, field: str) -> None:
    assert why({field: value}) is None or "answers" in str(why({field: value}))


def test_fields_are_named_that_ask_for_something() -> None:
    options = {"include_usage": True, "continuous_usage_stats": False}
    body = {
        "prompt": "a",
        "stream": True,
        "echo": False,
        "logprobs": None,
        "seed": 0,
        "n": 1,
        "stream_options": options,
    }
    found = {"prompt", "stream", "seed", "stream_options.include_usage"}
    assert judged(json.dumps(body).encode(), LIMITS).fields == found
    assert judged(json.dumps({**body, "n": 2}).encode(), LIMITS).fields == found | {"answers"}
    assert judged(b"[1]", LIMITS).fields == frozenset()


@pytest.mark.parametrize("answers", [2, 2.0, "2", " 2.0 "])
def test_several_answers_are_told_however_their_number_is_written(answers: Any) -> None:
    assert "answers" in judged(json.dumps({**CHAT, "n": answers}).encode(), LIMITS).fields


@pytest.mark.parametrize("answers", [1, True, "1", None, "many", [], "nan", float("nan"), -5, 0])
def test_what_is_no_number_above_one_is_one_answer_or_refused_by_the_application(answers: Any) -> None:
    assert engine_requests({"prompt": "a", "n": answers}) == 1
