"""These tests are not collected where no new machine can be made; a warning says why."""

from pathlib import Path

import pytest

from tests.fresh.machine import why_there_is_none
from tests.fresh.suites import SUITES


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    asked = not any(f"not {mark}" in config.option.markexpr for mark in ("long", "slow"))
    if not asked or not collection_path.name.startswith("test_"):
        return None
    why = why_there_is_none(list(SUITES))
    if why is not None:
        config.issue_config_time_warning(UserWarning(f"{collection_path.name} is left out: {why}"), stacklevel=2)
    return why is not None or None
