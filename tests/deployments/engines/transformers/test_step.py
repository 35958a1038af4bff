"""What may be asked of the Transformers engine."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from deployments.engines.transformers.step import unsupported

pytestmark = pytest.mark.slow  # importing vLLM takes seconds


def request(params: SamplingParams | None, prompt: list[int] | None = None, **fields: Any) -> SimpleNamespace:
    return SimpleNamespace(
        sampling_params=params,
        prompt_token_ids=[1] if prompt is None else prompt,
        **{"lora_request": None, "mm_features": None, **fields},
    )


MARKS = ["watermarking"] if SamplingParams().watermarking is None else []  # vLLM 0.31 asks for them by default


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 1, "logprobs": 3},
        {"presence_penalty": 1.0, "frequency_penalty": 1.0, "repetition_penalty": 1.1, "min_tokens": 2},
        {"stop": ["x"], "stop_token_ids": [3], "ignore_eos": True, "max_tokens": 7, "n": 2},
        {
            "logit_bias": {3: 1.0},
            "allowed_token_ids": [1, 2],
            **dict.fromkeys(MARKS, False),
            "extra_args": {"sluice": {}},
        },
    ],
)
def test_what_is_obeyed_may_be_asked_for(params: dict[str, Any]) -> None:
    assert unsupported(request(SamplingParams(**params))) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prompt_logprobs", 0),
        ("structured_outputs", StructuredOutputsParams(json="{}")),
        ("thinking_token_budget", 4),
        *((name, True) for name in MARKS),
        ("logprob_token_ids", [1]),
    ],
)
def test_what_is_not_is_named(name: str, value: Any) -> None:
    params = SamplingParams()
    setattr(params, name, value)
    assert unsupported(request(params)) == [name]


def test_arrays_and_what_stands_outside_the_sampling_parameters() -> None:
    params = SamplingParams()
    params.prompt_logprob_token_ids = np.zeros((2, 2), dtype=np.int64)
    assert unsupported(request(params)) == ["prompt_logprob_token_ids"]
    assert unsupported(request(SamplingParams(), lora_request=object())) == ["lora_request"]
    assert unsupported(request(SamplingParams(), prompt=[])) == ["prompts without tokens"]
    assert unsupported(request(None)) == ["pooling"]
