"""One answer's account over its steps, and its picture."""

from pathlib import Path

import numpy as np
import pytest

from simulator.reproduce import account
from simulator.reproduce.__main__ import main

pytestmark = pytest.mark.long


def test_an_account_is_what_steps_leave_of_the_promise() -> None:
    made = account.Account(gap_s=np.array([0.02, 0.05, 0.02]), reads=np.array([False, True, False]), target_s=0.03)
    assert made.saved_s == pytest.approx([0.01, -0.01, 0.0])


def test_an_answer_that_kept_its_promise_ends_with_nothing_overdrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(account, "_REQUESTS", 200)
    kept = account._kept()
    assert kept
    assert all(each.saved_s[-1] >= 0.0 and len(each.gap_s) + 1 in account._TOKENS for each in kept)
    assert any(each.reads.any() and not each.reads.all() for each in kept)


def test_the_picture_is_the_same_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(account, "_REQUESTS", 200)
    for name in ("one", "two"):
        main(["account", "--figures", str(tmp_path / name)])
    assert "| promised, ms a token | 30.000 |" in capsys.readouterr().out
    one, two = ((tmp_path / name / "account.svg").read_text() for name in ("one", "two"))
    assert one == two and "overdrawn" in one
