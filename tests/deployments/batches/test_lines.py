"""Lines of a batch's input, and what is told of wrong ones."""

import json
from typing import Any

import pytest

from deployments.batches import lines as module
from deployments.batches.lines import MAX_ERRORS, LineError, WrongLineError, parsed, validated

CHAT = "/v1/chat/completions"
MODELS = ("m", "other")


def line(custom_id: str = "a", **changes: Any) -> bytes:
    whole = {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": {"model": "m", "messages": []}, **changes}
    return json.dumps(whole).encode() + b"\n"


def found(*lines: bytes, max_lines: int = 100) -> list[LineError]:
    return validated(lines, CHAT, MODELS, max_lines).errors


def test_a_line_keeps_its_body_as_it_stands() -> None:
    raw = b'{"custom_id":"a","method":"POST","url":"/v1/chat/completions","body":{"model":"m",  "x":1.50}}'
    assert parsed(7, raw, CHAT).body == b'{"model":"m",  "x":1.50}'


@pytest.mark.parametrize(
    ("wrong", "code", "param"),
    [
        (b"{", "invalid_json_line", None),
        (b'"text"', "invalid_json_line", None),
        (b"\xff\xfe", "invalid_json_line", None),
        (b"[" * 100_000, "invalid_json_line", None),
        (line(body=[]), "invalid_json_line", None),
        (line(body={"messages": []}), "invalid_json_line", None),
        (line(custom_id=""), "invalid_custom_id", "custom_id"),
        (line(custom_id="a" * 513), "invalid_custom_id", "custom_id"),
        (line(method="GET"), "invalid_method", "method"),
        (line(url="/v1/completions"), "invalid_url", "url"),
        (line(body={"model": "m", "stream": True}), "invalid_request", "body.stream"),
    ],
)
def test_a_wrong_line_is_named_with_its_number(wrong: bytes, code: str, param: str | None) -> None:
    with pytest.raises(WrongLineError) as raised:
        parsed(3, wrong, CHAT)
    error = raised.value.error
    assert (error.code, error.line, error.param) == (code, 3, param)


def test_a_whole_input_tells_its_requests_its_last_line_and_its_model() -> None:
    whole = validated([line("a"), b"\n", line("b")], CHAT, MODELS, 100)
    assert (whole.total, whole.last, whole.model, whole.errors) == (2, 3, "m", [])


def test_an_id_that_comes_again_is_named_with_the_line_that_has_it_already() -> None:
    repeated = found(line("a"), line("b"), line("a"), line("a"))
    assert [(error.code, error.line) for error in repeated] == [("duplicate_custom_id", 3), ("duplicate_custom_id", 4)]
    assert "line 1" in repeated[0].message


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        ([line("a"), line("b", body={"model": "other"})], ("mismatched_model", 2, "body.model")),
        ([line("a", body={"model": "gone"})], ("model_not_found", 1, "body.model")),
        ([b"\n"], ("empty_file", None, None)),
        ([line(each) for each in "abcd"], ("too_many_lines", None, None)),
        ([line("a"), *[b"\n"] * 6], ("too_many_blank_lines", None, None)),
        ([line("a" * 200)], ("line_too_long", 1, None)),
    ],
    ids=lambda given: given[0] if isinstance(given, tuple) else "",
)
def test_what_is_no_batch_is_named(
    lines: list[bytes], error: tuple[str, int | None, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_LINE_BYTES", 150)
    monkeypatch.setattr(module, "MAX_BLANK_LINES", 5)
    (told,) = found(*lines, max_lines=3)
    assert (told.code, told.line, told.param) == error
    assert told.code != "model_not_found" or "'gone'; there are m, other" in told.message


def test_no_more_errors_are_told_than_are_of_use() -> None:
    assert len(found(*[b"{"] * 1000, max_lines=1000)) == MAX_ERRORS
    assert len(found(*[line("a")] * 1000, max_lines=1000)) == MAX_ERRORS
