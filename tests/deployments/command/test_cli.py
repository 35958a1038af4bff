"""The command line up to the point where anything would start."""

import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterable
from contextlib import nullcontext
from operator import attrgetter
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


OF_VLLM = ("--max-model-len", "8", "-tp", "2")


@pytest.mark.parametrize(
    ("argv", "settings"),
    [
        ([], {"public_name": DEMO_NAME, "engine.replicas": 2, "engine.num_gpus": 0, "vllm_args": ()}),
        ([], {"engine.kind": "vllm", "batches.folder": None}),
        (["--model", "a/b", "--num-gpus", "1"], {"model": "a/b", "public_name": "a/b", "vllm_args": ()}),
        (["--served-model-name", "s"], {"served_model_name": "s"}),
        (["--engine-replicas", "3", "--router-replicas", "2"], {"engine.replicas": 3, "router.replicas": 2}),
        (["--num-gpus", "0.5"], {"engine.num_gpus": 0.5, "engine.replicas": 1}),
        (["--engine", "transformers"], {"engine.kind": "transformers"}),
        (["m", "--engine-url", "http://a:1", "--engine-url", "http://b"], {"engine.kind": "openai"}),
        (["--batch-folder", "/batches"], {"batches.folder": "/batches", "batches.num_cpus": 0}),
        (["Qwen/Qwen3-0.6B", "--engine-replicas", "1"], {"model": "Qwen/Qwen3-0.6B"}),
        (["--engine-replicas", "1", "./mine"], {"model": "./mine"}),
        (["m", "--model", "m"], {"model": "m"}),
        (["--model", "m", "--num-gpus", "2", "--", *OF_VLLM], {"model": "m", "vllm_args": OF_VLLM}),
        (["m", "--num-gpus", "2", "--", *OF_VLLM], {"model": "m", "vllm_args": OF_VLLM}),
        (["--", "--max-model-len", "8"], {"model": "demo"}),
    ],
    ids=lambda given: " ".join(given),
)
def test_options_become_settings(argv: list[str], settings: dict[str, Any]) -> None:
    assert {path: attrgetter(path)(config(*argv)) for path in settings} == settings


def test_a_folder_of_batches_is_that_of_the_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert config("--batch-folder", "batches").batches.folder == str(tmp_path / "batches")


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
    path = file({"model": "m", "engine": {"replicas": 5, "drain_timeout_s": 7}, "router": {"silence_s": 5}})
    for options, replicas in (([], 5), (["--engine-replicas", "3"], 3)):
        made = config("--config", path, *options)
        assert (made.model, made.engine.replicas, made.engine.drain_timeout_s) == ("m", replicas, 7)
        assert made.router.heartbeat_s == 0.5


def test_the_papers_system_is_one_option_and_others_go_before_it(capsys: pytest.CaptureFixture[str]) -> None:
    made = config("some/model", "--preset", "papers", "--engine-replicas", "3")
    assert (made.model, made.engine.replicas, made.predictor.kind) == ("some/model", 3, "bert")
    assert (made.bins.dispatch, made.classes["offline"].order) == ("rolling", "shortest_first")
    assert made.engine.prefill is not None and made.engine.prefill.split == "always"
    rules = made.papers
    assert (rules.phase_rule, rules.memory, rules.itl_target_s, rules.literal_buckets) == (
        "threshold",
        "linear",
        0.05,
        True,
    )
    with pytest.raises(SystemExit):
        config("--preset", "papers", "--config", "sluice.yaml")
    assert "not allowed with argument" in capsys.readouterr().err


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
    path = file({"nonsense": 1, "router": {"silence_s": -1}, "engine": {"num_gpus": "two"}})
    with pytest.raises(ConfigError) as caught:
        config("--config", path)
    for name in ("nonsense", "router.silence_s", "engine.num_gpus"):
        assert f"  {name}: " in str(caught.value)


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


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["--config", str(CONFIGS / "local.yaml")], "is for `serve deploy`: .* under `args`"),
        (["--config", "nowhere.yaml"], "cannot read nowhere.yaml"),
        (["m", "--model", "n"], "not m and n: see more_models"),
        (["--engine-replicas", "0"], r"engine\.replicas"),
    ],
)
def test_what_cannot_be_served_ends_the_command_in_words(argv: list[str], why: str) -> None:
    with pytest.raises(SystemExit, match=f"(?s)^sluice: .*{why}"):
        cli.main(["serve", *argv])


@pytest.mark.parametrize("section", ["engine", "router", "predictor", "vllm_args"])
def test_a_section_left_empty_has_its_defaults(file: Any, section: str) -> None:
    assert config("--config", file(f"{section}:\n")) == config()
    assert config("--config", file(f"{section}:\n"), "--engine-replicas", "3").engine.replicas == 3


@pytest.mark.parametrize("section", ["engine", "router", "predictor", "vllm_args"])
def test_a_section_of_another_kind_is_named(file: Any, section: str) -> None:
    with pytest.raises(ConfigError, match=section):
        config("--config", file({section: "text"}))


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


@pytest.mark.parametrize("command", [("serve",), ("env", "--loopback")])
@pytest.mark.parametrize("port", ["0", "65536", "-1", "8000.5", "http"])
def test_a_port_that_cannot_be_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str], command: tuple[str, ...], port: str
) -> None:
    with pytest.raises(SystemExit):
        cli.main([*command, f"--port={port}"])
    assert f"--port: must be a number from 1 to 65535, got '{port}'" in capsys.readouterr().err


def test_the_example_can_be_pasted() -> None:
    model = """org/model-1.0 "beta" of it's maker"""
    program, url, *arguments = shlex.split(cli.example("http://127.0.0.1:8000", model))
    assert (program, url) == ("curl", "http://127.0.0.1:8000/v1/chat/completions")
    body = json.loads(arguments[arguments.index("-d") + 1])
    assert body["model"] == model
    assert body["messages"][0]["role"] == "user"
    assert arguments[arguments.index("-H") + 1] == "Content-Type: application/json"
    # An address that stands for all of the machine's is reached by loopback.
    assert "http://[::1]:8000/v1" in cli.example("http://[::]:8000", "m")
    assert "http://127.0.0.1:8000/v1" in cli.example("http://0.0.0.0:8000", "m")


def test_a_reader_that_has_enough_ends_a_listing_without_a_traceback() -> None:
    """As `| head` does."""
    command = [sys.executable, "-P", "-m", "deployments.command.cli", "simulate", "--list-engines"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 128 + signal.SIGPIPE


@pytest.mark.parametrize("by_file", [True, False])
def test_arguments_that_vllm_refuses_end_the_command_before_ray_starts(
    file: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_file: bool
) -> None:
    def refuse(models: Iterable[AppConfig]) -> None:
        (model,) = models
        raise ConfigError(f"vllm_args: {model.vllm_args}")

    monkeypatch.setattr(one_machine, "prepare", lambda *_: tmp_path)
    monkeypatch.setattr(one_machine, "running", lambda *_: pytest.fail("it starts"))
    monkeypatch.setattr(cli, "check_args", refuse)
    given = ["--config", file({"vllm_args": ["--odd"]})] if by_file else ["--", "--odd"]
    with pytest.raises(SystemExit, match=r"^sluice: vllm_args: \('--odd',\)$"):
        cli.main(["serve", *given])
