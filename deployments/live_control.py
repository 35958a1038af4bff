"""Live control: settings of the engines' schedulers that change while they serve, for all replicas of a model.

What one replica was told is kept in the shared state, and every other takes it over at its next heartbeat, also one
that comes later. It holds for replicas that were configured alike: a redeploy with other settings begins with those,
and one with the settings of before finds what was changed under them.
"""

import hashlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from deployments.scheduler_settings import SchedulerSettings
from router.state_store import StateStore


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
        self._configured = hashlib.sha256(repr(settings).encode()).hexdigest()[:12]
        self._taken_over: dict[str, bytes] = {}

    async def change(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Of this replica at once, and of the others soon; returns the settings in force here.

        Raises:
            Exception: with the engine's words, when a setting is wrong; nobody is told of any then.
            StateStoreError: the others are not told.
        """
        packed = {name: msgspec.json.encode(value) for name, value in changes.items()}
        in_force = await self._control(dict(changes))
        self._taken_over |= packed
        if packed:
            await self._store.change_settings(self._configured, packed)
        return in_force

    async def follow(self) -> None:
        """Take over what others were told. Raises as `change` does, once for each change that this engine refuses."""
        told = await self._store.changed_settings(self._configured)
        new = {name: value for name, value in told.items() if self._taken_over.get(name) != value}
        if new:
            self._taken_over |= new
            await self._control({name: msgspec.json.decode(value) for name, value in new.items()})
