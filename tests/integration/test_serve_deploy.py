"""On a Ray that runs already: `serve deploy` of the shipped configuration, with an external Redis under a password."""

import copy
import json
import os
import secrets
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
import yaml

from deployments.process.environment import free_port, one_machine_env, serve_env
from deployments.serving.embedded_redis import EmbeddedRedis
from tests.integration.application import REPOSITORY, START_TIMEOUT_S, command_of, kill_all
from tests.waiting import wait_until

RAY = str(Path(sys.executable).with_name("ray"))
SERVE = str(Path(sys.executable).with_name("serve"))


@pytest.fixture(scope="module")
def redis() -> Iterator[EmbeddedRedis]:
    server = EmbeddedRedis(free_port(), secrets.token_urlsafe(16))
    yield server
    server.close()


@pytest.fixture(scope="module")
def ray_env(redis: EmbeddedRedis) -> Iterator[dict[str, str]]:
    with tempfile.TemporaryDirectory(prefix="s", dir="/tmp") as run_dir:  # short: it holds Unix sockets
        yield {
            **os.environ,
            **serve_env(),
            **one_machine_env(Path(run_dir)),
            "PYTHONPATH": str(REPOSITORY),
            "RAY_AUTH_MODE": "disabled",
            "SLUICE_REDIS_URL": redis.url,
        }


@pytest.fixture(scope="module")
def dashboard(ray_env: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A head node; yields the address of its dashboard."""
    dashboard_port = free_port()
    log = tmp_path_factory.mktemp("ray") / "head.log"
    command = [
        RAY, "start", "--head", "--block", "--node-ip-address", "127.0.0.1", "--port", str(free_port()),
        "--dashboard-port", str(dashboard_port), "--dashboard-agent-listen-port", str(free_port()),
        "--ray-client-server-port", str(free_port()), "--min-worker-port", "0", "--max-worker-port", "0",
        "--num-cpus", "2", "--object-store-memory", str(80 << 20),
        "--include-dashboard", "true", "--disable-usage-stats",
    ]  # fmt: skip
    with log.open("wb") as output:
        head = psutil.Popen(command, env=ray_env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    address = f"http://127.0.0.1:{dashboard_port}"
    try:
        wait_until(
            lambda: _answers(f"{address}/api/version") or head.poll() is not None,
            START_TIMEOUT_S,
            "the dashboard answers",
        )
        assert head.poll() is None, log.read_text()
        yield address
    finally:
        if head.poll() is None:
            kill_all([head, *head.children(recursive=True)])


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


@pytest.fixture(scope="module")
def deployed(dashboard: str, ray_env: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """The shipped configuration, and beside it one with a key that nobody knows; yields the address of the first."""
    settings = yaml.safe_load((REPOSITORY / "deployments/configs/local.yaml").read_text())
    port = settings["http_options"]["port"] = free_port()  # 8000 may be taken where tests run
    (shipped,) = settings["applications"]
    assert shipped["args"]["engine"]["replicas"] == 2
    shipped["args"]["engine"]["replicas"] = 1  # deploys as two do, in less time
    wrong = {**copy.deepcopy(shipped), "name": "wrong", "route_prefix": "/wrong"}
    wrong["args"]["engine"]["replicaz"] = 3
    settings["applications"].append(wrong)
    config = tmp_path_factory.mktemp("deployed") / "local.yaml"
    config.write_text(yaml.safe_dump(settings))
    env = {**ray_env, "RAY_DASHBOARD_ADDRESS": dashboard}
    subprocess.run([SERVE, "deploy", str(config)], env=env, check=True, timeout=START_TIMEOUT_S)
    return f"http://127.0.0.1:{port}"


def test_the_shipped_configuration_deploys_and_answers(deployed: str, redis: EmbeddedRedis) -> None:
    wait_until(lambda: _answers(f"{deployed}/health"), START_TIMEOUT_S, f"{deployed}/health")
    client = openai.OpenAI(base_url=f"{deployed}/v1", api_key="none", timeout=START_TIMEOUT_S)
    answer = client.chat.completions.create(
        model="sluice-demo", messages=[{"role": "user", "content": "Name three rivers."}], max_tokens=8
    )
    assert answer.usage is not None and answer.usage.completion_tokens > 0
    assert _redis_keys(redis) > 0, "the external Redis holds the shared state"


def _redis_keys(server: EmbeddedRedis) -> int:
    import redis

    with redis.Redis.from_url(server.url) as client:
        return int(client.dbsize())


def test_unknown_keys_are_refused_with_their_path(deployed: str, dashboard: str) -> None:
    def wrong() -> dict[str, Any]:  # as `serve status` asks for it
        with urllib.request.urlopen(f"{dashboard}/api/serve/applications/", timeout=60) as response:
            found: dict[str, Any] = json.load(response)["applications"]["wrong"]
            return found

    wait_until(lambda: wrong()["status"] == "DEPLOY_FAILED", START_TIMEOUT_S, "the wrong configuration is refused")
    assert "engine.replicaz" in wrong()["message"]


def test_a_killed_controller_stops_no_replica(deployed: str, dashboard: str) -> None:
    def serving() -> dict[str, int]:
        """The process of each replica, once all run."""
        try:
            with urllib.request.urlopen(f"{dashboard}/api/serve/applications/", timeout=60) as response:
                deployments = json.load(response)["applications"]["sluice"]["deployments"].values()
        except (OSError, LookupError):  # while there is none
            return {}
        found = [replica for deployment in deployments for replica in deployment["replicas"]]
        all_run = all(each["status"] == "HEALTHY" for each in deployments) and {r["state"] for r in found} == {
            "RUNNING"
        }
        return {replica["replica_id"]: replica["pid"] for replica in found} if all_run else {}

    before = wait_until(serving, START_TIMEOUT_S, "all replicas run")
    assert len(before) == 2
    (controller,) = controllers()
    controller.kill()
    wait_until(lambda: controllers() not in ([], [controller]), START_TIMEOUT_S, "another controller has come")
    assert wait_until(serving, START_TIMEOUT_S, "all replicas run") == before
    assert _answers(f"{deployed}/health")


def controllers() -> list[psutil.Process]:
    ours = psutil.Process().children(recursive=True)
    return [process for process in ours if any("ServeController" in part for part in command_of(process))]
