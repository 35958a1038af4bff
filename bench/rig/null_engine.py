"""An engine without a model: after `ttft_s` a token, then one at every `interval_s`, for any number of requests."""

import asyncio
import time
from array import array
from collections.abc import Sequence

import msgspec

from policies.router.tickets import Ticket
from router.cached_blocks import BlockHashes, BlockHashing
from router.codec import Output, Recovery, RequestSize
from router.trail import TraceHeaders
from router.wire import Buffer

VERSION = "null-1"


class NullRequest(msgspec.Struct):
    request_id: str
    prompt_tokens: int
    max_tokens: int
    trace: dict[str, str] | None = None


class NullOutput(msgspec.Struct):
    request_id: str
    new_token_ids: list[int]
    finish_reason: str | None = None


class NullBatch(msgspec.Struct):
    outputs: list[NullOutput]


class NullCodec:
    """Both sides, over msgpack."""

    engine_version = VERSION

    def __init__(self) -> None:
        self._requests = msgspec.msgpack.Decoder(NullRequest)
        self._batches = msgspec.msgpack.Decoder(NullBatch)

    def size(self, request: NullRequest) -> RequestSize:
        return RequestSize(
            request_id=request.request_id, prompt_tokens=request.prompt_tokens, max_output_tokens=request.max_tokens
        )

    def block_hashes(self, request: NullRequest, hashing: BlockHashing) -> BlockHashes:
        return array("Q")

    def with_ticket(
        self,
        request: NullRequest,
        ticket: Ticket,
        *,
        ttft_left_s: float | None,
        e2e_left_s: float | None,
        resumed: bool = False,
        comes_back: bool | None = None,
    ) -> NullRequest:
        return request

    def with_trace(self, request: NullRequest, headers: TraceHeaders) -> NullRequest:
        return msgspec.structs.replace(request, trace=dict(headers))

    def take_trace(self, request: NullRequest) -> TraceHeaders | None:
        return request.trace

    def unread_tokens(self, request: NullRequest, replica_id: str) -> int:
        return request.prompt_tokens

    def cached_tokens(self, output: Output) -> int | None:
        return None

    def loaded_tokens(self, output: Output) -> int:
        return 0

    def encode_request(self, request: NullRequest) -> Sequence[Buffer]:
        return [msgspec.msgpack.encode(request)]

    def decode_request(self, parts: Sequence[Buffer]) -> NullRequest:
        return self._requests.decode(parts[0])

    def encode_outputs(self, batch: NullBatch, outputs: Sequence[NullOutput]) -> Sequence[Buffer]:
        return [msgspec.msgpack.encode(NullBatch(list(outputs)))]

    def decode_outputs(self, parts: Sequence[Buffer]) -> NullBatch:
        return self._batches.decode(parts[0])

    def outputs(self, batch: NullBatch) -> Sequence[NullOutput]:
        return batch.outputs

    def keep(self, batch: NullBatch, outputs: Sequence[Output]) -> NullBatch:
        return NullBatch([NullOutput(o.request_id, o.new_token_ids, o.finish_reason) for o in outputs])

    def drop_first(self, output: Output, tokens: int) -> None:
        output.new_token_ids = output.new_token_ids[tokens:]

    def resumable(self, request: NullRequest) -> bool:
        return False

    def in_one_piece(self, request: NullRequest) -> bool:
        return False

    def recover(self, request: NullRequest, sent: Sequence[int]) -> Recovery[NullRequest]:
        return Recovery(request, tuple(sent))

    def failed(self, request_id: str) -> NullBatch:
        return NullBatch([NullOutput(request_id, [], "error")])


class NullEngine:
    """Steps like an engine: all tokens that are due by the time of a step come out in one batch."""

    engine_version = VERSION
    gang_sizes: tuple[int, ...] = ()
    dead = False

    def __init__(self, *, slots: int, ttft_s: float, interval_s: float) -> None:
        self.slots, self.ttft_s, self.interval_s = slots, ttft_s, interval_s
        self.codec = NullCodec()
        self._due: dict[str, tuple[float, int]] = {}
        self._work = asyncio.Event()

    async def add(self, request: NullRequest) -> None:
        self._due[request.request_id] = time.perf_counter() + self.ttft_s, request.max_tokens
        self._work.set()

    async def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._due.pop(request_id, None)

    async def next_outputs(self) -> NullBatch:
        while True:
            await self._work.wait()
            if not self._due:
                self._work.clear()
                continue
            wait_s = min(due_s for due_s, _ in self._due.values()) - time.perf_counter()
            await asyncio.sleep(max(0.0, wait_s))
            if outputs := self._step(time.perf_counter()):
                return NullBatch(outputs)

    def _step(self, now_s: float) -> list[NullOutput]:
        outputs = []
        for request_id, (due_s, left) in list(self._due.items()):
            if due_s > now_s:
                continue
            outputs.append(NullOutput(request_id, [1], None if left > 1 else "length"))
            if left > 1:
                self._due[request_id] = due_s + self.interval_s, left - 1
            else:
                del self._due[request_id]
        return outputs

    async def cached_blocks(self, since: int | None) -> None:
        """It has no cache."""

    async def status(self) -> dict[str, int]:
        return {"running": len(self._due)}
