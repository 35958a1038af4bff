"""What Ray Serve's prefix-aware router is given to compare."""

import json

import pytest

from bench.peers.ray_prefix_router import Asked, PrefixCacheAffinityRouter


@pytest.mark.parametrize(("prompt", "text"), [([300, 3999, 300], "\u012c\u0f9f\u012c"), ("A river", "A river")])
def test_rays_router_sees_a_character_for_each_token_and_the_engine_the_body_as_it_was(
    prompt: list[int] | str, text: str
) -> None:
    body = json.dumps({"prompt": prompt}).encode()
    asked = Asked.of(body, json.loads(body))
    assert (asked.prompt, asked.body) == (text, body)
    assert PrefixCacheAffinityRouter._normalize_prompt_to_string(None, asked.prompt) == text
