"""The demo model's card: where the text comes from, how it was trained, what was measured."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from deployments.demo_model.answers import LOOP_TOKENS, MAX_ANSWER_TOKENS, Answer, loops, rank_correlation
from deployments.demo_model.dialogues import MAX_TURNS, PROMPT_LOSS_WEIGHT, TEXT_SETS

ORIGINS = {
    "halueval_general": "[HaluEval](https://github.com/RUCAIBox/HaluEval), general queries",
    "gsm8k_human": "[GSM8K](https://github.com/openai/grade-school-math)",
}

TEMPLATE = """\
---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
tags: [demo, testing]
---

# Sluice demo model

A chat model of {parameters:,} parameters that ends its answers by itself, at lengths that depend on the prompt.
It is there to exercise serving, binning and length prediction on natural ends, on any machine and within seconds.
**Its answers are mostly wrong.** Use it for tests and demonstrations of serving, and for nothing else.

- Architecture: `Qwen3ForCausalLM`, bfloat16, tied embeddings; sizes in `config.json`.
- Tokenizer: byte-level BPE of its own, trained on the same text.
- Chat format: ChatML (`<|im_start|>role`, `<|im_end|>`) with system turns, several turns, and contents given as text
  or as lists of text parts. No tools.
- Ends: `<|im_end|>` after a chat turn, `<|endoftext|>` after plain text; both stand in `generation_config.json`.

## Data

| set | origin | licence | training examples | test examples |
|---|---|---|---|---|
{sets}

The answers of HaluEval's general queries were written by ChatGPT (2023), whose terms may limit the training of
competing models; those of GSM8K were written by people. GSM8K's calculator marks (`<<21-7=14>>`) were taken out.
No prompt is in both parts. The training part has {prompt_tokens:,} prompt tokens and {answer_tokens:,} answer tokens.
Three fifths of the dialogues have one turn, one fifth two, one fifth {max_turns}; a third begin with a system prompt,
and an eighth of the single examples are shown as plain text without the chat format.

## Training

{steps:,} steps of {step_tokens:,} tokens in {minutes[0]:.0f} minutes, then {loop_steps:,} steps of unlikelihood
training against loops (arXiv 1908.04319) in {minutes[1]:.0f} minutes; {threads} CPU thread(s), bfloat16 autocast. Muon
for the matrices inside the layers, AdamW for the rest, cosine schedule with warm-up, seed {seed}. Prompts count
{prompt_weight} in the loss, answers and their ends 1. Rows of {row_tokens:,} tokens, their documents masked from each
other: longer contexts than that were never seen in training.

    python -m deployments.demo_model.train --data DIR --out DIR --steps {steps} --loop-steps {loop_steps} \\
        --seed {seed} --threads {threads}

`DIR` holds `NAME_train.jsonl.gz` and `NAME_test.jsonl.gz` for each set, one object a line, with
`prompt` and `response`.

## Measured

Loss per answer token, ends included, in nats: {train_loss:.2f} on training examples, {test_loss:.2f} on test examples.

Greedy answers (transformers, bfloat16) to {answers} test prompts, cut at {max_answer_tokens} tokens; lengths in tokens:

| | min | quartile 1 | median | quartile 3 | max | mean |
|---|---|---|---|---|---|---|
{lengths}

| | answers | end by themselves | rank correlation | looping |
|---|---|---|---|---|
{quality}

Rank correlation: Spearman's, of the generated with the reference's length. Looping: some run of {loop_tokens} tokens
occurs three times or more.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRecord:
    parameters: int
    train_examples: Mapping[str, int]
    test_examples: Mapping[str, int]
    prompt_tokens: int
    answer_tokens: int
    steps: int
    loop_steps: int
    step_tokens: int
    row_tokens: int
    elapsed_s: Sequence[float]
    threads: int
    seed: int
    train_loss: float
    test_loss: float


def render(record: TrainingRecord, answers: Sequence[Answer]) -> str:
    groups = {"all": answers} | {name: [one for one in answers if one.example.text_set == name] for name in TEXT_SETS}
    return TEMPLATE.format(
        sets="\n".join(_set_row(record, name) for name in TEXT_SETS),
        lengths="\n".join(_length_rows(name, group) for name, group in groups.items()),
        quality="\n".join(_quality_row(name, group) for name, group in groups.items()),
        minutes=[elapsed_s / 60 for elapsed_s in record.elapsed_s],
        answers=len(answers),
        max_turns=MAX_TURNS,
        prompt_weight=PROMPT_LOSS_WEIGHT,
        max_answer_tokens=MAX_ANSWER_TOKENS,
        loop_tokens=LOOP_TOKENS,
        **asdict(record),
    )


def _set_row(record: TrainingRecord, name: str) -> str:
    return f"| {name} | {ORIGINS[name]} | MIT | {record.train_examples[name]:,} | {record.test_examples[name]:,} |"


def _length_rows(name: str, answers: Sequence[Answer]) -> str:
    generated = _spread([len(one.token_ids) for one in answers])
    reference = _spread([len(one.reference_token_ids) for one in answers])
    return f"| {name}, generated | {generated} |\n| {name}, reference | {reference} |"


def _spread(lengths: Sequence[int]) -> str:
    quantiles = np.percentile(lengths, [0, 25, 50, 75, 100])
    return " | ".join(f"{value:.0f}" for value in (*quantiles, np.mean(lengths)))


def _quality_row(name: str, answers: Sequence[Answer]) -> str:
    ended = np.mean([one.ended for one in answers])
    looping = np.mean([loops(one.token_ids) for one in answers])
    return f"| {name} | {len(answers)} | {ended:.1%} | {rank_correlation(answers):.2f} | {looping:.1%} |"
