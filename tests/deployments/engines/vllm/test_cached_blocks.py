"""What an engine core says of its prefix cache, against vLLM's own look-ups; and how routers hash prompts."""

import logging
from array import array
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.distributed.kv_events import EventPublisherFactory
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import get_hash_fn_by_name, sha256
from vllm.v1.core import block_pool, kv_cache_utils
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator, get_kv_cache_coordinator
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock, make_block_hash_with_group_id
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from deployments.engines.vllm import cached_blocks
from deployments.engines.vllm.cached_blocks import (
    NO_TIERS,
    block_hashing,
    core_blocks,
    note_cached_blocks,
    request_block_hashes,
)
from deployments.engines.vllm.engine import VllmEngine
from deployments.engines.vllm.layer_groups import layer_groups
from policies.router.cached_prefix import LayerGroup
from router.cached_blocks import BlockChanges, BlockHashing, BlockSet, CachedBlocks
from router.metrics import RouterMetrics
from tests.deployments.engines.vllm.links import core_link
from tests.deployments.engines.vllm.requests import request_of
from tests.fakes import ManualClock
from tests.virtual_engine import VirtualEngine

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

BLOCK = 16
SHAPE: dict[str, Any] = {"num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}


@pytest.fixture(scope="module", autouse=True)
def noting() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_pool, "BlockHashToBlockMap", block_pool.BlockHashToBlockMap)  # which puts it back
        patch.setattr(EventPublisherFactory, "create", EventPublisherFactory.create)
        note_cached_blocks()
        yield


def core_of(engine: VirtualEngine) -> SimpleNamespace:
    return SimpleNamespace(scheduler=engine.scheduler, vllm_config=engine.scheduler.vllm_config)


def told(engine: VirtualEngine, since: int | None = None) -> BlockChanges:
    """Over the codec of vLLM's calls."""
    changes = core_blocks(core_of(engine), since)
    return msgspec.convert(msgspec.msgpack.decode(msgspec.msgpack.encode(changes)), BlockChanges)


def asked(prompt: list[int], **more: Any) -> EngineCoreRequest:
    return request_of(*prompt, **{"sampling_params": SamplingParams(max_tokens=1), **more})


class Router:
    """Follows one engine as a router would."""

    def __init__(self, engine: VirtualEngine) -> None:
        self.engine, self.known = engine, CachedBlocks(ManualClock(), RouterMetrics())
        self.sequence: int | None = None

    def follow(self) -> None:
        changes = told(self.engine, self.sequence)
        assert self.known.apply("r", changes)
        self.sequence = changes.sequence

    def predicted(self, prompt: list[int], **more: Any) -> int:
        hashing = self.known.hashing
        assert hashing is not None
        return self.known.hit_tokens(request_block_hashes(asked(prompt, **more), hashing), len(prompt), hashing)["r"]

    def real(self, prompt: list[int], **more: Any) -> int:
        request = Request(
            "y", prompt, SamplingParams(max_tokens=1), None, block_hasher=self.engine._block_hasher, **more
        )
        return self.engine.scheduler.kv_cache_manager.get_computed_blocks(request)[1]


def prompt_of(session: int, turns: int) -> list[int]:
    """Sessions share their first 40 tokens, and each turn adds 30 of its own."""
    return [7] * 40 + [100 * session + turn + 1000 for turn in range(turns) for _ in range(30)]


Step = tuple[str, int, int]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["run"] * 6 + ["step"] * 2 + ["reset"]), st.integers(0, 5), st.integers(1, 8)),
        min_size=20,
        max_size=40,
    ),
    st.sampled_from([(), (), (64,), (40, 100)]),
)
def test_predicted_hits_are_vllms_own_whatever_was_evicted_and_after_a_reset(
    steps: list[Step], windows: tuple[int, ...]
) -> None:
    """The cache holds two long sessions of six."""
    blocks = 40 * (1 + len(windows))
    engine = VirtualEngine(blocks=blocks, slots=4, budget=128, windows=windows, enable_prefix_caching=True)
    router = Router(engine)
    for number, (what, session, turns) in enumerate(steps):
        prompt = prompt_of(session, turns)
        engine.add(f"r{number}", len(prompt), 3, prompt_token_ids=prompt)
        engine.run() if what == "run" else engine.step()
        if what == "reset":
            engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        router.follow()
        for each in range(6):
            assert router.predicted(prompt_of(each, 8)) == router.real(prompt_of(each, 8))


FULL = FullAttentionSpec(**SHAPE, block_size=BLOCK)
LONG = FullAttentionSpec(**SHAPE, block_size=2 * BLOCK)
CHUNKS = ChunkedLocalAttentionSpec(**SHAPE, block_size=BLOCK, attention_chunk_size=5 * BLOCK)


def window(tokens: int, blocks: int = 1) -> SlidingWindowSpec:
    return SlidingWindowSpec(**SHAPE, block_size=blocks * BLOCK, sliding_window=tokens)


def coordinator_of(*specs: KVCacheSpec, use_eagle: bool = False) -> KVCacheCoordinator:
    groups = [KVCacheGroupSpec([f"layer{at}"], spec) for at, spec in enumerate(specs)]
    return get_kv_cache_coordinator(
        KVCacheConfig(num_blocks=64, kv_cache_tensors=[], kv_cache_groups=groups),
        max_model_len=2048,
        max_in_flight_tokens=128,
        use_eagle=use_eagle,
        enable_caching=True,
        enable_kv_cache_events=False,
        dcp_world_size=1,
        pcp_world_size=1,
        scheduler_block_size=max(spec.block_size for spec in specs),
        hash_block_size=BLOCK,
    )


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(
        [
            (window(40),),
            (FULL, window(33)),
            (FULL, window(40), window(16), window(40)),
            (window(100), LONG, window(20), LONG),
            (FULL, window(70, blocks=2)),
            (CHUNKS, FULL),
            (CHUNKS,),
        ]
    ),
    st.integers(1, 16 * BLOCK),
    st.data(),
)
def test_hits_of_several_kinds_of_layers_are_vllms_own_whatever_blocks_are_there(
    specs: tuple[KVCacheSpec, ...], tokens: int, data: st.DataObject
) -> None:
    kv_cache_utils.init_none_hash(sha256)
    coordinator = coordinator_of(*specs)
    hashes = [BlockHash(bytes([block]) * 32) for block in range(tokens // BLOCK)]
    table, held = coordinator.block_pool.cached_block_hash_to_block, KVCacheBlock(1)
    for group_id, spec in enumerate(specs):
        missing = data.draw(st.sets(st.integers(0, 15), max_size=5))
        for block, its_hash in enumerate(hashes[spec.block_size // BLOCK - 1 :: spec.block_size // BLOCK]):
            if block not in missing:
                table.insert(make_block_hash_with_group_id(its_hash, group_id), held)
    known = CachedBlocks(ManualClock(), RouterMetrics())
    known.apply(
        "r",
        msgspec.convert(
            {**table.changes(None, NO_TIERS), "hashing": block_hashing(coordinator, "sha256")}, BlockChanges
        ),
    )
    assert known.hashing is not None
    blocks = array("Q", b"".join(each[-8:] for each in hashes))
    found = known.hit_tokens(blocks, tokens, known.hashing)["r"]
    assert found == coordinator.find_longest_cache_hit(hashes, tokens - 1)[1]


def test_each_turn_of_a_conversation_hits_what_its_engine_has_kept_of_the_turn_before() -> None:
    engine = VirtualEngine(enable_prefix_caching=True)
    router = Router(engine)
    hits = []
    for turn in range(1, 5):
        prompt = prompt_of(0, turn)
        router.follow()
        hits.append(router.predicted(prompt))
        engine.add(f"t{turn}", len(prompt), 1, prompt_token_ids=prompt)
        engine.run()
    assert hits == [0, 64, 96, 128]  # whole blocks of 70, 100 and 130 tokens


def test_of_two_blocks_with_one_hash_one_may_go() -> None:
    """vLLM's events would tell the hash as removed."""
    engine = VirtualEngine(blocks=24, enable_prefix_caching=True)
    router, prompt = Router(engine), prompt_of(0, 3)
    for name in ("a", "b"):  # in one step, so that each computes its own
        engine.add(name, len(prompt), 1, prompt_token_ids=prompt)
    engine.run()
    router.follow()
    hits = []
    for session in (1, 2):
        other = prompt_of(session, 5)
        engine.add(f"c{session}", len(other), 1, prompt_token_ids=other)
        engine.run()
        router.follow()
        hits.append(router.predicted(prompt))
        assert hits[-1] == router.real(prompt)
    assert hits[0] == 128 > hits[1]  # first one of both has gone, then the other one


def test_nothing_is_told_where_nothing_has_changed_and_the_number_stays() -> None:
    engine = VirtualEngine(enable_prefix_caching=True)
    first = told(engine)
    again = told(engine, first.sequence)
    assert first.is_news
    assert (again.is_news, again.since, again.sequence) == (False, first.sequence, first.sequence)


def test_whoever_missed_something_is_told_all() -> None:
    engine, known = VirtualEngine(enable_prefix_caching=True), BlockSet()
    first = told(engine)
    engine.add("a", 100, 1)
    engine.run()
    told(engine, first.sequence)  # which gets lost
    known.apply(told(engine, first.sequence))
    assert len(known.blocks) == 6


def test_more_than_is_noted_is_told_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_blocks, "MAX_NOTED", 4)
    engine = VirtualEngine(enable_prefix_caching=True)
    sequence = told(engine).sequence
    engine.add("a", 100, 1)
    engine.run()
    changes = told(engine, sequence)
    assert (changes.since, len(changes)) == (None, 6)
    assert told(engine, changes.sequence).since == changes.sequence


def media(identifier: str) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(
        data=None, modality="image", identifier=identifier, mm_position=PlaceholderRange(offset=20, length=30)
    )


PROMPT = [n % 50 for n in range(200)]


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"cache_salt": "theirs"},
        {"lora_request": LoRARequest("law", 1, "/adapters/law")},
        {"mm_features": [media("a")]},
        {"prompt_token_ids": None, "prompt_embeds": torch.arange(400.0).reshape(200, 2)},
    ],
    ids=["plain", "salt", "adapter", "media", "embeddings"],
)
def test_a_router_hashes_prompts_as_engines_do_from_the_engines_root(
    monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], algorithm: str
) -> None:
    function = get_hash_fn_by_name(algorithm)
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", b"of the engine's process")
    hasher = kv_cache_utils.get_request_block_hasher(BLOCK, function)
    request = asked(PROMPT, **more)
    engines = [digest[-8:] for digest in Request.from_engine_core_request(request, hasher).block_hashes]
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", b"of the router's process")
    hashing = BlockHashing(BLOCK, algorithm, b"of the engine's process")
    assert b"".join(each.to_bytes(8, "little") for each in request_block_hashes(request, hashing)) == b"".join(engines)
    assert len(engines) == 12


def test_prompts_of_other_tenants_adapters_and_media_share_no_block() -> None:
    hashing = BlockHashing(BLOCK, "sha256", b"root")
    kinds: list[dict[str, Any]] = [
        {},
        {"cache_salt": "theirs"},
        {"lora_request": LoRARequest("law", 1, "/adapters/law")},
        {"mm_features": [media("a")]},
        {"mm_features": [media("b")]},
    ]
    last = {request_block_hashes(asked(PROMPT, **kind), hashing)[-1] for kind in kinds}
    assert len(last) == len(kinds)


def test_a_request_for_which_vllm_looks_nothing_up_has_no_blocks() -> None:
    params = SamplingParams(max_tokens=1, prompt_logprobs=1)
    assert not request_block_hashes(asked(PROMPT, sampling_params=params), BlockHashing(BLOCK, "sha256", b"root"))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"enable_prefix_caching": False}, "no prefix cache"),
        ({"enable_prefix_caching": True, "states": 1}, "layers that keep a state"),
    ],
)
def test_an_engine_whose_blocks_do_not_tell_its_hits_says_why(settings: dict[str, Any], why: str) -> None:
    answer = core_blocks(core_of(VirtualEngine(**settings)), None)
    assert isinstance(answer, str) and why in answer


def test_beside_a_draft_model_hits_of_several_kinds_of_layers_hang_on_more_than_blocks() -> None:
    assert layer_groups(coordinator_of(FULL, window(40))) is not None
    assert layer_groups(coordinator_of(FULL, window(40), use_eagle=True)) is None
    assert layer_groups(coordinator_of(FULL, use_eagle=True)) == (LayerGroup(),)


async def test_an_engine_that_tells_no_hits_is_asked_once_and_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = []

    async def answer(*call: Any) -> str:
        asked.append(call)
        return "prefix caching is off"

    monkeypatch.setattr("deployments.engines.vllm.engine.CoreLink", lambda *_: core_link(call=answer))
    engine = VllmEngine([])
    with caplog.at_level(logging.INFO):
        assert [await engine.cached_blocks(None) for _ in range(3)] == [None] * 3
    assert (asked, caplog.text.count("prefix caching is off")) == ([("sluice_blocks", None)], 1)


def test_the_block_that_a_draft_model_needs_again_is_no_hit() -> None:
    engine = VirtualEngine(enable_prefix_caching=True)
    coordinator = engine.scheduler.kv_cache_manager.coordinator
    coordinator.eagle_group_ids, coordinator.single_type_managers[0].use_eagle = {0}, True
    router, prompt = Router(engine), prompt_of(0, 3)
    engine.add("a", len(prompt), 1, prompt_token_ids=prompt)
    engine.run()
    router.follow()
    for turns in (2, 3, 4):
        assert 0 < router.predicted(prompt_of(0, turns)) == router.real(prompt_of(0, turns))
