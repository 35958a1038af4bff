"""What routers and the replica of an OpenAI-compatible server say to each other."""

import math
import zlib
from collections.abc import Mapping, Sequence

import msgspec
from msgspec.structs import replace

from policies.router.tickets import Ticket
from router.cached_blocks import BlockHashes, BlockHashing
from router.codec import Output, Recovery, RequestSize
from router.trail import TraceHeaders
from router.wire import Buffer

ENGINE_VERSION = "openai-2"
"""Of the structures below: routers and replicas of unlike ones have nothing to say to each other."""
BYTES_PER_TOKEN = 4
"""Of a prompt in UTF-8, for want of its tokenizer: about right for English, and for Chinese three of four."""


class ServerRequest(msgspec.Struct, kw_only=True):
    """One request as its server is to get it.

    Attributes:
        path: where it goes, as `/v1/chat/completions`.
        body: JSON for that.
        answer_id: the answer's id, on whatever server it is made.
        created: seconds since 1970, for the same reason.
        model: the answer's, as clients call it.
        tells_usage: its client wants the last chunk of a stream to say how many tokens there were.
        prompt_tokens: about as many as its prompt has.
        pieces: of its prompt, a number for each BYTES_PER_TOKEN: equal prompts begin with equal numbers. Stays in the
            router.
        unread_tokens, unread_at: of its prompt, as its ticket says; of replicas that are taken to have some of it.
        said: what its client has of the answer already, by `piece_id`.
    """

    request_id: str
    path: str
    body: bytes
    answer_id: str
    created: int
    model: str
    streams: bool = False
    tells_usage: bool = False
    prompt_tokens: int = 1
    max_output_tokens: int | None = None
    pieces: Sequence[int] = ()
    salt: str = ""
    unread_tokens: int | None = None
    unread_at: Mapping[str, int] = {}
    said: Sequence[int] = ()
    trace: TraceHeaders | None = None


class ServerOutput(msgspec.Struct, kw_only=True):
    """What has come of one answer.

    Attributes:
        new_token_ids: of a stream the `piece_id` of each event that has text; at the end one for each token that no
            event told of.
        parts: of the body; of a stream each of those events, and what follows the last.
        status, content_type: of the response that they belong to.
    """

    request_id: str
    new_token_ids: list[int] = []
    finish_reason: str | None = None
    parts: list[bytes] = []
    status: int = 200
    content_type: str = "application/json"


Outputs = list[ServerOutput]


def piece_id(choice: int, said: str) -> int:
    """Of a piece of a choice's text: which choice (8 bits), how many characters (26) and their checksum (30)."""
    return (choice & 0xFF) << 56 | len(said) << 30 | zlib.crc32(said.encode(errors="replace")) & 0x3FFF_FFFF


def piece_of(number: int) -> tuple[int, int]:
    """The choice of a piece, and its characters."""
    return number >> 56, number >> 30 & 0x3FF_FFFF


class OpenAiCodec:
    """`router.codec.EngineCodec` and `deployments.engines.base.RelayCodec` of such a server."""

    engine_version = ENGINE_VERSION

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._requests = msgspec.msgpack.Decoder(ServerRequest)
        self._outputs = msgspec.msgpack.Decoder(Outputs)

    def size(self, request: ServerRequest) -> RequestSize:
        return RequestSize(
            request_id=request.request_id,
            prompt_tokens=request.prompt_tokens,
            max_output_tokens=request.max_output_tokens,
            prompt_token_ids=request.pieces,
            salt=request.salt,
        )

    def block_hashes(self, request: ServerRequest, hashing: BlockHashing) -> BlockHashes:
        """None: a server tells nothing of its cache."""
        return ()

    def with_ticket(
        self,
        request: ServerRequest,
        ticket: Ticket,
        *,
        ttft_left_s: float | None,
        e2e_left_s: float | None,
        resumed: bool = False,
        comes_back: bool | None = None,
    ) -> ServerRequest:
        unread_at = {replica_id: ticket.unread_at(replica_id) for replica_id, _ in ticket.prefixes}
        return replace(request, pieces=(), unread_tokens=ticket.unread_tokens, unread_at=unread_at)

    def with_trace(self, request: ServerRequest, headers: TraceHeaders) -> ServerRequest:
        return replace(request, trace=headers)

    def take_trace(self, request: ServerRequest) -> TraceHeaders | None:
        """They stay: the server may make spans of its own."""
        return request.trace

    def unread_tokens(self, request: ServerRequest, replica_id: str) -> int:
        everywhere = request.prompt_tokens if request.unread_tokens is None else request.unread_tokens
        return request.unread_at.get(replica_id, everywhere)

    def cached_tokens(self, output: Output) -> int | None:
        """Unknown: a server says it with the last output, if at all."""
        return None

    def loaded_tokens(self, output: Output) -> int:
        """Servers do not say."""
        return 0

    def encode_request(self, request: ServerRequest) -> Sequence[Buffer]:
        return [self._encoder.encode(request)]

    def decode_request(self, parts: Sequence[Buffer]) -> ServerRequest:
        return self._requests.decode(parts[0])

    def encode_outputs(self, batch: Outputs, outputs: Sequence[ServerOutput]) -> Sequence[Buffer]:
        return [self._encoder.encode(list(outputs))]

    def decode_outputs(self, parts: Sequence[Buffer]) -> Outputs:
        return self._outputs.decode(parts[0])

    def outputs(self, batch: Outputs) -> Sequence[ServerOutput]:
        return batch

    def keep(self, batch: Outputs, outputs: Sequence[ServerOutput]) -> Outputs:
        return list(outputs)

    def drop_first(self, output: ServerOutput, tokens: int) -> None:
        """Nothing is repeated: a replica leaves out what was said."""

    def resumable(self, request: ServerRequest) -> bool:
        """No server goes on with half of an answer: it says all of it again, of which its replica leaves out `said`."""
        return False

    def in_one_piece(self, request: ServerRequest) -> bool:
        return not request.streams

    def recover(self, request: ServerRequest, sent: Sequence[int]) -> Recovery[ServerRequest]:
        return Recovery(replace(request, said=(*request.said, *sent)))

    def failed(self, request_id: str) -> Outputs:
        return [ServerOutput(request_id=request_id, finish_reason="error", status=503)]


def pieces_of(text: bytes) -> list[int]:
    """A number for each BYTES_PER_TOKEN of a prompt, the rest at its end rounded up."""
    padded = text.ljust(BYTES_PER_TOKEN * math.ceil(len(text) / BYTES_PER_TOKEN), b"\0")
    return list(memoryview(padded).cast("I"))
