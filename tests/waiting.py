"""Waiting for what other tasks or processes do."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

PATIENCE_S = 60.0  # a bound for waits that are short unless the machine is busy


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            if condition():
                return
            await asyncio.sleep(0.005)


def wait_until(condition: Callable[[], Any], timeout_s: float, what: str) -> Any:
    """Looks ever more seldom: a look may cost what is waited for a part of the machine.

    And once more when the time is over: this process may have stood still for all of it.
    """
    began_s = time.monotonic()
    while True:
        waited_s = time.monotonic() - began_s
        if result := condition():
            return result
        assert waited_s < timeout_s, f"not within {timeout_s} s: {what}"
        time.sleep(min(0.5, 0.05 + waited_s / 20))


async def until_async(condition: Callable[[], Awaitable[bool]]) -> None:
    """As `until`, where to look takes a call."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            if await condition():
                return
            await asyncio.sleep(0.01)
