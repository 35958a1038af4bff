"""What is special about gang replicas while the shared state is away; the rest stands in test_routed_client.py."""

from policies.router.admission import NO_LIMITS, Foreseen
from policies.router.tickets import Assignment, Ticket
from router.local_capacity import LocalCapacity
from router.state_store import Queued, ReplicaInfo, ReplicaLoad, Snapshot
from tests.fakes import ManualClock


def ticket(name: str) -> Ticket:
    return Ticket(request_id=name, bin_index=0, deadline_key=0.0, work_s=1.0, router_id="a")


async def test_a_gang_replica_goes_on_taking_whole_batches_and_what_has_waited_long_enough() -> None:
    clock, local = ManualClock(), LocalCapacity(lambda: clock.now())
    info = ReplicaInfo(replica_id="r", host="h", port=1, max_model_len=8, gang_max_wait_s=5.0)
    load = ReplicaLoad(slots=4, running=0, outstanding_s=0.0, gang=True)
    await local.begin([info], Snapshot(replicas={"r": load}, routers=2), {}, {})
    assert await local.due("a") == []
    assert await local.enqueue(ticket("x"), NO_LIMITS) == Queued([])
    started = [Assignment("x", "r"), Assignment("y", "r")]  # half of 4
    assert await local.enqueue(ticket("y"), NO_LIMITS) == Queued(started, Foreseen(1.0, 0.0))
    assert await local.enqueue(ticket("z"), NO_LIMITS) == Queued([])
    assert await local.ended("x", "a") == []
    assert await local.ended("y", "a") == []  # idle, but one is no batch yet
    clock.advance_to(5.0)
    assert await local.due("a") == [Assignment("z", "r")]
    local.end()
    assert await local.due("a") == []
