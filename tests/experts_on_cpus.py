"""What vLLM's build for CPUs (0.32) lacks for experts of data-parallel ranks: it starts them, and the first step fails.

Named by `--worker-extension-cls`, which vLLM imports in each worker.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator


def _gathered(self: CpuCommunicator, tensor: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """Rows of all ranks, one after another; tensor: of this one, shape (sizes[rank], ...)."""
    padded = tensor.new_zeros((max(sizes), *tensor.shape[1:]))
    padded[: len(tensor)] = tensor
    found = [torch.empty_like(padded) for _ in sizes]
    distributed.all_gather(found, padded, group=self.device_group)
    return torch.cat([each[:size] for each, size in zip(found, sizes, strict=True)])


def all_gatherv(self: CpuCommunicator, input_: Any, dim: int = 0, sizes: Sequence[int] = ()) -> Any:
    assert dim == 0
    return (
        [_gathered(self, each, sizes) for each in input_]
        if isinstance(input_, list)
        else _gathered(self, input_, sizes)
    )


def reduce_scatterv(
    self: CpuCommunicator, input_: torch.Tensor, dim: int = -1, sizes: Sequence[int] = ()
) -> torch.Tensor:
    assert dim == 0
    distributed.all_reduce(input_, group=self.device_group)
    return input_.split(list(sizes))[self.rank_in_group].contiguous()


CpuCommunicator.all_gatherv, CpuCommunicator.reduce_scatterv = all_gatherv, reduce_scatterv


class ExpertsOnCpus:
    """Nothing more is asked of a worker."""
