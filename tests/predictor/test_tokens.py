from pathlib import Path

import pytest

from policies.errors import ConfigError
from predictor.model import DEFAULT_BASE, base_folder
from predictor.tokens import PromptTokenizer, head_and_tail

pytestmark = pytest.mark.slow  # loading torch takes seconds


@pytest.fixture(scope="module")
def folder() -> Path:
    return base_folder(DEFAULT_BASE)


def test_a_long_prompt_keeps_head_and_tail() -> None:
    assert head_and_tail(list(range(10)), 5) == [0, 1, 2, 8, 9]
    assert head_and_tail(list(range(10)), 4) == [0, 1, 8, 9]


def test_a_prompt_that_fits_stays_whole() -> None:
    assert head_and_tail([1, 2, 3], 3) == [1, 2, 3]


def test_every_prompt_has_the_encoders_first_and_last_token(folder: Path) -> None:
    short, empty, long = PromptTokenizer(folder, 16).encode(["Hello", "", "word " * 1000])
    assert [ids[0] for ids in (short, empty, long)] == [101] * 3
    assert [ids[-1] for ids in (short, empty, long)] == [102] * 3
    assert (len(short), len(empty), len(long)) == (3, 2, 16)


def test_what_lies_deep_inside_a_very_long_prompt_does_not_matter(folder: Path) -> None:
    tokenizer = PromptTokenizer(folder, 8)
    one, other = (f"start {'x ' * 5000}{middle}{'y ' * 5000}end" for middle in ("tea", "coffee"))
    first, second = tokenizer.encode([one, other])
    assert first == second
    assert first[1] == tokenizer.encode(["start"])[0][1]
    assert first[-2] == tokenizer.encode(["end"])[0][1]


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no tokenizer.json"):
        PromptTokenizer(tmp_path, 8)


def test_a_limit_without_room_for_two_tokens_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="max_tokens must be at least 2, got 1"):
        PromptTokenizer(folder, 1)
