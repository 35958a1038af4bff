"""The relay: an engine's requests come in over the routers' connections, its outputs go back over them.

It translates between the sockets, the engine and what `OnBoard` keeps of requests; `Registration` speaks with the
shared state. Every engine step's outputs are sorted by connection and leave as one frame each. When requests end, their
slots are released in one call, and that call forms the next batch. A connection that closes takes its requests with it:
no router is left to read them.
"""

import asyncio
import logging
import math
import ssl
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Set
from dataclasses import dataclass
from typing import Any

import msgspec

from deployments.engines.base import Engine
from deployments.engines.on_board import OnBoard, StepSpeed
from deployments.engines.prefill_slots import PrefillSlots
from deployments.engines.registration import Registration
from deployments.engines.router_link import BlockReports, RouterLink
from deployments.engines.traces import ReplicaTraces
from deployments.engines.unread_prompts import UnreadPrompts
from policies.checks import require_at_least, require_positive
from policies.errors import ProtocolError
from policies.gang.batches import tick_s
from policies.live import Live
from policies.types import StepTimes
from router import wire
from router.background import BackgroundTasks
from router.clock import MonotonicClock
from router.state_store import ReplicaInfo, StateStore

logger = logging.getLogger(__name__)

BLOCKS_PAUSE_S = 0.25  # between two reports of the prefix cache
ENGINE_STATUS_S = 3.0  # less than a router waits for it: what the relay itself has to say must arrive


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayConfig:
    """Times of the replica's life, and what it is.

    Attributes:
        heartbeat_s: how often the replica beats.
        lease_s: how long an assigned request may take to arrive before its slot is given back.
        hang_timeout_s: an engine that neither steps nor answers for this long, or is at one forward pass, is taken for
            dead; longer than its longest step, compiling included.
        step_times: as predicted, for the measured speed; None counts every replica as equally fast.
        prefill_budget_tokens: of a replica that only prefills: tokens of one step, by which it offers slots.
        prefill_memory_share: of the same: how much of the free cache those slots may take.

    Raises:
        ConfigError: a time is not positive.
    """

    heartbeat_s: float = 1.0
    lease_s: float = 15.0
    hang_timeout_s: float = 120.0
    step_times: StepTimes | None = None
    prefill_budget_tokens: int | None = None
    prefill_memory_share: float = 0.9

    def __post_init__(self) -> None:
        require_positive(self, "heartbeat_s", "lease_s", "hang_timeout_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """How much routers may give a replica beyond what it runs.

    Attributes:
        lookahead: slots offered beyond the engine's own, so that the next request is at hand when one ends.
        reading_s: with unread prompt tokens for this long it takes no more; None sets no bound. By the engine's own
            seconds for a prompt token, else by `step_times`; without either there is no bound.

    Raises:
        ConfigError: lookahead is negative, or reading_s is not positive.
    """

    lookahead: int = 0
    reading_s: float | None = None

    def __post_init__(self) -> None:
        require_at_least(0, self, "lookahead")
        require_positive(self, "reading_s")


class Relay:
    """`start`, then it serves until `drain` and `close`."""

    def __init__(
        self,
        *,
        engine: Engine,
        store: StateStore,
        info: ReplicaInfo,
        config: RelayConfig,
        credit: Live[Credit] | None = None,
        traces: ReplicaTraces | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Args:
        credit: None gives none.
        traces: None makes none.
        tls: of what routers open; None takes plain connections.
        """
        self._engine, self._config, self._traces, self._tls = engine, config, traces, tls
        credit, budget = credit or Live(Credit()), config.prefill_budget_tokens
        self._board = OnBoard(
            prompts=UnreadPrompts(credit.view(lambda credit: credit.reading_s)),
            prefill=None if budget is None else PrefillSlots(budget, config.prefill_memory_share),
            speed=StepSpeed(config.step_times, MonotonicClock()) if config.step_times else None,
        )
        self._registration = Registration(
            info=info,
            store=store,
            engine=engine,
            board=self._board,
            lookahead=credit.view(lambda credit: credit.lookahead),
            heartbeat_s=config.heartbeat_s,
            lease_s=config.lease_s,
            is_healthy=lambda: self.healthy,
        )
        self._failed = False
        self._out_of_reach: str | None = None
        self._stepped_s = time.monotonic()
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._links: set[RouterLink] = set()
        self._blocks = BlockReports(engine)
        self._failures: Counter[str] = Counter()  # replicas are not scraped: routers ask for them with its status
        self._background = BackgroundTasks(self._count_failure)

    @property
    def info(self) -> ReplicaInfo:
        """What it registers with; the port is 0 before it listens."""
        return self._registration.info

    @property
    def slots(self) -> int:
        """What this replica offers to the routers."""
        return self._registration.slots

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
            patience_s: how long it goes on trying while the shared state does not answer.

        Raises:
            StateStoreError: the shared state cannot be reached.
            Exception: of `check`.
        """
        registration, heartbeat_s = self._registration, self._config.heartbeat_s
        self._server = await asyncio.start_server(
            self._serve, bind_host, self.info.port, limit=wire.STREAM_LIMIT_BYTES, ssl=self._tls
        )
        port = self._server.sockets[0].getsockname()[1]
        registration.info = msgspec.structs.replace(self.info, port=port, encrypted=self._tls is not None)
        self._background.spawn(self._pump(), "pump")
        self._background.repeat(registration.release, 0, "release")
        self._background.repeat(self._watch, heartbeat_s, "watch engine")
        self._background.repeat(self._report_blocks, BLOCKS_PAUSE_S, "cached blocks")
        self._background.repeat(self._ping, wire.PING_S, "ping")
        give_up_s = time.monotonic() + patience_s
        await registration.register(give_up_s)
        self._background.repeat(registration.beat, heartbeat_s, "heartbeat")
        if check is not None:
            await registration.patiently(check, give_up_s)
        await registration.offer(True)
        if self.info.gang_max_wait_s is not None:
            often_s = tick_s(self.info.gang_max_wait_s, heartbeat_s)
            self._background.repeat(registration.ask_for_due_batches, often_s, "gang tick")

    def repeat(self, call: Callable[[], Awaitable[None]], name: str) -> None:
        """Call it at every heartbeat until this relay closes; failures are counted."""
        self._background.repeat(call, self._config.heartbeat_s, name)

    async def drain(self, serving_s: float = math.inf) -> None:
        """Take no more requests, and return when the last one has ended; see `Registration.drain`."""
        await self._registration.drain(serving_s)

    async def close(self) -> None:
        await self._background.close()
        self._hang_up()
        await self._registration.leave()

    def _hang_up(self) -> None:
        """On every router, once it has what was written to it already."""
        if self._server is not None:
            self._server.close()
        for writer in self._writers:
            writer.close()

    def _count_failure(self, task: str) -> None:
        self._failures[task] += 1

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
            await self._obey_all(RouterLink(router_id, writer), reader)
        except (ProtocolError, OSError, asyncio.IncompleteReadError) as error:
            logger.warning("refused a connection: %s", error or type(error).__name__)
        except Exception:  # of any kind: only asyncio would be told of it
            logger.exception("serving a router failed")
            self._count_failure("serve")
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _obey_all(self, link: RouterLink, reader: asyncio.StreamReader) -> None:
        self._links.add(link)
        self._blocks.due.set()
        try:
            while True:
                await self._obey(link, await wire.read_frame(reader))
        except (OSError, asyncio.IncompleteReadError):
            logger.info("router %s left with %d requests running", link.router_id, len(link.request_ids))
        except (ProtocolError, msgspec.MsgspecError) as error:
            logger.error("hanging up on router %s: %s", link.router_id, error)
        finally:
            self._links.discard(link)
            await self._stop(link.request_ids)

    async def _obey(self, link: RouterLink, frame: wire.Frame) -> None:
        if frame.kind is wire.Kind.ADD:
            await self._add(link, self._engine.codec.decode_request(frame.parts))
        elif frame.kind is wire.Kind.ABORT:
            ids = msgspec.msgpack.decode(frame.parts[0], type=list[str])
            await self._stop(link.request_ids.intersection(ids))
        elif frame.kind is wire.Kind.CALL:
            call = msgspec.msgpack.decode(frame.parts[0], type=wire.Call)
            self._background.spawn(self._answer(link, call), "call")
        elif frame.kind is wire.Kind.BLOCKS:
            link.knows_blocks = False
            self._blocks.due.set()
        elif frame.kind is not wire.Kind.PING:
            raise ProtocolError(f"a router sent {frame.kind.name}")

    async def _add(self, link: RouterLink, request: Any) -> None:
        request_id: str = request.request_id
        if request_id in self._board.slots.held:  # from a connection of which only we do not know yet that it is dead
            await self._stop({request_id})
        codec, trace = self._engine.codec, None
        prompt_tokens, unread_tokens = (
            codec.size(request).prompt_tokens,
            codec.unread_tokens(request, self.info.replica_id),
        )
        if (headers := codec.take_trace(request)) and self._traces is not None:
            trace = self._traces.begin(headers, prompt_tokens, time.monotonic())
        request.request_id = self._board.came(request_id, link, prompt_tokens, unread_tokens, trace)
        await self._engine.add(request)

    async def _stop(self, request_ids: Set[str], *, frees_slots: bool = True) -> None:
        engine_ids = self._board.stopped(request_ids, frees_slots=frees_slots)
        if engine_ids and self.healthy:
            await self._engine.abort(engine_ids)

    async def _recall(self, link: RouterLink, request_ids: list[str]) -> int:
        """Their slots may be other requests' as soon as this is answered, or their own again."""
        self._board.slots.recalled(request_ids)
        await self._stop(link.request_ids.intersection(request_ids), frees_slots=False)
        return len(request_ids)

    async def _answer(self, link: RouterLink, call: wire.Call) -> None:
        try:
            result: Any
            if call.method == "recall":
                result = await self._recall(link, msgspec.msgpack.decode(call.argument, type=list[str]))
            elif call.method == "status":
                result = await self._status()
            else:
                raise ProtocolError(f"a router called {call.method!r}")
        except Exception as error:  # of any kind: it is the router's, which asked for it
            logger.warning("the engine refused %s: %r", call.method, error)
            reply = wire.Reply(call.number, error=str(error) or repr(error))
        else:
            reply = wire.Reply(call.number, msgspec.json.encode(result))
        link.send(wire.Kind.CALL, [msgspec.msgpack.encode(reply)])

    async def _status(self) -> dict[str, Any]:
        """The engine's, and the relay's own, which matters most where the engine has none to give."""
        try:
            async with asyncio.timeout(ENGINE_STATUS_S):
                status = await self._engine.status()
        except Exception as error:  # of any kind: it is shown in the place of what was asked for
            status = {"error": str(error) or f"the engine does not answer: {type(error).__name__}"}
        return {**status, "held": len(self._board), "slots": self.slots, "background_failures": self._failures}

    # From the engine

    async def _pump(self) -> None:
        """Engine to routers, until the engine ends; then the routers must hear of it at once."""
        codec = self._engine.codec
        try:
            while True:
                batch = await self._engine.next_outputs()
                self._stepped_s = time.monotonic()
                self._blocks.due.set()
                for link, outputs in self._board.step(codec.outputs(batch), self._stepped_s).items():
                    link.send(wire.Kind.OUTPUTS, codec.encode_outputs(batch, outputs))
        finally:
            self._give_up()

    async def _ping(self) -> None:
        for link in self._links:
            wire.ping(link.writer)

    async def _report_blocks(self) -> None:
        await self._blocks.due.wait()
        if self.healthy:
            await self._blocks.report(self._links)

    async def _watch(self) -> None:
        """Ask the engine how it is: what it would admit is what the next heartbeat offers, and one that hangs says
        nothing."""
        if not self.healthy:
            return  # it would fail at every heartbeat until Ray Serve has replaced it
        why = await self._hangs()
        if why and self.healthy:
            logger.error("the engine hangs: %s; if steps may take that long, raise engine.hang_timeout_s", why)
            self._give_up()

    async def _hangs(self) -> str | None:
        """In words, why it is taken to hang; None where it does not."""
        limit_s, asked_s = self._config.hang_timeout_s, time.monotonic()
        try:
            async with asyncio.timeout(limit_s):
                note = self._board.before_status()
                status = await self._engine.status()
        except TimeoutError:
            return f"no step and no answer for {limit_s:g} s" if self._stepped_s < asked_s else None
        note(status)
        self._tell(status.get("out_of_reach"))
        pass_s = status.get("pass_s", 0.0)
        return f"at one forward pass for {pass_s:.1f} s" if pass_s > limit_s else None

    def _tell(self, out_of_reach: str | None) -> None:
        """Log a target that its policy cannot keep, when that begins and when it is over."""
        if out_of_reach != self._out_of_reach:
            logger.warning("target out of reach: %s", out_of_reach or "no longer")
            self._out_of_reach = out_of_reach

    def _give_up(self) -> None:
        """Ray Serve replaces a replica that is not healthy; its routers move its requests at once."""
        self._failed = True
        self._hang_up()
