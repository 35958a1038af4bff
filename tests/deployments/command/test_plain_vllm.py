"""What the baseline is started as, for each build of vLLM, and the folder from which its Python imports."""

import json
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from deployments.command.plain_vllm import _own_folder
from deployments.process.vllm_env import cpu_env
from policies.errors import ConfigError
from tests.builds import install_build

REPOSITORY = Path(__file__).parents[3]
# In the place of vLLM's command, as only one build is installed here: says how it was started.
COMMAND = "import json, os, sys; print(json.dumps({'argv': sys.argv[1:], 'environment': dict(os.environ)}))"


def started(folder: Path, *arguments: str) -> dict[str, Any]:
    """What `python -m deployments.plain_vllm` starts, where Python looks into this folder first."""
    command = folder / "vllm" / "entrypoints" / "cli"
    command.mkdir(parents=True)
    for package in (command, *command.parents[:2]):  # the real one would go before a folder without
        (package / "__init__.py").touch()
    (command / "main.py").write_text(COMMAND)
    set_by_tests = cpu_env().keys()
    own = {name: value for name, value in os.environ.items() if name not in set_by_tests and name[:5] != "VLLM_"}
    path = f"{folder}:{REPOSITORY}"
    env = {**own, "PYTHONPATH": path, "TMPDIR": str(folder), "OMP_NUM_THREADS": "7", "CUDA_HOME": str(folder)}
    launcher = [sys.executable, "-m", "deployments.plain_vllm", *arguments]
    done = subprocess.run(launcher, env=env, capture_output=True, text=True, timeout=120, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["argv"] == ["serve", *arguments]
    return found["environment"] | {"PYTHONPATH": found["environment"]["PYTHONPATH"].removesuffix(path)}


def test_on_gpus_it_runs_as_a_replica_does_there(tmp_path: Path) -> None:
    install_build(tmp_path, "0.32.0")
    environment = started(tmp_path, "model", "--port=1", "--enforce-eager")
    assert not cpu_env(eager=True).keys() & environment.keys()
    assert (environment["VLLM_USE_FLASHINFER_SAMPLER"], environment["PYTHONPATH"]) == ("0", "")


@pytest.mark.parametrize("build", [None, "0.32.0+cpu"])
def test_on_cpus_it_runs_as_a_replica_does_there(build: str | None, tmp_path: Path) -> None:
    if build:
        install_build(tmp_path, build)
    environment = started(tmp_path, "model", "--port=1", "--enforce-eager")
    assert cpu_env(eager=True).items() <= environment.items()
    assert "VLLM_USE_FLASHINFER_SAMPLER" not in environment
    # Only a build that is not named vllm needs a distribution of that name.
    assert environment["PYTHONPATH"] == ("" if build else f"{tmp_path}/plain-vllm-{os.getuid()}:")


@pytest.mark.long
@pytest.mark.slow
def test_the_command_of_the_build_installed_here_starts() -> None:
    launcher = [sys.executable, "-m", "deployments.plain_vllm", "--help"]
    done = subprocess.run(launcher, cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=True)
    assert "vllm serve [model_tag] [options]" in done.stdout


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"plain-vllm-{os.getuid()}"


def test_it_is_this_user_s_alone_and_found_again(folder: Path) -> None:
    assert _own_folder() == _own_folder() == folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o720, 0o702])
def test_it_is_refused_where_others_may_write(folder: Path, mode: int) -> None:
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(ConfigError, match="plain-vllm"):
        _own_folder()


def test_a_link_and_a_folder_of_another_user_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = folder.with_name("elsewhere")
    elsewhere.mkdir(mode=0o700)
    folder.symlink_to(elsewhere)
    with pytest.raises(ConfigError):
        _own_folder()
    folder.unlink()
    folder.mkdir(mode=0o700)
    other = os.getuid() + 1
    folder.rename(folder.with_name(f"plain-vllm-{other}"))
    monkeypatch.setattr(os, "getuid", lambda: other)
    with pytest.raises(ConfigError):
        _own_folder()
