"""Limits of one HTTP request, judged by its decoded JSON before anything is done with it.

A front end works on its event loop: on what it validates, copies and matches there, every stream of the router waits.
So everything that such work is proportional to is bounded here, on every route, and for fields of later versions too.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from deployments.http.sessions import named_in
from policies.checks import require_at_least

_COUNTED = 1_000_000_000  # answers; a number of many more digits could not even be shown
# JSON keys under which clients send images and sounds: those are neither tokenized nor copied as text.
_MEDIA_KEYS = frozenset(
    {"url", "data", "file_data", "image_url", "audio_url", "video_url", "images", "audio", "videos"}
)


class FieldLimit(NamedTuple):
    """Limits of a field at any place: entries of its list or object, and characters of all its strings together."""

    entries: int
    chars: int | None = None


# Fields that cost more than their size. vLLM looks for each stop string in every token's text, tokenizes bad words on
# the event loop, copies schemas with every request, and makes a tensor's row of each bias.
FIELD_LIMITS: Mapping[str, FieldLimit] = MappingProxyType(
    {
        "messages": FieldLimit(2048),
        "input": FieldLimit(1024),
        "tools": FieldLimit(512, 1 << 18),
        "stop": FieldLimit(64, 4096),
        "stop_sequences": FieldLimit(64, 4096),
        "stop_token_ids": FieldLimit(1024),
        "bad_words": FieldLimit(256, 4096),
        "logit_bias": FieldLimit(1024, 1 << 14),
        "choice": FieldLimit(1024, 1 << 16),
        "structured_outputs": FieldLimit(64, 1 << 16),
        "response_format": FieldLimit(64, 1 << 16),
        "output_config": FieldLimit(64, 1 << 16),
        "output_format": FieldLimit(64, 1 << 16),
        "vllm_xargs": FieldLimit(256, 1 << 16),
        "chat_template": FieldLimit(1, 1 << 16),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """Bounds of one request.

    Attributes:
        max_body_bytes: the size of the body as it comes.
        max_text_chars: the length of one string, media apart.
        max_numbers: token ids and other numbers in lists, all together.
        max_values: JSON values besides those.
        max_entries: the entries of one list or object.
        max_depth: lists and objects inside each other.
        max_engine_requests: prompts, conversations or items, times answers to each.
        takes_media: whether the model takes images or sounds.

    Raises:
        ConfigError: one is below 1.
    """

    max_body_bytes: int
    max_text_chars: int
    max_numbers: int
    max_values: int = 1 << 15
    max_entries: int = 4096
    max_depth: int = 64
    max_engine_requests: int = 256
    takes_media: bool = False

    def __post_init__(self) -> None:
        require_at_least(1, self, "max_body_bytes", "max_text_chars", "max_numbers", "max_engine_requests")

    @classmethod
    def of_context(
        cls, context_tokens: int, *, takes_media: bool, max_body_bytes: int | None, max_engine_requests: int
    ) -> "RequestLimits":
        """For a context of this many tokens, prompt and answer together; from it max_body_bytes follows if None."""
        # A short context may come with long schemas and tools, and media come in base64.
        least_bytes = 64 << 20 if takes_media else 1 << 20
        return cls(
            # Room for several prompts, and for what JSON adds.
            max_body_bytes=max_body_bytes or least_bytes + 32 * context_tokens,
            # Far beyond any language's mean: a text with more characters for each token of the context cannot fit.
            max_text_chars=max(1024, 16 * context_tokens),
            # Several prompts of token ids, or many short ones to embed.
            max_numbers=max(1 << 16, 4 * context_tokens),
            max_engine_requests=max_engine_requests,
            takes_media=takes_media,
        )


class Judged(NamedTuple):
    """The judgement of a body.

    Attributes:
        why_refused: in words for its client; None takes it.
        service_tier: its value, of any type; None without one.
        in_one_piece: its client waits for the whole answer: it asks for no stream, and for no work in the background.
        fields: names of its fields with a value besides null and false, those of `stream_options` by themselves, as
            stream_options.include_usage; with "answers" where it asks for more than one. Empty for what is no object.
        session: the name of its session; None where it has none.
    """

    why_refused: str | None
    service_tier: Any = None
    in_one_piece: bool = False
    fields: frozenset[str] = frozenset()
    session: str | None = None


def judged(body: bytes | bytearray, limits: RequestLimits) -> Judged:
    """Decoded as FastAPI will decode it; a body that is no JSON is left to it. Takes time in proportion to the body."""
    try:
        value = json.loads(body)
    except RecursionError:
        return Judged(f"the body nests deeper than {limits.max_depth}")
    except ValueError:
        return Judged(None)
    why = _why_large(value, limits) or _why_unencodable(body, value) or _why_many(value, limits)
    if not isinstance(value, dict):
        return Judged(why)
    in_one_piece = not (value.get("stream") or value.get("background"))
    return Judged(why, value.get("service_tier"), in_one_piece, frozenset(_fields(value)), named_in(value))


def _fields(body: Mapping[str, Any]) -> Iterable[str]:
    for name, value in body.items():
        if name == "stream_options" and isinstance(value, dict):
            yield from (f"{name}.{option}" for option, asked in value.items() if asked not in (None, False))
        elif name == "n":
            continue
        elif value is not None and value is not False:
            yield name
    if engine_requests(body) > 1:
        yield "answers"


class _Node(NamedTuple):
    """A JSON value; those of a list go by the list's key."""

    value: Any
    key: str
    depth: int


def _why_large(body: Any, limits: RequestLimits) -> str | None:
    values = numbers = 0
    waiting = [_Node(body, "the body", 1)]
    while waiting:
        node = waiting.pop()
        values += 1
        if why := _why_node(node, limits):
            return why
        if isinstance(node.value, list) and _are_numbers(node.value):
            numbers += len(node.value)
        else:
            waiting += _inside(node)
        if numbers > limits.max_numbers:
            return f"the body has more than {limits.max_numbers} numbers in lists"
        if values + len(waiting) > limits.max_values:
            return f"the body has more than {limits.max_values} values"
    return None


def _inside(node: _Node) -> Iterable[_Node]:
    if isinstance(node.value, dict):
        return [_Node(each, name, node.depth + 1) for name, each in node.value.items()]
    if isinstance(node.value, list):
        return [_Node(each, node.key, node.depth + 1) for each in node.value]
    return ()


def _why_node(node: _Node, limits: RequestLimits) -> str | None:
    """Why a value is refused, what is inside it apart; of a field that has a limit of its own, all of it."""
    value, key, depth = node
    if not isinstance(value, str | list | dict):
        return None
    if depth > limits.max_depth:
        return f"the body nests deeper than {limits.max_depth}"
    limit = FIELD_LIMITS.get(key)
    if isinstance(value, str):
        if len(value) > limits.max_text_chars and not (limits.takes_media and key in _MEDIA_KEYS):
            return _beyond(key, len(value), "characters", limits.max_text_chars)
    else:
        most = limits.max_entries if limit is None else limit.entries
        if len(value) > most and (limit is not None or not _are_numbers(value)):
            return _beyond(key, len(value), "entries", most)
        if isinstance(value, dict) and (longest := max(map(len, value), default=0)) > limits.max_text_chars:
            return _beyond(f"a name in {key}", longest, "characters", limits.max_text_chars)
    if limit is not None and limit.chars is not None and (chars := _chars(value)) > limit.chars:
        return _beyond(key, chars, "characters", limit.chars)
    return None


def _beyond(key: str, found: int, what: str, most: int) -> str:
    return f"{key} has {found} {what}, and {most} is the most"


def _are_numbers(values: Any) -> bool:
    return isinstance(values, list) and set(map(type, values)) <= {int, float}


def _chars(value: Any) -> int:
    """Characters of all strings in it, names included."""
    chars, waiting = 0, [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, str):
            chars += len(each)
        elif isinstance(each, dict):
            chars += sum(map(len, each))
            waiting += each.values()
        elif isinstance(each, list) and not _are_numbers(each):
            waiting += each
    return chars


def _why_unencodable(body: bytes | bytearray, value: Any) -> str | None:
    """A lone half of a surrogate pair, which JSON can escape and UTF-8 cannot hold, so that it reaches no engine."""
    if b"\\ud" not in body and b"\\uD" not in body:
        return None
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return "the body has a lone surrogate (\\ud800 to \\udfff), which is no character"
    return None


def _why_many(body: Any, limits: RequestLimits) -> str | None:
    if isinstance(body, dict) and (asked := engine_requests(body)) > limits.max_engine_requests:
        return (
            f"it asks for {asked} answers, and {limits.max_engine_requests} is the most of one request "
            "(router.max_engine_requests)"
        )
    return None


def engine_requests(body: Mapping[str, Any]) -> int:
    """How many requests to engines it makes: prompts, conversations, items or questions, times answers to each."""
    of_each = [_listed(body.get(name)) for name in ("prompt", "items", "questions")]
    conversations = body.get("messages")
    if isinstance(conversations, list) and conversations and isinstance(conversations[0], list):
        of_each.append(len(conversations))
    return max(of_each) * max(1, _whole(body.get("n")), _whole(body.get("best_of")))


def _whole(value: Any) -> int:
    """As front ends read it, to whom `2.0` and "2" are 2; no more than _COUNTED, and 0 for what is no number."""
    if not isinstance(value, int | float | str):
        return 0
    try:
        return int(min(float(value), _COUNTED))
    except OverflowError:
        return _COUNTED
    except ValueError:
        return 0


def _listed(value: Any) -> int:
    """A list of numbers is one prompt of token ids."""
    if isinstance(value, Sequence | Mapping) and not isinstance(value, str):
        return 1 if _are_numbers(value) else len(value)
    return 1
