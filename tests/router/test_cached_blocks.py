"""What routers know of replicas' prefix caches."""

import logging
from array import array
from collections.abc import Iterable

import pytest

from policies.router.cached_prefix import LayerGroup
from policies.router.tiers import Load
from router import cached_blocks
from router.cached_blocks import (
    ON_THE_WAY_S,
    BlockChanges,
    BlockHashing,
    BlockSet,
    CachedBlocks,
    Tier,
    group_mark,
    tier_mark,
)
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


HOST, DISK, STORE = Tier("CPU", 1e-4), Tier("STORAGE", 5e-4), Tier("STORE", 2e-4, is_shared=True)
READ_S = 1e-3


def lying_in(tier: Tier, hashes: Iterable[int]) -> list[int]:
    return [each ^ tier_mark(tier.name) for each in hashes]


def tiered(hashes: Iterable[int], *tiers: Tier, prompt_token_s: float | None = None) -> BlockChanges:
    return BlockChanges(None, 1, HASHING, packed(hashes), tiers=tiers, prompt_token_s=prompt_token_s)


def loads(known: Known, prompt_tokens: int = 105, hashing: BlockHashing = HASHING) -> dict[str, Load]:
    hits = known.hits(prompt_tokens, hashing)
    return dict(known.loads(PROMPT, prompt_tokens, hashing, hits, READ_S))


def parts(load: Load) -> dict[str, int]:
    return {part.tier: part.tokens for part in load.parts}


def test_a_tier_goes_on_where_the_gpu_ends() -> None:
    known = Known()
    known.apply("a", tiered([100, 101, *lying_in(HOST, [101, 102, 103, 105])], HOST))
    known.apply("b", whole([100]))
    assert known.hits() == {"a": 20, "b": 10}
    assert {each: parts(load) for each, load in loads(known).items()} == {"a": {"CPU": 20}}


def test_a_farther_tier_goes_on_where_a_nearer_one_ends() -> None:
    known = Known()
    stored = [*lying_in(HOST, [101, 102]), *lying_in(DISK, [102, 103, 104])]
    known.apply("a", tiered([100, *stored], HOST, DISK))
    (load,) = loads(known).values()
    assert parts(load) == {"CPU": 20, "STORAGE": 20}
    assert load.saved_tokens == 40 - 2 - 10


def test_a_shared_store_has_what_any_replica_put_there() -> None:
    known = Known()
    known.apply("a", tiered(lying_in(STORE, [100, 102]), STORE))
    known.apply("b", tiered(lying_in(STORE, [101]), STORE))
    known.apply("c", tiered([], HOST))
    assert {each: parts(load) for each, load in loads(known).items()} == {"a": {"STORE": 30}, "b": {"STORE": 30}}
    known.forget("b")
    assert {each: parts(load) for each, load in loads(known).items()} == {"a": {"STORE": 10}}


def test_a_prompt_that_lies_in_a_tier_as_a_whole_is_loaded_as_a_whole() -> None:
    known = Known()
    known.apply("a", tiered(lying_in(HOST, PROMPT), HOST))
    assert [parts(loads(known, tokens)["a"]) for tokens in (105, 100, 99)] == [{"CPU": 100}, {"CPU": 100}, {"CPU": 90}]


def test_where_reading_is_faster_nothing_is_loaded() -> None:
    known = Known()
    stored = lying_in(DISK, PROMPT)
    known.apply("a", tiered(stored, DISK, prompt_token_s=4e-4))
    known.apply("b", tiered(stored, DISK, prompt_token_s=6e-4))
    known.apply("c", tiered(stored, DISK))
    assert set(loads(known)) == {"b", "c"}


def test_what_a_replica_loads_already_is_waited_for() -> None:
    known = Known()
    known.apply("a", tiered(lying_in(HOST, PROMPT), Tier("CPU", 1e-4, waiting_s=0.05)))
    assert loads(known)["a"].read_tokens == 50 + 10
    known.clock.advance_to(100.03)
    assert loads(known)["a"].read_tokens == 20 + 10
    known.sent("a", [], loads(known)["a"])
    assert loads(known)["a"].read_tokens == 30 + 10
    known.clock.advance_to(100.2)
    assert loads(known)["a"].read_tokens == 10


def test_chunks_of_several_blocks_go_by_the_name_of_their_last() -> None:
    known = Known()
    known.apply("a", tiered([100, *lying_in(HOST, [101, 103, 107])], Tier("CPU", 1e-4, chunk_blocks=2)))
    assert parts(loads(known)["a"]) == {"CPU": 30}


def test_layers_with_a_window_need_the_end_of_a_load_alone() -> None:
    hashing = BlockHashing(10, "sha256", b"root", groups=(LayerGroup(), LayerGroup(ids=(1,), window=2)))
    in_window = [each ^ group_mark(1) for each in (104, 105)]
    known = Known()
    stored = lying_in(HOST, [*PROMPT[:8], *in_window])
    known.apply("a", BlockChanges(None, 1, hashing, packed(stored), tiers=(HOST,)))
    assert parts(loads(known, hashing=hashing)["a"]) == {"CPU": 60}


def test_a_set_is_told_with_its_tiers() -> None:
    told, heard = BlockSet(), Known()
    told.apply(tiered(lying_in(HOST, [100]), HOST, prompt_token_s=2e-3))
    for piece in told.whole():
        heard.apply("a", piece)
    assert parts(loads(heard)["a"]) == {"CPU": 10}
