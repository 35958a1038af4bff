"""vLLM's arguments checked beside a start; what a refusal looks like is asked of the whole command."""

import sys

import psutil
import pytest

from deployments.command.args_check import checking
from policies.errors import ConfigError


def test_a_check_that_dies_is_no_consent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with checking(["--model", "m"]) as outcome, pytest.raises(ConfigError, match="could not be checked"):
        outcome()


def test_nothing_is_left_of_a_check_that_nobody_waits_for() -> None:
    before = psutil.Process().children()
    with checking(["--model", "m"]):
        assert len(psutil.Process().children()) == len(before) + 1
    assert psutil.Process().children() == before
