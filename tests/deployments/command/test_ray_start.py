"""How long Ray may take to come up, and what of it is left out; that it serves so, tests of whole applications hold."""

import io
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray import serve
from ray._private import node, parameter, services

from deployments.command import ray_start
from deployments.command.ray_start import _Raylet, start_ray
from deployments.command.stages import Stages
from policies.errors import ApplicationStartError

COMMAND = ["raylet", "--metrics-agent-port=0", "--dashboard_agent_command=python agent.py", "--node_id=1"]


def started(process: "subprocess.Popen[bytes]") -> Any:
    return lambda command, process_type, *_, **__: SimpleNamespace(process=process, command=command)


def late(times: int) -> Any:
    """Ray's own look at whether the raylet has registered: at first it has not."""
    answers = iter([RuntimeError("GCS cannot find the node")] * times)

    def look_up(gcs_address: str, node_id: str) -> dict[str, str]:
        for error in answers:
            raise error
        return {"node": node_id, "gcs": gcs_address}

    return look_up


@contextmanager
def sleeping(seconds: int) -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen(["sleep", str(seconds)]) as process:
        yield process
        process.kill()


def test_a_raylet_that_is_late_is_waited_for_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_start, "LOOK_S", 0.0)
    output = io.StringIO()
    with sleeping(300) as process, Stages(output) as stages:
        raylet = _Raylet(started(process), late(1_000), stages)
        raylet.start_process(COMMAND, "raylet")
        assert raylet.registered("127.0.0.1:1", "a") == {"node": "a", "gcs": "127.0.0.1:1"}
    assert "starting Ray: waiting for its raylet" in output.getvalue()


def test_a_raylet_that_has_ended_is_told_at_once() -> None:
    with sleeping(0) as process, Stages(io.StringIO()) as stages:
        raylet = _Raylet(started(process), late(1_000), stages)
        raylet.start_process(COMMAND, "raylet")
        process.wait()
        with pytest.raises(ApplicationStartError, match="its raylet has ended with status 0"):
            raylet.registered("127.0.0.1:1", "a")


def test_a_raylet_that_does_not_register_in_its_time_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_start, "START_S", 0.0)
    with sleeping(300) as process, Stages(io.StringIO()) as stages:
        raylet = _Raylet(started(process), late(1_000), stages)
        raylet.start_process(COMMAND, "raylet")
        with pytest.raises(RuntimeError, match="cannot find the node"):
            raylet.registered("127.0.0.1:1", "a")


def test_a_raylet_starts_without_the_agent_of_metrics_and_waits_for_no_port_of_it() -> None:
    with sleeping(0) as process, Stages(io.StringIO()) as stages:
        raylet = _Raylet(started(process), late(0), stages)
        command = raylet.start_process(COMMAND, "raylet").command
        assert raylet.start_process(COMMAND, "gcs_server").command == COMMAND
    assert command[:2] == ["raylet", "--node_id=1"] and "agent.py" not in " ".join(command)
    assert {"--metrics-agent-port=-1", "--metrics_export_port=-1", "--dashboard_agent_listen_port=-1"} <= set(command)


def test_ray_starts_without_autoscaler_dashboard_and_monitor_of_logs_and_is_left_as_it_was(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    places = [(parameter, "RayParams"), (node.Node, "start_api_server"), (services, "start_ray_process")]
    places += [(services, "get_node")]
    before = [getattr(place, name) for place, name in places]
    asked: list[Any] = []

    def init(**_: object) -> None:
        parameters = parameter.RayParams()
        asked.append((parameters.no_monitor, parameters.include_log_monitor, bool(parameters.runtime_env_agent_port)))
        asked.append(node.Node.start_api_server(SimpleNamespace(), include_dashboard=False, raise_on_failure=False))

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(serve, "start", lambda http_options: asked.append(http_options["port"]))
    with Stages(io.StringIO()) as stages:
        start_ray(tmp_path, 8123, stages)
    assert asked == [(True, False, True), None, 8123]
    assert [getattr(place, name) for place, name in places] == before
