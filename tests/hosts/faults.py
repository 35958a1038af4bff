"""Faults of a cluster of hosts, each done under the load of clients."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.hosts.cluster import UNIT, WORKERS, Cluster, Load
from tests.hosts.lab import Host
from tests.hosts.outcome import Outcome, outcome, texts

STEADY_S = 6.0  # of load before a fault
AFTER_S = 15.0  # and after it
LATE_S = 75.0  # after a fault of which Ray may draw conclusions later


@dataclass(frozen=True)
class Fault:
    """
    does: for the time of the block the fault is there; what follows heals it.
    lasts_s: how long it is there.
    asks: the hosts that clients ask.
    after_s: how long clients go on once it is healed.
    prepares: what is done before there is any load.
    """

    name: str
    does: Callable[[Cluster], Any]
    lasts_s: float = 0.0
    asks: Callable[[Cluster], Sequence[Host]] = lambda cluster: (cluster.head,)
    after_s: float = AFTER_S
    prepares: Callable[[Cluster], None] = lambda cluster: None


@dataclass
class Trial:
    """A cluster, the texts that it made undisturbed, and what came of each fault by its name."""

    cluster: Cluster
    undisturbed: dict[int, str]
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    found: dict[str, Any] = field(default_factory=dict)


def first_run(cluster: Cluster) -> Trial:
    with Load(cluster, (cluster.head,)) as load:
        time.sleep(STEADY_S)
    return Trial(cluster, texts(load.found))


def undergo(trial: Trial, fault: Fault) -> Outcome:
    """Returns once the clients have ended and the cluster is whole again."""
    cluster = trial.cluster
    fault.prepares(cluster)
    with Load(cluster, fault.asks(cluster)) as load:
        time.sleep(STEADY_S)
        with fault.does(cluster):
            time.sleep(fault.lasts_s)
        time.sleep(fault.after_s)
    trial.found[fault.name] = load.found
    trial.outcomes[fault.name] = made = outcome(load.found, trial.undisturbed)
    cluster.wait_until_whole()
    return made


@contextmanager
def power_loss(cluster: Cluster) -> Iterator[None]:
    cluster.workers[0].power_loss()
    yield
    cluster.workers[0].boot()


@contextmanager
def cut(host: Host) -> Iterator[None]:
    host.cut()
    yield
    host.join()


@contextmanager
def one_way(cluster: Cluster) -> Iterator[None]:
    """What a worker sends to the other one is lost: tokens, but no requests."""
    first, second = cluster.workers
    first.block(second)
    yield
    first.unblock(second)


def join(cluster: Cluster) -> None:
    """A further worker, which has no replica until another one is drained."""
    cluster.join(next(cluster.switch[name] for name in WORKERS if cluster.switch[name] not in cluster.workers))


@contextmanager
def drain(cluster: Cluster) -> Iterator[None]:
    """One worker is drained onto the one that has joined, and stopped."""
    host = cluster.workers[0]
    cluster.drain(host)
    host.stop(UNIT)
    host.power_loss()
    yield


def workers(cluster: Cluster) -> Sequence[Host]:
    return cluster.workers


def other_worker(cluster: Cluster) -> Sequence[Host]:
    return cluster.workers[1:]


FAULTS = (
    Fault("a worker cut off for 5 s", lambda c: cut(c.workers[0]), 5.0),
    Fault("a worker cut off for 30 s", lambda c: cut(c.workers[0]), 30.0, after_s=LATE_S),
    Fault("a worker cut off for 60 s", lambda c: cut(c.workers[0]), 60.0, after_s=LATE_S),
    Fault("a router cut off from Redis for 30 s", lambda c: c.workers[0].cut_from(c.redis), 30.0),
    Fault("two workers cut off from each other for 30 s", lambda c: c.workers[0].cut_from(c.workers[1]), 30.0),
    Fault("one way between two workers gone for 30 s", one_way, 30.0),
    Fault("the head cut off for 35 s", lambda c: cut(c.head), 35.0, asks=workers, after_s=LATE_S),
    Fault("power loss of a worker, asked through the head", power_loss, 40.0),
    Fault("power loss of a worker, asked through the other", power_loss, 40.0, asks=other_worker),
    Fault("a worker drained, another one in its place", drain, prepares=join),
)
