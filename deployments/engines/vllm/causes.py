"""What a vLLM engine has that switches something of Sluice's off (`deployments.engines.features`)."""

from argparse import Namespace
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from vllm.v1.sample.logits_processor import LOGITSPROCS_GROUP

from deployments.engines.features import Cause
from deployments.engines.vllm.layer_groups import layer_groups


def causes_of_args(args: Namespace) -> frozenset[Cause]:
    """By the arguments of `vllm serve` alone: what hangs on the model, the engine says once it runs."""
    return _those(
        {
            Cause.WHOLE_PROMPTS: args.enable_chunked_prefill is False,
            Cause.NO_PREFIX_CACHE: args.enable_prefix_caching is False,
            Cause.LOGITS_PROCESSORS: bool(args.logits_processors or _processors_are_installed()),
        }
    )


def causes_of_scheduler(scheduler: Any) -> frozenset[Cause]:
    """By vLLM's scheduler, whichever it is."""
    blocks, named = scheduler.kv_cache_manager, scheduler.vllm_config.model_config.logits_processors
    return _those(
        {
            Cause.WHOLE_MEDIA: scheduler.max_num_encoder_input_tokens > 0 and _reads_media_whole(scheduler),
            Cause.STATE_BLOCKS: scheduler.need_mamba_block_aligned_split,
            Cause.WHOLE_PROMPTS: not scheduler.scheduler_config.enable_chunked_prefill,
            Cause.DATA_PARALLEL: scheduler.parallel_config.data_parallel_size > 1,
            Cause.NO_PREFIX_CACHE: not blocks.enable_caching,
            Cause.STATES: blocks.enable_caching and layer_groups(blocks.coordinator) is None,
            Cause.LOGITS_PROCESSORS: bool(named or _processors_are_installed()),
            Cause.SCHEDULED_AHEAD: scheduler.num_spec_tokens > 0 and scheduler.scheduler_config.async_scheduling,
        }
    )


def passing_causes(scheduler: Any) -> frozenset[Cause]:
    """What switches something off for a while, as things stand."""
    if scheduler.connector is None and scheduler.lora_config is None:
        return frozenset()
    return _those(
        {
            Cause.LOADS: scheduler.connector is not None and bool(scheduler.kv_holding_waiting),
            Cause.ADAPTERS: scheduler.lora_config is not None and _has_many_adapters(scheduler),
        }
    )


def _has_many_adapters(scheduler: Any) -> bool:
    """More than a batch may hold, those of waiting requests included."""
    most, found = scheduler.lora_config.max_loras, set[int]()
    for request in scheduler.requests.values():
        if (adapter := request.lora_request) is not None:
            found.add(adapter.lora_int_id)
            if len(found) > most:
                return True
    return False


@cache  # an engine is asked several times a second, and all that is installed is looked through
def _processors_are_installed() -> bool:
    """For every vLLM of this environment."""
    return bool(entry_points(group=LOGITSPROCS_GROUP))


def _reads_media_whole(scheduler: Any) -> bool:
    """Where not, the encoder runs whole in the step that reaches an image, which takes nothing of the step's tokens."""
    return bool(scheduler.scheduler_config.disable_chunked_mm_input or scheduler.is_encoder_decoder)


def _those(found: dict[Cause, bool]) -> frozenset[Cause]:
    return frozenset(cause for cause, is_there in found.items() if is_there)
