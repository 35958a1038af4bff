"""The command line up to the point where anything would start."""

import json
import shlex
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments import cli
from deployments.config import DEMO_ARGS, AppConfig
from policies.errors import ConfigError


def config(*argv: str) -> AppConfig:
    return cli.app_config(cli.parser().parse_args(["serve", *argv]))


@pytest.fixture
def file(tmp_path: Path) -> Any:
    def write(settings: Any) -> str:
        path = tmp_path / "sluice.yaml"
        path.write_text(settings if isinstance(settings, str) else yaml.safe_dump(settings))
        return str(path)

    return write


def test_without_options_the_demo_model_is_served_by_two_engines() -> None:
    made = config()
    assert (made.served_model_name, made.engine.replicas, made.engine.num_gpus) == (cli.DEMO_NAME, 2, 0)
    assert made.vllm_args == DEMO_ARGS


def test_a_model_brings_none_of_the_demo_models_settings() -> None:
    made = config("--model", "some/model")
    assert (made.model, made.served_model_name, made.vllm_args) == ("some/model", None, ())


def test_options_become_settings() -> None:
    replicas = ["--engine-replicas", "3", "--router-replicas", "2", "--num-gpus", "0.5"]
    made = config("--model", "m", "--served-model-name", "s", *replicas)
    assert (made.model, made.served_model_name) == ("m", "s")
    assert (made.engine.replicas, made.router.replicas, made.engine.num_gpus) == (3, 2, 0.5)


def test_another_engine_is_one_option() -> None:
    assert config("--engine", "transformers").engine.kind == "transformers"
    assert config().engine.kind == "vllm"


def test_what_follows_two_dashes_goes_to_vllm() -> None:
    assert config("--model", "m", "--", "--max-model-len", "8", "-tp", "2").vllm_args == (
        "--max-model-len",
        "8",
        "-tp",
        "2",
    )


def test_the_demo_model_takes_further_arguments_after_its_own() -> None:
    assert config("--", "--max-model-len", "512").vllm_args == (*DEMO_ARGS, "--max-model-len", "512")


def test_a_file_gives_settings_and_options_go_before_it(file: Any) -> None:
    path = file({"model": "m", "engine": {"replicas": 5, "num_gpus": 1}, "router": {"heartbeat_s": 0.5}})
    made = config("--config", path, "--engine-replicas", "3")
    assert (made.model, made.engine.replicas, made.engine.num_gpus) == ("m", 3, 1)
    assert made.router.heartbeat_s == 0.5


def test_a_file_keeps_its_settings_where_no_option_is_given(file: Any) -> None:
    made = config("--config", file({"model": "m", "engine": {"replicas": 5, "drain_timeout_s": 7}}))
    assert (made.engine.replicas, made.engine.drain_timeout_s) == (5, 7)


def test_no_replica_waits_for_a_core_that_ray_does_not_have_left(file: Any) -> None:
    made = config("--config", file({"predictor": {"kind": "bert", "replicas": 99}}))
    assert [section.num_cpus for section in (made.engine, made.router, made.predictor)] == [0, 0, 0]
    assert config("--config", file({"predictor": {"num_cpus": 0.5}})).predictor.num_cpus == 0.5


@pytest.mark.parametrize(("version", "refused"), [("0.32.0", True), ("0.32.0+cpu", False)])
def test_an_engine_without_a_gpu_needs_the_build_for_cpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: Any, version: str, refused: bool
) -> None:
    metadata = tmp_path / f"vllm-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path)
    second = {"model": "m", "engine": {"num_gpus": 1}, "more_models": [{"model": "n"}]}
    for argv in (["--model", "m"], ["--config", file(second)]):
        with pytest.raises(ConfigError, match="--num-gpus") if refused else nullcontext():
            cli.check_build(config(*argv))
    cli.check_build(config("--model", "m", "--num-gpus", "1"))
    cli.check_build(config("--model", "m", "--engine", "transformers"))


def test_every_wrong_setting_is_named(file: Any) -> None:
    path = file({"nonsense": 1, "router": {"heartbeat_s": -1}, "engine": {"num_gpus": "two"}})
    with pytest.raises(ConfigError) as caught:
        config("--config", path)
    for name in ("nonsense", "router.heartbeat_s", "engine.num_gpus"):
        assert f"  {name}: " in str(caught.value)


def test_a_wrong_option_is_named() -> None:
    with pytest.raises(ConfigError, match=r"engine\.replicas"):
        config("--engine-replicas", "0")


def test_a_wrong_setting_does_not_show_its_value(file: Any) -> None:
    path = file({"redis_url": {"redis://:hunter2@host": 1}})
    with pytest.raises(ConfigError, match="redis_url") as caught:
        config("--config", path)
    assert "hunter2" not in str(caught.value)
    assert caught.value.__cause__ is None and caught.value.__suppress_context__


@pytest.mark.parametrize("text", ["", "- a list", "a: b: c", "{"], ids=["empty", "a list", "two colons", "cut"])
def test_a_file_that_is_no_mapping_is_refused_by_name(file: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=r"sluice\.yaml"):
        config("--config", file(text))


@pytest.mark.parametrize("section", ["engine", "router", "predictor", "vllm_args"])
def test_a_section_left_empty_has_its_defaults(file: Any, section: str) -> None:
    assert config("--config", file(f"{section}:\n")) == config()
    assert config("--config", file(f"{section}:\n"), "--engine-replicas", "3").engine.replicas == 3


@pytest.mark.parametrize("section", ["engine", "router", "predictor", "vllm_args"])
def test_a_section_of_another_kind_is_named(file: Any, section: str) -> None:
    with pytest.raises(ConfigError, match=section):
        config("--config", file({section: "text"}))


def test_a_file_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="nowhere.yaml"):
        config("--config", "nowhere.yaml")


def test_an_error_ends_the_command_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["serve", "--config", "nowhere.yaml"])
    assert str(caught.value).startswith("sluice: cannot read nowhere.yaml")


@pytest.mark.parametrize("argv", [[], ["serve", "--nonsense"], ["serve", "--port", "x"], ["nonsense"]])
def test_a_wrong_command_line_ends_with_usage(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 2
    assert "usage: sluice" in capsys.readouterr().err


@pytest.mark.parametrize("port", ["0", "65536", "-1", "8000.5", "http"])
def test_a_port_that_cannot_be_is_refused_before_anything_starts(capsys: pytest.CaptureFixture[str], port: str) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", f"--port={port}"])
    assert f"--port: must be a number from 1 to 65535, got '{port}'" in capsys.readouterr().err


def test_the_example_can_be_pasted() -> None:
    model = """org/model-1.0 "beta" of it's maker"""
    program, url, *arguments = shlex.split(cli.example("http://127.0.0.1:8000", model))
    assert (program, url) == ("curl", "http://127.0.0.1:8000/v1/chat/completions")
    body = json.loads(arguments[arguments.index("-d") + 1])
    assert body["model"] == model
    assert body["messages"][0]["role"] == "user"
    assert arguments[arguments.index("-H") + 1] == "Content-Type: application/json"
