"""`sluice serve` with arguments that vLLM does not have: found out before anything starts."""

import subprocess
from pathlib import Path

import pytest
import yaml

from deployments.process.ports import free_port
from tests.integration.application import SLUICE

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


@pytest.mark.parametrize("by_file", [True, False])
def test_wrong_vllm_arguments_are_named_and_nothing_starts(tmp_path: Path, by_file: bool) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump({"vllm_args": ["--no-such-argument"]}))
    given = ["--config", str(file)] if by_file else ["--", "--no-such-argument"]
    wrong = subprocess.run(
        [SLUICE, "serve", "--port", str(free_port()), *given],
        capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert wrong.returncode == 1
    assert "sluice: vllm_args: unrecognized arguments: --no-such-argument" in wrong.stderr
    assert "Traceback" not in wrong.stderr
    assert "starting Ray" not in wrong.stderr
