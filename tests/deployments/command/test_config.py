"""`sluice config`."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.command import cli, config
from deployments.config.application import AppConfig
from tests.deployments.command.test_cli import CONFIGS

PAGE = Path(cli.__file__).parents[2] / "docs" / "reference" / "configuration.md"


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    cli.main(["config", *argv])
    return capsys.readouterr().out


def refused(*argv: str) -> str:
    with pytest.raises(SystemExit) as caught:
        cli.main(["config", *argv])
    return str(caught.value)


@pytest.fixture
def file(tmp_path: Path) -> Any:
    def write(settings: Any) -> str:
        path = tmp_path / "mine.yaml"
        path.write_text(yaml.safe_dump(settings))
        return str(path)

    return write


def test_the_page_of_keys_is_up_to_date() -> None:
    """After a change of deployments/config: python -m tests.k8s.refresh"""
    assert PAGE.read_text() == config.page()


def test_the_schema_is_printed_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    made = json.loads(said(capsys, "schema"))
    assert made["properties"].keys() == AppConfig.model_fields.keys()


def test_a_key_is_explained_with_type_unit_default_and_what_a_change_takes(capsys: pytest.CaptureFixture[str]) -> None:
    name, meaning, kind, change = said(capsys, "explain", "router.silence_s").splitlines()
    assert name == "router.silence_s"
    assert "is taken for dead" in meaning
    assert kind.strip() == "number above 0, in seconds; default 10.0"
    assert "restarts engines" in change
    assert "changes live" in said(capsys, "explain", "engine.scheduler.overcommit")
    assert "it must be given" in said(capsys, "explain", "model")


def test_a_section_is_explained_by_what_stands_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    for path, inside in (
        ("keys", "keys.redis"),
        ("classes", "classes.NAME.max_waiting"),
        ("classes.gold", "classes.NAME.max_waiting"),
    ):
        assert f"\n{inside}\n" in said(capsys, "explain", path)
    assert "engine\n" in said(capsys, "explain")


def test_a_key_that_is_none_gets_the_nearest() -> None:
    assert (
        refused("explain", "engine.replica") == "sluice: there is no key engine.replica; did you mean engine.replicas?"
    )
    assert "lists those at the top" in refused("explain", "xyzzy")


FIXED = {"name": "Router", "user_config": {"router": {"replicas": 2}}}
MISSPELLED = {"name": "Routr", "user_config": {"default_class": "interactive"}}


def test_a_wrong_file_ends_the_check_before_vllm_is_asked(file: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "check_args", lambda _: pytest.fail("vLLM is asked"))
    ours = {"import_path": config.IMPORT_PATH}
    for settings, why in (
        ({"engine": {"replica": 2}}, "did you mean engine.replicas?"),
        ({"applications": [ours | {"args": {"model": "m", "ttft_ms": 1}}]}, "classes.NAME.ttft_s"),
        ({"applications": [ours]}, "model: is needed"),
        ({"applications": [ours | {"args": {"model": "m"}, "deployments": [FIXED]}]}, "router.replicas: cannot change"),
        (
            {"applications": [ours | {"args": {"model": "m"}, "deployments": [MISSPELLED]}]},
            "Routr takes no user_config",
        ),
        ({"applications": [{"import_path": "mine:app"}]}, "none of its applications"),
        ({"applications": None}, "none of its applications"),
        ([1], "must hold a mapping"),
    ):
        assert why in refused("check", file(settings))
    assert "cannot read nowhere.yaml" in refused("check", "nowhere.yaml")


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_files_of_both_kinds_are_checked_with_vllm_s_own_parser(capsys: pytest.CaptureFixture[str], file: Any) -> None:
    local = str(CONFIGS / "local.yaml")
    assert said(capsys, "check", local) == f"{local}: the settings of sluice-demo can be served\n"
    mine = file({"vllm_args": ["--max-model-len", "512"], "more_models": [{"model": "n"}]})
    assert said(capsys, "check", mine) == f"{mine}: the settings of sluice-demo, n can be served\n"
    wrong = file({"model": "m", "vllm_args": ["--max-model-len", "many"]})
    assert "--max-model-len" in refused("check", wrong)


@pytest.mark.parametrize("applications", [5, {"a": 1}, "text"])
def test_applications_that_are_no_list_are_told(file: Any, applications: Any) -> None:
    assert "applications must be a list" in refused("check", file({"applications": applications}))


def test_deployments_that_are_no_list_are_told(file: Any) -> None:
    one = {"import_path": config.IMPORT_PATH, "args": {"model": "m"}, "deployments": 5}
    assert "deployments must be a list" in refused("check", file({"applications": [one]}))
