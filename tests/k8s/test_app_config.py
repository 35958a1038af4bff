"""serveConfigV2 is what `deployments.app:build` and Ray Serve take, with what the chart adds."""

import json
from pathlib import Path

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from deployments.config.application import AppConfig
from deployments.config.live import ROUTER, with_live
from tests.k8s import refresh
from tests.k8s.cases import FILES, holds, named, values_of, with_password
from tests.k8s.engines import Helm4, Manifest, RefusedError, application, ray_service, settings_of, start_params
from tests.k8s.schemas import templates_of

every_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


@every_file
def test_the_application_takes_the_rendered_configuration(rendered: dict[str, str], file: Path) -> None:
    values, args = values_of(file), application(rendered[file.stem])["args"]
    config = AppConfig.model_validate(args)
    assert config.model == values.get("app", {"model": "demo"})["model"]
    assert config.engine.num_gpus == values.get("gpusPerEngine", 0)


@every_file
def test_every_setting_of_values_arrives_unchanged(rendered: dict[str, str], file: Path) -> None:
    settings = settings_of(rendered[file.stem])
    given = values_of(file).get("app", {})
    assert holds(settings, given), (given, settings)


@every_file
def test_routers_take_what_changes_live(rendered: dict[str, str], file: Path) -> None:
    """As Ray Serve gives it to them, over the `args` with which they start."""
    found = application(rendered[file.stem])
    began = AppConfig.model_validate(found["args"])
    for deployment in found.get("deployments", ()):
        assert deployment["name"] == ROUTER
        changed = with_live(began, deployment["user_config"])
        assert changed == AppConfig.model_validate(settings_of(rendered[file.stem]))


LIVE: Manifest = {
    "classes": {"gold": {"ttft_s": 0.3, "own_replicas": 1}, "standard": {"ttft_s": 3}},
    "service_tiers": {"priority": "gold"},
    "router": {"max_wait_s": 30, "late_patience_s": 5},
    "engine": {"credit_s": 2, "scheduler": {"overcommit": False, "mode": "mixed"}},
    "more_models": [
        {"model": "org/other", "engine": {"scheduler": {"max_batch_size": 8}}},
        {"model": "org/third", "candidate": {"of": "org/other", "share": 0.1}},
    ],
}
ROOM = [{"name": "engine", "replicas": 6, "resources": {}}]
OTHER: Manifest = {
    "classes": {"gold": {"ttft_s": 0.2, "own_replicas": 1}, "standard": {}, "new": {"fills_idle": True}},
    "service_tiers": {"priority": "new"},
    "router": {"max_wait_s": 60},
    "engine": {"scheduler": {"max_batch_size": 9, "mode": "mixed"}},
    "more_models": [
        {"model": "org/other"},
        {"model": "org/third", "engine": {"credit_s": 1}, "candidate": {"of": "org/other", "mirror": True}},
    ],
}


def test_a_change_of_what_is_live_restarts_no_engine(helm4: Helm4) -> None:
    """Ray Serve restarts everything where `args` are others."""
    before, after = (
        application(helm4.render(with_password({"app": {"model": "demo", **app}, "engineGroups": ROOM})))
        for app in (LIVE, OTHER)
    )
    assert before["args"] == after["args"]
    assert before["deployments"] != after["deployments"]


def test_the_first_live_setting_restarts_no_engine_either(helm4: Helm4) -> None:
    app = {"router": {"max_wait_s": 9}, "engine": {"scheduler": {"max_batch_size": 1}}, "default_class": "offline"}
    without, with_some = (application(helm4.render({"app": each})) for each in ({}, app))
    assert without["args"] == with_some["args"] and "deployments" not in without
    assert with_some["deployments"] == [{"name": "Router", "user_config": app}]


def test_replicas_of_a_class_of_its_own_start_with_args(helm4: Helm4) -> None:
    text = helm4.render(with_password({"app": {"model": "demo", **LIVE}, "engineGroups": ROOM}))
    args = application(text)["args"]
    assert args["classes"] == {"gold": {"own_replicas": 1}, "standard": {}}
    assert AppConfig.model_validate(args).classes["gold"].own_replicas == 1
    changed = with_live(AppConfig.model_validate(args), application(text)["deployments"][0]["user_config"])
    assert changed == AppConfig.model_validate(settings_of(text))
    assert (changed.classes["gold"].ttft_s, changed.more_models[0].engine.scheduler.max_batch_size) == (0.3, 8)


def test_a_policy_of_ones_own_starts_with_the_names_of_all_classes(helm4: Helm4) -> None:
    """It was told how many there are, and their indices follow from their names."""
    classes = {"gold": {"ttft_s": 0.3}, "standard": {"ttft_s": 3, "own_replicas": 0}}
    app = {"classes": classes, "engine": {"scheduler": {"policy": "mine:Policy"}}}
    found = application(helm4.render({"app": app}))
    assert found["args"]["classes"] == {"gold": {}, "standard": {}}
    assert found["deployments"][0]["user_config"]["classes"]["gold"] == {"ttft_s": 0.3}


def test_engines_start_with_what_their_start_goes_by(helm4: Helm4) -> None:
    """Plain vLLM loads no plug-in, only `auto` measures, and a policy of one's own may need its settings."""
    order = {"policy": "tests.own_order:ByClass", "policy_args": {"default_s": 2}}
    app = {"engine": {"scheduler": {"mode": "stock"}}, "order": order}
    args = application(helm4.render(with_password({"app": {"model": "demo", **app}})))["args"]
    assert args["engine"]["scheduler"] == {"mode": "stock"} and args["order"] == app["order"]


def test_the_list_of_what_changes_live_is_up_to_date() -> None:
    """After a change of deployments/config: python -m tests.k8s.refresh"""
    assert refresh.LIVE_KEYS.read_text() == refresh.live_keys_text()


@every_file
def test_ray_serve_takes_it_whole(rendered: dict[str, str], file: Path) -> None:
    """Round trip, because Ray Serve drops keys that it does not know without a word."""
    config = yaml.safe_load(ray_service(rendered[file.stem])["spec"]["serveConfigV2"])
    read = ServeDeploySchema.model_validate(config).model_dump(exclude_unset=True, mode="json")
    assert read == config


@every_file
def test_replicas_find_the_pods_meant_for_them(rendered: dict[str, str], file: Path) -> None:
    """Routers ask for CPUs, of which engine pods have none; engines for a resource that router pods have not."""
    service, config = (
        ray_service(rendered[file.stem]),
        AppConfig.model_validate(application(rendered[file.stem])["args"]),
    )
    groups = start_params(service)
    assert (
        config.router.num_cpus > 0 and config.engine.num_cpus == 0 and config.engine.resources == {"sluice_engine": 1}
    )
    if set(groups) == {"head"}:
        return
    assert groups["head"] == {"dashboard-host": "0.0.0.0", "num-cpus": "0"}
    assert int(groups["router"]["num-cpus"]) > 0 and "resources" not in groups["router"]
    offered = set[str]()
    for name in set(groups) - {"head", "router"}:
        assert groups[name]["num-cpus"] == "0"
        ((resource, engines),) = json.loads(groups[name]["resources"][1:-1].replace("\\", "")).items()
        assert engines >= 1
        offered.add(resource)
    reading = config.engine.prefill.resources if config.engine.prefill else None
    assert offered == {"sluice_engine", *(reading or {})}


def test_prefill_has_pods_of_its_own_or_shares_those_of_the_others(helm4: Helm4) -> None:
    values = named("prefill-decode")
    args = application(helm4.render(values))["args"]
    assert args["engine"]["prefill"]["resources"] == {"sluice_prefill": 1}
    groups = [{**group, "role": "engine", "replicas": 3} for group in values["engineGroups"]]
    shared = application(helm4.render({**values, "engineGroups": groups}))["args"]
    assert "resources" not in shared["engine"]["prefill"]


def test_too_little_room_for_prefill_is_refused_in_words(helm4: Helm4) -> None:
    values = named("prefill-decode")
    reading, *others = values["engineGroups"]
    assert reading["role"] == "prefill"
    with pytest.raises(RefusedError, match=r"app\.engine\.prefill asks for up to 2 replicas"):
        helm4.render({**values, "engineGroups": [{**reading, "replicas": 1}, *others]})
    engine = {name: value for name, value in values["app"]["engine"].items() if name != "prefill"}
    with pytest.raises(RefusedError, match="no model has app.engine.prefill"):
        helm4.render({**values, "app": {**values["app"], "engine": engine}})


def test_large_whole_numbers_stay_whole(helm4: Helm4) -> None:
    app = {"model": "demo", "router": {"max_body_bytes": 123456789012}}
    assert settings_of(helm4.render(with_password({"app": app})))["router"]["max_body_bytes"] == 123456789012


def test_the_file_of_keys_is_where_routers_find_it(rendered: dict[str, str]) -> None:
    args = application(rendered["everything-values"])["args"]
    assert AppConfig.model_validate(args).keys.file == Path("/etc/sluice/keys/keys.yaml")
    assert args["keys"]["redis"] is True, "what values say of keys stays"
    templates = templates_of(ray_service(rendered["everything-values"]))
    mounts = {
        name: [m["mountPath"] for m in _container(template)["volumeMounts"]] for name, template in templates.items()
    }
    assert "/etc/sluice/keys" in mounts["router"] and "/etc/sluice/keys" not in mounts["h100"]


def _container(template: Manifest) -> Manifest:
    container: Manifest = template["spec"]["containers"][0]
    return container


def test_tls_to_redis_is_checked_against_the_named_ca(rendered: dict[str, str]) -> None:
    args = application(rendered["external-redis-tls"])["args"]
    assert args["redis_ca_certs"] == "/etc/sluice/redis-ca/ca.crt"
    for template in templates_of(ray_service(rendered["external-redis-tls"])).values():
        env = {entry["name"]: entry.get("value") for entry in _container(template)["env"]}
        assert env["RAY_REDIS_CA_CERT"] == "/etc/sluice/redis-ca/ca.crt"
        assert env["SLUICE_REDIS_URL"] == "rediss://sluice:$(SLUICE_REDIS_PASSWORD)@redis.data.example.org:6380/3"


def test_the_values_of_everything_differ_from_the_defaults() -> None:
    """So that the tests above see each section of the configuration."""
    assert set(AppConfig.model_fields) - {"redis_url", "redis_ca_certs"} <= set(named("everything")["app"])
