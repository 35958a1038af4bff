"""The demo model, its loss and its optimizers.

The matrices inside the layers are trained with Muon (Jordan et al. 2024, github.com/KellerJordan/Muon), the rest with
AdamW: after 0.4 million tokens the loss on test answers was 5.36 nats, with AdamW alone 5.62.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch.nn import functional
from tqdm import tqdm
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    get_cosine_schedule_with_warmup,
)

from tools.demo_model.dialogues import CONTEXT_TOKENS, END_OF_TEXT, TURN_END, VOCABULARY_SIZE, Row

ROW_TOKENS = 1024  # holds nearly every dialogue whole


def new_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    end_of_text_id, turn_end_id = tokenizer.convert_tokens_to_ids([END_OF_TEXT, TURN_END])
    config = Qwen3Config(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=turn_end_id,
        pad_token_id=end_of_text_id,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        bos_token_id=None, eos_token_id=[turn_end_id, end_of_text_id], pad_token_id=end_of_text_id
    )
    return model


def logits_of(model: Qwen3ForCausalLM, rows: Sequence[Row]) -> torch.Tensor:
    """Shape (rows, tokens, vocabulary), float32.

    Without a cache, positions that start again from 0 make transformers mask a row's documents from each other.
    """
    token_ids = torch.tensor([row.token_ids for row in rows])
    positions = torch.tensor([row.positions for row in rows])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(input_ids=token_ids, position_ids=positions, use_cache=False).logits
    return cast(torch.Tensor, logits).float()


def loss_of(model: Qwen3ForCausalLM, rows: Sequence[Row]) -> torch.Tensor:
    """Weighted mean of the next-token losses, in nats."""
    targets = torch.tensor([row.token_ids[1:] for row in rows]).flatten()
    weights = torch.tensor([row.weights[1:] for row in rows]).flatten()
    logits = logits_of(model, rows)[:, :-1].flatten(0, 1)
    losses = functional.cross_entropy(logits, targets, reduction="none")
    return (losses * weights).sum() / weights.sum()


class Training:
    """A model under training, with its optimizers and their schedules."""

    def __init__(self, model: Qwen3ForCausalLM, steps: int, *, rate_fraction: float = 1.0) -> None:
        self.model, self.steps = model, steps
        optimizers = optimizers_of(model, rate_fraction)
        self._parts = [*optimizers, *(get_cosine_schedule_with_warmup(one, steps // 20, steps) for one in optimizers)]

    def step(self, loss: torch.Tensor) -> None:
        self.model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for part in self._parts:
            part.step()


def optimizers_of(model: Qwen3ForCausalLM, rate_fraction: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers; AdamW for the embedding and the norms' scales."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    return [
        torch.optim.Muon(matrices, lr=rate_fraction * 0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=rate_fraction * 5e-3, betas=(0.9, 0.95)),
    ]


def fit(training: Training, rows: Iterator[Row]) -> None:
    steps = itertools.islice(batches(rows), training.steps)
    progress = tqdm(steps, desc="train", unit="step", total=training.steps, mininterval=5)
    for batch in progress:
        loss = loss_of(training.model, batch)
        training.step(loss)
        progress.set_postfix(loss=f"{loss.item():.3f}", refresh=False)


def batches(rows: Iterator[Row]) -> Iterator[list[Row]]:
    while batch := list(itertools.islice(rows, 2)):
        yield batch


def mean_answer_loss(model: Qwen3ForCausalLM, dialogues: Sequence[Row]) -> float:
    """Nats per token of the answers, their ends included."""
    total, answer_tokens = 0.0, 0
    for dialogue in tqdm(dialogues, desc="loss", unit="dialogue"):
        own = [float(weight == 1.0) for weight in dialogue.weights]
        row = Row(token_ids=dialogue.token_ids, positions=dialogue.positions, weights=own)
        with torch.inference_mode():
            total += loss_of(model, [row]).item() * sum(own)
        answer_tokens += round(sum(own))
    return total / answer_tokens
