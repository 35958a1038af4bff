"""A request as a turn of its session: what its engine is told, and what it is promised by its task's deadline.

What a router knows of sessions comes with the lengths that all routers exchange at their heartbeats, and of its own
turns at once. So a request waits for no further call, and finds its session on any router, unless it comes to another
one within a heartbeat of the last turn's end: then it is treated as that turn was.
"""

from policies.router.promise import Promise
from policies.router.sessions import Sessions, within_task
from router.timing import InSession


def begin(part: InSession | None, sessions: Sessions, arrival_s: float, promise: Promise) -> Promise:
    """Note in `part` what is known of its session. Returns the promise, with the whole answer before its task ends.

    Args:
        arrival_s: on the clock of all routers.
    """
    if part is None:
        return promise
    part.arrived_s, part.comes_back = arrival_s, sessions.comes_back(part.name)
    part.task = sessions.task(part.name, part.task_s, arrival_s)
    return within_task(promise, part.task, arrival_s)
