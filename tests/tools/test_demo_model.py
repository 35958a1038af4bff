"""The pieces of the script that trains the demo model."""

import gzip
import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, Qwen3ForCausalLM

from deployments.config.model import DEMO_MODEL
from tools.demo_model import answers, dialogues, loops, training

pytestmark = pytest.mark.slow  # loading torch and a model takes seconds


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DEMO_MODEL)


def _example(prompt: str, response: str) -> dialogues.Example:
    return dialogues.Example(text_set="gsm8k_human", prompt=prompt, response=response)


EXAMPLES = tuple(_example(f"How much is {n} and {n}?", f"It is {2 * n}." * n) for n in range(1, 9))


def test_calculator_marks_are_taken_out_of_the_text(tmp_path: Path) -> None:
    line = {"prompt": " How many? ", "response": "3 + 4 = <<3+4=7>>7\n#### 7"}
    for text_set in dialogues.TEXT_SETS:
        with gzip.open(tmp_path / f"{text_set}_test.jsonl.gz", "wt", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    examples = dialogues.read_examples(tmp_path, "test")
    assert [one.response for one in examples] == ["3 + 4 = 7\n#### 7"] * 2
    assert [one.prompt for one in examples] == ["How many?"] * 2


def test_answers_and_their_ends_weigh_one_and_prompts_less(tokenizer: Any) -> None:
    document = dialogues.encode_dialogue(tokenizer, EXAMPLES[:2], "Be brief.")
    own = [token for token, weight in zip(document.token_ids, document.weights, strict=True) if weight == 1.0]
    assert tokenizer.decode(own) == "It is 2.<|im_end|>It is 4.It is 4.<|im_end|>"
    assert set(document.weights) == {1.0, dialogues.PROMPT_LOSS_WEIGHT}


def test_plain_text_ends_with_the_end_of_text(tokenizer: Any) -> None:
    document = dialogues.encode_plain(tokenizer, EXAMPLES[0])
    assert tokenizer.decode(document.token_ids) == "How much is 1 and 1?\nIt is 2.<|endoftext|>"
    assert document.weights[-1] == 1.0


def test_rows_hold_whole_documents_and_have_one_length(tokenizer: Any) -> None:
    stream = dialogues.documents(tokenizer, EXAMPLES, random.Random(0))
    for row in itertools.islice(dialogues.pack(stream, 512), 20):
        assert len(row.token_ids) == len(row.positions) == len(row.weights) == 512
        assert row.positions[0] == 0
        assert row.weights[-1] in (0.0, dialogues.PROMPT_LOSS_WEIGHT, 1.0)


def test_a_document_longer_than_a_row_is_cut() -> None:
    long = dialogues.Row(token_ids=[7] * 10, positions=list(range(10)), weights=[1.0] * 10)
    rows = dialogues.pack([dialogues.Row(token_ids=[5], positions=[0], weights=[1.0]), long, long], 4)
    assert [row.token_ids for row in rows] == [[5, 0, 0, 0], [7, 7, 7, 7], [7, 7, 7, 7]]


def test_documents_in_one_row_do_not_see_each_other(tokenizer: Any) -> None:
    torch.manual_seed(0)
    model = training.new_model(tokenizer)
    first, second = (dialogues.encode_dialogue(tokenizer, [example]) for example in EXAMPLES[:2])
    row = next(dialogues.pack([first, second, first], len(first) + len(second)))
    with torch.inference_mode():
        packed = training.logits_of(model, [row])[0, len(first) :]
        alone = training.logits_of(model, [second])[0]
    torch.testing.assert_close(packed, alone, atol=0.05, rtol=0.0)
    assert alone.abs().max() > 0.5


def _small_model(tokenizer: Any) -> Any:
    """A small model of the same kind: Muon's bfloat16 takes seconds a step on many processors."""
    config = training.new_model(tokenizer).config
    config.update({"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64})
    config.layer_types = config.layer_types[:1]
    return Qwen3ForCausalLM(config)


def test_training_lowers_the_loss(tokenizer: Any) -> None:
    torch.manual_seed(0)
    rows = list(itertools.islice(dialogues.pack(dialogues.documents(tokenizer, EXAMPLES, random.Random(0)), 64), 8))
    fresh = training.Training(_small_model(tokenizer), steps=4)
    before = training.loss_of(fresh.model, rows)
    training.fit(fresh, iter(rows))
    assert training.loss_of(fresh.model, rows) < before


def test_a_token_repeats_when_it_completes_a_run_seen_before() -> None:
    run = list(range(loops.RUN_TOKENS))
    assert loops.repeats([*run, 50, *run]) == [False] * (2 * loops.RUN_TOKENS) + [True]
    assert loops.repeats([8] * (loops.RUN_TOKENS + 2)) == [False] * loops.RUN_TOKENS + [True] * 2
    assert loops.repeats(run[:2]) == [False] * 2


def test_the_repetition_loss_makes_the_marked_token_less_probable(tokenizer: Any) -> None:
    torch.manual_seed(0)
    fresh = training.Training(_small_model(tokenizer), steps=40)
    row = dialogues.Row(token_ids=[5, 6, 7, 8], positions=[0, 1, 2, 3], weights=[0.0, 0.0, 1.0, 0.0])
    before = loops.repetition_loss(fresh.model, [row])
    for _ in range(5):
        fresh.step(loops.repetition_loss(fresh.model, [row]))
    assert loops.repetition_loss(fresh.model, [row]) < before


def test_the_repetition_loss_is_zero_without_repeats(tokenizer: Any) -> None:
    row = dialogues.Row(token_ids=[5, 6, 7], positions=[0, 1, 2], weights=[0.0] * 3)
    assert loops.repetition_loss(training.new_model(tokenizer), [row]).item() == 0.0


def test_a_run_of_tokens_three_times_over_is_a_loop() -> None:
    run = list(range(answers.LOOP_TOKENS))
    assert answers.loops(run + [90] + run + [91] + run)
    assert not answers.loops(run + [90] + run)
    assert not answers.loops(run[:3])


@pytest.mark.parametrize(("generated", "correlation"), [((1, 2, 3), 1.0), ((3, 2, 1), -1.0), ((5, 7, 5), 0.0)])
def test_rank_correlation_compares_generated_with_reference_lengths(
    generated: tuple[int, ...], correlation: float
) -> None:
    written = [
        answers.Answer(example=EXAMPLES[0], token_ids=[9] * length, reference_token_ids=[9] * place, ended=True)
        for place, length in enumerate(generated, start=10)
    ]
    assert answers.rank_correlation(written) == pytest.approx(correlation)
