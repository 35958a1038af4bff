"""One engine over two nodes with a GPU each. Ray takes their word for that, and vLLM's CPU build stands in."""

import os
import secrets
from collections.abc import Iterator
from typing import Any

import openai
import psutil
import pytest
import yaml

from deployments.process.ports import free_port
from deployments.serving.embedded_redis import EmbeddedRedis
from tests.integration.application import EXACT, REPOSITORY, START_TIMEOUT_S, alive
from tests.integration.ray_head import LOCAL, RayHead, ray_head, second_node
from tests.waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

STAND_IN = REPOSITORY / "tests/integration/cpus_as_gpus"
WORKER = "RayWorkerProc"
ENGINE = {
    "num_gpus": 2,
    "num_cpus": 1,
    "placement_group_bundles": [{"GPU": 1, "CPU": 1}, {"GPU": 1}],
    "env": {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_CI_ENV": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_HOST_IP": "127.0.0.1",
    },
}


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayHead]:
    """An application of one engine, which serves."""
    folder, redis = tmp_path_factory.mktemp("nodes"), EmbeddedRedis(free_port(), secrets.token_urlsafe(16))
    env = {"SLUICE_REDIS_URL": redis.url, "PYTHONPATH": os.pathsep.join((str(STAND_IN), str(REPOSITORY)))}
    gpu = ("--num-gpus", "1")
    try:
        with ray_head(folder, *gpu, loopback=False, **env) as head, second_node(head, folder, *gpu):
            settings = yaml.safe_load(LOCAL.read_text())
            settings["proxy_location"] = "HeadOnly"
            (application,) = settings["applications"]
            args = ["--tensor-parallel-size", "2", "--kv-cache-memory-bytes", str(64 << 20), *EXACT]
            application["args"] |= {"vllm_args": args, "engine": ENGINE}
            head.deploy(settings, folder)
            wait_until(lambda: head.serving("sluice"), START_TIMEOUT_S, "all replicas run")
            yield head
    finally:
        redis.close()


def living(head: RayHead, kind: str) -> list[dict[str, Any]]:
    """Actors of this class, or of deployments of this name."""
    actors = [actor for actor in head.listed("actors") if actor["state"] == "ALIVE"]
    return [actor for actor in actors if kind in actor["class_name"]]


def answer(head: RayHead) -> str:
    client = openai.OpenAI(base_url=f"{head.url}/v1", api_key="none", timeout=START_TIMEOUT_S)
    done = client.completions.create(model="sluice-demo", prompt="Name three rivers.", max_tokens=8, temperature=0)
    return str(done.choices[0].text)


def test_the_bundles_of_one_engine_lie_on_both_nodes_with_a_worker_in_each(two_nodes: RayHead) -> None:
    (group,) = two_nodes.listed("placement_groups")
    nodes = [bundle["node_id"] for bundle in group["bundles"]]
    assert len(nodes) == 2 and set(nodes) == two_nodes.nodes()
    (replica,) = living(two_nodes, "EngineReplica")
    assert (replica["node_id"], replica["placement_group_id"]) == (nodes[0], group["placement_group_id"])
    workers = living(two_nodes, WORKER)
    assert sorted(worker["node_id"] for worker in workers) == sorted(nodes)
    assert answer(two_nodes)


def test_an_engine_that_loses_a_worker_is_replaced_with_all_of_them(two_nodes: RayHead) -> None:
    (replica,), before = living(two_nodes, "EngineReplica"), answer(two_nodes)
    processes = [psutil.Process(worker["pid"]) for worker in living(two_nodes, WORKER)]
    (far,) = (each["pid"] for each in living(two_nodes, WORKER) if each["node_id"] != replica["node_id"])
    psutil.Process(far).kill()

    def another() -> bool:
        found = living(two_nodes, "EngineReplica")
        return bool(two_nodes.serving("sluice")) and bool(found) and found[0]["actor_id"] != replica["actor_id"]

    wait_until(another, START_TIMEOUT_S, "another replica runs")
    assert not alive(processes)
    assert len(living(two_nodes, WORKER)) == 2
    assert answer(two_nodes) == before
