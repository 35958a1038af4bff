"""What is said of wrong settings."""

from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from deployments.config.application import checked
from deployments.config.gone import GONE
from deployments.config.messages import what_is_wrong
from deployments.http.keys import KeyEntry
from policies.errors import ConfigError

ONE_ITEM_EACH = 'one item for each word, as in [--max-model-len, "8192"]'


def said(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        checked({"model": "m"} | yaml.safe_load(text))
    head, *lines = str(caught.value).splitlines()
    assert head == "wrong settings:"
    assert len(lines) == 1
    return lines[0].strip()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("engine: {replica: 2}", "engine.replica: there is no such key; did you mean engine.replicas?"),
        ("engine_replicas: 2", "engine_replicas: there is no such key; did you mean engine.replicas?"),
        ("engin: {}", "engin: there is no such key; did you mean engine?"),
        (
            "engine: {prefill: {scheduler: {}}}",
            f"engine.prefill.scheduler: is gone: {GONE['engine.prefill.scheduler']}",
        ),
        ("ttft_ms: 500", "ttft_ms: there is no such key; did you mean classes.NAME.ttft_s, in seconds?"),
        (
            "classes: {standard: {ttft_ms: 500}}",
            "classes.standard.ttft_ms: there is no such key; did you mean classes.standard.ttft_s, in seconds?",
        ),
        (
            "more_models: [{model: n, engine: {replica: 3}}]",
            "more_models[0].engine.replica: there is no such key; did you mean more_models[0].engine.replicas?",
        ),
        (
            "keys: {colour: red}",
            "keys.colour: there is no such key; these may stand there: file, redis, isolate_prefixes",
        ),
        ("engine: {autoscaling: {}}", "engine.autoscaling.max_replicas: is needed"),
        (
            "engine: {drain_timeout_s: 10m}",
            "engine.drain_timeout_s: must be a number above 0, in seconds, got '10m': write 600",
        ),
        (
            "router: {body_timeout_s: 500 ms}",
            "router.body_timeout_s: must be a number above 0, in seconds, got '500 ms': write 0.5",
        ),
        (
            "router: {max_buffered_bytes: 512Mi}",
            "router.max_buffered_bytes: must be an integer of at least 1048576, in bytes, got '512Mi': write 536870912",
        ),
        ("engine: {num_gpus: two}", "engine.num_gpus: must be a number of at least 0, in GPUs, got 'two'"),
        ("router: {silence_s: -1}", "router.silence_s: must be a number above 0, in seconds, got -1"),
        ("engine: {kind: vlm}", "engine.kind: must be one of `vllm`, `transformers`, `openai`, got 'vlm'"),
        ("keys: {redis: perhaps}", "keys.redis: must be true or false, got 'perhaps'"),
        ("bins: 3", "bins: must be a mapping of settings"),
        ("engine: {lora: {adapters: {}}}", "engine.lora.adapters: needs at least 1"),
        ("vllm_args: {max-model-len: 8192}", f"vllm_args: must be a list of text, {ONE_ITEM_EACH}; got a mapping"),
        ("vllm_args: --max-model-len 8192", f"vllm_args: must be a list of text, {ONE_ITEM_EACH}"),
        ("vllm_args: [--seed, 3]", f"vllm_args[1]: must be a list of text, {ONE_ITEM_EACH}: put 3 in quotes"),
        (
            "vllm_args: [--max-model-len 8192]",
            f"vllm_args: --max-model-len and what follows it stand in one item: {ONE_ITEM_EACH}",
        ),
        ("vllm_args: [--port, '1']", "vllm_args: --port is set by HTTP options of Serve, not by vllm_args"),
        (
            "default_class: none",
            "settings: default_class 'none' is not one of classes ['interactive', 'offline', 'standard']",
        ),
        ("name: a b", "name: must match pattern '^[A-Za-z0-9_-]{1,64}$'"),
    ],
)
def test_a_message_names_the_key_what_was_given_and_the_way_out(text: str, message: str) -> None:
    assert said(text) == message


@pytest.mark.parametrize(
    "text",
    [
        "redis_url: {redis://:hunter2@host: 1}",
        "redis_url: [hunter2]",
        "engine: {env: {TOKEN: [hunter2]}}",
        "engine: {env: hunter2}",
        "engine: {autoscaling: hunter2}",
        "keys: hunter2",
        "model: [hunter2]",
        "served_model_name: {hunter2: 1}",
        "vllm_args: hunter2",
        "vllm_args: [--hf-token hunter2]",
    ],
)
def test_what_may_be_a_secret_is_not_shown(text: str) -> None:
    assert "hunter2" not in said(text)


def test_no_value_of_an_api_key_s_entry_is_shown() -> None:
    def wrong(**entry: Any) -> list[str]:
        with pytest.raises(ValidationError) as caught:
            KeyEntry.model_validate({"name": "a", "sha256": "0" * 64} | entry)
        return what_is_wrong(caught.value, KeyEntry, shows_values=False)

    assert wrong(requests_per_minute="hunter2") == ["requests_per_minute: must be a number above 0 or null, per minute"]
    assert wrong(sha256="hunter2") == ["sha256: must match pattern '^[0-9a-f]{64}$'"]


def test_a_long_value_is_cut_and_a_mapping_is_not_written_out() -> None:
    assert len(said("mode: " + "x" * 1000)) < 200
    assert said("mode: {a: 1}").endswith("got a mapping")
