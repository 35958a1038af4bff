"""Tasks of agents by a deadline: the share whose last turn ends in time.

A task is a session of turns, and its client waits for each before it runs a tool and asks again. Compared are

    turns     every turn has a deadline of its own: an equal share of what its task may take beside the pauses, which
              are known here, and so is the number of turns
    task      only the task has one, as served: each turn has all that is left, for nobody knows how many follow
    none      nothing is promised

All are served by Sluice's defaults on one replica with few slots. Answers and pauses follow laws; loads are of the
turns a second that the slots can answer.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

import numpy as np
from numpy.random import Generator

from policies.router.promise import Promise
from policies.router.sessions import Sessions, Task, Turn, within_task
from simulator.cluster import new_router
from simulator.core import Event, EventLoop, Kind
from simulator.engine import Engine, EngineConfig
from simulator.engines import engine_profile
from simulator.fleet import Fleet
from simulator.presets import system
from simulator.report import Target
from simulator.reproduce.common import Setting, table
from simulator.reproduce.goodput import ENGINE
from simulator.requests import Request

LOADS = (0.8, 1.1)
RULES = ("none", "turns", "task")
SECONDS, WARM_UP_S = 120.0, 40.0
SLOTS, TURNS, SLACK = 16, 12, 2.0
TURN_TOKENS, TURN_S = 150.0, 1.3  # of a mean answer, and what it takes beside fifteen others
PAUSE_S = 8.0


class Step(NamedTuple):
    """A turn to come."""

    pause_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(slots=True)
class Client:
    """Attributes:
    began_s: of its task.
    task_s: that it may take.
    turn_s: of that, for each turn beside the pauses.
    """

    name: str
    began_s: float
    steps: list[Step]
    task_s: float
    turn_s: float
    at: int = 0
    ended_s: float | None = None


def tasks(setting: Setting) -> list[str]:
    """Tasks of agents by a deadline: share in time, promised by turn and by task."""
    jobs = [(load, rule, seed) for load in LOADS for rule in RULES for seed in range(setting.runs)]
    found = setting.each(share_in_time, jobs)
    shares = {job: share for job, share in zip(jobs, found, strict=True)}
    rows = [
        (load, *(float(np.mean([shares[load, rule, seed] for seed in range(setting.runs)])) for rule in RULES))
        for load in LOADS
    ]
    return table(("load", *RULES), rows)


def share_in_time(job: tuple[float, str, int]) -> float:
    load, rule, seed = job
    clients = drawn(load * SLOTS / TURN_S / TURNS, np.random.default_rng(seed))
    serve(clients, rule)
    counted = [each for each in clients if each.began_s >= WARM_UP_S]
    return float(np.mean([each.ended_s is not None and each.ended_s - each.began_s <= each.task_s for each in counted]))


def drawn(starts_per_s: float, rng: Generator) -> list[Client]:
    clients = []
    for number, began_s in enumerate(np.sort(rng.uniform(0.0, SECONDS, rng.poisson(starts_per_s * SECONDS)))):
        turns = int(rng.geometric(1.0 / TURNS))
        answers = np.maximum(1, np.minimum(rng.lognormal(np.log(TURN_TOKENS) - 0.32, 0.8, turns), 2000)).astype(int)
        pauses_s = rng.lognormal(np.log(PAUSE_S) - 0.5, 1.0, turns)
        prompts = 2000 + np.cumsum(rng.integers(200, 1000, turns))
        steps = [Step(*each) for each in zip(pauses_s.tolist(), prompts.tolist(), answers.tolist(), strict=True)]
        turn_s = SLACK * TURN_S * float(answers.mean()) / TURN_TOKENS
        task_s = float(pauses_s[1:].sum()) + turns * turn_s
        clients.append(Client(str(number), float(began_s), steps, task_s, turn_s))
    return clients


def serve(clients: list[Client], rule: str) -> None:
    """To the end of all tasks, with `ended_s` noted."""
    engine = EngineConfig(slots=SLOTS, total_blocks=25_000, max_model_len=32_768)
    config = system("sluice", engine_profile(ENGINE), engine, 1, {"*": Target(ttft_s=30.0)})
    sessions, by_name = Sessions(), {client.name: client for client in clients}
    tasks_of: dict[Request, Task | None] = {}

    def asked(client: Client) -> Callable[[float], Iterable[Event]]:
        def ask(now_s: float) -> Iterable[Event]:
            step = client.steps[client.at]
            had = client.steps[client.at - 1] if client.at else None
            request = Request(
                request_id=f"{client.name}/{client.at}",
                arrival_s=now_s,
                prompt_tokens=step.prompt_tokens,
                output_tokens=step.output_tokens,
                session=client.name,
                reusable_tokens=0 if had is None else had.prompt_tokens,
            )
            promise = Promise(ttft_s=30.0, e2e_s=client.turn_s if rule == "turns" else None)
            tasks_of[request] = sessions.task(client.name, client.task_s, now_s) if rule == "task" else None
            request.promise(within_task(promise, tasks_of[request], now_s))
            return router.arrive(request, now_s)

        return ask

    def finished(now_s: float, engine: Engine, requests: list[Request]) -> Iterable[Event]:
        events = [*router.finished(now_s, engine, requests)]
        for request in requests:
            client = by_name[request.session or ""]
            task = tasks_of.pop(request)
            sessions.observe(Turn(client.name, request.arrival_s, now_s, request.prompt_tokens, task))
            client.at += 1
            if client.at == len(client.steps):
                client.ended_s = now_s
            else:
                events.append(Event(now_s + client.steps[client.at].pause_s, Kind.ARRIVAL, asked(client)))
        return events

    router, numbers = new_router(config), count()
    fleet = Fleet(
        router,
        lambda replica_id: Engine(
            replica_id, config.engine, config.batch_policy(), config.engine_clock(next(numbers)), finished
        ),
        busy=lambda: any(client.ended_s is None for client in clients),
        autoscale=None,
    )
    loop = EventLoop()
    loop.add(fleet.start(1, ()))
    loop.add(Event(client.began_s, Kind.ARRIVAL, asked(client)) for client in clients)
    loop.run()
