"""An engine without a model, and its codec: all that a router and a relay need of an engine; and a clock by hand."""

import asyncio
import zlib
from array import array
from collections.abc import Mapping, Sequence

import msgspec

from policies.router.tickets import Ticket
from router.cached_blocks import BlockChanges, BlockHashes, BlockHashing, Tier
from router.codec import Output, Recovery, RequestSize
from router.trail import TraceHeaders
from router.wire import Buffer

VOCABULARY = 50_000


class ManualClock:
    """A clock that stands still until it is told to move."""

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s

    def now(self) -> float:
        return self._now_s

    def advance_to(self, now_s: float) -> None:
        """Raises ValueError for a time in the past."""
        if now_s < self._now_s:
            raise ValueError(f"now_s must not go back from {self._now_s} to {now_s}")
        self._now_s = now_s


class FakeRequest(msgspec.Struct, kw_only=True):
    """Attributes:
    min_tokens: what its router is told of it; the engine always goes on to max_tokens.
    replays: it cannot be resumed, as a seeded sampling cannot.
    in_one_piece: its answer is read when it is whole.
    leaves_cache: its KV cache is to be fetched.
    cache: the one that it begins with.
    fetches: False only tells that nobody will.
    told: what its router says of it: seconds until its first token is due, and whether it goes on.
    ends_in_s: seconds until its last token is due, by its router.
    unread: tokens of its prompt that count as unread, by replica.
    trace: the headers of its trace.
    """

    request_id: str
    prompt: list[int]
    max_tokens: int
    min_tokens: int = 0
    replays: bool = False
    in_one_piece: bool = False
    leaves_cache: bool = False
    cache: dict[str, int] | None = None
    fetches: bool = True
    told: tuple[float | None, bool] = (None, False)
    ends_in_s: float | None = None
    unread: dict[str, int] = {}
    trace: dict[str, str] | None = None


BLOCK_TOKENS = 64


class FakeOutput(msgspec.Struct):
    request_id: str
    new_token_ids: list[int]
    finish_reason: str | None = None
    cache: dict[str, int] | None = None
    hits: int | None = None
    loaded: int = 0


class FakeBatch(msgspec.Struct):
    outputs: list[FakeOutput]


def digest(tokens: Sequence[int], before: int = 0) -> int:
    """The digest of tokens that follow others; the next token is the digest of all of them, cut to a vocabulary."""
    return zlib.crc32(array("q", tokens), before)


def undisturbed(prompt: Sequence[int], max_tokens: int, salt: int = 0) -> list[int]:
    """The answer of an engine to which nothing happens."""
    state, tokens = digest(prompt, salt), list[int]()
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
            min_output_tokens=request.min_tokens,
            prompt_token_ids=request.prompt,
        )

    def block_hashes(self, request: FakeRequest, hashing: BlockHashing) -> BlockHashes:
        size, root = hashing.block_tokens, int.from_bytes(hashing.root)
        ends = range(size, len(request.prompt) + 1, size)
        return array("Q", [digest(request.prompt[:end], root) for end in ends])

    def with_ticket(
        self,
        request: FakeRequest,
        ticket: Ticket,
        *,
        ttft_left_s: float | None,
        e2e_left_s: float | None,
        resumed: bool = False,
        comes_back: bool | None = None,
    ) -> FakeRequest:
        unread = {replica_id: ticket.unread_at(replica_id) for replica_id, _ in ticket.prefixes}
        return msgspec.structs.replace(request, told=(ttft_left_s, resumed), ends_in_s=e2e_left_s, unread=unread)

    def with_trace(self, request: FakeRequest, headers: TraceHeaders) -> FakeRequest:
        return msgspec.structs.replace(request, trace=dict(headers))

    def take_trace(self, request: FakeRequest) -> TraceHeaders | None:
        headers, request.trace = request.trace, None
        return headers

    def unread_tokens(self, request: FakeRequest, replica_id: str) -> int:
        return request.unread.get(replica_id, len(request.prompt))

    def cached_tokens(self, output: Output) -> int | None:
        assert isinstance(output, FakeOutput)
        return output.hits

    def loaded_tokens(self, output: Output) -> int:
        assert isinstance(output, FakeOutput)
        return output.loaded

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
        return FakeBatch([o for o in outputs if isinstance(o, FakeOutput)])

    def drop_first(self, output: Output, tokens: int) -> None:
        output.new_token_ids = output.new_token_ids[tokens:]

    def resumable(self, request: FakeRequest) -> bool:
        return not request.replays

    def in_one_piece(self, request: FakeRequest) -> bool:
        return request.in_one_piece

    def recover(self, request: FakeRequest, sent: Sequence[int]) -> Recovery[FakeRequest]:
        if request.replays:
            return Recovery(request, tuple(sent))
        prompt = [*request.prompt, *sent]
        return Recovery(msgspec.structs.replace(request, prompt=prompt, max_tokens=request.max_tokens - len(sent)))

    def splits(self, request: FakeRequest) -> bool:
        return True

    def prefill_of(self, request: FakeRequest) -> FakeRequest:
        return msgspec.structs.replace(request, max_tokens=1, leaves_cache=True)

    def cache_of(self, output: Output) -> Mapping[str, int] | None:
        assert isinstance(output, FakeOutput)
        return output.cache

    def with_cache(self, request: FakeRequest, cache: Mapping[str, int]) -> FakeRequest:
        return msgspec.structs.replace(request, cache=dict(cache))

    def note_hits(self, output: Output, cache: Mapping[str, int]) -> None:
        assert isinstance(output, FakeOutput)
        output.hits = cache["hits"]

    def without_fetching(self, request: FakeRequest, request_id: str, cache: Mapping[str, int]) -> FakeRequest:
        return msgspec.structs.replace(request, request_id=request_id, cache=dict(cache), fetches=False)

    def failed(self, request_id: str) -> FakeBatch:
        return FakeBatch([FakeOutput(request_id, [], "error")])


class FakeCache:
    """A prefix cache without bound, that tells what it holds."""

    def __init__(self, root: bytes = b"root") -> None:
        self.hashing = BlockHashing(block_tokens=4, algorithm="crc32", root=root)
        self.blocks: set[int] = set()
        self.asked: list[int | None] = []  # since when
        self.sequence = 0
        self.tiers: tuple[Tier, ...] = ()  # what lies there has a name of its own among the blocks
        self._told: set[int] = set()

    def changes(self, since: int | None) -> BlockChanges:
        self.asked.append(since)
        if since != self.sequence:
            since, self._told = None, set()
        added, removed = self.blocks - self._told, self._told - self.blocks
        if added or removed or since is None:
            self.sequence += 1
        self._told = set(self.blocks)
        packed = (array("Q", sorted(hashes)).tobytes() for hashes in (added, removed))
        return BlockChanges(since, self.sequence, self.hashing, *packed, tiers=self.tiers)


class FakeEngine:
    """One token for each running request at every step; a token follows from all tokens before it, and the salt.

    Like vLLM's core it takes more requests than it has slots, and lets them wait; what a step has computed comes out
    even if it was aborted meanwhile; and it does not survive an id that it holds already.
    """

    gang_sizes: tuple[int, ...] = ()

    def __init__(self, *, slots: int = 4, step_s: float = 0.002, salt: int = 0, version: str = "fake-1") -> None:
        self.engine_version, self.slots, self.step_s, self.salt = version, slots, step_s, salt
        self.codec = FakeCodec(version)
        self.dead = self.hangs = self.ends = False
        self.token_s: float | None = None  # as it says, for reading one of a prompt
        self.free_tokens: int | None = None  # of its cache, as it says
        self.pass_s: float | None = None  # of an engine that answers in the midst of a step
        self.cache: FakeCache | None = None
        self.most_held = 0
        self.taken = 0
        self.fetched = self.let_go = 0  # caches
        self.loses_caches = self.transfers_hang = False
        self.prefixes: set[tuple[int, ...]] | None = (
            None  # that it has in its cache, of whole blocks; None says nothing
        )
        self._hits: dict[str, int] = {}
        self.finish_reason = "length"
        self._held: dict[str, FakeRequest] = {}
        self._states: dict[str, tuple[int, int]] = {}  # digest of all tokens so far, tokens generated
        self._work = asyncio.Event()
        self._unpaused = asyncio.Event()
        self._unpaused.set()

    @property
    def held(self) -> int:
        return len(self._held)

    async def add(self, request: FakeRequest) -> None:
        if not request.fetches:
            self.let_go += 1
            return
        if request.request_id in self._held:
            self.die()
        self._held[request.request_id] = request
        if self.prefixes is not None:
            self._hits[request.request_id] = self._look_up(request.prompt, self.prefixes)
        self._states[request.request_id] = self._read(request), 0
        self.taken += 1
        self.most_held = max(self.most_held, len(self._held))
        self._work.set()

    def _read(self, request: FakeRequest) -> int:
        """What its first token follows from: its prompt, or the cache that it came with, whatever that holds."""
        if self.cache is not None:
            self.cache.blocks.update(self.codec.block_hashes(request, self.cache.hashing))
        if request.cache is None:
            return digest(request.prompt, self.salt)
        self.fetched += 1
        return request.cache["digest"]

    def _look_up(self, prompt: list[int], prefixes: set[tuple[int, ...]]) -> int:
        """How much of a prompt it had; it has all of it from now on."""
        begun = [tuple(prompt[:end]) for end in range(BLOCK_TOKENS, len(prompt), BLOCK_TOKENS)]
        hits = sum(each in prefixes for each in begun)
        prefixes.update(begun)
        return hits * BLOCK_TOKENS

    async def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._forget(request_id)

    async def next_outputs(self) -> FakeBatch:
        while True:
            await self._work.wait()
            await self._unpaused.wait()
            if self.ends:
                return self._abort_all()
            running = [r for r in self._held.values() if not (self.transfers_hang and r.cache)][: self.slots]
            outputs = [self._step(request) for request in running]
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
        leaves = request.leaves_cache and finished and not self.loses_caches
        cache = {"digest": digest(request.prompt, self.salt), "hits": len(request.prompt) // 2} if leaves else None
        hits = self._hits.pop(request.request_id, None)
        return FakeOutput(request.request_id, [token], self.finish_reason if finished else None, cache, hits)

    def _forget(self, request_id: str) -> None:
        self._held.pop(request_id, None)
        self._states.pop(request_id, None)

    async def status(self) -> dict[str, float]:
        if self.hangs:
            await asyncio.Event().wait()
        passing = {} if self.pass_s is None else {"pass_s": self.pass_s}
        if self.token_s is not None:
            passing["seconds_per_prompt_token"] = self.token_s
        if self.free_tokens is not None:
            passing["free_tokens"] = self.free_tokens
        return {"running": min(self.slots, self.held), "waiting": max(0, self.held - self.slots), **passing}

    async def cached_blocks(self, since: int | None) -> BlockChanges | None:
        return None if self.cache is None else self.cache.changes(since)

    def pause(self) -> None:
        """Stop stepping, as a hung device does."""
        self._unpaused.clear()

    def hang(self) -> None:
        """In the middle of a step: it does not answer either."""
        self.hangs = True
        self.pause()

    def resume(self) -> None:
        self._unpaused.set()

    def end(self) -> None:
        """As vLLM's core does at a signal: it tells of all that it holds that it is aborted, and dies."""
        self.ends = True
        self.resume()

    def _abort_all(self) -> FakeBatch:
        aborted, self._held, self.ends = list(self._held), {}, False
        self.die()
        return FakeBatch([FakeOutput(request_id, [], "abort") for request_id in aborted])

    def die(self) -> None:
        self.dead = True
        self._work.set()
        self._unpaused.set()
