"""Faults of a cluster of hosts, each done under the load of clients."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from tests.hosts.cluster import FURTHER, UNIT, Cluster, Load
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
    prepares, undoes: what is done before there is any load, and after it.
    """

    name: str
    does: Callable[[Cluster], Any]
    lasts_s: float = 0.0
    asks: Callable[[Cluster], Sequence[Host]] = lambda cluster: (cluster.head,)
    after_s: float = AFTER_S
    prepares: Callable[[Cluster], None] = lambda cluster: None
    undoes: Callable[[Cluster], None] = lambda cluster: None


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
    fault.undoes(cluster)
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


def set_clock(cluster: Cluster, ahead_s: int) -> None:
    host = cluster.workers[0]
    host.set_clock(ahead_s)
    host.stop(UNIT)
    host.start(UNIT)
    cluster.wait_until_whole()


@contextmanager
def join(cluster: Cluster) -> Iterator[None]:
    cluster.join(cluster.switch[FURTHER])
    yield


def have_a_spare(cluster: Cluster) -> None:
    if not cluster.spare:
        cluster.join(cluster.switch[FURTHER])


@contextmanager
def renew(cluster: Cluster, hosts: int) -> Iterator[None]:
    """So many workers, one after the other: with room for one more, each is drained onto the one before."""
    for host in cluster.workers[:hosts]:
        cluster.renew(host)
        cluster.wait_until_whole()
    yield


def workers(cluster: Cluster) -> Sequence[Host]:
    return cluster.workers


def other_worker(cluster: Cluster) -> Sequence[Host]:
    return cluster.workers[1:]


FAULTS = (
    Fault("a worker cut off for 5 s", lambda c: cut(c.workers[0]), 5.0),
    Fault("a worker cut off for 30 s", lambda c: cut(c.workers[0]), 30.0, after_s=LATE_S),
    Fault("a worker cut off for 60 s", lambda c: cut(c.workers[0]), 60.0, after_s=LATE_S),
    Fault("a worker cut off for 120 s", lambda c: cut(c.workers[0]), 120.0, after_s=LATE_S),
    Fault("a router cut off from Redis for 30 s", lambda c: c.workers[0].cut_from(c.redis), 30.0),
    Fault("two workers cut off from each other for 30 s", lambda c: c.workers[0].cut_from(c.workers[1]), 30.0),
    Fault("one way between two workers gone for 30 s", one_way, 30.0),
    Fault("the head cut off for 35 s", lambda c: cut(c.head), 35.0, asks=workers, after_s=LATE_S),
    Fault("power loss of a worker, asked through the head", power_loss, 40.0),
    Fault("power loss of a worker, asked through the other", power_loss, 40.0, asks=other_worker),
    Fault(
        "a worker whose clock is 30 s ahead",
        lambda c: nullcontext(),
        30.0,
        prepares=lambda c: set_clock(c, 30),
        undoes=lambda c: set_clock(c, 0),
    ),
    Fault("a further worker joins", join),
    Fault("a worker drained, and booted again", lambda c: renew(c, 1), prepares=have_a_spare),
    Fault("both workers drained and booted again, one after the other", lambda c: renew(c, 2), prepares=have_a_spare),
)
