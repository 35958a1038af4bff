from pathlib import Path

import pytest
from transformers import AutoConfig, AutoTokenizer

from bench.random_model import main
from deployments.command import cli

pytestmark = pytest.mark.slow  # loading torch takes seconds


def test_a_folder_that_transformers_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "random"
    assert main([str(folder)]) == 0
    assert f"--model {folder} -- --load-format=dummy --dtype=float32" in capsys.readouterr().out
    config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "Name three rivers."}], tokenize=False)
    assert config.vocab_size > max(tokenizer.encode(prompt))


def test_a_model_of_a_published_size_is_its_configuration_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "8b"
    assert main([str(folder), "--size", "8b"]) == 0
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    config = AutoConfig.from_pretrained(folder)
    assert (config.num_hidden_layers, config.vocab_size, config.head_dim) == (36, 151936, 128)
    assert not config.tie_word_embeddings
    calibrate, modes = capsys.readouterr().out.splitlines()
    assert cli.parse(calibrate.split()[1:]).command == "calibrate" and modes.endswith("modes_on_this_machine.py -s")


@pytest.mark.parametrize(("kind", "model_type"), [("windows", "gemma3_text"), ("images", "blip-2")])
def test_other_kinds_are_as_large(tmp_path: Path, kind: str, model_type: str) -> None:
    assert main([str(tmp_path / kind), "--kind", kind]) == 0
    config = AutoConfig.from_pretrained(tmp_path / kind)
    text = config.get_text_config()
    assert (config.model_type, text.num_hidden_layers, text.hidden_size) == (model_type, 8, 512)
    assert len(AutoTokenizer.from_pretrained(tmp_path / kind)) <= text.vocab_size


def test_a_folder_that_is_there_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert "File exists" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
