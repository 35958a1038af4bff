"""These tests are collected for `-m long` alone, and not where no new machine can be made; a warning says why."""

from pathlib import Path

import pytest

from tests.fresh.machine import DEBIANS, why_there_is_none


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if not collection_path.name.startswith("test_"):
        return None
    if config.option.markexpr != "long":
        return True
    why = why_there_is_none(list(DEBIANS))
    if why is not None:
        config.issue_config_time_warning(UserWarning(f"{collection_path.name} is left out: {why}"), stacklevel=2)
    return why is not None or None
