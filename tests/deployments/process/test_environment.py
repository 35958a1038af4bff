"""The environment of Ray and Ray Serve."""

import resource
from pathlib import Path

import pytest

from deployments.app import ROUTER_QUEUE
from deployments.config.router import RouterSection
from deployments.process.environment import (
    MAX_CONNECTIONS,
    MOST_HAPROXY_THREADS,
    START_S,
    connections_within,
    haproxy_threads,
    one_machine_env,
    serve_env,
)
from deployments.process.vllm_env import cpu_dtype


def test_nothing_of_ray_is_given_up_sooner_than_a_start_and_no_worker_comes_after_its_neighbours(
    tmp_path: Path,
) -> None:
    env = one_machine_env(tmp_path)
    for name, per_second in (
        ("RAY_gcs_server_port_wait_time_s", 1),
        ("RAY_agent_register_timeout_ms", 1000),
        ("RAY_worker_register_timeout_seconds", 1),
        ("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", 1),
        ("RAY_SERVE_HAPROXY_STARTUP_TIMEOUT_S", 1),
    ):
        assert int(env[name]) >= START_S * per_second, name
    assert serve_env()["RAY_worker_niceness"] == "0"


def test_haproxy_takes_what_two_routers_do_and_starts_where_files_are_few() -> None:
    admitted = RouterSection().max_ongoing_requests + ROUTER_QUEUE
    assert int(serve_env()["RAY_SERVE_HAPROXY_MAXCONN"]) == MAX_CONNECTIONS >= 2 * admitted
    assert connections_within(resource.RLIM_INFINITY) == connections_within(65_536) == MAX_CONNECTIONS
    assert connections_within(20_000) == 7_795
    assert connections_within(64) == 1


def test_the_request_log_does_not_grow_for_ever() -> None:
    """Ray rotates the logs of its workers where this environment names a size, and not by default."""
    assert 0 < int(serve_env()["RAY_ROTATION_MAX_BYTES"]) <= 100_000_000
    assert 1 <= int(serve_env()["RAY_ROTATION_BACKUP_COUNT"]) <= 10


def test_haproxy_leaves_the_cores_of_a_small_machine_to_the_engines() -> None:
    assert [haproxy_threads(cores) for cores in (1, 2, 8, 64)] == [1, 1, 2, MOST_HAPROXY_THREADS]


@pytest.mark.parametrize(("flags", "dtype"), [("avx2 avx512f avx512_bf16", "bfloat16"), ("avx2", "float32")])
def test_the_demo_computes_in_what_the_processor_is_quick_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, dtype: str
) -> None:
    processor = tmp_path / "cpuinfo"
    processor.write_text(f"flags : {flags}\n")
    monkeypatch.setattr("deployments.process.vllm_env._PROCESSOR", processor)
    assert cpu_dtype() == dtype
