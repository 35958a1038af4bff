import pytest

from bench.compare import main


def test_nothing_to_compare_with_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--sluice"]) == 2
    assert "give --sluice or --control" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sluice", "two"], "must look like 2x2"),
        (["--json", "/no/such/folder/out.json"], "no folder /no/such/folder"),
        (["--logs", "/no/such/folder"], "no folder /no/such/folder"),
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
