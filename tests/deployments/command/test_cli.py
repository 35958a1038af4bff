"""The command line up to the point where anything would start."""

import json
import shlex
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.command import cli, one_machine
from deployments.command.settings import sharing_memory
from deployments.config.application import AppConfig
from deployments.config.model import DEMO_ARGS, DEMO_NAME
from policies.errors import ConfigError

CONFIGS = Path(cli.__file__).parents[1] / "configs"


def config(*argv: str) -> AppConfig:
    return cli.app_config(cli.parse(["serve", *argv]))


def shared(*argv: str) -> AppConfig:
    return sharing_memory(config(*argv))


@pytest.fixture
def file(tmp_path: Path) -> Any:
    def write(settings: Any) -> str:
        path = tmp_path / "sluice.yaml"
        path.write_text(settings if isinstance(settings, str) else yaml.safe_dump(settings))
        return str(path)

    return write


def test_without_options_the_demo_model_is_served_by_two_engines() -> None:
    made = config()
    assert (made.public_name, made.engine.replicas, made.engine.num_gpus) == (DEMO_NAME, 2, 0)
    assert made.vllm_args == ()


def test_a_model_on_a_gpu_brings_nothing_of_ours() -> None:
    made = config("--model", "some/model", "--num-gpus", "1")
    assert (made.model, made.public_name, made.vllm_args) == ("some/model", "some/model", ())


def test_engines_on_this_machine_s_processors_share_its_memory(file: Any) -> None:
    share = "--gpu-memory-utilization"
    assert shared("--model", "m").vllm_args == (share, "0.3")
    assert shared("--model", "m", "--engine-replicas", "3").vllm_args == (share, "0.2")
    both = shared("--config", file({"model": "m", "engine": {"replicas": 1}, "more_models": [{"model": "n"}]}))
    assert [each.vllm_args for each in both.each_model()] == [(share, "0.3")] * 2
    for said in ([share, "0.5"], ["--kv_cache_memory_bytes=1000"]):
        assert shared("--model", "m", "--", *said).vllm_args == tuple(said)
    space = {"model": "m", "engine": {"env": {"VLLM_CPU_KVCACHE_SPACE": "4"}}}
    assert shared("--config", file(space)).vllm_args == ()
    assert shared("--model", "m", "--engine", "transformers").vllm_args == ()


def test_options_become_settings() -> None:
    replicas = ["--engine-replicas", "3", "--router-replicas", "2", "--num-gpus", "0.5"]
    made = config("--model", "m", "--served-model-name", "s", *replicas)
    assert (made.model, made.served_model_name) == ("m", "s")
    assert (made.engine.replicas, made.router.replicas, made.engine.num_gpus) == (3, 2, 0.5)


def test_another_engine_is_one_option() -> None:
    assert config("--engine", "transformers").engine.kind == "transformers"
    assert config().engine.kind == "vllm"


def test_a_model_is_named_as_vllm_serve_has_it_or_by_an_option() -> None:
    assert config("Qwen/Qwen3-0.6B", "--engine-replicas", "1").model == "Qwen/Qwen3-0.6B"
    assert config("--engine-replicas", "1", "./mine").model == "./mine"
    assert config("m", "--model", "m").model == "m"
    with pytest.raises(ConfigError, match="not m and n: see more_models"):
        config("m", "--model", "n")


def test_what_follows_two_dashes_goes_to_vllm() -> None:
    argv = ("--max-model-len", "8", "-tp", "2")
    assert config("--model", "m", "--num-gpus", "2", "--", *argv).vllm_args == argv
    assert config("m", "--num-gpus", "2", "--", *argv).vllm_args == argv
    assert config("--", "--max-model-len", "8").model == "demo"


@pytest.mark.parametrize(
    ("argv", "meant"),
    [
        (["serve", "m", "--max-model-len", "8192"], "sluice serve m -- --max-model-len 8192"),
        (["serve", "--max-model-len", "8192", "--port", "9"], "sluice serve --port 9 -- --max-model-len 8192"),
        (["serve", "m", "-tp=2", "--", "--seed", "1"], "sluice serve m -- -tp=2 --seed 1"),
        (["calibrate", "--gpu", "--enforce-eager"], "sluice calibrate --gpu -- --enforce-eager"),
    ],
)
def test_options_of_vllm_before_the_dashes_are_shown_where_they_belong(
    argv: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.parse(argv)
    assert capsys.readouterr().err.endswith(f"follow two dashes: {meant}\n")


def test_a_command_without_an_engine_takes_nothing_for_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, said in ((["keys", "list", "--", "-x"], "no engine"), (["keys", "list", "--odd"], "arguments: --odd\n")):
        with pytest.raises(SystemExit):
            cli.parse(argv)
        assert said in capsys.readouterr().err


def test_the_demo_model_takes_further_arguments_after_its_own_and_each_stands_once() -> None:
    further = ("--max_model_len", "512", "--dtype", "float16", "--disable-log-stats")
    argv = config("--", *further).engine_argv()
    at = DEMO_ARGS.index("--max-model-len")
    own = ["--no-enable-log-requests", *DEMO_ARGS[:at], *DEMO_ARGS[at + 2 :]]
    assert argv[argv.index("--no-enable-log-requests") :][: len(own) + len(further)] == [*own, *further]


def test_a_file_gives_settings_and_options_go_before_it(file: Any) -> None:
    path = file({"model": "m", "engine": {"replicas": 5, "num_gpus": 1}, "router": {"heartbeat_s": 0.5}})
    made = config("--config", path, "--engine-replicas", "3")
    assert (made.model, made.engine.replicas, made.engine.num_gpus) == ("m", 3, 1)
    assert made.router.heartbeat_s == 0.5


def test_the_papers_system_is_one_option_and_others_go_before_it(capsys: pytest.CaptureFixture[str]) -> None:
    made = config("some/model", "--preset", "papers", "--engine-replicas", "3")
    assert (made.model, made.engine.replicas, made.predictor.kind) == ("some/model", 3, "bert")
    assert (made.bins.dispatch, made.bins.bucket_rule, made.classes["offline"].order) == (
        "batches",
        "literal",
        "shortest_first",
    )
    scheduler = made.engine.scheduler
    assert (scheduler.phase_rule, scheduler.memory_form, scheduler.sla) == ("threshold", "linear", "search")
    with pytest.raises(SystemExit):
        config("--preset", "papers", "--config", "sluice.yaml")
    assert "not allowed with argument" in capsys.readouterr().err


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
        with pytest.raises(ConfigError, match="num_gpus") if refused else nullcontext():
            cli.check_builds(config(*argv))
    cli.check_builds(config("--model", "m", "--num-gpus", "1"))
    cli.check_builds(config("--model", "m", "--engine", "transformers"))


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


def test_a_file_for_serve_deploy_is_told_from_one_of_settings() -> None:
    with pytest.raises(ConfigError, match="is for `serve deploy`: .* under `args`"):
        config("--config", str(CONFIGS / "local.yaml"))


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


@pytest.mark.parametrize("by_file", [True, False])
def test_a_redis_that_refuses_us_ends_the_command_before_anything_starts(
    file: Any, redis_url: str, monkeypatch: pytest.MonkeyPatch, by_file: bool
) -> None:
    wrong = f"redis://somebody:hunter2@{redis_url.rpartition('@')[2]}"
    monkeypatch.setattr(one_machine, "prepare", lambda *_: pytest.fail("it starts"))
    monkeypatch.setenv("SLUICE_REDIS_URL", redis_url if by_file else wrong)
    with pytest.raises(SystemExit) as caught:
        cli.main(["serve", "--config", file({"redis_url": wrong} if by_file else {})])
    said = str(caught.value)
    assert said.startswith("sluice: Redis does not let us in") and "SLUICE_REDIS_URL" in said
    assert "hunter2" not in said and "somebody" not in said


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


def test_a_reader_that_has_enough_ends_a_listing_without_a_traceback() -> None:
    """As `| head` does."""
    command = [sys.executable, "-P", "-m", "deployments.command.cli", "simulate", "--list-engines"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 128 + signal.SIGPIPE


def test_a_folder_of_batches_is_that_of_the_shell_and_what_runs_them_reserves_no_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = config("--batch-folder", "batches").batches
    assert (made.folder, made.num_cpus) == (str(tmp_path / "batches"), 0)
    assert config().batches.folder is None
