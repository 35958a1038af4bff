"""The demo model's greedy answers to test prompts, and what their lengths look like beside the references."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from tools.demo_model.dialogues import Example, chat_prompt_ids

LOOP_TOKENS = 8  # shorter runs repeat for good reason, as in sums


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the model wrote to an example's prompt, without the end token."""

    example: Example
    token_ids: list[int]
    reference_token_ids: list[int]
    ended: bool


def answer(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, examples: Sequence[Example], max_tokens: int
) -> list[Answer]:
    """Greedy, at most max_tokens each; ordered by prompt length, which saves padding."""
    ordered = sorted(examples, key=lambda example: len(example.prompt))
    batches = [ordered[start : start + 50] for start in range(0, len(ordered), 50)]
    return [one for batch in batches for one in _answer_batch(model, tokenizer, batch, max_tokens)]


def _answer_batch(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, examples: Sequence[Example], max_tokens: int
) -> list[Answer]:
    prompts = {"input_ids": [chat_prompt_ids(tokenizer, example.prompt) for example in examples]}
    inputs = tokenizer.pad(prompts, return_tensors="pt")
    with torch.inference_mode():
        generated = cast(Any, model).generate(**inputs, max_new_tokens=max_tokens, do_sample=False)
    end_ids = model.generation_config.eos_token_id
    rows = generated[:, inputs["input_ids"].shape[1] :].tolist()
    return [_answer_of(tokenizer, example, row, end_ids) for example, row in zip(examples, rows, strict=True)]


def _answer_of(
    tokenizer: PreTrainedTokenizerFast, example: Example, row: Sequence[int], end_ids: Sequence[int]
) -> Answer:
    end = next((place for place, token_id in enumerate(row) if token_id in end_ids), None)
    return Answer(
        example=example,
        token_ids=list(row[:end]),
        reference_token_ids=tokenizer.encode(example.response),
        ended=end is not None,
    )


def summary(answers: Sequence[Answer]) -> dict[str, object]:
    """Lengths in tokens as minimum, quartiles, maximum and mean; the share of answers that end by themselves."""
    return {
        "answers": len(answers),
        "generated_tokens": _spread([len(one.token_ids) for one in answers]),
        "reference_tokens": _spread([len(one.reference_token_ids) for one in answers]),
        "ended": float(np.mean([one.ended for one in answers])),
        "rank_correlation": rank_correlation(answers),
        "looping": float(np.mean([loops(one.token_ids) for one in answers])),
    }


def _spread(lengths: Sequence[int]) -> list[float]:
    return [*np.percentile(lengths, [0, 25, 50, 75, 100]).tolist(), float(np.mean(lengths))]


def loops(token_ids: Sequence[int]) -> bool:
    """Whether some run of LOOP_TOKENS tokens occurs three times or more."""
    starts = range(len(token_ids) - LOOP_TOKENS + 1)
    runs = Counter(tuple(token_ids[start : start + LOOP_TOKENS]) for start in starts)
    return max(runs.values(), default=0) >= 3


def rank_correlation(answers: Sequence[Answer]) -> float:
    """Spearman's, with average ranks for ties, of generated with reference length."""
    generated = _ranks([len(one.token_ids) for one in answers])
    reference = _ranks([len(one.reference_token_ids) for one in answers])
    return float(np.corrcoef(generated, reference)[0, 1])


def _ranks(lengths: Sequence[int]) -> npt.NDArray[np.float64]:
    _, places, counts = np.unique(lengths, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(counts) - (counts - 1) / 2)[places], dtype=np.float64)
