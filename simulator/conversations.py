"""Sessions whose next request comes a while after the last answer, as people and agents send them.

Beyond capacity that matters: what waits does not grow without end, for a session that waits sends nothing more.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, pairwise

from simulator.cluster import ClusterConfig, Run, end_s, new_router
from simulator.core import Event, EventLoop, Kind
from simulator.engine import Engine
from simulator.fleet import Fleet
from simulator.report import EVERY_CLASS
from simulator.requests import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Attributes:
    prompt_tokens: in all, and `reusable_tokens` of them that the session has sent before.
    pause_s: after the answer before, or after the beginning of all.
    """

    prompt_tokens: int
    reusable_tokens: int
    output_tokens: int
    pause_s: float


def run_conversations(config: ClusterConfig, sessions: Sequence[Sequence[Turn]]) -> Run:
    """Serve all sessions to their end. Every prompt must fit into an engine's cache."""
    requests = [_requests(str(number), turns) for number, turns in enumerate(sessions)]
    everything = [each for of_session in requests for each in of_session]
    if (promise := config.promises.get(EVERY_CLASS)) is not None:
        for each in everything:
            each.promise(promise)
    config = replace(config, engine=config.engine.serving(everything))
    follows = {
        former: (latter, turn.pause_s)
        for of_session, turns in zip(requests, sessions, strict=True)
        for (former, latter), turn in zip(pairwise(of_session), turns[1:], strict=True)
    }
    left = len(everything)

    def arrive(request: Request, now_s: float) -> Iterable[Event]:
        request.arrival_s = now_s
        return router.arrive(request, now_s)

    def coming(request: Request, at_s: float) -> Event:
        return Event(at_s, Kind.ARRIVAL, partial(arrive, request))

    def finished(now_s: float, engine: Engine, ended: list[Request]) -> Iterable[Event]:
        nonlocal left
        left -= len(ended)
        following = [follows[each] for each in ended if each in follows]
        return [
            *router.finished(now_s, engine, ended),
            *(coming(request, now_s + pause_s) for request, pause_s in following),
        ]

    router, replicas, loop = new_router(config), count(), EventLoop()

    def new_engine(replica_id: str) -> Engine:
        clock = config.engine_clock(next(replicas))
        return Engine(replica_id, config.engine, config.batch_policy(), clock, finished)

    fleet = Fleet(router, new_engine, busy=lambda: left > 0)
    loop.add(fleet.start(config.replicas))
    loop.add(coming(first, turns[0].pause_s) for (first, *_), turns in zip(requests, sessions, strict=True))
    loop.run()
    last_s = end_s(everything)
    return Run(everything, [], fleet.engines, last_s, fleet.replica_seconds(last_s), loop.events)


def _requests(session: str, turns: Sequence[Turn]) -> list[Request]:
    return [
        Request(
            request_id=f"{session}/{number}",
            arrival_s=0.0,
            prompt_tokens=turn.prompt_tokens,
            output_tokens=turn.output_tokens,
            session=session,
            reusable_tokens=turn.reusable_tokens,
        )
        for number, turn in enumerate(turns)
    ]
