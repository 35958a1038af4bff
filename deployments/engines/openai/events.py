"""Answers of OpenAI-compatible servers: what a chunk of a stream or a whole body says, and how a client gets it.

Every server names its answers itself. So that a stream can go on where another server has taken it over, and for a
client to find the model under the name that it asked for, ids, names and times are the router's own.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from deployments.engines.openai.messages import ServerOutput, ServerRequest, piece_id
from deployments.engines.openai.replay import SAID, Replay, index_of, text_of
from policies.errors import ProtocolError, ReplicaLostError

MOST_BYTES = 64 << 20
"""Of an event or a body: beyond it an answer is given up."""
MOST_TOKENS = 1 << 22
"""Of an answer: each is an entry of a list, and no model says as many."""
DONE = b"[DONE]"
_DONE_EVENT = b"data: " + DONE + b"\n\n"
_SAID = (*SAID, "tool_calls", "function_call")
_decoder, _encoder = msgspec.json.Decoder(), msgspec.json.Encoder()


class Events:
    """Cuts a stream of server-sent events into their data. Comments, which keep a line open, are left out."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Takes time in proportion to the chunk, however long an event is. Raises ProtocolError for one that does not
        end."""
        looked_at = max(len(self._rest) - 1, 0)
        self._rest += chunk.replace(b"\r", b"")  # of line ends: in JSON it is escaped
        events: list[bytearray] = []
        if self._rest.find(b"\n\n", looked_at) >= 0:
            *events, self._rest = self._rest.split(b"\n\n")
        if len(self._rest) > MOST_BYTES:
            raise ProtocolError(f"an event has more than {MOST_BYTES} bytes")
        for event in events:
            lines = [line[5:].lstrip() for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                yield bytes(b"\n".join(lines))


@dataclass(slots=True)
class Told:
    """What an answer has said so far, and what its client gets of it: all but what it has had from another server.

    Attributes:
        has_begun: its client has a part of it from here.
        tokens: of which its client was told.
        usage_tokens: of the answer, as its server counts them at the end; None where it does not.
    """

    request: ServerRequest
    has_begun: bool = False
    tokens: int = 0
    finish: str | None = None
    usage_tokens: int | None = None
    is_done: bool = False
    _ahead: list[bytes] = field(default_factory=list)
    _replay: Replay = field(init=False)

    def __post_init__(self) -> None:
        self.tokens, self._replay = len(self.request.said), Replay(self.request.said)

    def event(self, data: bytes) -> ServerOutput | None:
        """Of a stream: what a client gets of this event. None where it gets it with a later one, or not at all.

        Raises:
            ProtocolError: it is no JSON object.
        """
        if data == DONE:
            return self.end()
        said = _object(data)
        if said.get("error") is not None:
            return self._failed(_event(said) + _DONE_EVENT)
        self._note(said)
        has_choices = bool(said.get("choices"))
        try:
            choices = self._new_choices(said)
        except ReplicaLostError as error:
            return self._failed(broken_off(str(error)))
        if not choices and (has_choices or ("usage" in said and not self.request.tells_usage)):
            return None
        event = _event(self._named(said))
        pieces = [piece_id(index_of(choice), text_of(choice)) for choice in choices if _has_text(choice)]
        if not pieces:
            self._ahead.append(event)
            return None
        self.tokens += len(pieces)
        return self._output(pieces, event)

    def end(self) -> ServerOutput:
        """Of a stream that is whole."""
        self.is_done = True
        return self._output([], _DONE_EVENT, self._end())

    def _failed(self, events: bytes) -> ServerOutput:
        self.is_done = True
        return self._output([], events, "error")

    def _new_choices(self, said: dict[str, Any]) -> list[dict[str, Any]]:
        """Those of an event that say what its client has not; the others are taken out of it.

        Raises:
            ReplicaLostError: this server does not say what its client has.
        """
        choices = [choice for choice in said.get("choices") or () if self._replay.new_in(choice)]
        if "choices" in said:
            said["choices"] = choices
        return choices

    def whole(self, body: bytes) -> ServerOutput:
        """An answer in one piece. Raises ProtocolError: it is no JSON object."""
        said = _object(body)
        self._note(said)
        self.is_done = True
        return self._output([], _encoder.encode(self._named(said)), self._end())

    def _note(self, said: Mapping[str, Any]) -> None:
        for choice in said.get("choices") or ():
            self.finish = choice.get("finish_reason") or self.finish
        usage = said.get("usage")
        counted = usage.get("completion_tokens") if isinstance(usage, dict) else None
        if type(counted) is int and 0 <= counted <= MOST_TOKENS:
            self.usage_tokens = counted

    def _named(self, said: dict[str, Any]) -> dict[str, Any]:
        ours = {"id": self.request.answer_id, "created": self.request.created, "model": self.request.model}
        return said | {name: value for name, value in ours.items() if name in said}

    def _end(self) -> str:
        return "length" if self.finish == "length" else "stop"

    def _output(self, ids: list[int], part: bytes, finish: str | None = None) -> ServerOutput:
        """With what came before, so that every part of a stream but the last has text."""
        part, self._ahead, self.has_begun = b"".join([*self._ahead, part]), [], True
        if finish in ("length", "stop"):
            ids = [0] * max((self.usage_tokens or 0) - self.tokens, 0)
        return ServerOutput(
            request_id=self.request.request_id,
            new_token_ids=ids,
            finish_reason=finish,
            parts=[part],
            content_type="text/event-stream" if self.request.streams else "application/json",
        )


def _object(data: bytes) -> dict[str, Any]:
    try:
        said = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"the server's answer is no JSON: {error}") from error
    if not isinstance(said, dict) or not _are_objects(said.get("choices") or []):
        raise ProtocolError("the server's answer is no JSON object of the OpenAI API")
    return said


def _are_objects(values: object) -> bool:
    return isinstance(values, list) and all(isinstance(value, dict) for value in values)


def broken_off(why: str) -> bytes:
    """The last events of a stream that is not whole, in the form of vLLM's errors."""
    error = {"message": why, "type": "InternalServerError", "param": None, "code": 500}
    return _event({"error": error}) + _DONE_EVENT


def _event(said: Mapping[str, Any]) -> bytes:
    return b"data: " + _encoder.encode(said) + b"\n\n"


def _has_text(choice: Mapping[str, Any]) -> bool:
    """Of an event; a choice of completions has its text beside it, one of chats inside `delta`."""
    said = choice.get("delta") or choice
    return isinstance(said, dict) and any(said.get(name) for name in _SAID)
