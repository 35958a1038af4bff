"""What an engine has that switches something off: by its arguments, and by its scheduler."""

from importlib.metadata import EntryPoint
from types import SimpleNamespace

import pytest
from vllm.config import KVTransferConfig
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from deployments.engines.features import Cause
from deployments.engines.vllm import causes
from deployments.engines.vllm.args import parse_vllm_args
from deployments.engines.vllm.causes import causes_of_args, causes_of_scheduler
from deployments.engines.vllm.scheduler.plug_in import core_status
from tests.slow_connector import arrive
from tests.virtual_engine import VirtualEngine

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]

DRAFTS = """{"method": "ngram", "num_speculative_tokens": 3}"""
CONNECTOR = """{"kv_connector": "NixlConnector", "kv_role": "kv_both"}"""


@pytest.mark.parametrize(
    ("more", "cause"),
    [
        (("--no-enable-chunked-prefill",), Cause.WHOLE_PROMPTS),
        (("--kv-transfer-config", CONNECTOR), None),
        (("--kv-offloading-size", "1"), None),
        (("--enable-lora",), None),
        (("--no-enable-prefix-caching",), Cause.NO_PREFIX_CACHE),
        (("--logits-processors", "mine:Processor"), Cause.LOGITS_PROCESSORS),
        (("--speculative-config", DRAFTS), None),
        (("--max-num-seqs", "8"), None),
    ],
)
def test_an_argument_switches_off_what_hangs_on_it(more: tuple[str, ...], cause: Cause | None) -> None:
    assert causes_of_args(parse_vllm_args(["--model", "m", *more])) == ({cause} if cause else set())


def test_logits_processors_that_are_installed_are_in_every_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = EntryPoint("mine", "mine:Processor", "vllm.logits_processors")
    monkeypatch.setattr(causes, "entry_points", lambda group: [installed] if group == installed.group else [])
    causes._processors_are_installed.cache_clear()
    try:
        assert causes_of_args(parse_vllm_args(["--model", "m"])) == {Cause.LOGITS_PROCESSORS}
    finally:
        causes._processors_are_installed.cache_clear()


def off(engine: VirtualEngine) -> dict[str, set[str]]:
    status = core_status(SimpleNamespace(scheduler=engine.scheduler))
    return {feature: set(why) for feature, why in status["off"].items()}


def test_an_engine_says_what_is_off_and_follows_its_mode() -> None:
    assert off(VirtualEngine(enable_prefix_caching=True)) == {}
    engine = VirtualEngine()
    assert off(engine) == {"exact_hits": {"no_prefix_cache"}}
    engine.scheduler.control({"mode": "stock"})
    assert off(engine) == {
        "exact_hits": {"no_prefix_cache"},
        "cut_prompts": {"stock"}, "phases": {"stock"}, "draft_lengths": {"stock"},
    }  # fmt: skip


def test_plain_vllm_s_scheduler_switches_off_what_the_plug_in_does() -> None:
    assert off(VirtualEngine(scheduler=AsyncScheduler, enable_prefix_caching=True)) == {
        "cut_prompts": {"stock"}, "phases": {"stock"}, "draft_lengths": {"stock"},
    }  # fmt: skip


def test_drafts_have_their_full_length_where_steps_are_scheduled_ahead() -> None:
    drafting = {"drafts": 3, "enable_prefix_caching": True}
    assert off(VirtualEngine(**drafting)) == {}
    assert off(VirtualEngine(**drafting, depth=2)) == {"draft_lengths": {"scheduled_ahead"}}
    assert off(VirtualEngine(depth=2, enable_prefix_caching=True)) == {}


def test_adapters_hinder_phases_while_more_are_asked_for_than_a_batch_may_hold() -> None:
    engine = VirtualEngine(enable_lora=True, max_loras=2, enable_prefix_caching=True)
    found = []
    for adapter in (1, 2, 1, 3):
        request = LoRARequest(f"a{adapter}", adapter, f"/adapters/{adapter}")
        engine.add(f"r{len(found)}", 20, 5, lora_request=request)
        found.append(off(engine))
    assert found == [{}, {}, {}, {"phases": {"adapters"}}]
    engine.run()
    assert off(engine) == {}


def test_a_connector_hinders_phases_while_it_loads() -> None:
    connector = KVTransferConfig(
        kv_connector="SlowConnector", kv_connector_module_path="tests.slow_connector", kv_role="kv_consumer"
    )
    engine = VirtualEngine(kv_transfer_config=connector, enable_prefix_caching=True)
    assert off(engine) == {}
    engine.add("r", 20, 5)
    engine.step()
    assert off(engine) == {"phases": {"loads"}}
    arrive(engine.scheduler, "r")
    engine.run()
    assert off(engine) == {}


@pytest.mark.parametrize(
    ("name", "value", "cause"),
    [
        ("need_mamba_block_aligned_split", True, Cause.STATE_BLOCKS),
        ("parallel_config", SimpleNamespace(data_parallel_size=2), Cause.DATA_PARALLEL),
        ("scheduler_config", SimpleNamespace(enable_chunked_prefill=False), Cause.WHOLE_PROMPTS),
    ],
)
def test_what_vllm_s_scheduler_has_is_found(
    name: str, value: object, cause: Cause, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = VirtualEngine(enable_prefix_caching=True).scheduler
    monkeypatch.setattr(scheduler, name, value)
    assert causes_of_scheduler(scheduler) == {cause}


def test_media_hinder_only_where_they_are_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = VirtualEngine(enable_prefix_caching=True).scheduler
    monkeypatch.setattr(scheduler, "max_num_encoder_input_tokens", 2048)
    assert causes_of_scheduler(scheduler) == set()
    for owner, name in ((scheduler.scheduler_config, "disable_chunked_mm_input"), (scheduler, "is_encoder_decoder")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, True)
            assert causes_of_scheduler(scheduler) == {Cause.WHOLE_MEDIA}
