"""What the relay needs of an engine, and the plain structures of an engine whose steps are ours."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from router.cached_blocks import BlockChanges
from router.codec import Output, RequestSize
from router.trail import TraceHeaders
from router.wire import Buffer


class RelayCodec(Protocol):
    """The replica's side of `router.codec.EngineCodec`."""

    def decode_request(self, parts: Sequence[Buffer]) -> Any: ...

    def size(self, request: Any) -> RequestSize: ...

    def unread_tokens(self, request: Any, replica_id: str) -> int: ...

    def take_trace(self, request: Any) -> TraceHeaders | None:
        """Out of the request: an engine needs not tell it with every token. None where it is not traced."""

    def outputs(self, batch: Any) -> Sequence[Output]: ...

    def encode_outputs(self, batch: Any, outputs: Sequence[Any]) -> Sequence[Buffer]: ...


class Engine(Protocol):
    """What the relay needs of an engine."""

    engine_version: str

    @property
    def codec(self) -> RelayCodec: ...

    @property
    def slots(self) -> int:
        """Most requests that may run at once."""

    @property
    def gang_sizes(self) -> Sequence[int]:
        """The most requests of a gang batch, by bin; bins beyond are bound by the slots. Empty where it takes none."""

    @property
    def dead(self) -> bool: ...

    async def add(self, request: Any) -> None: ...

    async def abort(self, request_ids: list[str]) -> None: ...

    async def next_outputs(self) -> Any: ...

    async def status(self) -> dict[str, Any]:
        """What it says of itself to routers, as far as JSON can.

        One that does not wait for the step says in it, as `pass_s`, how long that takes already.
        """

    async def cached_blocks(self, since: int | None) -> BlockChanges | None:
        """What has changed in its prefix cache since this sequence number, or all that it holds where that cannot be
        said; None where it has none, or none that tells hits."""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Those of one position: the chosen token first, then the most likely ones; and the chosen one's rank, from 1."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int


@dataclass(frozen=True, slots=True)
class RowOutput:
    """A row's token of one step; finish is "stop", "length" or "error" when it is the last, which has no token then."""

    request_id: str
    token_ids: list[int]
    logprobs: Logprobs | None = None
    finish: str | None = None
    stop_reason: int | None = None
