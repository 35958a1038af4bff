"""All that one router serves: every model's front end behind one address."""

import asyncio
import gc
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import FastAPI
from ray.serve.handle import DeploymentHandle
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from deployments.batches.http import BatchApi, no_batch_api
from deployments.config.application import AppConfig
from deployments.http.bodies import BodyLimits, RequestBodies
from deployments.http.keys import KeyRing
from deployments.http.middleware import SluiceMiddleware
from deployments.http.model_switch import ModelSwitch
from deployments.http.promises import Promises
from deployments.http.traces import HttpTraces
from deployments.process.tracing import started_tracing
from deployments.responses.background import BackgroundResponses
from deployments.responses.http import ResponsesApi, model_of
from deployments.responses.store import ResponseStore
from deployments.serving.batch_runner import RemoteRunner, storage_of
from deployments.serving.candidates import Candidates, candidates, copies_of
from deployments.serving.first_replica import wake_of
from deployments.serving.front_end import FrontEnd, request_limits
from deployments.serving.front_end_start import opened_front_end, router_metrics
from deployments.serving.live_settings import InForce
from deployments.serving.pages import Pages
from deployments.serving.redis_server import embedded_redis_url
from deployments.serving.user_config import UserConfig
from policies.live import Live
from router.background import BackgroundTasks
from router.clock import MonotonicClock
from router.metrics import RouterMetrics
from router.redis_store import check_access, connect


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """Once it is open.

    Attributes:
        app: what clients reach.
        middleware: what requests of this process's own go through.
        front_ends: of every model, the first one's metrics speak for the process.
        candidates: those of them that may succeed another.
    """

    app: ASGIApp
    middleware: SluiceMiddleware
    front_ends: Sequence[FrontEnd]
    candidates: Candidates
    keys: KeyRing
    user_config: UserConfig


@asynccontextmanager
async def opened_service(
    config: AppConfig,
    redis_url: str | None,
    *,
    engines: Sequence[DeploymentHandle] = (),
    api_keys: str | None = None,
    predictor: DeploymentHandle | None = None,
    batches: RemoteRunner | None = None,
) -> AsyncIterator[Service]:
    """For the time of the block. What it had opened when it raises is closed.

    Args:
        redis_url: None where the application has an embedded Redis.
        engines: of every model, those that serve all classes; none where Ray Serve does not run them.
        api_keys: those of the environment.
        batches: what runs them; None without a Batch API.

    Raises:
        ReplicaLostError: a model has no engine replica in time.
        StateStoreError: the shared state cannot be reached.
    """
    async with AsyncExitStack() as resources:
        if (tracing := started_tracing("router")) is not None:
            resources.push_async_callback(tracing.close)
        url = redis_url or await embedded_redis_url()
        await check_access(url, config.redis_ca_certs)
        redis = connect(url, config.redis_ca_certs)
        resources.push_async_callback(redis.aclose)
        in_force = Live(InForce(config))
        models = [in_force.view(partial(_of_model, number)) for number in range(1 + len(config.more_models))]
        ids = [uuid.uuid4().hex[:12] for _ in models]
        metrics = [
            router_metrics(model.now.config, router_id, speaks_for_process=model is models[0])
            for model, router_id in zip(models, ids, strict=True)
        ]
        responses = _responses(config, redis, metrics[0])
        handles = engines or [None] * len(models)
        front_ends = [
            await resources.enter_async_context(
                opened_front_end(
                    model,
                    router_id=router_id,
                    metrics=of_model,
                    client=redis,
                    wake=wake_of(model.now.config, handle),
                    predictor=predictor,
                    responses=responses,
                )
            )
            for model, router_id, of_model, handle in zip(models, ids, metrics, handles, strict=True)
        ]
        if responses is not None:
            resources.push_async_callback(responses.close)
            resources.push_async_callback(responses.drain, config.engine.drain_timeout_s)
            responses.keep_alive()
        background = _counted_tasks(metrics[0])
        resources.push_async_callback(background.close)
        traces = None if tracing is None else HttpTraces(tracing)
        keys = _key_ring(config, api_keys, redis)
        yield await _assembled(in_force, front_ends, keys, background, responses, batches, traces)


def _key_ring(config: AppConfig, api_keys: str | None, redis: Any) -> KeyRing:
    return KeyRing(
        file=config.keys.file,
        environment=api_keys,
        client=redis if config.keys.redis else None,
        application=config.name,
        classes=config.classes,
    )


async def _assembled(
    in_force: Live[InForce],
    front_ends: Sequence[FrontEnd],
    keys: KeyRing,
    background: BackgroundTasks,
    responses: BackgroundResponses | None,
    batches: RemoteRunner | None,
    traces: HttpTraces | None,
) -> Service:
    """Out of parts that are open."""
    beside = candidates(in_force, front_ends)
    user_config = UserConfig(in_force, keys, front_ends, beside, background)
    store = None if responses is None else responses.store
    pages = Pages(front_ends, user_config, beside, batches, store)
    cors = [await _finished(front_end.app, pages) for front_end in front_ends]
    _keep_from_collections()
    middleware = SluiceMiddleware(
        _application(in_force, front_ends, beside, batches, background, store),
        bodies=RequestBodies(in_force.view(partial(_body_limits, front_ends))),
        promises=in_force.view(_promises),
        keys=keys,
        charge=front_ends[0].charge,
        traces=traces,
    )
    return Service(
        app=CORSMiddleware(middleware, **cors[0]),
        middleware=middleware,
        front_ends=front_ends,
        candidates=beside,
        keys=keys,
        user_config=user_config,
    )


def _of_model(number: int, in_force: InForce) -> InForce:
    return InForce(in_force.config.each_model()[number], in_force.user_config)


def _counted_tasks(metrics: RouterMetrics) -> BackgroundTasks:
    return BackgroundTasks(lambda task: metrics.task_failures.labels(task).inc())


def _responses(config: AppConfig, redis: Any, metrics: RouterMetrics) -> BackgroundResponses | None:
    """None where none are stored."""
    if not config.responses.store:
        return None
    store = ResponseStore(redis, config.name, config.responses, MonotonicClock(), metrics.responses_unstored)
    most = config.router.max_buffered_bytes
    return BackgroundResponses(store, _counted_tasks(metrics), MonotonicClock(), max_bytes=most)


async def _finished(app: FastAPI, pages: Pages) -> Mapping[str, Any]:
    """With our pages. Returns what vLLM's CORS layer was told, once it is out of the application: it belongs outside of
    our middleware, for a browser may read what that refuses as well."""
    pages.put_into(app)
    if app.openapi_url:  # it is kept: the first to ask for it would stop all streams for two seconds
        await asyncio.to_thread(app.openapi)
    cors: Any = CORSMiddleware
    (layer,) = (each for each in app.user_middleware if each.cls is cors)
    app.user_middleware.remove(layer)
    return dict(layer.kwargs)


def _keep_from_collections() -> None:
    """What is made by now lives as long as the process. To look through it takes a second, which streams would wait."""
    gc.collect()
    gc.freeze()


def _application(
    in_force: Live[InForce],
    front_ends: Sequence[FrontEnd],
    beside: Candidates,
    batches: RemoteRunner | None,
    background: BackgroundTasks,
    store: ResponseStore | None,
) -> ASGIApp:
    """All models behind one address, with the routes of what outlives a request."""
    config = in_force.now.config
    apps = {name: front_end.app for front_end in front_ends for name in front_end.names}
    versions = beside.versions(front_ends, partial(model_of, store), copies_of(in_force, background))
    app: ASGIApp = ModelSwitch(apps, versions) if len(front_ends) > 1 else front_ends[0].app
    if batches is None:
        app = no_batch_api(app)
    else:
        paths = {path for each in apps.values() for route in each.routes if (path := getattr(route, "path", None))}
        look = partial(_spawn_look, background, batches)
        app = BatchApi(app, config.batches, storage_of(config.batches), paths, look, batches.troubles)
    return ResponsesApi(app, store)


def _spawn_look(background: BackgroundTasks, runner: RemoteRunner) -> None:
    background.spawn(runner.look(), "look at batches")


def _promises(in_force: InForce) -> Promises:
    config = in_force.config
    return Promises(config.promises(), config.default_class, config.class_of_tier)


def _body_limits(front_ends: Sequence[FrontEnd], in_force: InForce) -> BodyLimits:
    """By the longest context of all models, and for images where one takes them."""
    config = in_force.config
    return BodyLimits(
        request=request_limits(
            config,
            max(front_end.max_model_len for front_end in front_ends),
            takes_media=any(front_end.takes_media for front_end in front_ends),
        ),
        max_buffered_bytes=config.router.max_buffered_bytes,
        timeout_s=config.router.body_timeout_s,
    )
