"""Live control: settings of the engines' schedulers that change while they serve, for all replicas of a model.

What one replica was told is kept in the shared state, and every other takes it over at its next heartbeat, also one
that comes later. A shared state that has lost it is told again. It holds for replicas that were configured alike: a
redeploy with other settings begins with those, and one with the settings of before finds what was changed under them.
"""

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from deployments.scheduler_settings import SchedulerSettings
from policies.errors import StateStoreError
from router.state_store import StateStore

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
        self._begun_with = {} if settings is None else settings.model_dump(mode="json")
        self._configured = hashlib.sha256(repr(settings).encode()).hexdigest()[:12]
        self._taken_over: dict[str, bytes] = {}
        self._refused: dict[str, bytes] = {}
        self._retry_s = 0.0
        self._one_at_a_time = asyncio.Lock()

    async def change(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Of this replica at once, and of the others soon; returns the settings in force here.

        Raises:
            Exception: with the engine's words, when a setting is wrong; nobody is told of any then.
            StateStoreError: the others cannot be told, and this replica has gone back to what it had.
        """
        packed = {name: msgspec.json.encode(value) for name, value in changes.items()}
        async with self._one_at_a_time:
            in_force = await self._control(dict(changes))
            if not packed:
                return in_force
            try:
                await self._store.change_settings(self._configured, packed)
            except (StateStoreError, asyncio.CancelledError):  # else it alone would go by them
                await self._control({name: self._before(name) for name in changes})
                raise
            self._taken_over |= packed
            return in_force

    def _before(self, name: str) -> Any:
        packed = self._taken_over.get(name)
        return self._begun_with[name] if packed is None else msgspec.json.decode(packed)

    async def follow(self) -> None:
        """Take over what others were told, and tell the shared state what it has lost.

        Raises as `change` does, once in RETRY_S for a change that this engine refuses.
        """
        async with self._one_at_a_time:
            told = await self._store.changed_settings(self._configured)
            lost = {name: value for name, value in self._taken_over.items() if name not in told}
            if lost:
                await self._store.change_settings(self._configured, lost)
            await self._take_over({name: value for name, value in told.items() if self._taken_over.get(name) != value})

    async def _take_over(self, new: dict[str, bytes]) -> None:
        if not new or (new == self._refused and time.monotonic() < self._retry_s):
            return
        try:
            await self._control({name: msgspec.json.decode(value) for name, value in new.items()})
        except Exception:
            self._refused, self._retry_s = new, time.monotonic() + RETRY_S
            raise
        self._taken_over |= new
