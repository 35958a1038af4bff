"""The engine's structures, as far as the routed client must touch them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from policies.router.tickets import Ticket
from policies.router.tiers import Load
from router.cached_blocks import BlockHashes, BlockHashing
from router.trail import TraceHeaders
from router.wire import Buffer

RequestT = TypeVar("RequestT")
OutputsT = TypeVar("OutputsT")


WHOLE = ("stop", "length", "repetition")
"""How an answer ends that nothing broke off: by itself, at its limit, or where its client bounds repetitions."""


class Output(Protocol):
    """One request's share of an engine step.

    str(finish_reason) is one of WHOLE, "abort", "error", or "cancelled" where its client asked for what cannot be.
    """

    request_id: str
    new_token_ids: list[int]
    finish_reason: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSize:
    """What a request says of its own length, and what is known of its prompt.

    Attributes:
        min_output_tokens: the answer does not end before, so it counts as no shorter.
        media_tokens: of the prompt, those that stand for images and sounds, which are encoded first.
        salt: prompts have a prefix in common only where this is equal too.
        blocks: of its prompt; none where no replica tells what it has cached.
        hashing: by which they were hashed.
        hits: tokens of its prompt that replicas need not read, 0 included, by the id of those that tell: what they have
            cached, and what their loads save.
        loads: what they had best load of it from tiers beyond the GPU; without those that had better load nothing.
    """

    request_id: str
    prompt_tokens: int
    max_output_tokens: int | None
    min_output_tokens: int = 0
    media_tokens: int = 0
    prompt_token_ids: Sequence[int] = ()
    salt: str = ""
    blocks: BlockHashes = ()
    hashing: BlockHashing | None = None
    hits: Mapping[str, int] = field(default_factory=dict)
    loads: Mapping[str, Load] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Recovery(Generic[RequestT]):
    """How a request goes on elsewhere: what to send, and the tokens that its new stream repeats first."""

    request: RequestT
    repeats: tuple[int, ...] = ()


class EngineCodec(Protocol[RequestT, OutputsT]):
    """Turns the engine's structures into parts of a frame and back."""

    engine_version: str

    def size(self, request: RequestT) -> RequestSize: ...

    def block_hashes(self, request: RequestT, hashing: BlockHashing) -> BlockHashes:
        """Hashes of its prompt's whole blocks, as an engine would look them up; none where it would not. About 2 us a
        block, in any thread."""

    def with_ticket(
        self,
        request: RequestT,
        ticket: Ticket,
        *,
        ttft_left_s: float | None,
        e2e_left_s: float | None,
        resumed: bool = False,
        comes_back: bool | None = None,
    ) -> RequestT:
        """The request, telling the engine what its ticket says of it.

        Args:
            ttft_left_s: until its first token is due, below 0 when it is late; None when nothing is due.
            e2e_left_s: the same of its last token.
            resumed: its client has a part of the answer.
            comes_back: its session will probably have another turn; None without a session.
        """

    def with_trace(self, request: RequestT, headers: TraceHeaders) -> RequestT:
        """The request, telling the replica which trace it is a part of; also once it goes on elsewhere."""

    def unread_tokens(self, request: RequestT, replica_id: str) -> int:
        """Tokens of its prompt that its ticket counts as unread on this replica; all without a ticket."""

    def cached_tokens(self, output: Output) -> int | None:
        """How many tokens of its prompt the engine had in its cache, said with a first output; None where it is not."""

    def loaded_tokens(self, output: Output) -> int:
        """Of those, how many it loaded from beyond the GPU."""

    def encode_request(self, request: RequestT) -> Sequence[Buffer]: ...

    def decode_outputs(self, parts: Sequence[Buffer]) -> OutputsT: ...

    def outputs(self, batch: OutputsT) -> Sequence[Output]: ...

    def keep(self, batch: OutputsT, outputs: Sequence[Output]) -> OutputsT:
        """The same batch with only these outputs."""

    def drop_first(self, output: Output, tokens: int) -> None:
        """Take the first of its new tokens out of an output, with all that belongs to them."""

    def resumable(self, request: RequestT) -> bool:
        """Whether a part of its answer can be continued elsewhere exactly, without computing it again."""

    def in_one_piece(self, request: RequestT) -> bool:
        """Whether no client looks at a part of its answer: until its end it may begin anew."""

    def recover(self, request: RequestT, sent: Sequence[int]) -> Recovery[RequestT]:
        """Continue a request of which `sent` tokens, at least one, reached the client."""

    def failed(self, request_id: str) -> OutputsT:
        """A batch that ends one request with an error."""
