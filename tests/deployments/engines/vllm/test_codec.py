"""What the codec for vLLM does to vLLM's own structures."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.config.multimodal import MultiModalConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve.utils.api_utils import process_lora_modules
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.utils import apply_penalties
from vllm.multimodal.cache import factories
from vllm.multimodal.inputs import PlaceholderRange
from vllm.reasoning import ReasoningParserManager
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.tool_parsers import ToolParserManager
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import LogprobsLists, SamplingMaskLists

from deployments.config.model import DEMO_ARGS, DEMO_MODEL
from deployments.engines.vllm.args import lora_id, lora_requests, parse_vllm_args
from deployments.engines.vllm.codec import TRANSFER_KEY, VllmCodec
from deployments.engines.vllm.front_end import RoutedEngineCore, _without_transfer, front_end_config
from deployments.engines.vllm.request_metadata import RequestMetadata, metadata_of
from policies.router.tickets import Ticket
from router.admission import Tenant
from router.timing import HttpContext, current
from tests.deployments.engines.vllm.requests import request_of

pytestmark = pytest.mark.slow  # importing vLLM takes seconds

NEUTRAL = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}  # in vLLM's order


def request_with(**changes: Any) -> Any:
    return request_of(1, 2, 3, **changes)


def test_what_belongs_to_repeated_tokens_leaves_with_them() -> None:
    rows = np.arange(6).reshape(3, 2)
    output = EngineCoreOutput(
        "a",
        [7, 8, 9],
        new_logprobs=LogprobsLists(rows, rows / 10, rows[:, 0], None),
        new_sampling_mask=SamplingMaskLists(np.array([7, 8, 9, 10]), np.array([0, 1, 2, 4])),
        routed_experts=np.arange(6),  # of four tokens of a prompt, and of two of the answer
        prompt_token_id_logprobs=torch.zeros(2, 2),
    )
    VllmCodec().drop_first(output, 2)
    assert output.new_token_ids == [9]
    assert output.new_logprobs is not None and output.new_sampling_mask is not None
    assert output.new_logprobs.logprob_token_ids.tolist() == [[4, 5]]
    assert output.new_logprobs.sampled_token_ranks.tolist() == [4]
    assert output.new_sampling_mask.to_nested_list() == [[9, 10]]
    assert output.routed_experts.tolist() == [5]
    assert output.prompt_token_id_logprobs is None
    VllmCodec().drop_first(output, 1)
    assert (output.new_token_ids, output.new_sampling_mask, output.routed_experts.tolist()) == ([], None, [])


def test_a_ticket_travels_with_its_request_and_does_not_keep_it_from_being_resumed() -> None:
    def request(**extra: Any) -> EngineCoreRequest:
        return request_with(sampling_params=SamplingParams(max_tokens=9, temperature=0.0, extra_args=extra or None))

    ticket = Ticket(
        request_id="a",
        bin_index=2,
        deadline_key=7.5,
        work_s=1.0,
        router_id="r",
        tpot_s=0.05,
        predicted_output_tokens=33.0,
        unread_tokens=3,
        fills_idle=True,
    )
    codec, plain = VllmCodec(), request()
    told = codec.with_ticket(plain, ticket, ttft_left_s=-0.5, e2e_left_s=7.5)
    sent = codec.decode_request([bytes(part) for part in codec.encode_request(told)])
    assert metadata_of(sent.sampling_params.extra_args) == RequestMetadata(
        slo_class="standard",
        predicted_output_tokens=33.0,
        bin_index=2,
        ttft_left_s=-0.5,
        tpot_s=0.05,
        e2e_left_s=7.5,
        unread_tokens=3,
        fills_idle=True,
    )
    assert plain.sampling_params.extra_args is None
    assert codec.recover(sent, [5]).repeats == ()
    again = codec.with_ticket(request(mine=1), ticket, ttft_left_s=None, e2e_left_s=None, resumed=True)
    assert metadata_of(again.sampling_params.extra_args).resumed
    assert codec.recover(again, [5]).repeats == (5,)


@pytest.mark.parametrize(
    ("asked", "least"),
    [({}, 0), ({"min_tokens": 5}, 5), ({"ignore_eos": True}, 9), ({"ignore_eos": True, "stop": "x"}, 9)],
)
def test_an_answer_that_its_client_holds_open_has_a_least_length(asked: dict[str, Any], least: int) -> None:
    size = VllmCodec().size(request_with(sampling_params=SamplingParams(max_tokens=9, **asked)))
    assert (size.min_output_tokens, size.max_output_tokens) == (least, 9)


def test_a_repetition_penalty_can_be_resumed_and_penalties_of_the_answer_alone_cannot() -> None:
    """The generation_config of many models sets it; as vLLM computes it, a token may stand in prompt or answer."""

    def resumable(**sampling: Any) -> bool:
        return VllmCodec().resumable(request_with(sampling_params=SamplingParams(max_tokens=9, **sampling)))

    def penalised(prompt: list[int], answer: list[int], **of: float) -> list[float]:
        penalties = [torch.tensor([of.get(name, neutral)]) for name, neutral in NEUTRAL.items()]
        return apply_penalties(torch.ones(1, 8), torch.tensor([prompt]), torch.tensor([answer]), *penalties)[0].tolist()

    for name, neutral in NEUTRAL.items():
        penalty = {name: neutral + 0.5}
        exact = penalised([1, 2], [3, 4, 4], **penalty) == penalised([1, 2, 3, 4], [4], **penalty)
        assert resumable(**penalty) == exact == (name == "repetition_penalty")


def test_an_answer_in_one_piece_is_one_that_nobody_looks_into() -> None:
    def in_one_piece(**sampling: Any) -> bool:
        return VllmCodec().in_one_piece(request_with(sampling_params=SamplingParams(**sampling)))

    assert in_one_piece(output_kind=RequestOutputKind.FINAL_ONLY)
    assert not in_one_piece(output_kind=RequestOutputKind.FINAL_ONLY, stop=["\n"])
    assert not in_one_piece(output_kind=RequestOutputKind.FINAL_ONLY, logprobs=1)
    assert not in_one_piece(output_kind=RequestOutputKind.DELTA)


def test_what_is_not_in_the_tokens_of_a_prompt_cannot_be_resumed() -> None:
    codec, forced = VllmCodec(), SamplingParams(max_tokens=9, trace_decode_token_ids=[4, 5, 6])
    scored = SamplingParams(max_tokens=9, prompt_logprob_token_ids=np.array([[1, 2], [3, 4]], dtype=np.int32))
    assert codec.resumable(request_with())
    assert not codec.resumable(request_with(prompt_embeds=torch.zeros(3, 2)))
    assert not codec.resumable(request_with(sampling_params=forced))
    assert not codec.resumable(request_with(sampling_params=scored))
    assert not codec.splits(request_with(sampling_params=scored))


def test_where_logits_processors_are_loaded_nothing_is_resumed() -> None:
    """They may look at the answer so far, also without arguments of the request."""
    assert not VllmCodec(resumes=False).resumable(request_with())


@pytest.mark.parametrize("kind", ["tool", "reasoning"])
def test_parsers_of_a_plugin_are_imported_with_the_arguments(kind: str, tmp_path: Path) -> None:
    """As vLLM's own server does, which does not run here."""
    plugin = tmp_path / f"sluice_{kind}_plugin.py"
    base, manager = f"{kind.title()}Parser", f"{kind.title()}ParserManager"
    where = "vllm.tool_parsers" if kind == "tool" else "vllm.reasoning"
    registered = f"@{manager}.register_module('mine-{kind}')\nclass Mine({base}): pass\n"
    plugin.write_text(f"from {where} import {base}, {manager}\n{registered}")
    parse_vllm_args(["--model", str(DEMO_MODEL), f"--{kind}-parser-plugin", str(plugin)])
    found: Any = ToolParserManager.get_tool_parser if kind == "tool" else ReasoningParserManager.get_reasoning_parser
    assert found(f"mine-{kind}").__name__ == "Mine"


def test_a_resumed_answer_tells_the_experts_of_no_token_twice() -> None:
    """The experts of three prompt tokens and of the first of two sent tokens are known."""
    resumed = VllmCodec().recover(request_with(), [4, 5]).request
    assert resumed.prompt_token_ids == [1, 2, 3, 4, 5]
    assert resumed.sampling_params.routed_experts_prompt_start == 4


def test_a_prefill_is_one_token_of_the_same_prompt_and_the_answer_begins_with_its_cache() -> None:
    sampling = SamplingParams(max_tokens=9, structured_outputs=StructuredOutputsParams(regex="a+"))
    codec, asked = VllmCodec(), request_with(sampling_params=sampling)
    reading = codec.prefill_of(asked).sampling_params
    assert (reading.max_tokens, reading.temperature, reading.structured_outputs) == (1, 0.0, None)
    assert reading.extra_args[TRANSFER_KEY]["do_remote_decode"]
    ended = EngineCoreOutput("a", [7], kv_transfer_params={"do_remote_prefill": True, "remote_port": 1})
    cache = codec.cache_of(ended)
    assert cache is not None
    answering = codec.with_cache(asked, cache).sampling_params
    assert (answering.max_tokens, answering.extra_args[TRANSFER_KEY]["remote_port"]) == (9, 1)
    assert asked.sampling_params.extra_args is None, "whoever gets it after that reads the prompt"
    assert codec.cache_of(EngineCoreOutput("a", [7])) is None
    assert codec.splits(asked)
    assert not codec.splits(request_with(sampling_params=SamplingParams(prompt_logprobs=1)))
    assert not codec.splits(request_with(prompt_token_ids=None))
    forged = SamplingParams(extra_args={TRANSFER_KEY: {"remote_host": "x"}, "mine": 1})
    assert _without_transfer(forged).extra_args == {"mine": 1}
    assert _without_transfer(sampling) is sampling


def test_an_answer_to_a_prompt_that_was_read_elsewhere_tells_what_was_cached_there() -> None:
    codec = VllmCodec()
    output = EngineCoreOutput("a", [7], prefill_stats=PrefillStats(num_prompt_tokens=64, num_cached_tokens=64))
    codec.note_hits(output, {"remote_port": 1})
    assert output.prefill_stats is not None
    assert output.prefill_stats.num_cached_tokens == 64
    codec.note_hits(output, {"remote_prefill_cached_tokens": 16})
    assert output.prefill_stats.num_cached_tokens == 16
    codec.note_hits(EngineCoreOutput("a", [8]), {"remote_prefill_cached_tokens": 16})


def test_adapters_are_told_apart_within_32_bits() -> None:
    """As vLLM's model runner for GPUs keeps them."""
    ids = {lora_id(f"adapter{number}", "/adapters") for number in range(1000)}
    assert len(ids) == 1000
    assert all(0 < one < 2**31 for one in ids)


async def test_a_front_end_asks_for_the_very_adapters_that_replicas_have_loaded() -> None:
    fused = '{"name": "fused", "path": "/adapters/fused", "base_model_name": "m", "is_3d_lora_weight": true}'
    modules = ["plain=/adapters/plain", fused]
    by_modality = ["--default-mm-loras", '{"image": "/adapters/image"}']
    args = parse_vllm_args(["--model", "m", "--enable-lora", "--lora-modules", *modules, *by_modality])
    loaded = {one.lora_name: msgspec.structs.asdict(one) for one in lora_requests(args)}

    core = RoutedEngineCore(None, "m")  # type: ignore[arg-type]
    client: Any = SimpleNamespace(add_lora=core.add_lora_async, model_config=None, renderer=None, input_processor=None)
    models = OpenAIServingModels(
        client, [BaseModelPath("m", "m")], lora_modules=process_lora_modules(args.lora_modules, args.default_mm_loras)
    )
    await models.init_static_loras()
    assert {name: msgspec.structs.asdict(one) for name, one in models.lora_requests.items()} == loaded
    assert set(loaded) == {"plain", "fused", "image"}


def test_a_front_end_sends_images_with_every_request_that_has_them() -> None:
    """One that had sent an image to one replica would send its hash alone to the next."""
    args = parse_vllm_args(["--model", str(DEMO_MODEL), *DEMO_ARGS])
    config = front_end_config(AsyncEngineArgs.from_cli_args(args))
    sees = SimpleNamespace(supports_multimodal_inputs=True, get_multimodal_config=MultiModalConfig)
    made: Any = SimpleNamespace(model_config=sees, parallel_config=config.parallel_config)
    assert isinstance(factories.processor_cache_from_config(made), factories.MultiModalProcessorOnlyCache)


def test_a_replica_learns_how_much_of_a_prompt_counts_as_unread_there() -> None:
    codec, request = VllmCodec(), request_with(prompt_token_ids=list(range(100)))
    ticket = Ticket(
        request_id="a",
        bin_index=0,
        deadline_key=0.0,
        work_s=1.0,
        router_id="x",
        unread_tokens=100,
        prefixes=(("r", 64),),
    )
    told = codec.with_ticket(request, ticket, ttft_left_s=None, e2e_left_s=None)
    sent = codec.decode_request(codec.encode_request(told))
    assert [codec.unread_tokens(sent, name) for name in ("r", "q")] == [36, 100]
    assert codec.unread_tokens(request, "r") == 100, "without a ticket"


def test_prompts_have_a_prefix_in_common_only_where_all_is_equal_that_vllm_hashes() -> None:
    picture = SimpleNamespace(identifier="picture", mm_position=PlaceholderRange(offset=0, length=3))
    adapted = LoRARequest(lora_name="b", lora_int_id=1, lora_path="/b")
    asked: list[dict[str, Any]] = [
        {},
        {"cache_salt": "a"},
        {"cache_salt": "b"},
        {"lora_request": adapted},
        {"mm_features": [picture]},
        {"mm_features": [picture, picture]},
    ]
    salts = [VllmCodec().size(request_with(**changes)).salt for changes in asked]
    assert salts[0] == "" and len(set(salts)) == len(asked)
    assert [VllmCodec().size(request_with(**changes)).media_tokens for changes in asked] == [0, 0, 0, 0, 3, 6]


def test_a_trace_goes_with_a_request_also_once_that_is_resumed_and_ends_before_the_engine() -> None:
    headers = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    codec, request = VllmCodec(), request_with()
    traced = codec.with_trace(request, headers)
    assert codec.resumable(traced)
    for sent in (traced, codec.recover(traced, [4]).request):
        came = codec.decode_request(codec.encode_request(sent))
        assert codec.take_trace(came) == headers
        assert came.trace_headers is None
    assert codec.take_trace(codec.decode_request(codec.encode_request(request))) is None


def test_an_engine_says_with_the_first_output_what_it_had_cached() -> None:
    said = EngineCoreOutput("a", [1], prefill_stats=PrefillStats(num_cached_tokens=48))
    assert [VllmCodec().cached_tokens(output) for output in (said, EngineCoreOutput("a", [2]))] == [48, None]


async def test_requests_of_a_key_find_only_prompts_of_that_key() -> None:
    salts: list[str | None] = []

    async def submit(request: Any, **_: Any) -> None:
        salts.append(request.cache_salt)

    routed: Any = SimpleNamespace(submit=submit)
    for isolates in (True, False):
        core = RoutedEngineCore(routed, "m", isolates_keys=isolates)
        for name, own in (("m", None), ("m", None), ("n", None), ("m", "own"), (None, "own")):
            current.set(HttpContext(received_s=0.0, slo_class="s", tenant=Tenant(name=name) if name else None))
            await core.add_request_async(request_with(cache_salt=own))
    assert salts[0] == salts[1] and len(set(salts[1:5])) == 4
    assert salts[4:] == ["own", None, None, None, "own", "own"]
