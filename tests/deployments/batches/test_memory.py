"""What runs batches needs no more memory for many requests than for few."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
REPOSITORY = Path(__file__).parents[3]
MOST_BYTES = 48 << 20  # bounds of run.py, and what Python makes of lines and answers while it has them


def peak_bytes(requests: int) -> int:
    command = [sys.executable, "-m", "tests.deployments.batches.peak", str(requests)]
    return int(subprocess.run(command, cwd=REPOSITORY, capture_output=True, check=True, timeout=600).stdout)


@pytest.mark.long
def test_a_hundred_times_as_many_requests_take_no_more_memory() -> None:
    assert peak_bytes(100_000) - peak_bytes(1_000) < MOST_BYTES
