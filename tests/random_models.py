"""Tiny models of the kinds that people serve, with random weights that make every token hang on those before it."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from bench.random_model import DEMO_MODEL, TOKENIZER_FILES

_SPREAD = 0.3  # of weights: with those that vLLM makes itself (--load-format=dummy) all answers are one token
_SIZES = {
    "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "eos_token_id": 2,
    "torch_dtype": "float32", "initializer_range": _SPREAD,
}  # fmt: skip


def write_windows(folder: Path, window: int = 128) -> None:
    """A Gemma 3: five layers with a sliding window for one that attends to the whole context."""
    _write(
        folder,
        {
            **_SIZES, "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "num_hidden_layers": 6,
            "sliding_window": window, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 32,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        },
    )  # fmt: skip
    _save_weights(folder)


def write_states(folder: Path) -> None:
    """A Granite 4: three layers of Mamba 2, which keep a state, for one of attention."""
    _write(
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


def write_images(folder: Path) -> None:
    """A BLIP-2: a vision tower of two layers before an OPT; an image is 16 tokens at the head of the prompt.

    Most others need torchvision, of which there is none for this build of torch.
    """
    vocabulary = json.loads((DEMO_MODEL / "config.json").read_text())["vocab_size"]
    tower = {
        "initializer_range": _SPREAD,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    _write(
        folder,
        {
            "architectures": ["Blip2ForConditionalGeneration"], "model_type": "blip-2", "torch_dtype": "float32",
            "image_token_index": vocabulary, "num_query_tokens": 16, "use_decoder_only_language_model": True,
            "text_config": {
                "model_type": "opt", "init_std": _SPREAD, "hidden_size": 128, "word_embed_proj_dim": 128,
                "ffn_dim": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 2048,
                "vocab_size": vocabulary + 1, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0,
            },
            "vision_config": {**tower, "model_type": "blip_2_vision_model", "image_size": 64, "patch_size": 16},
            "initializer_range": _SPREAD,
            "qformer_config": {
                **tower, "model_type": "blip_2_qformer", "encoder_hidden_size": 64, "cross_attention_frequency": 1,
            },
        },
    )  # fmt: skip
    _save_weights(folder, AutoModelForImageTextToText)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    image = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer["added_tokens"].append({"id": vocabulary, "content": "<image>", **image})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    images = {
        "image_processor_type": "BlipImageProcessor", "processor_class": "Blip2Processor",
        "size": {"height": 64, "width": 64}, "do_resize": True, "do_rescale": True, "do_normalize": True,
        "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "rescale_factor": 1 / 255, "resample": 3,
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    processor = {"processor_class": "Blip2Processor", "num_query_tokens": 16}
    (folder / "processor_config.json").write_text(json.dumps(processor))


def _save_weights(folder: Path, kind: Any = AutoModelForCausalLM) -> None:
    torch.manual_seed(1)
    kind.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)


def _write(folder: Path, config: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = json.loads((DEMO_MODEL / "config.json").read_text())["vocab_size"]
    (folder / "config.json").write_text(json.dumps({"vocab_size": vocabulary} | config))
    for name in TOKENIZER_FILES:
        shutil.copy(DEMO_MODEL / name, folder)
