"""How long an event loop stands still."""

import asyncio
from collections.abc import Callable

LOOK_S = 0.05


async def look_for_lag(observe: Callable[[float], object]) -> None:
    """One look: by how many seconds a wait of LOOK_S ends late."""
    loop = asyncio.get_running_loop()
    due_s = loop.time() + LOOK_S
    await asyncio.sleep(LOOK_S)
    observe(max(0.0, loop.time() - due_s))
