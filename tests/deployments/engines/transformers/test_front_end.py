"""vLLM's front end for models that vLLM itself cannot run."""

from pathlib import Path

import pytest
from transformers import GPTNeoConfig, PreTrainedConfig
from vllm.engine.arg_utils import AsyncEngineArgs

from deployments.engines.vllm.args import parse_vllm_args
from deployments.engines.vllm.front_end import STAND_IN, as_front_end_of_any_model
from tests.deployments.tiny_models import CONTEXT, tiny_llama

pytestmark = pytest.mark.slow


def saved(config: PreTrainedConfig, folder: Path) -> str:
    config.save_pretrained(folder)
    return str(folder)


def test_an_architecture_that_vllm_does_not_know_is_served_all_the_same(tmp_path: Path) -> None:
    unknown = GPTNeoConfig(
        vocab_size=97, hidden_size=32, num_layers=2, attention_types=[[["global", "local"], 1]], num_heads=4,
        max_position_embeddings=CONTEXT, intermediate_size=64, architectures=["GPTNeoForCausalLM"],
    )  # fmt: skip
    argv = ["--model", saved(unknown, tmp_path), "--skip-tokenizer-init"]
    with pytest.raises(ValueError, match="GPTNeoForCausalLM"):
        AsyncEngineArgs.from_cli_args(parse_vllm_args(argv)).create_engine_config()
    args = as_front_end_of_any_model(parse_vllm_args(argv))
    config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
    assert (config.model_config.architectures, config.model_config.max_model_len) == ([STAND_IN], CONTEXT)


def test_one_that_it_knows_keeps_its_name(tmp_path: Path) -> None:
    known = tiny_llama().config
    known.architectures = ["LlamaForCausalLM"]
    args = parse_vllm_args(["--model", saved(known, tmp_path)])
    assert as_front_end_of_any_model(args).hf_overrides == parse_vllm_args(["--model", str(tmp_path)]).hf_overrides
