"""The text that the demo model learns from: examples, tokenizer, chat format, dialogues and packed rows.

The text is HaluEval's general queries (github.com/RUCAIBox/HaluEval, MIT) and GSM8K
(github.com/openai/grade-school-math, MIT), as JSON lines with `prompt` and `response`.
"""

import gzip
import json
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import BatchEncoding, PreTrainedTokenizerFast

TEXT_SETS = ("halueval_general", "gsm8k_human")
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VOCABULARY_SIZE = 4096  # a fifth of the model's five million parameters
CONTEXT_TOKENS = 2048
PROMPT_LOSS_WEIGHT = 0.5  # half as much as answers: prompts teach the language, and are not what it is to write
CALCULATOR_MARK = re.compile(r"<<[^>]*>>")

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a careful teacher. Answer the question.",
    "Answer briefly and clearly.",
    "You are a friendly assistant who explains things step by step.",
)

# The loop over a content's parts stands in a macro called with `message.content`: by that vLLM sees that lists of
# parts are taken. The `generation` block marks what the model itself writes; the loss weights come from it.
CHAT_TEMPLATE = """\
{%- macro text_of(content) -%}
{%- if content is string -%}
{{- content -}}
{%- elif content -%}
{%- for part in content -%}{%- if part.type == 'text' -%}{{- part.text -}}{%- endif -%}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.role == 'assistant' -%}
{%- generation -%}{{- text_of(message.content) + '<|im_end|>' -}}{%- endgeneration -%}
{%- else -%}
{{- text_of(message.content) + '<|im_end|>' -}}
{%- endif -%}
{{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    text_set: str
    prompt: str
    response: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Token ids and, for each of them, its place in its document and its weight in the loss."""

    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.token_ids)


def read_examples(data: Path, part: str) -> list[Example]:
    """part: "train" or "test"."""
    examples = []
    for text_set in TEXT_SETS:
        with gzip.open(data / f"{text_set}_{part}.jsonl.gz", "rt", encoding="utf-8") as lines:
            examples += [_example(text_set, json.loads(line)) for line in lines]
    return examples


def _example(text_set: str, fields: dict[str, Any]) -> Example:
    response = CALCULATOR_MARK.sub("", fields["response"])
    return Example(text_set=text_set, prompt=fields["prompt"].strip(), response=response.strip())


def train_tokenizer(examples: Iterable[Example]) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    roles = ["system\n", "user\n", "assistant\n"]
    bpe.train_from_iterator([*SYSTEM_PROMPTS, *roles, *(f"{e.prompt}\n{e.response}" for e in examples)], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[TURN_START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT_TOKENS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def chat_prompt_ids(tokenizer: PreTrainedTokenizerFast, prompt: str) -> list[int]:
    """A dialogue's first user turn and the header of the answer."""
    messages = [{"role": "user", "content": prompt}]
    encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    return list(cast(BatchEncoding, encoded)["input_ids"])


def encode_dialogue(
    tokenizer: PreTrainedTokenizerFast, examples: Sequence[Example], system_prompt: str | None = None
) -> Row:
    messages = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    for example in examples:
        messages.append({"role": "user", "content": example.prompt})
        messages.append({"role": "assistant", "content": example.response})
    encoded = cast(
        BatchEncoding, tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    )
    return _document(encoded["input_ids"], [bool(own) for own in encoded["assistant_masks"]])


def encode_plain(tokenizer: PreTrainedTokenizerFast, example: Example) -> Row:
    """Without the chat format, for completions of plain text."""
    prompt_ids = tokenizer.encode(example.prompt + "\n")
    response_ids = tokenizer.encode(example.response + END_OF_TEXT)
    return _document(prompt_ids + response_ids, [False] * len(prompt_ids) + [True] * len(response_ids))


def _document(token_ids: list[int], answers: Sequence[bool]) -> Row:
    weights = [1.0 if answer else PROMPT_LOSS_WEIGHT for answer in answers]
    return Row(token_ids=token_ids, positions=list(range(len(token_ids))), weights=weights)


def documents(tokenizer: PreTrainedTokenizerFast, examples: Sequence[Example], rng: random.Random) -> Iterator[Row]:
    """Endless: pass after pass over the examples, each time shuffled and joined into other dialogues."""
    while True:
        shuffled = rng.sample(examples, len(examples))
        while shuffled:
            turns = min(rng.choice((1, 1, 1, 2, 4)), len(shuffled))
            yield _random_document(tokenizer, [shuffled.pop() for _ in range(turns)], rng)


def _random_document(tokenizer: PreTrainedTokenizerFast, examples: Sequence[Example], rng: random.Random) -> Row:
    if len(examples) == 1 and rng.random() < 1 / 8:
        return encode_plain(tokenizer, examples[0])
    system_prompt = rng.choice(SYSTEM_PROMPTS) if rng.random() < 1 / 3 else None
    return encode_dialogue(tokenizer, examples, system_prompt)


def pack(stream: Iterable[Row], row_tokens: int) -> Iterator[Row]:
    """Rows of exactly row_tokens: whole documents (cut only where longer than a row), then padding of weight 0."""
    row = Row()
    for document in stream:
        if row and len(row) + len(document) > row_tokens:
            yield _padded(row, row_tokens)
            row = Row()
        row.token_ids.extend(document.token_ids[:row_tokens])
        row.positions.extend(document.positions[:row_tokens])
        row.weights.extend(document.weights[:row_tokens])
    if row:
        yield _padded(row, row_tokens)


def _padded(row: Row, row_tokens: int) -> Row:
    missing = row_tokens - len(row)
    return Row(
        token_ids=row.token_ids + [0] * missing,
        positions=row.positions + [0] * missing,
        weights=row.weights + [0.0] * missing,
    )
