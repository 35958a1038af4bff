"""The bench of the scheduler's modes: its plan, and two loads with real engines one after the other."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.deployments import test_modes_on_this_machine as modes
from bench.deployments.test_modes_on_this_machine import Load
from deployments.config.scheduler import SchedulerSettings

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize("name", [*modes.MODES, *modes.TIGHT])
def test_every_mode_is_one_that_the_scheduler_takes(name: str) -> None:
    mode = (modes.MODES | modes.TIGHT)[name]
    given = {key: value for key, value in (modes._FRESH | mode).items() if key not in ("watermark", "profile")}
    assert SchedulerSettings().changed(given).mode == mode["mode"]


def load(*loads_left: int) -> Load:
    return Load("load", {}, 8, 16, {}, loads_left)


def test_starts_of_engines_count_into_the_time_and_the_rest_is_shared_by_weight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(modes, "BEGAN", 1000.0)
    monkeypatch.setattr(modes, "SECONDS", 400.0)
    # Of 400 s the first engine has started after 50; two more starts leave 250.
    assert load(1, 3, 1).ends_s(1050.0, 50.0) == 1050.0 + 250.0 / 5
    assert load(3, 1).ends_s(1150.0, 50.0) == 1150.0 + 200.0 * 3 / 4
    assert load(1).ends_s(1350.0, 50.0) == 1400.0


def test_a_load_for_which_no_time_is_left_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modes, "BEGAN", 1000.0)
    monkeypatch.setattr(modes, "SECONDS", 100.0)
    assert load(1, 1).ends_s(1090.0, 60.0) == 1090.0


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_each_load_has_an_engine_in_a_process_of_its_own(tmp_path: Path) -> None:
    least = {"SECONDS": "1", "REPEATS": "1", "SLOTS": "2 3", "REQUESTS": "2", "SCALE": "0.1", "OUT": str(tmp_path)}
    env = {**os.environ, **{f"SLUICE_BENCH_{name}": value for name, value in least.items()}}
    pytest_of_it = [sys.executable, "-m", "pytest", str(modes.__file__), "-s", "-k", "room", "-p", "no:cacheprovider"]
    done = subprocess.run(pytest_of_it, cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    engines = re.findall(r"(\d) slots, \d clients: an engine in process (\d+)", done.stderr)
    assert [slots for slots, _ in engines] == ["2", "3"]
    assert len({process for _, process in engines}) == 2
    written = (tmp_path / "modes.md").read_text()
    assert "## 2 slots, 4 clients" in written and "## 3 slots, 6 clients" in written
