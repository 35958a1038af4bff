"""Which of the late requests starts."""

from dataclasses import replace

from policies.router.late import NEWEST, OLDEST, looked_at, most_saved
from policies.router.ledger import Place, Replica
from policies.router.tickets import Reading, ReplicaTerms, Ticket


def _late(name: str, cached: dict[str, int] | None = None, tokens: int = 100) -> Ticket:
    return Ticket(
        request_id=name,
        bin_index=0,
        deadline_key=0.0,
        work_s=0.0,
        router_id="r",
        unread_tokens=tokens,
        prefixes=tuple((cached or {}).items()),
        prompt_token_s=1.0,
    )


def _replica(name: str, unread: int = 0, slots: int = 4, **changes: float) -> Replica:
    replica = Replica(name, ReplicaTerms(), slots, **changes)
    replica.reading = Reading(known_tokens=-unread, max_unread_tokens=1000)
    return replica


def test_that_starts_of_which_most_seconds_are_saved() -> None:
    tickets = [_late("none"), _late("some", {"a": 50}), _late("most", {"a": 60})]
    found = most_saved(tickets, [_replica("a")])
    assert found is not None and (found.place, found.replica.replica_id, found.saved_s) == (2, "a", 60.0)


def test_of_equal_savings_the_oldest_starts() -> None:
    found = most_saved([_late("x"), _late("y")], [_replica("a")])
    assert found is not None and found.place == 0


def test_seconds_count_and_not_tokens() -> None:
    tickets = [_late("fast", {"a": 60}), _late("slow", {"b": 50})]
    found = most_saved(tickets, [_replica("a"), _replica("b", slowness=2.0)])
    assert found is not None and (found.place, found.saved_s) == (1, 100.0)


def test_none_starts_elsewhere_while_its_own_replica_comes_to_it_sooner() -> None:
    replicas = [_replica("a", unread=10), _replica("b")]
    assert most_saved([_late("x", {"a": 80})], replicas) is None  # 10 + 20 < 100
    found = most_saved([_late("x", {"a": 80})] * 5, replicas)  # 10 + 5 * 20 > 100
    assert found is not None and (found.place, found.replica.replica_id) == (4, "b")


def test_new_sessions_spread_over_idle_replicas_by_their_work() -> None:
    busy = _replica("a")
    busy.on["running"], busy.work_s = Place(_late("running"), 0.0, "a"), 1.0
    found = most_saved([_late("x")], [busy, _replica("b")])
    assert found is not None and found.replica.replica_id == "b"


def test_a_replica_out_of_reach_is_taken_only_where_there_is_no_other() -> None:
    ticket = replace(_late("x", {"a": 99}), avoids=("a",))
    found = most_saved([ticket], [_replica("a"), _replica("b")])
    assert found is not None and found.replica.replica_id == "b"
    found = most_saved([ticket], [_replica("a")])
    assert found is not None and found.replica.replica_id == "a"


def test_nothing_starts_without_replicas_or_where_all_have_prompts_to_read() -> None:
    assert most_saved([_late("x")], []) is None
    assert most_saved([_late("x")], [_replica("a", unread=1)]) is None
    assert most_saved([], [_replica("a")]) is None


def test_the_oldest_and_the_newest_are_looked_at() -> None:
    numbers = list(range(OLDEST + NEWEST))
    assert looked_at(numbers) == numbers
    numbers = list(range(100))
    assert looked_at(numbers) == [*numbers[:OLDEST], *numbers[-NEWEST:]]
