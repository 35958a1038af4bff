"""Requests that come together are made ready to be queued in order, some at a time, and not all at once.

A prompt is parsed, rendered and tokenized in several pieces with short waits between them. On one event loop the pieces
of sixty-four prompts take turns, so that the first is queued about when the last one is. In order, engines read the
first while the others are made ready, and the mean of them is ready in half the time.
"""

import asyncio

# While some wait for a tokenizer's thread or for Redis, others are made ready, and those that are ready together share
# a call of Redis: fewer cost more CPU, more come later.
AT_ONCE = 8
MOST_S = 0.025  # after which one that takes its time (a long prompt, an image to fetch) holds up the others no longer


class Place:
    """Of a request that is made ready; it ends by itself after MOST_S."""

    def __init__(self, places: asyncio.Semaphore) -> None:
        self._places, self._has_ended = places, False
        self._timer = asyncio.get_running_loop().call_later(MOST_S, self.end)

    def end(self) -> None:
        """Once the request is queued, or is over; again changes nothing."""
        if not self._has_ended:
            self._has_ended = True
            self._timer.cancel()
            self._places.release()


class InOrder:
    """In the order in which they come, AT_ONCE at a time."""

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(AT_ONCE)

    async def begin(self) -> Place:
        """Once it is this request's turn; every one before it has MOST_S at most."""
        await self._places.acquire()
        return Place(self._places)
