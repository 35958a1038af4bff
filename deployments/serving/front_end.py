"""One model's front end in a router: vLLM's own OpenAI application over the routed engine client."""

import argparse
import asyncio
import math
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from importlib.metadata import version
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import ray
import redis.asyncio as redis
from fastapi import FastAPI
from ray.serve.handle import DeploymentHandle

from deployments.config.application import AppConfig
from deployments.config.classes import ClassSection
from deployments.config.engine import PrefillSection
from deployments.config.live import EngineTerms
from deployments.config.scaling import least_replicas
from deployments.engines.vllm.grammars import Grammars
from deployments.http.limits import RequestLimits
from deployments.http.middleware import log_causes
from deployments.process.heavy_imports import heavy_imports
from deployments.process.logs import log_of_vllm
from deployments.process.stages import note_stage
from deployments.responses.background import BackgroundResponses
from deployments.serving.engine_metrics import engine_exposition
from deployments.serving.in_words import now_in_words
from deployments.serving.live_settings import LiveSettings
from deployments.serving.predictor import learned_predictor
from policies.batches.in_flight import Load
from policies.errors import ReplicaLostError, SluiceError, StateStoreError
from policies.live import Live
from policies.router.multi_bin import MultiBin
from policies.router.order import IdleOrder
from policies.router.placement import PrefixIndex
from policies.router.prefill_decode import BucketOrder, PrefillDecode
from predictor.histogram import HistogramPredictor
from predictor.learned import LearnedPredictor
from router.admission import Door, Tenant
from router.background import BackgroundTasks
from router.classifier import Classifier
from router.clock import MonotonicClock, SharedClock
from router.metrics import ProcessPage, RouterMetrics, SplitMetrics, shared_exposition
from router.prefill_decode import EngineClient, PrefillClassifier, PrefillPool, SplitClient, SplitConfig
from router.recent import latest
from router.redis_store import RedisStateStore
from router.routed_client import RoutedClient, routed_client
from router.state_store import ReplicaInfo, ReplicaLoad, Snapshot
from router.terms import RouterTerms

if TYPE_CHECKING:
    from deployments.engines.vllm.codec import VllmCodec

REPLICA_POLL_S = 0.2
ROUTER = "router"  # among what is told of a start


class FrontEnd:
    """Build it with `start`; what it opens is closed with `resources`."""

    def __init__(
        self,
        config: AppConfig,
        predictor: DeploymentHandle | None,
        *,
        speaks_for_process: bool = True,
    ) -> None:
        """Args:
        speaks_for_process: its page has what this process counts besides: one of several models' has.
        """
        self._config, self._predictor = config, predictor
        self._begun = config
        self._grammars: Grammars | None = None
        self._in_force: tuple[Any, AppConfig] | None = None  # a user_config, and what it makes of the configuration
        self._told: tuple[Any, AppConfig] | None = None  # of these, in the shared state
        self._telling = asyncio.Lock()
        self.name, self.names = config.public_name, config.served_names
        self.router_id = uuid.uuid4().hex[:12]
        process = ProcessPage({"router": self.router_id}, MonotonicClock()) if speaks_for_process else bytes
        self._of_model = {"model": self.name}
        self._of_router = {**self._of_model, "router": self.router_id}
        self.metrics = RouterMetrics(labels=self._of_router, process=process)

    async def start(
        self, client: "redis.Redis", resources: AsyncExitStack, background: BackgroundResponses | None
    ) -> FastAPI:
        """vLLM's application, once a replica of this model is there.

        Args:
            background: makes and stores responses; None stores none.

        Raises:
            ReplicaLostError: none registers within the time that loading a model may take.
            StateStoreError: the shared state cannot be reached.
        """
        with heavy_imports():
            from deployments.engines.transformers.step import unsupported
            from deployments.engines.vllm.args import has_logits_processors, parse_vllm_args
            from deployments.engines.vllm.codec import VllmCodec
            from deployments.engines.vllm.front_end import RoutedAsyncLLM, as_front_end_of_any_model
            from deployments.engines.vllm.version import ENGINE_VERSION

        vllm_version = ENGINE_VERSION.removeprefix("vllm-")
        self.metrics.note_build({"version": version("sluice-serve"), "vllm": vllm_version, "ray": ray.__version__})
        self._store = RedisStateStore(client, self._config.namespace(ENGINE_VERSION))
        self._prefill_store = RedisStateStore(client, self._config.prefill_namespace(ENGINE_VERSION))
        args = parse_vllm_args(self._config.vllm_argv())
        is_vllm = self._config.engine.kind == "vllm"
        if not is_vllm:
            args = as_front_end_of_any_model(args)
        note_stage("waiting for engines", ROUTER)
        infos = await self._enough_replicas()
        note_stage("building the front end", ROUTER)
        self.max_model_len = args.max_model_len = min(info.max_model_len for info in infos)
        self._max_batch_tokens = min(info.max_batch_tokens for info in infos)
        learned = await asyncio.to_thread(learned_predictor, self._config.predictor, self._predictor)
        self.routed = self._routed_client(learned, VllmCodec(resumes=not has_logits_processors(args)))
        resources.push_async_callback(self.routed.close)
        await self.routed.start()
        self._answering.repeat(self.tell, "live settings")
        self._llm = RoutedAsyncLLM(
            args,
            self.routed,
            None if is_vllm else unsupported,
            self._config.router.max_prompt_logprobs,
            isolates_keys=self._config.keys.isolate_prefixes and self._config.caches_prefixes,
        )
        if is_vllm:
            self._grammars = self._made_grammars(resources)
            self._llm.compile_grammars_with(self._grammars)
        self.takes_media = bool(self._llm.model_config.is_multimodal_model)
        return await self._application(args, background)

    async def _application(self, args: argparse.Namespace, background: BackgroundResponses | None) -> FastAPI:
        with heavy_imports():
            from vllm.entrypoints.launchers.api_server.app_state import init_app_state
            from vllm.entrypoints.launchers.app import build_app

            from deployments.engines.vllm.media import fetch_media_from_allowed_addresses
            from deployments.engines.vllm.responses import KeptResponses, stored_responses

        tasks = await self._llm.get_supported_tasks()
        fetch_media_from_allowed_addresses(self._config.router.media_networks)
        args.enable_offline_docs = not args.disable_fastapi_docs
        app: FastAPI = build_app(args, tasks, self._llm.model_config)
        log_causes(app)
        kept: KeptResponses | None = None
        if background is not None:
            kept = KeptResponses(background=background, max_bytes=request_limits([self], self._config).max_body_bytes)
        with stored_responses(kept):
            await init_app_state(self._llm, app.state, args, tasks)
        log_of_vllm()
        app.state.server = SimpleNamespace()  # vLLM's error handler looks for the server it would stop
        return app

    def adopt(self, user_config: Any, config: AppConfig) -> None:
        """Go by a configuration with other live settings from now on; engines go by it once they are told.

        Args:
            user_config: by which it is another, of all models.
        """
        self._config, self._in_force = config, (user_config, config)
        self._terms.replace(RouterTerms(self._door(), config.router.build()))
        self._classifier.adopt(
            order=config.order.build(),
            fills_idle=self._fills_idle(),
            late_patience_s=config.router.late_patience_s,
        )
        if isinstance(self.routed, SplitClient):
            self.routed.config = replace(self.routed.config, itl_targets_s=config.itl_targets())
        self._llm.limit_prompt_logprobs(config.router.max_prompt_logprobs)
        if self._grammars is not None:
            self._grammars.timeout_s = config.router.grammar_timeout_s

    async def told_user_config(self) -> Any | None:
        """That routers of this configuration have last taken; None before the first.

        Raises:
            StateStoreError: the shared state cannot be reached.
        """
        return await LiveSettings(self._store, self._begun).user_config()

    async def tell(self) -> None:
        """Engines and later routers what is in force, or again what the shared state has lost of it.

        Raises:
            StateStoreError: it cannot be reached, and is told at a later heartbeat.
        """
        async with self._telling:
            if (in_force := self._in_force) is None:
                return
            user_config, config = in_force
            groups = [(self._store, EngineTerms.of(self._begun, config, "decode"))]
            if self._begun.engine.prefill is not None:
                groups.append((self._prefill_store, EngineTerms.of(self._begun, config, "prefill")))
            for store, terms in groups:
                settings = LiveSettings(store, self._begun)
                await (settings.restore if self._told is in_force else settings.tell)(user_config, terms)
            self._told = in_force

    async def charge(self, tenant: Tenant | None, tokens: float) -> None:
        """As `Entrance.charge`: a key's allowance is one for all models."""
        await self._answering.entrance.charge(tenant, tokens)

    def _made_grammars(self, resources: AsyncExitStack) -> Grammars:
        failures = self.metrics.task_failures
        background = BackgroundTasks(lambda task: failures.labels(task).inc())
        resources.push_async_callback(background.close)
        grammars = Grammars(self._llm.vllm_config, self._config.router.grammar_timeout_s, background)
        resources.push_async_callback(grammars.close)
        return grammars

    def check_health(self) -> None:
        """Raises SluiceError when vLLM's front end reads no more outputs, as it does after one that it cannot process.

        It answers 500 from then on. What it says of engine replicas that are missing is no matter of this process.
        """
        if self._llm.errored:
            raise SluiceError(f"the front end of {self.name} reads no more outputs")

    def _routed_client(self, learned: LearnedPredictor | None, codec: "VllmCodec") -> EngineClient[Any, Any]:
        config = self._config
        self._terms = Live(RouterTerms(self._door(), config.router.build()))
        options: dict[str, Any] = {
            "router_id": self.router_id,
            "codec": codec,
            "terms": self._terms,
            "clock": MonotonicClock(),
        }
        self._classifier = self._made_classifier(learned)
        self._answering: RoutedClient[Any, Any] = routed_client(
            store=self._store,
            classifier=self._classifier,
            shared_clock=SharedClock(),
            metrics=self.metrics,
            **options,
        )
        if config.engine.prefill is None:
            return self._answering
        return self._split_client(config.engine.prefill, codec, options)

    def _split_client(
        self, prefill: PrefillSection, codec: "VllmCodec", options: dict[str, Any]
    ) -> SplitClient[Any, Any]:
        """With a second pool of replicas, which reads prompts."""
        metrics = SplitMetrics(self.metrics.registry)
        policy = PrefillDecode(prefill.policy(self._max_batch_tokens), self._config.work.build())
        reading: RoutedClient[Any, Any] = routed_client(
            store=self._prefill_store,
            classifier=PrefillClassifier(BucketOrder(prefill.order()), policy, metrics, self._prefixes()),
            shared_clock=SharedClock(),
            metrics=RouterMetrics("prefill", self._of_router),
            **options,
        )
        return SplitClient(
            decoding=self._answering,
            pool=PrefillPool(reading, codec, metrics),
            policy=policy,
            codec=codec,
            metrics=metrics,
            config=SplitConfig(
                cache_s=prefill.keep_s / 2, stalled_s=prefill.keep_s, itl_targets_s=self._config.itl_targets()
            ),
            clock=options["clock"],
        )

    async def _enough_replicas(self) -> list[ReplicaInfo]:
        """For what they settled on. Until enough of this model are there, a redeploy leaves the old routers on."""
        start_timeout_s = self._config.engine.start_timeout_s
        give_up_s = time.monotonic() + start_timeout_s
        while not await self._are_enough(infos := await self._store.replica_infos()):
            if time.monotonic() > give_up_s:
                break
            await asyncio.sleep(REPLICA_POLL_S)
        if not infos:
            raise ReplicaLostError(f"no engine replica of {self.name} within {start_timeout_s} s")
        return infos

    async def _are_enough(self, infos: Sequence[ReplicaInfo]) -> bool:
        """Half of those that serve all classes, for every request comes to them from now on; one where other routers
        send requests to it already."""
        if (await self._store.snapshot()).routers:
            return bool(infos)
        return 2 * sum(not info.classes for info in infos) >= least_replicas(self._config.engine)

    def _door(self) -> Door:
        return Door({name: section.limits() for name, section in self._config.classes.items()})

    def _fills_idle(self) -> dict[str, IdleOrder]:
        return {name: section.order for name, section in self._config.classes.items() if section.fills_idle}

    async def load(self) -> Load:
        """Raises StateStoreError: the shared state cannot be reached."""
        snapshot, idle = await self._store.snapshot(), set(self._fills_idle())
        waiting_idle = sum(count for (name, _), count in snapshot.lanes.items() if name in idle)
        return Load(
            slots=sum(replica.slots for replica in snapshot.replicas.values()),
            waiting_idle=waiting_idle,
            waiting_promised=snapshot.waiting - waiting_idle,
            router_id=self.router_id,
            missed=self.metrics.missed(all_but=idle),
        )

    def _prefixes(self) -> PrefixIndex | None:
        """For one group of replicas; None where what they have cached has no say."""
        has_a_say = self._config.caches_prefixes and self._config.mode == "full"
        return self._config.placement.prefixes() if has_a_say else None

    def _made_classifier(self, learned: LearnedPredictor | None) -> Classifier:
        config = self._config
        return Classifier(
            predictor=HistogramPredictor(config.bins.window_requests),
            bins=MultiBin(config.bins.build(config.gang)),
            order=config.order.build(),
            step_times=config.work.build(),
            shared_batch_size=config.work.batch_size,
            default_output_tokens=config.work.default_output_tokens,
            metrics=self.metrics,
            prefixes=self._prefixes(),
            mode=config.mode,
            learned=learned,
            fills_idle=self._fills_idle(),
            buckets=config.bins.buckets(config.gang, self.max_model_len) if config.gang else None,
            late_patience_s=config.router.late_patience_s,
        )

    async def metrics_pages(self) -> list[bytes]:
        """Of all routers, as each published it last, and of the shared state; of this router alone while that is away.

        Also this router's own: a page of now would show more than the next one, if that comes from another router.
        """
        try:
            of_routers = await self._store.published("metrics")
            pages = list(of_routers.values())
            if self.router_id not in of_routers:
                pages.append(self.metrics.exposition())
            pages.append(shared_exposition(await self._store.snapshot(), self._of_model))
            pages.append(engine_exposition(await self.routed.statuses(), self._of_model))
            if isinstance(self.routed, SplitClient):
                pages.append(shared_exposition(await self._prefill_store.snapshot(), self._of_model, "prefill"))
                pages += (await self._prefill_store.published("metrics")).values()
        except StateStoreError:
            return [self.metrics.exposition()]
        return pages

    async def status(self) -> dict[str, Any]:
        """Bins, replicas and what each engine says of itself.

        Raises:
            StateStoreError: the shared state cannot be reached.
        """
        snapshot = await self._store.snapshot()
        engines = await self.routed.statuses()
        reading = await self._prefill_store.snapshot() if isinstance(self.routed, SplitClient) else None
        return {
            "model": self.name,
            "routers": snapshot.routers,
            **_pool(snapshot, engines),
            "overtaken_s": round(snapshot.overtaken_s, 3),
            "owed_starts": snapshot.owed,
            # Whoever has a key may read this page: how unlike the shares are, but not whose.
            "keys_served_s": sorted((round(each, 3) for each in snapshot.served_s.values()), reverse=True),
            "late": {f"{name}:{reason}": count for (name, reason), count in snapshot.late.items()},
            "batches": {f"{index}:{why}": count for (index, why), count in snapshot.batches.items()},
            "bin_edges_tokens": _as_json(self._classifier.bin_edges),
            "bucket_edges_tokens": _as_json(self._classifier.bucket_edges),
            # Other routers have memories of their own.
            "prefixes": {"entries": self._classifier.prefixes.entries, "hit_tokens": self.metrics.hits},
            **({} if reading is None else {"prefill": _pool(reading, engines)}),
            "classes": {name: _promised(section) for name, section in self._config.classes.items()},
            "default_class": self._config.default_class,
            "recent_requests": latest((await self._store.published("recent")).values()),
        }


def _promised(section: ClassSection) -> dict[str, float | None]:
    return {"ttft_s": section.ttft_s, "tpot_s": section.tpot_s}


def _as_json(edges: Sequence[float]) -> list[float | None]:
    return [edge if math.isfinite(edge) else None for edge in edges]


def _pool(snapshot: Snapshot, engines: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "waiting": {f"{name}:{index}": count for (name, index), count in snapshot.lanes.items()},
        "waiting_s": round(snapshot.waiting_s, 4),
        "replicas": {
            replica_id: _replica(load, engines.get(replica_id, {})) for replica_id, load in snapshot.replicas.items()
        },
    }


def _replica(load: ReplicaLoad, engine: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "takes_batches": load.gang,
        "slots": load.slots,
        "running": load.running,
        "credit": load.credit,
        "unread_tokens": load.unread_tokens,
        "max_unread_tokens": load.max_unread_tokens,
        "prompt_token_s": load.prompt_token_s,
        "outstanding_s": round(load.outstanding_s, 4),
        "slowness": round(load.slowness, 3),
        "engine": engine,
        "now": now_in_words(load, engine),
    }


def request_limits(front_ends: Sequence[FrontEnd], config: AppConfig) -> RequestLimits:
    """By the longest context of these models, and for images where one takes them; all of them have started."""
    return RequestLimits.of_context(
        max(front_end.max_model_len for front_end in front_ends),
        takes_media=any(front_end.takes_media for front_end in front_ends),
        max_body_bytes=config.router.max_body_bytes,
        max_engine_requests=config.router.max_engine_requests,
    )
