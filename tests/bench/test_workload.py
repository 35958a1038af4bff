import dataclasses
from typing import Any

import msgspec
import pytest

from bench.workload import LoadConfig, prompt_texts, request_bodies


def make_config(**changes: Any) -> LoadConfig:
    config = LoadConfig(url="http://127.0.0.1:8000", model="demo", concurrency=2, requests=5)
    return dataclasses.replace(config, **changes)


def test_the_same_seed_gives_the_same_prompts_and_another_seed_others() -> None:
    first, again, other = (list(prompt_texts(make_config(seed=seed))) for seed in (7, 7, 8))
    assert first == again
    assert not set(first) & set(other)


def test_prompts_differ_from_each_other_and_keep_their_length_bounds() -> None:
    texts = list(prompt_texts(make_config(requests=50)))
    assert len(set(texts)) == 50
    assert all(16 <= len(text.split(": ")[1].split()) <= 96 for text in texts)


def test_a_body_asks_for_a_stream_of_exactly_max_tokens_with_usage() -> None:
    body = msgspec.json.decode(request_bodies(make_config(max_tokens=9))[0])
    assert body["model"] == "demo"
    assert body["messages"][0]["role"] == "user"
    assert body["stream"] and body["ignore_eos"] and body["stream_options"] == {"include_usage": True}
    assert (body["max_tokens"], body["temperature"]) == (9, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"concurrency": 0}, "concurrency must be positive, got 0"),
        ({"timeout_s": -1.0}, "timeout_s must be positive"),
        ({"url": "https://example.org"}, "url must look like http://"),
        ({"url": "127.0.0.1:8000"}, "url must look like http://"),
    ],
)
def test_unusable_settings_are_named_with_their_value(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_config(**changes)
