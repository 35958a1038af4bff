"""`deployments.app:build`, what `serve deploy` names: from a checked configuration to the application.

The environment is read here and nowhere else.
"""

import os
import secrets
from collections.abc import Iterator

import ray
from ray import serve
from ray.serve import Application, Deployment

from deployments.autoscaling import serve_config
from deployments.config import AppConfig
from deployments.embedded_redis import embedded_url, free_port
from deployments.engine_replica import EngineReplica
from deployments.environment import cpu_env
from deployments.keys import KEYS_ENV
from deployments.predictor import predictor_application
from deployments.redis_server import RedisServer
from deployments.router import Router
from policies.errors import ConfigError

REDIS_URL_ENV = "SLUICE_REDIS_URL"
DRAIN_MARGIN_S = 5.0
HEALTH_CHECK_PERIOD_S = 2.0


def build(config: AppConfig) -> Application:
    """The application: routers over engine replicas, and an embedded Redis when no other is named.

    Raises:
        ConfigError: no Redis is named on a cluster of several nodes.
    """
    redis_url = config.redis_url.get_secret_value() if config.redis_url else os.environ.get(REDIS_URL_ENV)
    redis_server = None
    if redis_url is None:
        _refuse_several_nodes()
        port, password = free_port(), secrets.token_urlsafe(32)
        redis_url = embedded_url(port, password)
        redis_server = _redis_deployment().bind(port, password)
    engines = [
        _engine_deployment(each, number, classes, replicas).bind(each, redis_url, redis_server, classes)
        for number, each in enumerate(config.each_model())
        for classes, replicas in _groups(each)
    ]
    learns_apart = config.predictor.kind == "bert" and config.predictor.place == "replicas"
    predictor = predictor_application(config.predictor) if learns_apart else None
    api_keys = os.environ.get(KEYS_ENV)
    return _router_deployment(config).bind(config, redis_url, redis_server, engines, api_keys, predictor)


def _groups(config: AppConfig) -> Iterator[tuple[tuple[str, ...], int]]:
    """Replicas for all classes, and those of classes that have their own."""
    yield (), config.engine.replicas
    for name, section in config.classes.items():
        if section.own_replicas:
            yield (name,), section.own_replicas


def _redis_deployment() -> Deployment:
    return serve.deployment(
        RedisServer, num_replicas=1, ray_actor_options={"num_cpus": 0}, health_check_period_s=HEALTH_CHECK_PERIOD_S
    )


def _engine_deployment(config: AppConfig, model: int, classes: tuple[str, ...], replicas: int) -> Deployment:
    number = (str(model + 1),) if model else ()
    scaled = None if classes else config.engine.autoscaling
    return serve.deployment(
        EngineReplica,
        name="-".join(("EngineReplica", *number, *classes)),
        num_replicas="auto" if scaled else replicas,
        autoscaling_config=serve_config(scaled) if scaled else None,
        ray_actor_options={
            "num_cpus": config.engine.num_cpus,
            "num_gpus": config.engine.num_gpus,
            "resources": config.engine.resources,
            "runtime_env": {"env_vars": engine_env(config)},
        },
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        graceful_shutdown_timeout_s=config.engine.drain_timeout_s + DRAIN_MARGIN_S,
    )


def _router_deployment(config: AppConfig) -> Deployment:
    return serve.deployment(
        serve.ingress()(Router),  # late-bound: the replica builds its own application
        num_replicas=config.router.replicas,
        ray_actor_options={
            "num_cpus": config.router.num_cpus,
            "runtime_env": {"env_vars": {"VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"}},
        },
        max_ongoing_requests=config.router.max_ongoing_requests,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        graceful_shutdown_timeout_s=config.engine.drain_timeout_s + DRAIN_MARGIN_S,
    )


def _refuse_several_nodes() -> None:
    nodes = [node for node in ray.nodes() if node["Alive"]] if ray.is_initialized() else []
    if len(nodes) > 1:
        raise ConfigError(
            f"redis_url is not set, and an embedded Redis serves one machine only, but the cluster has {len(nodes)} "
            f"nodes: set redis_url, or {REDIS_URL_ENV} in the environment of the head node"
        )


def engine_env(config: AppConfig) -> dict[str, str]:
    """The environment of engine replicas."""
    env = {"SLUICE_REPLICA": "1", "VLLM_NO_USAGE_STATS": "1"}
    env["VLLM_ENGINE_READY_TIMEOUT_S"] = str(int(config.engine.start_timeout_s))
    if config.engine.num_gpus == 0:
        env |= cpu_env()
    return env | config.engine.env
