"""Waiting for what other tasks do."""

import asyncio
from collections.abc import Callable

PATIENCE_S = 60.0  # a bound for waits that are short unless the machine is busy


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            if condition():
                return
            await asyncio.sleep(0.005)
