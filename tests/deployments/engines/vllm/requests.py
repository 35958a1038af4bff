"""What vLLM's front end sends to its engine, built from the few fields that a test is about."""

from typing import Any

from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest


def request_of(*prompt_token_ids: int, **changes: Any) -> EngineCoreRequest:
    """A request for nine tokens."""
    fields = dict.fromkeys(EngineCoreRequest.__struct_fields__[:10])
    fields |= {"request_id": "a", "arrival_time": 0.0, "prompt_token_ids": list(prompt_token_ids)}
    return EngineCoreRequest(**{**fields, "sampling_params": SamplingParams(max_tokens=9), **changes})  # type: ignore[arg-type]
