"""A request as a turn of its session: what its engine is told, and what it is promised out of its task's deadline.

What a router knows of sessions comes with the lengths that all routers exchange at their heartbeats, and of its own
turns at once. So a request waits for no further call, and finds its session on any router, unless it comes to another
one within a heartbeat of the last turn's end: then it is treated as that turn was.
"""

from dataclasses import replace

from policies.router.promise import Promise
from policies.router.sessions import Sessions
from router.timing import InSession


def begin(part: InSession | None, sessions: Sessions, arrival_s: float, promise: Promise) -> Promise:
    """Note in `part` what is known of its session. Returns the promise, with the whole answer in its share of the task.

    Args:
        arrival_s: on the clock of all routers.
    """
    if part is None:
        return promise
    part.arrived_s, part.comes_back = arrival_s, sessions.comes_back(part.name)
    part.task = task = sessions.task(part.name, part.task_s, arrival_s)
    if task is None or (turn_s := sessions.turn_s(part.name, task, arrival_s)) is None:
        return promise
    part.turn_s = turn_s if promise.e2e_s is None else min(turn_s, promise.e2e_s)
    return replace(promise, e2e_s=part.turn_s)
