"""The relay: an engine's requests come in over the routers' connections, its outputs go back over them.

Of each request it remembers only which connection it came over. Every engine step's outputs are sorted by connection
and leave as one frame each. When requests end, their slots are released in the shared state in one call, and that call
forms the next batch. A connection that closes takes its requests with it: no router is left to read them.

Inside the engine every arrival has an id of its own: a request that comes again, over a new connection, must not meet
what is left of itself. (vLLM's core ends itself on an id that it holds already.)
"""

import asyncio
import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from deployments.engines.base import Engine
from deployments.engines.prefill_slots import PrefillSlots
from deployments.engines.traces import ReplicaTrace, ReplicaTraces
from deployments.engines.unread_prompts import UnreadPrompts
from policies.checks import require_at_least, require_positive
from policies.errors import ProtocolError, StateStoreAccessError, StateStoreError
from policies.gang.batches import tick_s
from policies.router.placement import ReplicaSpeed
from policies.types import StepTimes
from router import wire
from router.background import BackgroundTasks
from router.cached_blocks import BlockSet
from router.clock import Clock, MonotonicClock
from router.codec import Output
from router.state_store import ReplicaInfo, StateStore
from router.wire import Buffer

logger = logging.getLogger(__name__)

MAX_UNSENT_BYTES = 64 << 20  # a router that reads nothing while this much waits for it is taken for dead
MAX_UNSENT_BEFORE_BLOCKS = 1 << 20
BLOCKS_PAUSE_S = 0.25  # between two reports of the prefix cache
MAX_ENDED = 100_000  # while the shared state is away; what ends beyond is found by the leases
ENGINE_STATUS_S = 3.0  # less than a router waits for it: what the relay itself has to say must arrive
# While the shared state was away routers sent requests that it knows nothing of; some may arrive as it comes back.
REGISTRATIONS_AFTER_AN_ABSENCE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayConfig:
    """Times of the replica's life.

    Attributes:
        credit_lookahead: slots offered beyond the engine's own, so that the next request is at hand when one ends.
        heartbeat_s: how often the replica beats.
        hang_timeout_s: an engine that neither steps nor answers for so long, or is at one forward pass, is taken for
            dead; longer than its longest step, compiling included.
        lease_s: how long an assigned request may take to arrive before its slot is given back.
        step_times: as predicted, for the measured speed; None counts every replica as equally fast.
        prefill_budget_tokens: of a replica that only prefills: tokens of one step, by which it offers slots.
        prefill_memory_share: of the same: how much of the free cache those slots may take.
        credit_s: with unread prompt tokens for so long it takes no more; None sets no bound. By the engine's own
            seconds for a prompt token, else by step_times; without either there is no bound.

    Raises:
        ConfigError: a value is negative, or a time 0.
    """

    credit_lookahead: int = 0
    heartbeat_s: float = 1.0
    lease_s: float = 15.0
    hang_timeout_s: float = 120.0
    step_times: StepTimes | None = None
    prefill_budget_tokens: int | None = None
    prefill_memory_share: float = 0.9
    credit_s: float | None = None

    def __post_init__(self) -> None:
        require_at_least(0, self, "credit_lookahead")
        require_positive(self, "heartbeat_s", "lease_s", "hang_timeout_s", "credit_s")


class _Steps:
    """Measures engine steps, from one batch of outputs to the next while requests are on board."""

    def __init__(self, step_times: StepTimes, clock: Clock) -> None:
        self._step_times, self._clock = step_times, clock
        self._policy = ReplicaSpeed()
        self._last_s: float | None = None

    @property
    def slowness(self) -> float:
        return self._policy.slowness

    def idle(self) -> None:
        self._last_s = None

    def ended(self, *, prefill_tokens: int, decode_requests: int, kv_tokens: int) -> None:
        """A step, or several without outputs, that brought tokens: first ones, after so much prefill, and further ones
        for so many requests, which hold so many tokens together."""
        if not prefill_tokens and not decode_requests:
            return  # the time counts with the tokens that it was for
        now_s = self._clock.now()
        if self._last_s is not None:
            predicted_s = self._step_times.step_s(
                prefill_tokens=prefill_tokens, decode_requests=decode_requests, kv_tokens=kv_tokens
            )
            self._policy.observe(now_s - self._last_s, predicted_s)
        self._last_s = now_s


class _Router:
    """One router's connection and the requests that came over it."""

    def __init__(self, router_id: str, writer: asyncio.StreamWriter) -> None:
        self.router_id = router_id
        self.writer = writer
        self.request_ids: set[str] = set()
        self.knows_blocks = False  # of the prefix cache all that was reported

    @property
    def lags(self) -> bool:
        """So much waits for it that what can be told later must not come on top."""
        return self.writer.transport.get_write_buffer_size() > MAX_UNSENT_BEFORE_BLOCKS

    def send(self, kind: wire.Kind, parts: Sequence[Buffer]) -> None:
        """A router that cannot be sent to is hung up on: one bad frame or reader must not stop the others' tokens."""
        try:
            if self.writer.transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
                raise ProtocolError(f"it left {MAX_UNSENT_BYTES} bytes unread")
            wire.write_frame(self.writer, kind, parts)
        except ProtocolError as error:
            logger.error("hanging up on router %s: %s", self.router_id, error)
            self.writer.transport.abort()


@dataclass(slots=True)
class _Held:
    """A request in the engine: its prompt, and the answer so far; `trace` is None where it is not traced."""

    request_id: str
    router: _Router
    prompt_tokens: int
    output_tokens: int = 0
    trace: ReplicaTrace | None = None


class Relay:
    """`start`, then it serves until `drain` and `close`."""

    def __init__(
        self,
        *,
        engine: Engine,
        store: StateStore,
        info: ReplicaInfo,
        config: RelayConfig,
        traces: ReplicaTraces | None = None,
    ) -> None:
        """Args:
        traces: None makes none.
        """
        self.info, self._traces = info, traces
        self._engine, self._store, self._config = engine, store, config
        self._held: dict[str, _Held] = {}  # by the engine's id
        self._engine_ids: dict[str, str] = {}  # by the request's id
        self._arrivals = 0
        self._prompts = UnreadPrompts(config.credit_s)
        budget, share = config.prefill_budget_tokens, config.prefill_memory_share
        self._prefill_slots = None if budget is None else PrefillSlots(budget, share)
        self._ended: set[str] = set()  # whose slots are to be released
        self._releasing: set[str] = set()  # whose slots the call on its way releases
        self._left: set[str] = set()  # the engine since the last heartbeat was sent
        self._left_before: set[str] = set()  # in the heartbeat before that
        self._something_changed = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._offers = False  # slots: not before it has started, nor once it drains
        self._failed = False
        self._stepped_s = time.monotonic()
        self._steps = _Steps(config.step_times, MonotonicClock()) if config.step_times else None
        self._registrations_due = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._routers: set[_Router] = set()
        self._blocks, self._blocks_due = BlockSet(), asyncio.Event()
        self._failures: Counter[str] = Counter()  # replicas are not scraped: routers ask for them with its status
        self._background = BackgroundTasks(self._count_failure)

    def adopt(self, *, credit_s: float | None, credit_lookahead: int) -> None:
        """As in `RelayConfig`, from now on; the shared state hears of it with the next heartbeat."""
        self._config = replace(self._config, credit_s=credit_s, credit_lookahead=credit_lookahead)
        self._prompts.credit_s = credit_s

    @property
    def slots(self) -> int:
        """What this replica offers to the routers."""
        if not self._offers:
            return 0
        if self._prefill_slots is not None:
            held_tokens = [held.prompt_tokens for held in self._held.values()]
            return min(self._engine.slots, self._prefill_slots.offered(held_tokens))
        return self._engine.slots + self._config.credit_lookahead

    @property
    def healthy(self) -> bool:
        return not self._failed and not self._engine.dead

    async def start(
        self, bind_host: str, *, check: Callable[[], Awaitable[None]] | None = None, patience_s: float = 0.0
    ) -> None:
        """Listen, register, and offer slots once `check` has returned.

        A router that hears of this replica can connect at once, and is sent nowhere before it is known to be fit.

        Args:
            check: is called when other replicas can see this one.
            patience_s: for so long it goes on trying while the shared state does not answer.

        Raises:
            StateStoreError: the shared state cannot be reached.
            Exception: of `check`.
        """
        self._server = await asyncio.start_server(self._serve, bind_host, self.info.port, limit=wire.STREAM_LIMIT_BYTES)
        self.info = msgspec.structs.replace(self.info, port=self._server.sockets[0].getsockname()[1])
        self._background.spawn(self._pump(), "pump")
        self._background.repeat(self._release, 0, "release")
        self._background.repeat(self._watch, self._config.heartbeat_s, "watch engine")
        self._background.repeat(self._report_blocks, BLOCKS_PAUSE_S, "cached blocks")
        give_up_s = time.monotonic() + patience_s
        await self._patiently(lambda: self._store.register_replica(self.info, self.slots), give_up_s)
        self._background.repeat(self._beat, self._config.heartbeat_s, "heartbeat")
        if check is not None:
            await self._patiently(check, give_up_s)
        await self._offer(True)
        if self.info.gang_max_wait_s is not None:
            often_s = tick_s(self.info.gang_max_wait_s, self._config.heartbeat_s)
            self._background.repeat(self._ask_for_due, often_s, "gang tick")

    async def _patiently(self, call: Callable[[], Awaitable[None]], give_up_s: float) -> None:
        """Once at every heartbeat, until the shared state has answered."""
        while True:
            try:
                await call()
                return
            except StateStoreAccessError:
                raise
            except StateStoreError as error:
                if not self.healthy or time.monotonic() >= give_up_s:
                    raise
                logger.warning("the start waits for the shared state: %s", error)
            await asyncio.sleep(self._config.heartbeat_s)

    def repeat(self, call: Callable[[], Awaitable[None]], name: str) -> None:
        """Call it at every heartbeat until this relay closes; failures are counted."""
        self._background.repeat(call, self._config.heartbeat_s, name)

    async def drain(self, serving_s: float = math.inf) -> None:
        """Take no more requests, and return when the last one has ended.

        Args:
            serving_s: for how long what waits is still taken where no other replica would take it.
        """
        give_up_s = time.monotonic() + serving_s
        await self._offer(False)
        while time.monotonic() < give_up_s and await self._is_last_resort():
            await self._offer(True)
            await asyncio.sleep(self._config.heartbeat_s)
            await self._offer(False)  # before it looks: of two that leave at once, one sees the other gone
        await self._idle.wait()
        while await self._is_awaited():
            await asyncio.sleep(self._config.heartbeat_s)
            await self._idle.wait()

    async def _offer(self, offers: bool) -> None:
        self._offers = offers
        try:
            await self._tell()
        except StateStoreError as error:
            logger.warning("the next heartbeat will tell what this replica offers: %s", error)

    async def _is_last_resort(self) -> bool:
        """Something waits that this replica takes, and none of the others that offer slots."""
        try:
            snapshot, infos = await self._store.snapshot(), await self._store.replica_infos()
        except StateStoreError:
            return False
        loads, mine = snapshot.replicas, self.info.replica_id
        offering = [i for i in infos if i.replica_id != mine and i.replica_id in loads and loads[i.replica_id].slots]
        waiting = {slo_class for (slo_class, _), count in snapshot.lanes.items() if count}
        return self.healthy and any(
            self.info.takes(slo_class) and not any(info.takes(slo_class) for info in offering) for slo_class in waiting
        )

    async def _is_awaited(self) -> bool:
        """Requests that it was given are on their way; those that do not come lose their slots to the lease."""
        try:
            load = (await self._store.snapshot()).replicas.get(self.info.replica_id)
        except StateStoreError:
            return False
        return self.healthy and load is not None and load.running > 0

    async def close(self) -> None:
        await self._background.close()
        self._hang_up()
        try:
            await self._store.drop_replica(self.info.replica_id)
        except StateStoreError as error:
            logger.warning("left without a word to the shared state: %s", error)

    def _hang_up(self) -> None:
        """On every router, once it has what was written to it already."""
        if self._server is not None:
            self._server.close()
        for writer in self._writers:
            writer.close()

    # From the routers

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            wire.set_options(writer)
            router_id = await wire.accept_router(
                reader,
                writer,
                secret=self.info.secret,
                replica_id=self.info.replica_id,
                engine_version=self._engine.engine_version,
            )
            await self._obey_all(_Router(router_id, writer), reader)
        except (ProtocolError, OSError, asyncio.IncompleteReadError) as error:
            logger.warning("refused a connection: %s", error or type(error).__name__)
        except Exception:  # of whatever kind: only asyncio would be told of it
            logger.exception("serving a router failed")
            self._count_failure("serve")
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _obey_all(self, router: _Router, reader: asyncio.StreamReader) -> None:
        self._routers.add(router)
        self._blocks_due.set()
        try:
            while True:
                await self._obey(router, await wire.read_frame(reader))
        except (OSError, asyncio.IncompleteReadError):
            logger.info("router %s left with %d requests running", router.router_id, len(router.request_ids))
        except (ProtocolError, msgspec.MsgspecError) as error:
            logger.error("hanging up on router %s: %s", router.router_id, error)
        finally:
            self._routers.discard(router)
            await self._stop(router.request_ids)

    async def _obey(self, router: _Router, frame: wire.Frame) -> None:
        if frame.kind is wire.Kind.ADD:
            await self._add(router, self._engine.codec.decode_request(frame.parts))
        elif frame.kind is wire.Kind.ABORT:
            ids = msgspec.msgpack.decode(frame.parts[0], type=list[str])
            await self._stop(router.request_ids.intersection(ids))
        elif frame.kind is wire.Kind.CALL:
            call = msgspec.msgpack.decode(frame.parts[0], type=wire.Call)
            self._background.spawn(self._answer(router, call), "call")
        elif frame.kind is wire.Kind.BLOCKS:
            router.knows_blocks = False
            self._blocks_due.set()
        else:
            raise ProtocolError(f"a router sent {frame.kind.name}")

    async def _add(self, router: _Router, request: Any) -> None:
        request_id: str = request.request_id
        if request_id in self._engine_ids:  # from a connection of which only we do not know yet that it is dead
            await self._stop({request_id})
        self._arrivals += 1
        request.request_id = engine_id = f"{request_id}~{self._arrivals}"
        prompt_tokens = self._engine.codec.size(request).prompt_tokens
        unread_tokens = self._engine.codec.unread_tokens(request, self.info.replica_id)
        held = _Held(request_id, router, prompt_tokens)
        if (headers := self._engine.codec.take_trace(request)) and self._traces is not None:
            held.trace = self._traces.begin(headers, prompt_tokens, time.monotonic())
        self._engine_ids[request_id], self._held[engine_id] = engine_id, held
        if self._prefill_slots is not None:
            self._prefill_slots.came(prompt_tokens, unread_tokens)
        self._prompts.came(request_id, unread_tokens, prompt_tokens - unread_tokens)
        router.request_ids.add(request_id)
        self._ended.discard(request_id)  # the slot that waits to be released is its own again
        self._idle.clear()
        await self._engine.add(request)

    async def _stop(self, request_ids: Set[str], *, frees_slots: bool = True) -> None:
        engine_ids = [self._engine_ids[request_id] for request_id in request_ids]
        for engine_id in engine_ids:
            self._end(engine_id, frees_slot=frees_slots)
        if engine_ids and self.healthy:
            await self._engine.abort(engine_ids)

    async def _recall(self, router: _Router, request_ids: list[str]) -> int:
        """Their slots may be other requests' as soon as this is answered, or their own again."""
        self._ended.difference_update(request_ids)
        await self._stop(router.request_ids.intersection(request_ids), frees_slots=False)
        return len(request_ids)

    async def _answer(self, router: _Router, call: wire.Call) -> None:
        try:
            result: Any
            if call.method == "recall":
                result = await self._recall(router, msgspec.msgpack.decode(call.argument, type=list[str]))
            elif call.method == "status":
                result = await self._status()
            else:
                raise ProtocolError(f"a router called {call.method!r}")
        except Exception as error:  # of whatever kind: it is the router's, which asked for it
            logger.warning("the engine refused %s: %r", call.method, error)
            reply = wire.Reply(call.number, error=str(error) or repr(error))
        else:
            reply = wire.Reply(call.number, msgspec.json.encode(result))
        router.send(wire.Kind.CALL, [msgspec.msgpack.encode(reply)])

    async def _status(self) -> dict[str, Any]:
        """The engine's, and the relay's own, which matters most where the engine has none to give."""
        try:
            async with asyncio.timeout(ENGINE_STATUS_S):
                status = await self._engine.status()
        except Exception as error:  # of whatever kind: it is shown in the place of what was asked for
            status = {"error": str(error) or f"the engine does not answer: {type(error).__name__}"}
        own = {"held": len(self._held), "slots": self.slots, "background_failures": self._failures}
        return {**status, **own}

    # From the engine

    async def _pump(self) -> None:
        """Engine to routers, until the engine dies; then the routers must hear of it at once."""
        try:
            while True:
                batch = await self._engine.next_outputs()
                self._stepped_s = time.monotonic()
                self._blocks_due.set()
                self._forward(batch)
        finally:
            self._give_up()

    async def _report_blocks(self) -> None:
        """What has changed in the engine's prefix cache, to every router; all of it to those that lack something."""
        await self._blocks_due.wait()
        self._blocks_due.clear()
        if not self.healthy:
            return
        changes = await self._engine.cached_blocks(self._blocks.sequence)
        if changes is None:
            return
        self._blocks.apply(changes)
        for router in self._routers:
            router.knows_blocks &= changes.since is not None and not router.lags
            if router.lags:
                self._blocks_due.set()
                continue
            for piece in [changes] if router.knows_blocks else self._blocks.whole():
                if piece.is_news:
                    router.send(wire.Kind.BLOCKS, [msgspec.msgpack.encode(piece)])
            router.knows_blocks = True

    async def _watch(self) -> None:
        """What the engine would admit is what the next heartbeat offers; and one that hangs says nothing."""
        if not self.healthy:
            return  # it would fail at every heartbeat until Ray Serve has replaced it
        how = await self._hangs()
        if how and self.healthy:
            logger.error("the engine hangs: %s; if steps may take that long, raise engine.hang_timeout_s", how)
            self._give_up()

    async def _hangs(self) -> str | None:
        """In words, how it does."""
        limit_s, asked_s = self._config.hang_timeout_s, time.monotonic()
        try:
            async with asyncio.timeout(limit_s):
                came_tokens = self._prompts.came_tokens
                ended_tokens = self._prefill_slots.ended_tokens if self._prefill_slots is not None else 0
                status = await self._engine.status()
        except TimeoutError:
            return f"no step and no answer for {limit_s:g} s" if self._stepped_s < asked_s else None
        self._prompts.told(status, came_tokens, self._predicted_token_s)
        if self._prefill_slots is not None:
            self._prefill_slots.told(status, ended_tokens)
        pass_s = status.get("pass_s", 0.0)
        return f"at one forward pass for {pass_s:.1f} s" if pass_s > limit_s else None

    def _give_up(self) -> None:
        """Ray Serve replaces a replica that is not healthy; its routers move its requests at once."""
        self._failed = True
        self._hang_up()

    def _forward(self, batch: Any) -> None:
        """To each router its own.

        What was stopped is not held any more. So an engine that aborts what is held has been told to end, and its
        answers would be cut short.
        """
        by_router: defaultdict[_Router, list[Output]] = defaultdict(list)
        prefill_tokens = decode_requests = kv_tokens = 0
        for output in self._engine.codec.outputs(batch):
            engine_id = output.request_id
            held = self._held.get(engine_id)
            if held is None:
                continue
            if held.output_tokens:
                decode_requests += 1
                kv_tokens += held.prompt_tokens + held.output_tokens
            else:
                prefill_tokens += held.prompt_tokens
                if held.trace is not None:
                    held.trace.first_s = self._stepped_s
                if self._prompts.read(held.request_id):
                    self._something_changed.set()
            held.output_tokens += len(output.new_token_ids)
            output.request_id = held.request_id
            by_router[held.router].append(output)
            if output.finish_reason is not None:
                if str(output.finish_reason) == "abort":
                    logger.error("the engine ends: it aborts what is still running")
                    self._give_up()  # nothing of this batch is told, so all of it is computed elsewhere
                    return
                if held.trace is not None:
                    held.trace.finish = output.finish_reason
                self._end(engine_id)
        if self._steps is not None and self._held:
            self._steps.ended(prefill_tokens=prefill_tokens, decode_requests=decode_requests, kv_tokens=kv_tokens)
        for router, mine in by_router.items():
            router.send(wire.Kind.OUTPUTS, self._engine.codec.encode_outputs(batch, mine))

    def _end(self, engine_id: str, *, frees_slot: bool = True) -> None:
        held = self._held.pop(engine_id)
        del self._engine_ids[held.request_id]
        self._left.add(held.request_id)
        self._prompts.left(held.request_id)
        if held.trace is not None:
            held.trace.end(held.output_tokens, time.monotonic())
        if self._prefill_slots is not None:
            self._prefill_slots.ended(held.prompt_tokens)
        held.router.request_ids.remove(held.request_id)
        if frees_slot:
            if len(self._ended) < MAX_ENDED:
                self._ended.add(held.request_id)
            self._something_changed.set()
        if not self._held:
            self._idle.set()
            if self._steps is not None:
                self._steps.idle()

    # In the background

    def _count_failure(self, task: str) -> None:
        self._failures[task] += 1

    async def _release(self) -> None:
        await self._something_changed.wait()
        self._something_changed.clear()
        if not self.healthy:
            return  # a slot of a dead engine is no slot
        self._releasing, self._ended = self._ended, set()
        reading = self._prompts.report()
        try:
            await self._store.release(self.info.replica_id, sorted(self._releasing), reading=reading)
        except StateStoreError:
            self._prompts.not_heard(reading.read, self._engine_ids)
            self._ended |= self._releasing - self._engine_ids.keys()
            self._something_changed.set()
            await asyncio.sleep(self._config.heartbeat_s)
            raise
        finally:
            self._releasing = set()

    async def _ask_for_due(self) -> None:
        """While idle: only time makes a gang batch of what waits."""
        if self.healthy and not self._held and self._offers:
            await self._store.dispatch()

    @property
    def _slowness(self) -> float:
        return self._steps.slowness if self._steps else 1.0

    @property
    def _predicted_token_s(self) -> float | None:
        times = self._config.step_times
        return None if times is None else times.prefill.prefill_s * self._slowness

    async def _tell(self) -> list[str] | None:
        """As `StateStore.beat_replica`."""
        mine, config, reading = self.info.replica_id, self._config, self._prompts.report()
        sizes = self._engine.gang_sizes
        try:
            return await self._store.beat_replica(mine, self.slots, config.lease_s, self._slowness, sizes, reading)
        except StateStoreError:
            self._prompts.not_heard(reading.read, self._engine_ids)
            raise

    async def _beat(self) -> None:
        if not self.healthy:
            return  # the sweep takes this replica out of the tables
        self._left_before, self._left = self._left, set()
        try:
            assigned = await self._tell()
        except StateStoreError:
            self._registrations_due = REGISTRATIONS_AFTER_AN_ABSENCE
            raise
        if assigned is None or self._registrations_due:
            logger.warning("telling the shared state what this replica runs")
            await self._store.register_replica(self.info, self.slots, list(self._engine_ids), self._slowness)
            self._registrations_due = max(0, self._registrations_due - 1)
            read = tuple(held.request_id for held in self._held.values() if held.output_tokens)
            self._prompts.not_heard(read, self._engine_ids)
            return
        if never_came := [request_id for request_id in assigned if not self._came(request_id)]:
            logger.warning("%d assigned requests never came, releasing their slots", len(never_came))
            await self._store.release(self.info.replica_id, never_came, self._config.lease_s)

    def _came(self, request_id: str) -> bool:
        """It is here, or was until lately: the answer to a heartbeat is older than what ended since it was made, and
        the slot of a request that was called back is its router's to give up."""
        places = (self._engine_ids, self._ended, self._releasing, self._left, self._left_before)
        return any(request_id in place for place in places)
