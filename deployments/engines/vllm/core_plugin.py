"""In the engine-core process of a replica: what vLLM loads there by its entry point for plug-ins."""

import gc
import os
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import parent_process
from typing import Any

from vllm.config import VllmConfig
from vllm.platforms import current_platform

from deployments.engines.vllm.grammars import MAX_AT_ONCE
from deployments.process.environment import REPLICA_ENV
from deployments.process.parent import watch_parent
from deployments.process.vllm_env import NIXL_DELAY_ENV, take_all_cores

GRAMMAR_THREADS = MAX_AT_ONCE + 1  # what a router lets through at once, and one


def register_plugin() -> None:
    """vLLM calls this in each of its processes; it acts only in those under an engine replica of ours."""
    if REPLICA_ENV not in os.environ or parent_process() is None:
        return
    from vllm.v1.engine.core import EngineCore

    from deployments.engines.vllm.cached_blocks import core_blocks, note_cached_blocks
    from deployments.engines.vllm.scheduler.plug_in import core_control, core_status

    EngineCore.sluice_status, EngineCore.sluice_control = core_status, core_control
    EngineCore.sluice_blocks = core_blocks
    note_cached_blocks()
    compile_grammars_side_by_side()
    count_prefix_hits()
    gc.freeze()  # vLLM collects garbage around loading the model: what is imported by now is none
    take_all_cores()
    if delay_us := os.environ.get(NIXL_DELAY_ENV):
        from deployments.engines.vllm.nixl_progress import sleep_between_events

        sleep_between_events(int(delay_us))
        # On CPUs vLLM's connector binds the thread that makes it to the machine's last core, for moving caches. Here
        # that is the thread that computes: every engine of the machine would share this one core.
        current_platform.discover_numa_topology = list
    watch_parent()  # an engine that outlived its replica would go on holding the GPU


def compile_grammars_side_by_side() -> None:
    """vLLM (0.32) compiles in a pool of half the cores, on two cores one by one: one grammar held up all others."""
    from vllm.v1.structured_output import StructuredOutputManager

    start = StructuredOutputManager.__init__

    def start_with_threads(manager: Any, config: VllmConfig) -> None:
        start(manager, config)
        if not config.model_config.skip_tokenizer_init:
            manager.executor.shutdown()
            manager.executor = ThreadPoolExecutor(GRAMMAR_THREADS, "grammars")

    StructuredOutputManager.__init__ = start_with_threads


def count_prefix_hits() -> None:
    """vLLM counts them where it logs statistics, which our cores do not: it would make them at every step and start the
    counts anew. So they are not taken away, and they go on from the engine's start."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    start = KVCacheManager.__init__

    def start_with_counts(manager: Any, *args: Any, **settings: Any) -> None:
        start(manager, *args, **{**settings, "log_stats": True})

    KVCacheManager.__init__ = start_with_counts
