"""Predicted hits of the prefix cache, against those that a real vLLM engine counts."""

import secrets
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import pytest
import pytest_asyncio
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from deployments.config.model import DEMO_ARGS, DEMO_MODEL
from deployments.engines.relay import Relay, RelayConfig
from deployments.engines.vllm.codec import VllmCodec
from deployments.engines.vllm.engine import VllmEngine
from deployments.process.environment import REPLICA_ENV
from deployments.process.vllm_env import cpu_env
from policies.live import Live
from policies.router.multi_bin import MultiBin, MultiBinConfig
from policies.router.placement import PrefixIndex, PrefixIndexConfig
from policies.types import StepCoefficients, StepTimes
from predictor.histogram import HistogramPredictor
from router import cached_blocks
from router.admission import Door
from router.classifier import Classifier
from router.clock import MonotonicClock, SharedClock
from router.memory_store import MemoryStateStore
from router.metrics import RouterMetrics
from router.routed_client import RoutedClient, routed_client
from router.state_store import ReplicaInfo
from router.terms import RoutedClientConfig, RouterTerms, TicketTerms
from router.timing import RequestTiming
from tests.deployments.engines.vllm.requests import request_of
from tests.waiting import until

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

BLOCK = 32
BLOCKS = 60
STEP = StepCoefficients(overhead_s=0.01)


@pytest.fixture(scope="module")
def engine() -> Iterator[VllmEngine]:
    """An engine of the demo model with a cache of few blocks."""
    cache = ("--block-size", str(BLOCK), "--num-gpu-blocks-override", str(BLOCKS), "--max-model-len", "1024")
    argv = [*DEMO_ARGS, *cache, "--disable-log-stats"]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**cpu_env(eager=True), REPLICA_ENV: "1", "VLLM_LOGGING_LEVEL": "WARNING"}.items():
            patch.setenv(name, value)
        made = VllmEngine(["--model", str(DEMO_MODEL), *argv])
    yield made
    made.shutdown()


class Router:
    """A routed client, and what it predicts of each prompt before it sends it."""

    def __init__(self, name: str, store: MemoryStateStore, step: StepCoefficients) -> None:
        self.metrics = RouterMetrics()
        classifier = Classifier(
            predictor=HistogramPredictor(),
            bins=MultiBin(MultiBinConfig()),
            terms=Live(TicketTerms()),
            step_times=StepTimes(prefill=step, decode=step, mixed=step),
            shared_batch_size=4,
            default_output_tokens=16,
            metrics=self.metrics,
            prefixes=PrefixIndex(PrefixIndexConfig()),
        )
        self.client: RoutedClient[Any, Any] = routed_client(
            router_id=name,
            store=store,
            codec=VllmCodec(),
            classifier=classifier,
            terms=Live(RouterTerms(Door({}), RoutedClientConfig(heartbeat_s=0.2))),
            clock=MonotonicClock(),
            shared_clock=SharedClock(),
            metrics=self.metrics,
        )

    @property
    def sequence(self) -> int | None:
        known = self.client.caches.blocks._replicas.get("r")
        return None if known is None else known.told.sequence

    async def ask(self, prompt: Sequence[int], **more: Any) -> tuple[int, int, list[int]]:
        """Hits as predicted and as counted, and the answer."""
        request = asked(prompt, **more)
        hits = (await self.client.caches.sized(request)).hits
        await self.client.submit(request, slo_class="standard", timing=RequestTiming(0.0, 0.0))
        answer: list[int] = []
        while True:
            (output,) = (await self.client.next_outputs()).outputs
            answer += output.new_token_ids
            if output.prefill_stats is not None:
                counted = output.prefill_stats.num_cached_tokens
            if output.finish_reason is not None:
                return hits["r"], counted, answer


def asked(prompt: Sequence[int], **more: Any) -> EngineCoreRequest:
    params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.0)
    return request_of(*prompt, request_id=secrets.token_hex(8), sampling_params=params, **more)


class Service:
    """The engine behind a relay, and routers."""

    def __init__(self, engine: VllmEngine, step: StepCoefficients = STEP) -> None:
        self.engine, self.store, self.step = engine, MemoryStateStore(MonotonicClock().now), step
        info = ReplicaInfo(replica_id="r", host="127.0.0.1", port=0, max_model_len=engine.max_model_len)
        self.relay = Relay(engine=engine, store=self.store, info=info, config=RelayConfig(heartbeat_s=0.2))
        self.routers: list[Router] = []

    async def router(self) -> Router:
        made = Router(f"router{len(self.routers)}", self.store, self.step)
        await made.client.start()
        self.routers.append(made)
        return made

    async def told(self) -> None:
        """Every router knows what the engine has cached by now: the second report began after this."""
        for _ in range(2):
            self.relay._blocks.due.set()
            await until(lambda: not self.relay._blocks.due.is_set())
        for router in self.routers:
            await until(lambda router=router: router.sequence == self.relay._blocks.sequence)


@pytest_asyncio.fixture(loop_scope="module")
async def service(monkeypatch: pytest.MonkeyPatch, engine: VllmEngine) -> AsyncIterator[Service]:
    monkeypatch.setattr(cached_blocks, "ON_THE_WAY_S", 0.0)  # what is told alone counts
    made = Service(engine)
    await made.relay.start("127.0.0.1")
    yield made
    for router in made.routers:
        await router.client.close()
    await made.relay.close()


def said(session: int, turn: int) -> list[int]:
    """What a user says: 50 tokens, after 40 with which all sessions begin."""
    words = [300 + (31 * session + 7 * turn + at) % 400 for at in range(50)]
    return [200] * 40 + words if turn == 0 else words


@pytest.mark.long
async def test_predicted_hits_are_those_that_vllm_counts_while_conversations_grow_and_evict_each_other(
    service: Service,
) -> None:
    """One conversation fits into the cache; six do not."""
    router = await service.router()
    for sessions, least, most in ((1, 0.7, 0.9), (6, 0.1, 0.6)):
        counts = []
        prompts: list[list[int]] = [[] for _ in range(sessions)]
        for turn in range(8):
            for session, prompt in enumerate(prompts):
                await service.told()
                prompt += said(session + 10 * sessions, turn)
                predicted, counted, answer = await router.ask(prompt)
                assert predicted == counted
                counts.append((counted, len(prompt)))
                prompt += answer
        assert least < sum(counted for counted, _ in counts) / sum(tokens for _, tokens in counts) < most
    assert router.metrics.registry.get_sample_value("sluice_cached_block_gaps_total") == 0
    assert 0 < len(router.client.caches.blocks) < BLOCKS


async def test_after_a_reset_nothing_is_taken_to_be_cached(service: Service) -> None:
    router, prompt = await service.router(), said(100, 0) * 5
    await service.told()
    await router.ask(prompt)
    await service.told()
    assert (await router.ask(prompt))[:2] == (448 - 448 % BLOCK, 448 - 448 % BLOCK)
    assert await service.engine.core.call("reset_prefix_cache")
    await service.told()
    assert (await router.ask(prompt))[:2] == (0, 0)


async def test_another_salt_finds_nothing_and_the_same_one_all(service: Service) -> None:
    router, prompt = await service.router(), said(101, 0) * 5
    for salt, hits in (("a", 0), ("a", 448), ("b", 0)):
        await service.told()
        assert (await router.ask(prompt, cache_salt=salt))[:2] == (hits, hits)


async def test_a_router_that_comes_later_knows_all_within_two_seconds(service: Service) -> None:
    first = await service.router()
    await service.told()
    await first.ask(said(102, 0) * 5)
    await service.told()
    began_s, second = time.monotonic(), await service.router()
    await until(lambda: second.sequence == first.sequence)
    assert time.monotonic() - began_s < 2.0
    mine, theirs = (router.client.caches.blocks._replicas["r"] for router in (first, second))
    assert mine.told.blocks == theirs.told.blocks
