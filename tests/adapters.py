"""LoRA adapters over the attention of a model, as PEFT writes them, with weights drawn by chance."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

RANK = 8


def write_adapter(folder: Path, model: Path, *, strength: float) -> Path:
    """An adapter of strength 0 changes nothing."""
    config = json.loads(Path(model, "config.json").read_text())
    hidden, head = config["hidden_size"], config["head_dim"]
    widths = {"q_proj": config["num_attention_heads"] * head, "v_proj": config["num_key_value_heads"] * head}
    chance = torch.Generator().manual_seed(1)
    weights: dict[str, torch.Tensor] = {}
    for layer in range(config["num_hidden_layers"]):
        for name, width in widths.items():
            path = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{path}.lora_A.weight"] = torch.randn(RANK, hidden, generator=chance) / hidden**0.5
            weights[f"{path}.lora_B.weight"] = torch.randn(width, RANK, generator=chance) * strength
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": list(widths), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder
