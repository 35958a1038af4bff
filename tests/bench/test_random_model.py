from pathlib import Path

import pytest
from transformers import AutoConfig, AutoTokenizer

from bench.random_model import main

pytestmark = pytest.mark.slow  # loading torch takes seconds


def test_a_folder_that_transformers_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "random"
    assert main([str(folder)]) == 0
    assert f"--model {folder} -- --load-format=dummy --dtype=float32" in capsys.readouterr().out
    config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "Name three rivers."}], tokenize=False)
    assert config.vocab_size > max(tokenizer.encode(prompt))


def test_a_folder_that_is_there_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert "File exists" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
