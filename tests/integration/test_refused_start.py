"""`sluice serve` with arguments that vLLM does not have: found out while Ray starts."""

import subprocess
from pathlib import Path

import pytest

from deployments.process.environment import free_port
from tests.integration.application import SLUICE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_wrong_vllm_arguments_are_named(tmp_path: Path) -> None:
    wrong = subprocess.run(
        [SLUICE, "serve", "--port", str(free_port()), "--", "--no-such-argument"],
        capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert wrong.returncode == 1
    assert "sluice: vllm_args: unrecognized arguments: --no-such-argument" in wrong.stderr
    assert "Traceback" not in wrong.stderr
