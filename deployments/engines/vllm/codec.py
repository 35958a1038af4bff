"""vLLM's structures between routers and engine replicas, packed by vLLM's codec: both sides must run the same vLLM (the
handshake checks it)."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.outputs import LogprobsLists
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from deployments.engines.base import Logprobs, RowOutput
from deployments.engines.vllm.cached_blocks import request_block_hashes
from deployments.engines.vllm.request_metadata import RequestMetadata, unread_tokens, without_metadata
from deployments.engines.vllm.version import ENGINE_VERSION
from policies.router.tickets import Ticket
from router.cached_blocks import BlockHashes, BlockHashing
from router.codec import Output, Recovery, RequestSize
from router.trail import TraceHeaders
from router.wire import Buffer

# vLLM's name for what a KV connector is told of a request. It names addresses to read from: never a client's to say.
TRANSFER_KEY = "kv_transfer_params"
# In it, of how much of the prompt the replica that read it had a cache.
HITS_KEY = "remote_prefill_cached_tokens"
# Sampling that looks back over the tokens generated so far: after a resume those stand in the prompt, where it does not
# look (or, for prompt logprobs, where it must not). A repetition penalty looks at prompt and answer alike.
_LOOKS_BACK = (
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "prompt_logprobs",
    "structured_outputs",
    "bad_words",
    "thinking_token_budget",
    "repetition_detection",
    "trace_decode_token_ids",
)
_DEFAULTS = SamplingParams()


def _min_output_tokens(params: SamplingParams) -> int:
    """With ignore_eos all that it may have, for a stop string that may never come would be a way around a quota."""
    return int((params.max_tokens or 0) if params.ignore_eos else params.min_tokens)


def _salt(request: EngineCoreRequest) -> str:
    """What vLLM puts into the hashes of blocks besides their tokens; of media, all that the prompt has."""
    adapter = request.lora_request.lora_name if request.lora_request else ""
    media = [feature.identifier for feature in request.mm_features or ()]
    return repr((request.cache_salt, adapter, media)) if request.cache_salt or adapter or media else ""


class VllmCodec:
    """`router.codec.EngineCodec` for vLLM. Not thread-safe, as vLLM's encoder is not."""

    engine_version = ENGINE_VERSION

    def __init__(self, *, resumes: bool = True) -> None:
        """Args:
        resumes: False where what engines sample may look back over the tokens of any answer, as logits processors may.
        """
        self._resumes = resumes
        self._encoder = MsgpackEncoder()
        self._outputs_decoder = MsgpackDecoder(EngineCoreOutputs)
        self._request_decoder = MsgpackDecoder(EngineCoreRequest)

    def size(self, request: EngineCoreRequest) -> RequestSize:
        prompt_tokens = (
            len(request.prompt_embeds) if request.prompt_token_ids is None else len(request.prompt_token_ids)
        )
        params = request.sampling_params
        return RequestSize(
            request_id=request.request_id,
            prompt_tokens=prompt_tokens,
            max_output_tokens=params.max_tokens if params else 1,
            min_output_tokens=_min_output_tokens(params) if params else 0,
            media_tokens=sum(feature.mm_position.get_num_embeds() for feature in request.mm_features or ()),
            prompt_token_ids=request.prompt_token_ids or (),
            salt=_salt(request),
        )

    def block_hashes(self, request: EngineCoreRequest, hashing: BlockHashing) -> BlockHashes:
        return request_block_hashes(request, hashing)

    def with_ticket(
        self,
        request: EngineCoreRequest,
        ticket: Ticket,
        *,
        ttft_left_s: float | None,
        e2e_left_s: float | None,
        resumed: bool = False,
        comes_back: bool | None = None,
    ) -> EngineCoreRequest:
        """In a copy, for several requests of one prompt may share their sampling parameters."""
        if request.sampling_params is None:
            return request
        metadata = RequestMetadata(
            slo_class=ticket.slo_class,
            predicted_output_tokens=ticket.predicted_output_tokens,
            bin_index=ticket.bin_index,
            ttft_left_s=ttft_left_s,
            tpot_s=ticket.tpot_s,
            e2e_left_s=e2e_left_s,
            resumed=resumed,
            comes_back=comes_back,
            fills_idle=ticket.fills_idle,
            unread_tokens=ticket.unread_tokens,
            unread_at={replica_id: ticket.unread_at(replica_id) for replica_id, _ in ticket.prefixes},
        )
        params = request.sampling_params.clone()
        params.extra_args = {**(params.extra_args or {}), **metadata.as_extra_args()}
        return replace(request, sampling_params=params)

    def with_trace(self, request: EngineCoreRequest, headers: TraceHeaders) -> EngineCoreRequest:
        return replace(request, trace_headers=headers)

    def take_trace(self, request: EngineCoreRequest) -> TraceHeaders | None:
        headers, request.trace_headers = request.trace_headers, None
        return headers

    def unread_tokens(self, request: EngineCoreRequest, replica_id: str) -> int:
        params = request.sampling_params
        return unread_tokens(params.extra_args if params else None, self.size(request).prompt_tokens, replica_id)

    def cached_tokens(self, output: Any) -> int | None:
        return None if output.prefill_stats is None else output.prefill_stats.num_cached_tokens

    def loaded_tokens(self, output: Any) -> int:
        return 0 if output.prefill_stats is None else int(output.prefill_stats.num_external_cached_tokens)

    def encode_request(self, request: EngineCoreRequest) -> Sequence[Buffer]:
        return self._encoder.encode(request)

    def decode_request(self, parts: Sequence[Buffer]) -> EngineCoreRequest:
        return self._request_decoder.decode(parts)

    def encode_outputs(self, batch: EngineCoreOutputs, outputs: Sequence[EngineCoreOutput]) -> Sequence[Buffer]:
        return self._encoder.encode(self.keep(batch, outputs))

    def decode_outputs(self, parts: Sequence[Buffer]) -> EngineCoreOutputs:
        return self._outputs_decoder.decode(parts)

    def outputs(self, batch: EngineCoreOutputs) -> Sequence[Output]:
        return batch.outputs

    def keep(self, batch: EngineCoreOutputs, outputs: Sequence[Output]) -> EngineCoreOutputs:
        kept = EngineCoreOutputs(outputs=list(outputs), timestamp=batch.timestamp)
        if hasattr(batch, "weight_version"):  # vLLM 0.32
            kept.weight_version = batch.weight_version
        return kept

    def drop_first(self, output: Any, tokens: int) -> None:
        rest = len(output.new_token_ids) - tokens
        output.new_token_ids = output.new_token_ids[tokens:]
        output.new_prompt_logprobs_tensors = output.prompt_token_id_logprobs = None  # they came with the first token
        if output.new_logprobs is not None:
            output.new_logprobs = output.new_logprobs.slice_request(tokens, rest)
        if output.new_sampling_mask is not None:  # vLLM cannot slice what is of one token
            output.new_sampling_mask = output.new_sampling_mask.slice_request(tokens, rest) if rest else None
        if output.routed_experts is not None:  # one row for each token, and with the first those of the prompt
            output.routed_experts = output.routed_experts[len(output.routed_experts) - rest :]

    def resumable(self, request: EngineCoreRequest) -> bool:
        """Where the continuation does not depend on which tokens were prompt."""
        params = request.sampling_params
        return (
            self._resumes
            and request.prompt_token_ids is not None
            and request.prompt_embeds is None
            and not request.mm_features
            and params is not None
            and params.prompt_logprob_token_ids is None
            and not without_metadata(params.extra_args)
            and all(getattr(params, name) == getattr(_DEFAULTS, name) for name in _LOOKS_BACK)
        )

    def in_one_piece(self, request: EngineCoreRequest) -> bool:
        """Not with stop strings, which vLLM's front end looks for in what has come, nor with logprobs, each of which
        would keep the whole frame that it came in."""
        params = request.sampling_params
        if params is None or params.stop or params.logprobs is not None or params.logprob_token_ids:
            return False
        return params.output_kind == RequestOutputKind.FINAL_ONLY

    def recover(self, request: EngineCoreRequest, sent: Sequence[int]) -> Recovery[EngineCoreRequest]:
        """Resume where that is exact, else replay from the start."""
        if not self.resumable(request):
            return Recovery(request, tuple(sent))
        params = request.sampling_params.clone()
        params.max_tokens -= len(sent)
        params.min_tokens = max(0, params.min_tokens - len(sent))
        # Experts are told of every token before the last one, the prompt's included: these have been.
        params.routed_experts_prompt_start = len(request.prompt_token_ids) + len(sent) - 1
        return Recovery(replace(request, prompt_token_ids=[*request.prompt_token_ids, *sent], sampling_params=params))

    # Where a prompt is read by another replica, see router.prefill_decode

    def splits(self, request: EngineCoreRequest) -> bool:
        """Not with what the KV cache does not hold (logprobs of the prompt) or what its prefill needs besides."""
        params = request.sampling_params
        return (
            request.prompt_token_ids is not None
            and request.prompt_embeds is None
            and not request.mm_features
            and request.lora_request is None
            and params is not None
            and params.prompt_logprobs is None
            and params.prompt_logprob_token_ids is None
        )

    def prefill_of(self, request: EngineCoreRequest) -> EngineCoreRequest:
        """Its one token is not read, so it is sampled the cheapest way."""
        wanted = {"do_remote_decode": True, "do_remote_prefill": False}
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, extra_args={TRANSFER_KEY: wanted})
        return replace(request, sampling_params=params)

    def cache_of(self, output: Any) -> Mapping[str, Any] | None:
        cache = output.kv_transfer_params
        return cache if cache and cache.get("do_remote_prefill") else None

    def with_cache(self, request: EngineCoreRequest, cache: Mapping[str, Any]) -> EngineCoreRequest:
        params = request.sampling_params.clone()
        params.extra_args = {**(params.extra_args or {}), TRANSFER_KEY: dict(cache)}
        return replace(request, sampling_params=params)

    def note_hits(self, output: Any, cache: Mapping[str, Any]) -> None:
        """As vLLM's output processor does where the client brings the cache."""
        if output.prefill_stats is not None and isinstance(cached := cache.get(HITS_KEY), int):
            output.prefill_stats.num_cached_tokens = cached

    def without_fetching(
        self, request: EngineCoreRequest, request_id: str, cache: Mapping[str, Any]
    ) -> EngineCoreRequest:
        offered = self.with_cache(request, cache)
        return replace(offered, request_id=request_id, abort_immediately=True)

    def failed(self, request_id: str) -> EngineCoreOutputs:
        return EngineCoreOutputs(outputs=[EngineCoreOutput(request_id, [], finish_reason=FinishReason.ERROR)])


_FINISH = {None: None, "stop": FinishReason.STOP, "length": FinishReason.LENGTH, "error": FinishReason.ERROR}


def step_outputs(rows: Iterable[RowOutput]) -> EngineCoreOutputs:
    """What a step of a gang batch brought, in vLLM's structures."""
    return EngineCoreOutputs(
        outputs=[
            EngineCoreOutput(
                request_id=row.request_id,
                new_token_ids=row.token_ids,
                new_logprobs=_logprobs_lists(row.logprobs) if row.logprobs else None,
                finish_reason=_FINISH[row.finish],
                stop_reason=row.stop_reason,
            )
            for row in rows
        ]
    )


def _logprobs_lists(found: Logprobs) -> LogprobsLists:
    return LogprobsLists(
        logprob_token_ids=np.array([found.token_ids], dtype=np.int32),
        logprobs=np.array([found.logprobs], dtype=np.float32),
        sampled_token_ranks=np.array([found.rank], dtype=np.int32),
    )
