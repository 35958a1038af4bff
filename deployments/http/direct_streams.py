"""Streams whose text goes from the engine's output loop straight to the connection, past the front end.

A token then costs no object, queue, task or layer of its own. The front end writes a stream's first events itself. The
first of them that brings text is the template of those that follow, and from then on each new text is written into it
and sent. The front end is told of all that text at once, with the last output, as it would be had it lagged behind: so
it counts, stores and ends the stream as ever, and of its event only what the client has not seen yet goes out.
"""

import asyncio
import json
from collections.abc import Callable, Coroutine, Generator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

_NUMBER = b'"sequence_number":'
_DECODER = json.JSONDecoder()
_encoded = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamKind:
    """How the events of one route look, and which requests get no others.

    Attributes:
        path: of the route.
        opening: what stands right before the text, in events that bring some and in no others. It holds quotation
            marks, which have a backslash before them where they are a part of a text.
        sends_empty: an output without text makes an event too.
        numbered: events have numbers that follow one another.
        fields: of its bodies, as `deployments.http.limits.Judged.fields` names them: with these alone all its events
            that bring text look the same.
    """

    path: str
    opening: bytes
    sends_empty: bool = True
    numbered: bool = False
    fields: frozenset[str]

    def text_in(self, event: bytes) -> "_Text | None":
        """None where it brings none."""
        start = event.find(self.opening)
        if start < 0:
            return None
        start += len(self.opening)
        if event[start : start + 1] != b'"':  # null
            return None
        rest = event[start:].decode()
        text, end = _DECODER.raw_decode(rest)
        return _Text(text, event[:start], rest[end:].encode())


class _Text(NamedTuple):
    text: str
    before: bytes
    after: bytes


_SAMPLING = frozenset(
    {"temperature", "top_p", "top_k", "min_p", "seed", "logit_bias", "bad_words", "allowed_token_ids"}
    | {"presence_penalty", "frequency_penalty", "repetition_penalty", "length_penalty"}
    | {"min_tokens", "ignore_eos", "stop_token_ids", "include_stop_str_in_output"}
    | {"skip_special_tokens", "spaces_between_special_tokens"}
)
_ANY = frozenset(
    {"model", "stream", "user", "metadata", "priority", "request_id", "service_tier", "session_id"}
    | {"cache_salt", "prompt_cache_key", "safety_identifier", "truncate_prompt_tokens", "add_special_tokens"}
)
_OPENAI = frozenset(
    {"stop", "max_tokens", "stream_options.include_usage", "response_format", "structured_outputs"} | _SAMPLING | _ANY
)
# What is not named here goes through the front end: several answers, echoes, log probabilities, token ids, tools, usage
# in every event, and whatever later versions bring.
_KINDS = (
    StreamKind(
        path="/v1/chat/completions",
        opening=b'"delta":{"content":',
        fields=_OPENAI
        | {"messages", "max_completion_tokens", "chat_template", "chat_template_kwargs", "add_generation_prompt"}
        | {"continue_final_message", "documents", "reasoning_effort"},
    ),
    StreamKind(path="/v1/completions", opening=b'"text":', fields=_OPENAI | {"prompt"}),
    StreamKind(
        path="/v1/messages",
        opening=b'"delta":{"type":"text_delta","text":',
        sends_empty=False,
        fields=frozenset(
            {"model", "messages", "system", "max_tokens", "stop_sequences", "stream", "metadata"}
            | {"temperature", "top_p", "top_k"}
        ),
    ),
    StreamKind(
        path="/v1/responses",
        opening=b'event: response.output_text.delta\ndata: {"content_index":0,"delta":',
        sends_empty=False,
        numbered=True,
        fields=_SAMPLING
        | _ANY
        | {"input", "instructions", "max_output_tokens", "previous_response_id", "store", "text", "truncation"},
    ),
)
STREAM_KINDS: Mapping[str, StreamKind] = MappingProxyType({kind.path: kind for kind in _KINDS})


def stream_kind(path: str, fields: frozenset[str]) -> StreamKind | None:
    """Of a request with these fields; None where its stream goes through the front end."""
    kind = STREAM_KINDS.get(path)
    return kind if kind is not None and "stream" in fields and fields <= kind.fields else None


@dataclass(slots=True, eq=False)
class DirectStream:
    """The events of one response. The engine's side calls `claim`, `gave` and `write`, the connection's side `passing`
    and `close`.

    Attributes:
        kind: of its route.
        send: one piece of the body, to the connection. Returns when that takes more.
    """

    kind: StreamKind
    send: Callable[[bytes], Coroutine[Any, Any, None]]
    _claims: int = 0
    _given: int = 0
    _shown: int = 0
    _ahead: int = 0
    _template: tuple[bytes, bytes] | None = None
    _number: int = 0
    _added: int = 0
    _unsent: list[str] | None = None
    _sending: "asyncio.Task[None] | None" = None
    _failure: Exception | None = None
    _is_over: bool = False

    def claim(self) -> None:
        """An engine request begins, whose text this stream shall bring. With a second one none goes past."""
        self._claims += 1

    def gave(self, text: str) -> None:
        """The front end was given this text to make events of."""
        self._given += len(text)

    @property
    def path(self) -> str:
        """Of its route."""
        return self.kind.path

    @property
    def is_open(self) -> bool:
        """The front end has told how events look, and holds no text that its client has not got."""
        return self._template is not None and self._given == self._shown and self._claims == 1

    def write(self, text: str) -> None:
        """Send an event with this text. While the connection takes no more, texts wait and become one event.

        Raises no error: `passing` raises what sending did.
        """
        self._ahead += len(text)
        if self._unsent is not None:
            self._unsent.append(text)
        else:
            self._begin(text)

    def _begin(self, text: str) -> None:
        if self._is_over or self._failure is not None or not (text or self.kind.sends_empty):
            return
        sending = self.send(self._event(text))
        try:
            waits_for = sending.send(None)
        except StopIteration:
            return
        except Exception as error:
            self._failure = error
            return
        self._unsent = []
        self._sending = asyncio.ensure_future(self._rest(sending, waits_for))

    async def _rest(self, sending: Coroutine[Any, Any, None], waits_for: Any) -> None:
        """Send what the connection did not take at once, and what has come meanwhile."""
        try:
            await _Resumed(sending, waits_for)
            while self._unsent and not self._is_over:
                text, self._unsent = "".join(self._unsent), []
                if text or self.kind.sends_empty:
                    await self.send(self._event(text))
        except Exception as error:
            self._failure = error
        finally:
            self._unsent = None

    def _event(self, text: str) -> bytes:
        assert self._template is not None, "it is open"
        before, after = self._template
        if self.kind.numbered:
            self._added += 1
            after = _with_number(after, self._number + self._added)
        return before + _encoded(text) + after

    async def passing(self, event: bytes) -> bytes:
        """What of the front end's event goes to the connection, empty for nothing, once all texts before it are sent.

        Raises:
            Exception: of any kind, that sending a text has raised.
        """
        if self._sending is not None:
            await asyncio.wait([self._sending])
            self._sending = None
        if self._failure is not None:
            raise self._failure
        if not self._claims:
            return event
        found = self.kind.text_in(event)
        if found is None:
            return self._renumbered(event)
        self._shown += len(found.text)
        if self._template is None:
            self._template = found.before, found.after
        ahead, self._ahead = self._ahead, 0
        if not ahead:
            return self._renumbered(event)
        if ahead == len(found.text) and not self.kind.sends_empty:
            self._added -= 1
            return b""
        return found.before + _encoded(found.text[ahead:]) + self._renumbered(found.after)

    def _renumbered(self, event: bytes) -> bytes:
        """With the events counted that the front end does not know."""
        if not self.kind.numbered or (place := _number_in(event)) is None:
            return event
        self._number = int(event[place])
        return _with_number(event, self._number + self._added)

    def close(self) -> None:
        """The exchange is over."""
        self._is_over = True
        if self._sending is not None:
            self._sending.cancel()


def _number_in(event: bytes) -> slice | None:
    """Where an event of the Responses API has its number: the last field of that name. Behind it come strings alone, in
    which quotation marks have a backslash."""
    start = event.rfind(_NUMBER)
    if start < 0:
        return None
    start += len(_NUMBER)
    return slice(start, event.index(b",", start))


def _with_number(event: bytes, number: int) -> bytes:
    place = _number_in(event)
    assert place is not None, "it has one"
    return event[: place.start] + b"%d" % number + event[place.stop :]


class _Resumed:
    """A coroutine that was begun outside of any task and waits for something, from there on."""

    def __init__(self, coroutine: Coroutine[Any, Any, None], waits_for: Any) -> None:
        self._coroutine, self._waits_for = coroutine, waits_for

    def __await__(self) -> Generator[Any, Any, None]:
        try:
            yield self._waits_for
            yield from self._coroutine.__await__()
        finally:
            self._coroutine.close()
