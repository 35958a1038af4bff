"""Trains the adapter and the linear layer on prompts and lengths.

Source: paper 000, appendix C.1 (L1 on the output length, loss "l1"). Departures:

* The default loss is L1 on the logarithm of the length: lengths spread over decades, and bins are equally likely, not
  equally wide.
* Each model that answered has an offset of its own, trained along and then left out: which model answers is no
  property of a prompt, and at serving time the calibrator learns it. What remains is a rank of prompts.
* An answer cut at its limit counts only where the prediction falls short of it.

A run that is interrupted goes on where it was when started again with the same configuration and data.
"""

import copy
import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from tqdm import tqdm

from policies.checks import require_at_least, require_one_of, require_positive, require_probability
from policies.errors import ConfigError, InputError
from predictor.calibration import CalibratorConfig, Curve, fit_curve
from predictor.checkpoint import CheckpointConfig
from predictor.model import DEFAULT_BASE, Encoder, Weights, base_folder, deltas, head, new_weights
from predictor.packed import token_batches
from predictor.samples import Sample, split_by_prompt
from predictor.tokens import PromptTokenizer

STATE_FILE = "training.pt"
FROZEN = ("features.mean", "features.scale")
# What both prompts and models could explain is left to the prompts: where each model answered prompts of its own, a
# free offset would take the difference between the prompts away from the score.
OFFSET_PENALTY = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """How a predictor is trained; everything that a run depends on besides its data."""

    base: str = DEFAULT_BASE
    layers: int | None = None
    max_tokens: int = 128
    loss: Literal["log_l1", "l1"] = "log_l1"
    adapter_rank: int = 16
    epochs: int = 3
    tokens_per_step: int = 2048
    adapter_learning_rate: float = 7e-4
    head_learning_rate: float = 1e-3
    patience: int = 2
    held_out_fraction: float = 0.08
    seed: int = 20261120
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        require_at_least(1, self, "epochs", "patience")
        require_at_least(0, self, "adapter_rank")
        require_at_least(2, self, "max_tokens", "tokens_per_step")
        require_positive(self, "adapter_learning_rate", "head_learning_rate")
        require_probability(self, "held_out_fraction")
        require_one_of(("log_l1", "l1"), self, "loss")
        require_one_of(("float32", "bfloat16"), self, "dtype")


@dataclass(frozen=True, slots=True, eq=False)
class Answers:
    """Prompts as tokens, each once, and all their answers; `owner` is the prompt of an answer."""

    prompts: list[list[int]]
    owner: torch.Tensor
    target: torch.Tensor
    model: torch.Tensor
    is_cut: torch.Tensor

    def of(self, prompt_indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Answers of these prompts, and for each its prompt's place among them."""
        place = torch.full((len(self.prompts),), -1)
        place[torch.tensor(prompt_indices)] = torch.arange(len(prompt_indices))
        chosen = (place[self.owner] >= 0).nonzero()[:, 0]
        return chosen, place[self.owner[chosen]]


class Training:
    """One run; `weights` are the best so far once `run` is over."""

    def __init__(self, samples: Sequence[Sample], config: TrainingConfig) -> None:
        """Raises InputError when there are too few samples to hold some out, ConfigError for a wrong base."""
        self.config = config
        folder = base_folder(config.base)
        self.encoder = Encoder(folder, config.layers, config.device, getattr(torch, config.dtype))
        self._tokenizer = PromptTokenizer(folder, min(config.max_tokens, self.encoder.max_tokens))
        kept, held = split_by_prompt(samples, config.held_out_fraction, config.seed)
        if not kept or not held:
            raise InputError(f"{len(samples)} samples are too few to hold {config.held_out_fraction:.0%} out")
        self.models = sorted({sample.model for sample in kept})
        self._held_samples = held
        self._unit = float(np.median([sample.output_tokens for sample in kept]))
        self._learnt, self._held = self._answers(kept), self._answers(held)
        self.weights = new_weights(self.encoder, config.adapter_rank, config.seed)
        self._offsets = torch.zeros(len(self.models) + 1)
        self._start_from(self._learnt)
        self._fingerprint = _fingerprint(config, samples)
        self.losses: list[float] = []

    def _answers(self, samples: Sequence[Sample]) -> Answers:
        index = {prompt: number for number, prompt in enumerate(dict.fromkeys(s.prompt for s in samples))}
        number_of = {model: number for number, model in enumerate(self.models)}
        lengths = torch.tensor([sample.output_tokens for sample in samples])
        return Answers(
            prompts=self._tokenizer.encode(list(index)),
            owner=torch.tensor([index[sample.prompt] for sample in samples]),
            target=lengths.log() if self.config.loss == "log_l1" else lengths / self._unit,
            model=torch.tensor([number_of.get(sample.model, len(self.models)) for sample in samples]),
            is_cut=torch.tensor([sample.is_cut for sample in samples]),
        )

    def _start_from(self, answers: Answers) -> None:
        """Scale features by about a thousand prompts, and let the first score be the median."""
        stride = max(1, len(answers.prompts) // 1024)
        features = torch.cat([features for _, features in self._features(answers.prompts[::stride])])
        self.weights["features.mean"] = features.mean(0)
        self.weights["features.scale"] = features.std(0).clamp(min=1e-3)
        self.weights["head.bias"] += answers.target.median()

    def _features(self, prompts: list[list[int]]) -> Iterator[tuple[list[int], torch.Tensor]]:
        """Indices of some prompts and their features, without gradients, until all had their turn."""
        with torch.no_grad():
            adapter = deltas(self.weights)
            for batch in token_batches([len(prompt) for prompt in prompts], self.config.tokens_per_step):
                yield batch, self.encoder.features(self.encoder.pack([prompts[i] for i in batch]), adapter)

    def run(self, out: Path) -> None:
        """Train, saving the state now and then in `out`, until the epochs are over or nothing improves."""
        trained = [weight for name, weight in self.weights.items() if name not in FROZEN]
        for tensor in (*trained, self._offsets):
            tensor.requires_grad_()
        optimizer = torch.optim.AdamW(self._groups(), weight_decay=0.01)
        state = self._resume(out, optimizer)
        cached = self._frozen_features() if not self.config.adapter_rank else None
        while state["epoch"] < self.config.epochs and state["bad_epochs"] < self.config.patience:
            self._epoch(state, optimizer, cached, out)
        self.weights = state["best"]
        (out / STATE_FILE).unlink(missing_ok=True)

    def _groups(self) -> list[dict[str, Any]]:
        adapter = [weight for name, weight in self.weights.items() if name.startswith(("up.", "down."))]
        linear = [self.weights["head.weight"], self.weights["head.bias"]]
        rate = self.config.head_learning_rate
        groups = [
            {"params": linear, "lr": rate},
            {"params": [self._offsets], "lr": 0.03, "weight_decay": 0.0},
        ]
        if adapter:
            groups.append({"params": adapter, "lr": self.config.adapter_learning_rate})
        return [group | {"peak": group["lr"]} for group in groups]

    def _frozen_features(self) -> torch.Tensor:
        """Without an adapter the features never change: computed once, shape (prompts, 2 * width + 1)."""
        features = torch.empty(len(self._learnt.prompts), len(self.weights["features.mean"]))
        progress = tqdm(total=len(features), desc="features", unit="prompt")
        for batch, found in self._features(self._learnt.prompts):
            features[batch] = found.cpu()
            progress.update(len(batch))
        progress.close()
        return features.to(self.config.device)

    def _epoch(self, state: dict[str, Any], optimizer: Any, cached: torch.Tensor | None, out: Path) -> None:
        batches = self._shuffled(state["epoch"])
        progress = tqdm(total=len(batches), initial=state["step"], desc=f"epoch {state['epoch'] + 1}", unit="step")
        for step in range(state["step"], len(batches)):
            self._set_rates(optimizer, (state["epoch"] + step / len(batches)) / self.config.epochs)
            loss = self._step(batches[step], optimizer, cached)
            state["loss"] = 0.98 * state["loss"] + 0.02 * loss if state["loss"] else loss
            state["step"] = step + 1
            progress.set_postfix(loss=f"{state['loss']:.4f}", refresh=False)
            progress.update()
            if state["step"] % 50 == 0:
                self._save(state, optimizer, out)
        self._end_epoch(state, progress)
        self._save(state, optimizer, out)

    def _end_epoch(self, state: dict[str, Any], progress: Any) -> None:
        held_loss = self.held_loss()
        state["losses"].append(held_loss)
        improved = held_loss < state["best_loss"]
        state["bad_epochs"] = 0 if improved else state["bad_epochs"] + 1
        if improved:
            state["best_loss"], state["best"] = held_loss, _detached(self.weights)
        state["epoch"], state["step"] = state["epoch"] + 1, 0
        self.losses = state["losses"]
        progress.set_postfix(loss=f"{state['loss']:.4f}", held_out=f"{held_loss:.4f}")
        progress.close()

    def _shuffled(self, epoch: int) -> list[list[int]]:
        """Batches of prompts in an order that seed and epoch decide."""
        order = np.random.default_rng((self.config.seed, epoch)).permutation(len(self._learnt.prompts)).tolist()
        batches: list[list[int]] = [[]]
        tokens = 0
        for index in order:
            length = len(self._learnt.prompts[index])
            if batches[-1] and tokens + length > self.config.tokens_per_step:
                batches.append([])
                tokens = 0
            batches[-1].append(index)
            tokens += length
        return batches

    def _set_rates(self, optimizer: Any, progress: float) -> None:
        """A twentieth of the run warms up, then a cosine ends it."""
        factor = min(1.0, 20.0 * progress + 0.01) * 0.5 * (1.0 + math.cos(math.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * factor

    def _step(self, batch: list[int], optimizer: Any, cached: torch.Tensor | None) -> float:
        if cached is None:
            packed = self.encoder.pack([self._learnt.prompts[index] for index in batch])
            features = self.encoder.features(packed, deltas(self.weights))
        else:
            features = cached[batch]
        loss = self._loss(self._learnt, batch, head(self.weights, features).cpu())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1.0)
        optimizer.step()
        return float(loss.detach())

    def _loss(self, answers: Answers, batch: list[int], outputs: torch.Tensor) -> torch.Tensor:
        """Mean over answers of |target - prediction|."""
        chosen, place = answers.of(batch)
        error = answers.target[chosen] - outputs[place, 0] - self._offsets[answers.model[chosen]]
        error = torch.where(answers.is_cut[chosen], error.clamp(min=0.0), error)
        return error.abs().mean() + OFFSET_PENALTY * self._offsets[answers.model[chosen]].square().mean()

    def curve(self) -> Curve:
        """The held-out answers' curve, for the time before a served model has one of its own."""
        scores = torch.empty(len(self._held.prompts))
        for batch, features in self._features(self._held.prompts):
            scores[batch] = head(self.weights, features)[:, 0].cpu()
        tokens = [sample.output_tokens for sample in self._held_samples]
        is_cut = [sample.is_cut for sample in self._held_samples]
        return fit_curve(scores[self._held.owner].tolist(), tokens, is_cut, CalibratorConfig())

    def checkpoint_config(self) -> CheckpointConfig:
        return CheckpointConfig(base=self.config.base, layers=self.config.layers, max_tokens=self.config.max_tokens)

    def summary(self) -> str:
        losses = ", ".join(f"{loss:.4f}" for loss in self.losses)
        return f"{len(self._learnt.owner)} answers learnt, loss on {len(self._held.owner)} held out by epoch: {losses}"

    def held_loss(self) -> float:
        """Loss per answer on the prompts held out."""
        total = 0.0
        with torch.no_grad():
            for batch, features in self._features(self._held.prompts):
                answers = len(self._held.of(batch)[0])
                total += answers * float(self._loss(self._held, batch, head(self.weights, features).cpu()))
        return total / len(self._held.owner)

    def _save(self, state: dict[str, Any], optimizer: Any, out: Path) -> None:
        live = {"weights": _detached(self.weights), "offsets": self._offsets.detach(), "of": self._fingerprint}
        torch.save(state | live | {"optimizer": optimizer.state_dict()}, out / f"{STATE_FILE}.new")
        (out / f"{STATE_FILE}.new").replace(out / STATE_FILE)

    def _resume(self, out: Path, optimizer: Any) -> dict[str, Any]:
        """The state saved in `out`, or a new one.

        Raises:
            ConfigError: what is saved there belongs to another configuration or other data.
        """
        fresh = {"epoch": 0, "step": 0, "loss": 0.0, "best_loss": math.inf, "bad_epochs": 0, "losses": []}
        fresh["best"] = _detached(self.weights)
        if not (out / STATE_FILE).exists():
            return fresh
        saved: dict[str, Any] = torch.load(out / STATE_FILE, map_location=self.config.device, weights_only=True)
        if saved["of"] != self._fingerprint:
            raise ConfigError(f"{out / STATE_FILE} is of another run: remove it, or choose another folder")
        with torch.no_grad():
            self._offsets.copy_(saved["offsets"])
            for name, weight in self.weights.items():
                weight.copy_(saved["weights"][name])
        optimizer.load_state_dict(saved["optimizer"])
        self.losses = saved["losses"]
        return {name: saved[name] for name in fresh}


def _detached(weights: Weights) -> Weights:
    return {name: copy.deepcopy(weight.detach()) for name, weight in weights.items()}


def _fingerprint(config: TrainingConfig, samples: Sequence[Sample]) -> str:
    digest = hashlib.blake2b(json.dumps(asdict(config)).encode(), digest_size=16)
    for sample in samples:
        digest.update(f"{sample.prompt}\0{sample.output_tokens}\0{sample.is_cut}\0{sample.model}".encode())
    return digest.hexdigest()
