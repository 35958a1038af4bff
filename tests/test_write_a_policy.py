"""docs/guides/write-a-policy.md, followed to the letter. What it serves, tests/integration/test_cores.py serves."""

import json
import os
import re
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from deployments.command import cli
from policies.errors import ConfigError
from tests.tutorial import ORDER, PAGE, POLICY, put_on_path, write

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_on_path(tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)


def simulated(*argv: str) -> Any:
    options = cli.parser().parse_args(["simulate", *argv, "--json", "out.json"])
    options.run(options)
    return json.loads(Path("out.json").read_text())


def commands(name: str) -> list[list[str]]:
    """Arguments of every such command that the page shows."""
    lines = re.findall(rf"^    ((?:\w+=\S+ )*{name} .*)$", PAGE.read_text(), re.MULTILINE)
    return [shlex.split(line, comments=True) for line in lines]


@pytest.mark.long
def test_the_policy_preempts_less_than_plain_vllm_in_the_simulations_of_the_page() -> None:
    shown = [argv[2:] for argv in commands("sluice simulate")]
    assert len(shown) == 5
    default, stock, own, more, ordered = (simulated(*argv) for argv in shown)
    assert {each["requests"] for each in (default, stock, own, more, ordered)} == {2000}
    assert stock["preemptions"] > 10 * own["preemptions"] > 10 * more["preemptions"]
    assert own["output_tokens_per_s"] > stock["output_tokens_per_s"] > more["output_tokens_per_s"]
    assert ordered != simulated("--slots", "16")


def test_the_policy_is_under_contract_by_the_command_of_the_page() -> None:
    ((assignment, program, *argv),) = commands("pytest")
    name, _, value = assignment.partition("=")
    env = {
        **os.environ,
        name: value,
        "PYTHONPATH": os.pathsep.join((str(REPOSITORY), str(Path("keep-free").resolve()))),
    }
    command = [sys.executable, "-m", program, *argv, "-p", "no:cacheprovider"]
    ran = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert ran.returncode == 0, ran.stdout
    passed = re.search(r"(\d+) passed", ran.stdout)
    assert passed and int(passed[1]) > 10


def test_the_package_can_be_installed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(command, cwd=write(tmp_path), capture_output=True, timeout=300, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert "keep_free.py" in zipfile.ZipFile(wheel).namelist()


def test_the_served_settings_are_valid_and_a_slip_is_said_before_anything_starts() -> None:
    ((*command, file),) = commands("sluice serve")
    made = cli.app_config(cli.parse([*command[1:], file]))
    assert (made.engine.scheduler.policy, made.engine.scheduler.policy_args) == (POLICY, {"fraction": 0.1})
    Path(file).write_text(Path(file).read_text().replace("keep_free:", "kept_free:"))
    with pytest.raises(ConfigError, match=r"engine\.scheduler.*No module named 'kept_free'"):
        cli.app_config(cli.parse([*command[1:], file]))


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--batch", ORDER), "no method plan and no method observe"),
        (("--order", POLICY), "no method key"),
        (("--batch", POLICY, "--batch-args", "{fraction: 1}"), "--batch-args must be JSON"),
        (("--batch", POLICY, "--batch-args", "0.2"), "--batch-args must be a JSON object"),
        (("--batch", POLICY, "--batch-args", '{"part": 1}'), "part"),
        (("--order-args", '{"s_per_1000_tokens": 2}'), "--order-args needs --order"),
    ],
)
def test_what_cannot_be_simulated_is_refused(argv: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        simulated(*argv)


def test_rules_of_the_registry_take_settings_too() -> None:
    few = ("--requests", "200", "--cache-tokens", "20000", "--arrivals", "poisson:20", "--batch", "memory_aware")
    assert simulated(*few) != simulated(*few, "--batch-args", '{"overflow_probability": 0.4}')
