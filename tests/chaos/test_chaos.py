"""Processes die, hang, slow down and lose each other under load: every request ends once, with its exact tokens.

A thousand requests and more in most scenarios, many of them from two routers; at the end no slot is in use. Routers
to whose neighbours something happens ask until it has: a slow test process must not find them through.
"""

import os
import signal
import time
from collections.abc import Callable

import pytest

from deployments.serving.embedded_redis import EmbeddedRedis
from tests.chaos.fleet import ENDLESS, PATIENCE_S, Fleet, Process
from tests.island import Island
from tests.waiting import wait_until

pytestmark = pytest.mark.long


def until(condition: Callable[[], bool], what: str) -> None:
    wait_until(condition, PATIENCE_S, what)


def all_ended(fleet: Fleet, *routers: Process, requests: int = 1000) -> None:
    """Every request of these routers is complete and exact, and no slot is in use."""
    for router in routers:
        result = router.result()
        assert result == {"asked": result["asked"], "outcomes": {"length": result["asked"]}, "left_over": 0}
        assert result["asked"] >= requests
    nothing_is_left(fleet)


def nothing_is_left(fleet: Fleet) -> None:
    def is_empty() -> bool:
        snapshot = fleet.snapshot()
        return not snapshot.waiting and not any(load.running for load in snapshot.replicas.values())

    until(is_empty, f"all slots are free: {fleet.snapshot()}")


def test_killed_replicas(fleet: Fleet) -> None:
    replicas = [fleet.replica() for _ in range(3)]
    router = fleet.router(ENDLESS)
    for asked, victim in ((200, 0), (400, 1), (600, 2)):
        until(lambda least=asked: router.asked >= least, f"{asked} answers")  # type: ignore[misc]
        replicas[victim].kill()
        replicas.append(fleet.replica())
    all_ended(fleet, router)


def test_a_killed_replica_of_two_that_take_gang_batches(fleet: Fleet) -> None:
    """While one is gone the other goes on, batch by batch; what the first held is in them."""
    gangs = ("--slots", "8", "--gang-max-wait-s", "0.02", "--step-s", "0.001")
    victim, _ = (fleet.replica(*gangs) for _ in range(2))
    routers = [fleet.router(ENDLESS, "--requests", "300") for _ in range(2)]
    until(lambda: all(router.asked >= 100 for router in routers), "both are in the middle")
    assert all(load.gang for load in fleet.snapshot().replicas.values())
    victim.kill()
    until(lambda: len(fleet.snapshot().replicas) == 1, "it is dropped")
    all_ended(fleet, *routers, requests=300)


def test_a_killed_router(fleet: Fleet) -> None:
    for _ in range(2):
        fleet.replica()
    victim, other = fleet.router(ENDLESS), fleet.router(ENDLESS)
    until(lambda: victim.asked >= 300 and other.asked >= 200, "both are in the middle")
    victim.kill()
    all_ended(fleet, other)


def test_a_killed_redis_that_comes_back_empty(fleet: Fleet) -> None:
    for _ in range(2):
        fleet.replica()
    routers = [fleet.router(ENDLESS), fleet.router(ENDLESS)]
    until(lambda: all(router.asked >= 200 for router in routers), "both are in the middle")
    os.kill(fleet.redis.pid, signal.SIGKILL)
    until(lambda: not fleet.redis.alive, "its port is free")
    time.sleep(1.0)
    fleet.redis = EmbeddedRedis(fleet.redis_port, fleet.password)
    all_ended(fleet, *routers)


def test_a_replica_that_hangs_and_comes_back(fleet: Fleet) -> None:
    victim, _ = fleet.replica(), fleet.replica()
    router = fleet.router(ENDLESS, "--requests", "3000")
    until(lambda: router.asked >= 500, "it is in the middle")
    victim.popen.suspend()
    until(lambda: len(fleet.snapshot().replicas) == 1, "it is dropped")
    victim.popen.resume()
    until(lambda: len(fleet.snapshot().replicas) == 2, "it is back")
    all_ended(fleet, router, requests=3000)


def test_a_network_that_is_cut_and_joined_again(island: Island, fleet: Fleet) -> None:
    fleet.replica("--step-s", "0.02")
    fleet.replica_on(island, "--step-s", "0.02")
    routers = [fleet.router(ENDLESS, "--requests", "1500") for _ in range(2)]
    until(lambda: all(router.asked >= 300 for router in routers), "both are in the middle")
    until(lambda: len(fleet.snapshot().replicas) == 2, "both serve")
    island.pull()
    until(lambda: len(fleet.snapshot().replicas) == 1, "what is cut off is dropped")
    island.join()
    until(lambda: len(fleet.snapshot().replicas) == 2, "it is back")
    all_ended(fleet, *routers, requests=1500)


def test_one_replica_fifty_times_slower_than_the_other(fleet: Fleet) -> None:
    fleet.replica("--step-s", "0.1")
    fleet.replica("--step-s", "0.002")
    routers = [fleet.router(ENDLESS, "--requests", "500") for _ in range(2)]

    def is_known() -> bool:
        loads = fleet.snapshot().replicas
        return len(loads) == 2 and loads["r0"].slowness > 2 * loads["r1"].slowness

    # A machine that stands still makes both of them slow, for as long as that is remembered.
    until(is_known, "which one is slow")
    all_ended(fleet, *routers, requests=500)


def test_routers_whose_clocks_differ_by_days(fleet: Fleet) -> None:
    for _ in range(2):
        fleet.replica()
    all_ended(fleet, fleet.router("--skew-s", "300000"), fleet.router("--skew-s", "-500"))


def test_a_storm_of_cancellations(fleet: Fleet) -> None:
    for _ in range(2):
        fleet.replica("--slots", "8")
    routers = [fleet.router("--cancel-fraction", "0.7") for _ in range(2)]
    for router in routers:
        result = router.result()
        assert set(result["outcomes"]) == {"length", "cancelled"}
        assert sum(result["outcomes"].values()) == 1000
    nothing_is_left(fleet)
