"""Waiting for what other tasks or processes do."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

PATIENCE_S = 60.0  # a bound for waits that are short unless the machine is busy


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            if condition():
                return
            await asyncio.sleep(0.005)


def wait_until(condition: Callable[[], Any], timeout_s: float, what: str) -> Any:
    give_up_s = time.monotonic() + timeout_s
    while not (result := condition()):
        assert time.monotonic() < give_up_s, f"not within {timeout_s} s: {what}"
        time.sleep(0.05)
    return result
