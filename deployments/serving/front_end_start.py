"""From a model's configuration to a front end that serves, once enough of its engine replicas are there."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from importlib.metadata import version
from typing import Any

import ray
import redis.asyncio as redis
from ray.serve.handle import DeploymentHandle

from deployments.config.application import AppConfig
from deployments.config.engine import PrefillSection, Role
from deployments.config.lengths import SHARED_BATCH, WINDOW_REQUESTS
from deployments.config.scaling import least_replicas
from deployments.process.ray_tls import wire_tls
from deployments.process.stages import note_stage
from deployments.responses.background import BackgroundResponses
from deployments.serving.first_replica import Wake, kept_awake, wake_if_awaited
from deployments.serving.front_end import Clients, FrontEnd, fills_idle
from deployments.serving.front_end_kinds import Given, kind_of
from deployments.serving.live_settings import Announcer, InForce
from deployments.serving.predictor import learned_predictor
from policies.errors import ReplicaLostError
from policies.live import Live
from policies.router.multi_bin import MultiBin
from policies.router.placement import PrefixIndex, PrefixIndexConfig
from policies.router.prefill_decode import BucketOrder, BucketOrderConfig, PrefillDecode
from predictor.histogram import HistogramPredictor
from predictor.learned import LearnedPredictor
from router.admission import Door
from router.background import BackgroundTasks
from router.classifier import Classifier
from router.clock import MonotonicClock, SharedClock
from router.exposition import ProcessPage
from router.metrics import RouterMetrics, SplitMetrics
from router.prefill_decode import SplitClient, SplitConfig
from router.prefill_pool import PrefillClassifier, PrefillPool
from router.redis_store import RedisStateStore
from router.routed_client import RoutedClient, routed_client
from router.state_store import ReplicaInfo, StateStore
from router.terms import RouterTerms, TicketTerms

REPLICA_POLL_S = 0.2
ROUTER = "router"  # among what is told of a start


def router_metrics(config: AppConfig, router_id: str, *, speaks_for_process: bool) -> RouterMetrics:
    """Args:
    speaks_for_process: its page has what this process counts besides: one of several models' has.
    """
    process = ProcessPage({"router": router_id}, MonotonicClock()) if speaks_for_process else bytes
    return RouterMetrics(labels={"model": config.public_name, "router": router_id}, process=process)


@asynccontextmanager
async def opened_front_end(
    in_force: Live[InForce],
    *,
    router_id: str,
    metrics: RouterMetrics,
    client: "redis.Redis",
    wake: Wake | None,
    predictor: DeploymentHandle | None,
    responses: BackgroundResponses | None,
) -> AsyncIterator[FrontEnd]:
    """One model's, for the time of the block.

    Args:
        in_force: of this model; it may change in the block.
        wake: of `wake_of`.
        responses: makes and stores responses; None stores none.

    Raises:
        ReplicaLostError: no replica registers within the time that loading a model may take.
        StateStoreError: the shared state cannot be reached.
    """
    config = in_force.now.config
    kind = kind_of(config)
    metrics.note_build({"version": version("sluice-serve"), "ray": ray.__version__, "vllm": "", **kind.versions})
    store = RedisStateStore(client, config.namespace(kind.codec.engine_version))
    prefill_store = RedisStateStore(client, config.prefill_namespace(kind.codec.engine_version))
    infos = await _awaited_replicas(config, store, wake, metrics)
    max_model_len = min(info.max_model_len for info in infos)
    clients = engine_clients(
        in_force,
        router_id=router_id,
        metrics=metrics,
        store=store,
        prefill_store=prefill_store,
        codec=kind.codec,
        learned=await asyncio.to_thread(learned_predictor, config.predictor, predictor, config.promises().values()),
        max_model_len=max_model_len,
        max_batch_tokens=min(info.max_batch_tokens for info in infos),
    )
    async with AsyncExitStack() as resources:
        resources.push_async_callback(clients.routed.close)
        await clients.routed.start()
        background = _counted_tasks(metrics)
        resources.push_async_callback(background.close)
        if wake is not None:
            clients.answering.repeat(partial(wake_if_awaited, wake, clients.answering), "wake")
        given = Given(in_force, clients.routed, max_model_len, background, resources, responses)
        parts = await kind.parts(given)
        yield FrontEnd(
            in_force=in_force,
            router_id=router_id,
            metrics=metrics,
            store=store,
            clients=clients,
            reader=parts.reader,
            app=parts.app,
            announcer=_announcer(in_force, clients, store),
            max_model_len=max_model_len,
            takes_media=parts.takes_media,
        )


async def _awaited_replicas(
    config: AppConfig, store: StateStore, wake: Wake | None, metrics: RouterMetrics
) -> list[ReplicaInfo]:
    """As `enough_replicas`; the first one is woken where there may be none."""
    note_stage("waiting for engines", ROUTER)
    async with kept_awake(wake, _counted_tasks(metrics)):
        infos = await enough_replicas(config, store)
    note_stage("building the front end", ROUTER)
    return infos


def _counted_tasks(metrics: RouterMetrics) -> BackgroundTasks:
    return BackgroundTasks(lambda task: metrics.task_failures.labels(task).inc())


def _announcer(in_force: Live[InForce], clients: Clients, store: StateStore) -> Announcer:
    """Which tells at every heartbeat."""
    stores: dict[Role, StateStore] = {"decode": store}
    if clients.reading_store is not None:
        stores["prefill"] = clients.reading_store
    announcer = Announcer(in_force, stores)
    clients.answering.repeat(announcer.tell, "live settings")
    return announcer


async def enough_replicas(config: AppConfig, store: StateStore) -> list[ReplicaInfo]:
    """What the replicas settled on. Until enough of this model are there, a redeploy leaves the old routers on.

    Raises:
        ReplicaLostError: there is none in time.
        StateStoreError: the shared state cannot be reached.
    """
    start_timeout_s = config.engine.start_timeout_s
    give_up_s = time.monotonic() + start_timeout_s
    while not await _are_enough(config, store, infos := await store.replica_infos()):
        if time.monotonic() > give_up_s:
            break
        await asyncio.sleep(REPLICA_POLL_S)
    if not infos:
        raise ReplicaLostError(f"no engine replica of {config.public_name} within {start_timeout_s} s")
    return infos


async def _are_enough(config: AppConfig, store: StateStore, infos: Sequence[ReplicaInfo]) -> bool:
    """Half of those that serve all classes, for every request comes to them from now on; one where other routers send
    requests to it already."""
    if (await store.snapshot()).routers:
        return bool(infos)
    return 2 * sum(not info.classes for info in infos) >= least_replicas(config.engine)  # which is one at least


def engine_clients(
    in_force: Live[InForce],
    *,
    router_id: str,
    metrics: RouterMetrics,
    store: StateStore,
    prefill_store: StateStore,
    codec: Any,
    learned: LearnedPredictor | None,
    max_model_len: int,
    max_batch_tokens: int,
) -> Clients:
    """What sends requests to engines, with a second pool of replicas where those are to read prompts.

    Args:
        codec: of the kind of engines, see `FrontEndKind.codec`.
    """
    config, clock = in_force.now.config, MonotonicClock()
    options: dict[str, Any] = {
        "router_id": router_id,
        "codec": codec,
        "terms": in_force.view(_router_terms),
        "clock": clock,
        "tls": None if (tls := wire_tls()) is None else tls.router,
    }
    classifier = _classifier(in_force, metrics, learned, max_model_len)
    answering: RoutedClient[Any, Any] = routed_client(
        store=store, classifier=classifier, shared_clock=SharedClock(), metrics=metrics, **options
    )
    if (prefill := config.engine.prefill) is None:
        return Clients(routed=answering, answering=answering, classifier=classifier)
    splits = SplitMetrics(metrics.registry)
    policy = PrefillDecode(prefill.policy(max_batch_tokens), config.work.build())
    reading: RoutedClient[Any, Any] = routed_client(
        store=prefill_store,
        classifier=PrefillClassifier(BucketOrder(BucketOrderConfig()), policy, splits, _prefixes(config)),
        shared_clock=SharedClock(),
        metrics=RouterMetrics("prefill", {"model": config.public_name, "router": router_id}),
        **options,
    )
    routed = SplitClient(
        decoding=answering,
        pool=PrefillPool(reading, codec, splits),
        policy=policy,
        codec=codec,
        metrics=splits,
        config=in_force.view(partial(_split_config, prefill)),
        clock=clock,
    )
    return Clients(routed=routed, answering=answering, classifier=classifier, reading_store=prefill_store)


def _router_terms(in_force: InForce) -> RouterTerms:
    config = in_force.config
    door = Door({name: section.limits() for name, section in config.classes.items()})
    return RouterTerms(door, config.router.build())


def _ticket_terms(in_force: InForce) -> TicketTerms:
    config = in_force.config
    return TicketTerms(
        order=config.order.build(), fills_idle=fills_idle(config), late_patience_s=config.router.late_patience_s
    )


def _split_config(prefill: PrefillSection, in_force: InForce) -> SplitConfig:
    itl_targets_s = in_force.config.itl_targets()
    return SplitConfig(cache_s=prefill.keep_s / 2, stalled_s=prefill.keep_s, itl_targets_s=itl_targets_s)


def _prefixes(config: AppConfig) -> PrefixIndex | None:
    """What one group of replicas is taken to have cached; None where that has no say."""
    return PrefixIndex(PrefixIndexConfig()) if config.caches_prefixes and config.mode == "full" else None


def _classifier(
    in_force: Live[InForce], metrics: RouterMetrics, learned: LearnedPredictor | None, max_model_len: int
) -> Classifier:
    config = in_force.now.config
    return Classifier(
        predictor=HistogramPredictor(WINDOW_REQUESTS),
        bins=MultiBin(config.bins.build(config.batches_of_bins)),
        terms=in_force.view(_ticket_terms),
        step_times=config.work.build(),
        shared_batch_size=SHARED_BATCH,
        default_output_tokens=config.work.default_output_tokens,
        metrics=metrics,
        prefixes=_prefixes(config),
        mode=config.mode,
        learned=learned,
        buckets=config.bins.buckets(config.batches_of_bins, max_model_len, literal=config.papers.literal_buckets)
        if config.batches_of_bins
        else None,
    )
