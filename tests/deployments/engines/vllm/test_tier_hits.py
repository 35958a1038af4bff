"""What a real engine of vLLM loads from memory of the host and from files, against what a router foresaw.

Under vLLM's own scheduler, which loads all that it finds: what Sluice's loads depends on how fast it reads here.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deployments.config.model import DEMO_ARGS, DEMO_MODEL
from deployments.engines.vllm.engine import VllmEngine
from deployments.process.environment import REPLICA_ENV
from deployments.process.vllm_env import cpu_env
from policies.types import StepCoefficients
from router import cached_blocks
from tests.deployments.engines.vllm.test_prefix_hits import BLOCK, Service, said

pytestmark = [pytest.mark.timeout(600), pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]

SLOW_READING = StepCoefficients(overhead_s=0.01, prefill_s=1e-3)
MOST_TOKENS = 512
BLOCKS = MOST_TOKENS // BLOCK + 2  # one prompt of the longest: what comes next evicts nearly all of it
SESSIONS, TURNS = 6, 6
HOST_BYTES = {"CPU": 64e6, "STORAGE": 2.5e6}  # for all, and for two prompts of the longest at 3 KiB a token


@pytest.fixture(scope="module", params=HOST_BYTES)
def tier(request: pytest.FixtureRequest) -> str:
    """From which most is loaded."""
    return str(request.param)


@pytest.fixture(scope="module")
def engine(tier: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    """An engine of the demo model with a cache for one prompt, before memory for all, or for few and a folder."""
    extra: dict[str, Any] = {"spec_name": "HostTier", "spec_module_path": "tests.host_tier"}
    extra["cpu_bytes_to_use"] = HOST_BYTES[tier]
    if tier == "STORAGE":
        files = {"type": "fs", "root_dir": str(tmp_path_factory.mktemp("blocks")), "enable_kv_events": True}
        extra["secondary_tiers"] = [files]
    transfer = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    cache = ("--block-size", str(BLOCK), "--num-gpu-blocks-override", str(BLOCKS), "--max-model-len", str(MOST_TOKENS))
    argv = [*DEMO_ARGS, *cache, "--disable-log-stats", "--kv-transfer-config", json.dumps(transfer)]
    with pytest.MonkeyPatch.context() as patch:
        settings = {**cpu_env(eager=True), REPLICA_ENV: "1", "VLLM_LOGGING_LEVEL": "WARNING"}
        for name, value in {**settings, "PYTHONPATH": str(Path(__file__).parents[4])}.items():
            patch.setenv(name, value)
        made = VllmEngine(["--model", str(DEMO_MODEL), *argv])
    yield made
    made.shutdown()


async def test_conversations_that_evict_each_other_are_loaded_as_a_router_foresaw(
    monkeypatch: pytest.MonkeyPatch, engine: VllmEngine, tier: str
) -> None:
    """The cache of the engine holds one of six. Answers to loaded prompts are those to prompts that are read."""
    monkeypatch.setattr(cached_blocks, "ON_THE_WAY_S", 0.0)  # what is told alone counts
    service = Service(engine, SLOW_READING)
    await service.relay.start("127.0.0.1")
    try:
        router, asked = await service.router(), dict[tuple[int, ...], list[int]]()
        prompts: list[list[int]] = [[] for _ in range(SESSIONS)]
        for turn in range(TURNS):
            for session, prompt in enumerate(prompts):
                await service.told()
                prompt += said(session, turn)
                asked[tuple(prompt)] = (await router.ask(prompt))[2]
                prompt += asked[tuple(prompt)]
        hits, loads = router.metrics.hits, router.metrics.loads
        assert hits["found"] > 0.5 * sum(map(len, asked)), "nearly all that was said before"
        assert loads[tier] > 0.5 * hits["found"], "nearly all but what all sessions begin with"
        assert hits["missing"] + hits["unforeseen"] <= 0.02 * hits["found"]
        assert loads.get("unknown", 0) <= 0.02 * hits["found"]
        for last, answer in [*asked.items()][-SESSIONS:]:
            assert (await router.ask(last, cache_salt="read"))[2] == answer
    finally:
        for router in service.routers:
            await router.client.close()
        await service.relay.close()
