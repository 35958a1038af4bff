"""vLLM's arguments checked by its own parser, before a start."""

import sys

import pytest

from deployments.command.args_check import check_args
from deployments.config.application import AppConfig
from policies.errors import ConfigError


def test_a_check_that_dies_is_no_consent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ConfigError, match="could not be checked"):
        check_args([AppConfig(model="m")])


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_each_model_s_arguments_are_read_by_vllm_and_the_option_that_was_meant_is_named() -> None:
    right = AppConfig(model="m", vllm_args=("--max-model-len", "8192"))
    assert check_args([right]) == []
    adapters = AppConfig(model="n", vllm_args=("--enable-lora",), engine={"scheduler": {"mode": "stock"}})
    assert check_args([right, adapters]) == [
        "n: cut prompts off, with vLLM's own scheduler (engine.scheduler.mode: stock): prompts are read as vLLM cuts "
        "them, and times per token may not hold meanwhile",
        "n: phases off, with vLLM's own scheduler (engine.scheduler.mode: stock): steps read prompts and decode "
        "together",
        "n: draft lengths off, with vLLM's own scheduler (engine.scheduler.mode: stock): every step verifies all that "
        "is drafted",
    ]
    wrong = AppConfig(model="n", vllm_args=("--max-modle-len", "8192"))
    with pytest.raises(ConfigError) as caught:
        check_args([right, wrong])
    assert str(caught.value) == (
        "vllm_args: unrecognized arguments: --max-modle-len; did you mean --max-model-len? (of model n)"
    )
