"""A trained predictor on disk, and in memory ready to score prompts.

A folder holds `model.safetensors` (adapter and linear layer, half precision), `config.json` (how to read them and which
base they belong to) and `calibration.json` (the curve to start from). The base encoder is not in it.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Self

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from policies.errors import ConfigError
from policies.types import FloatArray
from predictor.calibration import CALIBRATION_FILE, Curve
from predictor.model import Encoder, Weights, base_folder, deltas, head
from predictor.packed import token_batches
from predictor.tokens import PromptTokenizer

WEIGHTS_FILE, CONFIG_FILE = "model.safetensors", "config.json"
KEPT_EXACT = ("features.mean", "features.scale", "head.bias")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """What it takes to read the weights."""

    base: str
    layers: int | None
    max_tokens: int


def save(folder: Path, weights: Weights, config: CheckpointConfig, curve: Curve) -> None:
    """Writes all three files, each moved into place when complete."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = {
        name: weight.detach().cpu().to(torch.float32 if name in KEPT_EXACT else torch.float16).contiguous()
        for name, weight in weights.items()
    }
    new = folder / f"{WEIGHTS_FILE}.new"
    save_file(stored, new)
    new.replace(folder / WEIGHTS_FILE)
    for name, text in {
        CONFIG_FILE: json.dumps(asdict(config), indent=2) + "\n",
        CALIBRATION_FILE: json.dumps(curve.to_dict(), indent=2) + "\n",
    }.items():
        new = folder / f"{name}.new"
        new.write_text(text, encoding="utf-8")
        new.replace(folder / name)


class Ranker:
    """Scores prompts, many at a time, packed."""

    def __init__(self, weights: Weights, config: CheckpointConfig, curve: Curve, device: str, dtype: str) -> None:
        folder = base_folder(config.base)
        self.config, self.curve = config, curve
        self.encoder = Encoder(folder, config.layers, device, getattr(torch, dtype))
        self.tokenizer = PromptTokenizer(folder, min(config.max_tokens, self.encoder.max_tokens))
        self._weights = {name: weight.float().to(device) for name, weight in weights.items()}
        self.encoder.merge(deltas(self._weights))

    @classmethod
    def load(cls, folder: Path, device: str = "cpu", dtype: Literal["auto", "float32", "bfloat16"] = "float32") -> Self:
        """Raises ConfigError when the folder holds no checkpoint or its base is missing."""
        if dtype == "auto":
            dtype = "bfloat16" if device != "cpu" or torch.cpu._is_avx512_bf16_supported() else "float32"
        try:
            config = CheckpointConfig(**json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8")))
            curve = Curve.read(folder)
            weights = load_file(folder / WEIGHTS_FILE)
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise ConfigError(f"{folder} holds no predictor checkpoint: {error}") from error
        return cls(weights, config, curve, device, dtype)

    def scores(self, prompts: Sequence[str]) -> FloatArray:
        """One score for each prompt."""
        return self.outputs(self.tokenizer.encode(prompts))[:, 0]

    def outputs(self, prompts: Sequence[list[int]], max_batch_tokens: int = 4096) -> FloatArray:
        """Scores of tokenized prompts, shape (n, 1)."""
        outputs = np.empty((len(prompts), 1))
        with torch.inference_mode():
            for batch in token_batches([len(prompt) for prompt in prompts], max_batch_tokens):
                features = self.encoder.features(self.encoder.pack([prompts[index] for index in batch]))
                outputs[batch] = head(self._weights, features).cpu().numpy()
        return outputs
