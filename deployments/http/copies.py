"""Copies of requests for a candidate that mirrors: it answers them with what other requests leave idle, and nobody
reads the answer. A copy is charged to no key, is in no usage, and stores nothing."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import Message, Scope

from deployments.http.exchange import Exchange
from deployments.http.in_process import replayed
from deployments.http.middleware import REQUEST_ID_HEADER, TENANT, route_path
from deployments.http.renaming import renamed
from deployments.http.trials import Ended, Run, Trial, Version, ran_as
from policies.errors import SluiceError
from policies.live import Live
from policies.router.promise import Promise
from router.background import BackgroundTasks
from router.timing import HttpContext, current

logger = logging.getLogger(__name__)

MOST_COPIES = 64  # on their way in one router: as many as a replica has slots at once, all others would only wait
MOST_BYTES = 64 << 20  # of their bodies, which are kept beside those of requests
# Whose answers have no consequences: a response may be stored, gone on from, and call tools.
COPIED_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/messages"})
_KEPT_HEADERS = frozenset({b"content-type", b"accept", b"anthropic-version"})


@dataclass(frozen=True, slots=True)
class CopyTerms:
    """As what copies are served.

    Attributes:
        slo_class: one that fills idle capacity. Its targets do not count: an engine takes its time where a first token
            is due in a minute, and a copy is to run as its request does.
        max_wait_s: the longest that a copy may take.
    """

    slo_class: str
    max_wait_s: float


class Copies:
    """Those of one router that are on their way."""

    def __init__(self, background: BackgroundTasks, terms: Live[CopyTerms | None]) -> None:
        """Args:
        terms: None where no class fills idle capacity, and none is made.
        """
        self._background, self._terms = background, terms
        self._running = self._bytes = 0

    def begin(self, trial: Trial, scope: Scope, body: bytes, context: HttpContext) -> Callable[[int], None] | None:
        """Send a copy, or count that there is no room for it.

        Returns what notes the request itself, with the status of its response; None where it has no copy.
        """
        terms = self._terms.now
        if terms is None or route_path(scope) not in COPIED_PATHS:
            return None
        run, promise = trial.run, context.promise
        if self._running >= MOST_COPIES or self._bytes + len(body) > MOST_BYTES:
            trial.left_out(run)
            return None
        self._running += 1
        self._bytes += len(body)
        pair = _Pair(trial, run)
        copy = HttpContext(time.monotonic(), terms.slo_class, promise=promise, request_id=f"{context.request_id}-copy")
        copy.is_copy = True
        copy.expected_tokens, copy.max_engine_requests = context.expected_tokens, context.max_engine_requests
        work = self._answered(pair, _scope_of(scope, copy), body, copy, promise, terms.max_wait_s)
        self._background.spawn(work, "copy for a candidate").add_done_callback(lambda _: self._ended(len(body)))
        return lambda status: pair.note(Version.INCUMBENT, ran_as(context, status, promise))

    def _ended(self, size: int) -> None:
        self._running -= 1
        self._bytes -= size

    async def _answered(
        self, pair: "_Pair", scope: Scope, body: bytes, copy: HttpContext, promise: Promise, within_s: float
    ) -> None:
        """Let the candidate answer a copy; a client sees nothing of how that ends."""
        current.set(copy)  # of this task alone
        exchange = Exchange(_drop, copy)
        try:
            named = await renamed(body, pair.trial.name)
            async with asyncio.timeout(within_s):
                await exchange.serve(pair.trial.app, scope, replayed(named, _stays))
        except TimeoutError:
            pair.leave_out()
            return
        except SluiceError as error:  # it was refused, for too many wait
            logger.debug("a copy was not answered: %s", error)
            pair.leave_out()
            return
        except Exception:
            logger.warning("%s failed at a copy", pair.trial.name, exc_info=True)
            pair.note(Version.CANDIDATE, ran_as(copy, 500, promise))
            return
        pair.note(Version.CANDIDATE, ran_as(copy, exchange.status, promise))


class _Pair:
    """A request and its copy, which are counted once both have ended in a way that can be compared."""

    def __init__(self, trial: Trial, run: Run) -> None:
        self.trial, self._run = trial, run
        self._ended: dict[Version, Ended | None] = {}

    def note(self, version: Version, ended: Ended | None) -> None:
        self._ended[version] = ended
        if version is Version.CANDIDATE and ended is None:
            self.leave_out()
        both = {each: found for each, found in self._ended.items() if found is not None}
        if len(both) == len(Version):
            for each, found in both.items():
                self.trial.note(self._run, each, found)

    def leave_out(self) -> None:
        self.trial.left_out(self._run)


def _scope_of(scope: Scope, copy: HttpContext) -> Scope:
    """That of a request which this process makes itself, in nobody's name."""
    headers = [header for header in scope["headers"] if header[0] in _KEPT_HEADERS]
    own = (REQUEST_ID_HEADER.lower().encode(), copy.request_id.encode())
    return {**scope, "headers": [*headers, own], TENANT: None}


async def _drop(message: Message) -> None:
    """In place of a client."""


async def _stays() -> Message:
    """A client that does not leave."""
    return await asyncio.Future()
