"""What a load run sends: seeded prompts as ready-made request bodies.

`ignore_eos` (an extension of vLLM) makes every answer exactly `max_tokens` long, so two servers do the same work.
Sluice then knows the length of each answer, as it does of any request that says so.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

import msgspec

VOCABULARY = (
    "water light mountain engine letter garden market river window history number machine winter music island doctor "
    "language forest picture kitchen teacher paper planet bridge morning animal village science ocean travel question "
    "answer simple quick heavy bright early narrow old new write explain compare describe count build carry follow "
    "remember between under before after without because although seven twelve forty"
)


PROMPT_WORDS = 16, 96  # least and most of a prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig:
    """Raises: ValueError: a number that is not positive, or a url that is not http://host[:port][/prefix]."""

    url: str
    model: str
    concurrency: int
    requests: int
    max_tokens: int = 128
    seed: int = 0
    timeout_s: float = 120.0

    def __post_init__(self) -> None:
        for name in ("concurrency", "requests", "max_tokens", "timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        parts = urlsplit(self.url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"url must look like http://127.0.0.1:8000, got {self.url!r}")


def prompt_texts(config: LoadConfig) -> Iterator[str]:
    """`config.requests` different prompts. The number in front keeps prefix caches from sharing what follows it."""
    rng = random.Random(config.seed)
    vocabulary = VOCABULARY.split()
    for number in range(config.requests):
        words = rng.choices(vocabulary, k=rng.randint(*PROMPT_WORDS))
        yield f"Question {rng.randrange(10**6)}-{number}: {' '.join(words)}?"


def request_bodies(config: LoadConfig) -> list[bytes]:
    return [_request_body(config, text) for text in prompt_texts(config)]


def _request_body(config: LoadConfig, text: str) -> bytes:
    return msgspec.json.encode(
        {
            "model": config.model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": config.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
