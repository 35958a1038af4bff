"""Two groups of engine replicas: only equals read each other's KV caches."""

import asyncio
import os
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from deployments.engine_replica import EngineReplica, _require_nixl, check_pairs
from deployments.environment import NIXL_DELAY_ENV, SINGLE_PORTS, nixl_env, set_up_gpu_engine
from policies.errors import ConfigError, StateStoreError
from router.state_store import ReplicaInfo


def info(kv_layout: str, replica_id: str = "r") -> ReplicaInfo:
    return ReplicaInfo(
        replica_id=replica_id,
        host="127.0.0.1",
        port=1,
        max_model_len=1,
        kv_layout=kv_layout,
    )


def test_unequal_pairs_are_refused_naming_both_layouts_and_the_way_out() -> None:
    mine = info("dtype=float32 block_size=16")
    check_pairs(mine, [], "decode")
    check_pairs(mine, [info("dtype=float32 block_size=16")], "decode")
    with pytest.raises(ConfigError, match=r"this decode replica has .*block_size=16.* and other .*=32.*--block-size"):
        check_pairs(mine, [info("dtype=float32 block_size=32", "other")], "decode")


def test_nixl_listens_where_the_replica_does_and_on_loopback_alone_there() -> None:
    env = nixl_env("127.0.0.1", on_cpu=True)
    # Not one that the system hands out by itself: Ray would have it before NIXL listens, once the model is loaded.
    assert int(env["VLLM_NIXL_SIDE_CHANNEL_PORT"]) in SINGLE_PORTS
    assert (env["VLLM_NIXL_SIDE_CHANNEL_HOST"], env["UCX_NET_DEVICES"]) == ("127.0.0.1", "lo")
    assert NIXL_DELAY_ENV in env
    elsewhere = nixl_env("0.0.0.0", on_cpu=False)
    assert "UCX_NET_DEVICES" not in elsewhere and NIXL_DELAY_ENV not in elsewhere


@pytest.mark.parametrize("error", [ConfigError, StateStoreError, asyncio.CancelledError])
async def test_a_replica_whose_pair_cannot_be_checked_leaves(error: type[BaseException]) -> None:
    left: list[str] = []

    async def leave() -> None:
        left.append("left")

    async def fails() -> NoReturn:
        raise error("no answer")

    replica: Any = SimpleNamespace(
        _relay=SimpleNamespace(info=info("")), _others=SimpleNamespace(replica_infos=fails), _role="decode",
        _resources=AsyncExitStack(),
    )  # fmt: skip
    replica._resources.push_async_callback(leave)
    with pytest.raises(error):
        await EngineReplica._check_pairs(replica)
    assert left


@pytest.mark.parametrize(("cuda", "backend"), [("13.0", "nixl-cu13"), ("12.8", "nixl-cu12"), (None, "nixl-cu12")])
def test_a_nixl_that_does_not_import_is_named_with_the_backend_that_it_lacks(
    cuda: str | None, backend: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The package is there, and raises ImportError where that of torch's version of CUDA is missing."""
    (tmp_path / "nixl.py").write_text("raise ImportError('its backend is not installed')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "nixl", raising=False)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(version=SimpleNamespace(cuda=cuda)))
    with pytest.raises(ConfigError, match=rf"its backend is not installed.*nixl==1\.5\.1 {backend}==1\.5\.1"):
        _require_nixl()


def test_an_engine_on_gpus_chooses_its_threads_and_compiles_nothing_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ray sets OMP_NUM_THREADS to the CPUs of an actor, and what is set vLLM leaves alone."""
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", "unset")
    monkeypatch.delenv("VLLM_USE_FLASHINFER_SAMPLER")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    set_up_gpu_engine({"OMP_NUM_THREADS": "1"})
    assert os.environ["OMP_NUM_THREADS"] == "1"
    assert os.environ.pop("VLLM_USE_FLASHINFER_SAMPLER") == "0"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch(0o755)
    set_up_gpu_engine({})
    assert not {"OMP_NUM_THREADS", "VLLM_USE_FLASHINFER_SAMPLER"} & os.environ.keys()


def test_threads_are_chosen_before_torch_counts_them() -> None:
    """It reads OMP_NUM_THREADS once, when it is imported."""
    script = "import sys, deployments.engine_replica; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
