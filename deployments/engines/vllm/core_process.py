"""The engine process of a replica: vLLM's engine core, made where it runs, so that vLLM is imported once."""

import os
import pickle
import signal
from argparse import Namespace
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from deployments.process.heavy_imports import heavy_imports
from deployments.process.parent import watch_parent
from policies.errors import ConfigError


class Told(msgspec.Struct, omit_defaults=True):
    """What it says once its arguments are vLLM's configuration; where they cannot be, why alone.

    Attributes:
        kv_layout: what two replicas must have in common, besides the size of blocks, to read each other's KV cache; ""
            without a connector.
        steps_together: ranks of a data-parallel model with experts do.
    """

    engine_version: str = ""
    kv_layout: str = ""
    steps_together: bool = False
    refused: str | None = None


class RayPlace(msgspec.Struct):
    """Where a replica runs, for an engine whose workers Ray places.

    Attributes:
        environment_and_group: the runtime environment and the placement group of the replica, pickled: reading
            them imports Ray.
    """

    address: str
    environment_and_group: bytes


def run(argv: Sequence[str], handshake: str, telling: Connection, place: RayPlace | None, rank: int) -> None:
    """The whole life of the process: `telling` and then `handshake` hear of its start.

    Args:
        rank: of a data-parallel engine; 0 where there is one alone.
    """
    watch_parent()  # from the beginning: to import vLLM takes longer than a replica that is told to end has
    # As vLLM does it for whatever runs in an actor of Ray: its own workers are not forked.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    if place is not None:
        os.environ["RAY_ADDRESS"] = place.address
    with heavy_imports():
        from deployments.engines.vllm.args import generating_config, kv_layout, parse_vllm_args
        from deployments.engines.vllm.version import ENGINE_VERSION
    try:
        args = parse_vllm_args(argv)
        config = generating_config(args)
    except ConfigError as error:
        telling.send_bytes(msgspec.msgpack.encode(Told(refused=str(error))))
        return
    if place is not None and args.distributed_executor_backend == "ray":
        parallel = config.parallel_config
        parallel.ray_runtime_env, parallel.placement_group = pickle.loads(place.environment_and_group)
    together = config.parallel_config.data_parallel_size > 1 and bool(config.model_config.is_moe)
    told = Told(engine_version=ENGINE_VERSION, kv_layout=kv_layout(config), steps_together=together)
    telling.send_bytes(msgspec.msgpack.encode(told))
    telling.close()
    _run_core(args, config, handshake, rank)


def _run_core(args: Namespace, config: Any, handshake: str, rank: int) -> None:
    with heavy_imports():
        from vllm.utils import numa_utils
        from vllm.utils.system_utils import get_mp_context
        from vllm.v1.engine.utils import _configure_uniproc_startup_threads
        from vllm.v1.executor import Executor

    executor = Executor.get_class(config)
    settings = {
        "vllm_config": config,
        "local_client": True,
        "handshake_address": handshake,
        "executor_class": executor,
        "log_stats": False,
        "dp_rank": rank,
        "local_dp_rank": rank,
    }
    with _configure_uniproc_startup_threads(executor, 1):
        if not config.parallel_config.numa_bind:
            _run_here(args, settings)
            return
        # Only a process that starts can be bound to a node's memory.
        core = get_mp_context().Process(target=_run_here, args=(args, settings), name="EngineCore")
        with numa_utils.configure_subprocess(config, local_rank=0, dp_local_rank=rank, process_kind="EngineCore"):
            core.start()
    signal.signal(signal.SIGTERM, lambda *_: core.terminate())
    core.join()
    os._exit(core.exitcode or 0)


def _run_here(args: Namespace, settings: dict[str, Any]) -> None:
    with heavy_imports():
        from vllm.v1.engine.core import EngineCoreProc

        from deployments.engines.vllm.args import lora_requests

    loras = lora_requests(args)

    def load_adapters(core: Any) -> None:
        for lora in loras:
            core.add_lora(lora)

    EngineCoreProc.sluice_load_adapters = load_adapters
    EngineCoreProc.run_engine_core(**settings)
