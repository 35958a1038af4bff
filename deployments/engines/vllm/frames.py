"""vLLM's structures as a relay needs them: without vLLM, whose import takes seconds and hundreds of megabytes.

A relay looks at a few fields. All others pass through as they came: they are msgpack, and large arrays stand behind
them in buffers of their own, by number. So what is here has vLLM's fields in vLLM's order, without their types, those
of the latest release at the end: an earlier one passes over them
(`tests/deployments/engines/vllm/test_frames.py` holds the two together). An engine of another version is refused at the
handshake.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import msgspec

from deployments.engines.vllm.request_metadata import unread_tokens
from router.codec import Output, RequestSize
from router.trail import TraceHeaders
from router.wire import Buffer


class FinishReason(IntEnum):
    """vLLM's."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4

    def __str__(self) -> str:
        return self.name.lower()


class RequestFields(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """vLLM's EngineCoreRequest."""

    request_id: str
    prompt_token_ids: list[int] | None
    mm_features: Any
    sampling_params: dict[str, Any] | None
    pooling_params: Any
    arrival_time: float
    lora_request: Any
    cache_salt: str | None
    data_parallel_rank: int | None
    prompt_embeds: Any = None
    prompt_is_token_ids: Any = None
    client_index: int = 0
    current_wave: int = 0
    priority: int = 0
    trace_headers: dict[str, str] | None = None
    resumable: bool = False
    external_req_id: str | None = None
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: Any = None
    abort_immediately: bool = False
    session_id: str | None = None
    kv_hints: Any = None


class OutputFields(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """vLLM's EngineCoreOutput."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: Any = None
    new_prompt_logprobs_tensors: Any = None
    pooling_output: Any = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    events: Any = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    trace_headers: Any = None
    prefill_stats: Any = None
    routed_experts: Any = None
    num_nans_in_logits: int = 0
    mm_cache_miss_hashes: Any = None
    new_sampling_mask: Any = None
    spec_decode_metrics: Any = None
    prompt_token_id_logprobs: Any = None


class CallFields(msgspec.Struct, array_like=True, gc=False):
    """vLLM's UtilityOutput: the answer to a call, whose result stands behind what its types are."""

    call_id: int
    failure_message: str | None = None
    result: tuple[Any, Any] | None = None


class BatchFields(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """vLLM's EngineCoreOutputs."""

    engine_index: int = 0
    outputs: list[OutputFields] = []
    scheduler_stats: Any = None
    timestamp: float = 0.0
    utility_output: CallFields | None = None
    finished_requests: Any = None
    wave_complete: int | None = None
    start_wave: int | None = None
    weight_version: str | None = None


# Fields with arrays: [type, shape, its bytes or the number of its buffer], in lists or not.
_ARRAYS = (
    *("new_logprobs", "new_prompt_logprobs_tensors", "pooling_output", "routed_experts", "new_sampling_mask"),
    "prompt_token_id_logprobs",
)


@dataclass(slots=True)
class RelayedRequest:
    """A request between its router and the engine, with the buffers of its arrays."""

    fields: RequestFields
    buffers: Sequence[Buffer] = ()

    @property
    def request_id(self) -> str:
        return self.fields.request_id

    @request_id.setter
    def request_id(self, request_id: str) -> None:
        self.fields.request_id = request_id

    @property
    def extra_args(self) -> Any:
        return (self.fields.sampling_params or {}).get("extra_args")

    @property
    def prompt_tokens(self) -> int:
        if self.fields.prompt_token_ids is not None:
            return len(self.fields.prompt_token_ids)
        _, shape, _ = self.fields.prompt_embeds
        return int(shape[0])


@dataclass(frozen=True, slots=True)
class RelayedBatch:
    """What a step brought, with the buffers of its arrays."""

    fields: BatchFields
    buffers: Sequence[Buffer] = ()

    @property
    def outputs(self) -> list[OutputFields]:
        return self.fields.outputs


class FrameCodec:
    """`deployments.engines.base.RelayCodec` of vLLM's engine."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._requests = msgspec.msgpack.Decoder(RequestFields)
        self._batches = msgspec.msgpack.Decoder(BatchFields)

    def decode_request(self, parts: Sequence[Buffer]) -> RelayedRequest:
        return RelayedRequest(self._requests.decode(parts[0]), parts[1:])

    def encode_request(self, request: RelayedRequest) -> Sequence[Buffer]:
        return [self._encoder.encode(request.fields), *request.buffers]

    def size(self, request: RelayedRequest) -> RequestSize:
        """Without its limits, which the router has charged."""
        return RequestSize(request_id=request.request_id, prompt_tokens=request.prompt_tokens, max_output_tokens=None)

    def unread_tokens(self, request: RelayedRequest, replica_id: str) -> int:
        return unread_tokens(request.extra_args, request.prompt_tokens, replica_id)

    def take_trace(self, request: RelayedRequest) -> TraceHeaders | None:
        headers, request.fields.trace_headers = request.fields.trace_headers, None
        return headers

    def decode_batch(self, parts: Sequence[Buffer]) -> RelayedBatch:
        return RelayedBatch(self._batches.decode(parts[0]), parts[1:])

    def outputs(self, batch: RelayedBatch) -> Sequence[Output]:
        return batch.outputs

    def encode_outputs(self, batch: RelayedBatch, outputs: Sequence[OutputFields]) -> Sequence[Buffer]:
        mine: list[Buffer] = []
        if batch.buffers:
            for output in outputs:
                for name in _ARRAYS:
                    setattr(output, name, _renumbered(getattr(output, name), batch.buffers, mine))
        fields = batch.fields
        kept = BatchFields(outputs=list(outputs), timestamp=fields.timestamp, weight_version=fields.weight_version)
        return [self._encoder.encode(kept), *mine]


def _renumbered(value: Any, buffers: Sequence[Buffer], mine: list[Buffer]) -> Any:
    """The same, with the buffers that its arrays name moved to the end of `mine`. The first part of a frame is 0."""
    if not isinstance(value, list):
        return value
    if len(value) == 3 and isinstance(value[0], str) and isinstance(value[2], int):
        dtype, shape, number = value
        mine.append(buffers[number - 1])
        return [dtype, shape, len(mine)]
    return [_renumbered(each, buffers, mine) for each in value]
