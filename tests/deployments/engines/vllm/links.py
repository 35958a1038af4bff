"""A link to an engine process that is not there."""

from types import SimpleNamespace
from typing import Any

from deployments.engines.vllm.core_link import Ready
from deployments.engines.vllm.core_process import Told
from deployments.engines.vllm.frames import FrameCodec


def core_link(**methods: Any) -> Any:
    ready = Ready(max_model_len=2048, block_size=16, max_num_seqs=128, max_num_batched_tokens=2048)
    return SimpleNamespace(codec=FrameCodec(), told=Told(engine_version="vllm-1"), ready=ready, dead=False, **methods)
