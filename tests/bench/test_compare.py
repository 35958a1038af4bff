from pathlib import Path

import pytest

from bench.compare import _parser, _specs, main
from bench.servers import ENGINE_ARGUMENTS
from deployments import cli


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
    made, default = (cli.app_config(cli.parser().parse_args(spec.command[1:])) for spec in (with_file, plain_sluice))
    assert (made.engine.scheduler.mode, default.engine.scheduler.mode) == ("stock", "auto")
    assert (made.model, made.vllm_args, made.engine.replicas) == (default.model, default.vllm_args, 1)
