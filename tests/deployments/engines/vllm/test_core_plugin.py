"""What an engine core of ours counts besides."""

from types import SimpleNamespace

import pytest
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from deployments.engines.vllm import core_plugin
from deployments.engines.vllm.scheduler.plug_in import SluiceScheduler, core_status
from tests.virtual_engine import VirtualEngine

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVCacheManager, "__init__", KVCacheManager.__init__)  # which puts it back
    core_plugin.count_prefix_hits()


@pytest.mark.usefixtures("counting")
@pytest.mark.parametrize("scheduler", [SluiceScheduler, AsyncScheduler])
def test_a_repeated_prompt_is_counted_as_hits_of_the_prefix_cache(scheduler: type[Scheduler]) -> None:
    """Blocks hold 16 tokens, and the last token of a prompt is always computed."""
    engine = VirtualEngine(scheduler=scheduler, enable_prefix_caching=True)
    for number in range(2):
        engine.add(f"r{number}", 100, 5)
        engine.run()
    status = core_status(SimpleNamespace(scheduler=engine.scheduler))
    assert (status["prefix_cache_query_tokens"], status["prefix_cache_hit_tokens"]) == (200, 96)


@pytest.mark.usefixtures("counting")
def test_an_engine_without_a_prefix_cache_says_nothing_of_hits() -> None:
    status = core_status(SimpleNamespace(scheduler=VirtualEngine().scheduler))
    assert not [name for name in status if name.startswith("prefix_cache")]


def test_the_use_of_the_kv_cache_is_a_ratio_of_its_blocks() -> None:
    """One block of the pool is padding. Two of 16 tokens hold a prompt of 20 and its first tokens."""
    engine = VirtualEngine(blocks=41)
    core = SimpleNamespace(scheduler=engine.scheduler)
    assert core_status(core)["kv_cache_usage_ratio"] == 0
    engine.add("r", 20, 200)
    engine.step()
    assert core_status(core)["kv_cache_usage_ratio"] == pytest.approx(2 / 40)
