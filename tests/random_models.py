"""Tiny models of the kinds that people serve, with random weights that make every token hang on those before it."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from bench import model_kinds

_SPREAD = 0.3  # of weights: with those that vLLM makes itself (--load-format=dummy) all answers are one token
_SIZES = {
    "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "eos_token_id": 2,
    "torch_dtype": "float32", "initializer_range": _SPREAD,
}  # fmt: skip


def write_windows(folder: Path, window: int = 128) -> None:
    """A Gemma 3: five layers with a sliding window for one that attends to the whole context."""
    model_kinds.write_windows(folder, window, _SIZES, layers=6)
    _save_weights(folder)


def write_states(folder: Path) -> None:
    """A Granite 4: three layers of Mamba 2, which keep a state, for one of attention."""
    model_kinds.write(
        folder,
        {
            **_SIZES, "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid",
            "num_hidden_layers": 4, "layer_types": ["mamba"] * 3 + ["attention"], "hidden_act": "silu",
            "num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 256,
            "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 32, "mamba_d_conv": 4,
            "mamba_expand": 2, "mamba_chunk_size": 64, "position_embedding_type": "rope", "attention_multiplier": 0.2,
        },
    )  # fmt: skip
    _save_weights(folder)


def write_experts(folder: Path) -> None:
    """A Qwen3 of which each token asks two of four experts."""
    model_kinds.write(
        folder,
        {
            **_SIZES, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_hidden_layers": 2,
            "hidden_act": "silu", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
            "decoder_sparse_step": 1, "norm_topk_prob": True, "mlp_only_layers": [],
        },
    )  # fmt: skip
    _save_weights(folder)


def write_images(folder: Path) -> None:
    """A BLIP-2, see `bench.model_kinds`."""
    spread = {"initializer_range": _SPREAD}
    model_kinds.write_images(folder, _SIZES, layers=2, of_towers=spread, of_text={"init_std": _SPREAD})
    _save_weights(folder, AutoModelForImageTextToText)


def _save_weights(folder: Path, kind: Any = AutoModelForCausalLM) -> None:
    torch.manual_seed(1)
    kind.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
