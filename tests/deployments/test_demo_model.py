"""The demo model's folder as engines load it."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from deployments.config.model import DEMO_MODEL

pytestmark = pytest.mark.slow  # loading torch and a model takes seconds

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
    return AutoTokenizer.from_pretrained(DEMO_MODEL)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(DEMO_MODEL)


def _render(tokenizer: Any, messages: list[dict[str, Any]]) -> str:
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert isinstance(rendered, str)
    return rendered


def test_the_folder_is_complete_and_under_12_megabytes() -> None:
    assert sum((DEMO_MODEL / name).stat().st_size for name in LOADED_FILES) < 12_000_000


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
    assert AutoConfig.from_pretrained(DEMO_MODEL).eos_token_id == tokenizer.eos_token_id == end_of_turn
    assert GenerationConfig.from_pretrained(DEMO_MODEL).eos_token_id == [end_of_turn, end_of_text]
    assert AutoConfig.from_pretrained(DEMO_MODEL).vocab_size == len(tokenizer)


def test_greedy_answers_end_by_themselves(model: Any, tokenizer: Any) -> None:
    for prompt in PROMPTS:
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        tokens = model.generate(**inputs, max_new_tokens=400, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        assert 1 < len(tokens) < 400
