"""The table of long suites: each long test is in one of them, and each is found by what it is about."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.suites import EVERYWHERE, ROOT, SUITES, UNITS_MINUTES, Suite, in_turn, pace, run, turned

LONG = re.compile(r"\bmark\.long\b")
HERE = Path(__file__)


def long_modules() -> list[str]:
    files = [path for path in sorted(HERE.parent.rglob("test_*.py")) if path != HERE]
    return [str(path.relative_to(ROOT)) for path in files if LONG.search(path.read_text())]


@pytest.mark.parametrize("module", long_modules())
def test_every_long_test_is_in_one_suite(module: str) -> None:
    runs = [suite.name for suite in SUITES if "long" in suite.options and module.startswith(suite.paths)]
    assert len(runs) == 1, f"{module} is in {runs}: see tests/suites.py"


@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.name)
def test_every_path_of_a_suite_is_there(suite: Suite) -> None:
    missing = [path for path in (*suite.paths, *suite.touched_by, *EVERYWHERE) if not (ROOT / path).exists()]
    assert not missing


@pytest.mark.parametrize("suite", [each for each in SUITES if "long" in each.options], ids=lambda suite: suite.name)
def test_every_suite_of_long_tests_has_some(suite: Suite) -> None:
    assert any(module.startswith(suite.paths) for module in long_modules())


@pytest.mark.parametrize("folder", ["policies", "predictor", "router", "deployments", "simulator", "bench", "k8s"])
def test_a_change_of_any_room_runs_a_suite(folder: str) -> None:
    for file in (ROOT / folder).rglob("*.py"):
        assert any(suite.is_touched([str(file.relative_to(ROOT))]) for suite in SUITES), file


def test_a_change_of_a_document_alone_runs_what_holds_documents() -> None:
    assert [suite.name for suite in SUITES if suite.is_touched(["docs/guides/classes.md"])] == ["benches"]
    assert all(suite.is_touched(["requirements/cpu-3.11.lock"]) for suite in SUITES)


def test_suites_that_share_the_machine_run_at_once() -> None:
    groups = list(in_turn(SUITES))
    assert [suite for group in groups for suite in group] == list(SUITES)
    assert all(suite.beside == (number > 0) for group in groups for number, suite in enumerate(group))


def test_each_suite_comes_first_in_its_turn() -> None:
    assert [turned(SUITES, by)[0].name for by in range(len(SUITES))] == [suite.name for suite in SUITES]
    assert sorted(suite.name for suite in turned(SUITES, 10**6 + 1)) == sorted(suite.name for suite in SUITES)
    assert turned((), 3) == []


def test_the_pace_is_what_the_units_took_here(tmp_path: Path) -> None:
    assert pace(tmp_path) == 1.0
    (tmp_path / "units").write_text(f"{3 * UNITS_MINUTES} 1288 passed")
    assert pace(tmp_path) == 3.0
    (tmp_path / "units").write_text("0.1 12 failed")
    assert pace(tmp_path) == 1.0


def test_what_would_end_too_late_is_named_and_does_not_begin(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.suites.STAGE", ("echo", "ran"))
    short, long = (replace(SUITES[0], name=name, minutes=minutes) for name, minutes in (("short", 1e-3), ("long", 1e3)))
    assert run([long, short], minutes=60.0) == []
    printed = capfd.readouterr().out
    assert "no time left for: python -m tests.suites long" in printed
    assert "ran short" in printed and "ran long" not in printed
    assert run([long]) == [] and "ran long" in capfd.readouterr().out
