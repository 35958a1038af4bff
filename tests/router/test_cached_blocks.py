"""What routers know of replicas' prefix caches."""

import logging
from array import array
from collections.abc import Iterable

import pytest

from router import cached_blocks
from router.cached_blocks import ON_THE_WAY_S, BlockChanges, BlockHashing, BlockSet, CachedBlocks
from router.metrics import RouterMetrics
from tests.fakes import ManualClock

HASHING = BlockHashing(block_tokens=10, algorithm="sha256", root=b"root")
PROMPT = range(100, 110)  # blocks of 105 tokens


def packed(hashes: Iterable[int]) -> bytes:
    return array("Q", hashes).tobytes()


def whole(hashes: Iterable[int], sequence: int = 1, hashing: BlockHashing = HASHING) -> BlockChanges:
    return BlockChanges(None, sequence, hashing, packed(hashes))


def change(since: int, sequence: int, added: Iterable[int] = (), removed: Iterable[int] = ()) -> BlockChanges:
    return BlockChanges(since, sequence, HASHING, packed(added), packed(removed))


class Known(CachedBlocks):
    def __init__(self) -> None:
        self.clock, self.metrics = ManualClock(100.0), RouterMetrics()
        super().__init__(self.clock, self.metrics)

    def hits(self, prompt_tokens: int = 105, hashing: BlockHashing = HASHING) -> dict[str, int]:
        return dict(self.hit_tokens(PROMPT, prompt_tokens, hashing))

    def value(self, name: str) -> float | None:
        return self.metrics.registry.get_sample_value(f"sluice_{name}")


def test_hits_are_the_leading_blocks_without_a_gap() -> None:
    known = Known()
    known.apply("a", whole([100, 101, 102, 104]))
    known.apply("b", whole([101]))
    assert known.hits() == {"a": 30, "b": 0}


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    known = Known()
    known.apply("a", whole(PROMPT))
    assert [known.hits(tokens)["a"] for tokens in (100, 101, 1)] == [90, 100, 0]


def test_blocks_that_are_evicted_or_reset_are_no_hits_any_more() -> None:
    known = Known()
    known.apply("a", whole(PROMPT, 1))
    assert known.apply("a", change(1, 2, removed=[103, 104]))
    assert known.hits() == {"a": 30}
    assert known.apply("a", change(2, 3, added=[103]))
    assert known.hits() == {"a": 40}
    assert known.apply("a", whole([], 9))
    assert known.hits() == {"a": 0}


def test_after_a_gap_a_replica_is_unknown_until_it_has_told_the_whole() -> None:
    known = Known()
    known.apply("a", whole(PROMPT, 1))
    assert not known.apply("a", change(2, 3, removed=[100]))
    assert known.hits() == {}
    assert known.apply("a", change(3, 4, removed=[101]))  # it has been asked, and this was on the way
    assert known.hits() == {}
    assert known.apply("a", whole(PROMPT, 4))
    assert known.hits() == {"a": 100}
    assert known.value("cached_block_gaps_total") == 1


def test_a_replica_that_went_away_is_forgotten() -> None:
    known = Known()
    known.apply("a", whole(PROMPT))
    known.apply("b", whole([100]))
    known.forget("a")
    assert (known.hits(), len(known), known.value("cached_blocks")) == ({"b": 10}, 1, 1)
    known.forget("b")
    assert (known.hashing, known.value("cached_blocks")) == (None, 0)


def test_size_and_changes_are_counted() -> None:
    known = Known()
    known.apply("a", whole(range(1000), 1))
    known.apply("b", whole(range(500), 1))
    known.apply("a", change(1, 2, added=[5000], removed=[1, 2]))
    assert (known.value("cached_blocks"), known.value("cached_block_changes_total")) == (1499, 1503)
    size = known.value("cached_blocks_bytes")
    assert size is not None and 1499 * 64 < size < 1499 * 256


def test_what_was_just_sent_counts_as_cached_for_a_while() -> None:
    known = Known()
    known.apply("a", whole([100]))
    known.sent("a", PROMPT[:5])
    known.sent("nobody", PROMPT)
    assert known.hits() == {"a": 50}
    known.clock.advance_to(100.0 + 0.9 * ON_THE_WAY_S)
    assert known.hits() == {"a": 50}
    known.clock.advance_to(100.0 + 2.1 * ON_THE_WAY_S)
    assert known.hits() == {"a": 10}


def test_a_whole_does_not_take_back_what_is_on_the_way() -> None:
    known = Known()
    known.apply("a", whole([100]))
    known.sent("a", PROMPT)
    known.apply("a", whole([100], 7))
    assert known.hits() == {"a": 100}


@pytest.mark.parametrize(
    "other",
    [
        BlockHashing(block_tokens=20, algorithm="sha256", root=b"root"),
        BlockHashing(block_tokens=10, algorithm="xxhash", root=b"root"),
        BlockHashing(block_tokens=10, algorithm="sha256", root=b"seed"),
    ],
)
def test_a_replica_that_hashes_otherwise_is_not_counted_and_is_warned_of(
    other: BlockHashing, caplog: pytest.LogCaptureFixture
) -> None:
    known = Known()
    known.apply("a", whole(PROMPT))
    with caplog.at_level(logging.WARNING):
        known.apply("b", whole(PROMPT, hashing=other))
    assert known.hits() == {"a": 100}
    assert "replica b" in caplog.text and "PYTHONHASHSEED" in caplog.text
    known.forget("a")
    assert known.hashing == other


def test_a_whole_travels_in_pieces_and_arrives_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_blocks, "PIECE_BYTES", 80)
    sender, receiver = BlockSet(), BlockSet()
    assert not list(sender.whole())
    sender.apply(whole(range(25), 3))
    receiver.apply(whole([99], 1))
    pieces = list(sender.whole())
    assert [len(piece) for piece in pieces] == [10, 10, 5]
    assert all(receiver.apply(piece) for piece in pieces)
    assert (receiver.blocks, receiver.sequence) == (set(range(25)), 3)
    assert receiver.apply(change(3, 4, removed=range(25)))
    assert [piece.since for piece in receiver.whole()] == [None]


def test_a_piece_without_those_before_it_is_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_blocks, "PIECE_BYTES", 80)
    sender = BlockSet()
    sender.apply(whole(range(25), 3))
    _, second, _ = sender.whole()
    assert not BlockSet().apply(second)
