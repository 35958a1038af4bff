"""The demo model's folder as engines load it, and the pieces of the script that makes it."""

import gzip
import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, Qwen3ForCausalLM

from deployments.demo_model import answers, dialogues, loops, training

pytestmark = pytest.mark.slow  # loading torch and a model takes seconds

MODEL = Path(training.__file__).parent
LOADED_FILES = (
    "README.md",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
PROMPTS = ("Name three animals that can swim.", "Tom has 3 apples and buys 4 more. How many apples does he have?")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(MODEL)


def _example(prompt: str, response: str) -> dialogues.Example:
    return dialogues.Example(text_set="gsm8k_human", prompt=prompt, response=response)


EXAMPLES = tuple(_example(f"How much is {n} and {n}?", f"It is {2 * n}." * n) for n in range(1, 9))


def _render(tokenizer: Any, messages: list[dict[str, Any]]) -> str:
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert isinstance(rendered, str)
    return rendered


def test_the_folder_is_complete_and_under_12_megabytes() -> None:
    assert sum((MODEL / name).stat().st_size for name in LOADED_FILES) < 12_000_000


def test_the_model_has_about_five_million_parameters_in_bfloat16(model: Any) -> None:
    assert 4.5e6 < model.num_parameters() < 5.5e6
    assert model.dtype == torch.bfloat16


def test_a_rendered_chat_ends_with_the_assistants_header(tokenizer: Any) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello!"}]
    assert _render(tokenizer, chat) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_chat_of_several_turns_keeps_them_in_order(tokenizer: Any) -> None:
    said = (("user", "A"), ("assistant", "B"), ("user", "C"))
    assert _render(tokenizer, [{"role": role, "content": text} for role, text in said]) == (
        "<|im_start|>user\nA<|im_end|>\n<|im_start|>assistant\nB<|im_end|>\n<|im_start|>user\nC<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_content_in_parts_renders_like_the_joined_text(tokenizer: Any) -> None:
    parts = [{"type": "text", "text": "Hello "}, {"type": "text", "text": "there"}]
    in_parts = _render(tokenizer, [{"role": "user", "content": parts}])
    assert in_parts == _render(tokenizer, [{"role": "user", "content": "Hello there"}])


def test_an_assistant_turn_without_content_renders_empty(tokenizer: Any) -> None:
    chat: list[dict[str, Any]] = [{"role": "assistant", "content": None}, {"role": "user", "content": "Go on."}]
    assert _render(tokenizer, chat).startswith("<|im_start|>assistant\n<|im_end|>\n")


def test_special_tokens_are_single_tokens(tokenizer: Any) -> None:
    assert tokenizer.encode("<|endoftext|><|im_start|><|im_end|>") == [0, 1, 2]


def test_the_tokenizer_gives_any_text_back(tokenizer: Any) -> None:
    text = "Zoë pays 12 € for 3 naïve 🦥\tsloths;\n  that is 12/3 = 4."
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_config_generation_config_and_tokenizer_agree_on_the_end(tokenizer: Any) -> None:
    end_of_turn, end_of_text = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert AutoConfig.from_pretrained(MODEL).eos_token_id == tokenizer.eos_token_id == end_of_turn
    assert GenerationConfig.from_pretrained(MODEL).eos_token_id == [end_of_turn, end_of_text]
    assert AutoConfig.from_pretrained(MODEL).vocab_size == len(tokenizer)


def test_the_card_names_every_set_with_its_licence_and_the_share_of_ends() -> None:
    card = (MODEL / "README.md").read_text(encoding="utf-8")
    rows = [line for line in card.splitlines() if line.startswith("|")]
    for text_set in dialogues.TEXT_SETS:
        assert any(text_set in row and "MIT" in row for row in rows)
    assert any(row.startswith("| all |") and "%" in row for row in rows)


def test_greedy_answers_end_by_themselves(model: Any, tokenizer: Any) -> None:
    written = answers.answer(model, tokenizer, [_example(prompt, "None.") for prompt in PROMPTS], max_tokens=400)
    assert all(one.ended and one.token_ids for one in written)


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
    """Of its kind: Muon's bfloat16 takes seconds a step where the processor has no instructions for it."""
    config = training.new_model(tokenizer).config
    config.update({"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64})
    config.layer_types = config.layer_types[:1]
    return Qwen3ForCausalLM(config)


def test_training_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(tokenizer: Any, tmp_path: Path) -> None:
    def new_training() -> training.Training:
        torch.manual_seed(0)
        return training.Training(_small_model(tokenizer), steps=2)

    rows = list(itertools.islice(dialogues.pack(dialogues.documents(tokenizer, EXAMPLES, random.Random(0)), 64), 4))
    straight, stopped, resumed = new_training(), new_training(), new_training()
    training.fit(straight, iter(rows), checkpoint=None)
    stopped.step(training.loss_of(stopped.model, rows[:2]))
    stopped.save(tmp_path / "checkpoint.pt")
    resumed.load(tmp_path / "checkpoint.pt")
    training.fit(resumed, iter(rows), checkpoint=None)
    assert resumed.done_steps == straight.done_steps == 2
    for name, weight in straight.model.state_dict().items():
        torch.testing.assert_close(resumed.model.state_dict()[name], weight, msg=name)


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
