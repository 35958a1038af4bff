"""Settings of engines that are servers of others."""

from typing import Any

import pytest

from deployments.app import _engine_deployment, _groups
from deployments.command.args_check import check_args
from deployments.command.settings import with_defaults
from deployments.config.application import AppConfig, checked
from policies.errors import ConfigError

URLS = ["http://10.0.0.7:8000", "https://servers.example/a/"]


def settings(*urls: str, engine: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    openai = {"urls": list(urls or URLS)}
    return {"model": "theirs", "engine": {"kind": "openai", "openai": openai, **(engine or {})}, **more}


def test_a_replica_stands_for_each_server() -> None:
    config = checked(with_defaults(settings()))
    assert (config.engine.replicas, config.engine_replicas) == (2, 2)
    groups = list(_groups(config))
    assert [group.of(config).engine.openai.urls for group in groups] == [
        ("http://10.0.0.7:8000",),
        ("https://servers.example/a",),
    ]
    names = [_engine_deployment(config, 1, group).name for group in groups]
    assert names == ["EngineReplica-2-0", "EngineReplica-2-1"]
    assert {group.of(config).namespace("openai-1") for group in groups} == {config.namespace("openai-1")}
    assert [group.of(AppConfig(model="m")) for group in _groups(AppConfig(model="m"))] == [AppConfig(model="m")]


def test_the_check_says_what_they_do_not_do() -> None:
    (phases,) = [line for line in check_args([checked(settings())]) if "phases" in line]
    assert phases.startswith("theirs: phases off, with servers of others")


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (settings("10.0.0.7:8000"), "must be as http://HOST:PORT"),
        (settings("ftp://a"), "must be as http://HOST:PORT"),
        (settings("http://a:0"), "must be as http://HOST:PORT"),
        (settings("http://a:99999"), "engine.openai.urls"),
        (settings("http://me:hunter2@a/?b"), "holds a secret"),
        (settings("http://me:pass-word@a"), "key_file"),
        (settings("http://a/v1/"), "leave /v1 out"),
        (settings("http://a", "http://a"), "twice"),
        (settings("http://a", engine={"replicas": 2}), "names 1 servers"),
        (settings(engine={"openai": {}}), "engine.openai.urls"),
        (settings(model="demo"), "as its servers call it"),
        (settings(vllm_args=["--dtype", "half"]), "have their own arguments"),
        (settings(engine={"num_gpus": 1}), "engine.num_gpus"),
        (settings(engine={"autoscaling": {"max_replicas": 2}}), "engine.autoscaling"),
        (settings(engine={"scheduler": {"mode": "stock"}}), "engine.scheduler"),
        (settings(engine={"gang": {"batch_size": 3}}), "engine.gang"),
        (settings(engine={"lora": {"adapters": {"a": "/a"}}}), "engine.lora"),
        (settings(bins={"dispatch": "batches"}), "bins.dispatch"),
        (settings(classes={"standard": {"own_replicas": 1}}), "own_replicas"),
        (settings(classes={"standard": {"tpot_s": 1}}), "tpot_s"),
        ({"model": "m", "engine": {"openai": {"urls": URLS}}}, "this one is vllm"),
    ],
)
def test_what_they_do_not_heed_is_refused(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        checked(wrong)
    assert "pass-word" not in str(refused.value)
