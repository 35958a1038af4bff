"""What a step of a gang batch brings, and what may be asked of one: plain structures, without PyTorch.

The front end uses them as well, to refuse what this engine does not do before anything is sent.
"""

from typing import Any

from vllm import SamplingParams

# What is obeyed here, and what the front end does by itself; of anything else only the default is served.
_OBEYED = {
    "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p", "seed",
    "stop_token_ids", "ignore_eos", "max_tokens", "min_tokens", "logprobs", "logit_bias", "allowed_token_ids",
    "bad_words", "_bad_words_token_ids", "_eos_token_id", "_all_stop_token_ids",
}  # fmt: skip
_OF_THE_FRONT_END = {
    "n", "stop", "detokenize", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output",
    "output_kind", "stream_interval", "skip_clone", "output_text_buffer_length", "flat_logprobs", "extra_args",
    "skip_reading_prefix_cache",
}  # fmt: skip
_DEFAULTS = SamplingParams()


def unsupported(request: Any) -> list[str]:
    """Names of what a request (vLLM's EngineCoreRequest) asks for and cannot have from this engine."""
    params = request.sampling_params
    if params is None:
        return ["pooling"]
    if not request.prompt_token_ids:
        return ["prompts without tokens"]
    mine = (name for name in params.__struct_fields__ if name not in _OBEYED | _OF_THE_FRONT_END)
    found = [name for name in mine if _is_asked(getattr(params, name), getattr(_DEFAULTS, name))]
    return found + [name for name in ("lora_request", "mm_features") if getattr(request, name)]


def _is_asked(value: Any, default: Any) -> bool:
    """The front end writes False where it has resolved that a feature is off; arrays have None as their default."""
    if value is False or value is default:
        return False
    return default is None or bool(value != default)
