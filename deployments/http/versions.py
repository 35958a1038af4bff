"""A model and its candidates behind one name: which of them answers a request.

A session stays with one version, and so does a conversation of stored responses, which goes on with the version that
made its last response. What is drawn goes to the candidate under the candidate's name, so its answer says who made it.
Lines of a batch, whose answers stand in one file, and requests that are only read stay with the incumbent. Once a
candidate is promoted, everything goes to it.
"""

import uuid
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.http.copies import Copies
from deployments.http.in_process import replayed
from deployments.http.middleware import TENANT, only_reads, route_path
from deployments.http.renaming import previous_response, renamed
from deployments.http.trials import Run, Trial, Version, ended_as, in_header
from policies.router.candidate import Verdict, place
from router.timing import HttpContext, current

RESPONSES_PATH = "/v1/responses"
MadeBy = Callable[[str], Awaitable[str | None]]
"""The model that made a stored response of the asking key, by the response's id; None where that is not known."""


class Versions:
    """Answers requests that name one model."""

    def __init__(self, name: str, app: ASGIApp, trials: Sequence[Trial], made_by: MadeBy, copies: Copies) -> None:
        """Args:
        name: the incumbent's, and `app` its front end.
        trials: of its candidates.
        """
        self._name, self._app, self._trials, self._made_by, self._copies = name, app, trials, made_by, copies
        self._in_header = {each: in_header(each) for each in (name, *(trial.name for trial in trials))}

    async def __call__(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Args:
        body: all of it, and `receive` what follows it.
        """
        context = current.get()
        assert context is not None, "the middleware sets it"
        promoted = next((trial for trial in self._trials if trial.in_force is Verdict.PROMOTE), None)
        if promoted is not None:
            await self._answer_by(promoted, context, scope, body, receive, send)
        elif TENANT in scope or only_reads(route_path(scope)):
            await self._app(scope, replayed(body, receive), send)
        else:
            await self._draw(context, scope, body, receive, send)

    async def _draw(self, context: HttpContext, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        drawn = await self._drawn(context, scope, body)
        if drawn is not None and not drawn.has_engines():
            drawn = None  # it would wait for one to start, and the incumbent's engines are there
        if drawn is not None and not drawn.section.now.mirror:
            context.when_over.append(partial(_note, [(drawn, drawn.run)], Version.CANDIDATE, context))
            await self._answer_by(drawn, context, scope, body, receive, send)
            return
        if drawn is not None and (note := self._copies.begin(drawn, scope, body, context)) is not None:
            context.when_over.append(note)
        context.served_by = self._in_header[self._name]
        compared = [(each, each.run) for each in self._trials if each.is_open and not each.section.now.mirror]
        if compared:
            context.when_over.append(partial(_note, compared, Version.INCUMBENT, context))
        await self._app(scope, replayed(body, receive), send)

    async def _drawn(self, context: HttpContext, scope: Scope, body: bytes) -> Trial | None:
        """The candidate in whose part of the traffic it is; None for the incumbent's."""
        if route_path(scope) == RESPONSES_PATH and (previous := await previous_response(body)) is not None:
            made_by = await self._made_by(previous)
            if made_by == self._name:
                return None
            if (found := next((each for each in self._trials if each.name == made_by), None)) is not None:
                return found if found.is_open and not found.section.now.mirror else None
        at = place(context.drawn_by or uuid.uuid4().hex)
        for trial in self._trials:  # each has its place, also where nothing goes to it: those of others do not move
            if at < trial.section.now.share:
                return trial if trial.is_open else None
            at -= trial.section.now.share
        return None

    async def _answer_by(
        self, trial: Trial, context: HttpContext, scope: Scope, body: bytes, receive: Receive, send: Send
    ) -> None:
        context.served_by = self._in_header[trial.name]
        await trial.app(scope, replayed(await renamed(body, trial.name), receive), send)


def _note(compared: Sequence[tuple[Trial, Run]], version: Version, context: HttpContext, status: int) -> None:
    if (ended := ended_as(context, status)) is not None:
        for trial, run in compared:
            trial.note(run, version, ended)
