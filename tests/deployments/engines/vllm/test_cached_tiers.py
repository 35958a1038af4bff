"""What vLLM's offloading says of its tiers, in vLLM's own structures, against what it finds there itself."""

from array import array
from collections.abc import Iterator
from random import Random
from typing import Any

import msgspec
import pytest
from vllm.config import KVEventsConfig, KVTransferConfig
from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    MEDIUM_GPU,
    MEDIUM_STORAGE,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventPublisherFactory,
    KVEventBatch,
)
from vllm.v1.core import block_pool, kv_cache_utils
from vllm.v1.request import Request

from deployments.engines.vllm import cached_tiers
from deployments.engines.vllm.args import generating_config, parse_vllm_args
from deployments.engines.vllm.cached_blocks import note_cached_blocks, request_block_hashes
from deployments.engines.vllm.cached_tiers import STORE, NotingPublisher, TierTable, block_name, tier_table
from policies.router.tiers import Load
from router.cached_blocks import HASH_BYTES, group_mark, tier_mark
from tests.deployments.engines.vllm.test_cached_blocks import Router, asked, prompt_of
from tests.virtual_engine import LOAD_BYTES, LOAD_S, MODEL, VirtualEngine

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

CHUNK_BYTES = 4096  # to which vLLM rounds what a block takes in memory of the host
READ_S = 2e-5


@pytest.fixture(scope="module", autouse=True)
def noting() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_pool, "BlockHashToBlockMap", block_pool.BlockHashToBlockMap)  # which puts it back
        patch.setattr(EventPublisherFactory, "create", EventPublisherFactory.create)
        note_cached_blocks()
        yield


# vLLM's events


def stored(*hashes: bytes | int, medium: str | None = MEDIUM_CPU, **more: Any) -> BlockStored:
    """With as much besides as vLLM's offloading says by default."""
    return BlockStored(list(hashes), None, [], 0, None, medium, None, **more)


def heard(*events: Any) -> TierTable:
    """Over the encoding in which vLLM publishes events."""
    published = msgspec.msgpack.Encoder().encode(KVEventBatch(ts=0.0, events=list(events)))
    table = TierTable()
    table.note(msgspec.msgpack.Decoder(KVEventBatch).decode(published).events)
    return table


def names(table: TierTable) -> set[int]:
    found = array("Q")
    found.frombytes(table.whole())
    return set(found)


ONE, TWO = bytes(range(32)), bytes(range(32, 64))


@pytest.mark.parametrize(
    ("event", "tier"),
    [
        (stored(ONE), MEDIUM_CPU),
        (stored(ONE, locality="LOCAL"), MEDIUM_CPU),
        (stored(ONE, medium=MEDIUM_STORAGE, locality="LOCAL", ownership="1:fs"), MEDIUM_STORAGE),
        (stored(ONE, medium=MEDIUM_STORAGE, locality="REMOTE"), STORE),
        (stored(ONE, medium="cpu"), STORE),  # Mooncake's store
    ],
)
def test_a_block_lies_where_its_event_says(event: BlockStored, tier: str) -> None:
    assert names(heard(event)) == {block_name(ONE, 0, tier)}


@pytest.mark.parametrize("medium", [None, MEDIUM_GPU, "a medium of tomorrow"])
def test_what_lies_in_no_tier_that_is_known_is_not_noted(medium: str | None) -> None:
    assert not names(heard(stored(ONE, medium=medium)))


def test_blocks_go_by_one_name_whether_vllm_makes_integers_of_hashes_or_not() -> None:
    whole = int.from_bytes(ONE, "big") & ((1 << 64) - 1)  # as `vllm.v1.core.kv_cache_utils.maybe_convert_block_hash`
    assert names(heard(stored(whole))) == names(heard(stored(ONE)))


def test_groups_of_layers_have_names_of_their_own() -> None:
    (plain,), (other,) = names(heard(stored(ONE))), names(heard(stored(ONE, group_idx=2)))
    assert plain ^ other == group_mark(2)
    assert plain == int.from_bytes(ONE[-HASH_BYTES:], "little") ^ tier_mark(MEDIUM_CPU)


def test_what_is_removed_from_one_tier_stays_in_others() -> None:
    table = heard(stored(ONE, TWO), stored(ONE, medium=MEDIUM_STORAGE), BlockRemoved([ONE], MEDIUM_CPU, 0))
    assert names(table) == {block_name(TWO, 0, MEDIUM_CPU), block_name(ONE, 0, MEDIUM_STORAGE)}
    assert not names(heard(stored(ONE), AllBlocksCleared()))


def test_the_oldest_blocks_of_a_full_table_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_tiers, "MOST_BLOCKS", 3)
    table = heard(*(stored(n) for n in (1, 2, 3, 1, 4)))
    assert names(table) == {block_name(n, 0, MEDIUM_CPU) for n in (3, 1, 4)}


# vLLM's scheduler with its offloading


def tiered(host_blocks: int = 64, blocks: int = 40, **given: Any) -> VirtualEngine:
    offloading = {"cpu_bytes_to_use": host_blocks * CHUNK_BYTES, **given.pop("extra", {})}
    return VirtualEngine(
        given.pop("settings", None),
        blocks=blocks,
        slots=4,
        budget=128,
        enable_prefix_caching=True,
        kv_transfer_config=KVTransferConfig(
            kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=offloading
        ),
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
        **given,
    )


class TieredRouter(Router):
    def load(self, prompt: list[int]) -> Load | None:
        hashing = self.known.hashing
        assert hashing is not None
        blocks = request_block_hashes(asked(prompt), hashing)
        return self.known.loads(blocks, len(prompt), hashing, {"r": self.predicted(prompt)}, READ_S).get("r")

    def loads_really(self, prompt: list[int]) -> int:
        """What vLLM's connector would load."""
        request = Request("y", prompt, asked(prompt).sampling_params, None, block_hasher=self.engine._block_hasher)
        connector = self.engine.scheduler.connector
        connector.on_new_request(request)
        tokens, _ = connector.get_num_new_matched_tokens(request, self.real(prompt))
        connector.request_finished_all_groups(request, ())
        return int(tokens or 0)


@pytest.mark.parametrize("extra", [{}, {"blocks_per_chunk": 2}], ids=["blocks", "chunks"])
@pytest.mark.parametrize("host_blocks", [48, 64, 200])
def test_loads_are_foreseen_as_vllms_offloading_finds_them(host_blocks: int, extra: dict[str, int]) -> None:
    """The cache of the GPU holds two long sessions of six, the host's from one on."""
    engine, drawn, loaded = tiered(host_blocks, settings={"mode": "stock"}, extra=extra), Random(host_blocks), 0
    router = TieredRouter(engine)
    for number in range(20):
        prompt = prompt_of(drawn.randrange(6), drawn.randint(1, 8))
        engine.add(f"r{number}", len(prompt), 3, prompt_token_ids=prompt)
        if drawn.random() < 0.15:
            engine.step()  # and something is on its way
            continue
        engine.run()
        router.follow()
        for session in range(6):
            prompt = prompt_of(session, 8)
            load, real = router.load(prompt), router.loads_really(prompt)
            assert (0 if load is None else load.tokens) == real
            loaded += real
    assert loaded


def test_an_answer_tells_what_was_loaded_for_it() -> None:
    engine = tiered()
    for session in (0, 1, 2, 0):
        prompt = prompt_of(session, 8)
        engine.add(f"s{len(engine.answers)}", len(prompt), 3, prompt_token_ids=prompt)
        if len(engine.answers) == 4:
            stats = engine.scheduler.requests["s3"].prefill_stats
        engine.run()
    assert all(answer.whole for answer in engine.answers.values())
    assert stats.num_external_cached_tokens > 0
    assert stats.num_cached_tokens == stats.num_local_cached_tokens + stats.num_external_cached_tokens


def test_a_scheduler_is_made_before_vllm_knows_how_prompts_are_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an engine's process."""
    with monkeypatch.context() as patch:
        patch.delattr(kv_cache_utils, "NONE_HASH")
        engine = tiered()
    assert loaded_beside(engine) > 0


def test_what_loads_take_is_learned() -> None:
    engine = tiered()
    router = TieredRouter(engine)

    def told_s() -> float:
        router.follow()
        return router.known._replicas["r"].told.tiers[0].token_s

    for session in (0, 1, 2):
        prompt = prompt_of(session, 8)
        engine.add(f"s{session}", len(prompt), 3, prompt_token_ids=prompt)
        engine.run()
    token_bytes = 2 * 4  # of key and value, in one layer of one head of one number
    assert told_s() == pytest.approx(token_bytes / cached_tiers.BYTES_PER_S[MEDIUM_CPU])
    engine.add("again", 280, 3, prompt_token_ids=prompt_of(0, 8))
    engine.run()
    assert told_s() == pytest.approx(token_bytes * LOAD_S / LOAD_BYTES)


def loaded_beside(engine: VirtualEngine) -> int:
    """Tokens that a fourth prompt loads which begins like the first."""
    for session in (0, 1, 2):
        prompt = prompt_of(session, 8)
        engine.add(f"s{session}", len(prompt), 3, prompt_token_ids=prompt)
        engine.run()
    request = engine.add("again", 280, 3, prompt_token_ids=prompt_of(0, 8))
    stats = request.prefill_stats
    engine.run()
    return int(stats.num_external_cached_tokens)


@pytest.mark.parametrize("faster", ["load", "read"])
def test_nothing_is_loaded_that_is_read_as_soon(monkeypatch: pytest.MonkeyPatch, faster: str) -> None:
    engine = tiered()
    engine.measure()
    table = tier_table(engine.scheduler)
    assert table is not None
    bytes_per_s = 50e9 if faster == "load" else 1.0
    table.speeds[MEDIUM_CPU] = cached_tiers.LoadSpeed(bytes_per_s)
    monkeypatch.setattr(cached_tiers.LoadSpeed, "observe", lambda *_: None)
    assert (loaded_beside(engine) > 0) == (faster == "load")


# Where it is switched on


def config_of(*args: str) -> Any:
    return generating_config(parse_vllm_args(["--model", str(MODEL), "--enforce-eager", *args]))


def test_tiers_are_told_wherever_there_are_some_and_nowhere_else() -> None:
    assert config_of().kv_events_config is None
    config = config_of("--kv-offloading-size=0.1").kv_events_config
    assert (config.enable_kv_cache_events, config.publisher) == (True, "null")
    theirs = '{"enable_kv_cache_events": false}'
    assert not config_of(
        "--kv-offloading-size=0.1", f"--kv-events-config={theirs}"
    ).kv_events_config.enable_kv_cache_events


def test_without_events_the_publisher_is_vllms_own() -> None:
    assert not isinstance(VirtualEngine(enable_prefix_caching=True).scheduler.kv_event_publisher, NotingPublisher)
