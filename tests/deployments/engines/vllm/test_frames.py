"""What the relay takes vLLM's structures for, held against vLLM's own."""

import subprocess
import sys
import typing
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import fields
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1 import engine
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, EngineCoreRequestType, UtilityOutput
from vllm.v1.engine import FinishReason as Theirs
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import LogprobsLists, LogprobsTensors
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder, UtilityResult

from deployments.engines.vllm import core_link
from deployments.engines.vllm.frames import (
    _ARRAYS,
    BatchFields,
    CallFields,
    FinishReason,
    FrameCodec,
    OutputFields,
    RequestFields,
)
from tests.deployments.engines.vllm.requests import request_of

pytestmark = pytest.mark.slow  # importing vLLM takes seconds


def sent(parts: Sequence[Any]) -> list[memoryview]:
    """As they come off a socket."""
    return [memoryview(bytes(part)) for part in parts]


LATER = {"weight_version"}  # than vLLM 0.31


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (RequestFields, "EngineCoreRequest"),
        (OutputFields, "EngineCoreOutput"),
        (CallFields, "UtilityOutput"),
        (BatchFields, "EngineCoreOutputs"),
    ],
)
def test_the_fields_are_vllms_in_its_order_with_its_defaults(ours: Any, theirs: str) -> None:
    """Besides those that a later release has."""
    original = getattr(engine, theirs)
    shared, later = fields(ours)[: len(fields(original))], fields(ours)[len(fields(original)) :]
    assert [field.name for field in shared] == list(original.__struct_fields__)
    assert [field.default for field in shared] == [field.default for field in fields(original)]
    assert [field.default_factory for field in shared] == [field.default_factory for field in fields(original)]
    assert {field.name for field in later} <= LATER and all(field.default is None for field in later)
    assert ours.__struct_config__.array_like == original.__struct_config__.array_like is True
    assert ours.__struct_config__.omit_defaults == original.__struct_config__.omit_defaults


def test_answers_end_as_in_vllm() -> None:
    assert {str(each): each.value for each in FinishReason} == {str(each): each.value for each in engine.FinishReason}


def test_the_fields_with_arrays_are_all_that_have_any() -> None:
    hints = typing.get_type_hints(EngineCoreOutput)
    plain = {"events", "prefill_stats", "spec_decode_metrics", "finish_reason", "trace_headers"}
    plain |= {"kv_transfer_params", "ec_transfer_params", "mm_cache_miss_hashes", "stop_reason"}
    others = {name for name, hint in hints.items() if type(None) in typing.get_args(hint)} - plain
    assert others == set(_ARRAYS)


def test_messages_are_named_as_in_vllm() -> None:
    vllms = EngineCoreRequestType
    kinds = {
        vllms.ADD: core_link._ADD,
        vllms.ABORT: core_link._ABORT,
        vllms.START_DP_WAVE: core_link._START_WAVE,
        vllms.UTILITY: core_link._CALL,
    }
    assert {kind.value: ours for kind, ours in kinds.items()} == {ours: ours for ours in kinds.values()}
    assert core_link._DEAD == EngineCoreProc.ENGINE_CORE_DEAD
    assert [core_link.Rank(number).name for number in (0, 258)] == [b"\0\0", b"\2\1"]


def test_a_request_reaches_the_engine_as_its_router_sent_it_but_for_its_name_and_its_trace() -> None:
    pixels = torch.arange(4096, dtype=torch.float32).reshape(64, 64)
    elem = MultiModalFieldElem(data=pixels, field=MultiModalBatchedField())
    feature = MultiModalFeatureSpec(MultiModalKwargsItem({"pixels": elem}), "image", "hash", PlaceholderRange(0, 3))
    request = request_of(
        1,
        2,
        3,
        mm_features=[feature],
        sampling_params=SamplingParams(
            max_tokens=9,
            temperature=0.25,
            logit_bias={3: -1.5},
            extra_args={"mine": [1, {"2": 3.5}]},
            structured_outputs=StructuredOutputsParams(json={"type": "object"}),
        ),
        arrival_time=1.5,
        lora_request=LoRARequest("adapter", 7, "/adapter"),
        cache_salt="salt",
        priority=3,
        trace_headers={"traceparent": "00-1"},
        reasoning_ended=True,
    )
    codec = FrameCodec()
    relayed = codec.decode_request(sent(MsgpackEncoder().encode(request)))
    assert codec.size(relayed).prompt_tokens == 3
    assert codec.take_trace(relayed) == {"traceparent": "00-1"}
    relayed.request_id = "a~1"
    came = MsgpackDecoder(EngineCoreRequest).decode(sent(codec.encode_request(relayed)))
    assert (came.request_id, came.trace_headers) == ("a~1", None)
    ((feature_came,), (elem_came,)) = came.mm_features, came.mm_features[0].data.values()
    assert torch.equal(elem_came.data, pixels) and feature_came.mm_position == feature.mm_position
    came.request_id, came.trace_headers, came.mm_features = "a", request.trace_headers, request.mm_features
    for name in EngineCoreRequest.__struct_fields__:
        assert getattr(came, name) == getattr(request, name), name


def test_a_prompt_of_embeddings_has_its_length() -> None:
    embeds = torch.ones(5, 300)
    request = request_of(prompt_token_ids=None, prompt_embeds=embeds)
    codec = FrameCodec()
    relayed = codec.decode_request(sent(MsgpackEncoder().encode(request)))
    assert relayed.prompt_tokens == codec.unread_tokens(relayed, "r") == 5
    came = MsgpackDecoder(EngineCoreRequest).decode(sent(codec.encode_request(relayed)))
    assert torch.equal(came.prompt_embeds, embeds)


def outputs_of(request_id: str, start: int) -> Any:
    """With arrays small enough to stand in the frame, and others in buffers behind it."""
    many = np.arange(start, start + 400).reshape(2, 200)
    return EngineCoreOutput(
        request_id,
        [start, start + 1],
        new_logprobs=LogprobsLists(many, many / 10, np.array([start, 2]), [0, 2]),
        new_prompt_logprobs_tensors=LogprobsTensors(
            torch.arange(start, start + 300), torch.ones(3, 100) * start, torch.arange(3)
        ),
        finish_reason=Theirs.LENGTH,
        stop_reason=5,
        kv_transfer_params={"do_remote_prefill": True, "remote_block_ids": [[1, 2]]},
        prefill_stats=PrefillStats(),
        routed_experts=np.arange(start, start + 500),
    )


@pytest.mark.parametrize("mine", [[0], [1], [0, 2], [2, 1, 0]])
def test_each_router_gets_its_outputs_whole_with_their_arrays_alone(mine: list[int]) -> None:
    given = [outputs_of(f"r{at}", 1000 * at) for at in range(3)]
    version = {"weight_version": "w"} if "weight_version" in EngineCoreOutputs.__struct_fields__ else {}
    parts = sent(MsgpackEncoder().encode(EngineCoreOutputs(outputs=given, timestamp=4.5, **version)))
    codec = FrameCodec()
    batch = codec.decode_batch(parts)
    told = codec.encode_outputs(batch, [batch.outputs[at] for at in mine])
    assert len(told) == 1 + (len(parts) - 1) * len(mine) // 3
    came = MsgpackDecoder(EngineCoreOutputs).decode(sent(told))
    assert came.timestamp == 4.5 and {name: getattr(came, name) for name in version} == version
    encoder = MsgpackEncoder()
    for output, at in zip(came.outputs, mine, strict=True):
        assert [bytes(part) for part in encoder.encode(output)] == [bytes(part) for part in encoder.encode(given[at])]


def test_answers_to_calls_are_read() -> None:
    codec, encoder, status = FrameCodec(), MsgpackEncoder(), {"free_blocks": 3, "hash": b"\0"}
    for output, told in (
        (UtilityOutput(7, result=UtilityResult(status)), (None, status)),
        (UtilityOutput(7, result=UtilityResult(None)), (None, None)),
        (UtilityOutput(7, failure_message="no"), None),
    ):
        batch = codec.decode_batch(sent(encoder.encode(EngineCoreOutputs(utility_output=output))))
        assert batch.fields.utility_output == CallFields(7, output.failure_message, told)


def test_a_relay_imports_neither_torch_nor_vllm() -> None:
    """Seconds of every start, and half a gigabyte for as long as it lives."""
    modules = "deployments.serving.engine_replica, deployments.engines.vllm.engine"
    script = f"import sys, {modules}; print(sorted(sys.modules.keys() & {{'torch', 'vllm', 'transformers'}}))"
    run = subprocess.run([sys.executable, "-c", script], check=True, timeout=120, capture_output=True, text=True)
    assert run.stdout.strip() == "[]"
