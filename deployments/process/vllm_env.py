"""The environment that vLLM's engines need: its CPU build, its GPU builds, and NIXL."""

import importlib.metadata
import importlib.util
import ipaddress
import logging
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from deployments.process.ports import free_port
from policies.errors import ConfigError

CORES_ENV = "SLUICE_CORES"  # the cores that `sluice serve` was started on
NIXL_DELAY_ENV = "SLUICE_NIXL_DELAY_US"
_BINDING_ENV = "VLLM_CPU_OMP_THREADS_BIND"
_PROCESSOR = Path("/proc/cpuinfo")

logger = logging.getLogger(__name__)


def cpu_dtype() -> str:
    """bfloat16 if the processor has instructions for it; without them it takes several times as long as float32."""
    with suppress(OSError):
        if "avx512_bf16" in _PROCESSOR.read_text():
            return "bfloat16"
    return "float32"


def cpu_env(*, eager: bool = False) -> dict[str, str]:
    """Variables with which the CPU build runs well on shared cores.

    The worker lives in the engine-core process (the multi-process executor spins and collapses where cores are shared),
    with one thread and torch's own OpenMP loaded first, as vLLM does it for the workers that it starts itself.

    eager: nothing is to be compiled (vLLM's `--enforce-eager`).
    """
    env = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        _BINDING_ENV: "nobind",
        "OMP_NUM_THREADS": "1",
        # numba, by which vLLM drafts n-grams, shares the pool of OpenMP threads: with two of its own every operation of
        # torch waits at a barrier for the other one, and steps take up to ten times as long.
        "NUMBA_NUM_THREADS": "1",
        "VLLM_CPU_CI_ENV": "1",  # skips the warm-up of shapes that the first requests warm as well
    }
    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.submodule_search_locations:
        libraries = sorted(Path(spec.submodule_search_locations[0], "lib").glob("libgomp*.so*"))
        if libraries:
            env["LD_PRELOAD"] = str(libraries[0])
    if eager:
        # vLLM (0.32) compiles a function of its sampler all the same at the first request for logprobs: all answers
        # stand still for ten seconds, and without a C++ compiler the engine ends.
        env["TORCHDYNAMO_DISABLE"] = "1"
    return env


def vllm_is_for_cpus() -> bool:
    """Whether vLLM would find itself to be its CPU build, by its own rules; True where none is installed."""
    if os.environ.get("VLLM_TARGET_DEVICE", "").lower() == "cpu":
        return True
    try:
        return "cpu" in importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:  # the CPU build may be named vllm-cpu
        return True


def check_build(num_gpus: float) -> None:
    """Raises ConfigError where an engine is to do without the GPU that the vLLM installed here needs."""
    if num_gpus == 0 and not vllm_is_for_cpus():
        raise ConfigError("engine.num_gpus is 0, and the vLLM installed here is not its CPU build: set engine.num_gpus")


def set_up_gpu_engine(own: Mapping[str, str]) -> None:
    """The environment of this process, before torch is imported, for an engine on GPUs.

    own: what engine.env sets, which is kept.
    """
    if "OMP_NUM_THREADS" not in own and (threads := os.environ.pop("OMP_NUM_THREADS", None)) is not None:
        # Ray sets it as a rule, and vLLM would keep to it even while it loads a model; a node's own looks the same.
        logger.info("OMP_NUM_THREADS=%s is not used: set it in engine.env to keep it", threads)
    if not _has_flashinfer_kernels():
        # vLLM's default sampler would be compiled when the engine warms up, and end it.
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")


def _has_flashinfer_kernels() -> bool:
    """They are built in advance, or there is a compiler for them where FlashInfer looks for one."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    folders = f"{home}/bin" if home else f"{os.environ.get('PATH', os.defpath)}:/usr/local/cuda/bin"
    return (
        shutil.which("nvcc", path=folders) is not None or importlib.util.find_spec("flashinfer_jit_cache") is not None
    )


def nixl_env(host: str, *, on_cpu: bool) -> dict[str, str]:
    """Where an engine's NIXL connector listens: for handshakes on this address, for caches on the address's device.

    Neither asks for a password, so like Ray's own ports they belong in a closed network.
    """
    env = {"VLLM_NIXL_SIDE_CHANNEL_HOST": host, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port(host))}
    if on_cpu:
        env["UCX_TLS"] = os.environ.get("UCX_TLS", "tcp,self,sm,cma")
        env[NIXL_DELAY_ENV] = "1000"
        # vLLM's own value, which it can only set while NIXL is not imported yet.
        env["UCX_RCACHE_MAX_UNRELEASED"] = os.environ.get("UCX_RCACHE_MAX_UNRELEASED", "1024")
    if ipaddress.ip_address(host).is_loopback:
        env["UCX_NET_DEVICES"] = "lo"
    return env


def take_all_cores() -> None:
    """Let an engine on CPUs, whose thread inherits its parent's cores, run on all; not one that is bound on purpose."""
    cores = os.environ.get(CORES_ENV)
    if cores and os.environ.get(_BINDING_ENV) == "nobind":
        with suppress(OSError):  # where the system refuses, it computes beside the others
            os.sched_setaffinity(0, map(int, cores.split(",")))
