"""How many requests of batches may be in flight to one model, and which batch sends the next one."""

import asyncio
from collections import Counter

from policies.batches.in_flight import InFlight
from policies.batches.turns import Waiting, choose


class Places:
    """Places for the requests of batches to one model.

    Attributes:
        in_flight: requests that have a place.
    """

    def __init__(self, policy: InFlight) -> None:
        self.policy = policy
        self._of_keys: Counter[str] = Counter()
        self._waiting: dict[Waiting, asyncio.Future[None]] = {}
        self._is_filling = False

    @property
    def in_flight(self) -> int:
        return self._of_keys.total()

    async def take(self, batch: Waiting) -> None:
        """Returns when it is the batch's turn, which then has one more place; a batch waits for one at a time."""
        self._waiting[batch] = turn = asyncio.get_running_loop().create_future()
        try:
            self.fill()
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it was given one in the same moment
                self.give_back(batch)
            raise
        finally:
            self._waiting.pop(batch, None)

    def give_back(self, batch: Waiting) -> None:
        self._of_keys[batch.key] -= 1
        self.fill()

    def fill(self) -> None:
        """Give away the free places soon; to be called when the limit has grown."""
        if not self._is_filling:
            self._is_filling = True
            asyncio.get_running_loop().call_soon(self._fill)

    def _fill(self) -> None:
        """Give each key one place at a time: a batch asks for its next only after it was given one, and would find them
        all taken by a key with many batches."""
        self._is_filling = False
        served = set[str]()
        while self.in_flight < self.policy.limit:
            asking = [each for each, turn in self._waiting.items() if each.key not in served and not turn.done()]
            if not asking:
                break
            chosen = choose(asking, self._of_keys)
            served.add(chosen.key)
            self._of_keys[chosen.key] += 1
            self._waiting.pop(chosen).set_result(None)
        if served and self._waiting:
            self.fill()
