"""The rig's null engine, speaking vLLM's structures: it computes nothing, so that only front end and router work."""

import asyncio
from typing import Any

import numpy as np
import torch
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from bench.rig.null_engine import NullEngine, NullOutput, NullRequest
from bench.rig.processes import serve_engine
from deployments.engines.relay import RelayConfig
from deployments.engines.vllm.codec import VllmCodec
from deployments.engines.vllm.version import ENGINE_VERSION
from deployments.process.parent import die_with_parent

TOKEN_ID = 300


class NullVllmEngine:
    """A token for each request at every interval, and an end after its `max_tokens`."""

    engine_version = ENGINE_VERSION
    gang_sizes: tuple[int, ...] = ()
    dead = False

    def __init__(self, *, slots: int, interval_s: float) -> None:
        self.slots = slots
        self.codec = VllmCodec()
        self._logprobs: dict[str, int] = {}
        self._of_prompt: dict[str, tuple[int, int]] = {}
        self._engine = NullEngine(slots=slots, ttft_s=interval_s, interval_s=interval_s)

    async def add(self, request: EngineCoreRequest) -> None:
        params = request.sampling_params
        most = params.max_tokens if params is not None and params.max_tokens else 1
        if params is not None and params.logprobs:
            self._logprobs[request.request_id] = params.logprobs
        if params is not None and params.prompt_logprobs is not None:
            self._of_prompt[request.request_id] = len(request.prompt_token_ids or ()) - 1, params.prompt_logprobs
        await self._engine.add(NullRequest(request.request_id, 1, most))

    async def abort(self, request_ids: list[str]) -> None:
        await self._engine.abort(request_ids)

    async def next_outputs(self) -> EngineCoreOutputs:
        outputs = (await self._engine.next_outputs()).outputs
        return EngineCoreOutputs(outputs=[self._as_vllm(output) for output in outputs])

    async def status(self) -> dict[str, Any]:
        return dict(await self._engine.status())

    async def cached_blocks(self, since: int | None) -> None:
        """It has no cache."""

    def _as_vllm(self, output: NullOutput) -> EngineCoreOutput:
        of_each = self._logprobs.get(output.request_id)
        of_prompt = self._of_prompt.pop(output.request_id, None)
        if output.finish_reason:
            self._logprobs.pop(output.request_id, None)
        return EngineCoreOutput(
            output.request_id,
            [TOKEN_ID] * len(output.new_token_ids),
            new_logprobs=None if of_each is None else _logprobs(of_each),
            new_prompt_logprobs_tensors=None if of_prompt is None else _prompt_logprobs(*of_prompt),
            finish_reason=FinishReason.LENGTH if output.finish_reason else None,
        )


def _logprobs(of_each: int) -> LogprobsLists:
    """Log probabilities of one token and of `of_each` others."""
    return LogprobsLists(
        logprob_token_ids=np.arange(TOKEN_ID, TOKEN_ID + of_each + 1, dtype=np.int32)[None],
        logprobs=np.full((1, of_each + 1), -1.0, dtype=np.float32),
        sampled_token_ranks=np.array([1], dtype=np.int32),
    )


def _prompt_logprobs(tokens: int, of_each: int) -> LogprobsTensors:
    return LogprobsTensors(
        logprob_token_ids=torch.arange(TOKEN_ID, TOKEN_ID + of_each + 1, dtype=torch.int32).repeat(tokens, 1),
        logprobs=torch.full((tokens, of_each + 1), -1.0),
        selected_token_ranks=torch.ones(tokens, dtype=torch.int32),
    )


async def _serve(url: str, namespace: str, slots: int, interval_s: float, max_model_len: int) -> None:
    engine = NullVllmEngine(slots=slots, interval_s=interval_s)
    await serve_engine(url, namespace, engine, RelayConfig(), max_model_len)


def serve(url: str, namespace: str, slots: int, interval_s: float, max_model_len: int) -> None:
    """A replica, until SIGTERM."""
    die_with_parent()
    asyncio.run(_serve(url, namespace, slots, interval_s, max_model_len))
