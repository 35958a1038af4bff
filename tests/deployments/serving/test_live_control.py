"""What one engine's scheduler was told reaches the schedulers of all replicas that are configured alike."""

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import pytest

from deployments.config.scheduler import SchedulerSettings
from deployments.serving import live_control
from deployments.serving.live_control import LiveControl
from policies.errors import ConfigError, StateStoreError
from router.memory_store import MemoryStateStore
from tests.waiting import until

CONFIGURED = SchedulerSettings(max_batch_size=64)


class Replica:
    """An engine that checks what it is told as the scheduler does, and knows no classes but its own."""

    def __init__(self, store: MemoryStateStore, configured: SchedulerSettings = CONFIGURED, *classes: str) -> None:
        self.settings, self.told, self.refuses, self._classes = configured, 0, False, classes
        self.live = LiveControl(store, configured, self._control)

    async def _control(self, changes: dict[str, Any]) -> dict[str, Any]:
        self.told += 1
        if self.refuses:
            raise ConfigError("not now")
        settings = self.settings.changed(changes)
        if unknown := set(settings.classes) - set(self._classes):
            raise ConfigError(f"no such classes: {unknown}")
        self.settings = settings
        return settings.model_dump(mode="json")


@pytest.fixture
def store() -> MemoryStateStore:
    return MemoryStateStore(time.monotonic)


async def test_all_replicas_take_over_what_one_was_told_and_so_does_a_later_one(store: MemoryStateStore) -> None:
    first, second = Replica(store), Replica(store)
    assert (await first.live.change({"mode": "mixed", "tpot_s": 0.05}))["mode"] == "mixed"
    await second.live.follow()
    await second.live.change({"tpot_s": None})
    await first.live.follow()
    later = Replica(store)
    await later.live.follow()
    wanted = CONFIGURED.changed({"mode": "mixed"})
    assert [each.settings for each in (first, second, later)] == [wanted] * 3


async def test_a_change_of_nothing_tells_the_settings_in_force(store: MemoryStateStore) -> None:
    assert await Replica(store).live.change({}) == CONFIGURED.model_dump(mode="json")


async def test_what_has_not_changed_is_told_once(store: MemoryStateStore) -> None:
    first, second = Replica(store), Replica(store)
    await first.live.change({"mode": "mixed"})
    for _ in range(3):
        await first.live.follow()
        await second.live.follow()
    assert (first.told, second.told) == (1, 1)


@pytest.mark.parametrize("wrong", [{"mode": "fast"}, {"speed": 11}, {"mode": "mixed", "refill": 0}])
async def test_what_is_wrong_is_refused_at_the_door_and_told_to_nobody(
    store: MemoryStateStore, wrong: dict[str, Any]
) -> None:
    first, second = Replica(store), Replica(store)
    with pytest.raises(ConfigError, match=next(reversed(wrong))):
        await first.live.change(wrong)
    await second.live.follow()
    assert (first.settings, second.settings, second.told) == (CONFIGURED, CONFIGURED, 0)


async def test_what_one_engine_alone_refuses_is_said_once(store: MemoryStateStore) -> None:
    first, second = Replica(store, CONFIGURED, "chat"), Replica(store)
    await first.live.change({"classes": ["chat"]})
    with pytest.raises(ConfigError, match="chat"):
        await second.live.follow()
    await second.live.follow()
    assert second.told == 1


async def test_what_one_engine_will_never_take_keeps_nothing_else_out(store: MemoryStateStore) -> None:
    first, second = Replica(store, CONFIGURED, "chat"), Replica(store)
    await first.live.change({"classes": ["chat"]})
    await first.live.change({"mode": "mixed"})
    with pytest.raises(ConfigError, match="chat"):
        await second.live.follow()
    assert second.settings.mode == "mixed"
    await first.live.change({"tpot_s": 0.05})
    await second.live.follow()
    assert second.settings == CONFIGURED.changed({"mode": "mixed", "tpot_s": 0.05})


async def test_what_an_engine_refused_is_taken_over_once_it_can_be(
    store: MemoryStateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Replica(store), Replica(store)
    second.refuses = True
    await first.live.change({"mode": "mixed"})
    with pytest.raises(ConfigError, match="not now"):
        await second.live.follow()
    second.refuses = False
    await second.live.follow()
    assert second.settings == CONFIGURED, "not at every heartbeat"
    monkeypatch.setattr(live_control, "RETRY_S", 0.0)
    second.refuses = True
    await first.live.change({"tpot_s": 0.05})  # something else is asked for at once
    with pytest.raises(ConfigError, match="not now"):
        await second.live.follow()
    second.refuses = False
    await second.live.follow()
    assert second.settings == first.settings == CONFIGURED.changed({"mode": "mixed", "tpot_s": 0.05})


async def test_what_the_shared_state_has_lost_it_is_told_again(store: MemoryStateStore) -> None:
    first, second = Replica(store), Replica(store)
    await first.live.change({"mode": "mixed"})
    await second.live.follow()
    store._settings.clear()
    await second.live.follow()
    later = Replica(store)
    await later.live.follow()
    assert later.settings.mode == "mixed"


class ChangedMeanwhile(MemoryStateStore):
    """Somebody changes a setting between another's reading and its writing."""

    meanwhile: Mapping[str, bytes] = {}

    async def changed_settings(self, configured: str) -> dict[str, bytes]:
        found = await super().changed_settings(configured)
        await self.change_settings(configured, self.meanwhile)
        return found


async def test_what_was_changed_while_it_was_lost_is_not_written_over() -> None:
    store = ChangedMeanwhile(time.monotonic)
    replica = Replica(store)
    await replica.live.change({"mode": "mixed", "tpot_s": 0.05})
    store._settings.clear()
    store.meanwhile = {"mode": b'"exclusive"'}
    await replica.live.follow()
    later = Replica(store)
    for each in (replica, later):
        await each.live.follow()
        assert each.settings == CONFIGURED.changed({"mode": "exclusive", "tpot_s": 0.05})


class Away(MemoryStateStore):
    """A shared state that takes no changes, and maybe never says so."""

    hangs = False

    async def change_settings(self, configured: str, changes: Mapping[str, bytes]) -> None:
        if self.hangs:
            await asyncio.Event().wait()
        raise StateStoreError("no answer")


async def test_what_the_others_cannot_be_told_does_not_stay_here(store: MemoryStateStore) -> None:
    away = Away(time.monotonic)
    replica = Replica(away)
    replica.live._store = store
    await replica.live.change({"mode": "mixed"})
    replica.live._store = away
    before = replica.settings
    with pytest.raises(StateStoreError, match="no answer"):
        await replica.live.change({"mode": "exclusive", "max_batch_size": 3, "tpot_s": 0.05})
    assert replica.settings == before
    away.hangs = True
    changing = asyncio.create_task(replica.live.change({"mode": "exclusive"}))
    await until(lambda: replica.settings.mode == "exclusive")
    changing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await changing
    assert replica.settings == before


async def test_a_change_that_is_cancelled_while_the_engine_takes_it_does_not_stay(store: MemoryStateStore) -> None:
    replica = Replica(store)
    told, answers = asyncio.Event(), asyncio.Event()

    async def slow(changes: dict[str, Any]) -> dict[str, Any]:
        in_force = await replica._control(changes)
        told.set()
        await answers.wait()
        return in_force

    live = LiveControl(store, CONFIGURED, slow)
    changing = asyncio.create_task(live.change({"mode": "mixed"}))
    await told.wait()
    changing.cancel()
    answers.set()
    with pytest.raises(asyncio.CancelledError):
        await changing
    assert replica.settings == CONFIGURED


async def test_a_redeploy_with_other_settings_begins_with_those(store: MemoryStateStore) -> None:
    await Replica(store).live.change({"mode": "mixed"})
    redeployed = Replica(store, SchedulerSettings(max_batch_size=32))
    await redeployed.live.follow()
    assert (redeployed.settings.mode, redeployed.told) == ("auto", 0)


async def test_other_settings_by_configuration_begin_anew_and_those_of_before_find_what_was_changed(
    store: MemoryStateStore,
) -> None:
    replica, other = Replica(store), Replica(store)
    await replica.live.change({"mode": "mixed"})
    live = {name: value for name, value in CONFIGURED.changed({"tpot_s": 0.05}).model_dump(mode="json").items()}
    live = {name: value for name, value in live.items() if name in SchedulerSettings.live_keys()}
    for each in (replica, other):
        await each.live.follow(live)
        assert each.settings == CONFIGURED.changed({"tpot_s": 0.05}), "what was changed was under other settings"
    await other.live.change({"mode": "exclusive"})
    await replica.live.follow(live)
    assert replica.settings.mode == "exclusive"
    await replica.live.follow({**live, "tpot_s": None})
    assert replica.settings == CONFIGURED.changed({"mode": "mixed"})


async def test_settings_that_an_engine_refuses_are_tried_again_not_at_every_heartbeat(
    store: MemoryStateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = Replica(store)
    replica.refuses = True
    with pytest.raises(ConfigError, match="not now"):
        await replica.live.follow({"mode": "mixed"})
    replica.refuses = False
    await replica.live.follow({"mode": "mixed"})
    assert (replica.settings, replica.told) == (CONFIGURED, 1)
    monkeypatch.setattr(live_control, "RETRY_S", 0.0)
    await replica.live.follow({"tpot_s": 0.05})  # others are tried at once
    await replica.live.follow({"mode": "mixed", "tpot_s": None})
    assert replica.settings == CONFIGURED.changed({"mode": "mixed"})
