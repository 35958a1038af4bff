"""`sluice serve` until it is ready and at its end: health, Ray, resources, and what it asks of Ray Serve."""

import os
from pathlib import Path

import psutil
import pytest
import ray

from deployments.app import ROUTER_QUEUE, _engine_deployment, _groups, _router_deployment
from deployments.command import one_machine
from deployments.command.one_machine import _check_resources, _wait_until_healthy, end, running
from deployments.command.stages import Stages
from deployments.config.application import AppConfig
from deployments.config.router import RouterSection
from deployments.process.environment import BODY_TIMEOUT_ENV
from policies.errors import ApplicationStartError
from tests.http_server import answering
from tests.waiting import wait_until


@pytest.mark.timeout(120)
def test_a_health_that_never_becomes_200_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_machine, "START_S", 0.1)
    with answering(lambda _: (204, b"")) as url, pytest.raises(ApplicationStartError, match="status 204"):
        _wait_until_healthy(url)


def test_haproxy_starts_with_the_routers_time_for_a_body(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told: list[str] = []
    monkeypatch.setenv(BODY_TIMEOUT_ENV, "")
    monkeypatch.delenv(BODY_TIMEOUT_ENV)

    def start(*_: object) -> None:
        told.append(os.environ[BODY_TIMEOUT_ENV])
        raise ApplicationStartError("not here")

    monkeypatch.setattr(one_machine, "_start_ray", start)
    config = AppConfig.model_validate({"model": "m", "router": {"body_timeout_s": 1.5}})
    with pytest.raises(ApplicationStartError), running(config, tmp_path, "127.0.0.1", 8000, Stages()):
        pass
    assert told == ["1500"]


def test_a_ray_that_does_not_start_is_told_in_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def ended(**_: object) -> None:
        raise Exception("The current node timed out during startup")  # as Ray does

    monkeypatch.setattr(ray, "init", ended)
    application = running(AppConfig.model_validate({"model": "m"}), tmp_path, "127.0.0.1", 8000, Stages())
    with pytest.raises(ApplicationStartError, match="timed out during startup\n.*folder of logs"), application:
        pass


def test_what_does_not_end_by_itself_is_killed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(one_machine, "ENDING_S", 0.5)
    with psutil.Popen(["sleep", "300"]) as stubborn, psutil.Popen(["true"]) as ended:
        wait_until(lambda: ended.status() == psutil.STATUS_ZOMBIE, 60, "one has ended, and nobody has asked about it")
        end([ended, stubborn])
        assert stubborn.status() == psutil.STATUS_ZOMBIE
    assert not capsys.readouterr().err


def test_more_than_the_machine_has_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 4.0, "memory": 1e9})
    _check_resources(AppConfig.model_validate({"model": "m", "engine": {"num_cpus": 3}}))
    for engine, why in (
        ({"num_cpus": 3.5}, "4.5 of CPU, this machine has 4:"),
        ({"resources": {"rack": 1}}, "1 of rack, this machine has 0:"),
        ({"num_gpus": 1, "replicas": 2}, "2 of GPU, this machine has 0:"),
    ):
        with pytest.raises(ApplicationStartError, match=why):
            _check_resources(AppConfig.model_validate({"model": "m", "engine": engine}))


def test_a_redeploy_stops_no_router_before_its_successor_serves() -> None:
    """Ray Serve's default stops first, and a router with a stream of half an hour takes no new requests meanwhile."""
    config = _router_deployment(AppConfig(model="m"))._deployment_config
    assert config.max_surge_percent == 100


def test_routers_and_engines_that_are_silent_among_others_are_not_ended_for_minutes() -> None:
    """Ray Serve does it after three times in a row, for the last router as well."""
    config = AppConfig(model="m")
    for deployment in (_router_deployment(config), _engine_deployment(config, 0, next(_groups(config)))):
        assert deployment._deployment_config.health_check_timeout_s * 3 >= 1_800


def test_a_router_that_is_full_says_when_to_come_back() -> None:
    deployment = _router_deployment(AppConfig(model="m", router=RouterSection(max_ongoing_requests=7)))
    assert (deployment.max_ongoing_requests, deployment.max_queued_requests) == (7, ROUTER_QUEUE)
    answer = deployment.backpressure_config
    assert answer.status_code == 503
    assert answer.retry_after_s is not None and answer.retry_after_s > 0
