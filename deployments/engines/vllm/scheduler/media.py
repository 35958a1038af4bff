"""Images and sounds of requests, as vLLM's scheduler has them: the step that reaches one encodes all of it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vllm.v1.request import Request


def encodes_media(scheduler: Any) -> bool:
    return bool(scheduler.max_num_encoder_input_tokens > 0)


def unread_media(request: Request) -> int:
    """Tokens of media that are not wholly computed."""
    return sum(request.get_num_encoder_embeds(number) for number in _unread(request))


def next_encoded(scheduler: Any, request: Request) -> int:
    """Tokens of its next image or sound; 0 where there is none, or the encoder's cache has it."""
    number = next(_unread(request), None)
    if number is None or request.mm_features[number].identifier in scheduler.encoder_cache_manager.cached:
        return 0
    return request.get_num_encoder_embeds(number)


def encoded(requests: Mapping[str, Request], scheduled: Mapping[str, Sequence[int]]) -> int:
    """Tokens that a step encodes; scheduled: by request the numbers of its media."""
    return sum(
        requests[name].get_num_encoder_embeds(number) for name, numbers in scheduled.items() for number in numbers
    )


def _unread(request: Request) -> Iterator[int]:
    """Numbers of these, as they stand in the prompt."""
    for number, feature in enumerate(request.mm_features):
        if feature.mm_position.offset + feature.mm_position.length > request.num_computed_tokens:
            yield number
