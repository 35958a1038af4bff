"""Models of other kinds than plain ones, without weights: their configurations, tokenizers and processors."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

DEMO_MODEL = Path(__file__).parents[1] / "deployments" / "demo_model"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
# As large as `bench.random_model` makes a Qwen3.
WIDTH_512 = {
    "hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}  # fmt: skip


def vocabulary() -> int:
    """Of the demo model, whose tokenizer they have."""
    return int(json.loads((DEMO_MODEL / "config.json").read_text())["vocab_size"])


def write(folder: Path, config: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"vocab_size": vocabulary(), **config}))
    for name in TOKENIZER_FILES:
        shutil.copy(DEMO_MODEL / name, folder)


def write_windows(folder: Path, window: int, sizes: Mapping[str, Any] = WIDTH_512, layers: int = 8) -> None:
    """A Gemma 3: the last layer attends to the whole context, the others to a sliding window."""
    config = {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "num_hidden_layers": layers,
        "sliding_window": window, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": sizes["head_dim"],
        "layer_types": ["sliding_attention"] * (layers - 1) + ["full_attention"],
    }  # fmt: skip
    write(folder, {**sizes, **config})


def write_images(
    folder: Path,
    sizes: Mapping[str, Any] = WIDTH_512,
    layers: int = 8,
    *,
    of_towers: Mapping[str, Any] = MappingProxyType({}),
    of_text: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """A BLIP-2: a vision tower of two layers before an OPT; an image is 16 tokens at the head of the prompt.

    Most others need torchvision, of which there is none for vLLM's build of torch for CPUs.

    Args:
        of_towers, of_text: further settings of the vision tower and what joins it, and of the text model.
    """
    tower = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
        **of_towers,
    }  # fmt: skip
    text = {
        "model_type": "opt", "hidden_size": sizes["hidden_size"], "word_embed_proj_dim": sizes["hidden_size"],
        "ffn_dim": sizes["intermediate_size"],
        "num_hidden_layers": layers, "num_attention_heads": sizes["num_attention_heads"],
        "max_position_embeddings": sizes["max_position_embeddings"], "vocab_size": vocabulary() + 1,
        "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0, **of_text,
    }  # fmt: skip
    config = {
        "architectures": ["Blip2ForConditionalGeneration"], "model_type": "blip-2", "torch_dtype": sizes["torch_dtype"],
        "image_token_index": vocabulary(), "num_query_tokens": 16, "use_decoder_only_language_model": True,
        "text_config": text,
        "vision_config": {**tower, "model_type": "blip_2_vision_model", "image_size": 64, "patch_size": 16},
        "qformer_config": {
            **tower, "model_type": "blip_2_qformer", "encoder_hidden_size": 64, "cross_attention_frequency": 1,
        },
        **of_towers,
    }  # fmt: skip
    write(folder, config)
    _write_processor(folder)


def _write_processor(folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    image = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer["added_tokens"].append({"id": vocabulary(), "content": "<image>", **image})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    images = {
        "image_processor_type": "BlipImageProcessor", "processor_class": "Blip2Processor",
        "size": {"height": 64, "width": 64}, "do_resize": True, "do_rescale": True, "do_normalize": True,
        "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "rescale_factor": 1 / 255, "resample": 3,
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    processor = {"processor_class": "Blip2Processor", "num_query_tokens": 16}
    (folder / "processor_config.json").write_text(json.dumps(processor))
