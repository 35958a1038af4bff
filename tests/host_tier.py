"""vLLM's tiers beyond the cache of the GPU, run on a machine without one.

All of vLLM's offloading runs but for one thing: its worker copies with streams of CUDA, and refuses CPUs (0.32,
`CPUOffloadingSpec.get_worker`). Here torch copies in place of it, between the engine's blocks and the region of shared
memory that vLLM makes for its tiers, from which its own file tier reads and writes.
"""

import time
from collections.abc import Sequence
from typing import Any

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class HostTier(TieringOffloadingSpec):
    """vLLM's tiering, whose first tier is host memory, for chunks of one block."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = CopyingWorker(kv_caches, region)
        return self._worker


class CopyingWorker(OffloadingWorker):
    """Copies at once, and tells of it when it is asked."""

    def __init__(self, kv_caches: CanonicalKVCaches, region: SharedOffloadRegion) -> None:
        self._region = region
        pages = [(each.tensor.view(torch.int8), each.page_size_bytes) for each in kv_caches.tensors]
        self._blocks = [tensor.view(-1, page) for tensor, page in pages]
        self._chunks = [region.create_next_worker_view(page) for _, page in pages]
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: Any) -> bool:
        return self._copy(job_id, self._blocks, src_spec.block_ids, self._chunks, dst_spec.block_ids)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: GPULoadStoreSpec) -> bool:
        return self._copy(job_id, self._chunks, src_spec.block_ids, self._blocks, dst_spec.block_ids)

    def _copy(
        self, job_id: int, sources: Sequence[torch.Tensor], of: Any, targets: Sequence[torch.Tensor], to: Any
    ) -> bool:
        began_s = time.perf_counter()
        taken, given = torch.as_tensor(of, dtype=torch.int64), torch.as_tensor(to, dtype=torch.int64)
        for source, target in zip(sources, targets, strict=True):
            target[given] = source[taken]
        size = len(taken) * sum(source.shape[1] for source in sources)
        seconds = time.perf_counter() - began_s
        self._done.append(TransferResult(job_id=job_id, success=True, transfer_size=size, transfer_time=seconds))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None: ...

    def shutdown(self) -> None:
        self._blocks, self._chunks = [], []
        self._region.cleanup()
