"""An engine without a model, and its codec: all that a router and a relay need of an engine."""

import asyncio
import zlib
from array import array
from collections.abc import Sequence

import msgspec

from router.codec import Output, Recovery, RequestSize
from router.state_store import Ticket
from router.wire import Buffer

VOCABULARY = 50_000


class FakeRequest(msgspec.Struct, kw_only=True):
    """`replays`: it cannot be resumed, as a seeded sampling cannot."""

    request_id: str
    prompt: list[int]
    max_tokens: int
    replays: bool = False


class FakeOutput(msgspec.Struct):
    request_id: str
    new_token_ids: list[int]
    finish_reason: str | None = None


class FakeBatch(msgspec.Struct):
    outputs: list[FakeOutput]


def digest(tokens: Sequence[int], before: int = 0) -> int:
    """Of tokens that follow others; the next token is the digest of all of them, cut to a vocabulary."""
    return zlib.crc32(array("q", tokens), before)


def undisturbed(prompt: Sequence[int], max_tokens: int) -> list[int]:
    """The answer of an engine to which nothing happens."""
    state, tokens = digest(prompt), list[int]()
    for _ in range(max_tokens):
        tokens.append(state % VOCABULARY)
        state = digest(tokens[-1:], state)
    return tokens


class FakeCodec:
    """Both sides of the codec, over msgpack."""

    def __init__(self, engine_version: str = "fake-1") -> None:
        self.engine_version = engine_version
        self._requests = msgspec.msgpack.Decoder(FakeRequest)
        self._batches = msgspec.msgpack.Decoder(FakeBatch)

    def size(self, request: FakeRequest) -> RequestSize:
        return RequestSize(
            request_id=request.request_id,
            prompt_tokens=len(request.prompt),
            max_output_tokens=request.max_tokens,
            prompt_token_ids=request.prompt,
        )

    def with_ticket(self, request: FakeRequest, ticket: Ticket) -> FakeRequest:
        return request

    def encode_request(self, request: FakeRequest) -> Sequence[Buffer]:
        return [msgspec.msgpack.encode(request)]

    def decode_request(self, parts: Sequence[Buffer]) -> FakeRequest:
        return self._requests.decode(parts[0])

    def encode_outputs(self, batch: FakeBatch, outputs: Sequence[FakeOutput]) -> Sequence[Buffer]:
        return [msgspec.msgpack.encode(FakeBatch(list(outputs)))]

    def decode_outputs(self, parts: Sequence[Buffer]) -> FakeBatch:
        return self._batches.decode(parts[0])

    def outputs(self, batch: FakeBatch) -> Sequence[FakeOutput]:
        return batch.outputs

    def keep(self, batch: FakeBatch, outputs: Sequence[Output]) -> FakeBatch:
        return FakeBatch([FakeOutput(o.request_id, o.new_token_ids, o.finish_reason) for o in outputs])

    def drop_first(self, output: Output, tokens: int) -> None:
        output.new_token_ids = output.new_token_ids[tokens:]

    def recover(self, request: FakeRequest, sent: Sequence[int]) -> Recovery[FakeRequest]:
        if request.replays:
            return Recovery(request, tuple(sent))
        prompt = [*request.prompt, *sent]
        return Recovery(msgspec.structs.replace(request, prompt=prompt, max_tokens=request.max_tokens - len(sent)))

    def failed(self, request_id: str) -> FakeBatch:
        return FakeBatch([FakeOutput(request_id, [], "error")])


class FakeEngine:
    """One token for each running request at every step; a token follows from all tokens before it, and the salt.

    Like vLLM's core it takes more requests than it has slots, and lets them wait; what a step has computed comes out
    even if it was aborted meanwhile; and it does not survive an id that it holds already.
    """

    def __init__(self, *, slots: int = 4, step_s: float = 0.002, salt: int = 0, version: str = "fake-1") -> None:
        self.engine_version, self.slots, self.step_s, self.salt = version, slots, step_s, salt
        self.codec = FakeCodec(version)
        self.dead = False
        self.most_held = 0
        self.taken = 0
        self._held: dict[str, FakeRequest] = {}
        self._states: dict[str, tuple[int, int]] = {}  # digest of all tokens so far, tokens generated
        self._work = asyncio.Event()
        self._unpaused = asyncio.Event()
        self._unpaused.set()

    @property
    def held(self) -> int:
        return len(self._held)

    async def add(self, request: FakeRequest) -> None:
        if request.request_id in self._held:
            self.die()
        self._held[request.request_id] = request
        self._states[request.request_id] = digest(request.prompt, self.salt), 0
        self.taken += 1
        self.most_held = max(self.most_held, len(self._held))
        self._work.set()

    async def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._forget(request_id)

    async def next_outputs(self) -> FakeBatch:
        while True:
            await self._work.wait()
            await self._unpaused.wait()
            outputs = [self._step(request) for request in list(self._held.values())[: self.slots]]
            if not self._held:
                self._work.clear()
            await asyncio.sleep(self.step_s)  # what is aborted now was computed all the same, and comes out
            if self.dead:
                raise RuntimeError("the engine died")
            if outputs:
                return FakeBatch(outputs)

    def _step(self, request: FakeRequest) -> FakeOutput:
        state, generated = self._states[request.request_id]
        token = state % VOCABULARY
        self._states[request.request_id] = digest([token], state), generated + 1
        finished = generated + 1 == request.max_tokens
        if finished:
            self._forget(request.request_id)
        return FakeOutput(request.request_id, [token], "length" if finished else None)

    def _forget(self, request_id: str) -> None:
        self._held.pop(request_id, None)
        self._states.pop(request_id, None)

    async def status(self) -> dict[str, int]:
        return {"running": min(self.slots, self.held), "waiting": max(0, self.held - self.slots)}

    def pause(self) -> None:
        """Stop stepping, as a hung device does."""
        self._unpaused.clear()

    def resume(self) -> None:
        self._unpaused.set()

    def die(self) -> None:
        self.dead = True
        self._work.set()
        self._unpaused.set()
