"""The cores of one machine: one for each engine that computes on it, the others for everything else."""

import contextlib
import os
from collections.abc import Iterable, Iterator

import psutil

from deployments.config.application import AppConfig
from deployments.process.environment import cores_beside_engines

VLLM_TITLE = "VLLM::"  # the titles of vLLM's engine cores and workers begin with it


@contextlib.contextmanager
def engines_undisturbed(config: AppConfig) -> Iterator[None]:
    """For the time of the block, everything else keeps off one core for each engine that was started.

    This is for vLLM's engines on CPUs; the Transformers engine computes in its replica. While the application starts
    or ends, it uses every core. Later processes inherit their parents' cores, but engines take all (`take_all_cores`).
    """
    cores, models, here = os.sched_getaffinity(0), config.each_model(), psutil.Process()
    if any(each.engine.num_gpus or each.engine.kind != "vllm" for each in models):
        yield
        return
    try:
        beside = cores_beside_engines(cores, sum(each.ranks * each.engine_replicas for each in models))
        keep_to(beside, (here, *here.children(recursive=True)))
        yield
    finally:
        keep_to(cores, (here, *here.children(recursive=True)))


def keep_to(cores: set[int], processes: Iterable[psutil.Process]) -> None:
    """Move the processes that are no engines to these cores, thread by thread: each thread has cores of its own."""
    for process in processes:
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            if not " ".join(process.cmdline()).startswith(VLLM_TITLE):
                for thread in process.threads():
                    with contextlib.suppress(OSError):  # it too, or it may not be moved
                        os.sched_setaffinity(thread.id, cores)
