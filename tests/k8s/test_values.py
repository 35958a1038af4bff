"""Values: the schema is complete, strict and up to date, and wrong values are refused with a message that helps."""

import json
import re
import subprocess
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
import yaml
from pydantic import ValidationError

from deployments.config.application import AppConfig
from tests.k8s import refresh
from tests.k8s.cases import named, with_password
from tests.k8s.engines import CHART, Engine, Helm4, RefusedError, Values, application, ray_service, settings_of
from tests.k8s.helm3 import helm3
from tests.k8s.schemas import templates_of

SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
DEFAULTS: Values = yaml.safe_load((CHART / "values.yaml").read_text())


def test_the_schema_of_app_is_that_of_the_application() -> None:
    """After a change of deployments/config: python -m tests.k8s.refresh"""
    assert (CHART / "values.schema.json").read_text() == refresh.schema_text()


def test_the_table_of_values_is_up_to_date() -> None:
    """After a change of values.yaml or the schema: python -m tests.k8s.refresh"""
    assert (CHART / "README.md").read_text() == refresh.table_text()


def test_the_schema_is_draft_07() -> None:
    assert SCHEMA["$schema"] == "http://json-schema.org/draft-07/schema#"
    jsonschema.Draft7Validator.check_schema(SCHEMA)


def _objects(schema: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(schema, list):
        for part in schema:
            yield from _objects(part, path)
    if isinstance(schema, dict):
        if isinstance(schema.get("properties"), dict):
            yield path, schema
        for key, part in schema.items():
            yield from _objects(part, f"{path}/{key}")


def test_every_object_of_ours_refuses_unknown_keys() -> None:
    """Objects that Kubernetes defines are open: it checks them itself."""
    kubernetes = {"/definitions/envVar", "/definitions/named", "/definitions/mount"}
    loose = {path for path, schema in _objects(SCHEMA) if schema.get("additionalProperties") is not False}
    assert loose <= kubernetes


def test_every_value_is_described() -> None:
    for path, schema in _objects(SCHEMA):
        for name, value in schema["properties"].items():
            assert value.get("description") or "$ref" in value, f"{path}/{name}"


def test_every_default_is_in_the_schema_and_every_value_in_the_table() -> None:
    table = (CHART / "README.md").read_text()
    jsonschema.Draft7Validator(SCHEMA).validate(DEFAULTS)
    for name in SCHEMA["properties"]:
        assert re.search(rf"^\| {name}\b", table, re.MULTILINE), name
    assert set(SCHEMA["properties"]) - set(DEFAULTS) == {"global"}, "values.yaml shows all"


GPU = {"name": "gpu", "replicas": 1, "resources": {}}
TWO_NODES: Values = {
    "gpusPerEngine": 4,
    "nodesPerEngine": 2,
    "app": {"vllm_args": ["-tp", "4"]},
    "engineGroups": [{**GPU, "replicas": 2}],
}
ONE_POD: Values = {"redis": {"mode": "none"}, "engineGroups": []}
ROOM = {"rayCpus": 4}
INCREMENTAL = named("incremental")
REFUSED: dict[str, tuple[Values, str]] = {
    "an unknown value": ({"imagee": {}}, "imagee"),
    "an unknown setting of the application": ({"app": {"model": "demo", "engin": {}}}, "engin"),
    "a setting with a typo, deep down": ({"app": {"engine": {"drain_timeout": 3}}}, "drain_timeout"),
    "a setting that the chart makes": ({"app": {"engine": {"num_gpus": 1}}}, "num_gpus"),
    "a Redis URL in the application": ({"app": {"redis_url": "redis://x"}}, "redis_url"),
    "a key in the clear": ({"auth": {"apiKeys": {"entries": [{"name": "a", "key": "sk-1"}]}}}, "key"),
    "text for a number": ({"gpusPerEngine": "1"}, "gpusPerEngine"),
    "no such mode of Redis": ({"redis": {"mode": "cluster"}}, "mode"),
    "Ray's database": ({"redis": {"database": 0}}, "database"),
    "a password that no URL can hold": ({"redis": {"auth": {"password": "p@ss/word"}}}, "password"),
    "an environment variable that is a number": ({"extraEnv": [{"name": "A", "value": 1}]}, "value"),
    "a Redis image without a tag": ({"redis": {"internal": {"image": {"tag": ""}}}}, "tag"),
    "a broken digest": ({"image": {"digest": "sha256:abc"}}, "digest"),
    "a group without resources": ({"engineGroups": [{"name": "gpu", "replicas": 1}]}, "resources"),
    "a name with capitals": ({"fullnameOverride": "Sluice"}, "fullnameOverride"),
    "no Redis with engine pods": ({"redis": {"mode": "none"}}, "set engineGroups to []"),
    "no engines": ({"engineGroups": []}, "name at least one group"),
    "two groups of one name": ({"engineGroups": [GPU, GPU]}, '"gpu" is taken'),
    "a group named router": ({"engineGroups": [{**GPU, "name": "router"}]}, '"router" is taken'),
    "a range upside down": (
        {"autoscaler": {"enabled": True}, "engineGroups": [{**GPU, "minReplicas": 3, "maxReplicas": 2}]},
        "group gpu: minReplicas (3) is above maxReplicas (2)",
    ),
    "more engines than room": (
        {"app": {"engine": {"replicas": 3}}},
        "asks for up to 3 engine replicas, and there is room for 1",
    ),
    "no room for a redeploy": ({"routerGroup": {"rayCpus": 1}}, "asks for 2 CPUs"),
    "more engines of classes than room": ({"app": {"classes": {"a": {"own_replicas": 1}}}}, "up to 2 engine replicas"),
    "more routers than CPUs": (
        {"app": {"router": {"replicas": 2}}},
        "asks for 3 CPUs (replicas x num_cpus, one router more",
    ),
    "external Redis nowhere": ({"redis": {"mode": "external"}}, "set redis.external.host"),
    "two Redis passwords": ({"redis": {"auth": {"password": "a", "existingSecret": "b"}}}, "not both"),
    "internal TLS without certificates": ({"redis": {"tls": {"enabled": True}}}, "ca.crt, tls.crt and tls.key"),
    "a user of the internal Redis": ({"redis": {"auth": {"username": "me"}}}, "for redis.mode external"),
    "a user without a password": (
        {"redis": {"mode": "external", "external": {"host": "h"}, "auth": {"username": "me"}}},
        "goes with redis.auth.password",
    ),
    "two sources of keys": (
        {"auth": {"apiKeys": {"existingSecret": "a", "entries": [{"name": "a", "sha256": "0" * 64}]}}},
        "entries or existingSecret",
    ),
    "two hub tokens": ({"huggingface": {"token": "a", "existingSecret": "b"}}, "token or existingSecret"),
    "more routers than their pods have room for": (
        {"app": {"router": {"autoscaling": {"max_replicas": 8}}}},
        "app.router asks for 9 CPUs",
    ),
    "less time than a drain takes": ({"drainSeconds": 60}, "app.engine.drain_timeout_s (3600, "),
    "less time than a further model's drain takes": (
        {
            "drainSeconds": 900,
            "app": {"engine": {"drain_timeout_s": 900}, "more_models": [{"model": "other", "served_model_name": "o"}]},
        },
        "app.more_models[0].engine.drain_timeout_s (3600, ",
    ),
    "a predictor without CPUs": (
        {"app": {"predictor": {"kind": "bert", "replicas": 2}}},
        "app.router and app.predictor, which run on the same pods, ask for 4 CPUs",
    ),
    "predictors of whole answers without CPUs": (
        {"app": {"classes": {"agents": {"e2e_s": 8.0}}, "default_class": "agents", "predictor": {"replicas": 2}}},
        "app.router and app.predictor, which run on the same pods, ask for 4 CPUs",
    ),
    "routers that may land anywhere": ({"app": {"router": {"num_cpus": 0}}}, "app.router.num_cpus is 0"),
    "a predictor that may land anywhere": (
        {"app": {"predictor": {"kind": "bert", "num_cpus": 0}}},
        "app.predictor.num_cpus is 0",
    ),
    "what runs batches without CPUs": (
        {"app": {"batches": {"folder": "s3://b", "num_cpus": 3}}},
        "app.batches and app.router ask for 5 CPUs",
    ),
    "what runs batches that may land anywhere": (
        {"app": {"batches": {"folder": "s3://b", "num_cpus": 0}}},
        "app.batches.num_cpus is 0",
    ),
    "a predictor on a GPU": (
        {"app": {"predictor": {"kind": "bert", "num_gpus": 1}}},
        "app.predictor asks for 1 GPUs (replicas x num_gpus), and engines leave 0: set num_gpus to 0",
    ),
    "a predictor on a GPU inside routers": (
        {"app": {"predictor": {"kind": "bert", "place": "router", "num_gpus": 1}}},
        "app.predictor asks for 1 GPUs",
    ),
    "a predictor on a GPU while a pod for engines is free": (
        {
            "gpusPerEngine": 1,
            "engineGroups": [{**GPU, "replicas": 2}],
            "app": {"predictor": {"kind": "bert", "num_gpus": 1}},
        },
        "app.predictor asks for 1 GPUs",
    ),
    "a predictor on an engine's GPU": (
        {**ONE_POD, "gpusPerEngine": 1, "app": {"predictor": {"kind": "bert", "num_gpus": 0.5}}, "routerGroup": ROOM},
        "app.predictor asks for 0.5 GPUs (replicas x num_gpus), and engines leave 0",
    ),
    "fewer GPUs than the arguments use": (
        {"gpusPerEngine": 2, "app": {"vllm_args": ["--tensor-parallel-size", "4"]}},
        "gpusPerEngine is 2, and by app.vllm_args an engine uses 4: set gpusPerEngine, or --tensor-parallel-size times",
    ),
    "more GPUs than the arguments use": (
        {"gpusPerEngine": 16},
        "gpusPerEngine is 16, and by app.vllm_args an engine uses 1",
    ),
    "pipelines that are forgotten": (
        {"gpusPerEngine": 2, "app": {"vllm_args": ["-tp=2", "--pipeline_parallel_size", "2"]}},
        "an engine uses 4",
    ),
    "GPUs of another model": (
        {
            "gpusPerEngine": 2,
            "app": {"vllm_args": ["-tp", "2"], "more_models": [{"model": "other", "served_model_name": "o"}]},
            "engineGroups": [{**GPU, "replicas": 2}],
        },
        "by app.more_models[0].vllm_args an engine uses 1",
    ),
    "GPUs that do not go into the pods of an engine": (
        {**TWO_NODES, "nodesPerEngine": 3},
        "nodesPerEngine is 3, and gpusPerEngine 4: each pod has the same number",
    ),
    "an engine on CPUs over several pods": ({"nodesPerEngine": 2}, "nodesPerEngine is 2, and gpusPerEngine 0"),
    "engines over pods of several groups": (
        {**TWO_NODES, "engineGroups": [{**GPU, "replicas": 2}, {**GPU, "name": "more", "replicas": 2}]},
        "there are 2 engineGroups",
    ),
    "an engine over several pods in one pod": ({**TWO_NODES, **ONE_POD}, "name one group (not with redis.mode none)"),
    "two engines that share their pods": (
        {**TWO_NODES, "engineGroups": [{**GPU, "replicas": 2, "enginesPerPod": 2}]},
        "set enginesPerPod to 1",
    ),
    "caches from pods to pods": (
        {**TWO_NODES, "app": {**TWO_NODES["app"], "engine": {"prefill": {}}}},
        "app.engine.prefill hands caches from pod to pod",
    ),
    "more engines than there are pods for all of each": (
        {**TWO_NODES, "engineGroups": [{**GPU, "replicas": 3}], "app": {**TWO_NODES["app"], "engine": {"replicas": 2}}},
        "app asks for up to 2 engine replicas, and there is room for 1 (pods x enginesPerPod / nodesPerEngine)",
    ),
    "an engine's bundles": ({"app": {"engine": {"placement_group_bundles": [{"GPU": 1}]}}}, "placement_group_bundles"),
    "a fetch into a claim that is not there yet": (
        {"modelFetch": {"enabled": True}, "modelCache": {"enabled": True}},
        "set modelCache.enabled and modelCache.existingClaim",
    ),
    "a fetch with a token that is not there yet": (
        {
            "modelFetch": {"enabled": True},
            "modelCache": {"enabled": True, "existingClaim": "models"},
            "huggingface": {"token": "a"},
        },
        "set huggingface.existingSecret",
    ),
    "no such level of logs": ({"logLevel": "TRACE"}, "logLevel"),
    "an ingress without hosts": ({"ingress": {"enabled": True}}, "set ingress.hosts"),
    "a route without a gateway": ({"httpRoute": {"enabled": True}}, "set httpRoute.parentRefs"),
    "an incremental upgrade without the autoscaler": (
        {**INCREMENTAL, "app": {"model": "demo"}, "autoscaler": {"enabled": False}},
        "needs autoscaler.enabled",
    ),
    "an incremental upgrade without a gateway": (
        {**INCREMENTAL, "upgrade": {"type": INCREMENTAL["upgrade"]["type"]}},
        "needs upgrade.gatewayClassName",
    ),
    "steps above the surge": (
        {**INCREMENTAL, "upgrade": {**INCREMENTAL["upgrade"], "stepSizePercent": 50, "maxSurgePercent": 20}},
        "stepSizePercent (50) is above upgrade.maxSurgePercent (20)",
    ),
    "steps that move nothing": (
        {**INCREMENTAL, "upgrade": {**INCREMENTAL["upgrade"], "stepSizePercent": 0}},
        "stepSizePercent",
    ),
    "an ingress to a service that is never made": (
        {**INCREMENTAL, "ingress": {"enabled": True, "hosts": ["a.example.org"]}},
        "let clients come to KubeRay's Gateway my-sluice-gateway",
    ),
    "a route to a service that is never made": (
        {**INCREMENTAL, "httpRoute": {"enabled": True, "parentRefs": [{"name": "gateway"}]}},
        "set ingress.enabled and httpRoute.enabled to false",
    ),
    "a type of a service that is never made": (
        {**INCREMENTAL, "service": {"type": "LoadBalancer"}},
        "leave service.type and service.annotations out",
    ),
    "a test of a service that is never made": (
        {**INCREMENTAL, "tests": {"enabled": True}},
        "set tests.address, or tests.enabled: false",
    ),
    "an incremental upgrade by a KubeRay that would never apply it": (
        {**INCREMENTAL, "kuberayVersion": "1.6.2"},
        "1.5 and 1.6 never apply a change of pods",
    ),
    "a suspension that the operator does not know": (
        {"rayService": {"suspend": True}, "kuberayVersion": "1.6.2"},
        "rayService.suspend needs KubeRay 1.7",
    ),
}


def _template(*options: str) -> "subprocess.CompletedProcess[str]":
    command = [str(helm3()), "template", "my", str(CHART), "--kube-version", "1.33.0", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_numbers_with_a_point_come_by_set_json() -> None:
    """docs/start/install-kubernetes.md names it where it names what `--set` says."""
    refused = _template("--set", "app.router.num_cpus=0.5")
    assert refused.returncode != 0 and "num_cpus: Invalid type. Expected: number, given: string" in refused.stderr
    taken = _template("--set-json", 'app.classes={"standard": {"ttft_s": 0.4}}')
    assert settings_of(taken.stdout)["classes"] == {"standard": {"ttft_s": 0.4}}


@pytest.mark.parametrize("mistake", REFUSED)
def test_both_engines_refuse(helm: Engine, mistake: str) -> None:
    values, message = REFUSED[mistake]
    with pytest.raises(RefusedError, match=re.escape(message)):
        helm.render(values)


def test_a_predictor_in_the_one_pod_has_the_gpus_that_engines_leave(helm4: Helm4) -> None:
    predictor = {"kind": "bert", "num_gpus": 1}
    values = {**ONE_POD, "gpusPerEngine": 1, "head": {"enginesPerPod": 2}, "routerGroup": ROOM}
    args = application(helm4.render({**values, "app": {"predictor": predictor}}))["args"]
    assert args["predictor"] == predictor


ARGUMENTS = {
    "nothing": ([], 1),
    "two words": (["-tp", "2", "--pipeline-parallel-size", "3"], 6),
    "one word": (["--tensor_parallel_size=4"], 4),
    "context": (["-pcp", "2"], 2),
    "ranks": (["-tp", "2", "--data-parallel-size=3"], 6),
    "a value like an option's name": (["--seed", "-tp", "2"], 2),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_the_chart_counts_gpus_as_the_application_does(helm4: Helm4, case: str) -> None:
    arguments, gpus = ARGUMENTS[case]
    for count in range(1, 8):
        values = {"gpusPerEngine": count, "app": {"vllm_args": arguments}}
        settings = {"model": "org/model", "vllm_args": arguments, "engine": {"num_gpus": count}}
        if count == gpus:
            assert application(helm4.render(values))["args"]["engine"]["num_gpus"] == count
            assert AppConfig.model_validate(settings)
            continue
        with pytest.raises(RefusedError, match=f"gpusPerEngine is {count}, and by app.vllm_args an engine uses {gpus}"):
            helm4.render(values)
        with pytest.raises(ValidationError, match=f"num_gpus is {count}, and each engine uses {gpus} by vllm_args"):
            AppConfig.model_validate(settings)


@pytest.mark.parametrize("arguments", [["--config", "vllm.yaml"], ["--distributed-executor-backend", "ray"]])
def test_arguments_that_do_not_say_how_many_gpus_are_left_to_the_application(
    helm4: Helm4, arguments: list[str]
) -> None:
    assert application(helm4.render({"gpusPerEngine": 4, "app": {"vllm_args": arguments}}))


def test_every_pod_of_an_engine_has_its_part_of_the_gpus_and_every_gpu_is_a_bundle(helm4: Helm4) -> None:
    rendered = helm4.render(TWO_NODES)
    engine = application(rendered)["args"]["engine"]
    assert engine["num_gpus"] == 4
    assert engine["placement_group_bundles"] == [{"GPU": 1, "sluice_engine": 1}, *3 * [{"GPU": 1}]]
    (pod,) = (templates_of(ray_service(rendered))[group["name"]] for group in TWO_NODES["engineGroups"])
    assert pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert (
        "placement_group_bundles" not in application(helm4.render({**TWO_NODES, "nodesPerEngine": 1}))["args"]["engine"]
    )


def test_one_pod_has_nothing_that_cpus_would_keep_apart(helm4: Helm4) -> None:
    app = {"router": {"num_cpus": 0}, "predictor": {"kind": "bert", "num_cpus": 0}}
    args = application(helm4.render({**ONE_POD, "app": app}))["args"]
    assert args["router"] == {"num_cpus": 0}


def test_a_long_release_name_is_refused_with_the_way_out(helm: Engine) -> None:
    values = with_password({"fullnameOverride": "a" * 48})
    with pytest.raises(RefusedError, match="fullnameOverride"):
        helm.render(values)
