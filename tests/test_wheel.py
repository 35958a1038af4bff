"""The package as it is installed: a wheel with all that serving reads."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("policies", "predictor", "router", "simulator", "deployments")
NOT_SHIPPED = {".pyc"}


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(command, cwd=ROOT, capture_output=True, timeout=300, check=True)
    (wheel,) = folder.glob("sluice_serve-*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def test_the_wheel_has_every_file_of_the_packages_and_no_other_folder(names: set[str]) -> None:
    files = (path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.is_file())
    here = {str(path.relative_to(ROOT)) for path in files if path.suffix not in NOT_SHIPPED}
    assert {name for name in names if ".dist-info/" not in name} == here


def test_the_wheel_has_what_is_no_module_but_is_read_when_it_serves(names: set[str]) -> None:
    read = {
        "deployments/http/page/index.html",
        "deployments/process/haproxy.sh",
        "deployments/demo_model/model.safetensors",
        "deployments/demo_model/chat_template.jinja",
        "predictor/day_0/model.safetensors",
        "router/lua/enqueue.lua",
        "simulator/data/step_times.csv",
    }
    assert read <= names
