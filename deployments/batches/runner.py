"""Runs all open batches: reads their lines, sends them to routers while capacity is idle, and writes the answers.

It does not use the shared state. All that it knows it has read from files, so another runner may go on in its place.
"""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from deployments.batches.files import Files
from deployments.batches.lines import Line
from deployments.batches.metrics import BatchMetrics
from deployments.batches.places import Places
from deployments.batches.results import Reply, answered
from deployments.batches.run import BatchRun
from deployments.batches.state import ENDED, Batches, BatchRecord, FencedError, Status
from deployments.batches.storage import Storage
from deployments.batches.sweep import Sweep
from deployments.config.services import BatchesSection
from policies.batches.in_flight import InFlight, InFlightConfig, Load
from policies.batches.turns import Waiting
from policies.errors import ReplicaLostError
from router.background import BackgroundTasks
from router.trail import TraceHeaders

if TYPE_CHECKING:
    from deployments.process.spans import Attributes, OpenSpan, Tracing

logger = logging.getLogger(__name__)

LOOK_S = 30.0  # how often it looks for batches that it was not told of
LOAD_S = 1.0  # how often it looks at the engines' load
PATIENCE_S = 5.0  # before a batch that failed for a reason of ours is taken up again, or the folder looked at
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0  # before a request is sent again; each is twice the one before
LAST_WRITE_S = 5.0  # for what is not written yet when the runner ends
MOST_SHOWN = 100  # open batches of one owner, in the status
# Statuses that may become right by waiting, and how often a request is sent again for one: each failure may have cost
# several engine replicas, and a 500 mostly comes of the request.
LATER: Mapping[int, float] = {
    HTTPStatus.TOO_MANY_REQUESTS: math.inf,
    HTTPStatus.REQUEST_TIMEOUT: math.inf,
    HTTPStatus.INTERNAL_SERVER_ERROR: 1,
    HTTPStatus.BAD_GATEWAY: 9,
    HTTPStatus.SERVICE_UNAVAILABLE: 9,
    HTTPStatus.GATEWAY_TIMEOUT: 9,
}


class Routers(Protocol):
    """The application's routers, as the runner asks them."""

    async def answer(self, key: str | None, endpoint: str, body: bytes, trace: TraceHeaders | None) -> Reply:
        """Answer one request, in the name of an API key and as a part of a trace. Raises ReplicaLostError: no router
        answers."""

    async def loads(self) -> Mapping[str, Load]:
        """The load of every model, by each of its names. Raises ReplicaLostError: no router answers."""


Troubles = Mapping[str, str]  # ids of batches that do not get on, and why


class OpenBatches(msgspec.Struct, frozen=True):
    """The open batches of one owner: their number, and a description of the oldest."""

    count: int
    oldest: list[dict[str, Any]]


class Runner:
    """Build it, then `start`; `close` writes what was answered since the last segments, for LAST_WRITE_S at most."""

    def __init__(
        self, section: BatchesSection, storage: Storage, routers: Routers, tracing: "Tracing | None" = None
    ) -> None:
        self._section, self._routers, self._tracing = section, routers, tracing
        self._batches, self._files = Batches(storage, section), Files(storage, section)
        self._sweep_all = Sweep(storage, section)
        self._runs: dict[str, BatchRun | None] = {}
        self._places: dict[str, Places] = {}
        self._look_now = asyncio.Event()
        self.metrics = BatchMetrics()
        self._background = BackgroundTasks(lambda task: self.metrics.failures.labels(task).inc())

    def start(self) -> None:
        self._background.repeat(self._look, 0.0, "batches")
        self._background.repeat(self._observe, LOAD_S, "load of engines")
        self._background.repeat(self._sweep, 3600.0, "old files")  # which were kept for days

    async def close(self) -> None:
        await self._background.close()

    def look(self) -> None:
        """Something has changed: a batch is new, or cancelled."""
        self._look_now.set()
        for run in self._runs.values():
            if run is not None:
                run.wake.set()

    def open_batches(self, owner: str) -> OpenBatches:
        """Their present state, without reading any file."""
        mine = [run for run in self._runs.values() if run is not None and run.record.owner == owner]
        oldest = sorted(mine, key=lambda run: run.record.id)[:MOST_SHOWN]
        return OpenBatches(count=len(mine), oldest=[run.shown() for run in oldest])

    def troubles(self, owner: str) -> Troubles:
        """Of the open batches of one owner."""
        mine = (run for run in self._runs.values() if run is not None and run.record.owner == owner)
        return {run.record.id: trouble for run in mine if (trouble := run.folder.trouble) is not None}

    async def _look(self) -> None:
        """Take up what is open and does not run, then wait for the next time."""
        try:
            opened = await asyncio.to_thread(lambda: list(self._batches.opened()))
        except Exception:  # of a folder that cannot be used now: it is called again at once
            await asyncio.sleep(PATIENCE_S)
            raise
        for record in opened:
            if record.id not in self._runs:
                self._runs[record.id] = None
                self._background.spawn(self._kept_running(record), "batch")
        self.metrics.show(self._runs.values(), self._places)
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await self._look_now.wait()
        self._look_now.clear()

    async def _kept_running(self, record: BatchRecord) -> None:
        """Run a batch to its end; one that fails is taken up at a later look."""
        try:
            await self._run(record)
        except FencedError as error:
            logger.warning("%s: %s", record.id, error)
            await asyncio.sleep(PATIENCE_S)
        except asyncio.CancelledError:
            if (run := self._runs[record.id]) is not None:
                await _written_last(run)
            raise
        except Exception:
            await asyncio.sleep(PATIENCE_S)
            raise
        finally:
            del self._runs[record.id]
            self._look_now.set()

    async def _run(self, record: BatchRecord) -> None:
        run = self._runs[record.id] = await BatchRun.opened(record, self._batches, self._files)
        if run.progress.status == "validating":
            await self._validate(run)
        if run.progress.status == "in_progress":
            await run.finish(await self._sent(run))
        elif run.progress.status not in ENDED:
            await run.finish("completed")
        await run.folder(self._batches.close, record)
        logger.info("%s %s", record.id, run.progress.status)

    async def _validate(self, run: BatchRun) -> None:
        """Once a router tells the names of the models that are served."""
        while True:
            try:
                models = (await self._routers.loads()).keys()
            except ReplicaLostError as error:
                logger.info("no router tells the models: %s", error)
            else:
                await run.validate(models, self._section.max_lines)
                return
            if (ending := await self._ending(run)) is not None:
                await run.end_unread(ending)
                return
            await asyncio.sleep(LOAD_S)

    async def _sent(self, run: BatchRun) -> Status:
        """Send every request, until the batch is cancelled or its window is over; returns how it ends."""
        sending = asyncio.create_task(self._send_all(run))
        sending.add_done_callback(lambda _: run.wake.set())
        try:
            while not sending.done():
                if (ending := await self._ending(run)) is not None:
                    return ending
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(self._section.segment_s, run.left_s)):
                        await run.wake.wait()
                run.wake.clear()
                await run.flush()
                if not await run.has_room():
                    return "failed"
            await run.flush()  # whatever kept the others from being sent
            sending.result()
            return "completed"
        finally:
            sending.cancel()
            await asyncio.wait([sending])

    async def _ending(self, run: BatchRun) -> Status | None:
        """How a batch ends whose requests are not all answered; None while it goes on."""
        if await run.folder(self._batches.cancelled_at, run.record) is not None:
            return "cancelled"
        return "expired" if run.left_s <= 0 else None

    async def _send_all(self, run: BatchRun) -> None:
        places, waiting = self._places_of(run.model), run.waiting
        async with asyncio.TaskGroup() as group:
            while (line := await self._next_line(run, places, waiting)) is not None:
                task = group.create_task(self._send(run, line))
                task.add_done_callback(lambda _: places.give_back(waiting))

    async def _next_line(self, run: BatchRun, places: Places, waiting: Waiting) -> Line | None:
        """Wait for a place, then read a line: a batch that has to wait reads nothing into memory. None after the last
        line, without a place."""
        while True:
            await run.may_send()
            await places.take(waiting)
            if run.can_send:
                break
            places.give_back(waiting)  # the folder has failed meanwhile
        line = None
        try:
            line = await run.next_line()
        finally:
            if line is None:
                places.give_back(waiting)
        return line

    def _places_of(self, model: str) -> Places:
        if model not in self._places:
            policy = InFlight(InFlightConfig(most=self._section.max_in_flight))
            self._places[model] = Places(policy)
        return self._places[model]

    async def _send(self, run: BatchRun, line: Line) -> None:
        """Send a line until it is answered: again and later if its key's quota is spent or no router answers."""
        span = self._span(run.record, line)
        status: int | None = None
        try:
            reply = await self._reply(run, line, span.headers if span else None)
            status = reply.status
        finally:
            if span is not None:
                span.end(time.monotonic(), {"http.response.status_code": status}, error=_error_type(status))
        result, tokens = answered(line.number, line.custom_id, reply)
        run.note(result, tokens)
        self.metrics.count(run.model, result, tokens)

    def _span(self, record: BatchRecord, line: Line) -> "OpenSpan | None":
        """A span of all attempts until the line is answered; None without tracing."""
        if self._tracing is None:
            return None
        attributes: Attributes = {
            "sluice.batch": record.id,
            "sluice.batch_line": line.number,
            "gen_ai.request.model": line.model,
        }
        return self._tracing.begin("batch line", time.monotonic(), attributes)

    async def _reply(self, run: BatchRun, line: Line, trace: TraceHeaders | None) -> Reply:
        record, tries, pause_s = run.record, Counter[int](), FIRST_PAUSE_S
        while True:
            await run.may_send()
            try:
                reply = await self._routers.answer(record.key, record.endpoint, line.body, trace)
            except ReplicaLostError as error:
                logger.info("no router answers: %s", error)
                reply = Reply(HTTPStatus.TOO_MANY_REQUESTS, b"")
            tries[reply.status] += 1
            if tries[reply.status] > LATER.get(reply.status, 0):
                return reply
            await self._places_of(run.model).pause(run.waiting, max(pause_s, reply.retry_after_s or 0.0))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _observe(self) -> None:
        """Follow the engines' load with the limits of requests in flight, and update the metrics."""
        if self._places:
            try:
                loads = await self._routers.loads()
            except ReplicaLostError as error:
                logger.info("no router tells the load: %s", error)
                return
            for model, places in self._places.items():
                if (load := loads.get(model)) is not None:
                    places.policy.observe(load, places.in_flight)
                    places.fill()
        self.metrics.show(self._runs.values(), self._places)

    async def _sweep(self) -> None:
        await asyncio.to_thread(self._sweep_all)


async def _written_last(run: BatchRun) -> None:
    """What is not written within LAST_WRITE_S is computed again."""
    try:
        async with asyncio.timeout(LAST_WRITE_S):
            await run.flush_last()
    except (FencedError, TimeoutError) as error:
        logger.warning("%s: the last segment could not be written: %r", run.record.id, error)


def _error_type(status: int | None) -> str | None:
    """The error type of a span whose line got an error, or no answer."""
    if status is None:
        return "unanswered"
    return str(status) if status >= HTTPStatus.BAD_REQUEST else None
