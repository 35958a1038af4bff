"""Teaches the demo model not to go round in circles: sequence-level unlikelihood training.

Source: Welleck et al. 2020, "Neural Text Generation with Unlikelihood Training" (arXiv 1908.04319). The model writes
greedy answers to training prompts; each token with which it repeats a run of tokens costs -log(1 - its probability),
beside the ordinary loss. Departures: a run has 6 tokens instead of 4, because worked sums repeat short runs for good
reason, and only the token that completes the run is charged. Without this stage most greedy answers ended in a loop.
"""

import copy
import random
from collections.abc import Iterator, Sequence

import torch
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from tools.demo_model.answers import Answer, answer
from tools.demo_model.dialogues import Example, Row, chat_prompt_ids, pack
from tools.demo_model.training import ROW_TOKENS, Training, batches, logits_of, loss_of

RUN_TOKENS = 6
# The model as it then stands writes the answers of several steps at a time.
ANSWERS_PER_STEP, STEPS_WRITTEN_AHEAD = 16, 6


def unlearn_loops(
    training: Training,
    tokenizer: PreTrainedTokenizerFast,
    examples: Sequence[Example],
    rows: Iterator[Row],
    rng: random.Random,
) -> None:
    written = _written_rows(training.model, tokenizer, examples, rng)
    for _ in tqdm(range(training.steps), desc="unlearn loops", unit="step"):
        repeating = next(written)
        loss = loss_of(training.model, next(batches(rows)))
        training.step(loss + repetition_loss(training.model, repeating))


def _written_rows(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, examples: Sequence[Example], rng: random.Random
) -> Iterator[list[Row]]:
    """Endless; the answers of several steps are written at a time by the model as it then stands."""
    while True:
        writer = copy.deepcopy(model).to(torch.bfloat16)
        answers = answer(
            writer, tokenizer, rng.sample(examples, STEPS_WRITTEN_AHEAD * ANSWERS_PER_STEP), max_tokens=192
        )
        rng.shuffle(answers)
        for start in range(0, len(answers), ANSWERS_PER_STEP):
            some = answers[start : start + ANSWERS_PER_STEP]
            yield list(pack((_written_document(tokenizer, one) for one in some), ROW_TOKENS))


def _written_document(tokenizer: PreTrainedTokenizerFast, written: Answer) -> Row:
    prompt_ids = chat_prompt_ids(tokenizer, written.example.prompt)
    token_ids = prompt_ids + written.token_ids
    weights = [0.0] * len(prompt_ids) + [float(repeated) for repeated in repeats(written.token_ids)]
    return Row(token_ids=token_ids, positions=list(range(len(token_ids))), weights=weights)


def repeats(token_ids: Sequence[int]) -> list[bool]:
    """For each token, whether it completes a run of RUN_TOKENS that occurred before."""
    seen: set[tuple[int, ...]] = set()
    repeated = [False] * len(token_ids)
    for end in range(RUN_TOKENS, len(token_ids) + 1):
        run = tuple(token_ids[end - RUN_TOKENS : end])
        repeated[end - 1] = run in seen
        seen.add(run)
    return repeated


def repetition_loss(model: Qwen3ForCausalLM, rows: Sequence[Row]) -> torch.Tensor:
    """Weighted mean of -log(1 - p(token)), where the weights mark the repeating tokens; 0 if there are none.

    log(1 - p) is taken as the log of the other tokens' share, which stays finite where p rounds to 1.
    """
    token_ids = torch.tensor([row.token_ids[1:] for row in rows])
    weights = torch.tensor([row.weights[1:] for row in rows])
    logits = logits_of(model, rows)[:, :-1]
    others = logits.scatter(-1, token_ids[..., None], -torch.inf)
    losses = logits.logsumexp(-1) - others.logsumexp(-1)
    return (losses * weights).sum() / weights.sum().clamp(min=1.0)
