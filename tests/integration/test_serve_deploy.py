"""On a Ray that runs already: `serve deploy` of the shipped configuration, with an external Redis under a password.

Its environment is what `sluice env --loopback` prints, as the head of that configuration says, and nothing else.
"""

import copy
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
import yaml

from deployments.process.environment import free_port
from deployments.serving.embedded_redis import EmbeddedRedis
from tests.integration.application import START_TIMEOUT_S, command_of
from tests.integration.ray_head import LOCAL, RayHead, answers, ray_head
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def redis() -> Iterator[EmbeddedRedis]:
    server = EmbeddedRedis(free_port(), secrets.token_urlsafe(16))
    yield server
    server.close()


@pytest.fixture(scope="module")
def head(redis: EmbeddedRedis, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayHead]:
    with ray_head(tmp_path_factory.mktemp("ray"), SLUICE_REDIS_URL=redis.url) as started:
        yield started


@pytest.fixture(scope="module")
def deployed(head: RayHead, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The shipped configuration, and beside it one with a key that nobody knows; yields the address of the first."""
    settings = yaml.safe_load(LOCAL.read_text())
    (shipped,) = settings["applications"]
    assert shipped["args"]["engine"]["replicas"] == 2
    shipped["args"]["engine"]["replicas"] = 1  # deploys as two do, in less time
    wrong = {**copy.deepcopy(shipped), "name": "wrong", "route_prefix": "/wrong"}
    wrong["args"]["engine"]["replicaz"] = 3
    settings["applications"].append(wrong)
    head.deploy(settings, tmp_path_factory.mktemp("deployed"))
    return head.url


def test_the_shipped_configuration_deploys_and_answers(deployed: str, redis: EmbeddedRedis) -> None:
    wait_until(lambda: answers(f"{deployed}/health"), START_TIMEOUT_S, f"{deployed}/health")
    client = openai.OpenAI(base_url=f"{deployed}/v1", api_key="none", timeout=START_TIMEOUT_S)
    answer = client.chat.completions.create(
        model="sluice-demo", messages=[{"role": "user", "content": "Name three rivers."}], max_tokens=8
    )
    assert answer.usage is not None and answer.usage.completion_tokens > 0
    assert _redis_keys(redis) > 0, "the external Redis holds the shared state"


def test_nothing_of_it_listens_to_the_outside(deployed: str, head: RayHead) -> None:
    wait_until(lambda: answers(f"{deployed}/health"), START_TIMEOUT_S, f"{deployed}/health")
    ours = {process.pid: command_of(process) for process in psutil.Process().children(recursive=True)}
    # HAProxy is in a session of its own, as a child of the proxy's actor.
    listening = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.pid in ours]
    assert len(listening) > 5
    assert {c.laddr[0] for c in listening} <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}, [
        (c.laddr, ours[c.pid][:3]) for c in listening
    ]
    haproxy = [c for c in listening if c.laddr[1] == int(deployed.rpartition(":")[2])]
    assert haproxy, "the proxy is among them"
    (written,) = Path(head.env["RAY_SERVE_HAPROXY_CONFIG_FILE_LOC"]).parent.glob("*/haproxy.cfg")  # one for the node
    assert "http-buffer-request" in written.read_text()


def _redis_keys(server: EmbeddedRedis) -> int:
    import redis

    with redis.Redis.from_url(server.url) as client:
        return int(client.dbsize())


def test_unknown_keys_are_refused_with_their_path(deployed: str, head: RayHead) -> None:
    def wrong() -> dict[str, Any]:
        found: dict[str, Any] = head.applications()["wrong"]
        return found

    wait_until(lambda: wrong()["status"] == "DEPLOY_FAILED", START_TIMEOUT_S, "the wrong configuration is refused")
    assert "engine.replicaz" in wrong()["message"]


def test_a_killed_controller_stops_no_replica(deployed: str, head: RayHead) -> None:
    def serving() -> dict[str, int]:
        return head.serving("sluice")

    before = wait_until(serving, START_TIMEOUT_S, "all replicas run")
    assert len(before) == 2
    (controller,) = controllers()
    controller.kill()
    wait_until(lambda: controllers() not in ([], [controller]), START_TIMEOUT_S, "another controller has come")
    assert wait_until(serving, START_TIMEOUT_S, "all replicas run") == before
    assert answers(f"{deployed}/health")


def controllers() -> list[psutil.Process]:
    ours = psutil.Process().children(recursive=True)
    return [process for process in ours if any("ServeController" in part for part in command_of(process))]
