"""Settings of one engine's scheduler that change while it serves."""

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

RETRY_S = 60.0  # an engine that has refused settings is not asked again at every heartbeat


class EngineSettings:
    """Hands them to the engine between two of its steps."""

    def __init__(
        self,
        begun: Mapping[str, Any] | None,
        control: Callable[[dict[str, Any]], Awaitable[None]],
    ) -> None:
        """Args:
        begun: those that it began with; None where it has no scheduler of ours.
        control: changes the engine's.
        """
        self._in_force, self._control = begun, control
        self._refused: Mapping[str, Any] | None = None
        self._again_s = 0.0

    async def follow(self, settings: Mapping[str, Any] | None) -> None:
        """Put these in force, where they are others.

        Raises:
            Exception: the engine's, which refuses them; once in RETRY_S for the same settings.
        """
        is_refused = settings == self._refused and time.monotonic() < self._again_s
        if settings is None or settings == self._in_force or is_refused:
            return
        self._refused, self._again_s = settings, time.monotonic() + RETRY_S
        await self._control(dict(settings))
        self._in_force = settings
