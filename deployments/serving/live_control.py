"""Live control: settings of the engines' schedulers that change while they serve, for all replicas of a model.

What one replica was told is kept in the shared state, and every other takes it over at its next heartbeat, also one
that comes later. A shared state that has lost it is told again. It holds for replicas that are configured alike:
other settings, by a redeploy or a router's `user_config`, begin anew, and those of before find what was changed under
them.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from deployments.config.scheduler import SchedulerSettings
from policies.errors import StateStoreError
from router.state_store import StateStore

logger = logging.getLogger(__name__)

RETRY_S = 60.0  # an engine that has refused a change is not asked again at every heartbeat


class LiveControl:
    """One replica's part in it.

    `settings` are those that it was configured with, None without our scheduler; `control` changes its engine's.
    """

    def __init__(
        self,
        store: StateStore,
        settings: SchedulerSettings | None,
        control: Callable[[dict[str, Any]], Awaitable[dict[str, Any]]],
    ) -> None:
        self._store, self._control = store, control
        self._one_at_a_time = asyncio.Lock()
        self._other: SchedulerSettings | None = None  # that this engine was to begin anew with, the last time
        self._again_s = 0.0
        self._begin_with(settings)

    def _begin_with(self, settings: SchedulerSettings | None) -> None:
        self._settings = settings
        self._begun_with = {} if settings is None else settings.model_dump(mode="json")
        self._configured = hashlib.sha256(repr(settings).encode()).hexdigest()[:12]
        self._taken_over: dict[str, bytes] = {}
        self._refused: dict[str, bytes] = {}
        self._retry_s = 0.0

    async def _configure(self, live: Mapping[str, Any]) -> None:
        if self._settings is None:
            return
        settings = self._settings.changed(live)
        is_refused = settings == self._other and time.monotonic() < self._again_s
        if settings == self._settings or is_refused:
            return
        self._other, self._again_s = settings, time.monotonic() + RETRY_S
        await self._control(dict(live))
        self._begin_with(settings)

    async def change(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Change settings of this replica at once, and of the others soon; returns the settings in force here.

        Raises:
            Exception: with the engine's words, when a setting is wrong; no engine is told of any then.
            StateStoreError: the others cannot be told, and this replica has gone back to what it had.
        """
        packed = {name: msgspec.json.encode(value) for name, value in changes.items()}
        async with self._one_at_a_time:
            before = self._begun_with | {name: msgspec.json.decode(value) for name, value in self._taken_over.items()}
            try:
                in_force = await self._control(dict(changes))
                if packed:
                    await self._store.change_settings(self._configured, packed)
            except (StateStoreError, asyncio.CancelledError):  # else it alone would go by them
                await self._control({name: before[name] for name in changes if name in before})
                raise
            self._taken_over |= packed
            return in_force

    async def follow(self, live: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Take over what others were told, and tell the shared state what it has lost.

        Raises as `change` does, once in RETRY_S for what this engine refuses.

        Args:
            live: settings as they are configured now; begun with anew where one is another than before.
        """
        async with self._one_at_a_time:
            await self._configure(live)
            told = await self._store.changed_settings(self._configured)
            lost = {name: value for name, value in self._taken_over.items() if name not in told}
            if lost:
                await self._store.restore_settings(self._configured, lost)  # somebody may change them just now
            await self._take_over({name: value for name, value in told.items() if self._taken_over.get(name) != value})

    async def _take_over(self, new: dict[str, bytes]) -> None:
        known = self._refused if time.monotonic() < self._retry_s else {}
        new = {name: value for name, value in new.items() if known.get(name) != value}
        if not new:
            return
        try:
            await self._tell_engine(new)
        except Exception:
            refused = await self._refused_of(new)
            self._refused, self._retry_s = known | refused, time.monotonic() + RETRY_S
            if refused:
                raise

    async def _refused_of(self, new: dict[str, bytes]) -> dict[str, bytes]:
        """What the engine refuses also by itself. All together come first, for some are valid only so; but one that it
        will never take must not keep the others out."""
        if len(new) == 1:
            return new
        refused = {}
        for name, value in new.items():
            try:
                await self._tell_engine({name: value})
            except Exception as error:
                logger.warning("the engine refuses %s: %s", name, error)
                refused[name] = value
        return refused

    async def _tell_engine(self, new: dict[str, bytes]) -> None:
        await self._control({name: msgspec.json.decode(value) for name, value in new.items()})
        self._taken_over |= new
