"""Everything but the engines keeps off their cores."""

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deployments.command.cores import VLLM_TITLE, engines_undisturbed
from deployments.config.application import AppConfig
from deployments.process.environment import cores_beside_engines, one_machine_env
from deployments.process.vllm_env import CORES_ENV, take_all_cores


def test_each_engine_has_a_core_to_itself_where_that_leaves_as_many() -> None:
    assert cores_beside_engines({0, 1, 4, 5}, 1) == {1, 4, 5}
    assert cores_beside_engines({0, 1, 4, 5}, 2) == {4, 5}
    assert cores_beside_engines({0, 1, 4, 5}, 3) == {0, 1, 4, 5}
    assert cores_beside_engines({0, 1}, 2) == cores_beside_engines({0, 1}, 3) == {0, 1}
    assert cores_beside_engines({7}, 1) == {7}


def test_everything_but_the_engine_keeps_off_a_core_while_the_application_serves() -> None:
    cores = os.sched_getaffinity(0)
    with (
        subprocess.Popen([f"{VLLM_TITLE}EngineCore", "300"], executable="/bin/sleep") as engine,
        subprocess.Popen(["sleep", "300"]) as other,
    ):
        everything = (os.getpid(), other.pid, engine.pid)
        try:
            with engines_undisturbed(AppConfig(model="m")):
                beside = cores_beside_engines(cores, 1)
                assert [os.sched_getaffinity(pid) for pid in everything] == [beside, beside, cores]
            assert [os.sched_getaffinity(pid) for pid in everything] == [cores] * 3
        finally:
            engine.kill()
            other.kill()


def test_an_engine_that_comes_later_takes_all_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cores = os.sched_getaffinity(0)
    monkeypatch.setenv(CORES_ENV, one_machine_env(tmp_path)[CORES_ENV])

    def cores_of_an_engine(binding: str) -> set[int]:
        monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", binding)
        os.sched_setaffinity(0, {max(cores)})  # of this thread
        take_all_cores()
        return os.sched_getaffinity(0)

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(cores_of_an_engine, "nobind").result(30) == cores
        assert thread.submit(cores_of_an_engine, "auto").result(30) == {max(cores)}


def test_with_engines_on_gpus_or_in_the_replica_itself_everything_may_run_anywhere() -> None:
    cores = os.sched_getaffinity(0)
    for engine in ({"num_gpus": 1}, {"kind": "transformers"}):
        with engines_undisturbed(AppConfig.model_validate({"model": "m", "engine": engine})):
            assert os.sched_getaffinity(0) == cores
