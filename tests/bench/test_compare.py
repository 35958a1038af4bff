from pathlib import Path

import pytest

from bench.compare import _parser, _specs, main
from bench.servers import ENGINE_ARGUMENTS
from deployments.command import cli
from tests.builds import install_build


def test_nothing_to_compare_with_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--sluice"]) == 2
    assert "give --sluice, --sluice-config or --control" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sluice", "two"], "must look like 2x2"),
        (["--json", "/no/such/folder/out.json"], "no folder /no/such/folder"),
        (["--logs", "/no/such/folder"], "no folder /no/such/folder"),
        (["--sluice-config", "/no/such/file.yaml"], "no file /no/such/file.yaml"),
    ],
)
def test_unusable_options_are_named_before_anything_starts(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert message in capsys.readouterr().err


def test_a_wrong_plan_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--repeats", "0", "--", "--max-model-len=512"]) == 2
    assert "repeats must be positive, got 0" in capsys.readouterr().err


def test_help_shows_the_shared_engine_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert "--max-num-seqs=64" in capsys.readouterr().out


def test_settings_of_a_file_come_beside_the_model_and_the_shared_engine_arguments(tmp_path: Path) -> None:
    path = tmp_path / "stock.yaml"
    path.write_text("engine: {replicas: 1, scheduler: {mode: stock}}")
    options = _parser().parse_args(["--sluice", "1x1", "--sluice-config", str(path)])
    _, plain_sluice, with_file = _specs(options, ENGINE_ARGUMENTS)
    assert (with_file.name, with_file.port) == ("Sluice with stock.yaml", plain_sluice.port + 1)
    made, default = (cli.app_config(cli.parse(spec.command[1:])) for spec in (with_file, plain_sluice))
    assert (made.engine.scheduler.mode, default.engine.scheduler.mode) == ("stock", "auto")
    assert (made.model, made.vllm_args, made.engine.replicas) == (default.model, default.vllm_args, 1)


@pytest.mark.parametrize(
    ("build", "options", "gpus"),
    [
        ("0.32.0+cpu", [], 0.0),
        ("0.32.0", [], 1.0),
        ("0.32.0", ["--num-gpus", "0.5"], 0.5),
        ("0.32.0+cpu", ["--num-gpus", "2"], 2.0),
    ],
)
def test_engines_of_sluice_get_the_gpus_that_their_build_needs_or_that_were_asked_for(
    build: str, options: list[str], gpus: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_build(tmp_path, build)
    monkeypatch.syspath_prepend(tmp_path)
    parallel = ["--tensor-parallel-size=2"] if gpus == 2 else []
    plain, ours = _specs(_parser().parse_args(["--sluice", "2x1", *options]), parallel)
    assert plain.command[1:3] == ("-m", "deployments.plain_vllm")
    made = cli.app_config(cli.parse(ours.command[1:]))
    assert (made.engine.num_gpus, made.engine.replicas, made.router.replicas) == (gpus, 1, 2)


def test_a_file_of_settings_says_its_gpus_itself(tmp_path: Path) -> None:
    path = tmp_path / "two.yaml"
    path.write_text("engine: {replicas: 1, num_gpus: 0.25}")
    *_, with_file = _specs(_parser().parse_args(["--num-gpus", "1", "--sluice-config", str(path)]), ENGINE_ARGUMENTS)
    assert cli.app_config(cli.parse(with_file.command[1:])).engine.num_gpus == 0.25
