"""An engine is told of changed settings once, and again after a while where it has refused them."""

from typing import Any

import pytest

from deployments.serving import engine_settings
from deployments.serving.engine_settings import EngineSettings
from policies.errors import ConfigError

BEGUN = {"mode": "auto"}


class Engine:
    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []
        self.refuses = False

    async def control(self, changes: dict[str, Any]) -> dict[str, Any]:
        self.told.append(changes)
        if self.refuses:
            raise ConfigError("not now")
        return changes


async def test_an_engine_is_told_what_is_new_once_and_nothing_where_it_has_no_scheduler_of_ours() -> None:
    engine = Engine()
    settings = EngineSettings(BEGUN, engine.control)
    for told in (BEGUN, {"mode": "mixed"}, {"mode": "mixed"}, BEGUN):
        await settings.follow(told)
    await EngineSettings(None, engine.control).follow(None)
    assert engine.told == [{"mode": "mixed"}, BEGUN]


async def test_settings_that_an_engine_refuses_are_tried_again_not_at_every_heartbeat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine()
    settings, engine.refuses = EngineSettings(BEGUN, engine.control), True
    with pytest.raises(ConfigError, match="not now"):
        await settings.follow({"mode": "mixed"})
    engine.refuses = False
    await settings.follow({"mode": "mixed"})
    assert len(engine.told) == 1
    monkeypatch.setattr(engine_settings, "RETRY_S", 0.0)
    await settings.follow({"mode": "exclusive"})  # others are tried at once
    await settings.follow({"mode": "mixed"})
    assert engine.told[1:] == [{"mode": "exclusive"}, {"mode": "mixed"}]
