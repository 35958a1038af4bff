"""`deployments.app:build`, what `serve deploy` names: from a checked configuration to the application.

What the environment says of API keys and of requests' limits is read here alone, and handed to the replicas.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ray
from ray import serve
from ray.serve import Application, Deployment
from ray.serve.config import BackpressureConfig

from deployments.config.application import AppConfig, checked
from deployments.config.engine import EngineSection, Role
from deployments.config.scaling import AutoscalingSection
from deployments.http.headers import CALLBACK_ENV
from deployments.http.keys import KEYS_ENV
from deployments.process.environment import REDIS_URL_ENV, REPLICA_ENV
from deployments.process.vllm_env import cpu_env
from deployments.serving.autoscaling import engines_config, routers_config
from deployments.serving.batch_runner import runner_application
from deployments.serving.engine_replica import EngineReplica
from deployments.serving.predictor import predictor_application
from deployments.serving.router import Router
from policies.errors import ConfigError

DRAIN_MARGIN_S = 5.0
ROUTER_ENV = {
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    # vLLM's build for GPUs would look for one, and its front end does not start where a router's node has none.
    "VLLM_TARGET_DEVICE": "cpu",
    # One loaded at run time would be known to one router alone: those that are served stand in the configuration.
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "0",
    # One router alone would know a stored response too, and vLLM keeps each for ever.
    "VLLM_ENABLE_RESPONSES_API_STORE": "0",
    "VLLM_SERVER_DEV_MODE": "0",  # routes that reset and put to sleep an engine
    "VLLM_API_KEY": "",  # `keys` says who may ask: vLLM would refuse the keys that it names
    CALLBACK_ENV: "deployments.http.headers:middlewares",
}
# Answers to a prompt, and prompts of a request, before vLLM refuses it: a router makes a state for each answer to each
# prompt before the first of them meets a limit or a quota. vLLM allows 16 million of them.
REQUEST_LIMITS = {"VLLM_MAX_N_SEQUENCES": "128", "VLLM_MAX_COMPLETION_PROMPTS": "128"}
HEALTH_CHECK_PERIOD_S = 2.0
# Ray Serve ends a replica that is silent for three times as long, whether it hangs or waits for a core, the last router
# as well. Beside fifty others for each core an answer takes a minute. A replica that hangs ends itself
# (`process/watch.py`), one that dies is seen at once, and HAProxy and routers pass over a late one before either.
HEALTH_CHECK_TIMEOUT_S = 600.0
# Beyond max_ongoing_requests. A burst passes through here even while there is room, so it is no small number.
ROUTER_QUEUE = 1000
ROUTER_RETRY_AFTER_S = 5.0
# That a redeploy starts before it stops old ones, which take no new requests for as long as their streams last.
ROUTER_SURGE_PERCENT = 100


def build(settings: dict[str, Any]) -> Application:
    """The application of a file for `serve deploy`.

    Raises:
        ConfigError: naming each wrong setting, or as `application`.
    """
    return application(checked(settings))


def application(config: AppConfig) -> Application:
    """Routers over engine replicas, and an embedded Redis when no other is named.

    Raises:
        ConfigError: no Redis is named on a cluster of several nodes.
    """
    redis_url = config.named_redis()
    if redis_url is None:
        _refuse_several_nodes()
    engines = [
        [
            _engine_deployment(each, number, group).bind(group.of(each), redis_url, group.classes, group.role)
            for group in _groups(each)
        ]
        for number, each in enumerate(config.each_model())
    ]
    logs = config.logs.settings()
    own = config.predictor.own_replicas(config.promises().values())
    predictor = predictor_application(config.predictor, logs) if own else None
    batches = runner_application(config.batches, logs) if config.batches.folder is not None else None
    api_keys = os.environ.get(KEYS_ENV)
    return _router_deployment(config).bind(config, redis_url, engines, api_keys, predictor, batches)


@dataclass(frozen=True, slots=True)
class _Group:
    """Engine replicas of one kind: for all classes, for those that have their own, for prompts only, or for a server of
    others, of which `server` is the number."""

    replicas: int
    classes: tuple[str, ...] = ()
    role: Role = "decode"
    autoscaling: AutoscalingSection | None = None
    resources: dict[str, float] | None = None
    server: int | None = None

    def of(self, config: AppConfig) -> AppConfig:
        """What its replicas are told: of several servers, one."""
        if self.server is None:
            return config
        engine, openai = config.engine, config.engine.openai
        alone = openai.model_copy(update={"urls": (openai.urls[self.server],)})
        return config.model_copy(update={"engine": engine.model_copy(update={"openai": alone})})

    @property
    def kind(self) -> tuple[str, ...]:
        """The end of its deployment's name; two hyphens before a role, for a class may be named prefill."""
        if self.server is not None:
            return (str(self.server),)
        return ("", "prefill") if self.role == "prefill" else self.classes


def _groups(config: AppConfig) -> Iterator[_Group]:
    if config.engine.kind == "openai":
        yield from (_Group(1, server=number) for number in range(len(config.engine.openai.urls)))
        return
    yield _Group(config.engine.replicas, autoscaling=config.engine.autoscaling)
    for name, section in config.classes.items():
        if section.own_replicas:
            yield _Group(section.own_replicas, classes=(name,))
    if (prefill := config.engine.prefill) is not None:
        yield _Group(prefill.replicas, role="prefill", autoscaling=prefill.autoscaling, resources=prefill.resources)


def _engine_deployment(config: AppConfig, model: int, group: _Group) -> Deployment:
    number = (str(model + 1),) if model else ()
    scaled = group.autoscaling
    return serve.deployment(
        EngineReplica,
        name="-".join(("EngineReplica", *number, *group.kind)),
        num_replicas="auto" if scaled else group.replicas,
        autoscaling_config=engines_config(scaled) if scaled else None,
        ray_actor_options={
            "num_cpus": config.engine.num_cpus,
            "num_gpus": 0 if config.engine.placement_group_bundles else config.engine.num_gpus,
            "resources": config.engine.resources if group.resources is None else group.resources,
            "runtime_env": {"env_vars": engine_env(config)},
        },
        **_placement(config.engine),
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=HEALTH_CHECK_TIMEOUT_S,
        graceful_shutdown_timeout_s=config.engine.drain_timeout_s + DRAIN_MARGIN_S,
    )


def _placement(engine: EngineSection) -> dict[str, Any]:
    """The placement group of an engine over several nodes; vLLM finds the group in which its replica runs."""
    if not engine.placement_group_bundles:
        return {}
    return {
        "placement_group_bundles": list(engine.placement_group_bundles),
        "placement_group_strategy": engine.placement_group_strategy,
    }


def _router_deployment(config: AppConfig) -> Deployment:
    scaled = config.router.autoscaling
    return serve.deployment(
        serve.ingress()(Router),  # late-bound: the replica builds its own application
        num_replicas="auto" if scaled else config.router.replicas,
        autoscaling_config=routers_config(scaled) if scaled else None,
        ray_actor_options={
            "num_cpus": config.router.num_cpus,
            "runtime_env": {"env_vars": router_env()},
        },
        max_surge_percent=ROUTER_SURGE_PERCENT,
        max_ongoing_requests=config.router.max_ongoing_requests,
        max_queued_requests=ROUTER_QUEUE,
        backpressure_config=BackpressureConfig(status_code=503, retry_after_s=ROUTER_RETRY_AFTER_S),
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=HEALTH_CHECK_TIMEOUT_S,
        graceful_shutdown_timeout_s=config.engine.drain_timeout_s + DRAIN_MARGIN_S,
    )


def _refuse_several_nodes() -> None:
    nodes = [node for node in ray.nodes() if node["Alive"]] if ray.is_initialized() else []
    if len(nodes) > 1:
        raise ConfigError(
            f"redis_url is not set, and an embedded Redis serves one machine only, but the cluster has {len(nodes)} "
            f"nodes: set redis_url, or {REDIS_URL_ENV} in the environment of the head node"
        )


def router_env() -> dict[str, str]:
    """The environment of routers. Limits of a request that the environment names are obeyed."""
    return ROUTER_ENV | {name: os.environ.get(name, default) for name, default in REQUEST_LIMITS.items()}


def engine_env(config: AppConfig) -> dict[str, str]:
    """The environment of engine replicas."""
    env = {REPLICA_ENV: "1", "VLLM_NO_USAGE_STATS": "1"}
    if config.engine.num_gpus == 0:
        # Ray (2.60) shows a replica that has asked for no GPU all that the machine has, and each such engine would take
        # the first one.
        env |= cpu_env(eager=config.runs_eagerly) | {"CUDA_VISIBLE_DEVICES": ""}
    if not config.engine.placement_group_bundles:
        env["GLOO_SOCKET_IFNAME"] = "lo"  # all its ranks are on one host: nobody else needs their dozen ports
    return env | config.engine.env
