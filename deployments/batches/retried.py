"""Calls of the folder that go on until they succeed: what engines have computed is kept meanwhile."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0  # each pause is twice the one before


class Retried:
    """The calls of one batch.

    Attributes:
        is_well: set while no call waits for its next try.
    """

    def __init__(self, batch_id: str) -> None:
        self._batch_id = batch_id
        self._troubles: dict[object, str] = {}
        self.is_well = asyncio.Event()
        self.is_well.set()

    @property
    def trouble(self) -> str | None:
        """Why the oldest of the calls that wait has failed."""
        return next(iter(self._troubles.values()), None)

    async def __call__(self, call: Callable[..., Any], *args: Any) -> Any:
        """The result of a call that blocks, and that may be made twice. Raises what is no matter of time."""
        this, pause_s = object(), FIRST_PAUSE_S
        try:
            while True:
                try:
                    return await asyncio.to_thread(call, *args)
                except FileNotFoundError:  # trying again would find the same
                    raise
                except OSError as error:
                    logger.warning("%s: the folder fails, again in %g s", self._batch_id, pause_s, exc_info=error)
                    self._troubles[this] = f"the folder of batches fails: {_in_words(error)}"
                    self.is_well.clear()
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        finally:
            self._troubles.pop(this, None)
            if not self._troubles:
                self.is_well.set()


def _in_words(error: OSError) -> str:
    """Without paths, which are the operator's."""
    return error.strerror or type(error.__cause__ or error).__name__
