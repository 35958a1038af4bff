"""A tiny random Llama, and its own answers, by the library's means alone."""

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY, CONTEXT = 97, 64
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}


def tiny_llama() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        **GROUPED,
        initializer_range=0.3,  # else the two likeliest tokens are often close
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


@torch.inference_mode()
def greedy(model: Any, prompt: list[int], max_tokens: int) -> list[int]:
    """What the library generates for a prompt alone."""
    inputs = torch.tensor([prompt])
    found = model.generate(  # without the mask it would take a token 0 for padding
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    answer: list[int] = found[0, len(prompt) :].tolist()
    return answer
