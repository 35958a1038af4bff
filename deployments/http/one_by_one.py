"""Requests that come together are made ready to be queued one after another, and not all at once.

A prompt is parsed, rendered and tokenized in several pieces with short waits between them. On one event loop the pieces
of sixteen prompts take turns, so that the first is queued about when the last one is. One after another, engines read
the first while the others are made ready, and the mean of them is ready in half the time.
"""

import asyncio

AT_ONCE = 2  # while one waits for a tokenizer's thread or for Redis, another is made ready
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


class OneByOne:
    """In the order in which they come."""

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(AT_ONCE)

    async def begin(self) -> Place:
        """Once it is this request's turn; every one before it has MOST_S at most."""
        await self._places.acquire()
        return Place(self._places)
