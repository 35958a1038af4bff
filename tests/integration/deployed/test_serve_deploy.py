"""On a Ray that runs already: `serve deploy` of the shipped configuration, with an external Redis under a password.

Its environment is what `sluice env --loopback` prints, as the head of that configuration says, and nothing else.
"""

import copy
import dataclasses
import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
import yaml

from deployments.process.ports import free_port
from deployments.serving.embedded_redis import EmbeddedRedis
from tests.integration.application import START_TIMEOUT_S, chat, command_of
from tests.integration.ray_head import LOCAL, RayHead, answers
from tests.integration.traffic import Traffic
from tests.waiting import PATIENCE_S, wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def redis() -> Iterator[EmbeddedRedis]:
    server = EmbeddedRedis(free_port(), secrets.token_urlsafe(16))
    yield server
    server.close()


@pytest.fixture(scope="module")
def head(ray_on_loopback: RayHead) -> RayHead:
    return ray_on_loopback


@pytest.fixture(scope="module")
def shipped(redis: EmbeddedRedis) -> dict[str, Any]:
    """The shipped configuration, with one engine: it deploys as two do, in less time."""
    settings: dict[str, Any] = yaml.safe_load(LOCAL.read_text())
    args = settings["applications"][0]["args"]
    assert args["engine"]["replicas"] == 2
    args["engine"]["replicas"], args["redis_url"] = 1, redis.url
    return settings


@pytest.fixture(scope="module")
def deployed(head: RayHead, shipped: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> str:
    """The shipped configuration, and beside it one with a key that nobody knows; yields the address of the first."""
    settings = copy.deepcopy(shipped)
    wrong = {**copy.deepcopy(settings["applications"][0]), "name": "wrong", "route_prefix": "/wrong"}
    wrong["args"]["engine"]["replicaz"] = 3
    settings["applications"].append(wrong)
    head.deploy(settings, tmp_path_factory.mktemp("deployed"))
    return head.url


def test_the_shipped_configuration_deploys_and_answers(deployed: str, redis: EmbeddedRedis) -> None:
    wait_until(lambda: answers(f"{deployed}/health"), START_TIMEOUT_S, f"{deployed}/health")
    client = openai.OpenAI(base_url=f"{deployed}/v1", api_key="none", timeout=START_TIMEOUT_S)
    answer = client.chat.completions.create(**chat("Name three rivers.", max_tokens=8))
    assert answer.usage is not None and answer.usage.completion_tokens > 0
    assert _redis_keys(redis) > 0, "the external Redis holds the shared state"


def test_nothing_of_it_listens_to_the_outside(deployed: str, head: RayHead) -> None:
    wait_until(lambda: answers(f"{deployed}/health"), START_TIMEOUT_S, f"{deployed}/health")
    ours = {process.pid: command_of(process) for process in psutil.Process().children(recursive=True)}
    # HAProxy is in a process group of its own, as a child of the proxy's actor.
    listening = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.pid in ours]
    assert len(listening) > 5
    assert {c.laddr[0] for c in listening} <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}, [
        (c.laddr, ours[c.pid][:3]) for c in listening
    ]
    haproxy = [c for c in listening if c.laddr[1] == int(deployed.rpartition(":")[2])]
    assert haproxy, "the proxy is among them"
    (written,) = Path(head.env["RAY_SERVE_HAPROXY_CONFIG_FILE_LOC"]).parent.glob("*/haproxy.cfg")  # one for the node
    # Ray Serve writes the file anew with each change, and runs the script after.
    wait_until(lambda: "http-buffer-request" in written.read_text(), PATIENCE_S, "the script mends the configuration")


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


@dataclasses.dataclass(frozen=True)
class Running:
    """What runs, redeployed with the same `args`, as `serve deploy` does it."""

    head: RayHead
    shipped: dict[str, Any]

    @property
    def url(self) -> str:
        return self.head.url

    def redeploy(self, *deployments: dict[str, Any]) -> None:
        settings = copy.deepcopy(self.shipped)
        settings["applications"][0]["deployments"] = list(deployments)
        self.head.put(settings)

    def reconfigure(self, user_config: dict[str, Any]) -> None:
        self.redeploy({"name": "Router", "user_config": user_config})

    def wait_for(self, user_config: dict[str, Any], refused: str | None = None) -> None:
        def is_there() -> bool:
            found = self.status()["user_config"]
            return bool(found["in_force"] == user_config and (refused or "") in (found["refused"] or ""))

        wait_until(is_there, START_TIMEOUT_S, f"{user_config} is in force")

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"{self.url}/sluice/status", timeout=60, trust_env=False).json()
        return found

    def engine(self) -> dict[str, Any]:
        (found,) = self.status()["replicas"].values()
        return dict(found)

    def asked(self, slo_class: str | None = None, **body: Any) -> httpx.Response:
        asked = {"model": "sluice-demo", "prompt": "Hello", "max_tokens": 2, **body}
        headers = {} if slo_class is None else {"X-Sluice-Class": slo_class}
        url = f"{self.url}/v1/completions"
        return httpx.post(url, json=asked, headers=headers, timeout=START_TIMEOUT_S, trust_env=False)

    def serving(self) -> dict[str, int]:
        found: dict[str, int] = wait_until(lambda: self.head.serving("sluice"), START_TIMEOUT_S, "all replicas run")
        return found


@pytest.fixture
def running(deployed: str, head: RayHead, shipped: dict[str, Any]) -> Running:
    wait_until(lambda: answers(f"{deployed}/health"), START_TIMEOUT_S, f"{deployed}/health")
    return Running(head, shipped)


LIVE: dict[str, Any] = {
    "classes": {"gold": {"ttft_s": 0.4, "tpot_s": 2.0}, "batch": {"ttft_s": 60, "fills_idle": True}},
    "default_class": "gold",
    "service_tiers": {"flex": "batch"},
    "router": {"max_body_bytes": 2048, "max_engine_requests": 3},
    "engine": {"credit_s": 0.05, "scheduler": {"mode": "mixed", "max_batch_size": 7}},
}

WRONG = {"router": {"silence_s": 30}, "model": "other"}
WHY_WRONG = "router.silence_s: cannot change while engines serve"


def test_live_settings_change_under_load_and_neither_restart_nor_lose_anything(running: Running) -> None:
    before = running.serving()
    with Traffic(running, streams=3, tokens=150) as traffic:
        wait_until(lambda: running.engine()["max_unread_tokens"], START_TIMEOUT_S, "the engine says how fast it reads")
        reads_ahead = running.engine()["max_unread_tokens"]
        assert running.engine()["engine"]["mode"] == "auto"
        assert (running.asked("offline").status_code, running.asked("gold").status_code) == (200, 400)

        running.reconfigure(LIVE)
        running.wait_for(LIVE)
        assert (running.asked("offline").status_code, running.asked("gold").status_code) == (400, 200)
        assert running.asked(service_tier="flex").json()["service_tier"] == "flex"
        assert running.asked(prompt="x" * 4096).status_code == 413
        assert "3 is the most" in running.asked(n=4).text
        wait_until(lambda: running.engine()["engine"]["mode"] == "mixed", START_TIMEOUT_S, "the engine's mode follows")
        assert running.engine()["engine"]["batch_size"] <= 7
        wait_until(lambda: running.engine()["max_unread_tokens"] < reads_ahead / 2, START_TIMEOUT_S, "its credit too")
        traffic.wait_for_whole_streams(4)

        running.reconfigure(WRONG)
        running.wait_for(LIVE, refused=WHY_WRONG)
        assert running.asked("gold").status_code == 200, "what was in force is still"

        running.reconfigure({})
        running.wait_for({})
        assert (running.asked("offline").status_code, running.asked("gold").status_code) == (200, 400)
        wait_until(lambda: running.engine()["engine"]["mode"] == "auto", START_TIMEOUT_S, "the engine is as it began")
        traffic.wait_for_whole_streams(4)
    assert [stream for stream in traffic.streams if stream.why_not] == [] and traffic.answers == {200}
    assert running.serving() == before


TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def test_the_line_of_a_request_reaches_the_heads_standard_output_where_logs_say_so(running: Running) -> None:
    """As of a pod: the head's output is a pipe, and the router is a process that Ray has started."""

    def asked(request_id: str) -> None:
        headers = {"X-Request-Id": request_id, "traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
        body = {"model": "sluice-demo", "prompt": "a secret of mine", "max_tokens": 3, "ignore_eos": True}
        url = f"{running.url}/v1/completions"
        answer = httpx.post(url, json=body, headers=headers, timeout=START_TIMEOUT_S, trust_env=False)
        assert answer.status_code == 200

    def line_of(request_id: str) -> dict[str, Any] | None:
        lines = [line for line in running.head.log.read_text().splitlines() if f'"{request_id}"' in line]
        assert len(lines) <= 1, "as in the file, once"
        return dict(json.loads(lines[0])) if lines else None

    asked("in-files")
    for user_config in ({"logs": {"to": "stdout"}}, {"logs": {"to": "stdout", "level": "WARNING"}}):
        running.reconfigure(user_config)
        running.wait_for(user_config)
        asked(f"at-{user_config['logs'].get('level', 'INFO')}")
    running.reconfigure({"logs": {"to": "stdout"}})
    running.wait_for({"logs": {"to": "stdout"}})
    asked("at-INFO-again")

    wait_until(lambda: line_of("at-INFO-again"), PATIENCE_S, "its line")
    line = line_of("at-INFO")
    assert line is not None and (line_of("in-files"), line_of("at-WARNING")) == (None, None)
    told = {name: line[name] for name in ("trace_id", "slo_class", "model", "status", "output_tokens", "outcomes")}
    assert told == {
        "trace_id": TRACE, "slo_class": "standard", "model": "sluice-demo", "status": 200, "output_tokens": 3,
        "outcomes": ["length"],
    }  # fmt: skip
    assert line["replicas"] == list(running.status()["replicas"])
    assert 0 < line["wait_s"] <= line["ttft_s"] <= line["duration_s"]
    assert line["prompt_tokens"] > 0 and "predicted_tokens" in line and (line["moves"], line["resumed"]) == (0, 0)
    assert "secret" not in running.head.log.read_text()
    running.reconfigure({})
    running.wait_for({})


def test_a_router_that_starts_beside_a_wrong_user_config_goes_by_the_one_in_force(running: Running) -> None:
    running.reconfigure(LIVE)
    running.wait_for(LIVE)
    before = running.serving()
    running.reconfigure(WRONG)
    running.wait_for(LIVE, refused=WHY_WRONG)
    killed = psutil.Process(running.status()["answered_by"]["pid"])
    killed.kill()

    def another_answers() -> bool:
        return answers(f"{running.url}/health") and bool(running.status()["answered_by"]["pid"] != killed.pid)

    wait_until(another_answers, START_TIMEOUT_S, "another router has come")
    running.wait_for(LIVE, refused=WHY_WRONG)
    assert running.asked("gold").status_code == 200
    after = running.serving()
    assert after.keys() ^ before.keys() and killed.pid not in after.values()
    assert set(before.values()) - {killed.pid} <= set(after.values()), "the engine is the same"


def test_another_engine_comes_beside_the_one_that_serves(running: Running) -> None:
    before = running.serving()
    running.redeploy({"name": "EngineReplica", "num_replicas": 2})
    wait_until(lambda: len(running.status()["replicas"]) == 2, START_TIMEOUT_S, "the second engine serves")
    after = running.serving()
    assert before.items() < after.items() and len(after) == len(before) + 1
